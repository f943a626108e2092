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
from stof.symbolic.algebra.terms import Int, integer
from stof.symbolic.dimension_names import declared_dim
from stof.symbolic.tensor import Shape

_CAST_LIKE = 15  # the first opset with the operator
_FLOAT = int(TensorProto.FLOAT)
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
    """What the contracts of operators allow.

    Attributes:
        with_spare_inputs: operators that ignore inputs behind those that they read.
        in_place: operators that write results where inputs lie. Their functions stay: a copy would take a cache's memory.
    """

    with_spare_inputs: frozenset[str] = frozenset()
    in_place: frozenset[str] = frozenset()

    def __or__(self, other: ResultRules) -> ResultRules:
        return ResultRules(self.with_spare_inputs | other.with_spare_inputs, self.in_place | other.in_place)


def declare_results(model: onnx.ModelProto, rules: ResultRules, *, in_functions: bool) -> None:
    """Declares the results of all nodes of domain stof, in place. What is declared already stays.

    A size has a name of the model's own, a number, or is left open where it is computed.

    Args:
        model: a model with nodes of domain stof.
        rules: of the operators.
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
            if function.domain == DOMAIN and own and function.name not in inner | rules.in_place:
                _Carrier(function, own, shapes, opset_of(model), rules).carry()


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


class _Carrier:
    """Gives results of a function the axes of an input, where each call knows them.

    Args:
        function: the function, changed in place.
        calls: all calls of it, changed in place.
        shapes: of the model.
        opset: of the standard domain.
        rules: of the operators.
    """

    def __init__(
        self,
        function: onnx.FunctionProto,
        calls: Sequence[onnx.NodeProto],
        shapes: _Shapes,
        opset: int,
        rules: ResultRules,
    ) -> None:
        self.function = function
        self.calls = calls
        self.shapes = shapes
        self.opset = opset
        self.can_add = function.name in rules.with_spare_inputs
        self.read = len(function.input)  # the inputs that the operator reads
        self.changes = not any(a.startswith("output0_") for a in function.attribute)

    def carry(self) -> None:
        """Changes the function and its calls; one that was changed before stays."""
        for number, output in enumerate(list(self.function.output) if self.changes else ()):
            found = self._find_source(number)
            like = None if found is None else self._find_type(number, found[0])
            if found is None or like is None:
                continue
            source, by_call = found
            names = _attribute_names(number)
            _append_copy(self.function, output, self.function.input[source], names, like, self.opset)
            for node, own in zip(self.calls, by_call, strict=True):
                node.attribute.extend(helper.make_attribute(k, v) for k, v in own.attributes(number).items())

    def _find_source(self, number: int) -> tuple[int, list[AxesOfInput]] | None:
        """The input that has the axes of a result at all calls, and the axes by call; a new input where each has another."""
        if not self.can_add and any(len(n.output) <= number or not n.output[number] for n in self.calls):
            return None
        by_call = [self._sources_of(n, number) for n in self.calls]
        if not all(by_call):
            return None
        best = [max(own, key=lambda i: (own[i].shared, -i)) for own in by_call]
        shared = sum(own[i].shared for own, i in zip(by_call, best, strict=True))
        common = {i: sum(own[i].shared for own in by_call) for i in set(by_call[0]).intersection(*by_call[1:])}
        index = max(common, key=lambda i: (common[i], -i), default=None)
        if index is None and not self.can_add:
            return None
        if index is not None and (common[index] == shared or not self.can_add):
            return index, [own[index] for own in by_call]
        return self._add_input(best), [own[i] for own, i in zip(by_call, best, strict=True)]

    def _sources_of(self, node: onnx.NodeProto, number: int) -> dict[int, AxesOfInput]:
        """The axes of a result by those of each input of known shape, by its index."""
        result = node.output[number] if number < len(node.output) else ""
        found = {}
        for i, name in enumerate(node.input):
            axes = _match_axes(self.shapes, name, result) if name else None
            if axes is not None:
                found[i] = axes
        return found

    def _add_input(self, chosen: Sequence[int]) -> int:
        """Gives each call its input of an index once more, behind all others. Returns the index of the new input."""
        names = [n.input[i] for n, i in zip(self.calls, chosen, strict=True)]
        for i in range(self.read, len(self.function.input)):
            if [n.input[i] for n in self.calls] == names:
                return i
        self.function.input.append(f"x_of_axes{len(self.function.input) - self.read}")
        for node, name in zip(self.calls, names, strict=True):
            node.input.append(name)
        return len(self.function.input) - 1

    def _find_type(self, number: int, source: int) -> str | int | None:
        """What the copy takes its element type from: "source", "result", or one type; None where none of these can be."""
        dtype = self.shapes.dtype
        types = [(dtype(n.input[source]), dtype(n.output[number])) for n in self.calls if n.output[number]]
        if self.opset < _CAST_LIKE:
            return types[0][1] or None if len({own for _, own in types}) == 1 else None
        # A converter to fp16 changes the types around a call.
        return "source" if all(given == own != 0 for given, own in types) else "result"


def _match_axes(shapes: _Shapes, source: str, result: str) -> AxesOfInput | None:
    """The axes of a result by those of another tensor; None where one of the ranks is not known.

    A result that a call does not have is a vector of one element in the function.
    """
    given, wanted = shapes.shape(source), shapes.shape(result) if result else (integer(1),)
    if given is None or not wanted or not shapes.dtype(source) or len(given) + len(wanted) + 2 > len(_LETTERS):
        return None
    letters = iter(_LETTERS)
    free = [(next(letters), size) for size in given]
    terms = ["".join(letter for letter, _ in free), "", ""]
    sizes: list[int] = []
    computed: list[int] = []
    taken = ""
    for axis, size in enumerate(wanted):
        own = next((pair for pair in free if pair[1] == size and shapes.is_sure(size)), None)
        if size.constant is not None or own is None:
            taken += next(letters)
            terms[1 if size.constant is not None else 2] += taken[-1]
            if size.constant is not None:
                sizes.append(size.constant)
            else:
                computed.append(axis)
        else:
            free.remove(own)
            taken += own[0]
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
    b.nodes += [_renamed(n, {output: value}) for n in function.node]
    equation, *lists = attributes
    sizes, computed = (b.name() for _ in lists)
    for name, target in zip((sizes, computed), lists, strict=True):
        b.nodes.append(_with_attribute("Constant", [], name, "value_ints", target, AttributeProto.INTS))
    shape = b.add("Shape", [value])
    given = [b.add("Cast", [source], to=_FLOAT), b.add("ConstantOfShape", [sizes])]
    given.append(b.add("ConstantOfShape", [b.add("Gather", [shape, computed])]))
    shaped = b.name()
    b.nodes.append(_with_attribute("Einsum", given, shaped, "equation", equation, AttributeProto.STRING))
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


def _renamed(node: onnx.NodeProto, names: Mapping[str, str]) -> onnx.NodeProto:
    """A copy of a node, and of its subgraphs, that reads and writes other tensors."""
    found = onnx.NodeProto()
    found.CopyFrom(node)
    for inner in (found, *all_nodes(n for g in subgraphs(found) for n in g.node)):
        for names_of_node in (inner.input, inner.output):
            for i, name in enumerate(names_of_node):
                names_of_node[i] = names.get(name, name)
    for graph in (g for inner in subgraphs(found) for g in _all_graphs(inner)):
        for value in graph.output:
            value.name = names.get(value.name, value.name)
    return found
