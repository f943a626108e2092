# SPDX-License-Identifier: Apache-2.0
"""Lets StofAttention read its heads inside of a wider tensor, such as the output of one QKV matmul, without a copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import helper

from stof.attention.function_body import OP, add_packed_inputs
from stof.attention.limits import most_heads
from stof.errors import UnsupportedError
from stof.fusion.element_ops import FREE, kind_of_node
from stof.fusion.index_terms import AxisRanges, TermBuilder
from stof.graph.dead_code import remove_dead_code
from stof.graph.index import DOMAIN, all_nodes
from stof.graph.node_fields import attributes_of
from stof.symbolic import Symbolic, integer, var

INPUTS = 3  # query, key and value
_MOST_MOVERS = 16  # from a matmul to attention; exports have up to five


@dataclass(frozen=True)
class PackedHeads:
    """A range of heads: ``count`` of them from ``first`` on, of ``total`` in a tensor's last dimension."""

    first: int
    count: int
    total: int

    def within(self, start: int, width: int, whole: int) -> PackedHeads | None:
        """The same heads in a wider tensor; None where the wider tensor is not made of whole heads.

        Args:
            start: the wider tensor's column at which the tensor of these heads starts.
            width: columns of the tensor of these heads.
            whole: columns of the wider tensor.
        """
        if width < 1 or width % self.total:
            return None
        size = width // self.total
        if start % size or whole % size or whole // size > most_heads():
            return None
        return PackedHeads(start // size + self.first, self.count, whole // size)


def is_attention(node: onnx.NodeProto) -> bool:
    """Whether a node is StofAttention."""
    return bool(node.domain == DOMAIN and node.op_type == OP)


def heads_of_input(node: onnx.NodeProto, i: int) -> PackedHeads | None:
    """The heads that StofAttention reads of its input ``i`` (0 query, 1 key, 2 value) in layout BSN; None in other layouts."""
    return _heads(node, i) if _layouts(node)[i] == "BSN" else None


def read_packed_heads(model: onnx.ModelProto, symbolic: Symbolic | None = None) -> onnx.ModelProto:
    """A copy in which StofAttention reads its heads where a matmul wrote them, without the nodes that copied them.

    Heads that lie side by side in a tensor [B, S, N] are read in layout BSN, with attribute ``packed``. All calls share a
    function: an input in another layout is changed for all calls or for none.

    Args:
        model: a model with StofAttention nodes.
        symbolic: its shapes, where they are known already.

    Returns:
        The copy, or the model itself where nothing is to be gained.
    """
    movers = {o: n for n in model.graph.node if _moves_heads(n) for o in n.output if o}
    if not any(is_attention(n) and not movers.keys().isdisjoint(n.input[:INPUTS]) for n in model.graph.node):
        return model
    if not has_head_counts(model):
        return model
    sources = _HeadSources(symbolic or Symbolic(model), movers)
    attention = [(index, n) for index, n in enumerate(model.graph.node) if is_attention(n)]
    layouts = _layouts(attention[0][1])
    views = {(index, i): sources.find(node, i) for index, node in attention for i in range(INPUTS)}
    calls = list(_calls(model))
    is_packed = any(_has_packed(call) for call in calls)
    for i in range(INPUTS):
        if layouts[i] != "BSN" and (
            is_packed or len(attention) < len(calls) or not all(views[index, i] for index, _ in attention)
        ):
            views |= {(index, i): None for index, _ in attention}
    if not any(views.values()):
        return model
    return _rewrite(model, layouts, views)


def _rewrite(
    model: onnx.ModelProto, layouts: Sequence[str], views: Mapping[tuple[int, int], tuple[str, PackedHeads] | None]
) -> onnx.ModelProto:
    result = onnx.ModelProto()
    result.CopyFrom(model)
    new_layouts = [*layouts]
    for (index, i), view in views.items():
        if view is not None:
            new_layouts[i] = "BSN"
            result.graph.node[index].input[i] = view[0]
    for index, node in enumerate(result.graph.node):
        if is_attention(node):
            _set_packed(node, [view[1] if (view := views[index, i]) else _heads(node, i) for i in range(INPUTS)])
            if new_layouts != layouts:
                _set_attribute(node, "layout", " ".join(new_layouts))
    for call in _calls(result):
        if not _has_packed(call):  # in a branch or a function; reads all heads of its tensors
            _set_packed(call, [_heads(call, i) for i in range(INPUTS)])
    functions = [onnx.FunctionProto.FromString(f.SerializeToString()) for f in result.functions]
    del result.functions[:]
    for function in functions:
        ours = (function.domain, function.name) == (DOMAIN, OP) and "packed" not in function.attribute
        result.functions.append(add_packed_inputs(function, new_layouts, layouts) if ours else function)
    remove_dead_code(result.graph, model.graph)
    return result


def has_head_counts(model: onnx.ModelProto) -> bool:
    """Whether all calls say how many heads they have: they share a function, which then reads the numbers of each."""
    return all(_heads(call, i) for call in _calls(model) for i in range(INPUTS))


def _calls(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Every StofAttention node, those in branches and functions among them."""
    for nodes in (model.graph.node, *(f.node for f in model.functions if f.domain != DOMAIN)):
        yield from (n for n in all_nodes(nodes) if is_attention(n))


def _layouts(node: onnx.NodeProto) -> list[str]:
    words: list[str] = attributes_of(node).get("layout", b"BHSD").decode(errors="replace").split()
    return words * 4 if len(words) == 1 else words


def _heads(node: onnx.NodeProto, i: int) -> PackedHeads | None:
    """As the attributes say; None where they leave the number to the shape."""
    attributes = attributes_of(node)
    count = int(attributes.get("num_heads" if i == 0 else "kv_num_heads", 0))
    if count < 1:
        return None
    first, total = attributes.get("packed", [0, count] * INPUTS)[2 * i : 2 * i + 2]
    return PackedHeads(int(first), count, int(total))


class _HeadSources:
    """Finds the tensors from which movement operators bring heads to attention."""

    def __init__(self, symbolic: Symbolic, movers: Mapping[str, onnx.NodeProto]) -> None:
        self._symbolic = symbolic
        self._movers = movers

    def find(self, node: onnx.NodeProto, i: int) -> tuple[str, PackedHeads] | None:
        """The tensor [B, S, N] that holds the heads of an attention node's input ``i``, and which heads they are.

        Of several tensors, the one that is written first. None where no copy would be saved.
        """
        name, layout, heads = node.input[i], _layouts(node)[i], _heads(node, i)
        assert heads is not None
        best = None
        inside: dict[str, onnx.NodeProto] = {}
        source, copies = name, False
        for _ in range(_MOST_MOVERS):
            if source not in self._movers:
                break
            mover = self._movers[source]
            inside |= dict.fromkeys(mover.output, mover)
            copies = copies or mover.op_type not in FREE
            source = mover.input[0]
            here = self._columns(name, layout, heads, (source, inside)) if copies else None
            best = best if here is None else (source, here)
        return best

    def _columns(
        self, name: str, layout: str, heads: PackedHeads, at: tuple[str, Mapping[str, onnx.NodeProto]]
    ) -> PackedHeads | None:
        """The heads of ``name`` in the tensor ``at[0]``, from which the nodes ``at[1]`` make it; None where they do not lie
        there side by side.
        """
        source, inside = at
        shape, whole = self._symbolic.shape(name), self._symbolic.shape(source)
        if shape is None or whole is None or len(whole) != 3 or len(shape) != (3 if layout == "BSN" else 4):
            return None
        size, columns = shape[-1].constant, whole[2].constant
        if size is None or columns is None:
            return None
        names = {"BSN": "bsn", "BSHD": "bshd", "BHSD": "bhsd"}[layout]
        sizes = dict(zip(names, shape, strict=True))
        if whole[:2] != (sizes["b"], sizes["s"]):
            return None
        ranges = AxisRanges(tuple((a, integer(0), d - integer(1)) for a, d in sizes.items()))
        # A dimension of 1 has index 0 only.
        at_axis = {a: integer(0) if d == integer(1) else var(a) for a, d in sizes.items()}
        width, column = size, at_axis[names[-1]]
        if layout != "BSN":
            width, column = heads.count * size, at_axis["h"] * integer(size) + column
        builder = TermBuilder(self._symbolic, inside, (names[-1], shape[-1]), ranges)
        try:
            op, args = builder.pool.terms[builder.term_at(name, tuple(at_axis[a] for a in names), ranges)]
        except UnsupportedError:
            return None
        if op != "read" or [*builder.inputs] != [source]:
            return None
        index = args[1]
        assert isinstance(index, tuple)
        start = (index[2] - column).constant
        if index[:2] != (at_axis["b"], at_axis["s"]) or start is None:
            return None
        return heads.within(start, width, columns)


def _moves_heads(node: onnx.NodeProto) -> bool:
    """Whether a node moves heads without repeating or dropping some."""
    return kind_of_node(node) == "moving" and node.op_type not in ("Concat", "Expand", "Dropout")


def _has_packed(call: onnx.NodeProto) -> bool:
    return any(a.name == "packed" for a in call.attribute)


def _set_packed(call: onnx.NodeProto, heads: Sequence[PackedHeads | None]) -> None:
    _set_attribute(call, "packed", [n for h in heads if h is not None for n in (h.first, h.total)])


def _set_attribute(node: onnx.NodeProto, name: str, value: str | Sequence[int]) -> None:
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])
