# SPDX-License-Identifier: Apache-2.0
"""Sizes that inference does not know, but that an operator forces: both sides of a MatMul have one inner size, for example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx
from onnx import helper

from stof.graph.index import is_standard
from stof.symbolic.algebra.terms import Int
from stof.symbolic.facts import Fact


def find_forced_sizes(graph: onnx.GraphProto, facts: Mapping[str, Fact]) -> dict[Int, Int]:
    """For sizes ``tensor#axis`` of computed tensors, the number or other size that they are in every run.

    Broadcasting forces nothing: a size may be 1 there. Nor do sizes of the graph's inputs count, which callers choose.
    """
    forced: dict[Int, Int] = {}
    input_names = {i.name for i in graph.input}
    for node in graph.node:
        for pair in _equal_sizes(node, facts) if is_standard(node) else ():
            for one, other in (pair, pair[::-1]):
                if _is_unknown(one, input_names) and one != other and not _is_unknown(other, input_names):
                    forced.setdefault(one, other)
    return {one: other for one, other in forced.items() if one.atom not in other.atoms()}


def _equal_sizes(node: onnx.NodeProto, facts: Mapping[str, Fact]) -> Iterator[tuple[Int, Int]]:
    """The pairs of sizes that a node takes only where they are equal."""
    shapes = [facts.get(name, Fact()).shape for name in node.input]
    if any(s is None for s in shapes[:2]) or len(shapes) < 2:
        return
    if node.op_type == "MatMul":
        first, second = shapes[0] or (), shapes[1] or ()
        if len(first) > 1 and len(second) > 1:
            yield first[-1], second[-2]
    if node.op_type == "Concat":
        known_shapes = [s for s in shapes if s is not None]
        axis = next((helper.get_attribute_value(a) for a in node.attribute if a.name == "axis"), 0)
        for shape in known_shapes[1:]:
            if len(shape) == len(known_shapes[0]):
                pairs = enumerate(zip(known_shapes[0], shape, strict=True))
                yield from (pair for i, pair in pairs if i != axis % len(shape))


def _is_unknown(size: Int, input_names: set[str]) -> bool:
    """Whether the interpreter made a name of its own for a size, and not for one of an input."""
    atom = size.atom
    name, mark, _ = str(atom.args[0]).rpartition("#") if atom is not None and atom.kind == "size" else ("", "", "")
    return bool(mark) and name not in input_names
