# SPDX-License-Identifier: Apache-2.0
"""Which MLPs become StofSparseMLP, what the node and its function body say, and why others stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from mlp_models import VOCABULARY, MlpForm, make_mlp_model
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from stof.sparse_mlp.emit import emit_mlps
from stof.sparse_mlp.find import find_mlps, has_cache
from stof.sparse_mlp.fused_activations import is_fused_activation, with_separate_activations
from stof.sparse_mlp.problem import MlpProblem
from stof.sparse_mlp.site import OP, OP_INPUTS, MlpSite
from stof.symbolic import Symbolic

FORMS = [
    MlpForm(),
    MlpForm(bias=False),
    MlpForm("relu2"),
    MlpForm("relu2_pow", bias=False),
    MlpForm(gemm=True),
    MlpForm(gated=True),
    MlpForm(gated=True, bias=False),
    MlpForm("threshold_gelu", gated=True, bias=False),
    MlpForm("relu2", gated=True, gemm=True),
]


def sites_of(model: onnx.ModelProto) -> list[MlpSite]:
    found = find_mlps(model, Symbolic(model))
    assert all(c.site is not None for c in found), [c.reason for c in found]
    return [c.site for c in found if c.site is not None]


def feed(rng: np.random.Generator, form: MlpForm) -> dict[str, np.ndarray]:
    past = rng.standard_normal((2, 3, form.size)).astype(helper.tensor_dtype_to_np_dtype(form.dtype))
    return {"input_ids": rng.integers(0, VOCABULARY, (2, 5)), "past": past}


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_body_is_the_dense_mlp(form: MlpForm) -> None:
    """Without the library, the function body gives what the original gives."""
    model = make_mlp_model(form, layers=2)
    sites = sites_of(model)
    assert len(sites) == 2
    emitted = emit_mlps(model, sites, Path())
    onnx.checker.check_model(emitted, full_check=True)
    assert [n.op_type for n in emitted.graph.node].count(OP) == 2
    inputs = feed(np.random.default_rng(1), form)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    wanted = ReferenceEvaluator(model).run(None, inputs)
    for m in (model, emitted):
        found = ort.InferenceSession(m.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(
            None, inputs
        )
        for name, one, other in zip(("logits", "present"), wanted, found, strict=True):
            np.testing.assert_allclose(other, one, rtol=2e-5, atol=1e-4, err_msg=name)


def test_node_says_what_it_replaces() -> None:
    form = MlpForm("relu2", gated=True)
    model = make_mlp_model(form)
    (site,) = sites_of(model)
    assert (site.activation, site.neurons, site.input_size, site.output_size) == ("relu2", 160, 48, 48)
    emitted = emit_mlps(model, [site], Path())
    node = next(n for n in emitted.graph.node if n.op_type == OP)
    given = {name: tensor for name, tensor in zip(OP_INPUTS, node.input, strict=False) if tensor}
    assert set(given) == {"input", "gate", "up_weight", "up_bias", "down_weight", "down_bias"}
    stored = {t.name: t for t in emitted.graph.initializer}
    assert list(stored[given["up_weight"]].dims) == [160, 48]
    assert list(stored[given["down_weight"]].dims) == [160, 48]
    assert given["down_weight"] == "layers.0.down.weight"  # it lies by neuron already
    assert "layers.0.up.weight" not in stored  # no weight is held twice
    # Up, activation, Mul and down are gone; the gate's matmul stays.
    assert [n.op_type for n in emitted.graph.node if n.op_type in ("Relu", "Mul")] == []
    assert "layers.0.gate.weight" in stored


def test_shared_bodies() -> None:
    """Layers of one form share a variant of the body; each form has its own."""
    model = make_mlp_model(MlpForm(), layers=3)
    emitted = emit_mlps(model, sites_of(model), Path())
    numbers = [helper.get_attribute_value(a) for n in emitted.graph.node for a in n.attribute if a.name == "mlp_id"]
    assert numbers == [0, 0, 0]


def test_activation_without_zeros_is_no_candidate() -> None:
    model = make_mlp_model(MlpForm("gelu"))
    assert find_mlps(model, Symbolic(model)) == []


ACTIVATIONS = {"gelu": "gelu", "gelu_erf": "gelu", "gelu_tanh": "gelu_tanh", "gelu_cubic": "gelu_tanh", "silu": "silu"}


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("written", [*ACTIVATIONS, "quick_gelu"])
def test_activations_without_zeros(written: str, gated: bool) -> None:
    """They are candidates where asked for, with the matmul of the gate; one that the operator lacks is the gate itself."""
    model = make_mlp_model(MlpForm(written, gated=gated, neurons=96))
    (found,) = find_mlps(model, Symbolic(model), any_activation=True)
    assert found.site is not None, found.reason
    site = found.site
    assert not site.has_zeros
    assert site.activation == ACTIVATIONS.get(written, "none")
    assert (site.up is not None, site.activated) == (gated, "layers.0/act/activated")
    if site.activation == "none":
        assert (site.gate, site.gate_weight) == (site.activated, None)
        return
    assert site.gate == "layers.0.gate"
    assert site.gate_weight is not None
    weight = site.gate_weight
    assert (weight.tensor, weight.bias, weight.is_by_neuron) == ("layers.0.gate.weight", "layers.0.gate.bias", False)
    assert (weight.inner, weight.outer, site.gate_input) == (48, 96, "mixed")


@pytest.mark.parametrize(
    "form",
    [
        MlpForm("silu", gated=True, bits=4, size=64),
        MlpForm("silu", gated=True, bits=8, size=64, bias=False),
        MlpForm("gelu", gemm=True, dtype=TensorProto.FLOAT16),
        MlpForm("silu", gated=True, dtype=TensorProto.BFLOAT16),
        MlpForm("relu"),
    ],
    ids=str,
)
def test_gate_matmul_of_every_type(form: MlpForm) -> None:
    model = make_mlp_model(form)
    (found,) = find_mlps(model, Symbolic(model), any_activation=True)
    assert found.site is not None, found.reason
    weight = found.site.gate_weight
    assert weight is not None
    assert weight.is_by_neuron == (form.gemm or form.bits > 0)
    assert (weight.quantization is None) == (form.bits == 0)
    assert found.site.has_zeros == (form.activation == "relu")


def test_gate_with_other_quantization_keeps_its_matmul() -> None:
    """The operator has one number of bits: a predictor cannot stand for such a gate, which stays as it is."""
    model = make_mlp_model(MlpForm("silu", gated=True, bits=4, size=64))
    eight = make_mlp_model(MlpForm("silu", gated=True, bits=8, size=64))
    own = {n.output[0]: n for n in eight.graph.node}
    stored = {t.name: t for t in eight.graph.initializer}
    for node in model.graph.node:
        if node.output[0] == "layers.0.gate/matmul":
            node.CopyFrom(own[node.output[0]])
    for tensor in model.graph.initializer:
        if tensor.name.startswith("layers.0.gate"):
            tensor.CopyFrom(stored[tensor.name])
    (found,) = find_mlps(model, Symbolic(model), any_activation=True)
    assert found.site is not None, found.reason
    assert found.site.gate_weight is None


@pytest.mark.parametrize("activation", ["relu", "gelu_cubic"])
def test_neurons_between_two_reshapes(activation: str) -> None:
    """GPT-2's matmuls have flat tokens: the operator reads and writes those, and both Reshapes of neurons are gone."""
    model = make_mlp_model(MlpForm(activation, gemm=True, unflattens=True))
    (found,) = find_mlps(model, Symbolic(model), any_activation=True)
    assert found.site is not None, found.reason
    site = found.site
    assert (site.gate, site.has_zeros) == ("layers.0.gate", activation == "relu")
    assert site.gate_weight is not None
    assert site.gate_input == "layers.0/flat"
    emitted = emit_mlps(model, [site], Path())
    onnx.checker.check_model(emitted, full_check=True)
    assert [n.op_type for n in emitted.graph.node].count("Reshape") == 2  # of tokens, and of the output


