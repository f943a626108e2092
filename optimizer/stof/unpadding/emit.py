# SPDX-License-Identifier: Apache-2.0
"""Writes regions of real tokens: the only step that changes a graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

from stof.graph.dead_code import remove_dead_code
from stof.graph.index import DOMAIN, all_nodes, opset_of, topological_order
from stof.graph.names import rename_tensor, unused_prefix
from stof.graph.node_builder import Builder
from stof.graph.protobuf import copy_model
from stof.symbolic import Symbolic
from stof.symbolic.algebra.terms import Int, integer
from stof.symbolic.tensor import Shape
from stof.unpadding.find_keys import add_has_keys
from stof.unpadding.function_body import CUMULATIVE, CUMULATIVE_KEYS, FIRST, SEQUENCES, Sequences, add_sequences
from stof.unpadding.pad_masks import ATTENTION, find_length_slot
from stof.unpadding.region import UnpaddedRegion
from stof.unpadding.rules import attention_layouts
from stof.unpadding.token_axes import TokenAxes


def emit_regions(model: onnx.ModelProto, symbolic: Symbolic, regions: Sequence[UnpaddedRegion]) -> onnx.ModelProto:
    """A copy of the model in which the nodes of the regions run on real tokens.

    Args:
        model: with StofAttention nodes.
        symbolic: of this model.
        regions: with no node in common.
    """
    written = copy_model(model)
    nodes: list[onnx.NodeProto] = []
    changed: set[str] = set()
    original: dict[str, str] = {}
    kinds: dict[int, Sequences] = {}
    sources: dict[int, tuple[str, str]] = {}
    for number, region in enumerate(regions):
        builder = Builder(opset_of(model), unused_prefix(model.graph, f"stof_unpad{number}_"))
        writer = _Writer(written, symbolic, region, builder, original)
        writer.rewrite()
        nodes += writer.builder.nodes
        changed |= writer.unpadded.keys()
        for i in region.sites | region.cross_sites:
            kinds[i] = Sequences.ALL if i in region.sites else Sequences.KEYS
            sources[i] = (writer.cumulative, writer.first_position)
    if kinds:
        others = Builder(opset_of(model), unused_prefix(model.graph, "stof_unpad_"))
        _add_roles(written, kinds, sources, others)
        nodes += others.nodes
    written.graph.node.extend(nodes)
    _sort(written.graph)
    kept = [v for v in written.graph.value_info if v.name not in changed]
    del written.graph.value_info[:]
    written.graph.value_info.extend(kept)
    remove_dead_code(written.graph, model.graph)
    return written


def _sort(graph: onnx.GraphProto) -> None:
    nodes = list(graph.node)
    ordered = [nodes[i] for i in topological_order(nodes)]
    del graph.node[:]
    graph.node.extend(ordered)


def _add_roles(
    model: onnx.ModelProto, kinds: Mapping[int, Sequences], sources: Mapping[int, tuple[str, str]], builder: Builder
) -> None:
    """Gives all attention nodes two more operands, and the function that they share what it does with them.

    Args:
        model: is changed.
        kinds: what is unpadded at attention nodes, by index.
        sources: their operands.
        builder: gets the node whose result stands in for the operands of other attention nodes.
    """
    slots: set[int] = set()
    calls: list[Sequences] = []
    absent = ""
    for i, node in _attention_nodes(model.graph):
        operands = next(a for a in node.attribute if a.name == "operands")
        kind = kinds.get(i, Sequences.NONE)
        roles = operands.s.decode().split()
        if kind is Sequences.NONE:
            absent = absent or builder.constant([0, 0], np.int32)
            node.input.extend([absent] * 2)
            roles += ["unused", "unused"]
        else:
            slots.add(find_length_slot(node))
            node.input.extend(sources[i])
            roles += [CUMULATIVE if kind is Sequences.ALL else CUMULATIVE_KEYS, FIRST]
        operands.s = " ".join(roles).encode()
        node.attribute.append(helper.make_attribute(SEQUENCES, kind.value))
        calls.append(kind)
    for function in model.functions:
        if function.domain == DOMAIN and function.name == ATTENTION:
            layouts = next(
                attention_layouts(n) for n in model.graph.node if n.domain == DOMAIN and n.op_type == ATTENTION
            )
            function.CopyFrom(add_sequences(function, layouts, sorted(slots), set(calls)))


def _attention_nodes(graph: onnx.GraphProto) -> Iterator[tuple[int, onnx.NodeProto]]:
    """The attention nodes of a graph with their indices; those of its subgraphs have -1."""
    for i, node in enumerate(graph.node):
        for j, inner in enumerate(all_nodes([node])):
            if inner.domain == DOMAIN and inner.op_type == ATTENTION:
                yield (i if j == 0 else -1), inner


class _Writer:
    """Rewrites one region of a model in place; new nodes are the builder's.

    Args:
        model: is changed.
        symbolic: of the model before any region was rewritten.
        region: of the model.
        builder: gets the new nodes.
        original: for tensors that have other names than in ``symbolic``, the name there.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        symbolic: Symbolic,
        region: UnpaddedRegion,
        builder: Builder,
        original: dict[str, str],
    ) -> None:
        self.graph = model.graph
        self.symbolic = symbolic
        self.region = region
        self.builder = builder
        self.unpadded = region.unpadded(self.graph.node)
        self.gathered: dict[tuple[str, TokenAxes, int], str] = {}
        self.as_source = _inputs_as(model.graph, region.source)
        self.padded: dict[str, str] = {}
        self.original = original
        self.counting = ""
        self.cumulative = self.first_position = self.index = self.rows = self.positions = self.sequences = ""
        self.batch = self.length = self.real = ""

    def rewrite(self) -> None:
        """Writes the indices of the real tokens, and what of the graph reads or gives unpadded tensors."""
        self._find_tokens()
        for output in self.graph.output:
            if output.name in self.unpadded:
                self._keep_output(output.name)
        for i, node in enumerate(self.graph.node):
            if i in self.region.nodes:
                self._rewrite_node(i, node)
            elif i in self.region.sizes and node.input[0] in self.unpadded:
                self._replace_size(node, node.input[0])
            else:
                self._pad_inputs(i, node)

    def _keep_output(self, name: str) -> None:
        """An output of the model keeps its name, with rows of padding; the region writes a tensor of another name."""
        inner = f"{self.builder.prefix}{name}"
        rename_tensor(self.graph, name, inner)
        self.unpadded[inner] = self.unpadded.pop(name)
        self.original[inner] = name
        self._write_padded(inner, are_zero=True)
        self.builder.nodes[-1].output[0] = name

    # ---- which tokens there are ----
    def _find_tokens(self) -> None:
        """The tokens of each sequence: from its first real one to its last; all, where it has none or others are read."""
        b, mask = self.builder, self.region.mask
        sizes = b.add("Shape", [self.region.source])
        self.batch, self.length = (b.add("Gather", [sizes, b.constant(i)]) for i in range(2))
        tensor = mask.tensor
        if self._rank(tensor) == 2:
            tensor = self._expanded(tensor, TokenAxes(0, 1))
        else:
            by_length = b.add("Concat", [b.constant([-1]), b.unsqueeze(self.length, [0])], axis=0)
            both = [b.unsqueeze(n, [0]) for n in (self.batch, self.length)]
            tensor = b.add("Expand", [b.add("Reshape", [tensor, by_length]), b.add("Concat", both, axis=0)])
        self.real = real = mask.add_real(b, tensor, self.symbolic.dtype(mask.tensor))
        if self.region.guards:
            # A sequence that may have no key to attend to keeps all rows, as one without a real token does.
            real = b.add("And", [real, add_has_keys(b, self.region, real, (self.batch, self.length))])
        zero, one = b.constant(0), b.constant(1)
        row = b.add("Range", [zero, self.length, one])
        end = b.add("Sub", [self.length, one])
        first, last = self._find_ends(real, row)
        last = b.add("Min", [last, end])
        for position in sorted({r.position for r in self.region.reads}):
            at = b.constant(position) if position >= 0 else b.add("Add", [self.length, b.constant(position)])
            if self.region.averages:
                is_outside = b.add("Not", [b.add("Gather", [real, b.unsqueeze(at, [0])], axis=1)])
            else:
                is_outside = b.add("Or", [b.add("Less", [at, first]), b.add("Greater", [at, last])])
            first = b.add("Where", [is_outside, zero, first])
            last = b.add("Where", [is_outside, end, last])
        before, behind = b.add("Less", [row, first]), b.add("Greater", [row, last])
        inside = b.add("Not", [b.add("Or", [before, behind])])
        if self.region.index_reads:
            # Rare, as a text that is padded on the other side than its pooling expects: all rows stay.
            all_rows = self._are_read_outside(self._find_counting() if self.region.averages else inside)
            first = b.add("Where", [all_rows, zero, first])
            last = b.add("Where", [all_rows, end, last])
            inside = b.add("Or", [inside, all_rows])
        found = b.add("NonZero", [inside])
        self.sequences, self.positions = (b.add("Gather", [found, b.constant(i)]) for i in range(2))
        self.index = b.unsqueeze(b.add("Transpose", [found], perm=[1, 0]), [0])
        self.rows = b.add("Add", [b.add("Mul", [self.sequences, self.length]), self.positions])
        length = b.add("Squeeze", [b.add("Add", [b.add("Sub", [last, first]), one]), b.constant([1])])
        ends = b.add("Concat", [b.constant([0]), b.add("CumSum", [length, zero])], axis=0)
        self.cumulative = b.add("Cast", [ends], to=TensorProto.INT32)
        self.first_position = b.add("Cast", [b.add("Squeeze", [first, b.constant([1])])], to=TensorProto.INT32)

    def _find_ends(self, real: str, row: str) -> tuple[str, str]:
        """[B, 1]: the first and the last real position of each sequence; 0 and the last one where there is none.

        As the largest of numbers that differ from each other: providers disagree about the first or last of equal ones,
        and ONNX Runtime's CUDA provider leaves ``select_last_index`` to the CPU.
        """
        b = self.builder
        length, position = (b.add("Cast", [n], to=TensorProto.FLOAT) for n in (self.length, row))
        number = b.add("Mul", [b.add("Cast", [real], to=TensorProto.FLOAT), length])
        # One more position, without a token: there is no largest one of none.
        around, least = b.constant([0, 0, 0, 1]), b.constant(np.finfo(np.float32).min, np.float32)
        both = (b.add(sign, [number, position]) for sign in ("Sub", "Add"))
        first, last = (b.add("ArgMax", [b.add("Pad", [n, around, least])], axis=1, keepdims=1) for n in both)
        return first, last

    def _find_counting(self) -> str:
        """[B, S]: the real tokens, and all rows of a sequence without one."""
        b = self.builder
        if not self.counting:
            count = b.add("ReduceSum", [b.add("Cast", [self.real], to=TensorProto.INT64), b.constant([1])], keepdims=1)
            self.counting = b.add("Or", [self.real, b.add("Equal", [count, b.constant(0)])])
        return self.counting

    def _are_read_outside(self, inside: str) -> str:
        """Whether nodes read rows by indices that are not among those of ``inside`` [B, S]."""
        b, reads = self.builder, dict.fromkeys((r.indices, r.kind) for r in self.region.index_reads)
        found = ""
        for indices, kind in reads:
            if kind == "rows":
                row = b.add("Gather", [b.add("Reshape", [inside, b.constant([-1])]), indices])
            elif kind == "elements":
                row = b.add("GatherElements", [inside, b.add("Flatten", [indices], axis=1)], axis=1)
            else:
                row = b.add("GatherND", [inside, indices], batch_dims=int(kind == "positions"))
            count = b.add("ReduceSum", [b.add("Cast", [b.add("Not", [row])], to=TensorProto.INT64)], keepdims=0)
            is_outside = b.add("Greater", [count, b.constant(0)])
            found = b.add("Or", [found, is_outside]) if found else is_outside
        return found

    # ---- nodes of the region ----
    def _rewrite_node(self, i: int, node: onnx.NodeProto) -> None:
        row_wise = self.region.nodes[i]
        result = row_wise.outputs[0]
        for j, axes in row_wise.inputs.items():
            if node.input[j] not in self.unpadded:
                behind = (
                    0 if result is None or result.position is None else self._rank(node.output[0]) - result.position
                )
                node.input[j] = self._gather(node.input[j], axes, behind)
        if (node.domain, node.op_type) == ("com.microsoft", "RotaryEmbedding"):
            # There may be more tokens than positions in its tables; without this, ONNX Runtime refuses that.
            node.attribute.extend([helper.make_attribute("is_packed_batching", 1)])
        if row_wise.shape is not None:
            at, shape = row_wise.shape
            while len(node.input) <= at:
                node.input.append("")
            node.input[at] = self.builder.constant(list(shape))
            kept = [a for a in node.attribute if a.name not in ("shape", "allowzero")]
            del node.attribute[:]
            node.attribute.extend(kept)

    def _gather(self, tensor: str, axes: TokenAxes, behind: int) -> str:
        """The real tokens of a tensor that the graph has padded.

        Args:
            tensor: its name.
            axes: of its tokens.
            behind: in the result of the node that reads it, the axis of positions and those behind it.
        """
        key = (tensor, axes, behind if axes.position is None else 0)
        if key in self.gathered:
            return self.gathered[key]
        b, source = self.builder, tensor
        if not axes.merged:
            tensor = self._expanded(tensor, axes)
        if axes.merged:
            found = b.add("Gather", [tensor, self.rows], axis=axes.position)
        elif axes.is_whole:
            perm = axes.in_front(self._rank(source))
            found = self._transposed(b.add("GatherND", [self._transposed(tensor, perm), self.index]), _inverse(perm))
        elif axes.position is not None:
            found = b.add("Gather", [tensor, self.positions], axis=axes.position)
        else:
            # [.., B, .., 1, ..]: what all tokens of a sequence have in common; the axis of positions may be missing.
            assert axes.batch is not None
            found = b.add("Gather", [tensor, self.sequences], axis=axes.batch)
            rank = self._rank(source)
            if new := list(range(behind - rank)):
                found = b.unsqueeze(found, new)
            batch, perm = axes.batch + len(new), list(range(rank + len(new)))
            position = len(perm) - behind
            perm[batch], perm[position] = perm[position], perm[batch]
            found = b.add("Transpose", [found], perm=perm)
        self.gathered[key] = found
        return found

    def _expanded(self, tensor: str, axes: TokenAxes) -> str:
        """A tensor with a row for each token: where a size has a name of its own in the model, it may be 1 in a run."""
        if tensor in self.as_source:
            return tensor
        batch, length = self.region.shape
        wanted = {axes.batch: batch, axes.position: length}
        sizes = [wanted.get(a, integer(1)) for a in range(self._rank(tensor))]
        return self.builder.add("Expand", [tensor, self._sizes(sizes)])

    def _transposed(self, tensor: str, perm: Sequence[int]) -> str:
        if list(perm) == sorted(perm):
            return tensor
        return self.builder.add("Transpose", [tensor], perm=list(perm))

    def _shape(self, tensor: str) -> Shape:
        shape = self.symbolic.shape(self.original.get(tensor, tensor))
        assert shape is not None
        return shape

    def _rank(self, tensor: str) -> int:
        return len(self._shape(tensor))

    # ---- what reads the region ----
    def _pad_inputs(self, i: int, node: onnx.NodeProto) -> None:
        """Gives a node outside the padded forms of what it reads; attention with unpadded keys reads these as they are."""
        kept = (1, 2) if i in self.region.cross_sites else ()
        for j, name in enumerate(node.input):
            if name in self.unpadded and j not in kept:
                node.input[j] = self._pad(name)

    def _pad(self, name: str) -> str:
        """A tensor of the region with rows of padding, which are 0."""
        if name not in self.padded:
            self.padded[name] = self._write_padded(name)
            self.original[self.padded[name]] = self.original.get(name, name)
        return self.padded[name]

    def _write_padded(self, name: str, are_zero: bool = False) -> str:
        """Writes a padded tensor; ``are_zero``: rows of padding that are among the tokens are 0, too."""
        b, axes, shape = self.builder, self.unpadded[name], self._shape(name)
        dtype = self.symbolic.dtype(self.original.get(name, name))
        zero = np.zeros(1, helper.tensor_dtype_to_np_dtype(dtype))
        fill = helper.make_tensor("value", dtype, [1], zero.tobytes(), raw=True)
        perm = axes.in_front(len(shape))
        index = b.unsqueeze(self.rows, [1]) if axes.merged else self.index
        zeros = b.add("ConstantOfShape", [self._sizes([shape[a] for a in perm], axes.merged)], value=fill)
        tokens = self._transposed(name, perm)
        if are_zero:
            tokens, index = self._without_padding(tokens, index, axes.merged)
        return self._transposed(b.add("ScatterND", [zeros, index, tokens]), _inverse(perm))

    def _without_padding(self, tokens: str, index: str, is_merged: bool) -> tuple[str, str]:
        """Tokens, in front of the other axes of a tensor, and their indices, without those that are padding.

        Chosen by Gather: ONNX Runtime has no Where for many types.
        """
        b, counting = self.builder, self._find_counting()
        real = b.add("Gather", [b.add("Reshape", [counting, b.constant([-1])]), self.rows])
        chosen = b.add("Gather", [b.add("NonZero", [real]), b.constant(0)])
        axis = 0 if is_merged else 1
        return b.add("Gather", [tokens, chosen], axis=axis), b.add("Gather", [index, chosen], axis=axis)

    def _sizes(self, sizes: Sequence[Int], is_merged: bool = False) -> str:
        """A shape as a tensor."""
        b, (batch, length) = self.builder, self.region.shape
        parts: list[str] = []
        for size in sizes:
            if size.constant is not None:
                parts.append(b.constant([size.constant]))
            elif size == batch * length:
                parts.append(b.unsqueeze(b.add("Mul", [self.batch, self.length]), [0]))
            elif size == length:
                parts.append(b.unsqueeze(self.length, [0]))
            else:  # of sequences, or of all their heads
                heads = size.divide(batch)
                assert heads is not None
                assert heads.constant is not None
                count = self.batch if heads.constant == 1 else b.add("Mul", [self.batch, b.constant(heads.constant)])
                parts.append(b.unsqueeze(count, [0]))
        return b.add("Concat", parts, axis=0) if parts else b.constant([])

    def _replace_size(self, node: onnx.NodeProto, name: str) -> None:
        """Has a Shape node give the shape of the padded tensor, without that tensor."""
        shape = self._shape(name)
        start, end = (
            next((a.i for a in node.attribute if a.name == n), d) for n, d in (("start", 0), ("end", len(shape)))
        )
        sizes = self._sizes(shape[start:end])
        node.op_type = "Identity"
        del node.attribute[:]
        node.input[0] = sizes


def _inverse(perm: Sequence[int]) -> list[int]:
    return [list(perm).index(i) for i in range(len(perm))]


def _inputs_as(graph: onnx.GraphProto, source: str) -> set[str]:
    """The inputs whose first two sizes are those of another one by their names or numbers."""

    def sizes(value: onnx.ValueInfoProto) -> list[bytes]:
        return [d.SerializeToString() for d in value.type.tensor_type.shape.dim[:2] if d.dim_param or d.dim_value]

    own = next(sizes(i) for i in graph.input if i.name == source)
    return {source} | {i.name for i in graph.input if len(own) == 2 and sizes(i) == own}
