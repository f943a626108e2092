# SPDX-License-Identifier: Apache-2.0
"""Small decoders with MLPs of every form whose activation gives zeros."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

VOCABULARY = 50
BLOCK = 32  # of quantized weights


@dataclass(frozen=True)
class MlpForm:
    """How an MLP is written.

    Attributes:
        activation: relu, relu2, relu2_pow, threshold_gelu (Gemma 3n); without zeros gelu, gelu_tanh, gelu_erf (primitives),
            gelu_cubic (primitives of the tanh form), silu, quick_gelu.
        gated: whether a second matmul is multiplied.
        bias: whether matmuls have one.
        gemm: whether matmuls are Gemm nodes with transB on flat tokens, as OPT has them.
        unflattens: whether neurons are activated with the axes of the tokens, between two Reshapes, as GPT-2 has it.
        dtype: of all tensors.
        size: features of a token.
        neurons: of the MLP.
        shift: is subtracted by the first bias, so that fewer neurons are active.
        has_cache: whether the model has a KV cache.
        bits: of MatMulNBits weights in blocks of 32, but for the head; 0: none is quantized.
        zero_points: whether these have zero points.
        accuracy_level: of MatMulNBits.
        packed: "gate_up" or "up_gate": one matmul gives both in this order, and ``cut`` (Split, Slice) takes them apart.
    """

    activation: str = "relu"
    gated: bool = False
    bias: bool = True
    gemm: bool = False
    unflattens: bool = False
    dtype: int = TensorProto.FLOAT
    size: int = 48
    neurons: int = 160
    shift: float = 0.0
    has_cache: bool = True
    bits: int = 0
    zero_points: bool = False
    accuracy_level: int = 0
    packed: str = ""
    cut: str = "Split"


def make_mlp_model(form: MlpForm, layers: int = 1, seed: int = 0) -> onnx.ModelProto:
    """A model input_ids [B, S], past [B, P, d] -> logits [B, S, V], present [B, P + S, d]."""
    return _Maker(form, seed).make(layers)


class _Maker:
    def __init__(self, form: MlpForm, seed: int) -> None:
        self.form, self.rng = form, np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.stored: list[onnx.TensorProto] = []

    def constant(self, name: str, array: np.ndarray) -> str:
        dtype = helper.tensor_dtype_to_np_dtype(self.form.dtype) if array.dtype.kind == "f" else array.dtype
        self.stored.append(numpy_helper.from_array(array.astype(dtype), name))
        return name

    def add(self, op: str, inputs: list[str], output: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], name=f"/{output}", **attributes))
        return output

    def matmul(self, x: str, name: str, rows: int, columns: int, shift: float = 0.0) -> str:
        weight = self.rng.standard_normal((rows, columns)) / np.sqrt(rows)
        bias = self.rng.standard_normal(columns) / 4 - shift
        if self.form.bits:
            return self.quantized_matmul(x, name, weight, bias)
        if self.form.gemm:
            names = [x, self.constant(f"{name}.weight", weight.T)]
            names += [self.constant(f"{name}.bias", bias)] if self.form.bias else []
            return self.add("Gemm", names, name, transB=1)
        result = self.add("MatMul", [x, self.constant(f"{name}.weight", weight)], f"{name}/matmul")
        if not self.form.bias:
            return result
        return self.add("Add", [self.constant(f"{name}.bias", bias), result], name)

    def quantized_matmul(self, x: str, name: str, weight: np.ndarray, bias: np.ndarray) -> str:
        form, (rows, columns) = self.form, weight.shape
        blocks = weight.T.reshape(columns, rows // BLOCK, BLOCK)
        most = (1 << form.bits) - 1
        zero = np.full(blocks.shape[:2], 1 << (form.bits - 1))
        scale = np.abs(blocks).max(2) / (most // 2)
        if form.zero_points:
            scale = (blocks.max(2) - blocks.min(2)) / most
            zero = np.clip(np.round(-blocks.min(2) / scale), 0, most).astype(np.int64)
        values = np.clip(np.round(blocks / scale[:, :, None]) + zero[:, :, None], 0, most).astype(np.uint8)
        inputs = [x, self.constant(f"{name}.weight", self.packed(values)), self.constant(f"{name}.scales", scale)]
        if form.zero_points:
            inputs.append(self.constant(f"{name}.zeros", self.packed(zero.astype(np.uint8))))
        sizes = {"K": rows, "N": columns, "bits": form.bits, "block_size": BLOCK, "accuracy_level": form.accuracy_level}
        result = self.add("MatMulNBits", inputs, f"{name}/matmul", domain="com.microsoft", **sizes)
        return self.add("Add", [self.constant(f"{name}.bias", bias), result], name) if form.bias else result

    def packed(self, values: np.ndarray) -> np.ndarray:
        """Values along the last axis, two in a byte with 4 bits."""
        if self.form.bits == 8:
            return values
        if values.shape[-1] % 2:
            values = np.concatenate([values, np.zeros_like(values[..., :1])], -1)
        return values[..., ::2] | (values[..., 1::2] << 4)

    def activate(self, x: str, name: str) -> str:
        kind = self.form.activation
        if kind in ("gelu", "gelu_tanh"):
            approximate = "none" if kind == "gelu" else "tanh"
            return self.add("Gelu", [x], f"{name}/activated", approximate=approximate)
        if kind == "quick_gelu":
            return self.add("QuickGelu", [x], f"{name}/activated", domain="com.microsoft")
        if kind == "silu":
            return self.add("Mul", [x, self.add("Sigmoid", [x], f"{name}/sigmoid")], f"{name}/activated")
        if kind in ("gelu_erf", "gelu_cubic"):
            return self.gelu_of_primitives(x, name)
        if kind == "threshold_gelu":
            mean = self.add("ReduceMean", [x, "last"], f"{name}/mean")
            x = self.add("Sub", [x, mean], f"{name}/above")
        positive = self.add("Relu", [x], f"{name}/positive")
        if kind == "relu2":
            return self.add("Mul", [positive, positive], f"{name}/activated")
        if kind == "relu2_pow":
            return self.add("Pow", [positive, "two"], f"{name}/activated")
        if kind == "threshold_gelu":
            return self.add("Gelu", [positive], f"{name}/activated")
        assert kind == "relu", kind
        return positive

    def gelu_of_primitives(self, x: str, name: str) -> str:
        if self.form.activation == "gelu_erf":
            scaled = self.add("Div", [x, "root_two"], f"{name}/scaled")
            bounded = self.add("Erf", [scaled], f"{name}/bounded")
        else:
            cube = self.add("Mul", [self.add("Pow", [x, "three"], f"{name}/cube"), "cubic"], f"{name}/cubic")
            scaled = self.add("Mul", [self.add("Add", [x, cube], f"{name}/sum"), "root_two_over_pi"], f"{name}/scaled")
            bounded = self.add("Tanh", [scaled], f"{name}/bounded")
        factor = self.add("Add", [bounded, "one"], f"{name}/factor")
        return self.add("Mul", [self.add("Mul", [x, factor], f"{name}/twice"), "half"], f"{name}/activated")

    def first(self, x: str, name: str) -> tuple[str, str]:
        """The gate, and the up values where there are any."""
        d, f = self.form.size, self.form.neurons
        if not self.form.packed:
            gate = self.matmul(x, f"{name}.gate", d, f, self.form.shift)
            return gate, self.matmul(x, f"{name}.up", d, f) if self.form.gated else ""
        both = self.matmul(x, f"{name}.both", d, 2 * f, self.form.shift)
        halves = [f"{name}.{part}" for part in self.form.packed.split("_")]
        if self.form.cut == "Split":
            self.nodes.append(helper.make_node("Split", [both], halves, name=f"/{name}.split", axis=-1, num_outputs=2))
        else:
            bounds = [self.constant(f"{name}.bound{i}", np.array([i * f])) for i in range(3)]
            for i, half in enumerate(halves):
                self.add("Slice", [both, bounds[i], bounds[i + 1], "last"], half)
        return f"{name}.gate", f"{name}.up"

    def mlp(self, x: str, name: str) -> str:
        d, f = self.form.size, self.form.neurons
        flat = self.add("Reshape", [x, "flat"], f"{name}/flat") if self.form.gemm else x
        gate, up = self.first(flat, name)
        if self.form.unflattens:
            lead = self.add("Shape", [x], f"{name}/lead", start=0, end=2)
            shape = self.add(
                "Concat", [lead, self.constant(f"{name}.neurons", np.array([f]))], f"{name}/unfolded", axis=0
            )
            gate = self.add("Reshape", [gate, shape], f"{name}/gate")
        hidden = self.activate(gate, f"{name}/act")
        if self.form.unflattens:
            hidden = self.add("Reshape", [hidden, self.constant(f"{name}.flat", np.array([-1, f]))], f"{name}/hidden")
        if self.form.gated:
            hidden = self.add("Mul", [up, hidden], f"{name}/hidden")
        output = self.matmul(hidden, f"{name}.down", f, d)
        if self.form.gemm:
            output = self.add("Reshape", [output, self.add("Shape", [x], f"{name}/shape")], f"{name}/folded")
        return self.add("Add", [x, output], f"{name}/residual")

    def make(self, layers: int) -> onnx.ModelProto:
        form, d = self.form, self.form.size
        self.constant("flat", np.array([-1, d], np.int64))
        self.constant("last", np.array([-1], np.int64))
        scalars = {"two": 2.0, "three": 3.0, "half": 0.5, "one": 1.0, "cubic": 0.044715}
        for name, value in {**scalars, "root_two": 2**0.5, "root_two_over_pi": (2 / np.pi) ** 0.5}.items():
            self.constant(name, np.array(value))
        x = self.add("Gather", [self.constant("table", self.rng.standard_normal((VOCABULARY, d))), "input_ids"], "x0")
        inputs = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["B", "S"])]
        outputs = [helper.make_tensor_value_info("logits", form.dtype, ["B", "S", VOCABULARY])]
        if form.has_cache:
            inputs.append(helper.make_tensor_value_info("past", form.dtype, ["B", "P", d]))
            outputs.append(helper.make_tensor_value_info("present", form.dtype, ["B", "P + S", d]))
            self.add("Concat", ["past", x], "present", axis=1)
            x = self.add("Add", [x, self.add("ReduceMean", ["present", "middle"], "context")], "mixed")
            self.constant("middle", np.array([1], np.int64))
        for i in range(layers):
            x = self.mlp(x, f"layers.{i}")
        self.add("MatMul", [x, self.constant("head", self.rng.standard_normal((d, VOCABULARY)) / 8)], "logits")
        graph = helper.make_graph(self.nodes, "decoder", inputs, outputs, self.stored)
        is_contrib = form.bits > 0 or form.activation == "quick_gelu"
        opsets = [helper.make_opsetid("", 20), *([helper.make_opsetid("com.microsoft", 1)] if is_contrib else [])]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)
