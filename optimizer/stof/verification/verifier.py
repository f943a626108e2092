# SPDX-License-Identifier: Apache-2.0
"""Runs the optimized model against the original before the file is written.

Site level: the tensors that enter a site are captured in the original, and the op that replaces the site compares its node
with what it replaces (site_checks.py). Model level: the difference of outputs is held against the difference between two
legal runs of the original.

NaN in the original alone is no fault where queries without a key cause it: docs/guide/options.md, "NaN".

Half-precision models are compared as their fp32 twins, where a difference of the graphs is not lost in rounding; the op of
a site runs in the site's own type on rounded inputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from stof.execution.case import Case, Counts, Padding
from stof.execution.ort_sessions import Sessions, VerifiedSession
from stof.execution.session_process import RuntimeFailure
from stof.execution.upcast import BF16, HALF, Twins, holds
from stof.verification.compare import compare_outputs, undefined_everywhere
from stof.verification.perturb import perturbed
from stof.verification.result import Comparison, Verification
from stof.verification.site_checks import SiteChecks

# Instead of 1e-6 for half-precision models, which run widened: fp16 scores stand beside 1024 there (see upcast.py).
_WIDENED_FLOORS = {int(onnx.TensorProto.FLOAT16): 2e-4, int(onnx.TensorProto.BFLOAT16): 1e-5}
BATCH_WITH_ALL_PADDING = 4  # rows of a batch, of which the last one is all padding
_FLOPS = 3e10  # a second, of two cores
_ROUNDINGS = 3  # runs that show what rounding does to a model
_MOST_SUSPECTS = 4  # sites that are searched for when only together they make outputs differ


def _affordable(model: onnx.ModelProto, seconds: float) -> float:
    """How many tokens a model can be given in a third of the time, one of three runs of each case, at a slow machine's rate."""
    weights = sum(int(np.prod(t.dims, dtype=np.int64)) for t in model.graph.initializer)
    return seconds / 3 * _FLOPS / (2 * max(1, weights))


def suspects(sites: Sequence[str], fails: Callable[[Sequence[str]], bool]) -> tuple[list[str], bool]:
    """A smallest failing set of sites by repeated bisection, when all of them together fail.

    Takes about log2(n) runs for each site of the set. The set cannot lose one of its sites and still fail, as long as a set
    fails that holds a failing one.

    Args:
        sites: all of them, in the order of the graph.
        fails: whether the model in which these are replaced is wrong.

    Returns:
        The set in the order of the graph, and whether it fails by itself: the search ends at a few rewrites.
    """
    needed: list[str] = []
    rest = list(sites)
    while len(needed) < _MOST_SUSPECTS:
        # With `needed`, all of `rest` fails, and none of it does not: search the first number that fails.
        low, high = 0, len(rest)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fails([*rest[:middle], *needed]) else (middle, high)
        needed.insert(0, rest[high - 1])
        rest = rest[: high - 1]
        if not rest or fails(needed):
            return needed, True
    return needed, False


