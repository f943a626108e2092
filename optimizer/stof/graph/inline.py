# SPDX-License-Identifier: Apache-2.0
"""Local functions that attention is spread over become nodes of the graphs that call them; others stay functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import onnx
from onnx import AttributeProto

from stof.errors import ModelError
from stof.graph.model_graph import DOMAIN, all_nodes, domain_of, node_tensors, opset_of, subgraphs
from stof.symbolic.rules import movement

Key = tuple[str, str, str]
_STANDARD = ("", "ai.onnx")
_DEEPEST = 64
_MOST_NODES = 1 << 17  # functions that call others many times each would fill any memory
_PLAIN = frozenset(
    movement.RULES.keys()
    | {"Add", "Sub", "Mul", "Div", "Mod", "Neg", "Abs", "Min", "Max", "Clip", "Pow", "Sqrt", "Reciprocal", "Not", "And"}
    | {
        "Or",
        "Xor",
        "Less",
        "LessOrEqual",
        "Greater",
        "GreaterOrEqual",
        "Equal",
        "Where",
        "Cast",
        "CastLike",
        "Constant",
    }
    | {"IsNaN", "IsInf", "CumSum", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "MatMul", "If", "NonZero"}
)


def inline(model: onnx.ModelProto, wanted: Collection[tuple[str, str]]) -> onnx.ModelProto:
    """The model with functions expanded, where attention is: an operator (domain, type) of ``wanted``.

    Those are expanded that hold such an operator, also by way of others, and those that only compute indices, shapes and
    masks or move elements, as exporters wrap every operator of theirs in one. Layers (of normalization, say) stay, as do
    functions whose operators mean something else in the model's opset, and our own. Without attention, the model itself.

    Raises:
        ModelError: for functions that call themselves, too many levels of functions, or too many nodes in them.
    """
    functions = {_key(f): f for f in model.functions if f.domain != DOMAIN}
    holding = _holding(functions, wanted)
    nodes = list(all_nodes(model.graph.node))
    if not any(_called(n) in holding or (domain_of(n), n.op_type) in wanted for n in nodes):
        return model
    open_ = holding | _plain(functions)
    return _inlined(model, {k: f for k, f in functions.items() if k in open_ and _fits(f, model)})


def inline_all(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with every function expanded but our own and those of other opsets: what tells the shapes of calls."""
    return _inlined(model, {_key(f): f for f in model.functions if f.domain != DOMAIN and _fits(f, model)})


def _inlined(model: onnx.ModelProto, chosen: Mapping[Key, onnx.FunctionProto]) -> onnx.ModelProto:
    if not chosen:
        return model
    result = onnx.ModelProto()
    result.CopyFrom(model)
    taken = {n for node in model.graph.node for n in node_tensors(node)}
    taken |= {v.name for v in (*model.graph.input, *model.graph.initializer)}
    _Inliner(chosen, taken, result.graph).graph(result.graph, 0)
    called = _reached(result)
    for i in reversed(range(len(result.functions))):
        key = _key(result.functions[i])
        if key in chosen and key not in called:
            del result.functions[i]
    return result


def _key(function: onnx.FunctionProto) -> Key:
    return (function.domain, function.name, function.overload)


def _called(node: onnx.NodeProto) -> Key:
    return (node.domain, node.op_type, node.overload)


def _reached(model: onnx.ModelProto) -> set[Key]:
    """What the graph calls, also by way of functions."""
    functions = {_key(f): f for f in model.functions}
    pending = [_called(n) for n in all_nodes(model.graph.node)]
    found: set[Key] = set()
    while pending:
        key = pending.pop()
        if key not in found:
            found.add(key)
            pending.extend(_called(n) for n in all_nodes(functions[key].node if key in functions else []))
    return found


def _holding(functions: Mapping[Key, onnx.FunctionProto], wanted: Collection[tuple[str, str]]) -> set[Key]:
    """The functions that hold a wanted operator, or call one that does."""
    calls: dict[Key, set[Key]] = {}
    found: set[Key] = set()
    for key, function in functions.items():
        calls[key] = {_called(n) for n in all_nodes(function.node)} & functions.keys()
        if any((domain_of(n), n.op_type) in wanted for n in all_nodes(function.node) if _called(n) not in functions):
            found.add(key)
    while more := {k for k in functions if k not in found and calls[k] & found}:
        found |= more
    return found


def _plain(functions: Mapping[Key, onnx.FunctionProto]) -> set[Key]:
    """The functions of nothing but operators on indices, shapes, masks, single elements and places, and calls of such."""
    plain = set(functions)
    while True:
        left = {k for k in plain if all(_called(n) in plain or _is_plain(n) for n in all_nodes(functions[k].node))}
        if left == plain:
            return plain
        plain = left


def _is_plain(node: onnx.NodeProto) -> bool:
    return node.domain in _STANDARD and node.op_type in _PLAIN