def test_reshape_whose_neurons_are_read_elsewhere_is_kept() -> None:
    model = make_mlp_model(MlpForm("relu", gemm=True, unflattens=True))
    model.graph.output.append(helper.make_tensor_value_info("layers.0/act/positive", TensorProto.FLOAT, None))
    (found,) = find_mlps(model, Symbolic(model))
    assert "'layers.0/act/positive' has other readers" in found.reason


def test_activation_of_no_matmul_is_no_mlp() -> None:
    model = make_mlp_model(MlpForm("silu"))
    for node in model.graph.node:
        if node.output[0] == "layers.0.gate":
            node.input[1] = "x0"
            del node.input[0]
            node.input.append("x0")
    assert find_mlps(model, Symbolic(model), any_activation=True) == []


def test_activation_between_two_shapes() -> None:
    """GPT-2's classes write their matmuls as Gemm on flat tokens, and the activation between two Reshapes."""
    model = make_mlp_model(MlpForm(gemm=True))
    nodes = [onnx.NodeProto.FromString(n.SerializeToString()) for n in model.graph.node]
    at = next(i for i, n in enumerate(nodes) if n.op_type == "Relu")
    relu = nodes[at]
    nodes.insert(at, helper.make_node("Reshape", [relu.input[0], "folded"], ["unflat"], name="unflat"))
    relu.input[0], output = "unflat", relu.output[0]
    relu.output[0] = "positive"
    nodes.insert(at + 2, helper.make_node("Reshape", ["positive", "flat_neurons"], [output], name="flat_again"))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.append(numpy_helper.from_array(np.array([1, -1, 160]), "folded"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1, 160]), "flat_neurons"))
    (site,) = sites_of(model)
    assert (site.activation, site.gate, site.input_size) == ("relu", "layers.0.gate", 48)
    assert site.projection is not None
    assert site.projection.is_movable


