# SPDX-License-Identifier: Apache-2.0
"""StofSparseMLP with predicted neurons: what is written, and that operator, function body and fp64 agree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
from dense_mlp import activate
from mlp_models import VOCABULARY, MlpForm, make_mlp_model
from onnx import TensorProto, helper

import stof
from stof.errors import UnsupportedError
from stof.sparse_mlp.emit import emit_mlps, without_selection
from stof.sparse_mlp.find import find_mlps
from stof.sparse_mlp.predictors.selector import NeuronSelector
from stof.sparse_mlp.problem import MlpProblem
from stof.sparse_mlp.site import OP, OP_INPUTS, MlpSite
from stof.sparse_mlp.stored_selector import dequantize_factor, make_stored_arrays, round_selector
from stof.symbolic import Symbolic

Array = npt.NDArray[Any]
RANK = 12
RELU = "predictor with relu"
# selection, then the form
CASES = [
    ("magnitude", MlpForm("silu", gated=True, bias=False)),
    ("magnitude", MlpForm("gelu_erf")),
    ("magnitude", MlpForm("quick_gelu")),
    ("magnitude", MlpForm("relu2", gated=True)),
    ("magnitude", MlpForm("silu", gated=True, bits=4, size=64, zero_points=True)),
    ("magnitude", MlpForm("silu", gated=True, dtype=TensorProto.FLOAT16)),
    ("predictor", MlpForm("silu", gated=True, bias=False)),
    ("predictor", MlpForm("silu", gated=True)),
    ("predictor", MlpForm("gelu_cubic")),
    ("predictor", MlpForm("gelu", gemm=True)),
    ("magnitude", MlpForm("gelu_cubic", gemm=True, unflattens=True)),
    ("magnitude", MlpForm("quick_gelu", gemm=True, unflattens=True)),
    ("predictor", MlpForm("gelu_cubic", gemm=True, unflattens=True)),
    ("predictor", MlpForm("relu")),
    ("predictor", MlpForm("relu2", gated=True)),
    ("predictor", MlpForm("silu", gated=True, dtype=TensorProto.FLOAT16)),
    ("predictor", MlpForm("silu", gated=True, bits=4, size=64, bias=False)),
    ("predictor", MlpForm("gelu", bits=8, size=64, zero_points=True)),
    (RELU, MlpForm("relu")),
    (RELU, MlpForm("silu", gated=True, bits=4, size=64)),
]


def site_of(model: onnx.ModelProto) -> MlpSite:
    (found,) = find_mlps(model, Symbolic(model), any_activation=True)
    assert found.site is not None, found.reason
    return found.site


def feed(form: MlpForm, tokens: int = 9) -> dict[str, Array]:
    rng = np.random.default_rng(3)
    past = rng.standard_normal((2, 3, form.size)).astype(helper.tensor_dtype_to_np_dtype(form.dtype))
    return {"input_ids": rng.integers(0, VOCABULARY, (2, tokens)), "past": past}


def run(model: onnx.ModelProto, inputs: dict[str, Array], outputs: list[str], library: bool) -> list[Array]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if library:
        stof.register(options)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(outputs, inputs))


def capture(model: onnx.ModelProto, form: MlpForm, tensors: list[str]) -> list[Array]:
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    shown.graph.output.extend(helper.make_tensor_value_info(t, form.dtype, None) for t in tensors)
    return run(shown, feed(form), tensors, library=False)


def cut(scores: Array, share: float, each: bool) -> npt.NDArray[np.float32]:
    """Thresholds that leave a share of scores [T, F] above them, in the widest gap nearby."""
    found = []
    for column in scores.T if each else [scores.reshape(-1)]:
        ordered = np.sort(column)
        at = min(max(1, int(len(ordered) * (1 - share))), len(ordered) - 1)
        around = len(ordered) // (4 if each else 20)
        near = range(max(1, at - around), min(len(ordered), at + around + 1))
        best = max(near, key=lambda i: ordered[i] - ordered[i - 1])
        found.append((ordered[best - 1] + ordered[best]) / 2)
    return np.array(found, np.float32)


def with_selector(site: MlpSite, selection: str, model: onnx.ModelProto, form: MlpForm, each: bool) -> MlpSite:
    """The site with a random selector whose thresholds are away from all scores of the inputs."""
    if selection == "magnitude":
        (gate,) = capture(model, form, [site.gate])
        values = np.abs(activate(site.activation, gate.reshape(-1, site.neurons).astype(np.float64)))
        return replace(site, selector=NeuronSelector(cut(values, 0.3, each)))
    rng = np.random.default_rng(5)
    assert site.gate_weight is not None
    down = rng.standard_normal((RANK, site.gate_weight.inner)).astype(np.float32) / 8
    up = rng.standard_normal((site.neurons, RANK)).astype(np.float32)
    (tokens,) = capture(model, form, [site.gate_input])
    kind: Literal["none", "relu"] = "relu" if selection == RELU else "none"
    drawn = replace(site, selector=NeuronSelector(np.zeros(1, np.float32), down, up, kind))
    return replace(drawn, selector=NeuronSelector(cut(scores_of(drawn, tokens), 0.3, each), down, up, kind))


def scores_of(site: MlpSite, tokens: Array) -> Array:
    """Scores [T, F] of the predictor as the node holds it, in fp64."""
    held = round_selector(site)
    assert held.predictor_down is not None
    assert held.predictor_up is not None
    low = tokens.reshape(-1, held.predictor_down.shape[1]).astype(np.float64) @ held.predictor_down.T.astype(np.float64)
    low = np.maximum(low, 0) if held.predictor_activation == "relu" else low
    return np.asarray(low @ held.predictor_up.T.astype(np.float64))


def active_neurons(site: MlpSite, activated: Array, tokens: list[Array]) -> npt.NDArray[np.bool_]:
    """Which neurons are active, [T, F], by the operator's contract in fp64."""
    assert site.selector is not None
    threshold = site.selector.threshold.astype(np.float64)
    if site.selection == "magnitude":
        return np.asarray(np.abs(activated.reshape(-1, site.neurons).astype(np.float64)) > threshold)
    return np.asarray(scores_of(site, tokens[0]) > threshold)


