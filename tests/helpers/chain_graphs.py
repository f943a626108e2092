# SPDX-License-Identifier: Apache-2.0
"""Small graphs around one chain each, as exporters and runtimes write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT, HALF = int(TensorProto.FLOAT), int(TensorProto.FLOAT16)


@dataclass
class Builder:
    """Collects nodes; ``x`` is an input [B, S, N], written by a MatMul, as a chain's neighbours are."""

    dtype: int = FLOAT
    opset: int = 20
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    count: int = 0

    def name(self) -> str:
        self.count += 1
        return f"t{self.count}"

    def input(self, name: str, shape: Sequence[int | str], dtype: int | None = None) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype or self.dtype, shape))
        return name

    def add(self, op: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
        made = [self.name() for _ in range(outputs)]
        self.nodes.append(helper.make_node(op, list(inputs), made, domain=domain, **attributes))
        return made[0] if outputs == 1 else made

    def weight(self, *shape: int, seed: int = 0) -> str:
        array = np.random.default_rng([seed, self.count]).standard_normal(shape)
        return self.array(array.astype(helper.tensor_dtype_to_np_dtype(self.dtype)))

    def number(self, value: float) -> str:
        return self.array(np.array(value, helper.tensor_dtype_to_np_dtype(self.dtype)))

    def ints(self, *values: int) -> str:
        return self.array(np.array(values, np.int64))

    def array(self, array: np.ndarray) -> str:
        name = self.name()
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def model(self, *outputs: str) -> onnx.ModelProto:
        infos = [onnx.ValueInfoProto(name=o) for o in outputs]
        for info in infos:
            info.type.tensor_type.elem_type = self.dtype
        graph = helper.make_graph(self.nodes, "test", self.inputs, infos, self.constants)
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8)


N, H, D = 24, 4, 6


def activations(b: Builder, width: int = N) -> str:
    """[B, S, width], from a MatMul."""
    return str(b.add("MatMul", b.input("input", ["B", "S", 8]), b.weight(8, width)))


def _residual(b: Builder) -> tuple[str, str]:
    return activations(b), b.input("residual", ["B", "S", N])


def residual_layer_norm(b: Builder) -> onnx.ModelProto:
    x, r = _residual(b)
    total = b.add("Add", b.add("Add", x, b.weight(N)), r)
    y = b.add("LayerNormalization", total, b.weight(N), b.weight(N), axis=-1, epsilon=1e-5)
    return b.model(y, total)


def decomposed_layer_norm(b: Builder) -> onnx.ModelProto:
    x, r = _residual(b)
    total = b.add("Add", x, r)
    mean = b.add("ReduceMean", total, b.ints(-1), keepdims=1)
    centered = b.add("Sub", total, mean)
    variance = b.add("ReduceMean", b.add("Pow", centered, b.number(2.0)), b.ints(-1), keepdims=1)
    y = b.add("Div", centered, b.add("Sqrt", b.add("Add", variance, b.number(1e-5))))
    return b.model(b.add("Add", b.add("Mul", y, b.weight(N)), b.weight(N)))


def decomposed_rms_norm(b: Builder) -> onnx.ModelProto:
    x, r = _residual(b)
    total = b.add("Add", x, r)
    wide = b.add("Cast", total, to=FLOAT)
    two = b.array(np.array(2.0, np.float32))
    square = b.add("ReduceMean", b.add("Pow", wide, two), b.ints(-1), keepdims=1)
    rate = b.add("Reciprocal", b.add("Sqrt", b.add("Add", square, b.array(np.array(1e-6, np.float32)))))
    narrow = b.add("Cast", b.add("Mul", wide, rate), to=b.dtype)
    return b.model(b.add("Mul", b.weight(N), narrow), total)


def skip_layer_norm(b: Builder) -> onnx.ModelProto:
    x, r = _residual(b)
    given = [x, r, b.weight(N), b.weight(N), b.weight(N)]
    y = b.add("SkipLayerNormalization", *given, outputs=4, domain="com.microsoft", epsilon=1e-5)
    b.nodes[-1].output[1] = b.nodes[-1].output[2] = ""
    return b.model(b.add("Mul", y[0], b.number(0.5)), y[3])


def skip_rms_norm(b: Builder) -> onnx.ModelProto:
    x, r = _residual(b)
    op = "SkipSimplifiedLayerNormalization"
    y = b.add(op, x, r, b.weight(N), domain="com.microsoft", epsilon=1e-5)
    return b.model(b.add("Mul", y, b.number(0.5)))


