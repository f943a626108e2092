# SPDX-License-Identifier: Apache-2.0
"""StofAttention that reads its heads where one product wrote them, among others, rather than from a copy of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import helper

from stof.attention.function_body import OP, add_packed_inputs
from stof.errors import UnsupportedError
from stof.fusion.element_ops import FREE, kind_of_node
from stof.fusion.index_terms import Limits, Puller
from stof.graph.dead_code import remove_dead_code
from stof.graph.index import DOMAIN, all_nodes, producers
from stof.symbolic import Symbolic, integer, var

INPUTS = 3  # query, key and value
_MOST_HEADS = 65536  # of a tensor: docs/reference/operators.md
_MOST_MOVERS = 16  # from a product to attention; exports have up to five


@dataclass(frozen=True)
class Heads:
    """``count`` heads from ``first`` on, of ``total`` in the last dimension of a tensor."""

    first: int
    count: int
    total: int

    def within(self, start: int, width: int, whole: int) -> Heads | None:
        """The same heads in a tensor of width ``whole`` whose columns from ``start`` on, ``width`` of them, they are now
        read from; None where that tensor is not made of whole heads.
        """
        if width < 1 or width % self.total:
            return None
        size = width // self.total
        if start % size or whole % size or whole // size > _MOST_HEADS:
            return None
        return Heads(start // size + self.first, self.count, whole // size)


def is_attention(node: onnx.NodeProto) -> bool:
    """Whether a node is one of ours."""
    return bool(node.domain == DOMAIN and node.op_type == OP)


def heads_read(node: onnx.NodeProto, i: int) -> Heads | None:
    """What a StofAttention node reads of query, key or value (``i`` 0, 1 or 2) in layout BSN; None in another layout."""
    return _heads(node, i) if _layouts(node)[i] == "BSN" else None


def packed(model: onnx.ModelProto, symbolic: Symbolic | None = None) -> onnx.ModelProto:
    """A copy in which attention reads its heads where they were written, without the nodes that copied them out of there.

    Heads that lie in a tensor [B, S, N] side by side are read in layout BSN, with attribute ``packed``. Where a call
    reads an input in another layout now, that is changed for all calls or for none: they share a function. The model
    itself where there is nothing to be done. ``symbolic``: its shapes, where they are known already.
    """
    movers = producers(n for n in model.graph.node if _moves(n))
    if not any(is_attention(n) and not movers.keys().isdisjoint(n.input[:INPUTS]) for n in model.graph.node):
        return model
    if not heads_known(model):
        return model
    views = _Views(symbolic or Symbolic(model), movers)
    own = [(place, n) for place, n in enumerate(model.graph.node) if is_attention(n)]
    layouts = _layouts(own[0][1])
    found = {(place, i): views.of(node, i) for place, node in own for i in range(INPUTS)}
    calls = list(_calls(model))
    given = any(_has(call) for call in calls)
    for i in range(INPUTS):
        if layouts[i] != "BSN" and (given or len(own) < len(calls) or not all(found[place, i] for place, _ in own)):
            found |= {(place, i): None for place, _ in own}
    if not any(found.values()):
        return model
    return _rewritten(model, layouts, found)


def _rewritten(
    model: onnx.ModelProto, layouts: Sequence[str], found: Mapping[tuple[int, int], tuple[str, Heads] | None]
) -> onnx.ModelProto:
    result = onnx.ModelProto()
    result.CopyFrom(model)
    joined = [*layouts]
    for (place, i), view in found.items():
        if view is not None:
            joined[i] = "BSN"
            result.graph.node[place].input[i] = view[0]
    for place, node in enumerate(result.graph.node):
        if is_attention(node):
            _give(node, [view[1] if (view := found[place, i]) else _heads(node, i) for i in range(INPUTS)])
            if joined != layouts:
                _set(node, "layout", " ".join(joined))
    for call in _calls(result):
        if not _has(call):  # in a branch or a function; reads all heads of its tensors
            _give(call, [_heads(call, i) for i in range(INPUTS)])
    functions = [onnx.FunctionProto.FromString(f.SerializeToString()) for f in result.functions]
    del result.functions[:]
    for function in functions:
        ours = (function.domain, function.name) == (DOMAIN, OP) and "packed" not in function.attribute
        result.functions.append(add_packed_inputs(function, joined, layouts) if ours else function)
    remove_dead_code(result.graph, model.graph)
    return result


def heads_known(model: onnx.ModelProto) -> bool:
    """Whether all calls say how many heads they have: they share a function, which then reads the numbers of each."""
    return all(_heads(call, i) for call in _calls(model) for i in range(INPUTS))


def _calls(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Every StofAttention node, those in branches and functions among them."""
    for nodes in (model.graph.node, *(f.node for f in model.functions if f.domain != DOMAIN)):
        yield from (n for n in all_nodes(nodes) if is_attention(n))


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def _layouts(node: onnx.NodeProto) -> list[str]:
    words: list[str] = _attributes(node).get("layout", b"BHSD").decode(errors="replace").split()
    return words * 4 if len(words) == 1 else words


