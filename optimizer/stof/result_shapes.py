# SPDX-License-Identifier: Apache-2.0
"""Types and shapes of what stof's operators give, written into the model for tools that do not know the operators.

Tools that read ``value_info`` find them there. Others infer shapes node by node from the operator's local function, whose
nodes say little: they compute sizes at run time. So each function ends with nodes that copy its result into a tensor with
the axes of an input, as the call's attributes say. Inference then carries the names of the input's dimensions over.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import AttributeProto, TensorProto, helper

from stof.graph.index import DOMAIN, all_nodes, node_tensors, opset_of, subgraphs
from stof.graph.names import FreshNames
from stof.graph.node_builder import Builder
from stof.graph.protobuf import replace_nodes
from stof.symbolic import Symbolic
from stof.symbolic.algebra.terms import Int
from stof.symbolic.dimension_names import declared_dim
from stof.symbolic.tensor import Shape

_CAST_LIKE = 15  # the first opset with the operator
_FLOAT = int(TensorProto.FLOAT)


@dataclass(frozen=True)
class AxesOfInput:
    """The axes of a result by those of an input, as attributes of a call.

    Attributes:
        equation: of an Einsum of the input and a tensor of ``sizes``: "abc,de->adbe".
        sizes: the constant axes of the result; [1] where there is none.
    """

    equation: str
    sizes: tuple[int, ...]


def declare_results(model: onnx.ModelProto, *, in_functions: bool) -> None:
    """Declares the results of all nodes of domain stof, in place. What is declared already stays.

    A size has a name of the model's own, a number, or is left open where it is computed.

    Args:
        model: a model with nodes of domain stof.
        in_functions: whether their functions get the nodes that carry shapes, too.
    """
    calls = [n for n in all_nodes(model.graph.node) if n.domain == DOMAIN]
    if not calls:
        return
    shapes = _Shapes(model)
    for graph in _all_graphs(model.graph):
        _declare_in_graph(graph, shapes)
    if in_functions:
        inner = {n.op_type for f in model.functions for n in all_nodes(f.node) if n.domain == DOMAIN}
        for function in model.functions:
            own = [n for n in calls if n.op_type == function.name]
            if function.domain == DOMAIN and own and function.name not in inner:
                _carry_shapes(function, own, shapes, opset_of(model))


class _Shapes:
    """Types and shapes of a model's tensors, as far as they hold in every run.

    Args:
        model: the model.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self._symbolic = Symbolic(model)
        written = Counter(o for n in all_nodes(model.graph.node) for o in n.output if o)
        written.update(v.name for g in _all_graphs(model.graph) for v in (*g.input, *g.initializer))
        # Branches may use one name for different tensors.
        self._shadowed = {name for name, count in written.items() if count > 1} - {
            t.name for t in model.graph.initializer
        }
        self._unsure = {size for pair in self._symbolic.equalities if None not in map(_name_of, pair) for size in pair}

    def dtype(self, name: str) -> int:
        """The element type; 0 where it is not known."""
        return 0 if name in self._shadowed else self._symbolic.dtype(name)

    def shape(self, name: str) -> Shape | None:
        """The sizes; None where the rank is not known."""
        return None if name in self._shadowed else self._symbolic.shape(name)

    def is_sure(self, size: Int) -> bool:
        """Whether a size is no name that broadcasting made equal to another one: one of the two may be 1."""
        return size not in self._unsure

    def declared(self, name: str) -> list[int | str] | None:
        """The shape as ``value_info`` has it."""
        shape = self.shape(name)
        return None if shape is None else [declared_dim(d) if self.is_sure(d) else "" for d in shape]


def _name_of(size: Int) -> str | None:
    return (declared_dim(size) or None) if size.constant is None else None  # type: ignore[return-value]


