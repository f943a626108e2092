# SPDX-License-Identifier: Apache-2.0
"""Neurons in the order of how often they are active: which sites get one, and that nothing but the order of sums changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from mlp_models import BLOCK, VOCABULARY, MlpForm, make_mlp_model
from onnx import TensorProto, helper, numpy_helper

import stof
from stof.options import Options
from stof.sparse_mlp.density import NeuronCounts
from stof.sparse_mlp.find import find_mlps
from stof.sparse_mlp.neuron_order import make_order, with_orders
from stof.sparse_mlp.site import OP, MlpSite
from stof.symbolic import Symbolic

pytestmark = pytest.mark.usefixtures("small_mlps_gain")

# Half of a MiB of weights and more belongs to neurons that are never active on a few tokens.
FORM = MlpForm(size=128, neurons=1536)
FORMS = [
    FORM,
    replace(FORM, gemm=True, gated=True),
    replace(FORM, activation="relu2", gated=True, packed="gate_up", cut="Slice"),
    replace(FORM, activation="threshold_gelu", gated=True),
    replace(FORM, gated=True, dtype=TensorProto.FLOAT16, packed="up_gate"),
    replace(FORM, bits=8, gated=True, neurons=3072, zero_points=True),
]


def site_of(model: onnx.ModelProto) -> MlpSite:
    (found,) = find_mlps(model, Symbolic(model))
    assert found.site is not None, found.reason
    return found.site


def counts_of(site: MlpSite, active: np.ndarray) -> Mapping[str, NeuronCounts]:
    return {site.name: NeuronCounts(active, 10)}


def silence(model: onnx.ModelProto, form: MlpForm) -> None:
    """Half of the neurons, in blocks that are spread over all, are never active."""
    packed = form.packed.split("_")
    name = f"layers.0.{'both' if form.packed else 'gate'}.bias"
    bias = next(t for t in model.graph.initializer if t.name == name)
    values = numpy_helper.to_array(bias).copy()
    first = packed.index("gate") * form.neurons if form.packed else 0
    values[first + np.flatnonzero(np.arange(form.neurons) // BLOCK % 2)] = -50
    bias.CopyFrom(numpy_helper.from_array(values, name))


def session(path: Path, library: bool) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if library:
        stof.register(options)
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def feeds(form: MlpForm, tokens: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    past = rng.standard_normal((2, 3, form.size)).astype(helper.tensor_dtype_to_np_dtype(form.dtype))
    return {"input_ids": rng.integers(0, VOCABULARY, (2, tokens)), "past": past}


def test_order_is_by_frequency() -> None:
    order = make_order(np.array([0, 3, 1, 0, 3, 2]), 1)
    assert order.indices.tolist() == [1, 4, 5, 2, 0, 3]
    assert order.hot == 4


def test_neurons_of_a_scale_stay_together() -> None:
    active = np.zeros(4 * 16, np.int64)
    active[17], active[50] = 2, 9
    order = make_order(active, 16)
    assert order.indices.tolist() == [*range(48, 64), *range(16, 32), *range(16), *range(32, 48)]
    assert order.hot == 32


@pytest.mark.parametrize(("form", "external"), [*((f, True) for f in FORMS), (FORMS[2], False)], ids=str)
def test_ordered_model_gives_the_same(form: MlpForm, external: bool, tmp_path: Path) -> None:
    """Rows of active neurons come first; outputs are those of the original, on other tokens too, with the library and without."""
    source, target = tmp_path / "model.onnx", tmp_path / "out.onnx"
    model = make_mlp_model(form)
    silence(model, form)
    if external:
        onnx.save(model, str(source), save_as_external_data=True, location="w.data", size_threshold=1024)
    else:
        onnx.save(model, str(source))
    np.savez(tmp_path / "inputs.npz", **feeds(form, 3))
    report = stof.optimize(source, target, Options(inputs=(str(tmp_path / "inputs.npz"),)))
    (row,) = report.sections["mlps"].to_json()["mlps"]
    assert row["replaced"], row["reason"]
    assert row["idle"] == pytest.approx(0.5, abs=0.2)
    assert "% of them never, stored last" in "\n".join(report.sections["mlps"].lines())
    assert report.verification is not None
    assert [c.site for c in report.verification.comparisons if c.site] == [row["mlp"]]
    written = onnx.load(str(target), load_external_data=False)
    assert not {"Gather", "Transpose", "Slice", "Split"} & {n.op_type for n in written.graph.node[1:]}
    tolerance = 2e-2 if form.dtype == TensorProto.FLOAT16 else 2e-4
    for library in (True, False):
        one, other = session(source, False), session(target, library)
        for feed in (feeds(form, 3), feeds(form, 5, seed=1)):
            for wanted, found in zip(one.run(None, feed), other.run(None, feed), strict=True):
                np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance * np.abs(wanted).max())
    # The gate of the written model is active in its first neurons.
    (node,) = (n for n in written.graph.node if n.op_type == OP)
    full = onnx.load(str(target))
    full.graph.output.append(helper.make_tensor_value_info(node.input[1], form.dtype, None))
    options = ort.SessionOptions()
    options.log_severity_level = 3
    runner = ort.InferenceSession(full.SerializeToString(), options, providers=["CPUExecutionProvider"])
    gate = runner.run([node.input[1]], feeds(form, 3))[0]
    active = np.flatnonzero((gate.reshape(-1, form.neurons) > 0).any(0))
    assert active.max() < form.neurons * (1 - row["idle"]) + 0.5


def test_weights_with_two_readers_keep_their_order() -> None:
    model = make_mlp_model(FORM)
    site = site_of(model)
    active = np.zeros(FORM.neurons, np.int64)
    active[-10:] = 1
    (ordered,) = with_orders(model, [site], counts_of(site, active))
    assert ordered.order is not None
    assert ordered.order.indices[:10].tolist() == list(range(FORM.neurons - 10, FORM.neurons))
    model.graph.node.add(op_type="Identity", input=[site.down.tensor], output=["copy"], name="copy")
    (kept,) = with_orders(model, [site], counts_of(site, active))
    assert kept.order is None


def test_few_idle_bytes_keep_the_order() -> None:
    model = make_mlp_model(FORM)
    site = site_of(model)
    active = np.ones(FORM.neurons, np.int64)
    active[:100] = 0  # 50 KiB
    (kept,) = with_orders(model, [site], counts_of(site, active))
    assert kept.order is None


@pytest.mark.parametrize("break_with", ["output", "position", "softmax"])
def test_neurons_that_something_else_reads_keep_their_order(break_with: str) -> None:
    """An output of the gate, a constant that differs by neuron, and a function across neurons."""
    model = make_mlp_model(replace(FORM, gated=True, activation="threshold_gelu"))
    if break_with == "output":
        model.graph.output.append(helper.make_tensor_value_info("layers.0.gate", TensorProto.FLOAT, None))
    else:
        nodes = list(model.graph.node)
        at = next(i for i, n in enumerate(nodes) if n.op_type == "Gelu")
        inner = nodes[at].input[0]
        if break_with == "position":
            values = np.linspace(0.5, 1.5, FORM.neurons, dtype=np.float32)
            model.graph.initializer.append(numpy_helper.from_array(values, "slope"))
            nodes.insert(at, helper.make_node("Mul", [inner, "slope"], ["bent"], name="bent"))
        else:
            nodes.insert(at, helper.make_node("CumSum", [inner, "last0"], ["bent0"], name="bent0"))
            model.graph.initializer.append(numpy_helper.from_array(np.array(2, np.int64), "last0"))
            nodes.insert(at + 1, helper.make_node("Mul", [inner, "bent0"], ["bent"], name="bent"))
        nodes[at + (1 if break_with == "position" else 2)].input[0] = "bent"
        del model.graph.node[:]
        model.graph.node.extend(nodes)
    site = site_of(model)
    active = np.zeros(FORM.neurons, np.int64)
    active[-10:] = 1
    (kept,) = with_orders(model, [site], counts_of(site, active))
    assert kept.order is None


PREDICTED = [
    (replace(FORM, gated=True), "kind=svd,active=0.4,rank=24"),
    (FORM, "kind=svd,active=0.4,rank=24,by_neuron=0"),
    (replace(FORM, gated=True), "active=0.3,by_neuron=1"),
    (replace(FORM, gated=True, bits=8, neurons=3072), "kind=svd,active=0.4,rank=24"),
]


@pytest.mark.usefixtures("dequantized_mlps_gain")
@pytest.mark.parametrize(("form", "fields"), PREDICTED, ids=str)
def test_predicted_neurons_lie_in_the_order_in_which_they_are_selected(
    form: MlpForm, fields: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes pass their checks, and outputs are those of the model whose neurons keep their order, on other tokens too."""
    source = tmp_path / "model.onnx"
    model = make_mlp_model(form)
    silence(model, form)
    onnx.save(model, str(source), save_as_external_data=True, location="w.data", size_threshold=1024)
    rng = np.random.default_rng(3)
    np.savez(tmp_path / "prompts.npz", *[rng.integers(0, VOCABULARY, 12) for _ in range(5)])
    options = Options(sparse_mlp=f"{tmp_path / 'prompts.npz'},{fields}", max_kl=1e9, force=True)
    report = stof.optimize(source, tmp_path / "ordered.onnx", options)
    (row,) = report.sections["mlps"].to_json()["mlps"]
    assert row["replaced"], row["reason"]
    assert row["idle"] == pytest.approx(0.5, abs=0.2)
    assert report.verification is not None
    assert [c.site for c in report.verification.comparisons if c.site] == [row["mlp"]]
    assert all(c.ok for c in report.verification.comparisons)
    with monkeypatch.context() as patch:
        patch.setattr("stof.sparse_mlp.rewrite.with_orders", lambda model, sites, counts: list(sites))
        stof.optimize(source, tmp_path / "kept.onnx", options)
    (node,) = (
        n for n in onnx.load(str(tmp_path / "ordered.onnx"), load_external_data=False).graph.node if n.op_type == OP
    )
    (hot,) = (a.i for a in node.attribute if a.name == "hot_neurons")
    assert hot == round(form.neurons * (1 - row["idle"]))
    for library in (True, False):
        kept, ordered = (session(tmp_path / f"{n}.onnx", library) for n in ("kept", "ordered"))
        for feed in (feeds(form, 3), feeds(form, 5, seed=1)):
            wanted, found = (s.run(None, feed)[0] for s in (kept, ordered))
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
