# SPDX-License-Identifier: Apache-2.0
"""Types and shapes of what stof's operators give, written into the model for tools that do not know the operators.

Tools that read ``value_info`` find them there. Others infer shapes node by node from the operator's local function, whose
nodes say little: they compute sizes at run time. So each function ends with nodes that copy its result into a tensor with
the axes of an input, as the call's attributes say. Inference then carries the names of the input's dimensions over.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx
from onnx import AttributeProto, TensorProto, helper

from stof.graph.index import DOMAIN, all_nodes, node_tensors, opset_of, subgraphs
from stof.graph.names import FreshNames
from stof.graph.node_builder import CAST_LIKE_OPSET, Builder
from stof.graph.protobuf import replace_nodes
from stof.symbolic import Symbolic
from stof.symbolic.algebra.terms import integer
from stof.symbolic.dimension_names import declared_dim
from stof.symbolic.facts import Rule

_FLOAT = int(TensorProto.FLOAT)
_SMALL = 4096  # bytes of a constant that is copied into the model of a subgraph: shapes, axes, positions
_LETTERS = string.ascii_letters  # of an equation


@dataclass(frozen=True)
class AxesOfInput:
    """The axes of a result by those of an input, as attributes of a call.

    Attributes:
        equation: of an Einsum of the input, a tensor of ``sizes``, and one with the axes ``computed``: "abc,de,f->adbef".
        sizes: the constant axes of the result; [1] where there is none.
        computed: indices of the axes of other sizes, which no name is carried over for; [0] where there is none.
        shared: how many axes are the input's.
    """

    equation: str
    sizes: tuple[int, ...]
    computed: tuple[int, ...]
    shared: int

    def attributes(self, number: int) -> dict[str, str | list[int]]:
        """The attributes of a call for its result of this number."""
        values = (self.equation, list(self.sizes), list(self.computed))
        return dict(zip(_attribute_names(number), values, strict=True))


def _attribute_names(number: int) -> tuple[str, str, str]:
    return f"output{number}_axes", f"output{number}_sizes", f"output{number}_computed"


@dataclass(frozen=True)
class ResultRules:
    """What the contracts of operators say of their results.

    Attributes:
        shapes: rules for types and shapes, by operator; beside those of ``stof.symbolic``.
        with_spare_inputs: operators that ignore inputs behind those that they read.
        in_place: operators that write results where inputs lie. Their functions stay: a copy would take a cache's memory.
    """

    shapes: Mapping[str, Rule] = field(default_factory=dict)
    with_spare_inputs: frozenset[str] = frozenset()
    in_place: frozenset[str] = frozenset()

    def __or__(self, other: ResultRules) -> ResultRules:
        spare, in_place = self.with_spare_inputs | other.with_spare_inputs, self.in_place | other.in_place
        return ResultRules({**self.shapes, **other.shapes}, spare, in_place)


def declare_results(model: onnx.ModelProto, rules: ResultRules, *, in_functions: bool) -> Symbolic | None:
    """Declares the results of all nodes of domain stof, in place. What is declared already stays.

    A size has a name of the model's own, a number, or is left open where it is computed.

    Args:
        model: a model with nodes of domain stof.
        rules: of the operators.
        in_functions: whether their functions get the nodes that carry shapes, too.

    Returns:
        The facts of the model, with exact sizes; None where it has no such node.
    """
    if not any(n.domain == DOMAIN for n in all_nodes(model.graph.node)):
        return None
    shapes = _Shapes(model, rules)
    calls = list(_declare_in_graph(model.graph, shapes))
    if in_functions:
        inner = {n.op_type for f in model.functions for n in all_nodes(f.node) if n.domain == DOMAIN}
        for function in model.functions:
            calls_of_function = [call for call in calls if call.node.op_type == function.name]
            if function.domain == DOMAIN and calls_of_function and function.name not in inner | rules.in_place:
                _Carrier(function, calls_of_function, opset_of(model), rules).carry()
    return shapes.symbolic


class _Shapes:
    """Types and shapes of one graph's tensors, which hold in every run.

    Args:
        model: holds the graph as its main one.
        rules: of the operators.
    """

    def __init__(self, model: onnx.ModelProto, rules: ResultRules) -> None:
        self._model = model
        self._rules = rules
        self.symbolic = Symbolic(model, exact=True, rules=rules.shapes)
        self.dtype = self.symbolic.dtype
        self.shape = self.symbolic.shape

    def declared(self, name: str) -> list[int | str] | None:
        """The shape as ``value_info`` has it."""
        shape = self.shape(name)
        return None if shape is None else list(map(declared_dim, shape))

    def inside(self, graph: onnx.GraphProto) -> _Shapes:
        """Those of a subgraph. Names of its inputs' dimensions do not count: each call may have other sizes."""
        tensors = {v.name for v in (*graph.input, *graph.initializer)} | {o for n in graph.node for o in n.output}
        read = {name for n in graph.node for name in node_tensors(n)} - tensors - {""}
        stored = {t.name: t for t in self._model.graph.initializer if t.name in read and t.ByteSize() <= _SMALL}
        model = onnx.ModelProto(ir_version=self._model.ir_version)
        model.opset_import.extend(self._model.opset_import)
        model.graph.node.extend(graph.node)
        model.graph.initializer.extend([*graph.initializer, *stored.values()])
        model.graph.input.extend(graph.input)
        for d in (d for v in model.graph.input for d in v.type.tensor_type.shape.dim):
            d.ClearField("dim_param")
        for name in sorted(read):
            if self.dtype(name) and name not in stored:
                info = helper.make_tensor_value_info(name, self.dtype(name), self.declared(name))
                model.graph.input.append(info)
        return _Shapes(model, self._rules)


