# SPDX-License-Identifier: Apache-2.0
"""Describes the regions of a model: the chain that each one can become, its name, and its problem."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import onnx

from stof.fusion.describe.working_copies import FusionCopy, make_copies
from stof.fusion.description.chain_description import ChainDescription
from stof.fusion.emit import ChainSignature, chain_signature
from stof.fusion.fusion_graph import FusionGraph
from stof.fusion.policy import ChainPolicy, ShapeReads
from stof.fusion.regions import find_chains, retranslate_chains
from stof.fusion.translate import FusedChain, RefusedRegion
from stof.graph.names import FreshNames
from stof.symbolic import Symbolic


@dataclass(frozen=True)
class ChainProblem:
    """A region as kernels see it: equal problems are decided once.

    Attributes:
        description: of the chain that computes the region.
        input_types: ONNX element types of its inputs.
        output_types: of its outputs.
        operators: those that it replaces, matmuls before them included.
        weight_shapes: of the matmuls' constant factors.
    """

    description: ChainDescription
    input_types: tuple[int, ...]
    output_types: tuple[int, ...]
    operators: str
    weight_shapes: tuple[str, ...]

    @property
    def signature(self) -> ChainSignature:
        """The chain's description and element types."""
        return self.description, self.input_types, self.output_types


@dataclass(frozen=True, eq=False)
class DescribedRegion:
    """A region that can become a chain.

    Attributes:
        chain: the chain.
        name: for options, plans and reports.
        nodes: node indices, of matmuls before the chain, too.
        problem: what it asks of kernels.
    """

    chain: FusedChain
    name: str
    nodes: Sequence[int]
    problem: ChainProblem


@dataclass(frozen=True, eq=False)
class DescribedGraph:
    """The regions of one copy, by one way to count reads of shapes.

    Attributes:
        graph: in which they were found.
        regions: that can become chains, in the order of the graph.
        refused: the others.
        names: of regions and their parts, so far.
    """

    graph: FusionGraph
    regions: tuple[DescribedRegion, ...]
    refused: tuple[RefusedRegion, ...]
    names: RegionNames


@dataclass(frozen=True, eq=False)
class DescribedModel:
    """A model, whose copies and regions are described when they are asked for: the first one that works out is taken.

    Attributes:
        model: as the ops before have written it.
        policy: what the target allows.
        interpret: gives the facts of the model.
    """

    model: onnx.ModelProto
    policy: ChainPolicy
    interpret: Callable[[onnx.ModelProto], Symbolic] = Symbolic

    def copies(self) -> Iterator[FusionCopy]:
        """The models in which regions are looked for, in the order in which they are tried."""
        return make_copies(self.model, self.policy, self.interpret)

    def graph_of(self, copy: FusionCopy, shape_reads: ShapeReads) -> DescribedGraph:
        """The regions of a copy."""
        assert copy.symbolic is not None
        graph = FusionGraph(copy.model, copy.symbolic, self.policy, shape_reads)
        chains, refused = find_chains(graph)
        if shape_reads is ShapeReads.ASSUME_FUSED:
            chains = retranslate_chains(graph, chains)
        names = RegionNames()
        labels = [names.name(graph, c.region.node_indices) for c in chains]
        regions = tuple(_describe(graph, c, label) for c, label in zip(chains, labels, strict=True))
        return DescribedGraph(graph, regions, tuple(refused), names)


def _describe(graph: FusionGraph, chain: FusedChain, name: str) -> DescribedRegion:
    nodes = graph.with_leading_matmuls(chain.region.node_indices)
    problem = ChainProblem(
        *chain_signature(chain, graph.symbolic), graph.operator_names(nodes), graph.weight_shapes(nodes)
    )
    return DescribedRegion(chain, name, nodes, problem)


class RegionNames:
    """Unique names of regions for reports and plans: the last node's name, or the tensor that it writes."""

    def __init__(self) -> None:
        self._names = FreshNames(numbered=lambda name, number: f"{name} ({number})")

    def name(self, graph: FusionGraph, node_indices: Sequence[int]) -> str:
        """A new name."""
        node = graph.nodes[node_indices[-1]]
        return self._names.make(node.name or f"{node.op_type} of {node.output[0]}")
