# SPDX-License-Identifier: Apache-2.0
"""Sessions that run half-precision models in fp32: ONNX Runtime's CPU provider lacks most bf16 kernels and some fp16 ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from stof.execution.ort_sessions import Sessions, VerifiedSession
from stof.execution.upcast import Twins, TypedAttributes, widen_feeds


class WidenedSession:
    """A session of a model in fp32 that takes inputs of the half-precision one."""

    def __init__(self, session: VerifiedSession) -> None:
        self._session = session

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names."""
        return tuple(self._session.outputs)

    def run(self, outputs: Sequence[str] | None, feeds: Mapping[str, np.ndarray]) -> list[Any]:
        """The outputs of these names in fp32, by default all."""
        return list(self._session.run(list(self.outputs if outputs is None else outputs), widen_feeds(feeds)))


class WidenedSessions:
    """Makes such sessions; the models share a file of widened weights.

    Args:
        sessions: makes those of the widened models.
        typed: string attributes of stof's operators that name element types.
    """

    def __init__(self, sessions: Sessions, typed: TypedAttributes) -> None:
        self._sessions = sessions
        self._twins = Twins(sessions.weights, sessions.scratch, None, typed)

    def make(self, model: onnx.ModelProto | Path, *, optimized: bool, library: bool) -> WidenedSession:
        """As of ``Sessions``."""
        read = onnx.load(model, load_external_data=False) if isinstance(model, Path) else model
        return WidenedSession(self._sessions.make(self._twins.of(read), optimized=optimized, library=library))


def sessions_for(sessions: Sessions, typed_attributes: TypedAttributes | None) -> Sessions | WidenedSessions:
    """Sessions of models as they are; where attributes are given, of half-precision models in fp32."""
    return sessions if typed_attributes is None else WidenedSessions(sessions, typed_attributes)
