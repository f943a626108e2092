# SPDX-License-Identifier: Apache-2.0
"""The estimated memory of the original and of the result, at the lengths in use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import onnx

from stof.errors import StofError, UnsupportedError, explained
from stof.graph.index import DOMAIN
from stof.graph.inline import inline
from stof.memory.memory_report import MemoryReport
from stof.memory.peak import PeakEstimate, estimate_peak
from stof.memory.tensor_sizes import TensorSizes, UnknownSizeError
from stof.memory_bound.reasons import TensorReasons
from stof.op_rewrite import Job
from stof.stages import Stage, find_model_inputs
from stof.symbolic import Symbolic

if TYPE_CHECKING:
    from stof.execution.inputs import InputMaker

_LENGTH = 2048  # where --shape states none, as of the estimates of speed
_LARGEST = 1 << 31  # bytes of a model with functions, which are put in their place


@dataclass(frozen=True)
class _Sizes:
    """Sizes of the inputs' dimensions, and the names of those that are no lengths."""

    by_name: Mapping[str, int]
    batches: frozenset[str]


class StageMemory:
    """Estimates the models of one optimization.

    Args:
        job: the optimization.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._sizes: _Sizes | None = None
        self._before: PeakEstimate | None = None

    def estimate(self, stages: Sequence[Stage]) -> MemoryReport:
        """The memory of the original, and of what the stages make of it. What hinders is a reason in the report."""
        limit = self._job.options.memory_limit
        if self._job.target.keeps_plugins:
            return MemoryReport(missing="TensorRT plans the memory of an engine when it builds it", limit=limit)
        try:
            if self._sizes is None or self._before is None:
                inputs = find_model_inputs(self._job, stages)
                self._sizes = self._choose_sizes(inputs.maker)
                original = _without_functions(self._job.model)
                # Those by which inputs are drawn, where they are of the same model.
                facts = inputs.symbolic if inputs.working is original else self._job.facts.of(original)
                self._before = self._estimate(original, _reasons(stages), facts)
            after = None
            if any(s.decided.has_replaced for s in stages):
                final = self._with_pages(_without_functions(stages[-1].written))
                facts = stages[-1].facts if final is stages[-1].written else self._job.facts.of(final)
                after = self._estimate_result(final, _reasons(stages), facts)
            return MemoryReport(self._sizes.by_name, self._before, after, limit=limit)
        except StofError as error:
            return MemoryReport(missing=str(error), limit=limit)
        except Exception as error:  # an estimate is no reason to fail
            return MemoryReport(missing=f"{type(error).__name__}: {explained(error)}", limit=limit)

    def _choose_sizes(self, maker: InputMaker) -> _Sizes:
        """The largest sizes in use: those of --shape, and else one text of a usual length, or as long as tables allow."""
        case = maker.prompt_case(_LENGTH)
        stated = {name: most for name, (_, most) in self._job.options.shapes.items()}
        case = maker.dimensions.fit(replace(case, other=tuple({**dict(case.other), **stated}.items())))
        return _Sizes(maker.sizes(case), frozenset(maker.dimensions.batch_names))

    def _estimate_result(self, model: onnx.ModelProto, reasons: Mapping[str, str], exact: Symbolic) -> PeakEstimate:
        """The estimate by exact facts, or else by those that take sizes for equal which every usual run has equal."""
        try:
            return self._estimate(model, reasons, exact)
        except UnknownSizeError:
            return self._estimate(model, reasons, self._job.facts.of(model))

    def _with_pages(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """The model that chooses pages, where --sparsify asks for it: bounds are a state beside each cache."""
        spec = self._job.run_time_masks
        if spec is None or not spec.pages_clauses:
            return model
        from stof.choose_pages.layers import find_page_layers, put_pages

        layers = find_page_layers(model, spec)
        return model if all(x.reason for x in layers) else put_pages(model, layers)

    def _estimate(self, model: onnx.ModelProto, reasons: Mapping[str, str], symbolic: Symbolic) -> PeakEstimate:
        assert self._sizes is not None
        is_widened = not self._job.target.uses_cuda_provider
        sizes = dict(self._sizes.by_name)
        if self._job.run_time_masks is not None:
            from stof.choose_pages.layers import count_pages

            sizes |= count_pages(model, TensorSizes(symbolic, sizes).shape)
        found = estimate_peak(model, symbolic, sizes, self._sizes.batches, is_widened=is_widened)
        finder = TensorReasons(model.graph, [t.name for t in found.quadratic], reasons)
        by_name = {t.name: finder.find(t.name) for t in found.quadratic}
        tensors = tuple(replace(t, reason=by_name.get(t.name, "")) for t in found.tensors)
        quadratic = tuple(replace(t, reason=by_name[t.name]) for t in found.quadratic)
        return replace(found, tensors=tensors, quadratic=quadratic)


def _reasons(stages: Sequence[Stage]) -> dict[str, str]:
    """Why sites of all ops are as they are, by their names."""
    return {site: words for s in stages for site, words in s.decided.section.reasons_by_site().items()}


def _without_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the nodes of its functions in the place of calls; stof's operators have kernels.

    Raises:
        UnsupportedError: when a large model has functions.
    """
    wanted = [(f.domain, f.name) for f in model.functions if f.domain != DOMAIN]
    if not wanted:
        return model
    if sum(t.ByteSize() for t in model.graph.initializer) > _LARGEST:
        raise UnsupportedError("the model has local functions and is too large for a copy without them")
    return inline(model, wanted)
