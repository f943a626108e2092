# SPDX-License-Identifier: Apache-2.0
"""ONNX graphs of the trained models, with their weights. Needs numpy and onnx only.

``python models/trained/retrieval_models.py {prompts,documents} -o FILE [--weights NPZ]``

* ``prompts``: input_ids [B, S] -> logits [B, S, 256], a causal language model.
* ``documents``: input_ids and attention_mask [B, S] -> logits [B, 2, 256], an encoder: the two letters of the answer.

Attention is written as torch's exporters write it: MatMul, Mul, Add of a bias, Softmax, MatMul.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FOLDER = Path(__file__).resolve().parent
NAMES = ("prompts", "documents")
HEADS, HEAD_SIZE, ROTATED, ROTARY_BASE = 2, 64, 16, 10000.0
_ANSWER, _VOCABULARY = 2, 256
_LOWEST = float(np.finfo(np.float32).min)

Weights = dict[str, np.ndarray]


def read_weights(path: Path) -> Weights:
    """The weights that ``train.py`` saved, fp32."""
    with np.load(path) as file:
        return {name: file[name].astype(np.float32) for name in file.files}


def build_model(name: str, path: Path | None = None) -> onnx.ModelProto:
    """A model of ``NAMES``.

    Args:
        name: of the model.
        path: of its weights; None: those stored beside this file.
    """
    weights = read_weights(FOLDER / f"{name}.npz" if path is None else path)
    graph = _Graph(weights)
    is_causal = name == "prompts"
    x = graph.embed_bytes(is_causal)
    bias = graph.causal_bias() if is_causal else graph.padding_bias()
    cos, sin = graph.rotary_tables()
    for layer in range(sum(k.endswith("qkv.weight") for k in weights)):
        x = graph.add_layer(f"blocks.{layer}", x, bias, cos, sin)
    x = graph.norm("norm", x)
    if is_causal:
        graph.add("Identity", graph.project("head", x), output="logits")
    else:
        first = graph.add("Gather", x, graph.constant(0), axis=1)
        graph.add("Reshape", graph.project("head", first), graph.constant([0, _ANSWER, _VOCABULARY]), output="logits")
    inputs = ["input_ids"] if is_causal else ["input_ids", "attention_mask"]
    given = [helper.make_tensor_value_info(n, TensorProto.INT64, ["B", "S"]) for n in inputs]
    dims = ["B", "S" if is_causal else _ANSWER, _VOCABULARY]
    written = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, dims)]
    made = helper.make_graph(graph.nodes, name, given, written, graph.initializers)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


class _Graph:
    """Nodes and initializers of a model."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []

    def add(self, op: str, *inputs: str, output: str = "", **attributes: object) -> str:
        """Appends a node with one output, which it returns."""
        output = output or f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [output], name=f"n{len(self.nodes)}", **attributes))
        return output

    def split(self, x: str, sizes: list[int]) -> list[str]:
        """Parts of the last axis."""
        outputs = [f"t{len(self.nodes)}_{i}" for i in range(len(sizes))]
        node = helper.make_node("Split", [x, self.constant(sizes)], outputs, name=f"n{len(self.nodes)}", axis=-1)
        self.nodes.append(node)
        return outputs

    def constant(self, value: object, dtype: type = np.int64) -> str:
        """An initializer."""
        name = f"c{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def weight(self, name: str, *, transposed: bool = False) -> str:
        """An initializer with a weight of the model; ``transposed``: [out, in] as [in, out]."""
        array = self.weights[f"{name}.weight"]
        self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(array.T) if transposed else array, name))
        return name

    def project(self, name: str, x: str) -> str:
        """A linear layer."""
        return self.add("MatMul", x, self.weight(name, transposed=True))

    def norm(self, name: str, x: str) -> str:
        """A layer normalization without a bias."""
        return self.add("LayerNormalization", x, self.weight(name), axis=-1, epsilon=1e-5)

    def embed_bytes(self, is_causal: bool) -> str:
        """Bytes joined with their neighbours by the convolution, [B, S, hidden]."""
        embedded = self.add("Gather", self.weight("embedding"), "input_ids")
        kernel = self.weights["conv.weight"].shape[2]
        pads = [kernel - 1, 0] if is_causal else [kernel // 2, kernel // 2]
        channels = self.add("Transpose", embedded, perm=[0, 2, 1])
        joined = self.add("Conv", channels, self.weight("conv"), pads=pads, kernel_shape=[kernel])
        return self.add("Transpose", joined, perm=[0, 2, 1])

    def positions(self) -> str:
        """0 to S - 1, int64."""
        length = self.add("Shape", "input_ids", start=1, end=2)
        return self.add("Range", self.constant(0), self.add("Squeeze", length), self.constant(1))

    def causal_bias(self) -> str:
        """0 where a key is not behind the query, [S, S]."""
        positions = self.positions()
        keys = self.add("Unsqueeze", positions, self.constant([0]))
        rows = self.add("Unsqueeze", positions, self.constant([1]))
        allowed = self.add("LessOrEqual", keys, rows)
        return self.add("Where", allowed, self.constant(0, np.float32), self.constant(_LOWEST, np.float32))

    def padding_bias(self) -> str:
        """0 where a key is no padding, [B, 1, 1, S]."""
        mask = self.add("Unsqueeze", "attention_mask", self.constant([1, 2]))
        padding = self.add("Sub", self.constant(1, np.float32), self.add("Cast", mask, to=TensorProto.FLOAT))
        return self.add("Mul", padding, self.constant(_LOWEST, np.float32))

    def rotary_tables(self) -> tuple[str, str]:
        """Cosines and sines, [S, half of the rotated channels]."""
        half = ROTATED // 2
        frequencies = (ROTARY_BASE ** (-np.arange(half) / half)).astype(np.float32)
        positions = self.add("Cast", self.positions(), to=TensorProto.FLOAT)
        rows = self.add("Unsqueeze", positions, self.constant([1]))
        angles = self.add("Mul", rows, self.constant(frequencies, np.float32))
        return self.add("Cos", angles), self.add("Sin", angles)

    def rotate(self, x: str, cos: str, sin: str) -> str:
        """Rotary positions in the first channels of [B, H, S, D]."""
        half = ROTATED // 2
        a, b, rest = self.split(x, [half, half, HEAD_SIZE - ROTATED])
        first = self.add("Sub", self.add("Mul", a, cos), self.add("Mul", b, sin))
        second = self.add("Add", self.add("Mul", b, cos), self.add("Mul", a, sin))
        return self.add("Concat", first, second, rest, axis=-1)

    def add_layer(self, name: str, x: str, bias: str, cos: str, sin: str) -> str:
        """Attention and MLP with their residuals."""
        hidden = HEADS * HEAD_SIZE
        packed = self.project(f"{name}.qkv", self.norm(f"{name}.attention_norm", x))
        q, k, v = (
            self.add("Transpose", self.add("Reshape", part, self.constant([0, 0, HEADS, -1])), perm=[0, 2, 1, 3])
            for part in self.split(packed, [hidden] * 3)
        )
        keys = self.add("Transpose", self.rotate(k, cos, sin), perm=[0, 1, 3, 2])
        scores = self.add("MatMul", self.rotate(q, cos, sin), keys)
        scaled = self.add("Mul", scores, self.constant(1 / math.sqrt(HEAD_SIZE), np.float32))
        weights = self.add("Softmax", self.add("Add", scaled, bias), axis=-1)
        rows = self.add("Transpose", self.add("MatMul", weights, v), perm=[0, 2, 1, 3])
        joined = self.add("Reshape", rows, self.constant([0, 0, hidden]))
        x = self.add("Add", x, self.project(f"{name}.out", joined))
        up = self.project(f"{name}.up", self.norm(f"{name}.mlp_norm", x))
        activated = self.add("Mul", up, self.add("Sigmoid", up))
        return self.add("Add", x, self.project(f"{name}.down", activated))


def main() -> None:
    """Writes the model that the command line names."""
    parser = argparse.ArgumentParser(description="Writes a trained model as ONNX.")
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("-o", dest="path", type=Path, required=True, metavar="FILE")
    parser.add_argument("--weights", type=Path, metavar="NPZ", help="of train.py (default: those stored here)")
    arguments = parser.parse_args()
    onnx.save(build_model(arguments.name, arguments.weights), arguments.path)


if __name__ == "__main__":
    main()