class Verifier:
    """Compares an original model with its optimized form.

    Args:
        checks: the sites that were replaced.
        budget: seconds after which no further case is begun; ort_sessions.py has what a single run may take.
    """

    def __init__(self, checks: SiteChecks, budget: float) -> None:
        self.checks = checks
        self.budget = budget
        self.deadline = time.monotonic() + budget
        self.cases = checks.cases(_affordable(checks.original, budget))

    def run(
        self, source: Path, final: onnx.ModelProto, scratch: Path, emitted: onnx.ModelProto | None = None
    ) -> Verification:
        """Every comparison; stops early, and says so, when the budget is spent.

        Args:
            source: the file that the original was read from.
            final: the optimized model, without external data.
            scratch: a folder to write into, on a disk with room for the model.
            emitted: the model in which the sites are looked at, before later ops changed it; the final one by default.
        """
        start = time.monotonic()
        checks, original = self.checks, self.checks.original
        result = Verification()
        sessions = Sessions(source.parent.resolve(), scratch, self.budget)
        feeds = self._draw(self.cases)
        before: onnx.ModelProto | Path = source
        reference = original
        after, twin, floor = final, _same, 1e-6
        if checks.types & HALF or holds(original, BF16 if checks.sites else HALF):
            result.widened = True
            result.comparisons.extend(self._as_it_is(sessions, source, final, feeds[-1]))
            twin = Twins(sessions.weights, scratch, self._half_constants()).of
            floor = max([_WIDENED_FLOORS.get(dtype, 1e-5) for dtype in checks.types], default=1e-5)
            before = reference = twin(original)
            after = twin(final)
            feeds = [_widened(f) for f in feeds]
        probed = reference if checks.working is original else twin(checks.working)
        if probed is not reference and not _runs(sessions, reference, feeds[0]):
            single = [Case(1, c.length, c.padding) for c in self.cases]
            alone = [_widened(f) if result.widened else f for f in self._draw(single)]
            if _runs(sessions, reference, alone[0]):  # some fused nodes take a past with one row only
                self.cases, feeds = single, alone
            elif _runs(sessions, probed, feeds[0]):
                result.expanded = True
                before = reference = probed
        ran, plain, captured = self._reference(sessions, reference, probed, feeds, result)
        feeds = [feeds[i] for i in ran]
        emitted = final if emitted is None else emitted
        result.comparisons.extend(checks.compare(emitted, captured))

        def run_subgraph(
            model: onnx.ModelProto, wanted: Sequence[str], feed: Mapping[str, np.ndarray]
        ) -> Mapping[str, np.ndarray]:
            given = _widened(feed) if result.widened else feed
            found = sessions.make(twin(model), optimized=False, library=False).run(list(wanted), given)
            return {**given, **dict(zip(wanted, found, strict=True))}

        result.comparisons.extend(checks.compare_subgraphs(emitted, self.cases[0], run_subgraph))
        try:
            session = sessions.make(before, optimized=True, library=False)
        except RuntimeFailure:
            if before is not source:
                raise
            # Runtimes refuse files whose axes and sizes are external data; in the model that was loaded, they are not.
            session = sessions.make(original, optimized=True, library=False)
        legal = [[session.run(None, f)] for f in feeds]
        del session
        # With fused nodes expanded, what a run shows is how far rounding takes the expanded graph from itself: that the
        # expansion is not what the nodes compute is no reason to allow more.
        expanded: list[list[list[np.ndarray]]] = [[] for _ in feeds]

        def run_also(others: Sequence[onnx.ModelProto]) -> None:
            if others and probed is not reference and not expanded[0]:
                others = [probed, *others]
            for other in others:
                session = sessions.make(other, optimized=False, library=False)
                for found, feed in zip(legal if probed is reference else expanded, feeds, strict=True):
                    found.append(session.run(None, feed))
                del session

        run_also(checks.rounding_variants(probed, partial(self._type, result.widened)))
        names = [o.name for o in original.graph.output]

        def compare(session: VerifiedSession, i: int) -> list[Comparison]:
            own = zip(*expanded[i], strict=True) if expanded[i] else [()] * len(names)
            tensors = zip(names, plain[i], zip(*legal[i], strict=True), session.run(None, feeds[i]), own, strict=True)
            case = self.cases[ran[i]]
            undefined = checks.may_carry_nan and case.padding in (Padding.LEFT, Padding.RIGHT)
            return [compare_outputs(case, floor, *t, undefined=undefined) for t in tensors]

        def compare_all() -> tuple[list[Comparison], int | None]:
            session = sessions.make(after, optimized=True, library=True)
            by_case = [compare(session, i) for i in range(len(plain))]
            wrong = next((i for i, comparisons in enumerate(by_case) if not all(c.ok for c in comparisons)), None)
            return [c for comparisons in by_case for c in comparisons] + undefined_everywhere(by_case, names), wrong

        compared, wrong = compare_all()
        if wrong is not None and checks.sites and not result.faulty_sites():
            # Runs of a graph in which nothing can be fused agree to the last bit, and say nothing of rounding; those of a
            # quantized one do not show its steps.
            run_also(self._perturbed(probed, captured, result.widened))
            compared, wrong = compare_all()
        result.comparisons.extend(compared)
        if wrong is not None and checks.sites and not result.faulty_sites():

            def fails(some: Sequence[str]) -> bool:
                session = sessions.make(twin(checks.emit(some)), optimized=True, library=True)
                return not all(c.ok for c in compare(session, wrong))

            found, result.suspects_suffice = suspects(checks.sites, fails)
            result.suspects = tuple(found)
        result.seconds = time.monotonic() - start
        return result

    def _perturbed(
        self, probed: onnx.ModelProto, captured: Mapping[str, np.ndarray], widened: bool
    ) -> list[onnx.ModelProto]:
        """Runs whose sites are off by what the operator and the nodes that it replaces may differ by."""
        outputs = self.checks.rounding_errors(captured)
        if widened:
            single = int(onnx.TensorProto.FLOAT)
            outputs = {name: replace(noisy, dtype=single) for name, noisy in outputs.items()}
        return [perturbed(probed, outputs, seed) for seed in range(_ROUNDINGS)]

    def _type(self, widened: bool, tensor: str) -> int:
        dtype = self.checks.symbolic.dtype(tensor)
        return int(onnx.TensorProto.FLOAT) if widened and dtype in HALF else dtype

    def _half_constants(self) -> dict[str, np.ndarray]:
        found = {}
        for node in self.checks.working.graph.node:
            for name in node.output:
                array = self.checks.symbolic.constant(name) if self.checks.symbolic.dtype(name) in HALF else None
                if array is not None and array.size <= 16:
                    found[name] = array
        return found

    def _draw(self, cases_: Sequence[Case]) -> list[dict[str, np.ndarray]]:
        return [self.checks.inputs.draw(c, np.random.default_rng(i)) for i, c in enumerate(cases_)]

    @staticmethod
    def _as_it_is(
        sessions: Sessions, original: Path, emitted: onnx.ModelProto, feed: Mapping[str, np.ndarray]
    ) -> list[Comparison]:
        """Whether a model that is compared widened runs in its own types where the original does, without comparing."""
        try:
            first = sessions.make(original, optimized=True, library=False).run(None, feed)
        except RuntimeFailure:  # the CPU provider lacks a kernel; nothing can be told then
            return []
        what = "the optimized model in its own types"
        try:
            second = sessions.make(emitted, optimized=True, library=True).run(None, feed)
        except RuntimeFailure as error:
            return [Comparison(what, np.inf, 0.0, False, detail=f"does not run: {error}")]
        same = all((a.dtype, a.shape) == (b.dtype, b.shape) for a, b in zip(first, second, strict=True))
        return [] if same else [Comparison(what, np.inf, 0.0, False, detail="outputs of other types or shapes")]

    def _reference(
        self,
        sessions: Sessions,
        reference: onnx.ModelProto,
        probed: onnx.ModelProto,
        feeds: list[dict[str, np.ndarray]],
        result: Verification,
    ) -> tuple[list[int], list[list[np.ndarray]], dict[str, np.ndarray]]:
        """Which cases ran, the original's outputs without graph optimizations, the first case's tensors at every site."""
        wanted = self.checks.tensors()
        outputs = [o.name for o in self.checks.original.graph.output]
        model = onnx.ModelProto()
        model.CopyFrom(probed)
        declared = set(outputs)
        for name in wanted:
            dtype = self.checks.symbolic.dtype(name)
            if name not in declared and dtype:
                if result.widened and dtype in HALF:
                    dtype = int(onnx.TensorProto.FLOAT)
                model.graph.output.append(helper.make_tensor_value_info(name, dtype, None))
        session = sessions.make(model, optimized=False, library=False)
        del model
        names = list(session.outputs)
        captured: dict[str, np.ndarray] = {}
        ran, plain = [], []
        if probed is not reference:  # sites inside fused nodes are seen in the working copy alone
            everything = dict(zip(names, session.run(names, feeds[0]), strict=True))
            captured = {**feeds[0], **{n: everything[n] for n in wanted if n in everything}}
            session = sessions.make(reference, optimized=False, library=False)
        seconds_per_token = 0.0  # seconds for a token
        failure: RuntimeFailure | None = None
        for i, (case, feed) in enumerate(zip(self.cases, feeds, strict=True)):
            tokens = case.batch * case.length
            # Each case runs three times: here, with graph optimizations, and optimized.
            always = i in (0, len(feeds) - 1) or case.padding is Padding.LEAST
            if not always and time.monotonic() + 3 * seconds_per_token * tokens > self.deadline:
                result.complete = False
                continue
            start = time.monotonic()
            first = not captured and probed is reference
            try:
                everything = dict(zip(names, session.run(names, feed), strict=True)) if first else {}
                found = [everything[n] for n in outputs] if first else self._run(session, outputs, feeds, i)
            except RuntimeFailure as error:  # stored masks limit the length from above, computed ones from below
                failure = failure or error
                continue
            if first:
                captured = {**feed, **{n: everything[n] for n in wanted if n in everything}}
            plain.append(found)
            seconds_per_token = (
                (time.monotonic() - start) / tokens
                if first
                else seconds_per_token or (time.monotonic() - start) / tokens
            )
            # What is left of the budget also pays for the two other runs of what ran already.
            self.deadline -= 2 * (time.monotonic() - start)
            ran.append(i)
        if failure is not None and not ran:
            raise failure
        return ran, plain, captured

    def _run(
        self, session: VerifiedSession, outputs: list[str], feeds: list[dict[str, np.ndarray]], i: int
    ) -> list[np.ndarray]:
        """The outputs of a case; where the original does not run without any key, of one with keys in its place."""
        found: list[np.ndarray]
        try:
            found = session.run(outputs, feeds[i])
        except RuntimeFailure:
            case = self.cases[i]
            if case.batch != BATCH_WITH_ALL_PADDING:
                raise
            self.cases[i] = replace(case, batch=2, counts=Counts.USUAL)
            narrow = {n: x.astype(feeds[i][n].dtype) for n, x in self._draw([self.cases[i]])[0].items()}
            feeds[i] = narrow
            found = session.run(outputs, narrow)
        return found


def _same(model: onnx.ModelProto) -> onnx.ModelProto:
    return model


def _runs(sessions: Sessions, model: onnx.ModelProto, feed: Mapping[str, np.ndarray]) -> bool:
    """Whether the runtime has every node of a model."""
    try:
        sessions.make(model, optimized=False, library=False).run(None, feed)
    except RuntimeFailure:
        return False
    return True


def _widened(feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Inputs of a model's fp32 twin."""
    return {n: x.astype(np.float32) if x.dtype.name in ("float16", "bfloat16") else x for n, x in feed.items()}
