# SPDX-License-Identifier: Apache-2.0
"""Holds a model with run-time masks to what was verified: with these off it computes the same bits as without them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx

from stof.cached_attention.site import OP as CACHED
from stof.errors import UnsupportedError, VerifyError
from stof.execution.case import Padding
from stof.execution.ort_sessions import Sessions
from stof.execution.run_limits import LimitReached, RunLimits
from stof.execution.session_process import RuntimeFailure, session_environment
from stof.files import temporary_folder
from stof.graph.index import DOMAIN, all_nodes
from stof.prompt_runs.page_bounds import Feed, empty_bounds, find_bounds
from stof.verification.model_inputs import ModelInputs

_TOKENS = 4096.0
_MOST_CASES = 8  # that are tried until one runs
_LONGEST_REASON = 300


class SwitchedOffCheck:
    """Compares two models bit by bit under ``STOF_SKIP_SCORES=0``.

    Verification compares the model without run-time masks. What is written is the other one: this carries the comparison over.
    Caches are left out: rows behind the keys of a sequence are undefined.

    Args:
        exact: the model that was verified.
        changed: the same with thresholds, or with pages that are chosen.
        clauses: of --sparsify that changed it, for messages.
    """

    def __init__(self, exact: onnx.ModelProto, changed: onnx.ModelProto, clauses: str) -> None:
        self._exact, self._changed, self._clauses = exact, changed, clauses
        self._bounds = find_bounds(changed)

    def run(self, feeds: Iterable[Feed], source: Path, folder: Path, limits: RunLimits) -> str:
        """Runs both models on the first inputs that the verified one runs on.

        Args:
            feeds: sets of inputs without padding, whose rows an operator may leave undefined.
            source: the original's file, beside which external data lies.
            folder: for temporary files.
            limits: of the runs.

        Returns:
            Why nothing was compared; empty where outputs were.

        Raises:
            VerifyError: when outputs differ, the changed model does not run, or memory does not suffice.
        """
        reason, limit = "no inputs without padding can be drawn; --inputs FILE may give some", ""
        for feed in feeds:
            try:
                with temporary_folder(folder) as scratch, session_environment(STOF_SKIP_SCORES="0"):
                    sessions = Sessions(source.parent.resolve(), scratch, limits)
                    try:
                        expected = _run(sessions, self._exact, feed)
                    except RuntimeFailure as error:  # a window is longer than this cache, for instance
                        reason = f"the model without {self._clauses} does not run here: {str(error)[:_LONGEST_REASON]}"
                        continue
                    found = _run(sessions, self._changed, {**feed, **empty_bounds(self._bounds, feed)})
            except LimitReached as error:  # other inputs may be shorter
                limit = str(error)
                continue
            except RuntimeFailure as error:
                raise VerifyError(f"{self._clauses} could not be verified: {error}") from error
            self._compare(expected, found)
            return ""
        if limit:
            raise VerifyError(f"{self._clauses} could not be verified: {limit}")
        return reason

    def _compare(self, expected: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> None:
        caches = _find_caches(self._exact)
        for name, one in expected.items():
            other = found[name]
            if name in caches:
                continue
            if one.dtype != other.dtype or one.shape != other.shape or one.tobytes() != other.tobytes():
                raise self._error(f"output {name!r} is not that of the verified model under STOF_SKIP_SCORES=0")
        for layer in self._bounds:
            if not np.isfinite(found[layer.present][:, :, :1].astype(np.float32)).all():
                raise self._error(f"{layer.present!r} has bounds of page 0 that are not finite")

    def _error(self, fault: str) -> VerifyError:
        return VerifyError(
            f"verification failed: {fault}. Nothing was written; leave {self._clauses} out, and please report this model"
        )


def draw_unpadded(inputs: ModelInputs) -> Iterator[Feed]:
    """Some sets of inputs without padding, each drawn when it is asked for; none where they cannot be drawn."""
    with suppress(KeyError, MemoryError, TypeError, ValueError, UnsupportedError, RuntimeFailure):
        cases = [c for c in inputs.select_cases(_TOKENS) if c.padding is Padding.NONE or not inputs.may_have_padding]
        for case in cases[:_MOST_CASES]:
            yield from inputs.draw([case])


def _run(sessions: Sessions, model: onnx.ModelProto, feed: Feed) -> dict[str, np.ndarray]:
    session = sessions.make(model, optimized=True, library=True)
    return dict(zip(session.outputs, session.run(None, feed), strict=True))


def _find_caches(model: onnx.ModelProto) -> frozenset[str]:
    """Outputs of StofCachedAttention that are caches."""
    nodes = (n for n in all_nodes(model.graph.node) if (n.domain, n.op_type) == (DOMAIN, CACHED))
    return frozenset(t for n in nodes for t in n.output[1:3])
