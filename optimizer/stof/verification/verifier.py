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
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import onnx

from stof.execution.case import Padding
from stof.execution.ort_sessions import VerifiedSession
from stof.execution.upcast import TypedAttributes
from stof.verification.compare import compare_outputs, find_undefined_outputs
from stof.verification.model_inputs import default_inputs
from stof.verification.perturb import Noisy, perturb
from stof.verification.reference_runs import ReferenceRuns, run_reference
from stof.verification.result import Comparison, Verification
from stof.verification.site_checks import EmittedSites
from stof.verification.suspects import find_suspects
from stof.verification.verified_models import VerifiedModels

_FLOPS = 3e10  # a second, of two cores
_ROUNDINGS = 3  # runs that show what rounding does to a model


def _affordable(model: onnx.ModelProto, seconds: float) -> float:
    """How many tokens a model can be given in a third of the time, one of three runs of each case, at a slow machine's rate."""
    weights = sum(int(np.prod(t.dims, dtype=np.int64)) for t in model.graph.initializer)
    return seconds / 3 * _FLOPS / (2 * max(1, weights))


class Verifier:
    """Compares an original model with its optimized form.

    Args:
        original: the model as it was read.
        sites: the site checks of the ops that have some, in the order in which the ops were emitted.
        budget: seconds after which no further case is begun; ort_sessions.py has what a single run may take.
        searches: whether to search for the sites that make outputs differ where no site does by itself.
        typed_attributes: of the operators that may be in the models.

    Attributes:
        faults: after a run, the failed comparisons of sites, by the key of the op at fault.
        suspected: after a run, the key of the op among whose sites the search was; empty where there was none.
    """

    def __init__(
        self,
        original: onnx.ModelProto,
        sites: Sequence[EmittedSites],
        budget: float,
        searches: bool = True,
        typed_attributes: TypedAttributes | None = None,
    ) -> None:
        self.original = original
        self.sites = tuple(sites)
        self.budget = budget
        self.searches = searches
        self.typed_attributes = typed_attributes or {}
        self.deadline = time.monotonic() + budget
        known = (s.checks.model_inputs() for s in sites)
        self.inputs = next((i for i in known if i is not None), None) or default_inputs(original)
        self.cases = self.inputs.cases(_affordable(original, budget))
        self.faults: dict[str, list[Comparison]] = {}
        self.suspected = ""

    def run(self, source: Path, final: onnx.ModelProto, scratch: Path) -> Verification:
        """Every comparison; stops early, and says so, when the budget is spent.

        Args:
            source: the file that the original was read from.
            final: the optimized model, without external data.
            scratch: a folder to write into, on a disk with room for the model.
        """
        start = time.monotonic()
        run = _Run(self, source, final, scratch)
        run.compare_sites()
        run.add_legal_runs()
        compared, wrong = run.compare_outputs()
        if wrong is not None and run.may_be_rounding():
            run.add_perturbed_runs()
            compared, wrong = run.compare_outputs()
        run.result.comparisons.extend(compared)
        if wrong is not None and run.may_be_rounding() and self.searches:
            run.search_suspects(wrong)
        run.result.seconds = time.monotonic() - start
        return run.result


