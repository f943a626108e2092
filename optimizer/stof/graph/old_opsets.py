# SPDX-License-Identifier: Apache-2.0
"""Brings models to a later operator set of the standard domain."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx
from onnx import helper, version_converter

from stof.errors import ModelError, UnsupportedError, explained
from stof.graph.external_data import is_external
from stof.graph.index import STANDARD_DOMAINS, domain_of, opset_of

OLDEST_CONVERTED = 7  # ONNX Runtime runs no older ones
_LARGE = 1 << 12  # bytes of an initializer that the converter need not see
_IR_OF_CONSTANTS = 4  # first IR version in which an initializer need not be an input


def convert_opset(path: Path, model: onnx.ModelProto, version: int) -> onnx.ModelProto:
    """The model in a later opset of the standard domain, as :func:`raise_opset` gives it.

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
        return raise_opset(model, version)
    except UnsupportedError as error:
        raise ModelError(f"{path} has opset {opset}, which {error}; {advice}") from None


def raise_opset(model: onnx.ModelProto, version: int) -> onnx.ModelProto:
    """A copy of the model in a later opset of the standard domain, by onnx.version_converter; large weights are not touched.

    Local functions stay as they are: each imports an opset of its own.

    Raises:
        UnsupportedError: when an operator cannot be converted.
    """
    try:
        converted = version_converter.convert_version(_without_large_weights(model), version).graph
    except Exception as error:  # the C++ library raises several types
        raise UnsupportedError(f"cannot be converted to {version} ({explained(error)})") from None
    initializer_names = {t.name for t in model.graph.initializer}
    result = onnx.ModelProto()
    result.CopyFrom(model)
    result.ir_version = max(model.ir_version, _IR_OF_CONSTANTS)
    written = [o for n in converted.node for o in n.output if o]
    if len(set(written)) < len(written):
        raise UnsupportedError(f"cannot be converted to {version} (a tensor has the name of one that is new there)")
    del result.graph.node[:]
    result.graph.node.extend(_with_originals(converted.node, model.graph.node))
    result.graph.initializer.extend(t for t in converted.initializer if t.name not in initializer_names)
    for entry in result.opset_import:
        if entry.domain in STANDARD_DOMAINS:
            entry.version = version
    return result


def _with_originals(
    converted: Iterable[onnx.NodeProto], originals: Iterable[onnx.NodeProto]
) -> Iterator[onnx.NodeProto]:
    """The converted nodes; those that the converter left as they are come from the original, with its metadata."""
    by_output = {o: n for n in originals for o in n.output[:1]}
    for node in converted:
        before = by_output.get(node.output[0]) if node.output else None
        yield node if before is None or _meaning_of(before) != _meaning_of(node) else before


def _meaning_of(node: onnx.NodeProto) -> bytes:
    """What a node computes: all of it but name, comments and the order of attributes."""
    bare = onnx.NodeProto()
    bare.CopyFrom(node)
    for field in ("name", "doc_string", "metadata_props", "overload"):
        bare.ClearField(field)
    bare.domain = domain_of(node)
    attributes = sorted(bare.attribute, key=lambda a: a.name)
    del bare.attribute[:]
    for attribute in attributes:
        attribute.ClearField("doc_string")
    bare.attribute.extend(attributes)
    return bytes(bare.SerializeToString(deterministic=True))


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
