# SPDX-License-Identifier: Apache-2.0
"""Writes StofChain and StofGemm nodes into a copy of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import helper

from stof.errors import UnsupportedError
from stof.fusion.description.chain_description import ChainDescription
from stof.fusion.function_body import OP, Branch, make_branch, make_function
from stof.fusion.gemm import FusedGemm
from stof.fusion.tensorrt_plugin import complete_calls
from stof.fusion.translate import FusedChain
from stof.graph.dead_code import remove_dead_code
from stof.graph.index import DOMAIN, describe, find_needed, opset_of, topological_order
from stof.graph.local_functions import add_functions, check_absent
from stof.graph.names import FreshNames
from stof.graph.protobuf import replace_nodes
from stof.symbolic import Symbolic

GEMM = "StofGemm"
_FLOATS = frozenset({onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16})

# description, input types, output types
ChainSignature = tuple[ChainDescription, tuple[int, ...], tuple[int, ...]]


def chain_signature(chain: FusedChain, symbolic: Symbolic) -> ChainSignature:
    """The chain's description with the element types of its inputs and outputs: equal for chains of one kernel."""
    return chain.description, tuple(symbolic.dtype(n) for n in chain.inputs), chain.dtypes


def op_type_of(chain: FusedChain) -> str:
    """The name of the operator that computes a chain."""
    return GEMM if isinstance(chain, FusedGemm) else OP


def group_by_op(chains: Sequence[FusedChain]) -> dict[str, list[FusedChain]]:
    """Chains by their operator."""
    groups: dict[str, list[FusedChain]] = {}
    for chain in chains:
        groups.setdefault(op_type_of(chain), []).append(chain)
    return groups


def select_common_types(chains: Sequence[FusedChain]) -> tuple[list[FusedChain], tuple[int, ...]]:
    """The chains that can call one function, and its output types: those that most chains have.

    All calls of a function have the same output types, whichever branch they take.
    """
    types: list[int] = []
    rest = list(chains)
    while rest := [c for c in rest if len(c.dtypes) > len(types)]:
        types.append(Counter(c.dtypes[len(types)] for c in rest).most_common(1)[0][0])
        rest = [c for c in rest if c.dtypes[: len(types)] == tuple(types)]
    return [c for c in chains if c.dtypes == tuple(types[: len(c.dtypes)])], tuple(types)


@dataclass(frozen=True, eq=False)
class ChainEdit:
    """What puts chains into a model. It is made, and refused, without a copy of the model and its weights.

    Attributes:
        chains: those that are emitted.
        nodes: of the edited graph, in order; nodes that nothing needs any more are among them.
        functions: the bodies of the operators.
        infos: types and shapes that TensorRT's parser needs.
        live: names of the nodes that stay.
        names_function_nodes: the functions' nodes get names, as TensorRT's parser needs.
    """

    chains: tuple[FusedChain, ...] = ()
    nodes: tuple[onnx.NodeProto, ...] = ()
    functions: tuple[onnx.FunctionProto, ...] = ()
    infos: tuple[onnx.ValueInfoProto, ...] = ()
    live: frozenset[str] = frozenset()
    names_function_nodes: bool = False


def emit_chains(
    model: onnx.ModelProto,
    symbolic: Symbolic,
    chains: Sequence[FusedChain],
    shape_substitutes: Mapping[str, str] | None = None,
    tensorrt: bool = False,
) -> onnx.ModelProto:
    """A copy of the model in which each chain is one StofChain or StofGemm node; :func:`make_edit` has the arguments."""
    return apply_edit(model, make_edit(model, symbolic, chains, shape_substitutes, tensorrt))


