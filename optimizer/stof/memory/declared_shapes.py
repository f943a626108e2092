# SPDX-License-Identifier: Apache-2.0
"""The shapes of tensors that ONNX Runtime knows before a run: declared ones, and what ONNX infers node by node."""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx

from stof.graph.index import subgraphs

_KEPT = 512  # elements of a constant: shapes and axes, which inference reads
_INVENTED = "unk__"  # how ONNX's inference calls sizes that it does not know

DeclaredShape = tuple[int | str | None, ...]


def infer_declared_shapes(model: onnx.ModelProto) -> dict[str, DeclaredShape]:
    """Shapes of a model's tensors by name, those of inner graphs included; those that are not known are left out."""
    stripped = onnx.ModelProto(ir_version=model.ir_version)
    stripped.opset_import.extend(model.opset_import)
    graph = stripped.graph
    graph.name = "shapes"
    graph.node.extend(model.graph.node)
    graph.input.extend(model.graph.input)
    graph.output.extend(model.graph.output)
    graph.value_info.extend(model.graph.value_info)
    named = {i.name for i in graph.input}
    for tensor in model.graph.initializer:
        if math.prod(tensor.dims) <= _KEPT:
            graph.initializer.append(tensor)
        elif tensor.name not in named:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    try:
        graph = onnx.shape_inference.infer_shapes(stripped).graph
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError):
        graph = stripped.graph  # what is declared
    return {v.name: shape for v in _values(graph) if (shape := _shape(v)) is not None}


def _values(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    """The described tensors, inner ones first: of tensors of one name the outer one counts."""
    for node in graph.node:
        for inner in subgraphs(node):
            yield from _values(inner)
    yield from (*graph.value_info, *graph.input, *graph.output)


def _shape(value: onnx.ValueInfoProto) -> DeclaredShape | None:
    tensor = value.type.tensor_type
    if value.type.WhichOneof("value") != "tensor_type" or not tensor.HasField("shape"):
        return None
    return tuple(
        d.dim_value if d.HasField("dim_value") else None if d.dim_param.startswith(_INVENTED) else d.dim_param or None
        for d in tensor.shape.dim
    )