def with_mask(model: onnx.ModelProto, site: MlpSite) -> onnx.ModelProto:
    """The original whose activated neurons are multiplied by an input."""
    found = onnx.ModelProto()
    found.CopyFrom(model)
    graph = found.graph
    graph.input.append(helper.make_tensor_value_info("kept", site.dtype, None))
    place = next(i for i, n in enumerate(graph.node) if site.activated in n.output)
    for node in graph.node:
        for i, name in enumerate(node.input):
            if name == site.activated:
                node.input[i] = "activated_and_kept"
    graph.node.insert(place + 1, helper.make_node("Mul", [site.activated, "kept"], ["activated_and_kept"]))
    return found


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize(("selection", "form"), CASES, ids=str)
def test_operator_and_body_agree_with_the_masked_original(selection: str, form: MlpForm, each: bool) -> None:
    model = make_mlp_model(form)
    site = with_selector(site_of(model), selection, model, form, each)
    emitted = emit_mlps(model, [site], Path())
    onnx.checker.check_model(emitted)
    (node,) = [n for n in emitted.graph.node if n.op_type == OP]
    assert {a.name: helper.get_attribute_value(a) for a in node.attribute}["selection"] == selection.split()[0].encode()
    activated, *tokens = capture(model, form, [site.activated, *filter(None, [site.tokens_input])])
    active = active_neurons(site, activated, tokens)
    assert 0.1 < active.mean() < 0.6
    kept = active.reshape(activated.shape).astype(activated.dtype)
    (wanted,) = run(with_mask(model, site), {**feed(form), "kept": kept}, ["logits"], library=False)
    (dense,) = run(model, feed(form), ["logits"], library=False)
    size = float(np.abs(wanted.astype(np.float64)).max())
    assert float(np.abs(wanted.astype(np.float64) - dense).max()) > 0.02 * size  # the selection changes outputs
    tolerance = 2e-2 if form.dtype == TensorProto.FLOAT16 else 2e-4
    rounds_tokens = site.quantization is not None and selection != "magnitude"  # of a quantized predictor
    for library in (False,) if rounds_tokens else (False, True):
        (found,) = run(emitted, feed(form), ["logits"], library)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * size, err_msg=f"library: {library}")


@pytest.mark.parametrize(("selection", "form"), CASES, ids=str)
def test_without_selection_the_model_is_the_original(selection: str, form: MlpForm) -> None:
    model = make_mlp_model(form)
    site = with_selector(site_of(model), selection, model, form, each=True)
    dense = without_selection(emit_mlps(model, [site], Path()))
    (wanted,) = run(model, feed(form), ["logits"], library=False)
    tolerance = 2e-2 if form.dtype == TensorProto.FLOAT16 else 2e-4
    for library in (False, True):
        (found,) = run(dense, feed(form), ["logits"], library)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * float(np.abs(wanted).max()))


