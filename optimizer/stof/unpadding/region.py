# SPDX-License-Identifier: Apache-2.0
"""A region of a graph that can run on real tokens alone, and the key padding mask that says which these are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx

from stof.symbolic.tensor import Shape
from stof.unpadding.pad_masks import Guard, PadMask
from stof.unpadding.token_axes import RowWise, TokenAxes
from stof.verification.quantization import has_one_scale


@dataclass(frozen=True)
class PositionRead:
    """A node that reads one position of each sequence, which must then be among the tokens.

    Attributes:
        node: its index.
        position: of all sequences; negative: from the end.
    """

    node: int
    position: int


@dataclass(frozen=True)
class IndexRead:
    """A node that reads the rows that a tensor of indices names, which must then be among the tokens.

    Attributes:
        node: its index.
        indices: the tensor.
        kind: what it holds: "pairs" of sequence and position, "rows" of batch times positions, "positions" of each sequence,
            "elements": positions of each sequence for each element of a row.
    """

    node: int
    indices: str
    kind: str


@dataclass(frozen=True)
class UnpaddedRegion:
    """The nodes that run on real tokens.

    Attributes:
        mask: which tokens are real.
        shape: the sizes B and T of the padded batch.
        source: an input of the model that begins with both axes.
        nodes: what is known of each of them, by its index in the graph.
        sites: of these, the StofAttention nodes of which query, key and value are unpadded.
        cross_sites: StofAttention nodes, none of the region, of which key and value are.
        reads: the positions that other nodes read.
        index_reads: the rows that other nodes read by indices.
        zero: of the tensors that it writes, those that are 0 in all rows of padding anyway.
        sizes: nodes that read the shape of an unpadded tensor, by index: that tensor.
        capacity: the number of rows of unpadded tensors in every run; 0: as many as there are tokens.
        guards: all of which must find keys in a text; else it keeps all rows.
        has_averaged_padding: rows of padding between two tokens may be averages (empty_rows mean or all) and differ from the
            original's.
    """

    mask: PadMask
    shape: Shape
    source: str
    nodes: Mapping[int, RowWise]
    sites: frozenset[int]
    cross_sites: frozenset[int]
    reads: tuple[PositionRead, ...] = ()
    index_reads: tuple[IndexRead, ...] = ()
    zero: frozenset[str] = frozenset()
    sizes: Mapping[int, str] = field(default_factory=dict)
    capacity: int = 0
    guards: tuple[Guard, ...] = ()
    has_averaged_padding: bool = False

    def unpadded(self, nodes: Sequence[onnx.NodeProto]) -> dict[str, TokenAxes]:
        """The tensors that the region writes, with their axes of tokens."""
        return {
            name: axes
            for i, row_wise in self.nodes.items()
            for name, axes in zip(nodes[i].output, row_wise.outputs, strict=False)
            if name and axes is not None
        }

    def with_packed(self, packed: Collection[int]) -> UnpaddedRegion:
        """The region with these attentions alone; others are none of its nodes, and read padded copies."""
        nodes = {i: row_wise for i, row_wise in self.nodes.items() if i in packed or i not in self.sites}
        return replace(self, nodes=nodes, sites=self.sites & set(packed), cross_sites=self.cross_sites & set(packed))

    def has_common_scales(self, graph: onnx.GraphProto) -> bool:
        """Whether a node quantizes all rows with one scale, which rows without a token must not change."""
        return any(has_one_scale(graph.node[i]) for i in self.nodes)

    def zero_outputs(self, graph: onnx.GraphProto) -> list[str]:
        """The outputs of a graph that get zeros as rows of padding."""
        unpadded = self.unpadded(graph.node)
        return [o.name for o in graph.output if o.name in unpadded and o.name not in self.zero]


@dataclass(frozen=True)
class MaskResult:
    """What was found for one mask.

    Attributes:
        mask: the mask.
        region: what can run on real tokens; None: nothing.
        attentions: how many StofAttention nodes read the mask.
        reason: why nothing can, or why some of them cannot; empty where all do.
        tokens: the axes of the tokens, by tensor, as far as they could be followed.
    """

    mask: PadMask
    region: UnpaddedRegion | None
    attentions: int
    reason: str
    tokens: Mapping[str, TokenAxes] = field(default_factory=dict)
