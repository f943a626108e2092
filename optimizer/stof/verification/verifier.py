# SPDX-License-Identifier: Apache-2.0
"""Runs the optimized model against the original before the file is written.

Model level: the difference of outputs is held against the difference between two legal runs of the original. It needs no op.
Site level: the tensors that enter a site are captured, and the op that replaces the site compares its node with what it
replaces (site_checks.py).

NaN in the original alone is no fault where queries without a key cause it: docs/guide/options.md, "NaN".

Half-precision models are compared as their fp32 twins, where a difference of the graphs is not lost in rounding; the op of
a site runs in the site's own type on rounded inputs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import onnx

from stof.errors import VerifyError
from stof.execution.case import Case
from stof.execution.given_inputs import GivenFeed
from stof.execution.ort_sessions import VerifiedSession, find_without_arrays
from stof.execution.run_failure import parse_failure
from stof.execution.run_limits import RUNS, LimitReached, RunLimits, TimeLimit
from stof.execution.session_process import RuntimeFailure
from stof.execution.upcast import TypedAttributes
from stof.verification.case_plan import CasePlan, count_affordable_tokens, describe_memory
from stof.verification.compare import find_undefined_outputs
from stof.verification.compare_output import compare_output
from stof.verification.decisions.held_comparisons import HeldComparisons
from stof.verification.evidence import check_evidence, find_nan_weight
from stof.verification.model_inputs import default_inputs
from stof.verification.padding.longer_padding import LongerPadding
from stof.verification.padding.padded_batch import PaddedBatch, measure_padding
from stof.verification.perturb import perturb
from stof.verification.quantization import find_quantizers
from stof.verification.reference_runs import CaseSession, ReferenceRuns, run_reference
from stof.verification.result import Comparison, SkippedCase, Verification
from stof.verification.site_checks import EmittedSites
from stof.verification.sites_alone import verify_sites_alone
from stof.verification.sliced_attention import slice_attention
from stof.verification.suspects import find_suspects
from stof.verification.verified_models import VerifiedModels

_ROUNDINGS = 3  # runs that show what rounding does to a model
_TIGHT = 0.6  # of the memory: beyond it, memory that the runtime keeps for later runs is too much
_SPREADS = 2  # runs that show the steps of a quantized model
_LEAST_SHARE = 0.5  # of the time that a run took without graph optimizations, which has to be left for one with them
# Shares of all time after which these end: sites; runs of the original with graph optimizations; further ones.
_SITES_END, _LEGAL_END, _SPREAD_END = 0.7, 0.8, 0.85


class OriginalFailureError(RuntimeFailure):
    """The original does not run here, and its sites cannot be compared by themselves: nothing can be verified."""


class Verifier:
    """Compares an original model with its optimized form.

    Args:
        original: the model as it was read.
        sites: the site checks of the ops that have some, in the order in which the ops were emitted.
        limits: of time and memory.
        searches: whether to search for the sites that make outputs differ where no site does by itself.
        typed_attributes: of the operators that may be in the models.
        user_feeds: sets of inputs of the user's.
        shapes: the least and the largest size in use of dimensions, by name.
        is_from_file: the original is what its file holds; else it was changed since, and runs from memory.
        padded_batches: texts that the original computes with their padding, and the optimized model without.

    Raises:
        TimeLimit: when the time is over before anything can run.

    Attributes:
        plan: estimates the cases.
        sliced: the original with attention on slices of its queries, where memory is short; else None.
        is_tight: whether a case needs most of the memory.
        unread: the outputs of which ONNX Runtime gives no arrays, with their types.
        faults: after a run, the failed comparisons of sites, by the key of the op at fault.
        suspected: after a run, the key of the op among whose sites the search was; empty where there was none.
    """

    def __init__(
        self,
        original: onnx.ModelProto,
        sites: Sequence[EmittedSites],
        limits: RunLimits,
        searches: bool = True,
        typed_attributes: TypedAttributes | None = None,
        user_feeds: Sequence[GivenFeed] = (),
        shapes: Mapping[str, tuple[int, int]] | None = None,
        is_from_file: bool = True,
        padded_batches: Sequence[PaddedBatch] = (),
    ) -> None:
        self.original = original
        self.padded_batches = tuple(padded_batches)
        self.is_from_file = is_from_file
        self.sites = tuple(sites)
        self.limits = limits
        self.searches = searches
        self.typed_attributes = typed_attributes or {}
        limits.check_time()  # what is prepared counts: graphs may be large
        inputs_of_ops = (s.checks.model_inputs() for s in sites)
        drawn = next((i for i in inputs_of_ops if i is not None), None) or default_inputs(original)
        self.inputs = replace(drawn, user_feeds=tuple(user_feeds), shapes=shapes or {})
        self.plan = CasePlan(self.inputs, limits)
        limits.check_time()
        wanted = self.inputs.select_cases(count_affordable_tokens(original, limits.budget))
        limits.check_time()
        self.sliced = None if self.plan.has_room(wanted) else self._slice(wanted)
        self.cases, self.skipped = self.plan.select(wanted)
        needed = max((self.plan.needed_bytes(c) for c in self.cases), default=0)
        self.is_tight = needed > _TIGHT * limits.memory
        self.unread = find_without_arrays(original.graph.output)
        self.faults: dict[str, list[Comparison]] = {}
        self.suspected = ""

    @property
    def output_names(self) -> list[str]:
        """The outputs that are compared: those of which ONNX Runtime gives arrays."""
        return [o.name for o in self.original.graph.output if o.name not in self.unread]

    def _slice(self, wanted: Sequence[Case]) -> onnx.ModelProto | None:
        """The original with attention on slices of its queries, where more of the wanted cases fit then."""
        checks_of_original = [s.checks for s in self.sites if s.checks.working is self.original is self.inputs.working]
        cores = [core for checks in checks_of_original for core in checks.cores()]
        sliced = slice_attention(self.original, cores, self.inputs.symbolic) if cores else None
        plan = None if sliced is None else CasePlan(self.inputs, self.limits, sliced)
        if plan is None or plan.rows(wanted) <= self.plan.rows(wanted):
            return None
        self.plan = plan
        return sliced

    def run(self, source: Path, final: onnx.ModelProto, scratch: Path) -> Verification:
        """Every comparison; stops early, and says so, when the budget is spent.

        Args:
            source: the file that the original was read from.
            final: the optimized model, without external data.
            scratch: a folder to write into, on a disk with room for the model.

        Raises:
            RuntimeFailure: when ONNX Runtime does not run the original.
            VerifyError: when not one output could be compared within the limits, or no element of one for NaN in a weight.
        """
        start = time.monotonic()
        if not self.cases:
            raise VerifyError(describe_memory(self.skipped, self.limits.memory))
        result = Verification(memory=self.limits.memory, skipped=list(self.skipped))
        result.complete = not self.skipped
        result.sliced = self.sliced is not None
        result.quantized = bool(find_quantizers(self.original))
        result.unread = self.unread
        run = None
        try:
            models = VerifiedModels(self, source, final, scratch, result)
            if (run := self._run_original(models, result)) is None:
                result.seconds = time.monotonic() - start
                return result
            run.compare()
        except LimitReached as error:
            if run is None or not run.compared:
                raise VerifyError(str(error) if run is None else run.explain_limit(error)) from error
            run.result.complete = False
        check_evidence(
            run.result, run.collect(), self.output_names, lambda: find_nan_weight(self.original, source.parent)
        )
        run.result.seconds = time.monotonic() - start
        return run.result

    def _run_original(self, models: VerifiedModels, result: Verification) -> _Run | None:
        """Runs the original; None where it does not run here at all, and its sites were compared by themselves.

        Raises:
            OriginalFailureError: where they could not be.
        """
        without = find_without_arrays(self.original.graph.input)
        try:
            if without:
                name, kind = next(iter(without.items()))
                raise RuntimeFailure(f"its Python interface takes no arrays of element type {kind}, which {name!r} has")
            return _Run(self, models, result)
        except RuntimeFailure as error:
            can_be_part = bool(without) or parse_failure(str(error)).lacks_kernel
            if not can_be_part or not verify_sites_alone(self, models, result, str(error)):
                raise OriginalFailureError(str(error)) from error
        return None


class _Run:
    """One verification: the models, and what was run of them.

    Args:
        verifier: has the original, the sites and the limits.
        models: what is run.
        result: gets what is found.

    Raises:
        RuntimeFailure: when ONNX Runtime does not run the original.
        LimitReached: when a limit has ended every run of it.

    Attributes:
        compared: the comparisons of outputs, by the number of the case that ran.
    """

    def __init__(self, verifier: Verifier, models: VerifiedModels, result: Verification) -> None:
        self.verifier = verifier
        self.limits = verifier.limits
        self.models = models
        self.result = result
        self.compared: dict[int, list[Comparison]] = {}
        self.wrong_outputs: dict[int, list[np.ndarray]] = {}  # of the optimized model, in cases that differ
        self.reference: ReferenceRuns = run_reference(verifier, self.models, self.result)
        self.result.run_seconds = next(iter(self.reference.seconds), 0.0)
        # Runs of the original, any of which may be the nearest one, by case; and runs of its expanded form.
        self.legal: list[list[list[np.ndarray]]] = [[] for _ in self.reference.feeds]
        self.expanded: list[list[list[np.ndarray]]] = [[] for _ in self.reference.feeds]
        self.longer = LongerPadding(verifier, models, self.reference, result)

    def compare(self) -> None:
        """Sites, then outputs, and where these differ, why.

        Raises:
            LimitReached: when a limit ends it; ``compared`` has what was compared until then.
        """
        self.compare_sites()
        self.compare_types()
        self.add_legal_runs()
        wrong = self.compare_outputs(range(len(self.legal)))
        without_noise: set[int] = set()
        if wrong and self.may_be_rounding():
            without_noise = self.add_perturbed_runs(wrong)
            wrong = self.compare_outputs(wrong)
        wrong = self.hold_decisions()
        beyond_noise = [i for i in wrong if i not in without_noise]
        self.result.noise_left_out = bool(wrong) and not beyond_noise
        if beyond_noise and self.may_be_rounding() and self.verifier.searches:
            self.search_suspects(beyond_noise[0])

    def collect(self) -> list[list[Comparison]]:
        """Puts what was compared into the result; gives the comparisons of all outputs, case by case."""
        by_case = [self.compared[i] for i in sorted(self.compared)]
        self.result.comparisons.extend(c for comparisons in by_case for c in comparisons)
        self.result.comparisons.extend(find_undefined_outputs(by_case, self._output_names()))
        self.result.cases = [str(self._case(i)) for i in sorted(self.compared)]
        self.result.padding_shares = [self._measure_padding(i) for i in sorted(self.compared)]
        remaining = [str(self._case(i)) for i in range(len(self.legal)) if i not in self.compared]
        self.result.skipped.extend(SkippedCase(case, "time") for case in remaining)
        self.result.complete = self.result.complete and not remaining
        return by_case

    def explain_limit(self, error: LimitReached) -> str:
        """The message for a limit before any outputs were compared, behind runs of the original: that one is not endless."""
        if not isinstance(error, TimeLimit) or not error.step:
            return str(error)
        words = str(self.limits.end_step(error.step, error.seconds))
        seconds, load = self.reference.seconds[0], self.reference.load_seconds
        return (
            f"{words}. One run of the original takes {seconds:.1f} s at {self._case(0)}, and to load it {load:.1f} s; {RUNS} "
            "runs are needed"
        )

    def _seconds_of(self, cases: Iterable[int]) -> float:
        """What one more run of some cases takes."""
        return sum(self.reference.seconds[i] for i in cases)

    def compare_sites(self) -> None:
        """Asks the ops to compare their sites, as long as there is time."""
        limits = self.limits
        # Two further runs of what ran are to come, of the first case in any case.
        both = 2 * (self._seconds_of(range(len(self.legal))) + self.reference.load_seconds)
        first = 2 * (self._seconds_of([0]) + self.reference.load_seconds)
        end = min(max(limits.end - both, limits.moment(0.6)), limits.moment(_SITES_END), limits.end - first)
        for sites in self.verifier.sites:
            checks = sites.checks
            try:
                comparisons = self._compare_sites_of(sites, end)
            except LimitReached:
                comparisons = []
            # Sites without a comparison of their own are left to the outputs.
            if time.monotonic() >= end:
                remaining = len(set(checks.sites) - {c.site for c in comparisons})
                self.result.sites_left += remaining
                self.result.complete = self.result.complete and not remaining
            self.result.comparisons.extend(comparisons)
            if failed := [c for c in comparisons if not c.ok]:
                self.verifier.faults[sites.op] = failed

    def _compare_sites_of(self, sites: EmittedSites, end: float) -> list[Comparison]:
        checks = sites.checks
        captured = self.reference.captured
        if checks.working is not self.verifier.inputs.working:
            captured = self._capture(sites, end)
        comparisons: list[Comparison] = []
        if not captured:
            self.result.sites_left += len(checks.sites)
            self.result.complete = False
            return comparisons
        run = self.models.run_subgraph
        by_run = checks.compare_by_run(sites.emitted, captured, run)
        inside = checks.compare_subgraphs(sites.emitted, self.verifier.cases[0], run)
        for comparison in chain(checks.compare(sites.emitted, captured), by_run, inside):
            comparisons.append(comparison)
            if time.monotonic() >= end:
                break
        return comparisons

    def compare_types(self) -> None:
        """Runs models that are compared widened in their own types, too, as far as there is time."""
        numbers = range(len(self.legal))
        i = min(numbers, key=lambda n: self.reference.seconds[n])
        until = self.limits.end - 2 * (self._seconds_of(numbers) + self.reference.load_seconds)
        if time.monotonic() + 2 * self.reference.seconds[i] > until:
            self.result.complete = self.result.complete and not self.result.widened
            return
        try:
            self.result.comparisons.extend(self.models.compare_unwidened(self._case(i), until))
        except LimitReached:
            self.result.complete = False

    def add_legal_runs(self) -> None:
        """Runs the original with graph optimizations, and further legal forms of it without.

        A run has to leave the time that the optimized model needs, for its inputs and those before.

        Raises:
            LimitReached: when a limit has ended every run.
        """
        session = CaseSession(self.models.original_session)
        ran: list[int] = []
        limit: LimitReached | None = None
        for i in self._order():
            until = self.limits.end - self._seconds_of([*ran, i])
            if ran:
                until = min(until, self.limits.moment(_LEGAL_END))
                if time.monotonic() + _LEAST_SHARE * self.reference.seconds[i] >= until:
                    continue
            try:
                self.legal[i] = [session.run(None, self.reference.feeds[i], until)]
                ran.append(i)
            except LimitReached as error:
                limit = limit or error
        del session
        if limit is not None and not ran:
            raise limit
        end = self.limits.moment(_SPREAD_END)
        for sites in self.verifier.sites:
            self._run_also(sites.checks.rounding_variants(self.models.probed, self.models.dtype), ran, end)
        if self.result.quantized:
            noise = self.models.quantizer_noise()
            self._run_also([perturb(self.models.probed, noise, seed) for seed in range(_SPREADS)], ran, end)
        self.longer.add_runs(self.legal, ran, end)

    def add_perturbed_runs(self, wrong: Sequence[int]) -> set[int]:
        """Runs whose sites are off by what the op and the nodes that it replaces may differ by, of cases that differ.

        Gives those for which there was no time.

        Runs of a graph in which nothing can be fused agree to the last bit, and say nothing of rounding. Those of a quantized
        one do not show its steps.
        """
        noise = self.models.site_noise(self.reference.captured)
        before = {i: self._count_runs(i) for i in wrong}
        self._run_also([perturb(self.models.probed, noise, seed) for seed in range(_ROUNDINGS)], wrong)
        return {i for i in wrong if self._count_runs(i) == before[i]}

    def _count_runs(self, i: int) -> int:
        return len(self.expanded[i]) + len(self.legal[i])

    def hold_decisions(self) -> list[int]:
        """Compares outputs with the original's decisions where a rounding may have decided otherwise; the cases still wrong."""
        if not self.result.faulty_sites() and not self.limits.is_over():
            cases = {i: self._case(i) for i in self.compared}
            held = HeldComparisons(self.models, self.verifier.inputs, self._output_names(), cases, self.reference)
            held.replace_in(self.compared, self.result)
        return [i for i in sorted(self.compared) if not all(c.ok for c in self.compared[i])]

    def may_be_rounding(self) -> bool:
        """Whether sites were replaced of which none differs by itself."""
        return any(s.checks.sites for s in self.verifier.sites) and not self.result.faulty_sites()

    def compare_outputs(self, cases: Sequence[int]) -> list[int]:
        """Compares the outputs of the optimized model, and gives the cases in which one is wrong.

        Raises:
            LimitReached: when a limit has ended every run, now and before.
        """
        session = CaseSession(self._make_final)
        limit: LimitReached | None = None
        for i in [i for i in self._order() if i in set(cases) and self.legal[i]]:
            try:
                if (arrays := self.wrong_outputs.pop(i, None)) is None:
                    until = self.limits.end - self._noise_seconds(i)
                    if self.compared and time.monotonic() >= until:
                        continue
                    arrays = session.run(None, self.reference.feeds[i], until)
                self.compared[i] = self._compare_case(i, arrays)
            except LimitReached as error:
                limit = limit or error
                continue
            if not all(c.ok for c in self.compared[i]):
                self.wrong_outputs[i] = arrays
        if limit is not None and not self.compared:
            raise limit
        return [i for i in sorted(self.compared) if not all(c.ok for c in self.compared[i])]

    def _noise_seconds(self, i: int) -> float:
        """Seconds that a case leaves for runs with noise, once one was needed: of itself, and of those that need them.

        A case that differs, and has none, tells nothing of those that have.
        """
        if not self.wrong_outputs or not self.may_be_rounding():
            return 0.0
        return self.reference.load_seconds + self._seconds_of({i, *self.wrong_outputs})

    def search_suspects(self, wrong: int) -> None:
        """Searches for the sites that make outputs differ together, in a case in which they do.

        An op is searched where the model without its sites is right: those before it are searched else.
        """

        def fails(sites: EmittedSites, some: Sequence[str]) -> bool:
            model = self.models.twin(sites.checks.emit(some))
            session = CaseSession(lambda: self.models.sessions.make(model, optimized=True, library=True))
            arrays = session.run(None, self.reference.feeds[wrong])
            return not all(c.ok for c in self._compare_case(wrong, arrays))

        first, *others = [s for s in self.verifier.sites if s.checks.sites]
        suspected = next((s for s in reversed(others) if not fails(s, ())), first)
        self.verifier.suspected = suspected.op
        suspects, self.result.suspects_suffice = find_suspects(suspected.checks.sites, partial(fails, suspected))
        self.result.suspects = tuple(suspects)

    def _order(self) -> list[int]:
        """The cases that ran: the first and the last one before the others, for which there may be no time."""
        numbers = list(range(len(self.reference.plain)))
        return [*numbers[:1], *numbers[1:][-1:], *numbers[1:-1]]

    def _case(self, i: int) -> Case:
        case = self.verifier.cases[self.reference.ran[i]]
        return self.verifier.inputs.name_sizes(case, self.reference.feeds[i])

    def _measure_padding(self, i: int) -> float | None:
        """The share of rows that are padding in a case; None where nothing leaves them out."""
        batches, case = self.verifier.padded_batches, self.verifier.cases[self.reference.ran[i]]
        return measure_padding(batches, self.verifier.inputs, case, self.reference.feeds[i]) if batches else None

    def _make_final(self) -> VerifiedSession:
        return self.models.sessions.make(self.models.final, optimized=True, library=True)

    def _output_names(self) -> list[str]:
        return self.verifier.output_names

    def _compare_case(self, i: int, arrays: Sequence[np.ndarray]) -> list[Comparison]:
        """The comparisons of the outputs of the optimized model in a case."""
        names, runs = self._output_names(), self.reference
        self.longer.note(i, arrays)
        expanded = zip(*self.expanded[i], strict=True) if self.expanded[i] else [()] * len(names)
        tensors = zip(names, runs.plain[i], zip(*self.legal[i], strict=True), arrays, expanded, strict=True)
        inputs, feed, is_faulty = self.verifier.inputs, runs.feeds[i], bool(self.result.faulty_sites())
        return [
            compare_output(inputs, self._case(i), feed, self.models.floor, *t, has_faults=is_faulty) for t in tensors
        ]

    def _run_also(self, others: Sequence[onnx.ModelProto], cases: Sequence[int], until: float | None = None) -> None:
        """Runs further legal forms of the original, as far as there is time.

        With fused nodes expanded, what a run shows is how far rounding takes the expanded graph from itself: that the
        expansion is not what the nodes compute is no reason to allow more.
        """
        is_expanded = self.models.probed is not self.models.reference
        if others and is_expanded and not any(self.expanded):
            others = [self.models.probed, *others]
        runs = self.expanded if is_expanded else self.legal
        for other in others:
            session = CaseSession(partial(self.models.sessions.make, other, optimized=False, library=False))
            for i in cases:
                if until is not None and time.monotonic() >= until:
                    return
                try:
                    runs[i].append(session.run(None, self.reference.feeds[i], until))
                except LimitReached:
                    return
            del session

    def _capture(self, sites: EmittedSites, until: float) -> Mapping[str, np.ndarray]:
        """The tensors of sites that were found in another model than the original's working copy."""
        feed, checks = self.reference.feeds[0], sites.checks
        model = self.models.with_outputs(self.models.twin(checks.working), checks.tensors(), checks.symbolic)
        session = self.models.sessions.make(model, optimized=False, library=True)
        names = list(session.outputs)
        return {**feed, **dict(zip(names, session.run(names, feed, until), strict=True))}
