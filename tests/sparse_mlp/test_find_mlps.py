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
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from stof.sparse_mlp.emit import emit_mlps
from stof.sparse_mlp.find import find_mlps, has_cache
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
    # Up, activation, product and down are gone; the gate's matmul stays.
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
        if node.output[0] == "layers.0.gate/product":
            node.CopyFrom(own[node.output[0]])
    for tensor in model.graph.initializer:
        if tensor.name.startswith("layers.0.gate"):
            tensor.CopyFrom(stored[tensor.name])
    (found,) = find_mlps(model, Symbolic(model), any_activation=True)
    assert found.site is not None, found.reason
    assert found.site.gate_weight is None


def test_activation_of_no_matmul_is_no_mlp() -> None:
    model = make_mlp_model(MlpForm("silu"))
    for node in model.graph.node:
        if node.output[0] == "layers.0.gate":
            node.input[1] = "x0"
            del node.input[0]
            node.input.append("x0")
    assert find_mlps(model, Symbolic(model), any_activation=True) == []


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
    assert site.share_read(density) == pytest.approx(share)
