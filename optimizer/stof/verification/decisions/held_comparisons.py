# SPDX-License-Identifier: Apache-2.0
"""Comparisons of outputs that a rounding decided otherwise: by the floats before it, and with the original's decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from stof.execution.case import Case
from stof.execution.run_limits import LimitReached
from stof.execution.session_process import RuntimeFailure
from stof.verification.compare_output import compare_output
from stof.verification.decisions.decided_outputs import DecidedOutputs, HeldRuns
from stof.verification.model_inputs import ModelInputs
from stof.verification.reference_runs import ReferenceRuns
from stof.verification.result import Comparison, Verification
from stof.verification.verified_models import VerifiedModels

Compared = dict[int, list[Comparison]]


@dataclass(frozen=True)
class HeldComparisons:
    """What the comparisons are made of.

    Attributes:
        models: the original and the optimized model.
        inputs: have the working copy, in which decisions are found.
        names: of the outputs, in order.
        cases: those that ran, by number.
        reference: the runs of the original.
    """

    models: VerifiedModels
    inputs: ModelInputs
    names: Sequence[str]
    cases: Mapping[int, Case]
    reference: ReferenceRuns

    def replace_in(self, compared: Compared, result: Verification) -> None:
        """Replaces comparisons that fail, or of which shapes or whole numbers differ, where decisions are not the same.

        Args:
            compared: the comparisons of all outputs by case.
            result: gets the decisions.
        """
        concerned = {
            i: [n for n, c in zip(self.names, comparisons, strict=True) if c.flips or not c.ok]
            for i, comparisons in compared.items()
        }
        concerned = {i: some for i, some in concerned.items() if some}
        for i, runs in (self._run(concerned, compared, result) if concerned else {}).items():
            comparisons_of_case = compared[i]
            shapes = tuple(
                f"output {n!r}: {c.shapes}" for n, c in zip(self.names, comparisons_of_case, strict=True) if c.shapes
            )
            runs.differences = [replace(d, outputs=shapes) for d in runs.differences]
            result.decisions.extend(runs.differences)
            compared[i] = [self._compare_again(i, k, c, runs) for k, c in enumerate(comparisons_of_case)]

    def _run(
        self, concerned: Mapping[int, Sequence[str]], compared: Compared, result: Verification
    ) -> dict[int, HeldRuns]:
        outputs = sorted(set(chain.from_iterable(concerned.values())))
        noise = self.models.quantizer_noise() | self.models.site_noise(self.reference.captured)
        decided = DecidedOutputs(self.models, self.inputs.working, self.inputs.symbolic, noise, outputs)
        unsettled = [i for i in concerned if any(c.ok and c.flips for c in compared[i])]
        try:
            return decided.run({i: self.cases[i] for i in concerned}, self.reference.feeds, unsettled)
        except LimitReached:
            result.noise_left_out = True  # no time or memory was left to tell rounding from faults
            return {}
        except RuntimeFailure:
            return {}  # nothing is shown: what differs is wrong

    def _compare_again(self, i: int, k: int, first: Comparison, runs: HeldRuns) -> Comparison:
        """The comparison of an output ``k`` of a case with the original's decisions; that before, where nothing differs."""
        if first.ok and not first.flips:
            return first
        name, words = self.names[k], "; ".join(d.to_text() for d in runs.differences)
        if not all(d.explained for d in runs.differences):
            return replace(first, ok=False, difference=np.inf, detail="; ".join(filter(None, (first.detail, words))))
        if name not in runs.optimized and not runs.differences:
            return first
        if name not in runs.optimized:  # it is the decision itself, and was compared by the floats before
            farthest = max(runs.differences, key=lambda d: d.difference)
            comparable = all(d.comparable for d in runs.differences)
            away, budget = farthest.difference, farthest.budget
            return replace(first, ok=True, difference=away, budget=budget, detail=words, comparable=comparable)
        plain = self.reference.plain[i][k]
        legal, feed = [run[name] for run in runs.legal], self.reference.feeds[i]
        optimized = runs.optimized[name]
        held = compare_output(self.inputs, self.cases[i], feed, self.models.floor, name, plain, legal, optimized)
        detail = "; ".join(filter(None, (held.detail, first.detail)))
        return replace(held, what=f"{held.what}, with the original's decisions", detail=detail)
