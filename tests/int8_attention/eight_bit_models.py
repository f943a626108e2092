# SPDX-License-Identifier: Apache-2.0
"""Models of layers of attention in fp16, whose sizes kernels with 8-bit operands take or do not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WORDS = 64
_WIDTH = 128


@dataclass(frozen=True)
class Layer:
    """One attention: its head size, its scale, and what is added to its scores."""

    size: int = 64
    scale: float = 0.0  # 0: 1/sqrt(D)
    bias: bool = False  # a tensor that depends on the input, added to scores
    gain: float = 1.0  # of queries: sharper attention
    is_causal: bool = False
    has_padding: bool = False  # keys are masked by ``attention_mask`` [B, S]


class _Graph:
    """Nodes and stored tensors; weights are drawn in the order of the layers."""

    def __init__(self, heads: int) -> None:
        self.heads = heads
        self.rng = np.random.default_rng(7)
        self.nodes: list[onnx.NodeProto] = []
        self.stored = {"table": self.rng.standard_normal((WORDS, _WIDTH))}
        self.numbers = {"join": np.array([0, 0, -1]), "two": np.array([1, 2])}
        self.add("Gather", ["table", "input_ids"], "x0")

    def add(self, op: str, inputs: list[str], output: str, **attributes: object) -> str:
        """A node with one output."""
        self.nodes.append(helper.make_node(op, inputs, [output], **attributes))
        return output

    def add_masks(self, layers: tuple[Layer, ...]) -> None:
        """The masks that some layer needs."""
        if any(layer.is_causal or layer.has_padding for layer in layers):
            self.stored["low"] = np.array(-np.inf)
        if any(layer.is_causal for layer in layers):
            self.add("Shape", ["input_ids"], "length", start=1, end=2)
            self.add("Squeeze", ["length"], "count")
            self.add("Range", ["zero", "count", "unit"], "positions")
            self.add("Unsqueeze", ["positions", "last"], "rows")
            self.add("GreaterOrEqual", ["rows", "positions"], "causal")
            self.numbers |= {"zero": np.array(0), "unit": np.array(1), "last": np.array([1])}
        if any(layer.has_padding for layer in layers):
            self.add("Cast", ["attention_mask"], "flags", to=TensorProto.BOOL)
            self.add("Unsqueeze", ["flags", "two"], "real")

    def project(self, name: str, i: int, layer: Layer) -> None:
        """The heads of the query, key (turned) or value."""
        weight = self.rng.standard_normal((_WIDTH, self.heads * layer.size)) / np.sqrt(_WIDTH)
        self.stored[f"{name}{i}"] = weight * (layer.gain if name == "q" else 1.0)
        self.add("MatMul", [f"x{i}", f"{name}{i}"], f"{name}{i}_flat")
        self.add("Reshape", [f"{name}{i}_flat", f"split{i}"], f"{name}{i}_split")
        order = [0, 2, 3, 1] if name == "k" else [0, 2, 1, 3]
        self.add("Transpose", [f"{name}{i}_split"], f"{name}{i}_heads", perm=order)

    def add_scores(self, i: int, layer: Layer) -> str:
        """Scaled scores with what the layer adds to them."""
        self.stored[f"scale{i}"] = np.array(layer.scale or layer.size**-0.5)
        self.add("MatMul", [f"q{i}_heads", f"k{i}_heads"], f"p{i}")
        scores = self.add("Mul", [f"p{i}", f"scale{i}"], f"s{i}")
        if layer.bias:
            self.add("ReduceMean", [f"x{i}"], f"m{i}", axes=[2], keepdims=0)
            self.add("Unsqueeze", [f"m{i}", "two"], f"b{i}")
            scores = self.add("Add", [scores, f"b{i}"], f"{scores}_biased")
        for mask, is_used in (("causal", layer.is_causal), ("real", layer.has_padding)):
            if is_used:
                scores = self.add("Where", [mask, scores, "low"], f"{scores}_{mask}")
        return scores

    def add_layer(self, i: int, layer: Layer) -> None:
        """One attention with its residual connection."""
        for name in "qkv":
            self.project(name, i, layer)
        width = self.heads * layer.size
        self.numbers[f"split{i}"] = np.array([0, 0, self.heads, layer.size])
        self.stored[f"o{i}"] = self.rng.standard_normal((width, _WIDTH)) / np.sqrt(width)
        self.add("Softmax", [self.add_scores(i, layer)], f"w{i}", axis=-1, name=f"layer{i}/Softmax")
        self.add("MatMul", [f"w{i}", f"v{i}_heads"], f"y{i}")
        self.add("Transpose", [f"y{i}"], f"y{i}_rows", perm=[0, 2, 1, 3])
        self.add("Reshape", [f"y{i}_rows", "join"], f"y{i}_flat")
        self.add("MatMul", [f"y{i}_flat", f"o{i}"], f"a{i}")
        self.add("Add", [f"x{i}", f"a{i}"], f"x{i + 1}")


def write_model(
    path: Path, layers: tuple[Layer, ...], dtype: int = TensorProto.FLOAT16, heads: int = 2, *, logits: bool = False
) -> Path:
    """Tokens [B, S] -> attentions with residual connections -> ``hidden`` [B, S, N], or ``logits`` [B, S, words]."""
    made, kind = _Graph(heads), helper.tensor_dtype_to_np_dtype(dtype)
    made.add_masks(layers)
    for i, layer in enumerate(layers):
        made.add_layer(i, layer)
    last, name, size = f"x{len(layers)}", "logits" if logits else "hidden", WORDS if logits else _WIDTH
    if logits:
        made.stored["head"] = made.rng.standard_normal((_WIDTH, WORDS)) / np.sqrt(_WIDTH)
    made.add("MatMul" if logits else "Identity", [last, "head"] if logits else [last], name)
    tensors = [numpy_helper.from_array(np.asarray(a).astype(kind), n) for n, a in made.stored.items()]
    tensors += [numpy_helper.from_array(np.asarray(a, np.int64), n) for n, a in made.numbers.items()]
    info = helper.make_tensor_value_info
    has_padding = any(layer.has_padding for layer in layers)
    names = ["input_ids", *(["attention_mask"] if has_padding else [])]
    inputs = [info(n, TensorProto.INT64, ["B", "S"]) for n in names]
    graph = helper.make_graph(made.nodes, "model", inputs, [info(name, dtype, ["B", "S", size])], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def texts(folder: Path, count: int, length: int) -> list[str]:
    """``--inputs`` with texts."""
    options = []
    for i, ids in enumerate(np.random.default_rng(1).integers(0, WORDS, (count, 1, length))):
        np.savez(folder / f"feed{i}.npz", input_ids=ids)
        options += ["--inputs", str(folder / f"feed{i}.npz")]
    return options
