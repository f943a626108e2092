# SPDX-License-Identifier: Apache-2.0
"""Types of tensors that ONNX Runtime's Python interface takes and gives no arrays of: integers of 4 bits, for instance."""

from __future__ import annotations

from collections.abc import Iterable

import onnx
from onnx import helper

from stof.execution.session_worker import ARRAY_TYPES
from stof.graph.protobuf import copy_with_nodes, remove_named


def find_without_arrays(values: Iterable[onnx.ValueInfoProto]) -> dict[str, str]:
    """The tensors of such types, with the type's name."""
    found = {}
    for value in values:
        kind = value.type.tensor_type.elem_type
        if kind == onnx.TensorProto.UNDEFINED or kind in ARRAY_TYPES or kind not in onnx.TensorProto.DataType.values():
            continue  # no tensor, or of a type that runtimes refuse
        if helper.tensor_dtype_to_np_dtype(kind).isbuiltin != 1:
            found[value.name] = onnx.TensorProto.DataType.Name(kind)
    return found


def drop_outputs_without_arrays(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a model without the outputs of such types; the model itself where it has none."""
    names = find_without_arrays(model.graph.output)
    if not names:
        return model
    found = copy_with_nodes(model, model.graph.node)
    remove_named(found.graph.output, set(names))
    return found