class _Run:
    """One verification: the models, and what was run of them."""

    def __init__(self, verifier: Verifier, source: Path, final: onnx.ModelProto, scratch: Path) -> None:
        self.verifier = verifier
        self.result = Verification()
        self.models = VerifiedModels(verifier, source, final, scratch, self.result)
        self.reference: ReferenceRuns = run_reference(verifier, self.models, self.result)
        # Runs of the original, any of which may be the nearest one, by case; and runs of its expanded form.
        self.legal: list[list[list[np.ndarray]]] = []
        self.expanded: list[list[list[np.ndarray]]] = [[] for _ in self.reference.feeds]

    def compare_sites(self) -> None:
        """Asks the ops to compare their sites."""
        for sites in self.verifier.sites:
            checks = sites.checks
            captured = self.reference.captured
            if checks.working is not self.verifier.inputs.working:
                captured = self._capture(sites)
            found = checks.compare(sites.emitted, captured)
            found += checks.compare_subgraphs(sites.emitted, self.verifier.cases[0], self._run_subgraph)
            self.result.comparisons.extend(found)
            if failed := [c for c in found if not c.ok]:
                self.verifier.faults[sites.op] = failed

    def add_legal_runs(self) -> None:
        """Runs the original with graph optimizations, and further legal forms of it without."""
        session = self.models.original_session()
        self.legal = [[session.run(None, f)] for f in self.reference.feeds]
        del session
        for sites in self.verifier.sites:
            self._run_also(sites.checks.rounding_variants(self.models.probed, self.models.dtype))

    def add_perturbed_runs(self) -> None:
        """Runs whose sites are off by what the op and the nodes that it replaces may differ by.

        Runs of a graph in which nothing can be fused agree to the last bit, and say nothing of rounding. Those of a quantized
        one do not show its steps.
        """
        outputs: dict[str, Noisy] = {}
        for sites in self.verifier.sites:
            outputs |= sites.checks.rounding_errors(self.reference.captured)
        outputs = {name: self.models.widen_noise(noisy) for name, noisy in outputs.items()}
        self._run_also([perturb(self.models.probed, outputs, seed) for seed in range(_ROUNDINGS)])

    def may_be_rounding(self) -> bool:
        """Whether sites were replaced of which none differs by itself."""
        return any(s.checks.sites for s in self.verifier.sites) and not self.result.faulty_sites()

    def compare_outputs(self) -> tuple[list[Comparison], int | None]:
        """The outputs of the optimized model in each case, and the first case in which one is wrong."""
        session = self.models.sessions.make(self.models.final, optimized=True, library=True)
        by_case = [self._compare_case(session, i) for i in range(len(self.reference.plain))]
        wrong = next((i for i, comparisons in enumerate(by_case) if not all(c.ok for c in comparisons)), None)
        undefined = find_undefined_outputs(by_case, self._output_names())
        return [c for comparisons in by_case for c in comparisons] + undefined, wrong

    def search_suspects(self, wrong: int) -> None:
        """Searches for the sites that make outputs differ together, in a case in which they do.

        An op is searched where the model without its sites is right: those before it are searched else.
        """

        def fails(sites: EmittedSites, some: Sequence[str]) -> bool:
            model = self.models.twin(sites.checks.emit(some))
            session = self.models.sessions.make(model, optimized=True, library=True)
            return not all(c.ok for c in self._compare_case(session, wrong))

        first, *others = [s for s in self.verifier.sites if s.checks.sites]
        suspected = next((s for s in reversed(others) if not fails(s, ())), first)
        found, self.result.suspects_suffice = find_suspects(suspected.checks.sites, partial(fails, suspected))
        self.result.suspects = tuple(found)
        self.verifier.suspected = suspected.op

    def _output_names(self) -> list[str]:
        return [o.name for o in self.verifier.original.graph.output]

    def _compare_case(self, session: VerifiedSession, i: int) -> list[Comparison]:
        names, runs = self._output_names(), self.reference
        own = zip(*self.expanded[i], strict=True) if self.expanded[i] else [()] * len(names)
        found = session.run(None, runs.feeds[i])
        tensors = zip(names, runs.plain[i], zip(*self.legal[i], strict=True), found, own, strict=True)
        case = self.verifier.cases[runs.ran[i]]
        undefined = self.verifier.inputs.may_carry_nan and case.padding in (Padding.LEFT, Padding.RIGHT)
        return [compare_outputs(case, self.models.floor, *t, undefined=undefined) for t in tensors]

    def _run_also(self, others: Sequence[onnx.ModelProto]) -> None:
        """Runs further legal forms of the original.

        With fused nodes expanded, what a run shows is how far rounding takes the expanded graph from itself: that the
        expansion is not what the nodes compute is no reason to allow more.
        """
        is_expanded = self.models.probed is not self.models.reference
        if others and is_expanded and not self.expanded[0]:
            others = [self.models.probed, *others]
        for other in others:
            session = self.models.sessions.make(other, optimized=False, library=False)
            for found, feed in zip(self.expanded if is_expanded else self.legal, self.reference.feeds, strict=True):
                found.append(session.run(None, feed))
            del session

    def _capture(self, sites: EmittedSites) -> Mapping[str, np.ndarray]:
        """The tensors of sites that were found in another model than the original's working copy."""
        feed, checks = self.reference.feeds[0], sites.checks
        model = self.models.with_outputs(self.models.twin(checks.working), checks.tensors(), checks.symbolic)
        session = self.models.sessions.make(model, optimized=False, library=True)
        names = list(session.outputs)
        return {**feed, **dict(zip(names, session.run(names, feed), strict=True))}

    def _run_subgraph(
        self, model: onnx.ModelProto, wanted: Sequence[str], feed: Mapping[str, np.ndarray]
    ) -> Mapping[str, np.ndarray]:
        given = self.models.widen_feed(feed)
        session = self.models.sessions.make(self.models.twin(model), optimized=False, library=False)
        return {**given, **dict(zip(wanted, session.run(list(wanted), given), strict=True))}
