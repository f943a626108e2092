# SPDX-License-Identifier: Apache-2.0
"""MLPs whose weights DequantizeLinear or MatMulInteger read: what is taken, with which values, and what stays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from mlp_models import VOCABULARY, MlpForm, make_mlp_model
from onnx import TensorProto, helper, numpy_helper

import stof
from stof.sparse_mlp.dequantize_linear import with_dequantized_tokens
from stof.sparse_mlp.find import MlpCandidate, find_mlps
from stof.sparse_mlp.site import OP
from stof.symbolic import Symbolic

pytestmark = pytest.mark.usefixtures("small_mlps_gain")

FORM = MlpForm(size=64, neurons=192)
GATED = replace(FORM, gated=True)
BLOCK = 32


class Quantizer:
    """Rewrites the MLP's matmuls of a model in fp32."""

    def __init__(self, model: onnx.ModelProto, kind: str) -> None:
        self.model, self.kind = model, kind
        self.stored = {t.name: t for t in model.graph.initializer}
        self.nodes: list[onnx.NodeProto] = []
        self.seen: dict[str, list[str]] = {}

    def rewrite(self) -> onnx.ModelProto:
        for node in self.model.graph.node:
            if node.op_type not in ("MatMul", "Gemm") or node.input[1] == "head":
                self.nodes.append(node)
            elif self.kind == "dynamic":
                self.dynamic(node)
            else:
                self.linear(node)
        names = {"static": ["x_scale", "x_zero"]}.get(self.kind, [])
        if names:
            self.constant("x_scale", np.array(0.04, np.float32))
            self.constant("x_zero", np.array(3, np.int8))
        copies = [onnx.NodeProto.FromString(n.SerializeToString()) for n in self.nodes]
        del self.model.graph.node[:]
        self.model.graph.node.extend(copies)
        read = {t for n in copies for t in n.input}
        kept = [t for t in self.model.graph.initializer if t.name in read]
        copied = [TensorProto.FromString(t.SerializeToString()) for t in kept]
        del self.model.graph.initializer[:]
        self.model.graph.initializer.extend(copied)
        self.model.opset_import[0].version = 21
        self.model.ir_version = 10
        onnx.checker.check_model(self.model)
        return self.model

    def constant(self, name: str, array: np.ndarray, dtype: int = 0) -> str:
        if name not in self.stored:
            made = (
                helper.make_tensor(name, dtype, array.shape, array.reshape(-1))
                if dtype
                else numpy_helper.from_array(array, name)
            )
            self.stored[name] = made
            self.model.graph.initializer.append(made)
        return name

    def add(self, op: str, inputs: list[str], output: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output

    def linear(self, node: onnx.NodeProto) -> None:
        name, kind = node.input[1], self.kind
        weight = numpy_helper.to_array(self.stored[name])
        axis = 1 if node.op_type == "MatMul" else 0  # of the outputs
        attributes: dict[str, int] = {}
        if kind in ("tensor", "static", "transposed"):
            if kind == "transposed":
                weight, axis = weight.T, 1 - axis
            scale = np.array(np.abs(weight).max() / 127, np.float32)
            inputs = [
                self.constant(f"{name}.q", np.round(weight / scale).astype(np.int8)),
                self.constant(f"{name}.s", scale),
            ]
        elif kind == "channel":
            low, high = weight.min(1 - axis, keepdims=True), weight.max(1 - axis, keepdims=True)
            scale = (high - low) / 255
            zero = np.round(-low / scale)
            values = np.clip(np.round(weight / scale) + zero, 0, 255).astype(np.uint8)
            inputs = [
                self.constant(f"{name}.q", values),
                self.constant(f"{name}.s", scale.reshape(-1).astype(np.float32)),
            ]
            inputs.append(self.constant(f"{name}.z", zero.reshape(-1).astype(np.uint8)))
            attributes["axis"] = axis
        else:  # blocks of 4 bits along what is summed over
            moved = np.moveaxis(weight, 1 - axis, 0)
            blocks = moved.reshape(-1, BLOCK, moved.shape[1])
            scale = np.abs(blocks).max(1) / 7
            values = np.clip(np.round(blocks / scale[:, None]), -8, 7).reshape(moved.shape)
            values, scale = (np.moveaxis(a, 0, 1 - axis) for a in (values, scale))
            inputs = [self.constant(f"{name}.q", np.ascontiguousarray(values).astype(np.int64), TensorProto.INT4)]
            inputs.append(self.constant(f"{name}.s", np.ascontiguousarray(scale).astype(np.float32)))
            attributes |= {"axis": 1 - axis, "block_size": BLOCK}
        dequantized = self.add("DequantizeLinear", inputs, f"{name}.f", **attributes)
        if kind == "transposed":
            dequantized = self.add("Transpose", [dequantized], f"{name}.t", perm=[1, 0])
        x = node.input[0]
        if kind == "static":
            if x not in self.seen:
                q = self.add("QuantizeLinear", [x, "x_scale", "x_zero"], f"{x}.q")
                self.seen[x] = [self.add("DequantizeLinear", [q, "x_scale", "x_zero"], f"{x}.dq")]
            x = self.seen[x][0]
        node.input[0], node.input[1] = x, dequantized
        self.nodes.append(node)

    def dynamic(self, node: onnx.NodeProto) -> None:
        x, name = node.input[0], node.input[1]
        weight = numpy_helper.to_array(self.stored[name])
        scale = (np.abs(weight).max(0) / 127).astype(np.float32)
        if x not in self.seen:
            self.seen[x] = [f"{x}.q", f"{x}.s", f"{x}.z"]
            self.nodes.append(helper.make_node("DynamicQuantizeLinear", [x], self.seen[x], name=f"{x}.quantize"))
        q, s, z = self.seen[x]
        # Kernels for int8 saturate on processors without VNNI; uint8 has no such sums.
        values = self.constant(f"{name}.q", (np.round(weight / scale) + 128).astype(np.uint8))
        zero = self.constant(f"{name}.z", np.array(128, np.uint8))
        sums = self.add("MatMulInteger", [q, values, z, zero], f"{name}.int")
        both = self.add("Mul", [s, self.constant(f"{name}.s", scale)], f"{name}.both")
        self.add("Mul", [self.add("Cast", [sums], f"{name}.float", to=TensorProto.FLOAT), both], node.output[0])


def session(path: Path, library: bool) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    # By default, ONNX Runtime's fusion of DequantizeLinear and MatMul rounds tokens to 8 bits.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    if library:
        stof.register(options)
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def feeds(form: MlpForm, tokens: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(tokens)
    past = rng.standard_normal((2, 3, form.size)).astype(np.float32)
    return {"input_ids": rng.integers(0, VOCABULARY, (2, tokens)), "past": past}


def candidate(model: onnx.ModelProto) -> MlpCandidate:
    shown = with_dequantized_tokens(model)
    (found,) = find_mlps(shown, Symbolic(shown))
    return found


@pytest.mark.usefixtures("dequantized_mlps_gain")
@pytest.mark.parametrize(
    ("form", "kind", "gated"),
    [
        (GATED, "tensor", True),
        (replace(FORM, bias=False), "channel", False),
        (replace(GATED, gemm=True, bias=False), "channel", True),
        (replace(GATED, bias=False), "blocked", True),
        (replace(GATED, gemm=True, bias=False), "blocked", True),
        (FORM, "transposed", False),
        (replace(GATED, activation="relu2"), "static", False),
        (FORM, "dynamic", False),
        (replace(GATED, bias=False), "dynamic", False),
    ],
    ids=str,
)
def test_integer_weights(form: MlpForm, kind: str, gated: bool, tmp_path: Path) -> None:
    """The values are those of the original: outputs are as close as those of fp32 weights, with the library and without."""
    source, target = tmp_path / "model.onnx", tmp_path / "out.onnx"
    model = Quantizer(make_mlp_model(form), kind).rewrite()
    onnx.save(model, str(source), save_as_external_data=kind == "blocked", location="w.data", size_threshold=1024)
    report = stof.optimize(source, target)
    (row,) = report.sections["mlps"].to_json()["mlps"]
    assert row["replaced"], row["reason"]
    bits = 4 if kind == "blocked" else 8
    assert row["sizes"] == f"{'gated' if gated else 'plain'}, 192 neurons, int{bits}"
    written = onnx.load(str(target), load_external_data=False)
    (node,) = (n for n in written.graph.node if n.op_type == OP)
    assert {a.name: a.i for a in node.attribute}["bits"] == bits
    # No weight of the op's matmuls is left in its old form.
    assert not [t.name for t in written.graph.initializer if "down.weight.q" in t.name and "/by_neuron" not in t.name]
    for library in (True, False):
        one, other = session(source, False), session(target, library)
        for tokens in (1, 9):
            feed = feeds(form, tokens)
            for wanted, found in zip(one.run(None, feed), other.run(None, feed), strict=True):
                np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=2e-4 * np.abs(wanted).max())


def test_clipped_values_are_zeros_without_relu() -> None:
    """A quantizer leaves Relu out where its smallest value is zero: clipping does the same."""
    model = Quantizer(make_mlp_model(FORM), "static").rewrite()
    nodes = [n for n in model.graph.node if n.op_type != "Relu"]
    relu = next(n for n in model.graph.node if n.op_type == "Relu")
    for node in nodes:
        for i, name in enumerate(node.input):
            if name == relu.output[0]:
                node.input[i] = relu.input[0]
    stored = {t.name: t for t in model.graph.initializer}
    kept = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    assert find_mlps(model, Symbolic(model)) == []  # 3 is not the smallest value
    stored["x_zero"].CopyFrom(numpy_helper.from_array(np.array(-128, np.int8), "x_zero"))
    found = {c.site.down.tensor for c in find_mlps(model, Symbolic(model)) if c.site is not None}
    assert "layers.0.down.weight.q" in found


def replace_constant(model: onnx.ModelProto, name: str, array: np.ndarray) -> None:
    next(t for t in model.graph.initializer if t.name == name).CopyFrom(numpy_helper.from_array(array, name))


def test_weights_that_no_block_fits_are_kept() -> None:
    model = Quantizer(make_mlp_model(replace(FORM, neurons=200)), "tensor").rewrite()
    assert candidate(model).reason == (
        "'layers.0.down.weight.q' sums over 200 elements: no blocks of a power of two from 16 to 256 divide them"
    )


def test_scales_of_inputs_are_kept() -> None:
    """A scale for each element that the matmul sums over is none of an output or a block."""
    model = Quantizer(make_mlp_model(FORM), "channel").rewrite()
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] == "layers.0.down.weight.q":
            del node.attribute[:]
            node.attribute.append(helper.make_attribute("axis", 0))
    replace_constant(model, "layers.0.down.weight.s", np.full(192, 0.01, np.float32))
    replace_constant(model, "layers.0.down.weight.z", np.full(192, 128, np.uint8))
    assert candidate(model).reason == "'layers.0.down.weight.q' has 192 scales, expected one for each of 64 outputs"


def test_scales_that_are_computed_are_kept() -> None:
    model = Quantizer(make_mlp_model(FORM), "tensor").rewrite()
    model.graph.node.insert(0, helper.make_node("Identity", ["layers.0.down.weight.s"], ["computed"], name="computed"))
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] == "layers.0.down.weight.q":
            node.input[1] = "computed"
    assert candidate(model).reason == "the scale of 'layers.0.down.weight.q' is no constant"


def test_matmul_integer_of_another_scale_is_kept() -> None:
    model = Quantizer(make_mlp_model(FORM), "dynamic").rewrite()
    for node in model.graph.node:
        if node.name == "layers.0.down.weight.both":
            node.input[1] = "layers.0/act/positive.s"
    assert "is not that of its input times a constant" in candidate(model).reason


def test_quantized_hidden_values_compute_all_up_values() -> None:
    """Between up and the last matmul stands a quantization, which the operator does not have."""
    model = Quantizer(make_mlp_model(GATED), "dynamic").rewrite()
    site = candidate(model).site
    assert site is not None
    assert site.up is None
    assert site.gate.endswith("/dequantized")
    assert site.input_size == 2 * GATED.size  # gate and up are dense
