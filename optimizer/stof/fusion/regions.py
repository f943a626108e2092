# SPDX-License-Identifier: Apache-2.0
"""Finds fused chains: memory-bound nodes are merged along edges into regions as large as one kernel can compute.

A region is convex: no path leaves it and comes back, so that it can become one node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from onnx import TensorProto

from stof.errors import UnsupportedError
from stof.execution.upcast import HALF
from stof.fusion.contracted_graph import ContractedGraph
from stof.fusion.description.format import MOST_INPUTS, MOST_OUTPUTS, MOST_REDUCTIONS
from stof.fusion.element_ops import FREE, NORMS, TYPES
from stof.fusion.function_body import make_branch
from stof.fusion.fusion_graph import FusionGraph
from stof.fusion.gemm import is_fusable_matmul, translate_gemm
from stof.fusion.node_group import NodeGroup, join_groups, make_group
from stof.fusion.tensorrt_plugin import check_plugin
from stof.fusion.translate import FusedChain, RefusedRegion, Region, translate
from stof.graph.index import opset_of
from stof.symbolic import Int

_MOST_NODES = 96  # of a region
_FP32 = frozenset({int(TensorProto.FLOAT)})
_FLOATS = _FP32 | HALF


def find_chains(graph: FusionGraph) -> tuple[list[FusedChain], list[RefusedRegion]]:
    """The chains of a graph, and the regions that cannot become one, both in the order of the graph."""
    chains_found: list[FusedChain] = []
    refused: list[RefusedRegion] = []
    for region in _RegionMerger(graph, graph.memory_bound).run():
        chain = build_chain(graph, region)
        if isinstance(chain, FusedChain):
            chains_found.append(chain)
            continue
        if _kernel_count(graph, region) < 2:
            if graph.policy.epilogue_forms is not None:  # one operator, which a matmul before it may take
                chain = build_chain(graph, graph.with_leading_matmuls(sorted(region)))
            chains_found += [chain] if isinstance(chain, FusedChain) else []
            continue
        smaller = [build_chain(graph, part) for part in _RegionMerger(graph, region, only_translatable=True).run()]
        chains = [c for c in smaller if isinstance(c, FusedChain)]
        chains_found += chains
        if not chains and all(graph.symbolic.dtype(o) in TYPES for o in graph.outputs(region)):
            refused.append(chain)
    return chains_found, refused


def retranslate_chains(graph: FusionGraph, chains: Sequence[FusedChain]) -> list[FusedChain]:
    """Translates chains again, with the outputs that are read when no other node becomes part of one.

    A chain that fails is dropped, and the others are translated again.
    """
    while True:
        graph.set_fused_nodes(p for c in chains for p in c.region.node_indices)
        again = [build_chain(graph, c.region.node_indices) for c in chains]
        kept = [c for c in again if isinstance(c, FusedChain)]
        if len(kept) == len(chains):
            return kept
        chains = kept


def build_chain(graph: FusionGraph, node_indices: Collection[int]) -> FusedChain | RefusedRegion:
    """The chain of some nodes, or why there is none."""
    region = Region(tuple(sorted(node_indices)), graph.outputs(node_indices))
    # The other chains decide about a region's outputs and nothing else: equal regions are translated once.
    if region not in graph.chains:
        graph.chains[region] = _build_chain(graph, region)
    return graph.chains[region]


def _build_chain(graph: FusionGraph, region: Region) -> FusedChain | RefusedRegion:
    indices = region.node_indices
    if graph.policy.epilogue_forms is None and _has_matmul(graph, indices):
        return RefusedRegion(indices, "matmuls are not fused here")
    if _kernel_count(graph, indices) < 2 and not _is_worthwhile_alone(graph, indices):
        return RefusedRegion(indices, "one operator alone: nothing to fuse")
    try:
        return _translate(graph, region)
    except UnsupportedError as error:
        return RefusedRegion(indices, str(error))


def _has_matmul(graph: FusionGraph, node_indices: Collection[int]) -> bool:
    return any(is_fusable_matmul(graph.nodes[p], graph.symbolic) for p in node_indices)


def _is_worthwhile_alone(graph: FusionGraph, node_indices: Sequence[int]) -> bool:
    """Whether a kernel of one node may beat the runtime's: a matmul on the CPU, a norm on CUDA."""
    if graph.policy.has_cpu_gemm:
        return is_fusable_matmul(graph.nodes[node_indices[0]], graph.symbolic)
    return graph.policy.epilogue_forms is not None and any(graph.nodes[p].op_type in NORMS for p in node_indices)


