# SPDX-License-Identifier: Apache-2.0
"""Decides for TensorRT: regions beside StofAttention become plugins where TensorRT itself would need several kernels.

TensorRT fuses almost every region by itself, but never across a plugin. It merges matmuls of one tensor, of whose output a
plugin gets copies, and fuses biases and activations with matmuls. Its kernels are modelled after the engines that TensorRT
for RTX 1.7 builds (docs/guide/tensorrt.md).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from stof.attention.function_body import OP as ATTENTION
from stof.errors import UnsupportedError
from stof.fusion.decide.decision import ChainDecision
from stof.fusion.decide.estimated import LEAST_ESTIMATED, sizes_in_use
from stof.fusion.element_ops import FREE, kind_of_node
from stof.fusion.emit import ChainSignature
from stof.fusion.fusion_graph import FusionGraph
from stof.fusion.search.cost import AnalyticalCost, MachineModel, SegmentedRegion
from stof.fusion.translate import FusedChain
from stof.options import Options

_MATMUL_OPS = frozenset({"MatMul", "Gemm"})


@dataclass
class TensorRtDecider:
    """Decides by a cost model in which TensorRT's kernels are as fast as chains, and only their number differs.

    A region is taken whole or not at all: a plugin for a part of it would split what TensorRT fuses.
    """

    options: Options
    machine: MachineModel
    sizes: list[dict[str, int]] = field(default_factory=list)

    def __call__(self, graph: FusionGraph, chain: FusedChain, key: ChainSignature, undecided: int) -> ChainDecision:
        """Takes the whole region where it gains at every size in use."""
        node_indices = chain.region.node_indices
        if not is_beside_attention(graph, node_indices):
            return ChainDecision((), f"TensorRT fuses it with what is around it, and no {ATTENTION} is")
        region = SegmentedRegion(graph, node_indices)
        try:
            self.sizes = self.sizes or sizes_in_use(graph, self.options)
            costs = [AnalyticalCost(region, s, self.machine) for s in self.sizes]
            gains = [tensorrt_seconds(graph, node_indices, c) / chain_seconds(graph, node_indices, c) for c in costs]
        except (KeyError, UnsupportedError, ValueError) as error:
            return ChainDecision((), f"nothing can be estimated: {error}")
        gain = math.prod(gains) ** (1 / len(gains))
        if min(gains) < LEAST_ESTIMATED:
            return ChainDecision((), f"estimated {min(gains):.2f}x of TensorRT's own kernels' speed", gain)
        return ChainDecision(((0, len(node_indices)),), "", gain)


def is_beside_attention(graph: FusionGraph, node_indices: Collection[int]) -> bool:
    """Whether a region writes what a StofAttention reads, or reads what it writes."""
    around = {q for p in node_indices for q in (*graph.producers(p), *graph.consumers(p))}
    return any(graph.nodes[q].op_type == ATTENTION for q in around)


def tensorrt_seconds(graph: FusionGraph, node_indices: Sequence[int], cost: AnalyticalCost) -> float:
    """Seconds of TensorRT's kernels of a region.

    One kernel writes all computed outputs; each output that is only transposed has a kernel of its own. Where a row
    reduction and a movement operator meet, the reduction is a kernel before, which reads the rows a second time.
    """
    machine = cost.machine
    computed: dict[str, set[int]] = {}
    total = 0.0
    reduced_bytes = 0
    for name in graph.outputs(node_indices):
        cone = _cone(graph, name, set(node_indices))
        kinds = {kind_of_node(graph.nodes[p]) for p in cone}
        if kinds == {"moving"} and any(graph.nodes[p].op_type == "Transpose" for p in cone):
            total += machine.seconds(2 * cost.bytes_of(name))
            continue
        computed[name] = cone
        if kinds & {"reducing", "rowwise"} and any(_is_moved(graph, p) for p in cone):
            reduced_bytes += cost.bytes_of(name)
    if reduced_bytes:
        total += machine.seconds(reduced_bytes)
    if computed:
        nodes = set().union(*computed.values())
        read = {n for p in nodes for n in graph.nodes[p].input if n in graph.inputs(node_indices)}
        # Of a wider input, no more is read than is written.
        written = sum(cost.bytes_of(n) for n in computed)
        total += machine.seconds(written + sum(min(cost.bytes_of(n), written) for n in read))
    return total


def chain_seconds(graph: FusionGraph, node_indices: Sequence[int], cost: AnalyticalCost) -> float:
    """Seconds of a plugin, with TensorRT's copies of inputs that are parts of a wider tensor."""
    copied = sum(cost.machine.seconds(2 * cost.bytes_of(n)) for n in graph.inputs(node_indices) if _is_part(graph, n))
    return cost((0, len(node_indices))) + copied


def _cone(graph: FusionGraph, name: str, members: set[int]) -> set[int]:
    """The nodes of a region that an output needs."""
    cone: set[int] = set()
    pending = [graph.writer[name]]
    while pending:
        index = pending.pop()
        if index in members and index not in cone:
            cone.add(index)
            pending.extend(graph.producers(index))
    return cone


def _is_moved(graph: FusionGraph, index: int) -> bool:
    node = graph.nodes[index]
    return kind_of_node(node) == "moving" and node.op_type not in FREE


def _is_part(graph: FusionGraph, name: str) -> bool:
    """Whether a tensor is a part of another, or an output of matmuls of one tensor, which TensorRT merges."""
    index = graph.writer.get(name)
    if index is None:
        return False
    if graph.nodes[index].op_type in FREE:
        return _is_part(graph, graph.nodes[index].input[0])
    if _is_moved(graph, index):
        return True
    if not _is_weight_matmul(graph, index):
        return False
    others = graph.readers.get(graph.nodes[index].input[0], ())
    return any(q != index and _is_weight_matmul(graph, q) for q in others)


def _is_weight_matmul(graph: FusionGraph, index: int) -> bool:
    node = graph.nodes[index]
    return node.op_type in _MATMUL_OPS and node.input[1] in graph.constants
