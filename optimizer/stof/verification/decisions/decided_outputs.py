# SPDX-License-Identifier: Apache-2.0
"""Outputs that differ because a rounding decided otherwise: shows that it may, and compares the rest with decisions held.

A length, an index or a choice of experts comes from a float by a rounding or a comparison. Where the optimized model decides
otherwise than the original, two things have to hold. Its floats before the decision differ by no more than what runs of the
original allow. And the original's nodes decide the same by these floats. Then all models run with the decisions of the original,
so that lengths agree and outputs are compared as always.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import onnx

from stof.execution.case import Case
from stof.execution.run_limits import LimitReached
from stof.graph.index import GraphIndex
from stof.symbolic import Symbolic
from stof.verification.compare import compare_outputs
from stof.verification.decisions.find_decisions import Decision, Held, find_decisions, find_held
from stof.verification.decisions.held_models import add_outputs, cut_decision, free_name, hold_tensors, list_tensors
from stof.verification.perturb import Noisy, perturb
from stof.verification.reference_runs import CaseSession
from stof.verification.result import DecidedDifference
from stof.verification.verified_models import VerifiedModels

_LEAST_RUNS, _MOST_RUNS = (
    3,
    9,
)  # legal runs of the original: more of them where the first ones do not show what they differ by
_CHAIN_TOLERANCE = 3e-5  # of the largest float: what a chain may be off by (fusion/check.py)
Arrays = dict[str, np.ndarray]


@dataclass
class HeldRuns:
    """Runs of one case in which all models decide as the original does.

    Attributes:
        differences: the decisions that the optimized model takes otherwise by itself.
        legal: outputs of legal runs of the original, by name.
        optimized: outputs of the optimized model.
    """

    differences: list[DecidedDifference] = field(default_factory=list)
    legal: list[Arrays] = field(default_factory=list)
    optimized: Arrays = field(default_factory=dict)


@dataclass(frozen=True)
class _Point:
    """A decision that both models have, and what can be held of it."""

    decision: Decision
    held: Held


class DecidedOutputs:
    """Finds the decisions that outputs depend on, and runs models in which they are held.

    Args:
        models: the original and the optimized model.
        original: the working copy of the original, in which decisions are found.
        symbolic: its facts.
        noise: what legal runs of the original are off by, by tensor.
        outputs: the outputs that differ.
    """

    def __init__(
        self,
        models: VerifiedModels,
        original: onnx.ModelProto,
        symbolic: Symbolic,
        noise: Mapping[str, Noisy],
        outputs: Collection[str],
    ) -> None:
        self.models = models
        self.noise = noise
        self.base = models.reference
        index, tensors_of_base = GraphIndex(self.base.graph), list_tensors(self.base.graph)
        tensors = list_tensors(models.final.graph)
        self.points = []
        for decision in find_decisions(original.graph, symbolic, outputs):
            if decision.result in tensors_of_base and tensors_of_base.issuperset(decision.before):
                base_node = next(n for n in self.base.graph.node if decision.result in n.output)
                held = find_held(index, replace(decision, node=base_node), tensors)
                if held.tensors and all(map(models.dtype, held.tensors)):
                    self.points.append(_Point(decision, held))
        self.before = {t: models.dtype(t) for p in self.points for t in p.decision.before}
        self.results = {t: models.dtype(t) for p in self.points for t in p.held.tensors}

    def run(
        self, cases: Mapping[int, Case], feeds: Sequence[Arrays], unsettled: Collection[int]
    ) -> dict[int, HeldRuns]:
        """Runs the cases.

        Args:
            cases: those in which outputs differ, by number.
            feeds: the inputs of all cases by number.
            unsettled: cases in which legal runs of the original decide otherwise.

        Returns:
            What was found in cases that are unsettled, or in which the optimized model decides otherwise.

        Raises:
            RuntimeFailure: what ONNX Runtime raises.
            LimitReached: when a limit ends a run.
        """
        if not self.points:
            return {}
        plain_model, _ = add_outputs(self.base, self.base.graph, {**self.before, **self.results})
        session = self._session(plain_model, is_optimized=False, has_library=False)
        plain = {i: self._run(session, feeds[i]) for i in cases}
        held = {i: {**feeds[i], **{t: plain[i][t] for t in self.results}} for i in cases}
        model, names = add_outputs(hold_tensors(self.models.final, self.results), self.base.graph, self.before)
        session = self._session(model, is_optimized=True, has_library=True)
        optimized = {i: self._run(session, held[i]) for i in cases}
        optimized = {i: {**run, **{t: run[output] for t, output in names.items()}} for i, run in optimized.items()}
        changed = {i: [p for p in self.points if self._differs(p, plain[i], optimized[i])] for i in cases}
        changed = {i: points for i, points in changed.items() if points or i in unsettled}
        legal: dict[int, list[Arrays]] = {i: [] for i in changed}
        for number, make in enumerate(self._legal_sessions()):
            if not changed or (number >= _LEAST_RUNS and self._is_shown(changed, plain, legal, optimized)):
                break
            try:
                session = make()
                more = {i: self._run(session, held[i]) for i in changed}
            except LimitReached:
                if not number:
                    raise
                break  # what ran shows something
            for i, run in more.items():
                legal[i].append(run)
        return {
            i: HeldRuns(
                [self._explain(p, cases[i], plain[i], legal[i], optimized[i]) for p in points], legal[i], optimized[i]
            )
            for i, points in changed.items()
        }  # fmt: skip

    def _session(self, model: onnx.ModelProto, *, is_optimized: bool, has_library: bool) -> CaseSession:
        make = partial(self.models.sessions.make, model, optimized=is_optimized, library=has_library)
        return CaseSession(make)

    def _run(self, session: CaseSession, feed: Mapping[str, np.ndarray]) -> Arrays:
        names = list(session.get().outputs)
        return dict(zip(names, session.run(names, feed), strict=True))

    def _legal_sessions(self) -> Iterator[Callable[[], CaseSession]]:
        """Legal forms of the original: with graph optimizations, and off in last places."""
        base, _ = add_outputs(hold_tensors(self.base, self.results), self.base.graph, self.before)
        yield lambda: self._session(base, is_optimized=True, has_library=False)
        for seed in range(_MOST_RUNS - 1):
            noisy = perturb(base, self.noise, seed)
            yield partial(self._session, noisy, is_optimized=False, has_library=False)

    def _differs(self, point: _Point, plain: Arrays, optimized: Arrays) -> bool:
        return any(not np.array_equal(plain[t], optimized[free_name(t)]) for t in point.held.tensors)

    def _is_shown(
        self,
        changed: Mapping[int, Sequence[_Point]],
        plain: Mapping[int, Arrays],
        legal: Mapping[int, Sequence[Arrays]],
        optimized: Mapping[int, Arrays],
    ) -> bool:
        """Whether floats before decisions that differ are no farther apart than in the runs of the original until now."""
        return all(
            _find_distance(plain[i][t], optimized[i][t]) <= max(_find_distance(plain[i][t], run[t]) for run in legal[i])
            for i, points in changed.items()
            for p in points
            for t in p.decision.before
        )

    def _explain(
        self, point: _Point, case: Case, plain: Arrays, legal: Sequence[Arrays], optimized: Arrays
    ) -> DecidedDifference:
        decision = point.decision
        compared = {
            t: compare_outputs(case, self.models.floor, t, plain[t], [run[t] for run in legal], optimized[t])
            for t in decision.before
        }
        budgets = {t: c.budget for t, c in compared.items()}
        is_explained = all(c.ok for c in compared.values())
        if is_explained and decision.is_elementwise:
            is_explained = self._follows(point, optimized)
        worst = max(decision.before, key=lambda t: compared[t].difference / (budgets[t] or 1.0))
        changed = next(t for t in point.held.tensors if not np.array_equal(plain[t], optimized[free_name(t)]))
        differs = _find_differences(plain[changed], optimized[free_name(changed)])
        return DecidedDifference(
            case=str(case),
            node=decision.name,
            changed=int(np.count_nonzero(differs)),
            elements=int(differs.size),
            before=_pick_farthest(plain[worst], optimized[worst], differs),
            difference=_find_distance(plain[worst], optimized[worst]),
            spread=max(_find_distance(plain[worst], run[worst]) for run in legal),
            budget=budgets[worst],
            runs=len(legal),
            explained=is_explained,
            comparable=all(c.comparable for c in compared.values()),
        )

    def _follows(self, point: _Point, optimized: Arrays) -> bool:
        """Whether the optimized model decides by its own floats as the original's nodes do: they may be inside of a chain."""
        before = point.decision.before
        model = cut_decision(
            self.base, point.held, {t: self.before[t] for t in before}, {t: self.results[t] for t in point.held.tensors}
        )
        session = self._session(model, is_optimized=False, has_library=False)
        finite = {n: np.isfinite(optimized[n]) for n in before}
        off = {n: _CHAIN_TOLERANCE * float(np.abs(optimized[n][finite[n]]).max(initial=0.0)) for n in before}
        ends = []
        for sign in (1.0, -1.0):
            # The second float of a comparison moves the other way.
            signs = (sign, -sign)
            moved = {
                n: np.where(finite[n], optimized[n] + s * off[n], optimized[n]).astype(optimized[n].dtype)
                for s, n in zip(signs, before, strict=False)
            }
            ends.append(self._run(session, moved))
        for t in point.held.tensors:
            decided = optimized[free_name(t)]
            low, high = (f(ends[0][t], ends[1][t]) for f in (np.minimum, np.maximum))
            if decided.shape != low.shape or not ((decided >= low) & (decided <= high)).all():
                return False
        return True


def _find_distance(one: np.ndarray, other: np.ndarray) -> float:
    if one.shape != other.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):
        away = np.abs(one.astype(np.float64) - other)
    return float(np.nanmax(away, initial=0.0))


def _find_differences(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Where two arrays differ; of other shapes everywhere."""
    return one != other if one.shape == other.shape else np.ones(one.shape, bool)


def _pick_farthest(one: np.ndarray, other: np.ndarray, among: np.ndarray) -> tuple[float, float]:
    """The elements of two arrays that are farthest apart, where possible among some; NaN of other shapes."""
    if one.shape != other.shape or not one.size:
        return float("nan"), float("nan")
    with np.errstate(invalid="ignore"):
        away = np.nan_to_num(np.abs(one.astype(np.float64) - other), nan=0.0)
    if among.shape == away.shape:
        away = np.where(among, away, -1.0)
    where = int(away.argmax())
    return float(one.reshape(-1)[where]), float(other.reshape(-1)[where])