@pytest.mark.parametrize("fused", ["FusedGemm", "BiasGelu", "FastGelu"])
def test_fused_activations(fused: str) -> None:
    """Activations that ONNX Runtime's offline optimizer fuses are found behind their matmul."""
    is_relu = fused == "FusedGemm"
    form = MlpForm("relu" if is_relu else "gelu", gemm=is_relu)
    model = make_mlp_model(form)
    nodes = {n.output[0]: n for n in model.graph.node}
    act = next(n for n in model.graph.node if n.op_type in ("Relu", "Gelu"))
    before = nodes[act.input[0]]
    if is_relu:
        before.op_type, before.domain, before.output[0] = fused, "com.microsoft", act.output[0]
        before.attribute.append(helper.make_attribute("activation", "Relu"))
        model.graph.node.remove(act)
    else:
        act.op_type, act.domain = fused, "com.microsoft"
        del act.attribute[:]
        del act.input[:]
        act.input.extend([next(t for t in before.input if t in nodes), next(t for t in before.input if t not in nodes)])
        model.graph.node.remove(before)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    plain = with_separate_activations(model)
    assert not any(is_fused_activation(n) for n in plain.graph.node)
    (found,) = find_mlps(plain, Symbolic(plain), any_activation=not is_relu)
    assert found.site is not None, found.reason
    wanted = {"FusedGemm": "relu", "BiasGelu": "gelu", "FastGelu": "gelu_tanh"}[fused]
    assert (found.site.activation, found.site.has_zeros) == (wanted, is_relu)
    assert found.site.gate_weight is not None
    assert found.site.gate_weight.bias == "layers.0.gate.bias"
    options = ort.SessionOptions()
    options.log_severity_level = 3
    inputs = feed(np.random.default_rng(1), form)
    one, other = (
        ort.InferenceSession(m.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(None, inputs)
        for m in (model, plain)
    )
    for wanted_values, found_values in zip(one, other, strict=True):
        np.testing.assert_allclose(found_values, wanted_values, rtol=1e-5, atol=1e-5)


def test_hidden_tensor_with_other_readers_is_kept() -> None:
    model = make_mlp_model(MlpForm())
    model.graph.output.append(helper.make_tensor_value_info("layers.0/act/positive", TensorProto.FLOAT, None))
    (found,) = find_mlps(model, Symbolic(model))
    assert found.site is None
    assert found.reason == "'layers.0/act/positive' has other readers, which need all neurons"


def test_up_that_is_read_elsewhere_is_kept() -> None:
    model = make_mlp_model(MlpForm(gated=True))
    model.graph.output.append(helper.make_tensor_value_info("layers.0.up", TensorProto.FLOAT, None))
    (found,) = find_mlps(model, Symbolic(model))
    assert found.site is None
    assert "'layers.0.up' has other readers" in found.reason


def test_few_neurons_are_kept() -> None:
    model = make_mlp_model(MlpForm(neurons=32))
    (found,) = find_mlps(model, Symbolic(model))
    assert found.reason == "it has 32 neurons, fewer than 64"


def test_scaled_gemm_is_no_candidate() -> None:
    model = make_mlp_model(MlpForm(gemm=True))
    for node in model.graph.node:
        if node.op_type == "Gemm":
            node.attribute.append(helper.make_attribute("alpha", 0.5))
    assert find_mlps(model, Symbolic(model)) == []


def test_weights_that_a_caller_may_replace_are_no_candidate() -> None:
    model = make_mlp_model(MlpForm())
    weight = next(t for t in model.graph.initializer if t.name == "layers.0.down.weight")
    model.graph.input.append(helper.make_tensor_value_info(weight.name, TensorProto.FLOAT, list(weight.dims)))
    assert find_mlps(model, Symbolic(model)) == []


def test_cache_of_a_model() -> None:
    form = MlpForm()
    assert has_cache(make_mlp_model(form))
    assert not has_cache(make_mlp_model(replace(form, has_cache=False)))


@pytest.mark.parametrize(("gated", "density", "share"), [(False, 0.1, 0.55), (True, 0.1, 0.4), (True, 1.0, 1.0)])
def test_share_of_weights_that_a_token_reads(gated: bool, density: float, share: float) -> None:
    (site,) = sites_of(make_mlp_model(MlpForm(gated=gated)))
    assert MlpProblem.of(site, density).share_read == pytest.approx(share)


def model_of(
    nodes: list[onnx.NodeProto], inputs: dict[str, list[int | str]], shapes: dict[str, list[int]]
) -> onnx.ModelProto:
    """A graph of fp32 that gives y, with constants of these shapes and 160 neurons."""
    rng = np.random.default_rng(0)
    stored = [numpy_helper.from_array(rng.standard_normal((48, 160)).astype(np.float32), n) for n in ("gate", "up")]
    stored.append(numpy_helper.from_array(rng.standard_normal((160, 48)).astype(np.float32), "down"))
    stored += [numpy_helper.from_array(np.array(s, np.int64), n) for n, s in shapes.items()]
    given = [helper.make_tensor_value_info(n, TensorProto.FLOAT, d) for n, d in inputs.items()]
    graph = helper.make_graph(
        nodes, "graph", given, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], stored
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


@pytest.mark.parametrize("shape", [[1, "S", 48], ["B", 1, 48], ["C", "S", 48], ["S", 48]], ids=str)
@pytest.mark.parametrize("is_gate", [False, True])
def test_tokens_that_are_broadcast_are_kept(shape: list[int | str], is_gate: bool) -> None:
    """The operator has one token for each row of the gate: a matmul over other axes is another one."""
    sides = ["z", "x"] if is_gate else ["x", "z"]
    nodes = [
        helper.make_node("MatMul", [sides[0], "gate"], ["g"]),
        helper.make_node("Relu", ["g"], ["r"]),
        helper.make_node("MatMul", [sides[1], "up"], ["u"]),
        helper.make_node("Mul", ["r", "u"], ["h"]),
        helper.make_node("MatMul", ["h", "down"], ["y"]),
    ]
    model = model_of(nodes, {"x": ["B", "S", 48], "z": shape}, {})
    (found,) = find_mlps(model, Symbolic(model))
    assert found.site is None
    assert "may have different tokens: the axes before the last one differ" in found.reason
    model = model_of(nodes, {"x": ["B", "S", 48], "z": ["B", "S", 48]}, {})
    (found,) = find_mlps(model, Symbolic(model))
    assert found.site is not None, found.reason


@pytest.mark.parametrize("shapes", [([-1, 1, 160], [1, -1, 160]), ([-1, 160], [1, -1, 160])], ids=str)
def test_output_has_the_axes_of_the_flattened_neurons(shapes: tuple[list[int], list[int]]) -> None:
    """A second Reshape gives as many axes as the matmul has, and others."""
    nodes = [
        helper.make_node("MatMul", ["x", "gate"], ["g"]),
        helper.make_node("Reshape", ["g", "first"], ["f"]),
        helper.make_node("Relu", ["f"], ["r"]),
        helper.make_node("Reshape", ["r", "second"], ["h"]),
        helper.make_node("MatMul", ["h", "down"], ["y"]),
    ]
    model = model_of(nodes, {"x": ["B", "S", 48]}, {"first": shapes[0], "second": shapes[1]})
    emitted = emit_mlps(model, sites_of(model), Path())
    inputs = {"x": np.random.default_rng(1).standard_normal((2, 3, 48)).astype(np.float32)}
    (wanted,), (found,) = (ReferenceEvaluator(m).run(None, inputs) for m in (model, emitted))
    assert found.shape == wanted.shape == (1, 6, 48)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-3)
