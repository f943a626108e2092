# SPDX-License-Identifier: Apache-2.0
"""Brings nodes that a builder made into an edit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto, helper, numpy_helper

from stof.graph.editor import Editor
from stof.graph.node_fields import attributes_of

_BOOLEAN = frozenset({"And", "Or", "Not", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"})


def import_nodes(
    editor: Editor,
    protos: Sequence[onnx.NodeProto],
    inputs: Mapping[str, gs.Tensor],
    nodes: list[gs.Node],
    prefix: str,
    types: Mapping[str, int] | None = None,
) -> dict[str, gs.Tensor]:
    """Appends nodes of a builder to those of an edit; its constants become initializers.

    Args:
        editor: the graph under edit.
        protos: the builder's nodes, each with one output.
        inputs: the tensors that they read, by the builder's names.
        nodes: gets the new ones.
        prefix: of the names of new tensors.
        types: element types of ``inputs``, int64 where there is none.

    Returns:
        The tensors by the builder's names.
    """
    tensors: dict[str, gs.Tensor] = dict(inputs)
    dtypes: dict[str, int] = dict(types or {})
    for proto in protos:
        attributes = attributes_of(proto)
        out = proto.output[0]
        if proto.op_type == "Constant":
            array = numpy_helper.to_array(attributes["value"])
            dtypes[out] = helper.np_dtype_to_tensor_dtype(array.dtype)
            tensors[out] = editor.initializer(prefix, array)
            continue
        dtypes[out] = _result_type(proto, dtypes)
        variable = editor.variable(f"{prefix}_{proto.op_type.lower()}", dtypes[out])
        nodes.append(
            editor.node(proto.op_type, variable.name, [tensors[n] for n in proto.input], [variable], **attributes)
        )
        tensors[out] = variable
    return tensors


def _result_type(proto: onnx.NodeProto, types: Mapping[str, int]) -> int:
    """The element type of a node's output."""
    if proto.op_type == "Cast":
        return int(helper.get_node_attr_value(proto, "to"))
    if proto.op_type in _BOOLEAN:
        return int(TensorProto.BOOL)
    if proto.op_type == "Shape":
        return int(TensorProto.INT64)
    return types.get(proto.input[1 if proto.op_type == "Where" else 0], int(TensorProto.INT64))


def select_needed(protos: Sequence[onnx.NodeProto], outputs: Sequence[str]) -> list[onnx.NodeProto]:
    """The nodes on which some tensors depend."""
    read = set(outputs)
    needed = []
    for proto in reversed(protos):
        if read & set(proto.output):
            needed.append(proto)
            read.update(proto.input)
    return needed[::-1]
