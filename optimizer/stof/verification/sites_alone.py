# SPDX-License-Identifier: Apache-2.0
"""Verification of an original that does not run here: each site by itself, and the types and shapes of the result.

A node for which ONNX Runtime's CPU provider has no kernel is left out, and its outputs are drawn. What the other nodes compute
of them enters the sites, whose operators are compared with fp64 as always. Outputs of the model are not compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import helper

from stof.errors import shown
from stof.execution.ort_sessions import VerifiedSession, find_without_arrays
from stof.execution.run_failure import parse_failure
from stof.execution.session_process import RuntimeFailure
from stof.symbolic import Symbolic
from stof.symbolic.algebra.sizes import evaluate_or_none
from stof.symbolic.algebra.terms import Int
from stof.symbolic.facts import dtype_kind
from stof.verification.evidence import check_sites_alone
from stof.verification.result import Comparison, PartialVerification, Verification
from stof.verification.runnable_part import RunnablePart, find_runnable_part
from stof.verification.site_checks import EmittedSites, Tensors
from stof.verification.verified_models import VerifiedModels

if TYPE_CHECKING:
    from stof.verification.verifier import Verifier

_MOST_REDRAWS = 8
_MOST_DRAWN = 1 << 26  # elements of a tensor that stands for what does not run


def verify_sites_alone(verifier: Verifier, models: VerifiedModels, result: Verification, message: str) -> bool:
    """Compares every site of an original that does not run; False where one of them cannot be compared by itself.

    Args:
        verifier: has the original, the sites and the limits.
        models: what is run.
        result: gets the comparisons, and what was left out.
        message: what ONNX Runtime says of the original.

    Raises:
        RuntimeFailure: where a part of the original is refused that nothing is known about.
        LimitReached: when a limit ends it.
        VerifyError: when no site has a finite element to compare.
    """
    return _SitesAlone(verifier, models, result, message).run()


class _SitesAlone:
    def __init__(self, verifier: Verifier, models: VerifiedModels, result: Verification, message: str) -> None:
        self.verifier = verifier
        self.models = models
        self.result = result
        self.message = shown(message)
        self.without = find_without_arrays(verifier.original.graph.input)
        self.left_out: dict[str, int] = {}

    def run(self) -> bool:
        every = [s for s in self.verifier.sites if s.checks.sites]
        for sites in every:
            captured = self._capture(sites)
            comparisons = [] if captured is None else self._compare(sites, captured)
            if {c.site for c in comparisons} != set(sites.checks.sites):
                return False
            self.result.comparisons.extend(comparisons)
            if failed := [c for c in comparisons if not c.ok]:
                self.verifier.faults[sites.op] = failed
        if not every:
            return False
        check_sites_alone(self.result)
        results = {t: None for s in every for names in s.checks.outputs().values() for t in names}
        shapes, ran = self._compare_shapes(results)
        message = "" if self.left_out or self.without else self.message
        self.result.partial = PartialVerification(self.left_out, self.without, shapes, ran, message)
        self.result.complete = False
        return True

    def _compare(self, sites: EmittedSites, captured: Tensors) -> list[Comparison]:
        checks = sites.checks
        inside = checks.compare_subgraphs(sites.emitted, self.verifier.cases[0], self.models.run_subgraph)
        comparisons = []
        for comparison in chain(checks.compare(sites.emitted, captured), inside):
            comparisons.append(comparison)
            self.verifier.limits.check_time()
        return comparisons

    def _capture(self, sites: EmittedSites) -> dict[str, np.ndarray] | None:
        """The tensors at the sites of an op, as far as they can be had; None where nothing runs."""
        checks = sites.checks

        def dtype(tensor: str) -> int:
            return self.models.dtype(tensor, checks.symbolic)

        working = self.models.twin(checks.working)
        part = find_runnable_part(working, checks.tensors(), set(self.without), dtype, self._load)
        if part is None:
            return None
        for name, count in part.left_out.items():
            self.left_out[name] = max(count, self.left_out.get(name, 0))
        for attempt in range(_MOST_REDRAWS):
            feed = {n: x for n, x in self.models.feeds[0].items() if n not in self.without}
            drawn = self._draw(part, checks.symbolic, dtype, attempt)
            if drawn is None:
                return None
            try:
                computed = self._run(part, {**feed, **drawn})
            except RuntimeFailure as error:
                if not self._redraw(part.model, str(error)):
                    raise
                continue
            # What stands for a result of a site's own nodes is no evidence.
            results = {t for names in checks.outputs().values() for t in names}
            return {**feed, **{n: x for n, x in drawn.items() if n not in results}, **computed}
        return None

    def _load(self, model: onnx.ModelProto) -> VerifiedSession:
        return self.models.sessions.make(model, optimized=False, library=True)

    def _draw(
        self, part: RunnablePart, symbolic: Symbolic, dtype: Callable[[str], int], attempt: int
    ) -> dict[str, np.ndarray] | None:
        """Numbers for the outputs of nodes that do not run; None where one is no float, or of a shape that is not known."""
        sizes = self.verifier.inputs.maker.sizes(self.verifier.cases[0])
        rng = np.random.default_rng(attempt)
        arrays = {}
        for name in part.drawn:
            shape = symbolic.shape(name)
            if shape is None or dtype_kind(dtype(name)) != "f":
                return None
            dims = [n for d in shape if (n := evaluate_or_none(d, sizes)) is not None and n >= 0]
            if len(dims) != len(shape) or math.prod(dims) > _MOST_DRAWN:
                return None
            arrays[name] = rng.standard_normal(dims).astype(helper.tensor_dtype_to_np_dtype(dtype(name)))
        return arrays

    def _run(self, part: RunnablePart, feed: Tensors) -> dict[str, np.ndarray]:
        inputs = {i.name for i in part.model.graph.input}
        model_feed = {n: x for n, x in feed.items() if n in inputs}
        names = list(part.computed)
        return dict(
            zip(names, self._load(part.model).run(names, model_feed, self.verifier.limits.first_end), strict=True)
        )

    def _redraw(self, model: onnx.ModelProto, message: str) -> bool:
        """Draws the inputs otherwise, going by a refusal; False where nothing else is known to try."""
        verifier = self.verifier
        if not verifier.inputs.narrow(model, message, verifier.cases[0], self.models.feeds[0]):
            return False
        self.models.redraw()
        return True

    def _compare_shapes(self, results: Collection[str]) -> tuple[int, bool]:
        """Compares types and shapes of the optimized model with those of the original.

        Args:
            results: of the sites, which are compared there: what models declare of caches holds without shared buffers only.

        Returns:
            How many tensors were compared, and whether the optimized model ran for that.
        """
        original, outputs = self.verifier.inputs.symbolic, self.verifier.output_names
        arrays = self._run_final(outputs)
        if arrays is not None:
            sizes = self.verifier.inputs.maker.sizes(self.verifier.cases[0])
            for name, array in arrays.items():
                dims = None if (shape := original.shape(name)) is None or name in results else _evaluate(shape, sizes)
                self._compare_shape(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape, dims)
            return len(arrays), True
        final = Symbolic(self.models.final)
        names = [n for n in dict.fromkeys([*outputs, *results]) if final.dtype(n) and self.models.dtype(n)]
        for name in names:
            self._compare_shape(name, final.dtype(name), final.shape(name), original.shape(name))
        return len(names), False

    def _compare_shape(
        self, name: str, dtype: int, shape: Sequence[object] | None, expected: Sequence[object] | None
    ) -> None:
        """A failed comparison where a tensor of the optimized model has another type or shape than the original's."""
        is_alike = shape is None or expected is None or len(shape) == len(expected)
        is_alike = is_alike and all(None in (a, b) or a == b for a, b in zip(shape or (), expected or (), strict=False))
        if dtype == self.models.dtype(name) and is_alike:
            return
        one, other = (onnx.TensorProto.DataType.Name(d) for d in (dtype, self.models.dtype(name)))
        dims = "" if is_alike else f" {list(shape or ())}"
        wanted = "" if is_alike else f" {list(expected or ())}"
        what, detail = f"type and shape of {name!r}", f"{one}{dims}, expected {other}{wanted}"
        self.result.comparisons.append(Comparison(what, np.inf, 0.0, False, detail=detail))

    def _run_final(self, outputs: Sequence[str]) -> dict[str, np.ndarray] | None:
        """The outputs of the optimized model; None where it does not run here, either."""
        feed = self.models.feeds[0]
        if self.without:
            return None
        try:
            session = self.models.sessions.make(self.models.final, optimized=True, library=True)
            return dict(zip(outputs, session.run(list(outputs), feed), strict=True))
        except RuntimeFailure as error:
            if not parse_failure(str(error)).lacks_kernel:
                raise
            return None


def _evaluate(shape: Sequence[Int], sizes: Mapping[str, int]) -> list[int | None]:
    """Sizes at those of the inputs; None for one that is not known."""
    return [evaluate_or_none(size, sizes) for size in shape]
