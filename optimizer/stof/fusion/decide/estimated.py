# SPDX-License-Identifier: Apache-2.0
"""Decides by estimates: the analytical cost of chains against that of what ONNX Runtime itself would fuse."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx

from stof.errors import UnsupportedError
from stof.execution.case import Case, Padding
from stof.execution.inputs import InputMaker
from stof.execution.upcast import HALF
from stof.fusion.decide.decision import ChainDecision
from stof.fusion.emit import ChainSignature
from stof.fusion.fusion_graph import FusionGraph
from stof.fusion.merge_matmuls import find_computed_tensors
from stof.fusion.policy import Matmuls
from stof.fusion.search.cost import SHARE_USUAL, AnalyticalCost, MachineModel, SegmentedRegion
from stof.fusion.search.engine import SearchLimits, search
from stof.fusion.search.ort_baseline import ort_baseline_seconds
from stof.fusion.search.space import FusionScheme, fused_segments
from stof.fusion.translate import FusedChain
from stof.options import Options
from stof.runtime.library import has_gemm
from stof.symbolic import Symbolic
from stof.symbolic.algebra.sizes import evaluate
from stof.symbolic.counted_sizes import assume_counted_sizes

# Least time of the runtime over the chain's, at every size; the model is no more accurate than that.
LEAST_ESTIMATED = 1.15
LEAST_WITH_MATMULS = 1.05  # the same where matmuls are part of both times
_MOST_MERGED = 0.97  # most time of a merged matmul and its chain, over that of the matmuls and their epilogues
_CASES = ((1, 128), (8, 512))  # batch and length where --shape says nothing
_RANKED = SearchLimits(schemes=256)


@dataclass(frozen=True)
class _MatmulContext:
    """What :meth:`EstimatedDecider.should_merge` needs of a model."""

    symbolic: Symbolic
    sizes: list[dict[str, int]]
    readers: dict[str, list[onnx.NodeProto]]
    computed: frozenset[str]  # tensors that memory-bound operators compute with


@dataclass
class EstimatedDecider:
    """Decides by the cost model of a machine."""

    options: Options
    machine: MachineModel
    sizes: list[dict[str, int]] = field(default_factory=list)
    context: _MatmulContext | None = None  # of the last model

    def __call__(self, graph: FusionGraph, chain: FusedChain, key: ChainSignature, undecided: int) -> ChainDecision:
        """Takes the whole region where it gains at every size, else the scheme that is estimated to be fastest."""
        region = SegmentedRegion.of_chain(graph, chain)
        whole = region.whole_scheme
        try:
            self.sizes = self.sizes or sizes_in_use(graph, self.options)
            has_half = any(graph.symbolic.dtype(o) in HALF for p in region.node_indices for o in graph.nodes[p].output)
            if len(self.sizes) == 1 and not has_half and not graph.depends_on_data(region.node_indices):
                return ChainDecision((), "sizes decide all of it, and they are fixed: a runtime computes it once")
            norms = frozenset(region.norms())
            costs = [AnalyticalCost(region, s, self.machine, norms) for s in self.sizes]
            baseline = [ort_baseline_seconds(graph, region.node_indices, s, self.machine) for s in self.sizes]
            if min(baseline) <= 0.0:
                return ChainDecision((), "ONNX Runtime fuses it with the matmul before it")
            # Matmuls take the same time in both, which is no gain.
            matmuls = [c.matmul_seconds() for c in costs]
            candidates = list(zip(baseline, matmuls, costs, strict=True))
            scheme, (gains, least) = whole, _gains(candidates, whole)
            if min(gains) < least or region.epilogue[0]:
                scheme = search(region.space(), costs[-1], [whole], _RANKED).scheme
                gains, least = _gains(candidates, scheme)
        except (KeyError, UnsupportedError, ValueError) as error:
            return ChainDecision((), f"nothing can be estimated: {error}")
        gain = math.prod(gains) ** (1 / len(gains))
        if min(gains) < least:
            return ChainDecision((), f"estimated {min(gains):.2f}x of ONNX Runtime's speed", gain)
        return ChainDecision(fused_segments(scheme, norms), "", gain)

    def should_merge(self, model: onnx.ModelProto, symbolic: Symbolic, matmuls: Matmuls, is_split: bool = True) -> bool:
        """Whether merging matmuls of one tensor gains at every size.

        ``is_split``: a chain splits the merged output; else StofAttention reads it as it is.
        """
        try:
            context = self._context_of(model, symbolic)
            return all(self._merge_gains(context, matmuls, s, is_split) for s in context.sizes)
        except (KeyError, UnsupportedError, ValueError):
            return False

    def _context_of(self, model: onnx.ModelProto, symbolic: Symbolic) -> _MatmulContext:
        if self.context is None or self.context.symbolic is not symbolic:
            readers: dict[str, list[onnx.NodeProto]] = {}
            for node in model.graph.node:
                for name in dict.fromkeys(node.input):
                    readers.setdefault(name, []).append(node)
            sizes = self.sizes or sizes_of(model, symbolic, self.options)
            self.context = _MatmulContext(symbolic, sizes, readers, find_computed_tensors(model))
        return self.context

    def _merge_gains(self, context: _MatmulContext, matmuls: Matmuls, sizes: Mapping[str, int], is_split: bool) -> bool:
        symbolic = context.symbolic

        def elements(name: str) -> int:
            return math.prod(evaluate(d, sizes) for d in symbolic.shape(name) or ())

        shape = symbolic.shape(matmuls[0].input[0]) or ()
        inner = evaluate(shape[-1], sizes)
        separate = 0.0
        for node in matmuls:
            count = elements(node.output[0])
            read = context.readers.get(node.output[0], [])
            is_in_chain = node.output[0] in context.computed
            share = SHARE_USUAL if is_in_chain and self.options.products and has_gemm() else 1.0
            separate += self.machine.launch + self.machine.matmul_seconds(2.0 * count * inner, inner) / share
            if is_in_chain and share == 1.0:
                alone = not any(o in context.computed for n in read for o in n.output)  # one operator is no chain
                separate += (self.machine.runtime_seconds if alone else self.machine.seconds)(4 * count)
        count = sum(elements(n.output[0]) for n in matmuls)
        merged = self.machine.launch + self.machine.matmul_seconds(2.0 * count * inner, inner)
        return merged + (self.machine.seconds(4 * count) if is_split else 0.0) < _MOST_MERGED * separate


def _gains(
    candidates: Sequence[tuple[float, float, AnalyticalCost]], scheme: FusionScheme
) -> tuple[list[float], float]:
    """The gain of a scheme at each size, and the least gain that is worth it.

    Matmuls that no chain takes in have the same time in both, and are left out.

    Args:
        candidates: for each size, the seconds of the runtime without matmuls, of the matmuls, and the cost of segments.
        scheme: the scheme.
    """
    matmul_count = candidates[0][2].region.epilogue[0]
    fuses_matmuls = any(s[1] - s[0] > 1 and s[0] < matmul_count for s in scheme)
    gains = []
    for baseline, matmuls, cost in candidates:
        same = 0.0 if fuses_matmuls else matmuls
        gains.append((baseline + matmuls - same) / max(1e-12, sum(cost(s) for s in scheme) - same))
    return gains, LEAST_WITH_MATMULS if fuses_matmuls else LEAST_ESTIMATED


def sizes_in_use(graph: FusionGraph, options: Options) -> list[dict[str, int]]:
    """The sizes by which chains are chosen: both ends of ``--shape``, else a short and a long input."""
    return sizes_of(graph.model, graph.symbolic, options)


def sizes_of(model: onnx.ModelProto, symbolic: Symbolic, options: Options) -> list[dict[str, int]]:
    """The same for a model."""
    maker = InputMaker(model, symbolic, frozenset())
    all_sizes = []
    for i, (batch, length) in enumerate(_CASES):
        sizes = maker.dimensions.choose(Case(batch, length, Padding.NONE))
        sizes.update({n: ends[i] for n, ends in options.shapes.items()})
        all_sizes.append(assume_counted_sizes(model, symbolic, sizes))
    return all_sizes if all_sizes[0] != all_sizes[-1] else all_sizes[:1]