def _translate(graph: FusionGraph, region: Region) -> FusedChain:
    for index in region.node_indices:
        node = graph.nodes[index]
        name = next((n for n in (*node.input, *node.output) if n in graph.uncertain_shapes), "")
        if name:
            raise UnsupportedError(
                f"the size of {name!r} comes from a slice by numbers along an axis that may be shorter than they say"
            )
    policy = graph.policy
    if policy.epilogue_forms is not None and _has_matmul(graph, region.node_indices):
        weights = graph.constants if policy.has_cpu_gemm else None
        types = _FLOATS if policy.has_16_bit_cpu_gemm else _FP32
        chain: FusedChain = translate_gemm(region, graph.nodes, graph.symbolic, policy.epilogue_forms, weights, types)
    else:
        chain = translate(region, graph.nodes, graph.symbolic)
        if policy.uses_tensorrt_plugins:
            check_plugin(chain)
    make_branch(chain, graph.nodes, graph.symbolic, opset_of(graph.model), "c")  # refuses what has no function body
    return chain


def _kernel_count(graph: FusionGraph, node_indices: Collection[int]) -> int:
    """How many kernels a runtime launches for the nodes."""
    return sum(graph.nodes[p].op_type not in FREE for p in node_indices)


class _RegionMerger:
    """Merges groups of nodes along edges while they stay convex and their outputs have common axes.

    Args:
        graph: the graph.
        node_indices: the nodes to group; at first each is a group by itself.
        only_translatable: whether every group has to translate to a chain.
    """

    def __init__(self, graph: FusionGraph, node_indices: Iterable[int], only_translatable: bool = False) -> None:
        self.graph = graph
        self.only_translatable = only_translatable
        self.group = {p: p for p in node_indices}  # by node: its group's first node
        self.groups = {p: make_group(graph, p) for p in self.group}
        self.refused_unions: set[frozenset[int]] = set()
        self.contracted = ContractedGraph(graph.consumers, graph.read_nodes)

    def run(self) -> list[frozenset[int]]:
        """Merges until nothing more can be merged; returns the groups in the order of the graph."""
        changed = True
        while changed:
            changed = False
            for index in sorted(self.group):
                while self._grow(index):
                    changed = True
        return sorted((g.members for g in self.groups.values()), key=min)

    def _grow(self, index: int) -> bool:
        """Merges a node's group with the groups that it reads: all at once, or one of them."""
        group = self.group[index]
        read = [self.group[p] for p in self.graph.producers(index) if p in self.group and self.group[p] != group]
        distinct = list(dict.fromkeys(read))
        for some in [distinct, *([d] for d in distinct)] if len(distinct) > 1 else [distinct]:
            if some and self._merge([group, *some]):
                return True
        return False

    def _merge(self, names: Sequence[int]) -> bool:
        groups = [self.groups[n] for n in names]
        members = frozenset().union(*(g.members for g in groups))
        if members in self.refused_unions:
            return False
        union = self._join(groups) if self._has_room(groups) else None
        if (
            union is None
            or not self.contracted.is_convex(names)
            or (self.only_translatable and not self._translates(union))
        ):
            self.refused_unions.add(members)
            return False
        first = self.contracted.merge(names)
        for n in names:
            del self.groups[n]
        self.groups[first] = union
        self.group.update(dict.fromkeys(members, first))
        return True

    def _translates(self, union: NodeGroup) -> bool:
        try:
            _translate(self.graph, Region(tuple(sorted(union.members)), union.outputs(self.graph)))
        except UnsupportedError:
            return False
        return True

    def _has_room(self, groups: Sequence[NodeGroup]) -> bool:
        """Whether a union is within the limits of the format, as far as numbers of nodes say."""
        nodes = sum(len(g.members) for g in groups)
        return nodes <= _MOST_NODES and 2 * sum(g.reductions for g in groups) <= MOST_REDUCTIONS

    def _join(self, groups: Sequence[NodeGroup]) -> NodeGroup | None:
        """The union of groups; None where one kernel cannot compute it."""
        union = join_groups(self.graph, groups)
        if union is None or len(union.inputs(self.graph)) > MOST_INPUTS:
            return None
        outputs = union.outputs(self.graph)
        return union if 0 < len(outputs) <= MOST_OUTPUTS and self._has_common_axes(outputs) else None

    def _has_common_axes(self, outputs: Sequence[str]) -> bool:
        """Whether all outputs have as many elements as the largest, or one for each of its rows."""
        counts = [self.graph.element_count(o) for o in outputs]
        largest = next((c for c in counts if all(c == d or c.divide(d) is not None for d in counts)), None)
        if largest is None:
            return False
        row_lengths: set[Int] = set()
        for count in counts:
            length = largest.divide(count)
            if count != largest and length is not None:
                row_lengths.add(length)
        return len(row_lengths) <= 1
