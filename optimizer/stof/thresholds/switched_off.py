# SPDX-License-Identifier: Apache-2.0
"""Holds a model with thresholds to what was verified: with these off it computes the same bits as without them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

import numpy as np
import onnx

from stof.cached_attention.site import OP as CACHED
from stof.errors import UnsupportedError, VerifyError
from stof.execution.case import Padding
from stof.execution.ort_sessions import Sessions
from stof.execution.session_process import RuntimeFailure, session_environment
from stof.graph.index import DOMAIN, all_nodes
from stof.verification.model_inputs import ModelInputs

Feed = Mapping[str, np.ndarray]
_TOKENS = 4096.0


def check_switched_off(
    sessions: Sessions, exact: onnx.ModelProto, skipping: onnx.ModelProto, feed: Feed, clauses: str
) -> None:
    """Compares the outputs of both models but for caches bit by bit under ``STOF_SKIP_SCORES=0``.

    Verification compares the model without thresholds. What is written is the other one: this carries the comparison over.

    Args:
        sessions: makes sessions.
        exact: the model that was verified.
        skipping: the same with thresholds.
        feed: inputs without padding, whose rows an operator may leave undefined.
        clauses: of --sparsify that have thresholds, for messages.

    Raises:
        VerifyError: naming the output.
        RuntimeFailure: what ONNX Runtime raises.
        LimitReached: when memory does not suffice.
    """
    with session_environment(STOF_SKIP_SCORES="0"):
        found = []
        for model in (exact, skipping):
            session = sessions.make(model, optimized=True, library=True)
            found.append(dict(zip(session.outputs, session.run(None, feed), strict=True)))
        del session
    caches = find_caches(exact)
    for name, one in found[0].items():
        other = found[1][name]
        if name in caches:
            continue
        if one.dtype != other.dtype or one.shape != other.shape or one.tobytes() != other.tobytes():
            raise VerifyError(
                f"verification failed: output {name!r} of the model with thresholds is not that of the verified one under "
                f"STOF_SKIP_SCORES=0. Nothing was written; leave {clauses} out, and please report this model"
            )


def find_caches(model: onnx.ModelProto) -> frozenset[str]:
    """Outputs of StofCachedAttention that are caches: their rows behind the keys of a sequence are undefined."""
    nodes = (n for n in all_nodes(model.graph.node) if (n.domain, n.op_type) == (DOMAIN, CACHED))
    return frozenset(t for n in nodes for t in n.output[1:3])


def draw_unpadded(inputs: ModelInputs, most: int = 1) -> Iterator[Feed]:
    """Sets of inputs without padding, at most so many, each drawn when it is asked for."""
    with suppress(KeyError, MemoryError, TypeError, ValueError, UnsupportedError, RuntimeFailure):
        cases = [c for c in inputs.select_cases(_TOKENS) if c.padding is Padding.NONE]
        for case in cases[:most]:
            yield from inputs.draw([case])