def apply_edit(model: onnx.ModelProto, edit: ChainEdit) -> onnx.ModelProto:
    """A copy of the model that an edit was made for, with its chains."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    if not edit.chains:
        return result
    result.graph.value_info.extend(edit.infos)
    replace_nodes(result.graph, edit.nodes)
    remove_dead_code(result.graph, model.graph)
    _declare(result.graph, edit.chains)
    add_functions(result, edit.functions, names_nodes=edit.names_function_nodes)
    return result


def make_edit(
    model: onnx.ModelProto,
    symbolic: Symbolic,
    chains: Sequence[FusedChain],
    shape_substitutes: Mapping[str, str] | None = None,
    tensorrt: bool = False,
) -> ChainEdit:
    """What puts chains into a model.

    Args:
        model: the original.
        symbolic: its shapes and types.
        chains: chains without common nodes.
        shape_substitutes: tensors that chains no longer write, each with one of equal shape for the Shape nodes that read it.
        tensorrt: whether to write what TensorRT's parser needs.

    Raises:
        UnsupportedError: when the model holds such nodes already, or chains that cannot share a function.
    """
    nodes = list(model.graph.node)
    if not chains:
        return ChainEdit(live=frozenset(n.name for n in nodes))
    opset = opset_of(model)
    made: dict[int, onnx.NodeProto] = {}
    names = FreshNames(n.name for n in nodes)
    functions: list[onnx.FunctionProto] = []
    infos: list[onnx.ValueInfoProto] = []
    for op, group in group_by_op(chains).items():
        check_absent(model, op)
        fitting, dtypes = select_common_types(group)
        if len(fitting) < len(group):
            raise UnsupportedError("the chains' outputs are of different types")
        inputs = max(len(c.inputs) for c in group)
        numbers: dict[object, int] = {}
        branches: list[Branch] = []
        for chain in group:
            key = (
                chain_signature(chain, symbolic),
                [nodes[p].op_type for p in chain.region.node_indices] if op == GEMM else 0,
            )
            text = repr(key)  # GEMMs of one text may replace different operators: a bias may be part of Gemm, or an Add
            if text not in numbers:
                numbers[text] = len(branches)
                branches.append(make_branch(chain, nodes, symbolic, opset, f"c{len(branches)}"))
            made[chain.region.node_indices[-1]] = make_call(chain, numbers[text], (inputs, len(dtypes)), names)
        number = "gemm_id" if op == GEMM else "chain_id"
        if tensorrt:
            calls = [made[c.region.node_indices[-1]] for c in group]
            infos += complete_calls(calls, dtypes, len(branches))
        likes = [None if tensorrt else _find_input_of_type(group, symbolic, d) for d in dtypes]
        functions.append(make_function(branches, dtypes, inputs, opset, op, number, tensorrt, likes))
    kept = _arrange(nodes, chains, made, shape_substitutes or {})
    live = _live_nodes(model.graph, kept)
    _check(model.graph, live)
    return ChainEdit(
        tuple(chains), tuple(kept), tuple(functions), tuple(infos), frozenset(n.name for n in live), tensorrt
    )


def _arrange(
    nodes: Sequence[onnx.NodeProto],
    chains: Sequence[FusedChain],
    made: Mapping[int, onnx.NodeProto],
    substitutes: Mapping[str, str],
) -> list[onnx.NodeProto]:
    """The nodes with calls in the place of chains, writers before readers."""
    gone = {p for c in chains for p in c.region.node_indices}
    indices = [i for i in range(len(nodes)) if i in made or i not in gone]
    kept = [made.get(i) or _redirect_shape(nodes[i], substitutes) for i in indices]
    order = topological_order(kept, indices)
    if len(order) < len(kept):
        raise UnsupportedError("the chains would wait for each other; this is a defect of the search for chains")
    return [kept[i] for i in order]


def _live_nodes(graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """The nodes that the outputs of a graph need, if it had these nodes."""
    needed = find_needed((o.name for o in graph.output), nodes)
    return [n for n in nodes if not needed.isdisjoint(n.output)]


def _declare(graph: onnx.GraphProto, chains: Sequence[FusedChain]) -> None:
    """Declares the types of the chains' outputs: not every runtime infers them by the operator's library."""
    declared = {v.name for v in (*graph.value_info, *graph.output)}
    for chain in chains:
        for name, dtype in zip(chain.region.outputs, chain.dtypes, strict=True):
            if name not in declared:
                graph.value_info.append(helper.make_tensor_value_info(name, dtype, None))


def _find_input_of_type(chains: Sequence[FusedChain], symbolic: Symbolic, dtype: int) -> int | None:
    """The first input that has a float type in all chains; None where there is none."""
    if dtype not in _FLOATS:
        return None
    for i in range(min(len(c.inputs) for c in chains)):
        if all(symbolic.dtype(c.inputs[i]) == dtype for c in chains):
            return i
    return None


def _redirect_shape(node: onnx.NodeProto, substitutes: Mapping[str, str]) -> onnx.NodeProto:
    """The node; a Shape of a tensor that is gone reads its substitute."""
    if node.op_type != "Shape" or node.input[0] not in substitutes:
        return node
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.input[0] = substitutes[node.input[0]]
    return copy


def _check(graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto]) -> None:
    """Refuses nodes that read a tensor which only the inside of a chain computes."""
    available = {i.name for i in graph.input} | {t.name for t in graph.initializer} | {""}
    available |= {t.values.name for t in graph.sparse_initializer} | {o for n in nodes for o in n.output}
    for node in nodes:
        for name in node.input:
            if name not in available:
                raise UnsupportedError(f"{describe(node)} still needs {name!r}, which is inside of a chain")


def make_call(chain: FusedChain, number: int, counts: tuple[int, int], names: FreshNames) -> onnx.NodeProto:
    """The node that computes a chain.

    Args:
        chain: the chain.
        number: its branch of the function body.
        counts: how many inputs and outputs all calls have.
        names: of the model's nodes; the new one is added.
    """
    op = op_type_of(chain)
    name = names.make(f"{chain.region.outputs[0]}/{op}")
    # Padding inputs are not read. They are given all the same: a missing input would be missing in other branches.
    inputs = [*chain.inputs, *[chain.inputs[0]] * (counts[0] - len(chain.inputs))]
    outputs = chain.region.outputs
    attributes: dict[str, str | int] = {"chain": chain.description.text, "chain_id": number}
    if isinstance(chain, FusedGemm):
        attributes = {"epilogue": chain.description.text, "pair": chain.pair, "gemm_id": number}
    # Missing outputs have no names: runtimes infer types of every output of a function.
    written = [*outputs, *[""] * (counts[1] - len(outputs))]
    node = helper.make_node(op, inputs, written, name=name, domain=DOMAIN)
    attributes |= {"plugin_namespace": DOMAIN, "plugin_version": "1"}
    node.attribute.extend(helper.make_attribute(k, v) for k, v in attributes.items())
    return node
