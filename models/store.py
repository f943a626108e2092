# SPDX-License-Identifier: Apache-2.0
"""Graphs without weights: what is taken out, how two exports are compared, and where they are kept."""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

import build

_FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}
_KEEP = 1024  # float tensors up to this many elements stay in the graph: norms, biases, inverse frequencies
_KEEP_TABLE = 1 << 16  # elements of a float constant of a node: tables of positions. Those of few values compress well
_KEEP_NARROW = 64  # of the zoo's, where most weights are smaller, and of vectors that are not as they were initialized


def strip(
    model: onnx.ModelProto, folder: Path, narrow: bool, zeros: Collection[str] = (), vectors: bool = False
) -> None:
    """Replaces large float tensors by placeholders and brings all others inline.

    Of a ``narrow`` model, small weights go as well, and what looks like a table of the graph (few distinct values) stays.
    ``zeros`` are weights that go in any case: initialized with zeros, they would hide what depends on them. With ``vectors``,
    vectors of parameters go, too.
    """
    for tensor in model.graph.initializer:
        count = int(np.prod(list(tensor.dims), dtype=np.int64))
        vector = vectors and len(tensor.dims) == 1 and tensor.name.startswith("core.")
        large = tensor.data_type in _FLOATS and count > (_KEEP_NARROW if narrow or vector else _KEEP)
        if large and not narrow and tensor.data_type == TensorProto.FLOAT:
            _placeholder(tensor)
            continue
        if tensor.data_location == TensorProto.EXTERNAL:
            onnx.external_data_helper.load_external_data_for_tensor(tensor, str(folder))
            tensor.data_location = TensorProto.DEFAULT
            del tensor.external_data[:]
        if tensor.name in zeros or (large and narrow and _random(tensor)):
            _placeholder(tensor)
    for tensor in build.constants(model):
        if tensor.data_type in _FLOATS and np.prod(list(tensor.dims)) > _KEEP_TABLE and _random(tensor):
            _placeholder(tensor)


def _random(tensor: onnx.TensorProto) -> bool:
    array = onnx.numpy_helper.to_array(tensor).astype(np.float32)
    return len(np.unique(array)) > array.size // 8


def _placeholder(tensor: onnx.TensorProto) -> None:
    tensor.ClearField("raw_data")
    tensor.ClearField("float_data")
    tensor.ClearField("int32_data")
    del tensor.external_data[:]
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.append(onnx.StringStringEntryProto(key="location", value=build.PLACEHOLDER))


def forget_metadata(model: onnx.ModelProto, shapes: bool = False) -> None:
    """Drops metadata, doc strings and, unless ``shapes`` are to stay, value_info: what a runtime does not need."""
    del model.metadata_props[:]
    del model.graph.metadata_props[:]
    if not shapes:
        del model.graph.value_info[:]
    for value in model.graph.value_info:
        del value.metadata_props[:]
    for node in model.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    for item in [*model.graph.input, *model.graph.output, *model.graph.initializer]:
        del item.metadata_props[:]


def node_hash(model: onnx.ModelProto) -> str:
    """A hash of all nodes (operators, wiring, attributes) and constants, whatever they are called and in which order
    independent ones stand: transformers computes rotary embeddings in the order of a Python set, which differs from
    process to process. Weights count by type and shape.
    """
    hashes = {i.name: _digest("input", n, i.type.tensor_type.elem_type) for n, i in enumerate(model.graph.input)}
    hashes |= {t.name: _constant_hash(t) for t in model.graph.initializer} | {"": ""}
    nodes = []
    for node in model.graph.node:
        attributes = sorted(a.SerializeToString(deterministic=True).hex() for a in node.attribute)
        nodes.append(_digest(node.domain, node.op_type, [hashes[i] for i in node.input], attributes))
        hashes |= {name: _digest(nodes[-1], n) for n, name in enumerate(node.output) if name}
    return _digest(sorted(nodes), [hashes[o.name] for o in model.graph.output])


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _constant_hash(tensor: onnx.TensorProto) -> str:
    dims = list(tensor.dims)
    if tensor.data_location == TensorProto.EXTERNAL:
        return _digest("weight", tensor.data_type, dims)
    values = onnx.numpy_helper.to_array(tensor)
    if values.dtype.kind != "f":
        return _digest("constant", tensor.data_type, dims, values.tobytes().hex())
    # Vectors are norms, biases and frequencies: up to the last digits, in which processors may differ. The rest is random.
    vector = values.size == max(dims, default=1)
    return _digest("constant", tensor.data_type, dims, [f"{v:.4g}" for v in values.flat] if vector else "random")


def write(name: str, model: onnx.ModelProto, facts: dict[str, Any]) -> None:
    """Writes a graph and its entry in the manifest: ``facts`` and what can be counted."""
    target = build.GRAPHS / f"{name}.onnx.xz"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(lzma.compress(model.SerializeToString(deterministic=True), preset=9 | lzma.PRESET_EXTREME))
    path = build.ROOT / "manifest.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known[name] = {
        **facts,
        "nodes": len(model.graph.node),
        "node_hash": node_hash(model),
        "softmax": sum(n.op_type == "Softmax" for n in model.graph.node),
        "parameters": build.parameters(model),
        "metadata": bool(model.graph.value_info) or any(n.metadata_props for n in model.graph.node),
    }
    path.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", encoding="utf-8", newline="\n")
    print(f"wrote {name}: {len(model.graph.node)} nodes, {target.stat().st_size} bytes", flush=True)