def _fits(function: onnx.FunctionProto, model: onnx.ModelProto) -> bool:
    """Whether the function's nodes mean the same among the model's."""
    ours = {e.domain: e.version for e in model.opset_import}
    own = {e.domain: e.version for e in function.opset_import}
    if any(d not in _STANDARD and ours.get(d) != v for d, v in own.items()):
        return False
    version = next((v for d, v in own.items() if d in _STANDARD), opset_of(model))
    if version == opset_of(model):
        return True
    return all(
        _since(n.op_type, version) == _since(n.op_type, opset_of(model))
        for n in all_nodes(function.node)
        if n.domain in _STANDARD
    )


def _since(op: str, opset: int) -> int:
    try:
        return int(onnx.defs.get_schema(op, opset, "").since_version)
    except onnx.defs.SchemaError:
        return -1


@dataclass(frozen=True)
class _Call:
    """One call under expansion: the names of the function's tensors, its attributes."""

    node: onnx.NodeProto
    names: dict[str, str]
    attributes: dict[str, AttributeProto]


class _Inliner:
    def __init__(self, functions: Mapping[Key, onnx.FunctionProto], taken: set[str], main: onnx.GraphProto) -> None:
        self.functions = functions
        self.taken = taken
        self.main = main
        self.count = 0
        self.open: list[Key] = []  # the functions that are being expanded, each called by the one before

    def graph(self, graph: onnx.GraphProto, depth: int) -> None:
        """Expands the calls of a graph and its subgraphs in place."""
        nodes = [n for node in graph.node for n in self._expanded(node, depth)]
        del graph.node[:]
        graph.node.extend(nodes)

    def _expanded(self, node: onnx.NodeProto, depth: int) -> list[onnx.NodeProto]:
        function = self.functions.get(_called(node))
        if function is None:
            for graph in subgraphs(node):
                self.graph(graph, depth)
            return [node]
        self.count += len(function.node)
        if self.count > _MOST_NODES:
            raise ModelError(
                f"the model's local functions make more than {_MOST_NODES} nodes; inline it with onnx.inliner first"
            )
        key = _called(node)
        if key in self.open:
            others = len(self.open) - self.open.index(key) - 1
            raise ModelError(
                f"local function {function.domain}::{function.name} calls itself"
                f"{f' by way of {others} others' if others > 1 else ' by way of another' if others else ''}; functions must not"
            )
        if depth >= _DEEPEST:
            raise ModelError(
                f"local functions call each other deeper than {_DEEPEST} levels, where {function.domain}::{function.name} "
                "is called; inline them with onnx.inliner first"
            )
        call = self._call(node, function)
        self.open.append(key)
        found = []
        for inner in function.node:
            copy = onnx.NodeProto()
            copy.CopyFrom(inner)
            self._rename(copy, call)
            found.extend(self._expanded(copy, depth + 1))
        for formal, given in zip(function.output, node.output, strict=False):
            if given and call.names.get(formal) != given:  # an input that is handed through, or an output named twice
                source = call.names.get(formal, "")
                found.append(onnx.helper.make_node("Identity", [source], [given], name=f"{given}/handed"))
        self._infos(function, call)
        self.open.pop()
        return found

    def _call(self, node: onnx.NodeProto, function: onnx.FunctionProto) -> _Call:
        names = {"": ""}
        for i, formal in enumerate(function.input):
            names[formal] = node.input[i] if i < len(node.input) else ""
        for formal, given in zip(function.output, node.output, strict=False):
            if given and formal not in names:
                names[formal] = given
        attributes = {a.name: a for a in function.attribute_proto}
        attributes.update({a.name: a for a in node.attribute})
        return _Call(node, names, attributes)

    def _rename(self, node: onnx.NodeProto, call: _Call) -> None:
        scope = call.node.name or call.node.output[0]
        node.name = f"{scope}/{node.name}" if node.name else ""
        for field in (node.input, node.output):
            for i, name in enumerate(field):
                field[i] = self._name(name, scope, call.names)
        for i in reversed(range(len(node.attribute))):
            reference = node.attribute[i].ref_attr_name
            if not reference:
                continue
            own = node.attribute[i].name
            if reference in call.attributes:
                node.attribute[i].CopyFrom(call.attributes[reference])
                node.attribute[i].name = own
            else:
                del node.attribute[i]
        for graph in subgraphs(node):
            for value in (*graph.input, *graph.initializer, *graph.value_info):
                value.name = self._name(value.name, scope, call.names)
            for inner in graph.node:
                self._rename(inner, call)
            for output in graph.output:
                output.name = self._name(output.name, scope, call.names)

    def _name(self, name: str, scope: str, names: dict[str, str]) -> str:
        if name not in names:
            fresh, i = f"{scope}/{name}", 1
            while fresh in self.taken:
                i += 1
                fresh = f"{scope}/{name}_{i}"
            self.taken.add(fresh)
            names[name] = fresh
        return names[name]

    def _infos(self, function: onnx.FunctionProto, call: _Call) -> None:
        formal = {*function.input, *function.output}
        for info in function.value_info:
            if info.name in call.names and info.name not in formal:
                copy = self.main.value_info.add()
                copy.CopyFrom(info)
                copy.name = call.names[info.name]
