# SPDX-License-Identifier: Apache-2.0
"""Brings models of old operator sets to the oldest one that later steps read."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import helper, version_converter

from stof.errors import ModelError, explained
from stof.graph.external_data import is_external
from stof.graph.index import STANDARD_DOMAINS, opset_of

OLDEST_CONVERTED = 7  # ONNX Runtime runs no older ones
_LARGE = 1 << 12  # bytes of an initializer that the converter need not see
_IR_OF_CONSTANTS = 4  # first IR version in which an initializer need not be an input


def convert_opset(path: Path, model: onnx.ModelProto, version: int) -> onnx.ModelProto:
    """The model in a later opset of the standard domain, by onnx.version_converter; large weights are not touched.

    Args:
        path: for messages.
        model: of an opset from ``OLDEST_CONVERTED`` on. It is not changed.
        version: of the standard domain.

    Raises:
        ModelError: when an operator cannot be converted.
    """
    opset = opset_of(model)
    advice = f"export it again with opset {version} or later"
    if model.functions:
        raise ModelError(f"{path} has opset {opset} and local functions, which are not converted; {advice}")
    try:
        converted = version_converter.convert_version(_without_large_weights(model), version).graph
    except Exception as error:  # the C++ library raises several types
        raise ModelError(
            f"{path} has opset {opset}, which cannot be converted to {version} ({explained(error)}); {advice}"
        ) from None
    initializer_names = {t.name for t in model.graph.initializer}
    result = onnx.ModelProto()
    result.CopyFrom(model)
    result.ir_version = max(model.ir_version, _IR_OF_CONSTANTS)
    del result.graph.node[:], result.graph.value_info[:]
    result.graph.node.extend(converted.node)
    result.graph.value_info.extend(converted.value_info)
    result.graph.initializer.extend(t for t in converted.initializer if t.name not in initializer_names)
    for entry in result.opset_import:
        if entry.domain in STANDARD_DOMAINS:
            entry.version = version
    return result


def _without_large_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with inputs in place of large weights and of those in other files."""
    result = onnx.ModelProto(ir_version=max(model.ir_version, _IR_OF_CONSTANTS))
    result.opset_import.extend(model.opset_import)
    source, graph = model.graph, result.graph
    graph.name = source.name or "graph"
    graph.node.extend(source.node)
    graph.input.extend(source.input)
    graph.output.extend(source.output)
    graph.value_info.extend(source.value_info)
    input_names = {i.name for i in source.input}
    for tensor in source.initializer:
        if not is_external(tensor) and tensor.ByteSize() < _LARGE:
            graph.initializer.append(tensor)
        elif tensor.name not in input_names:
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return result