def _all_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph, and all in the attributes of its nodes."""
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from _all_graphs(inner)


def _declare_in_graph(graph: onnx.GraphProto, shapes: _Shapes) -> None:
    wanted = [o for n in graph.node if n.domain == DOMAIN for o in n.output if o]
    if not wanted:
        return
    known = {v.name: v for v in (*graph.value_info, *graph.output)}
    for name in wanted:
        shape, dtype = shapes.declared(name), shapes.dtype(name)
        info = known.get(name)
        if not dtype or (info is not None and info.type.tensor_type.HasField("shape")):
            continue
        made = helper.make_tensor_value_info(name, dtype, shape)
        if info is None:
            graph.value_info.append(made)
        else:
            info.type.CopyFrom(made.type)


def _carry_shapes(function: onnx.FunctionProto, calls: Sequence[onnx.NodeProto], shapes: _Shapes, opset: int) -> None:
    """Gives results of a function the axes of an input, where each call knows them."""
    for number, output in enumerate(function.output):
        axes = (f"output{number}_axes", f"output{number}_sizes")
        if axes[0] in function.attribute or any(len(n.output) <= number or not n.output[number] for n in calls):
            continue
        found = _find_source(calls, number, len(function.input), shapes)
        if found is None:
            continue
        source, by_call = found
        like = _find_type(calls, number, source, shapes, opset)
        if like is None:
            continue
        _append_copy(function, output, function.input[source], axes, like, opset)
        for node, own in zip(calls, by_call, strict=True):
            node.attribute.append(helper.make_attribute(axes[0], own.equation))
            node.attribute.append(helper.make_attribute(axes[1], list(own.sizes)))


def _find_source(
    calls: Sequence[onnx.NodeProto], number: int, inputs: int, shapes: _Shapes
) -> tuple[int, list[AxesOfInput]] | None:
    """The first input that has the axes of a result at all calls."""
    for i in range(inputs):
        if any(len(n.input) <= i or not n.input[i] for n in calls):
            continue
        found = [_match_axes(shapes, n.input[i], n.output[number]) for n in calls]
        if None not in found:
            return i, [axes for axes in found if axes is not None]
    return None


def _match_axes(shapes: _Shapes, source: str, result: str) -> AxesOfInput | None:
    """The axes of a result among those of another tensor; None where one of them is another size."""
    given, wanted = shapes.shape(source), shapes.shape(result)
    if given is None or not wanted or not shapes.dtype(source) or len(given) + len(wanted) > len(string.ascii_letters):
        return None
    letters = string.ascii_letters[: len(given)]
    spare = iter(string.ascii_letters[len(given) :])
    free = list(zip(letters, given, strict=True))
    taken: list[str] = []
    sizes: list[int] = []
    new = ""
    for size in wanted:
        if size.constant is not None:
            new += next(spare)
            sizes.append(size.constant)
            taken.append(new[-1])
            continue
        own = next((pair for pair in free if pair[1] == size and shapes.is_sure(size)), None)
        if own is None:
            return None
        free.remove(own)
        taken.append(own[0])
    return AxesOfInput(f"{letters},{new or next(spare)}->{''.join(taken)}", tuple(sizes) or (1,))


def _find_type(
    calls: Sequence[onnx.NodeProto], number: int, source: int, shapes: _Shapes, opset: int
) -> str | int | None:
    """What the copy takes its element type from: "source", "result", or one type; None where none of these can be."""
    types = [(shapes.dtype(n.input[source]), shapes.dtype(n.output[number])) for n in calls]
    if opset < _CAST_LIKE:
        return types[0][1] or None if len({own for _, own in types}) == 1 else None
    # A converter to fp16 changes the types around a call.
    return "source" if all(given == own != 0 for given, own in types) else "result"


def _append_copy(
    function: onnx.FunctionProto, output: str, source: str, axes: tuple[str, str], like: str | int, opset: int
) -> None:
    """Appends nodes that copy a result into a tensor with axes of an input."""
    prefix = FreshNames({name for n in function.node for name in node_tensors(n)}).make(f"{output}_shape")
    b = Builder(opset, f"{prefix}_")
    value = b.name()
    nodes = [_renamed(n, {output: value}) for n in function.node]
    b.nodes += nodes
    sizes = b.name()
    b.nodes.append(_with_attribute("Constant", [], sizes, "value_ints", axes[1], AttributeProto.INTS))
    ones = b.add("ConstantOfShape", [sizes])
    shaped = b.name()
    given = [b.add("Cast", [source], to=_FLOAT), ones]
    b.nodes.append(_with_attribute("Einsum", given, shaped, "equation", axes[0], AttributeProto.STRING))
    if isinstance(like, str):
        shaped = b.add("CastLike", [shaped, source if like == "source" else value])
    elif like != _FLOAT:
        shaped = b.add("Cast", [shaped], to=like)
    zero, one = b.constant(0), b.constant(1)
    rows = b.add("Range", [zero, b.add("Gather", [b.add("Shape", [value]), zero]), one])
    last = helper.make_node("ScatterND", [shaped, b.unsqueeze(rows, [1]), value], [output], name=b.name())
    replace_nodes(function, [*b.nodes, last])
    function.attribute.extend(axes)


def _with_attribute(
    op: str, inputs: Iterable[str], output: str, name: str, target: str, kind: AttributeProto.AttributeType
) -> onnx.NodeProto:
    """A node with an attribute of the call."""
    node = helper.make_node(op, list(inputs), [output], name=output)
    reference = node.attribute.add()
    reference.name, reference.ref_attr_name, reference.type = name, target, kind
    return node


def _renamed(node: onnx.NodeProto, names: Mapping[str, str]) -> onnx.NodeProto:
    """A copy of a node, and of its subgraphs, that reads and writes other tensors."""
    found = onnx.NodeProto()
    found.CopyFrom(node)
    for inner in (found, *all_nodes(n for g in subgraphs(found) for n in g.node)):
        for field in (inner.input, inner.output):
            for i, name in enumerate(field):
                field[i] = names.get(name, name)
    for graph in (g for inner in subgraphs(found) for g in _all_graphs(inner)):
        for value in graph.output:
            value.name = names.get(value.name, value.name)
    return found