def bias_gelu(b: Builder) -> onnx.ModelProto:
    return b.model(b.add("Gelu", b.add("Add", activations(b), b.weight(N))))


def decomposed_gelu(b: Builder) -> onnx.ModelProto:
    x = b.add("Add", activations(b), b.weight(N))
    raised = b.add("Erf", b.add("Div", x, b.number(float(np.sqrt(2)))))
    return b.model(b.add("Mul", b.add("Mul", x, b.add("Add", raised, b.number(1.0))), b.number(0.5)))


def contrib_gelus(b: Builder) -> onnx.ModelProto:
    x = b.add("BiasGelu", activations(b), b.weight(N), domain="com.microsoft")
    y = b.add("FastGelu", x, b.weight(N), domain="com.microsoft")
    return b.model(b.add("QuickGelu", y, domain="com.microsoft", alpha=1.5))


def split_gate(b: Builder) -> onnx.ModelProto:
    x = b.add("Add", activations(b, 2 * N), b.weight(2 * N))
    one, other = b.add("Split", x, outputs=2, axis=-1, num_outputs=2)
    return b.model(b.add("Mul", b.add("Gelu", one), other))


def sliced_gate(b: Builder) -> onnx.ModelProto:
    x = activations(b, 2 * N)
    one = b.add("Slice", x, b.ints(0), b.ints(N), b.ints(-1))
    other = b.add("Slice", x, b.ints(N), b.ints((1 << 63) - 1), b.ints(-1))
    return b.model(b.add("Mul", b.add("Mul", one, b.add("Sigmoid", one)), other))


def softmax(b: Builder) -> onnx.ModelProto:
    x = b.add("Div", activations(b), b.number(1.7))
    return b.model(b.add("Softmax", b.add("Add", x, b.weight(N)), axis=-1))


def heads(b: Builder) -> onnx.ModelProto:
    """Three heads' tensors of one packed projection, the keys turned."""
    x = b.add("Add", activations(b, 3 * N), b.weight(3 * N))
    parts = b.add("Split", x, outputs=3, axis=-1, num_outputs=3)
    split = [b.add("Transpose", b.add("Reshape", p, b.ints(0, 0, H, D)), perm=[0, 2, 1, 3]) for p in parts]
    return b.model(b.add("Mul", split[0], b.number(0.4)), split[1], split[2])


def rotary(b: Builder) -> onnx.ModelProto:
    """Rotary embedding of a normalized, split projection; cos and sin [1, S, D] are inputs."""
    x = b.add("Transpose", b.add("Reshape", activations(b), b.ints(0, -1, H, D)), perm=[0, 2, 1, 3])
    x = b.add("LayerNormalization", x, b.weight(D), axis=-1, epsilon=1e-5)
    tables = [b.add("Unsqueeze", b.input(n, [1, "S", D]), b.ints(1)) for n in ("cos", "sin")]
    first = b.add("Slice", x, b.ints(0), b.ints(D // 2), b.ints(-1))
    last = b.add("Slice", x, b.ints(D // 2), b.ints(1 << 40), b.ints(-1))
    turned = b.add("Concat", b.add("Neg", last), first, axis=-1)
    return b.model(b.add("Add", b.add("Mul", x, tables[0]), b.add("Mul", turned, tables[1])))


def flat_rows(b: Builder) -> onnx.ModelProto:
    """A Gemm's rows [B * S, N] made [B, S, N] and back around an activation."""
    x = b.add("Reshape", activations(b), b.ints(-1, N))
    x = b.add("Gemm", x, b.weight(N, N), b.weight(N))
    shape = b.add("Concat", b.add("Shape", "input", start=0, end=2), b.ints(N), axis=0)
    y = b.add("Mul", b.add("Tanh", b.add("Reshape", x, shape)), b.number(0.5))
    return b.model(b.add("Reshape", y, b.ints(-1, N)))


def means(b: Builder) -> onnx.ModelProto:
    """One number of each row comes out, too."""
    x = b.add("Exp", activations(b))
    total = b.add("ReduceSum", x, b.ints(-1), keepdims=0)
    return b.model(b.add("Sub", x, b.add("ReduceMax", x, b.ints(-1), keepdims=1)), total)


CHAINS: list[Callable[[Builder], onnx.ModelProto]] = [
    residual_layer_norm,
    decomposed_layer_norm,
    decomposed_rms_norm,
    skip_layer_norm,
    skip_rms_norm,
    bias_gelu,
    decomposed_gelu,
    contrib_gelus,
    split_gate,
    sliced_gate,
    softmax,
    heads,
    rotary,
    flat_rows,
    means,
]
