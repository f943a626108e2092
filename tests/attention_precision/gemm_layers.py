# SPDX-License-Identifier: Apache-2.0
"""Layers with matmuls by constant weights, and what is looked at in optimized ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from stof.graph.index import DOMAIN
from stof.runtime.bf16_kernel import cpu_bf16_gemm_kernel
from stof.runtime.library import library_path

REAL = pytest.mark.skipif(
    not cpu_bf16_gemm_kernel(), reason="this machine has no bf16 instructions, or no kernel of them"
)
HIDDEN, _HEADS, _SIZE = 128, 4, 32


class LayerGraph:
    """Nodes and weights, drawn in the order in which they are asked for."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(8)

    def add(self, op: str, inputs: list[str], **attributes: object) -> str:
        output = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [output], name=f"{op}_{len(self.nodes)}", **attributes))
        return output

    def weight(self, *shape: int) -> str:
        scale = shape[0] ** -0.5 if len(shape) > 1 else 0.1
        array = (self._random.standard_normal(shape) * scale).astype(np.float32)
        self.weights.append(numpy_helper.from_array(array, f"w{len(self.weights)}"))
        return self.weights[-1].name

    def constant(self, values: list[int] | float) -> str:
        array = np.float32(values) if isinstance(values, float) else np.array(values, np.int64)
        self.weights.append(numpy_helper.from_array(np.asarray(array), f"w{len(self.weights)}"))
        return self.weights[-1].name

    def linear(self, x: str, inner: int, columns: int, *, has_bias: bool = True) -> str:
        y = self.add("MatMul", [x, self.weight(inner, columns)])
        return self.add("Add", [y, self.weight(columns)]) if has_bias else y

    def heads(self, x: str) -> str:
        y = self.add("Reshape", [x, self.constant([0, 0, _HEADS, _SIZE])])
        return self.add("Transpose", [y], perm=[0, 2, 1, 3])

    def attention(self, q: str, k: str, v: str) -> str:
        keys = self.add("Transpose", [k], perm=[0, 1, 3, 2])
        scores = self.add("Mul", [self.add("MatMul", [q, keys]), self.constant(_SIZE**-0.5)])
        values = self.add("MatMul", [self.add("Softmax", [scores], axis=-1), v])
        joined = self.add("Transpose", [values], perm=[0, 2, 1, 3])
        return self.add("Reshape", [joined, self.constant([0, 0, HIDDEN])])

    def save(self, path: Path, output: str) -> Path:
        shape = ["batch", "sequence", HIDDEN]
        graph = helper.make_graph(
            self.nodes,
            "layer",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, shape)],
            self.weights,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
        onnx.checker.check_model(model, full_check=True)
        onnx.save(model, path)
        return path


def bert_layer(path: Path, *, has_erf: bool = False) -> Path:
    """Attention and MLP with biases, GELU, spelled out on request, and residuals."""
    g = LayerGraph()
    q, k, v = (g.heads(g.linear("x", HIDDEN, HIDDEN)) for _ in range(3))
    attended = g.add("Add", [g.linear(g.attention(q, k, v), HIDDEN, HIDDEN), "x"])
    normed = g.add("LayerNormalization", [attended, g.weight(HIDDEN)], axis=-1)
    hidden = g.linear(normed, HIDDEN, 512)
    if has_erf:
        raised = g.add("Add", [g.add("Erf", [g.add("Div", [hidden, g.constant(2**0.5)])]), g.constant(1.0)])
        hidden = g.add("Mul", [g.add("Mul", [hidden, raised]), g.constant(0.5)])
    else:
        hidden = g.add("Gelu", [hidden])
    return g.save(path, g.add("Add", [g.linear(hidden, 512, HIDDEN), normed]))


def erf_layer(path: Path) -> Path:
    """The same as older exporters write it."""
    return bert_layer(path, has_erf=True)


def modernbert_layer(path: Path) -> Path:
    """Query, key and value of one weight, a gated MLP of one weight, no biases."""
    g = LayerGraph()
    packed = g.linear("x", HIDDEN, 3 * HIDDEN, has_bias=False)
    g.nodes.append(helper.make_node("Split", [packed], ["q", "k", "v"], name="split", axis=-1, num_outputs=3))
    attended = g.linear(g.attention(*map(g.heads, "qkv")), HIDDEN, HIDDEN, has_bias=False)
    x = g.add("Add", [attended, "x"])
    both = g.linear(g.add("LayerNormalization", [x, g.weight(HIDDEN)], axis=-1), HIDDEN, 320, has_bias=False)
    g.nodes.append(helper.make_node("Split", [both], ["gate", "up"], name="gates", axis=-1, num_outputs=2))
    gated = g.add("Mul", [g.add("Gelu", ["gate"]), "up"])
    return g.save(path, g.add("Add", [g.linear(gated, 160, HIDDEN, has_bias=False), x]))


def gemms_of(path: Path) -> list[onnx.NodeProto]:
    """The StofGemm nodes of a file."""
    return [n for n in onnx.load(path).graph.node if n.domain == DOMAIN and n.op_type == "StofGemm"]


def outputs_of(path: Path, x: np.ndarray, *, library: bool) -> np.ndarray:
    """The first output on an input x."""
    return run_model(path, {"x": x}, library=library)


def run_model(path: Path, feeds: dict[str, np.ndarray], *, library: bool, output: str | None = None) -> np.ndarray:
    """An output on inputs, by default the first."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if library:
        options.register_custom_ops_library(str(library_path()))
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run(None if output is None else [output], feeds)[0]
    return found


def drawn(length: int) -> np.ndarray:
    """An input of two texts."""
    return np.random.default_rng(length).standard_normal((2, length, HIDDEN)).astype(np.float32)