@dataclass(frozen=True)
class _Call:
    """A node of domain stof, with what is known about the tensors of its graph."""

    node: onnx.NodeProto
    shapes: _Shapes

    def output(self, number: int) -> str:
        """The name of a result; empty where the call does not have it."""
        return str(self.node.output[number]) if number < len(self.node.output) else ""


def _declare_in_graph(graph: onnx.GraphProto, shapes: _Shapes) -> Iterator[_Call]:
    """Declares the results of a graph's nodes and of those in its subgraphs; yields the calls.

    The graph's outputs are the model's interface, which stays.
    """
    declared = {v.name: v for v in graph.value_info}
    outputs = {o.name for o in graph.output}
    for node in graph.node:
        for inner in subgraphs(node):
            if any(n.domain == DOMAIN for n in all_nodes(inner.node)):
                yield from _declare_in_graph(inner, shapes.inside(inner))
        if node.domain != DOMAIN:
            continue
        yield _Call(node, shapes)
        for name in node.output:
            dtype, info = shapes.dtype(name), declared.get(name)
            if name in outputs or not dtype or (info is not None and info.type.tensor_type.HasField("shape")):
                continue
            made = helper.make_tensor_value_info(name, dtype, shapes.declared(name))
            if info is None:
                graph.value_info.append(made)
            else:
                info.type.CopyFrom(made.type)


class _Carrier:
    """Gives results of a function the axes of an input, where each call knows them.

    Args:
        function: the function, changed in place.
        calls: all calls of it, changed in place.
        opset: of the standard domain.
        rules: of the operators.
    """

    def __init__(self, function: onnx.FunctionProto, calls: Sequence[_Call], opset: int, rules: ResultRules) -> None:
        self.function = function
        self.calls = calls
        self.opset = opset
        self.can_add = function.name in rules.with_spare_inputs
        self.read = len(function.input)  # the inputs that the operator reads
        self.changes = not any(a.startswith("output0_") for a in function.attribute)

    def carry(self) -> None:
        """Changes the function and its calls; one that was changed before stays."""
        for number, output in enumerate(list(self.function.output) if self.changes else ()):
            source_axes = self._find_source(number)
            like = None if source_axes is None else self._find_type(number, source_axes[0])
            if source_axes is None or like is None:
                continue
            source, by_call = source_axes
            names = _attribute_names(number)
            _append_copy(self.function, output, self.function.input[source], names, like, self.opset)
            for call, axes in zip(self.calls, by_call, strict=True):
                call.node.attribute.extend(helper.make_attribute(k, v) for k, v in axes.attributes(number).items())

    def _find_source(self, number: int) -> tuple[int, list[AxesOfInput]] | None:
        """The input that has the axes of a result at all calls, and the axes by call; a new input where each has another."""
        if not self.can_add and not all(call.output(number) for call in self.calls):
            return None
        by_call = [_sources_of(call, number) for call in self.calls]
        if not all(by_call):
            return None
        best = [max(axes, key=lambda i: (axes[i].shared, -i)) for axes in by_call]
        shared = sum(axes[i].shared for axes, i in zip(by_call, best, strict=True))
        common = {i: sum(axes[i].shared for axes in by_call) for i in set(by_call[0]).intersection(*by_call[1:])}
        index = max(common, key=lambda i: (common[i], -i), default=None)
        if index is None and not self.can_add:
            return None
        if index is not None and (common[index] == shared or not self.can_add):
            return index, [axes[index] for axes in by_call]
        return self._add_input(best), [axes[i] for axes, i in zip(by_call, best, strict=True)]

    def _add_input(self, chosen: Sequence[int]) -> int:
        """Gives each call its input of an index once more, behind all others. Returns the index of the new input."""
        names = [call.node.input[i] for call, i in zip(self.calls, chosen, strict=True)]
        for i in range(self.read, len(self.function.input)):
            if [call.node.input[i] for call in self.calls] == names:
                return i
        self.function.input.append(f"x_of_axes{len(self.function.input) - self.read}")
        for call, name in zip(self.calls, names, strict=True):
            call.node.input.append(name)
        return len(self.function.input) - 1

    def _find_type(self, number: int, source: int) -> str | int | None:
        """What the copy takes its element type from: "source", "result", or one type; None where none of these can be."""
        types = [
            (call.shapes.dtype(call.node.input[source]), call.shapes.dtype(call.output(number)))
            for call in self.calls
            if call.output(number)
        ]
        if self.opset < CAST_LIKE_OPSET:
            return types[0][1] or None if len({result_type for _, result_type in types}) == 1 else None
        # A converter to fp16 changes the types around a call.
        return "source" if all(source_type == result_type != 0 for source_type, result_type in types) else "result"


