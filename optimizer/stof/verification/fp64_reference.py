# SPDX-License-Identifier: Apache-2.0
"""The original with attention computed in fp64: how far its own rounding takes it from what it means.

A query whose keys are all masked by -10000 has scores near -10000, of which fp32 keeps three digits after the point. The
operator takes the constant out and keeps all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import onnx
from onnx import TensorProto, helper

from stof.graph.index import is_standard

# Of these ONNX Runtime's CPU provider has fp64 kernels, or they only move elements.
_KNOWN = frozenset(
    {"Add", "Div", "Einsum", "IsNaN", "MatMul", "Max", "Mul", "ReduceMax", "Softmax", "Sub", "Tanh", "Where"}
)
_KNOWN |= {"Cast", "CastLike", "Concat", "Dropout", "Expand", "Flatten", "Identity", "Pad", "Reshape", "Slice"}
_KNOWN |= {"Squeeze", "Transpose", "Unsqueeze"}
_FLOAT, _DOUBLE = int(TensorProto.FLOAT), int(TensorProto.DOUBLE)


def compute_in_fp64(
    model: onnx.ModelProto, cores: Collection[Collection[str]], dtype: Callable[[str], int]
) -> onnx.ModelProto | None:
    """A copy in which nodes of fp32 attention cores compute in fp64; None where none can.

    Args:
        model: with the nodes in its main graph.
        cores: for each core, the first outputs of its nodes.
        dtype: element types of tensors by name.
    """
    writers = {n.output[0]: n for n in model.graph.node if n.output}
    chosen: set[str] = set()
    for core in cores:
        nodes = [writers.get(o) for o in core]
        if all(n is not None and n.op_type in _KNOWN and is_standard(n) for n in nodes):
            chosen.update(core)
    if not chosen:
        return None
    result = onnx.ModelProto()
    result.CopyFrom(model)
    nodes_before = list(result.graph.node)
    del result.graph.node[:]
    wide: dict[str, str] = {}

    def add(node: onnx.NodeProto) -> None:
        result.graph.node.append(node)

    for node in nodes_before:
        if not node.output or node.output[0] not in chosen:
            add(node)
            continue
        for i, name in enumerate(node.input):
            if name in wide:
                node.input[i] = wide[name]
            elif name and dtype(name) == _FLOAT:
                wide[name] = f"{name}/stof_wide"
                add(helper.make_node("Cast", [name], [wide[name]], to=_DOUBLE))
                node.input[i] = wide[name]
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == _FLOAT:
                attribute.i = _DOUBLE
        floats = [(i, name) for i, name in enumerate(node.output) if name and dtype(name) == _FLOAT]
        for i, name in floats:
            wide[name] = node.output[i] = f"{name}/stof_exact"
        add(node)
        for _, name in floats:
            add(helper.make_node("Cast", [wide[name]], [name], to=_FLOAT))
    return result
