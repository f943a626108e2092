# SPDX-License-Identifier: Apache-2.0
"""Counts active neurons in runs of a model on the inputs that the user gives."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from stof.errors import StofError
from stof.execution.given_inputs import read_given_inputs
from stof.execution.ort_sessions import Sessions
from stof.execution.run_limits import LimitReached, RunLimits
from stof.execution.session_process import RuntimeFailure, has_onnxruntime, release_sessions
from stof.graph.protobuf import copy_model
from stof.op_rewrite import Job
from stof.sparse_mlp.site import MlpSite


@dataclass(frozen=True, eq=False)
class NeuronCounts:
    """How often neurons were active.

    Attributes:
        active: the number of tokens for which each was, int64 [F].
        tokens: of all runs.
        most_tokens: of one run.
    """

    active: np.ndarray
    tokens: int
    most_tokens: int = 0

    @property
    def density(self) -> float:
        """The share of neurons that are active for a token."""
        return float(self.active.sum()) / max(1, self.tokens * self.active.size)

    @property
    def idle(self) -> float:
        """The share of neurons that never were."""
        return 1 - float(np.count_nonzero(self.active)) / max(1, self.active.size)


def count_neurons(job: Job, model: onnx.ModelProto, sites: Sequence[MlpSite]) -> dict[str, NeuronCounts]:
    """How often neurons are active, by the name of the site; empty where nothing was given or it does not run.

    Args:
        job: the optimization; its options have the inputs and the limits of time and memory.
        model: holds the sites.
        sites: the sites.
    """
    feeds = read_given_inputs(job.options.inputs, job.model)
    if not feeds or not sites or not has_onnxruntime():
        return {}
    wanted = list(dict.fromkeys(s.activated for s in sites))
    shown = copy_model(model)
    visible = {o.name for o in shown.graph.output}
    types = {s.activated: s.dtype for s in sites}
    shown.graph.output.extend(helper.make_tensor_value_info(t, types[t], None) for t in wanted if t not in visible)
    active = {s.activated: np.zeros(s.neurons, np.int64) for s in sites}
    tokens, most = dict.fromkeys(wanted, 0), dict.fromkeys(wanted, 0)
    try:
        with tempfile.TemporaryDirectory(prefix="stof-") as scratch:
            limits = RunLimits(job.options.verify_budget, job.options.verify_memory)
            session = Sessions(job.source.parent.resolve(), Path(scratch), limits).make(
                shown, optimized=True, library=True
            )
            for feed in feeds:
                for tensor, values in zip(wanted, session.run(wanted, feed.arrays), strict=True):
                    # NaN is not 0: such a neuron is active.
                    active[tensor] += np.count_nonzero(values.reshape(-1, active[tensor].size), axis=0)
                    count = values.size // active[tensor].size
                    tokens[tensor] += count
                    most[tensor] = max(most[tensor], count)
    except (RuntimeFailure, LimitReached, StofError):
        return {}  # verification says what is wrong with the model or the inputs
    finally:
        release_sessions()
    return {
        s.name: NeuronCounts(active[s.activated], tokens[s.activated], most[s.activated])
        for s in sites
        if tokens[s.activated]
    }
