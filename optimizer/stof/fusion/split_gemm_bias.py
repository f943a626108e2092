# SPDX-License-Identifier: Apache-2.0
"""Splits Gemm with a bias into MatMul and Add, so that a chain or an epilogue may take the Add; rejoins those left over.

A runtime on a GPU writes the bias to all rows before the matmul adds to it, which costs more than a kernel for the Add.
Where Gemm's rows are batch and positions, flattened before it and restored after it, MatMul reads them unflattened.
"""

from __future__ import annotations

import onnx
from onnx import helper

from stof.fusion.gemm import is_plain_matmul
from stof.graph.index import node_tensors, producers
from stof.graph.protobuf import copy_with_nodes
from stof.symbolic import Symbolic

SplitGemms = dict[str, list[onnx.NodeProto]]  # by MatMul's output: the nodes that it and Add replace


def split_gemm_bias(model: onnx.ModelProto, symbolic: Symbolic) -> tuple[onnx.ModelProto, SplitGemms]:
    """A copy with MatMul and Add in place of each Gemm that multiplies as MatMul does, and what they replace."""
    graph = model.graph
    taken = {n for node in graph.node for n in node_tensors(node)} | {o.name for o in graph.output}
    writer = producers(graph.node)
    readers: dict[str, list[onnx.NodeProto]] = {o.name: [] for o in graph.output}
    for node in graph.node:
        for name in node_tensors(node).difference(node.output):
            readers.setdefault(name, []).append(node)
    kept = {o.name for o in graph.output}
    gemms: SplitGemms = {}
    nodes: list[onnx.NodeProto] = []
    gone: set[str] = set()
    for node in graph.node:
        name = f"{node.output[0]}/product" if node.output else ""
        if not _is_gemm_with_bias(node) or taken & {name, f"{name}/rows", f"{name}/rows_shape"}:
            if node.output and node.output[0] not in gone:
                nodes.append(node)
            continue
        source, target = node.input[0], node.output[0]
        before = writer.get(source)
        after = readers.get(target, [])
        replaced = [node]
        restored = before is not None and target not in kept and _is_flattened_and_restored(before, after, symbolic)
        if before is not None and restored and _is_equal_for_all_rows(node.input[2], symbolic):
            source, target, replaced = before.input[0], after[0].output[0], [node, after[0]]
            gone.add(target)
            rank = len(symbolic.shape(target) or ())
            if len(symbolic.shape(source) or ()) > rank:  # heads are still separate dimensions
                joint = f"{name}/rows"
                nodes.append(helper.make_node("Constant", [], [f"{joint}_shape"], value_ints=[*[0] * (rank - 1), -1]))
                nodes.append(helper.make_node("Reshape", [source, f"{joint}_shape"], [joint], joint))
                source = joint
        gemms[name] = replaced
        nodes.append(helper.make_node("MatMul", [source, node.input[1]], [name], f"{node.name}/product"))
        nodes.append(helper.make_node("Add", [name, node.input[2]], [target], node.name))
    return (copy_with_nodes(model, nodes), gemms) if gemms else (model, gemms)


def rejoin_gemm_bias(model: onnx.ModelProto, gemms: SplitGemms) -> onnx.ModelProto:
    """A copy with Gemm in place of MatMul and Add where both are left; where rows were flattened, they stay."""
    read = {n for node in model.graph.node for n in node_tensors(node).difference(node.output)}
    matmuls = {n.output[0] for n in model.graph.node if n.op_type == "MatMul"} & {
        n for n, replaced in gemms.items() if len(replaced) == 1
    }
    pairs = {n for node in model.graph.node if node.op_type == "Add" for n in node.input if n in matmuls}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        name = next((n for n in node.input if n in pairs), "") if node.op_type == "Add" else ""
        if name:
            nodes.append(gemms[name][0])
        elif node.op_type != "MatMul" or node.output[0] not in pairs:
            nodes.append(node)
    flat = {replaced[0].input[0] for replaced in gemms.values() if len(replaced) > 1}
    unread = {f for f in flat if f not in read and f not in {o.name for o in model.graph.output}}
    nodes = [n for n in nodes if not set(n.output) & unread]
    return copy_with_nodes(model, nodes) if gemms else model


def _is_gemm_with_bias(node: onnx.NodeProto) -> bool:
    return node.op_type == "Gemm" and is_plain_matmul(node) and len(node.input) > 2 and bool(node.input[2])


def _is_flattened_and_restored(before: onnx.NodeProto, after: list[onnx.NodeProto], symbolic: Symbolic) -> bool:
    """Whether Reshape flattens the rows before Gemm, and another one restores them after it."""
    if before.op_type != "Reshape" or len(after) != 1 or after[0].op_type != "Reshape":
        return False
    original, flat = symbolic.shape(before.input[0]), symbolic.shape(before.output[0])
    matmul, restored = symbolic.shape(after[0].input[0]), symbolic.shape(after[0].output[0])
    if original is None or flat is None or matmul is None or restored is None:
        return False
    rows = len(restored) - 1
    if (
        len(original) <= rows
        or flat[-1].constant is None
        or restored[-1:] != matmul[-1:]
        or original[:rows] != restored[:-1]
    ):
        return False
    width = 1
    for size in original[rows:]:
        width *= size.constant or 0
    return len(flat) == 2 and width == flat[-1].constant


def _is_equal_for_all_rows(name: str, symbolic: Symbolic) -> bool:
    """Whether a tensor is broadcast to all rows, however these are shaped."""
    shape = symbolic.shape(name)
    return shape is not None and all(d.constant == 1 for d in shape[:-1])
