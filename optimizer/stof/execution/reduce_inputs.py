# SPDX-License-Identifier: Apache-2.0
"""Inputs that decide by their numbers how long a run takes, and smaller numbers for them where it takes too long."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np
import onnx

from stof.execution.input_uses import InputUse
from stof.execution.inputs import InputMaker
from stof.execution.run_limits import LimitReached
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
_FACTORS = (1 / 256, 1 / 64, 1 / 16, 1 / 4)  # that are tried, from the quickest run to the usual numbers
_INDEXED = (InputUse.SLOT, InputUse.INDEX)


# Factors of inputs by name, for each trial: from the one that most likely runs quickly to the usual numbers.
Trials = tuple[Mapping[str, float], ...]


class InputReducer:
    """Changes how large the numbers are that an :class:`InputMaker` draws for the inputs that decide how long a run takes.

    Args:
        maker: draws the inputs.
    """

    def __init__(self, maker: InputMaker) -> None:
        self._maker = maker
        deciding = find_deciding_inputs(maker.model, {i.name for i in maker.inputs})
        self._names = sorted(n for n in deciding if self._is_free(n))
        self._has_searched = False

    @property
    def can_reduce(self) -> bool:
        """Whether the numbers of some input decide how long a run takes, and no others were searched for yet."""
        return bool(self._names) and not self._has_searched

    def search(self, feed: Mapping[str, np.ndarray]) -> Iterator[Trials]:
        """What is tried where a run on ``feed`` was ended, once for a model: the next one as long as no trial runs.

        A single number may multiply a length, or divide it as a speed does: both are tried, after the others.
        """
        self._has_searched = True
        single = [n for n in self._names if n in feed and self._maker.is_factor(n)]
        others = [n for n in self._names if n in feed and n not in single]
        if others:
            yield tuple(dict.fromkeys(others, f) for f in _FACTORS)
        for is_inverse in (False, True) if single else ():
            factors = [1 / f if is_inverse else f for f in _FACTORS]
            yield tuple(dict.fromkeys(others, _FACTORS[0]) | dict.fromkeys(single, f) for f in factors)

    def apply(self, factors: Mapping[str, float]) -> None:
        """Draws with these factors from now on."""
        self._maker.magnitudes.clear()
        self._maker.magnitudes.update(factors)

    def explain(self, error: LimitReached) -> LimitReached:
        """The error of the longest run where no numbers were found that run."""
        names = ", ".join(map(repr, self._names))
        new_error = type(error)(
            f"{error}. Numbers of {names} from 1/256 of the usual size on were tried; --inputs gives others"
        )
        new_error.seconds = error.seconds
        return new_error

    def _is_free(self, name: str) -> bool:
        """Whether an input holds numbers of any size: masks, numbers of keys, documents, indices and slots do not."""
        maker = self._maker
        taken = maker.pads | set(maker.switches) | maker.counts | maker.added | maker.documents | maker.restarting
        if name in taken | maker.writes | set(maker.filled):
            return False
        return not any(b.use in _INDEXED for b in maker.uses.bounds(name))


def find_deciding_inputs(model: onnx.ModelProto, inputs: Collection[str]) -> frozenset[str]:
    """The inputs from whose numbers the model computes lengths, or how often a loop runs.

    Args:
        model: the model; a call of a function counts as reading its operands where the body has such nodes.
        inputs: their names.
    """
    trace = _Trace(model.graph)
    functions = {(f.domain, f.name) for f in model.functions if any(_decides(n) for n in all_nodes(f.node))}
    wanted: list[str] = []
    for node in all_nodes(model.graph.node):
        if (node.domain, node.op_type) in functions:
            wanted += node.input
        wanted += _find_deciding_operands(node, trace)
    return trace.inputs_behind(wanted, inputs)


def _decides(node: onnx.NodeProto) -> bool:
    return (domain_of(node), node.op_type) in _DECIDING


def _find_deciding_operands(node: onnx.NodeProto, trace: _Trace) -> Iterator[str]:
    indices = _DECIDING.get((domain_of(node), node.op_type), ())
    for index, name in enumerate(node.input):
        if index in indices:
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
                sources = [*before, *(o.name for g in inner for o in g.output)]
                self._before.setdefault(output, []).extend(sources)
            for nested in inner:
                self._add_inputs(node, nested)
                self._add(nested)

    def _add_inputs(self, node: onnx.NodeProto, graph: onnx.GraphProto) -> None:
        """A subgraph's inputs are operands of its node, and what it gave before."""
        loop = node.op_type == "Loop" and not domain_of(node)
        for index, value in enumerate(graph.input):
            if loop and index <= _CONDITION:
                # The iteration's number counts from 0; the condition is that of the operand, or of the iteration before.
                sources = [*node.input[index : index + 1], graph.output[0].name] if index and graph.output else []
            elif loop:
                sources = [*node.input[index : index + 1], *(o.name for o in graph.output[index - 1 : index])]
            else:
                sources = [n for n in node.input if n]
            self._before.setdefault(value.name, []).extend(sources)

    def inputs_behind(self, tensors: Collection[str], inputs: Collection[str]) -> frozenset[str]:
        """The inputs from whose numbers some tensors are computed."""
        pending, seen = list(tensors), set[str]()
        while pending:
            name = pending.pop()
            if name and name not in seen:
                seen.add(name)
                pending += self._before.get(name, ())
        return frozenset(seen & set(inputs))
