# SPDX-License-Identifier: Apache-2.0
"""StofAttention that reads its heads where one product wrote them, among others, rather than from a copy by Split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import helper

from stof.graph import DOMAIN, all_nodes, domain_of, node_tensors, with_nodes
from stof.passes.body import OP, packed_function
from stof.symbolic import Symbolic

INPUTS = 3  # query, key and value
_MOST_HEADS = 65536  # of a tensor: docs/operators.md


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
    """A copy in which attention reads what Split nodes took apart, without those that nobody reads then.

    The model itself where there is nothing to be done. ``symbolic``: its shapes, where they are known already.
    """
    splits = {o: n for n in model.graph.node if n.op_type == "Split" and not domain_of(n) for o in n.output}
    if not any(is_attention(n) and not splits.keys().isdisjoint(n.input[:INPUTS]) for n in model.graph.node):
        return model
    if not heads_known(model):
        return model
    symbolic = symbolic or Symbolic(model)
    passed: list[onnx.NodeProto] = []
    changed: dict[int, onnx.NodeProto] = {}
    for place, node in enumerate(model.graph.node):
        if is_attention(node):
            own, found = _rewritten(node, splits, symbolic)
            if found:
                changed[place] = own
                passed += found
    if not changed:
        return model
    nodes = [changed.get(place, node) for place, node in enumerate(model.graph.node)]
    result = with_nodes(model, _without_unread(nodes, passed, {o.name for o in model.graph.output}))
    for call in _calls(result):
        _give(call)
    _replace_function(result)
    written = {n for node in result.graph.node for n in node_tensors(node)}
    stale = {o for n in passed for o in n.output} - written
    kept = [v for v in result.graph.value_info if v.name not in stale]
    del result.graph.value_info[:]
    result.graph.value_info.extend(kept)
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
    words: list[str] = _attributes(node).get("layout", b"BHSD").decode().split()
    return words * 4 if len(words) == 1 else words


def _heads(node: onnx.NodeProto, i: int) -> Heads | None:
    """As the attributes say; None where they leave the number to the shape."""
    attributes = _attributes(node)
    count = int(attributes.get("num_heads" if i == 0 else "kv_num_heads", 0))
    if count < 1:
        return None
    first, total = attributes.get("packed", [0, count] * INPUTS)[2 * i : 2 * i + 2]
    return Heads(int(first), count, int(total))


def _rewritten(
    node: onnx.NodeProto, splits: Mapping[str, onnx.NodeProto], symbolic: Symbolic
) -> tuple[onnx.NodeProto, list[onnx.NodeProto]]:
    """A copy that reads what the Split nodes before it read, and those nodes."""
    own = onnx.NodeProto()
    own.CopyFrom(node)
    numbers: list[int] = []
    passed: list[onnx.NodeProto] = []
    for i in range(INPUTS):
        heads = _heads(node, i)
        assert heads is not None
        while heads_read(node, i) is not None and own.input[i] in splits:
            split = splits[own.input[i]]
            moved = _moved(heads, split, own.input[i], symbolic)
            if moved is None:
                break
            heads, own.input[i] = moved, split.input[0]
            passed.append(split)
        numbers += [heads.first, heads.total]
    if passed:
        _set(own, numbers)
    return own, passed


def _moved(heads: Heads, split: onnx.NodeProto, name: str, symbolic: Symbolic) -> Heads | None:
    """The heads of one result of Split in what it reads."""
    shape = symbolic.shape(split.input[0])
    if shape is None or len(shape) != 3 or _attributes(split).get("axis", 0) not in (-1, 2):
        return None
    widths: list[int] = []
    for output in split.output:
        part = symbolic.shape(output)
        width = None if part is None or len(part) != 3 else part[2].constant
        if width is None:
            return None
        widths.append(width)
    place = list(split.output).index(name)
    return heads.within(sum(widths[:place]), widths[place], sum(widths))


def _give(call: onnx.NodeProto) -> None:
    """The attribute to a call that reads all of its tensors."""
    if not any(a.name == "packed" for a in call.attribute):
        heads = [_heads(call, i) for i in range(INPUTS)]
        _set(call, [n for h in heads if h is not None for n in (h.first, h.total)])


def _set(node: onnx.NodeProto, numbers: Sequence[int]) -> None:
    kept = [a for a in node.attribute if a.name != "packed"]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute("packed", list(numbers))])


def _replace_function(model: onnx.ModelProto) -> None:
    functions = [onnx.FunctionProto.FromString(f.SerializeToString()) for f in model.functions]
    layouts = next(_layouts(call) for call in _calls(model))
    del model.functions[:]
    for function in functions:
        ours = (function.domain, function.name) == (DOMAIN, OP) and "packed" not in function.attribute
        model.functions.append(packed_function(function, layouts) if ours else function)


def _without_unread(
    nodes: Sequence[onnx.NodeProto], passed: Sequence[onnx.NodeProto], read: set[str]
) -> list[onnx.NodeProto]:
    """Nodes without those Split nodes, and their widths, that neither nodes nor ``read`` ask for."""
    outputs = {o for n in passed for o in n.output}
    widths = {n for split in passed for n in split.input[1:]}
    kept: list[onnx.NodeProto] = []
    asked = set(read)
    for node in reversed(nodes):
        written = set(node.output)
        droppable = written <= outputs or (node.op_type == "Constant" and written <= widths)
        if written and droppable and written.isdisjoint(asked):
            continue
        kept.append(node)
        asked |= node_tensors(node) - written
    return kept[::-1]
