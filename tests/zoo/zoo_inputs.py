# SPDX-License-Identifier: Apache-2.0
"""Filled graphs of the zoo, inputs for them by their kind, and sessions in ONNX Runtime. Imports nothing of stof."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "models"))
import build

IDS = 90  # of a vocabulary of 96; none is a padding token
_BF16, _FP32 = TensorProto.BFLOAT16, TensorProto.FLOAT


def names() -> list[str]:
    """The graphs: the narrow ones, those with rows by relative position, and the zoo's."""
    return [n for n in build.names() if n.startswith(("narrow/", "relative/", "zoo/"))]


def filled(name: str) -> onnx.ModelProto:
    """A graph with seeded weights."""
    return build.fill(build.load_graph(name), seed=3)


def in_fp64(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with every fp32 tensor in fp64."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    graph = wide.graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == _FP32:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    attributes = [a for holder in (graph, *wide.functions) for node in holder.node for a in node.attribute]
    for tensor in (*graph.initializer, *(a.t for a in attributes if a.HasField("t"))):
        if tensor.data_type == _FP32:
            array = onnx.numpy_helper.to_array(tensor).astype(np.float64)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    for attribute in attributes:
        if attribute.name in ("to", "stash_type") and attribute.i == _FP32:
            attribute.i = TensorProto.DOUBLE
    return wide


def padding(rng: np.random.Generator, shape: Sequence[int], side: str) -> np.ndarray:
    """A 0/1 mask of which the second row, and every other, is padded on one side, or none (``side`` is empty)."""
    mask = np.ones(shape, np.int64)
    for row in mask[1::2]:
        count = int(rng.integers(2, max(3, shape[-1] // 2)))
        if side == "left":
            row[:count] = 0
        elif side == "right":
            row[-count:] = 0
    return mask


def positions(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """Positions of two or three documents side by side in each row."""
    found = np.zeros(shape, np.int64)
    for row in found:
        starts = np.union1d([0], rng.integers(2, shape[-1] - 1, 2))
        row[:] = np.arange(shape[-1]) - starts[np.searchsorted(starts, np.arange(shape[-1]), side="right") - 1]
    return found


def feeds(name: str, model: onnx.ModelProto, batch: int, length: int, side: str, seed: int) -> dict[str, np.ndarray]:
    """One set of inputs. ``seed`` draws the content; the same padding comes with the same ``length`` and ``side``."""
    entry = build.manifest()[name]
    content, masks = np.random.default_rng(seed), np.random.default_rng([length, len(side)])
    found = {}
    for value in model.graph.input:
        tensor = value.type.tensor_type
        shape = _shape(entry, value.name, [d.dim_value for d in tensor.shape.dim], batch, length)
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        if "mask" in value.name:
            found[value.name] = padding(masks, shape, side).astype(dtype)
        elif "position" in value.name:
            found[value.name] = positions(masks, shape)
        elif "token_type" in value.name:
            found[value.name] = content.integers(0, 2, shape).astype(dtype)
        elif dtype.kind == "i":
            found[value.name] = content.integers(3, IDS, shape).astype(dtype)
        else:
            found[value.name] = content.standard_normal(shape).astype(dtype)
    return found


def _shape(entry: dict[str, Any], name: str, dims: list[int], batch: int, length: int) -> list[int]:
    """The shape of an input; ``dims`` are the fixed sizes, 0 where a size is not fixed."""
    kind, settings = entry.get("inputs", "text"), entry["settings"]
    past = length // 2 + 1
    if name == "pixel_values":
        size = settings.get("image_size") or settings["vision_config"]["image_size"]
        wanted = [batch, 3, size, size]
    elif kind == "wave":
        wanted = [batch, 20 * length + 45]
    elif kind == "spectrogram":
        wanted = [batch, settings["max_length"], settings["num_mel_bins"]]
    elif kind in ("frames", "near-frames"):  # subsampled by 8 where they are few numbers each
        frames = 8 * length if "num_mel_bins" in settings and kind == "frames" else length
        wanted = [batch, frames] if "mask" in name else [batch, frames, 0]
    elif name == "padding_mask":
        wanted = [batch, length, 1]
    elif name == "input_features":
        wanted = [batch, settings["num_mel_bins"], 2 * settings["max_source_positions"]]
    elif len(dims) == 4:  # past keys and values
        wanted = [batch, 0, past, 0]
    elif kind == "cached" and "mask" in name:
        wanted = [batch, past + length]
    elif name == "encoder_hidden_states":
        wanted = [batch, length, 0]
    elif kind == "decoder":
        wanted = [batch, length if name.startswith("encoder") else length - 3]
    else:
        wanted = [batch, length - 3 if name.startswith("decoder") else length]
    return [fixed or size for fixed, size in zip(dims, wanted, strict=True)]


def runnable(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model, or one of bfloat16 in fp32, since the CPU provider lacks kernels."""
    if not any(t.data_type == _BF16 for t in model.graph.initializer):
        return model
    twin = onnx.ModelProto()
    twin.CopyFrom(model)
    del twin.graph.value_info[:]
    graphs = [twin.graph, *twin.functions]
    for graph in graphs:
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.INT and attribute.i == _BF16 and attribute.name == "to":
                    attribute.i = _FP32
                if attribute.type == onnx.AttributeProto.TENSOR:
                    _widen(attribute.t)
                if attribute.type == onnx.AttributeProto.GRAPH:
                    graphs.append(attribute.g)
    for tensor in twin.graph.initializer:
        _widen(tensor)
    inner = [g for g in graphs if isinstance(g, onnx.GraphProto)]
    for value in [*twin.graph.input, *(o for g in inner for o in g.output)]:
        if value.type.tensor_type.elem_type == _BF16:
            value.type.tensor_type.elem_type = _FP32
    return twin


def _widen(tensor: onnx.TensorProto) -> None:
    if tensor.data_type == _BF16:
        array = onnx.numpy_helper.to_array(tensor).astype(np.float32)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))


def session(
    model: onnx.ModelProto,
    *,
    library: str = "",
    optimized: bool = True,
    providers: Sequence[Any] = ("CPUExecutionProvider",),
    profile: str = "",
) -> Any:
    """A session of one thread.

    Args:
        model: what it runs.
        library: a custom op library to register.
        optimized: by ONNX Runtime.
        providers: as ONNX Runtime takes them.
        profile: begins the name of the file in which it writes what ran where.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if library:
        options.register_custom_ops_library(library)
    if profile:
        options.enable_profiling, options.profile_file_prefix = True, profile
    return ort.InferenceSession(model.SerializeToString(), options, providers=list(providers))