def _heads(node: onnx.NodeProto, i: int) -> Heads | None:
    """As the attributes say; None where they leave the number to the shape."""
    attributes = _attributes(node)
    count = int(attributes.get("num_heads" if i == 0 else "kv_num_heads", 0))
    if count < 1:
        return None
    first, total = attributes.get("packed", [0, count] * INPUTS)[2 * i : 2 * i + 2]
    return Heads(int(first), count, int(total))


class _Views:
    """Where heads lie that operators which move data brought to attention."""

    def __init__(self, symbolic: Symbolic, movers: Mapping[str, onnx.NodeProto]) -> None:
        self._symbolic = symbolic
        self._movers = movers

    def of(self, node: onnx.NodeProto, i: int) -> tuple[str, Heads] | None:
        """A tensor [B, S, N] and what of it query, key or value of an attention node is; the first one written.

        None where it is read there already, or where nothing would be saved.
        """
        name, layout, heads = node.input[i], _layouts(node)[i], _heads(node, i)
        assert heads is not None
        found = None
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
            found = found if here is None else (source, here)
        return found

    def _columns(
        self, name: str, layout: str, heads: Heads, at: tuple[str, Mapping[str, onnx.NodeProto]]
    ) -> Heads | None:
        """The heads in a tensor ``at[0]``, from which the nodes ``at[1]`` make ``name``; None where it has others' form."""
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
        limits = Limits(tuple((a, integer(0), d - integer(1)) for a, d in sizes.items()))
        # Of a dimension of 1 there is no place but 0.
        at_axis = {a: integer(0) if d == integer(1) else var(a) for a, d in sizes.items()}
        width, column = size, at_axis[names[-1]]
        if layout != "BSN":
            width, column = heads.count * size, at_axis["h"] * integer(size) + column
        puller = Puller(self._symbolic, inside, (names[-1], shape[-1]), limits)
        try:
            op, args = puller.pool.terms[puller.at(name, tuple(at_axis[a] for a in names), limits)]
        except UnsupportedError:
            return None
        if op != "read" or [*puller.inputs] != [source]:
            return None
        place = args[1]
        assert isinstance(place, tuple)
        start = (place[2] - column).constant
        if place[:2] != (at_axis["b"], at_axis["s"]) or start is None:
            return None
        return heads.within(start, width, columns)


def _moves(node: onnx.NodeProto) -> bool:
    """Whether a node brings heads elsewhere; one that may repeat them, or drop some, has them not there any more."""
    return kind_of_node(node) == "moving" and node.op_type not in ("Concat", "Expand", "Dropout")


def _has(call: onnx.NodeProto) -> bool:
    return any(a.name == "packed" for a in call.attribute)


def _give(call: onnx.NodeProto, heads: Sequence[Heads | None]) -> None:
    _set(call, "packed", [n for h in heads if h is not None for n in (h.first, h.total)])


def _set(node: onnx.NodeProto, name: str, value: str | Sequence[int]) -> None:
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])
