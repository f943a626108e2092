# SPDX-License-Identifier: Apache-2.0
"""Which inputs decide by their numbers how long a run takes: lengths and iterations that a graph computes from data."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import onnx

from stof.graph.index import all_nodes, domain_of, subgraphs

# Operands whose numbers make a tensor larger than the inputs are, or a loop longer, by operator.
_DECIDING: Mapping[tuple[str, str], tuple[int, ...]] = {
    ("", "AffineGrid"): (1,),
    ("", "BlackmanWindow"): (0,),
    ("", "CenterCropPad"): (1,),
    ("", "Col2Im"): (1,),
    ("", "ConstantOfShape"): (0,),
    ("", "DFT"): (1,),
    ("", "Expand"): (1,),
    ("", "HammingWindow"): (0,),
    ("", "HannWindow"): (0,),
    ("", "Loop"): (0,),
    ("", "MaxUnpool"): (2,),
    ("", "MelWeightMatrix"): (0, 1),
    ("", "OneHot"): (1,),
    ("", "Pad"): (1,),
    ("", "Range"): (0, 1, 2),
    ("", "Resize"): (1, 2, 3),
    ("", "Tile"): (1,),
    ("", "Upsample"): (1,),
    ("com.microsoft", "BeamSearch"): (1,),
    ("com.microsoft", "ExpandDims"): (1,),
    ("com.microsoft", "GreedySearch"): (1,),
    ("com.microsoft", "Range"): (0, 1, 2),
    ("com.microsoft", "Sampling"): (1,),
    ("com.microsoft", "WhisperBeamSearch"): (1,),
}
_SIZES = frozenset({"Shape", "Size"})  # whose results do not depend on the numbers of their operand
_CONDITION = 1  # of a Loop: the operand, and the index of the body's input; the body's first output is the next one


def find_deciding_inputs(model: onnx.ModelProto, given: Collection[str]) -> frozenset[str]:
    """The inputs from whose numbers the model computes lengths, or how often a loop runs.

    Args:
        model: the model; a call of a function counts as reading its operands where the body has such nodes.
        given: names of the inputs.
    """
    trace = _Trace(model.graph)
    functions = {(f.domain, f.name) for f in model.functions if any(_decides(n) for n in all_nodes(f.node))}
    wanted: list[str] = []
    for node in all_nodes(model.graph.node):
        if (node.domain, node.op_type) in functions:
            wanted += node.input
        wanted += _deciding_operands(node, trace)
    return trace.inputs_behind(wanted, given)


def _decides(node: onnx.NodeProto) -> bool:
    return (domain_of(node), node.op_type) in _DECIDING


def _deciding_operands(node: onnx.NodeProto, trace: _Trace) -> Iterator[str]:
    places = _DECIDING.get((domain_of(node), node.op_type), ())
    for place, name in enumerate(node.input):
        if place in places:
            yield name
    if node.op_type == "Loop" and not domain_of(node):
        yield from (graph.output[0].name for graph in subgraphs(node) if graph.output)
        yield from node.input[_CONDITION : _CONDITION + 1]


class _Trace:
    """What tensors of a graph and its subgraphs are computed from.

    Args:
        graph: the outermost one. A name of several subgraphs counts as all of them.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._before: dict[str, list[str]] = {}
        self._add(graph)

    def _add(self, graph: onnx.GraphProto) -> None:
        for node in graph.node:
            inner = subgraphs(node)
            before = [] if node.op_type in _SIZES and not domain_of(node) else [n for n in node.input if n]
            for output in node.output:
                # What a node with subgraphs gives depends on all that these give.
                own = [*before, *(o.name for g in inner for o in g.output)]
                self._before.setdefault(output, []).extend(own)
            for nested in inner:
                self._add_inputs(node, nested)
                self._add(nested)

    def _add_inputs(self, node: onnx.NodeProto, graph: onnx.GraphProto) -> None:
        """A subgraph's inputs are operands of its node, and what it gave before."""
        loop = node.op_type == "Loop" and not domain_of(node)
        for place, value in enumerate(graph.input):
            if loop and place <= _CONDITION:
                # The iteration's number counts from 0; the condition is that of the operand, or of the iteration before.
                own = [*node.input[place : place + 1], graph.output[0].name] if place and graph.output else []
            elif loop:
                own = [*node.input[place : place + 1], *(o.name for o in graph.output[place - 1 : place])]
            else:
                own = [n for n in node.input if n]
            self._before.setdefault(value.name, []).extend(own)

    def inputs_behind(self, tensors: Collection[str], given: Collection[str]) -> frozenset[str]:
        """The given tensors from whose numbers some tensors are computed."""
        pending, seen = list(tensors), set[str]()
        while pending:
            name = pending.pop()
            if name and name not in seen:
                seen.add(name)
                pending += self._before.get(name, ())
        return frozenset(seen & set(given))
