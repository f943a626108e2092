# SPDX-License-Identifier: Apache-2.0
"""Inlines local functions that contain attention, so that the main graph can be searched; others stay functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import onnx
from onnx import AttributeProto

from stof.errors import ModelError
from stof.graph.index import (
    DOMAIN,
    STANDARD_DOMAINS,
    all_nodes,
    domain_of,
    is_standard,
    node_tensors,
    opset_of,
    subgraphs,
)
from stof.graph.names import FreshNames
from stof.graph.protobuf import copy_model, copy_node, replace_nodes

FunctionKey = tuple[str, str, str]  # domain, name, overload
Functions = Mapping[FunctionKey, onnx.FunctionProto]
_MAX_DEPTH = 64
_MAX_NODES = 1 << 17  # functions that call each other many times would fill any memory
# Operators that move elements; the symbolic rules of stof.symbolic.rules.movement cover the same.
MOVEMENT_OPS = frozenset(
    {
        *("Concat", "ConstantOfShape", "Dropout", "Expand", "EyeLike", "Flatten", "Gather", "GatherElements"),
        *("GatherND", "Identity", "Pad", "Range", "Reshape", "ScatterElements", "ScatterND", "Shape", "Size", "Slice"),
        *("Split", "Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze"),
    }
)
# Operators on indices, shapes, masks and single elements, which exporters wrap in functions of their own.
_HELPER_OPS = MOVEMENT_OPS | frozenset(
    {
        *("Abs", "Add", "And", "Cast", "CastLike", "Clip", "Constant", "CumSum", "Div", "Equal", "Greater"),
        *("GreaterOrEqual", "If", "IsInf", "IsNaN", "Less", "LessOrEqual", "MatMul", "Max", "Min", "Mod", "Mul", "Neg"),
        *("NonZero", "Not", "Or", "Pow", "Reciprocal", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Sqrt"),
        *("Sub", "Where", "Xor"),
    }
)


def inline(model: onnx.ModelProto, wanted: Collection[tuple[str, str]]) -> onnx.ModelProto:
    """The model with the functions inlined that contain an operator (domain, type) of ``wanted``, directly or by calls.

    Functions that only compute indices, shapes and masks, or move elements, are inlined as well: some exporters wrap each
    operator in a function. Other functions stay (of a normalization layer, for example). So do stof's own functions, and
    functions of another opset in which one of their operators means something else. A model without a wanted operator is
    returned itself.

    Raises:
        ModelError: for a function that calls itself, calls nested too deep, or too many nodes.
    """
    functions = {_key(f): f for f in model.functions if f.domain != DOMAIN}
    containing = _find_containing(functions, wanted)
    nodes = list(all_nodes(model.graph.node))
    if not any(_callee(n) in containing or (domain_of(n), n.op_type) in wanted for n in nodes):
        return model
    chosen = containing | _find_helpers(functions)
    return _inline(model, {k: f for k, f in functions.items() if k in chosen and _has_same_meaning(f, model)})


def inline_all(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with all functions inlined but stof's own and those of another opset; for shape inference of calls."""
    functions = {_key(f): f for f in model.functions if f.domain != DOMAIN}
    return _inline(model, {k: f for k, f in functions.items() if _has_same_meaning(f, model)})


def _inline(model: onnx.ModelProto, chosen: Functions) -> onnx.ModelProto:
    if not chosen:
        return model
    result = copy_model(model)
    names = FreshNames(v.name for v in (*model.graph.input, *model.graph.initializer))
    for node in model.graph.node:
        names.reserve(node_tensors(node))
    _Inliner(chosen, names, result.graph).inline_graph(result.graph, 0)
    called = _find_called_functions(result)
    for i in reversed(range(len(result.functions))):
        key = _key(result.functions[i])
        if key in chosen and key not in called:
            del result.functions[i]
    return result


def _key(function: onnx.FunctionProto) -> FunctionKey:
    return (function.domain, function.name, function.overload)


def _callee(node: onnx.NodeProto) -> FunctionKey:
    return (node.domain, node.op_type, node.overload)


def _find_called_functions(model: onnx.ModelProto) -> set[FunctionKey]:
    """The functions that the graph calls, directly or by other functions."""
    functions = {_key(f): f for f in model.functions}
    pending = [_callee(n) for n in all_nodes(model.graph.node)]
    called: set[FunctionKey] = set()
    while pending:
        key = pending.pop()
        if key not in called:
            called.add(key)
            pending.extend(_callee(n) for n in all_nodes(functions[key].node if key in functions else []))
    return called


def _find_containing(functions: Functions, wanted: Collection[tuple[str, str]]) -> set[FunctionKey]:
    """The functions that contain a wanted operator, or call one that does."""
    calls: dict[FunctionKey, set[FunctionKey]] = {}
    containing: set[FunctionKey] = set()
    for key, function in functions.items():
        calls[key] = {_callee(n) for n in all_nodes(function.node)} & functions.keys()
        if any((domain_of(n), n.op_type) in wanted for n in all_nodes(function.node) if _callee(n) not in functions):
            containing.add(key)
    while more := {k for k in functions if k not in containing and calls[k] & containing}:
        containing |= more
    return containing


