# SPDX-License-Identifier: Apache-2.0
"""Which sets of inputs fit into the memory that a verification may have, and how long their runs take beside each other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx

from stof.execution.case import Case
from stof.execution.run_limits import RUNS, RunLimits, show_bytes
from stof.memory.run_estimate import MemoryEstimate, RunEstimate
from stof.symbolic import Symbolic
from stof.system.memory import resident_bytes
from stof.verification.model_inputs import ModelInputs
from stof.verification.result import SkippedCase

_PROCESS = 128 << 20  # bytes of the process that runs sessions, before it has one
_WEIGHTS = 3  # copies: the model as it is read, the session's, and what is written of it
_FLOPS = 3e10  # a second, of two cores
_RATE = 1e9  # bytes of tensors that a slow machine computes in a second
_CHEAP = 64 << 20  # bytes that never take long
_OUTPUTS = 6  # of a case: of the original's runs, of the optimized model's, and what is on its way between processes


def count_affordable_tokens(model: onnx.ModelProto, seconds: float) -> float:
    """How many tokens a model can be given in a third of the time, one of three runs of each case, at a slow machine's rate."""
    weights = sum(int(np.prod(t.dims, dtype=np.int64)) for t in model.graph.initializer)
    return seconds / 3 * _FLOPS / (2 * max(1, weights))


def describe_memory(skipped: Sequence[SkippedCase], memory: int) -> str:
    """The message where no inputs fit into the memory."""
    least = skipped[-1] if skipped else SkippedCase("no inputs", "")
    return (
        f"the model cannot be verified in {show_bytes(memory)} of memory: no inputs fit ({least.case}: {least.reason}). "
        "Nothing was written; raise --verify-memory, or leave verification out with --no-verify"
    )


class CasePlan:
    """Estimates cases of a model.

    Args:
        inputs: draw the cases.
        limits: of time and memory.
        model: the one whose runs are estimated, by default that of the inputs.
    """

    def __init__(self, inputs: ModelInputs, limits: RunLimits, model: onnx.ModelProto | None = None) -> None:
        self._inputs = inputs
        self._limits = limits
        symbolic = inputs.symbolic if model is None else Symbolic(model)
        self._estimate = MemoryEstimate(model or inputs.working, symbolic)
        self._estimates: dict[Case, RunEstimate] = {}
        self._held = resident_bytes()

    def estimate(self, case: Case) -> RunEstimate:
        """The tensors that a run of a case makes."""
        if case not in self._estimates:
            self._estimates[case] = self._estimate.run(self._inputs.maker.sizes(case))
        return self._estimates[case]

    def needed_bytes(self, case: Case) -> int:
        """What this process and the one of the sessions hold together at most."""
        run = self.estimate(case)
        return self._held + _PROCESS + _WEIGHTS * self._estimate.weights + run.peak + _OUTPUTS * run.outputs

    def select(self, cases: Sequence[Case]) -> tuple[list[Case], list[SkippedCase]]:
        """The cases that fit, of fewer rows where those of a batch do not or take long; and the others, with the reason.

        Estimates take time, too: those of other cases than the first and the last one only begin within the budget.
        """
        selected: dict[int, Case] = {}
        skipped: dict[int, SkippedCase] = {}
        numbers = range(len(cases))
        for number in [*numbers[:1], *numbers[1:][-1:], *numbers[1:-1]]:  # as they run
            case = cases[number]
            if number not in (0, numbers[-1]) and time.monotonic() >= self._limits.deadline:
                skipped[number] = SkippedCase(str(self._inputs.name_sizes(case)), "time")
                continue
            tried = [replace(case, batch=n) for n in dict.fromkeys((case.batch, 2, 1)) if n <= case.batch]
            fits = next((c for c in tried if self._is_quick(c) and self.needed_bytes(c) <= self._limits.memory), None)
            if fits is None:
                least = self.needed_bytes(tried[-1])
                reason = f"memory: about {show_bytes(least)} of {show_bytes(self._limits.memory)}"
                skipped[number] = SkippedCase(str(self._inputs.name_sizes(tried[-1])), reason)
            else:
                selected[number] = fits
        fitting = list(dict.fromkeys(selected[i] for i in sorted(selected)))
        return fitting, [skipped[i] for i in sorted(skipped)]

    def _is_quick(self, case: Case) -> bool:
        """Whether a batch is worth its time; one row always is."""
        total = self.estimate(case).total
        return case.batch == 1 or total <= max(_CHEAP, _RATE * self._limits.budget / RUNS)

    def rows(self, cases: Sequence[Case]) -> int:
        """The batch rows of the selected cases, which are fewer where memory is short."""
        return sum(c.batch for c in self.select(cases)[0])

    def has_room(self, cases: Sequence[Case]) -> bool:
        """Whether all rows of all cases fit into the memory."""
        return all(self._limits.is_over() or self.needed_bytes(c) <= self._limits.memory for c in cases)