def test_nodes_hold_each_weight_once() -> None:
    form = MlpForm("silu", gated=True)
    model = make_mlp_model(form)
    site = with_selector(site_of(model), "predictor", model, form, each=False)
    emitted = emit_mlps(model, [site], Path())
    (node,) = [n for n in emitted.graph.node if n.op_type == OP]
    given = {name: tensor for name, tensor in zip(OP_INPUTS, node.input, strict=False) if tensor}
    names = ("input", "gate_weight", "up_weight", "down_weight", "gate_bias", "up_bias", "down_bias", "threshold")
    assert list(given) == [*names, "predictor_down", "predictor_up"]
    stored = {t.name: list(t.dims) for t in emitted.graph.initializer}
    assert stored[given["gate_weight"]] == stored[given["up_weight"]] == stored[given["down_weight"]] == [160, 48]
    assert (stored[given["predictor_down"]], stored[given["predictor_up"]]) == ([16, 48], [160, 16])  # RANK and zeros
    assert stored[given["threshold"]] == [1]
    assert "layers.0.gate.weight" not in stored  # it is held by neuron alone
    assert [n.op_type for n in emitted.graph.node].count("MatMul") == 1  # the head


@pytest.mark.parametrize(("size", "rank"), [(64, 12), (96, 33)])
def test_quantized_predictor(size: int, rank: int) -> None:
    """Rows are padded to multiples of 32; each value is within half a step of its row."""
    form = MlpForm("silu", gated=True, bits=4, size=size)
    site = site_of(make_mlp_model(form))
    rng = np.random.default_rng(0)
    down, up = (rng.standard_normal(s).astype(np.float32) for s in ((rank, size), (160, rank)))
    up[7] = 0
    site = replace(site, selector=NeuronSelector(np.zeros(1, np.float32), down, up))
    arrays = make_stored_arrays(site)
    assert arrays["predictor_down"].shape == (rank, -(-size // 32) * 32)
    assert arrays["predictor_up"].shape == (160, -(-rank // 32) * 32)
    for name, factor in (("predictor_down", down), ("predictor_up", up)):
        assert arrays[name].dtype == np.uint8
        held = dequantize_factor(arrays, name, *factor.shape)
        steps = arrays[f"{name}_scales"].astype(np.float32)[:, None]
        assert (np.abs(held - factor) <= 0.51 * steps).all()
    assert (arrays["predictor_up"][7] == 128).all()


@pytest.mark.parametrize("rank", [1, 12, 16])
def test_rank_of_an_unquantized_predictor_is_padded(rank: int) -> None:
    """With zeros, to a multiple of eight."""
    site = site_of(make_mlp_model(MlpForm("silu", gated=True)))
    rng = np.random.default_rng(0)
    down, up = (rng.standard_normal(s).astype(np.float32) for s in ((rank, 48), (160, rank)))
    site = replace(site, selector=NeuronSelector(np.zeros(1, np.float32), down, up))
    arrays = make_stored_arrays(site)
    padded = -(-rank // 8) * 8
    assert (arrays["predictor_down"].shape, arrays["predictor_up"].shape) == ((padded, 48), (160, padded))
    assert not arrays["predictor_down"][rank:].any()
    assert not arrays["predictor_up"][:, rank:].any()
    rounded = round_selector(site)
    assert rounded.rank == rank
    np.testing.assert_array_equal(rounded.predictor_down, down)
    np.testing.assert_array_equal(rounded.predictor_up, up)


def test_predictor_beyond_the_range_of_fp16_is_refused() -> None:
    site = site_of(make_mlp_model(MlpForm("silu", gated=True, dtype=TensorProto.FLOAT16)))
    down, up = np.full((4, 48), 1e5, np.float32), np.ones((160, 4), np.float32)
    with pytest.raises(UnsupportedError, match="predictor_down has 1e\\+05, beyond the range of float16"):
        make_stored_arrays(replace(site, selector=NeuronSelector(np.zeros(1, np.float32), down, up)))


def test_gate_that_multiplies_another_tensor_takes_no_predictor() -> None:
    model = make_mlp_model(MlpForm("silu", gated=True))
    for node in model.graph.node:
        if node.output[0] == "layers.0.up/matmul":
            node.input[0] = "x0"
    site = site_of(model)
    assert site.reason_no_predictor() == "gate and up multiply different tensors, 'mixed' and 'x0'"


@pytest.mark.parametrize("gated", [False, True])
def test_share_of_weights_that_a_predicted_token_reads(gated: bool) -> None:
    site = site_of(make_mlp_model(MlpForm("silu", gated=gated)))
    drawn = NeuronSelector(np.zeros(1, np.float32), np.ones((12, 48), np.float32), np.ones((160, 12), np.float32))
    expected = 0.1 + 12 * (1 + 48 / 160) / (144 if gated else 96)
    assert MlpProblem.of(replace(site, selector=drawn), 0.1).share_read == pytest.approx(expected)