def _find_helpers(functions: Functions) -> set[FunctionKey]:
    """The functions that consist of helper operators and calls of such functions."""
    helpers = set(functions)
    while True:
        remaining = {
            k for k in helpers if all(_callee(n) in helpers or _is_helper(n) for n in all_nodes(functions[k].node))
        }
        if remaining == helpers:
            return helpers
        helpers = remaining


def _is_helper(node: onnx.NodeProto) -> bool:
    return is_standard(node) and node.op_type in _HELPER_OPS


def _has_same_meaning(function: onnx.FunctionProto, model: onnx.ModelProto) -> bool:
    """Whether the function's operators have the same definition in the model's opsets."""
    model_opsets = {e.domain: e.version for e in model.opset_import}
    opsets = {e.domain: e.version for e in function.opset_import}
    if any(d not in STANDARD_DOMAINS and model_opsets.get(d) != v for d, v in opsets.items()):
        return False
    opset = next((v for d, v in opsets.items() if d in STANDARD_DOMAINS), opset_of(model))
    if opset == opset_of(model):
        return True
    return all(
        _since_version(n.op_type, opset) == _since_version(n.op_type, opset_of(model))
        for n in all_nodes(function.node)
        if is_standard(n)
    )


def _since_version(op: str, opset: int) -> int:
    try:
        return int(onnx.defs.get_schema(op, opset, "").since_version)
    except onnx.defs.SchemaError:
        return -1


@dataclass(frozen=True)
class _Call:
    """One call that is being inlined."""

    node: onnx.NodeProto
    names: dict[str, str]  # of the function's tensors in the graph
    attributes: dict[str, AttributeProto]


class _Inliner:
    def __init__(self, functions: Functions, names: FreshNames, main: onnx.GraphProto) -> None:
        self.functions = functions
        self.names = names
        self.main = main
        self.count = 0
        self.stack: list[FunctionKey] = []  # the functions that are being inlined, each called by the one before

    def inline_graph(self, graph: onnx.GraphProto, depth: int) -> None:
        """Inlines the calls in a graph and its subgraphs in place."""
        replace_nodes(graph, [n for node in graph.node for n in self._inline_node(node, depth)])

    def _inline_node(self, node: onnx.NodeProto, depth: int) -> list[onnx.NodeProto]:
        function = self.functions.get(_callee(node))
        if function is None:
            for graph in subgraphs(node):
                self.inline_graph(graph, depth)
            return [node]
        self.count += len(function.node)
        if self.count > _MAX_NODES:
            raise ModelError(
                f"the model's local functions make more than {_MAX_NODES} nodes; inline it with onnx.inliner first"
            )
        key = _callee(node)
        if key in self.stack:
            others = len(self.stack) - self.stack.index(key) - 1
            raise ModelError(
                f"local function {function.domain}::{function.name} calls itself"
                f"{f' by way of {others} others' if others > 1 else ' by way of another' if others else ''}; functions must not"
            )
        if depth >= _MAX_DEPTH:
            raise ModelError(
                f"local functions call each other deeper than {_MAX_DEPTH} levels, where {function.domain}::{function.name} "
                "is called; inline them with onnx.inliner first"
            )
        call = self._bind(node, function)
        self.stack.append(key)
        nodes = []
        for inner in function.node:
            copy = copy_node(inner)
            self._rename(copy, call)
            nodes.extend(self._inline_node(copy, depth + 1))
        for formal, output in zip(function.output, node.output, strict=False):
            if output and call.names.get(formal) != output:  # an output that is an input, or is listed twice
                source = call.names.get(formal, "")
                nodes.append(onnx.helper.make_node("Identity", [source], [output], name=f"{output}/handed"))
        self._copy_value_info(function, call)
        self.stack.pop()
        return nodes

    def _bind(self, node: onnx.NodeProto, function: onnx.FunctionProto) -> _Call:
        names = {"": ""}
        for i, formal in enumerate(function.input):
            names[formal] = node.input[i] if i < len(node.input) else ""
        for formal, output in zip(function.output, node.output, strict=False):
            if output and formal not in names:
                names[formal] = output
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
            attribute_name = node.attribute[i].name
            if reference in call.attributes:
                node.attribute[i].CopyFrom(call.attributes[reference])
                node.attribute[i].name = attribute_name
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
            names[name] = self.names.make(f"{scope}/{name}")
        return names[name]

    def _copy_value_info(self, function: onnx.FunctionProto, call: _Call) -> None:
        formal = {*function.input, *function.output}
        for info in function.value_info:
            if info.name in call.names and info.name not in formal:
                copy = self.main.value_info.add()
                copy.CopyFrom(info)
                copy.name = call.names[info.name]
