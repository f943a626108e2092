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
from stof.unpadding.function_body import CUMULATIVE, CUMULATIVE_KEYS, FIRST, SEQUENCES, Sequences, add_sequences
from stof.unpadding.pad_masks import ATTENTION, find_length_slot
from stof.unpadding.region import UnpaddedRegion
from stof.unpadding.rules import attention_layouts
from stof.unpadding.token_axes import TokenAxes
from stof.unpadding.token_rows import BatchTensors, TokenRows

_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})


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
            sources[i] = (writer.tokens.cumulative, writer.tokens.first_position)
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
        sizes = builder.add("Shape", [region.source])
        self.batch, self.length = (builder.add("Gather", [sizes, builder.constant(i)]) for i in range(2))
        self.tokens = self._find_tokens()

    def rewrite(self) -> None:
        """Rewrites what of the graph reads or gives unpadded tensors."""
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

    def _find_tokens(self) -> TokenRows:
        """The tokens, by the mask and the sizes of the padded batch."""
        b, mask = self.builder, self.region.mask.tensor
        is_whole, dtype = self._rank(mask) == 2, self.symbolic.dtype(mask)
        mask = self._expanded(mask, TokenAxes(0, 1)) if is_whole else mask
        return TokenRows(b, self.region, BatchTensors(self.batch, self.length, mask, dtype, is_whole))

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
        if self.region.capacity and i in self.region.sites and self.region.has_common_scales(self.graph):
            self._repeat_first_token(node)
        if row_wise.shape is not None:
            at, shape = row_wise.shape
            while len(node.input) <= at:
                node.input.append("")
            node.input[at] = self.builder.constant(list(shape))
            kept = [a for a in node.attribute if a.name not in ("shape", "allowzero")]
            del node.attribute[:]
            node.attribute.extend(kept)

    def _repeat_first_token(self, attention: onnx.NodeProto) -> None:
        """Attention gives 0 in rows without a token. They become copies of the first token again."""
        result = attention.output[0]
        attention.output[0] = self.builder.name()
        axis = self.unpadded[result].position
        node = helper.make_node("Gather", [attention.output[0], self.tokens.tokens_then_first], [result], axis=axis)
        node.name = attention.output[0]
        self.builder.nodes.append(node)

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
            found = b.add("Gather", [tensor, self.tokens.rows], axis=axes.position)
        elif axes.is_whole:
            rank = self._rank(source)
            perm = axes.in_front(rank)
            rows = b.add("Reshape", [self._transposed(tensor, perm), b.constant([1, -1] + [0] * (rank - 2))])
            found = self._transposed(b.add("Gather", [rows, self.tokens.rows], axis=1), _inverse(perm))
        elif axes.position is not None:
            found = b.add("Gather", [tensor, self.tokens.positions], axis=axes.position)
        else:
            # [.., B, .., 1, ..]: what all tokens of a sequence have in common; the axis of positions may be missing.
            assert axes.batch is not None
            found = b.add("Gather", [tensor, self.tokens.sequences], axis=axes.batch)
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
        perm = axes.in_front(len(shape))
        axis = 0 if axes.merged else 1
        sizes = self._sizes([integer(1)] * (axis + 1) + [shape[a] for a in perm[axis + 1 :]])
        slots = self.tokens.real_numbers if are_zero else self.tokens.token_numbers
        rows = [_filled(b, sizes, dtype, 0.0), self._transposed(name, perm)]
        if self.region.capacity:
            # Tokens beyond it: a library or a device that gives no error must not give numbers either.
            slots = b.add("Min", [slots, b.constant(self.region.capacity + 1)])
            rows.append(_filled(b, sizes, dtype, np.nan if dtype in _FLOATS else 0.0))
        slots = b.add("Reshape", [slots, b.constant([-1])]) if axes.merged else slots
        found = b.add("Gather", [b.add("Concat", rows, axis=axis), slots], axis=axis)
        found = found if axes.merged else b.add("Squeeze", [found, b.constant([0])])
        return self._transposed(found, _inverse(perm))

    def _sizes(self, sizes: Sequence[Int]) -> str:
        """A shape as a tensor."""
        b, (batch, length) = self.builder, self.region.shape
        numbers = [size.constant for size in sizes if size.constant is not None]
        if len(numbers) == len(sizes):
            return b.constant(numbers)
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


def _filled(b: Builder, sizes: str, dtype: int, value: float) -> str:
    """A tensor of one number."""
    number = np.full(1, value, helper.tensor_dtype_to_np_dtype(dtype))
    fill = helper.make_tensor("value", dtype, [1], number.tobytes(), raw=True)
    return b.add("ConstantOfShape", [sizes], value=fill)


def _inverse(perm: Sequence[int]) -> list[int]:
    return [list(perm).index(i) for i in range(len(perm))]


def _inputs_as(graph: onnx.GraphProto, source: str) -> set[str]:
    """The inputs whose first two sizes are those of another one by their names or numbers."""

    def sizes(value: onnx.ValueInfoProto) -> list[bytes]:
        return [d.SerializeToString() for d in value.type.tensor_type.shape.dim[:2] if d.dim_param or d.dim_value]

    own = next(sizes(i) for i in graph.input if i.name == source)
    return {source} | {i.name for i in graph.input if len(own) == 2 and sizes(i) == own}
