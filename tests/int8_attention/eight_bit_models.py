# SPDX-License-Identifier: Apache-2.0
"""Models of layers of attention in fp16, whose sizes kernels with 8-bit operands take or do not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WORDS = 64


@dataclass(frozen=True)
class Layer:
    """One attention: its head size, its scale, what is added to its scores, and by how much keys have an outlier."""

    size: int = 64
    scale: float = 0.0  # 0: 1/sqrt(D)
    bias: bool = False  # a tensor that depends on the input, added to scores
    gain: float = 1.0  # of queries: sharper attention
    is_causal: bool = False
    has_padding: bool = False  # keys are masked by ``attention_mask`` [B, S]
    outlier: float = 1.0  # of one channel of the keys


def write_model(
    path: Path, layers: tuple[Layer, ...], dtype: int = TensorProto.FLOAT16, heads: int = 2, *, logits: bool = False
) -> Path:
    """Tokens [B, S] -> attentions with residual connections -> ``hidden`` [B, S, N], or ``logits`` [B, S, words]."""
    rng = np.random.default_rng(7)
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    width = 128
    make = helper.make_node
    stored = {"table": rng.standard_normal((WORDS, width))}
    numbers = {"join": np.array([0, 0, -1]), "two": np.array([1, 2])}
    nodes = [make("Gather", ["table", "input_ids"], ["x0"])]
    if any(layer.is_causal for layer in layers):
        nodes += [
            make("Shape", ["input_ids"], ["length"], start=1, end=2),
            make("Squeeze", ["length"], ["count"]),
            make("Range", ["zero", "count", "unit"], ["positions"]),
            make("Unsqueeze", ["positions", "last"], ["rows"]),
            make("GreaterOrEqual", ["rows", "positions"], ["causal"]),
        ]
        numbers |= {"zero": np.array(0), "unit": np.array(1), "last": np.array([1])}
    has_padding = any(layer.has_padding for layer in layers)
    if has_padding:
        nodes += [
            make("Cast", ["attention_mask"], ["flags"], to=TensorProto.BOOL),
            make("Unsqueeze", ["flags", "two"], ["real"]),
        ]
    for i, layer in enumerate(layers):
        n = heads * layer.size
        for name in "qkv":
            weight = rng.standard_normal((width, n)) / np.sqrt(width)
            weight *= layer.gain if name == "q" else 1.0
            if name == "k":
                weight[:, 0] *= layer.outlier
            stored[f"{name}{i}"] = weight
            nodes += [
                make("MatMul", [f"x{i}", f"{name}{i}"], [f"{name}{i}_flat"]),
                make("Reshape", [f"{name}{i}_flat", f"split{i}"], [f"{name}{i}_split"]),
                make("Transpose", [f"{name}{i}_split"], [f"{name}{i}_heads"], perm=[0, 2, 3, 1] if name == "k" else [0, 2, 1, 3]),
            ]  # fmt: skip
        numbers[f"split{i}"] = np.array([0, 0, heads, layer.size])
        stored[f"o{i}"] = rng.standard_normal((n, width)) / np.sqrt(n)
        stored[f"scale{i}"] = np.array(layer.scale or layer.size**-0.5)
        scores = f"s{i}"
        nodes += [
            make("MatMul", [f"q{i}_heads", f"k{i}_heads"], [f"p{i}"]),
            make("Mul", [f"p{i}", f"scale{i}"], [scores]),
        ]
        if layer.bias:
            nodes += [
                make("ReduceMean", [f"x{i}"], [f"m{i}"], axes=[2], keepdims=0),
                make("Unsqueeze", [f"m{i}", "two"], [f"b{i}"]),
                make("Add", [scores, f"b{i}"], [f"{scores}_biased"]),
            ]
            scores = f"{scores}_biased"
        if layer.is_causal:
            nodes.append(make("Where", ["causal", scores, "low"], [f"{scores}_masked"]))
            stored["low"] = np.array(-np.inf)
            scores = f"{scores}_masked"
        if layer.has_padding:
            nodes.append(make("Where", ["real", scores, "low"], [f"{scores}_real"]))
            stored["low"] = np.array(-np.inf)
            scores = f"{scores}_real"
        nodes += [
            make("Softmax", [scores], [f"w{i}"], axis=-1, name=f"layer{i}/Softmax"),
            make("MatMul", [f"w{i}", f"v{i}_heads"], [f"y{i}"]),
            make("Transpose", [f"y{i}"], [f"y{i}_rows"], perm=[0, 2, 1, 3]),
            make("Reshape", [f"y{i}_rows", "join"], [f"y{i}_flat"]),
            make("MatMul", [f"y{i}_flat", f"o{i}"], [f"a{i}"]),
            make("Add", [f"x{i}", f"a{i}"], [f"x{i + 1}"]),
        ]
    last, name, size = f"x{len(layers)}", "logits" if logits else "hidden", WORDS if logits else width
    if logits:
        stored["head"] = rng.standard_normal((width, WORDS)) / np.sqrt(width)
    nodes.append(make("MatMul", [last, "head"], [name]) if logits else make("Identity", [last], [name]))
    tensors = [numpy_helper.from_array(np.asarray(a).astype(kind), n) for n, a in stored.items()]
    tensors += [numpy_helper.from_array(np.asarray(a, np.int64), n) for n, a in numbers.items()]
    info = helper.make_tensor_value_info
    names = ["input_ids", *(["attention_mask"] if has_padding else [])]
    graph = helper.make_graph(
        nodes,
        "model",
        [info(n, TensorProto.INT64, ["B", "S"]) for n in names],
        [info(name, dtype, ["B", "S", size])],
        tensors,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def texts(folder: Path, count: int, length: int) -> list[str]:
    """``--inputs`` with texts."""
    options = []
    for i, ids in enumerate(np.random.default_rng(1).integers(0, WORDS, (count, 1, length))):
        np.savez(folder / f"feed{i}.npz", input_ids=ids)
        options += ["--inputs", str(folder / f"feed{i}.npz")]
    return options