def _sources_of(call: _Call, number: int) -> dict[int, AxesOfInput]:
    """The axes of a result by those of each input of known shape, by its index."""
    axes_by_input = {}
    for i, name in enumerate(call.node.input):
        axes = _match_axes(call.shapes, name, call.output(number)) if name else None
        if axes is not None:
            axes_by_input[i] = axes
    return axes_by_input


def _match_axes(shapes: _Shapes, source: str, result: str) -> AxesOfInput | None:
    """The axes of a result by those of another tensor; None where one of the ranks is not known.

    A result that a call does not have is a vector of one element in the function.
    """
    shape, wanted = shapes.shape(source), shapes.shape(result) if result else (integer(1),)
    if shape is None or not wanted or not shapes.dtype(source) or len(shape) + len(wanted) + 2 > len(_LETTERS):
        return None
    letters = iter(_LETTERS)
    free = [(next(letters), size) for size in shape]
    terms = ["".join(letter for letter, _ in free), "", ""]
    sizes: list[int] = []
    computed: list[int] = []
    taken = ""
    for axis, size in enumerate(wanted):
        letter_and_size = next((pair for pair in free if pair[1] == size), None)
        if size.constant is not None or letter_and_size is None:
            taken += next(letters)
            terms[1 if size.constant is not None else 2] += taken[-1]
            if size.constant is not None:
                sizes.append(size.constant)
            else:
                computed.append(axis)
        else:
            free.remove(letter_and_size)
            taken += letter_and_size[0]
    equation = ",".join(term or next(letters) for term in terms)
    shared = len(wanted) - len(sizes) - len(computed)
    return AxesOfInput(f"{equation}->{taken}", tuple(sizes) or (1,), tuple(computed) or (0,), shared)


def _append_copy(
    function: onnx.FunctionProto, output: str, source: str, attributes: Sequence[str], like: str | int, opset: int
) -> None:
    """Appends nodes that copy a result into a tensor with axes of an input."""
    prefix = FreshNames({name for n in function.node for name in node_tensors(n)}).make(f"{output}_shape")
    b = Builder(opset, f"{prefix}_")
    value = b.name()
    b.nodes += [_rename_tensors(n, {output: value}) for n in function.node]
    equation, *lists = attributes
    sizes, computed = (b.name() for _ in lists)
    for name, target in zip((sizes, computed), lists, strict=True):
        b.nodes.append(_with_attribute("Constant", [], name, "value_ints", target, AttributeProto.INTS))
    shape = b.add("Shape", [value])
    factors = [b.add("Cast", [source], to=_FLOAT), b.add("ConstantOfShape", [sizes])]
    factors.append(b.add("ConstantOfShape", [b.add("Gather", [shape, computed])]))
    shaped = b.name()
    b.nodes.append(_with_attribute("Einsum", factors, shaped, "equation", equation, AttributeProto.STRING))
    if isinstance(like, str):
        shaped = b.add("CastLike", [shaped, source if like == "source" else value])
    elif like != _FLOAT:
        shaped = b.add("Cast", [shaped], to=like)
    zero, one = b.constant(0), b.constant(1)
    rows = b.add("Range", [zero, b.add("Gather", [shape, zero]), one])
    # A node has a name of its own: the one that wrote the result may be called like it.
    last = helper.make_node("ScatterND", [shaped, b.unsqueeze(rows, [1]), value], [output], name=b.name())
    replace_nodes(function, [*b.nodes, last])
    function.attribute.extend(attributes)


def _with_attribute(
    op: str, inputs: Iterable[str], output: str, name: str, target: str, kind: AttributeProto.AttributeType
) -> onnx.NodeProto:
    """A node with an attribute of the call."""
    node = helper.make_node(op, list(inputs), [output], name=output)
    reference = node.attribute.add()
    reference.name, reference.ref_attr_name, reference.type = name, target, kind
    return node


def _rename_tensors(node: onnx.NodeProto, names: Mapping[str, str]) -> onnx.NodeProto:
    """A copy of a node, and of its subgraphs, that reads and writes other tensors."""
    renamed = onnx.NodeProto()
    renamed.CopyFrom(node)
    for inner in all_nodes([renamed]):
        for names_of_node in (inner.input, inner.output):
            for i, name in enumerate(names_of_node):
                names_of_node[i] = names.get(name, name)
        for graph in subgraphs(inner):
            for value in graph.output:
                value.name = names.get(value.name, value.name)
    return renamed
