# SPDX-License-Identifier: Apache-2.0
"""MLPs of whole models: optimized, verified and run with the library; what the report says; what stays."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from mlp_models import BLOCK, VOCABULARY, MlpForm, make_mlp_model
from onnx import TensorProto, helper, numpy_helper

import stof
from stof import cli
from stof.errors import ArgumentError
from stof.options import Options
from stof.report import Report
from stof.sparse_mlp.report import MlpSection
from stof.sparse_mlp.site import OP

pytestmark = pytest.mark.usefixtures("small_mlps_gain")

FORMS = [
    MlpForm(),
    MlpForm("relu2", gemm=True),
    MlpForm("relu2", gated=True),
    MlpForm("threshold_gelu", gated=True, bias=False),
    MlpForm(dtype=TensorProto.FLOAT16),
    MlpForm(bits=4, size=64),
    MlpForm("relu2", gated=True, bits=4, size=64, zero_points=True),
    MlpForm(gated=True, bits=8, size=64, bias=False, zero_points=True),
    MlpForm(gated=True, bits=4, size=64, accuracy_level=4),
]


def write(folder: Path, form: MlpForm, layers: int = 2) -> Path:
    path = folder / "model.onnx"
    onnx.save(make_mlp_model(form, layers), str(path))
    return path


def mlps(report: Report) -> MlpSection:
    section = report.sections["mlps"]
    assert isinstance(section, MlpSection)
    return section


def feeds(form: MlpForm, tokens: int, batch: int = 2) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(tokens)
    past = rng.standard_normal((batch, 3, form.size)).astype(helper.tensor_dtype_to_np_dtype(form.dtype))
    return {"input_ids": rng.integers(0, VOCABULARY, (batch, tokens)), "past": past}


def session(path: Path, library: bool) -> ort.InferenceSession:
    options = ort.SessionOptions()
    if library:
        stof.register(options)
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@pytest.mark.usefixtures("dequantized_mlps_gain")
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_optimized_model_gives_the_same_outputs(form: MlpForm, tmp_path: Path) -> None:
    source = write(tmp_path, form)
    report = stof.optimize(source, tmp_path / "out.onnx")
    assert mlps(report).replaced == 2, [r.reason for r in mlps(report).rows]
    written = onnx.load(str(tmp_path / "out.onnx"))
    assert [n.op_type for n in written.graph.node].count(OP) == 2
    assert report.verification is not None
    assert {c.site for c in report.verification.comparisons if c.site} == {r.mlp for r in mlps(report).rows}
    one, other = session(source, False), session(tmp_path / "out.onnx", True)
    tolerance = 2e-2 if form.dtype == TensorProto.FLOAT16 or form.accuracy_level == 4 else 1e-4
    for tokens in (1, 7, 40):
        feed = feeds(form, tokens)
        for wanted, found in zip(one.run(None, feed), other.run(None, feed), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance * np.abs(wanted).max())


def test_counted_neurons(tmp_path: Path) -> None:
    """With given inputs, active neurons are counted, and decide."""
    form = MlpForm(shift=1.5)
    source = write(tmp_path, form)
    np.savez(tmp_path / "inputs.npz", **feeds(form, 9))
    report = stof.optimize(source, tmp_path / "out.onnx", Options(inputs=(str(tmp_path / "inputs.npz"),)))
    model = onnx.load(str(source))
    for name in ("layers.0/act/positive", "layers.1/act/positive"):
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    activated = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(
        ["layers.0/act/positive", "layers.1/act/positive"], feeds(form, 9)
    )
    for row, values in zip(mlps(report).rows, activated, strict=True):
        assert row.density == pytest.approx(np.count_nonzero(values) / values.size)
        assert row.predicted_gain == pytest.approx(2 / (1 + row.density), rel=1e-3)
    shares = [100 * r.density for r in mlps(report).rows if r.density is not None]
    text = "\n".join(mlps(report).lines())
    assert f"{min(shares):.1f} to {max(shares):.1f} % of the neurons active on the given inputs" in text


def test_dense_activations_stay(tmp_path: Path) -> None:
    form = MlpForm(shift=-8.0)  # nearly all neurons are active
    source = write(tmp_path, form, layers=1)
    np.savez(tmp_path / "inputs.npz", **feeds(form, 9))
    report = stof.optimize(source, tmp_path / "out.onnx", Options(inputs=(str(tmp_path / "inputs.npz"),)))
    (row,) = mlps(report).rows
    assert not row.replaced
    assert row.reason.endswith("x is estimated for one token by bytes of weights, less than 1.1x")
    assert "% of its neurons are active on the given inputs" in row.reason


def test_report_says_that_nothing_was_counted(tmp_path: Path) -> None:
    report = stof.optimize(write(tmp_path, MlpForm()), tmp_path / "out.onnx")
    text = "\n".join(mlps(report).lines())
    assert "active neurons not measured: --inputs gives runs to count them in" in text
    assert mlps(report).headline(False) == "2 of 2 MLPs with zeros replaced"


@pytest.mark.parametrize(
    ("shift", "target", "reason"),
    [
        (None, "cpu", "of its neurons are active, which was not measured: give --inputs"),
        (0.0, "cpu", "% are on the given inputs"),
        (2.5, "cpu", "replaced"),
        (2.5, "cuda", "its runs have many tokens, for which a GPU computes all neurons"),
    ],
)
@pytest.mark.parametrize("gated", [False, True])
def test_model_without_cache(shift: float | None, target: str, reason: str, gated: bool, tmp_path: Path) -> None:
    """Runs have many tokens: an MLP is replaced where hardly any neuron is known to be active."""
    form = MlpForm(has_cache=False, gated=gated, shift=shift or 0.0)
    inputs: tuple[str, ...] = ()
    if shift is not None:
        np.savez(tmp_path / "inputs.npz", input_ids=feeds(form, 64)["input_ids"])
        inputs = (str(tmp_path / "inputs.npz"),)
    source = write(tmp_path, form)
    options = Options(inputs=inputs, target=target, dry_run=target == "cuda")
    report = stof.optimize(source, tmp_path / "out.onnx", options)
    rows = mlps(report).rows
    assert {r.replaced for r in rows} == {reason == "replaced"}
    assert all(reason in r.reason for r in rows)
    assert all(r.predicted_gain is None for r in rows)
    if reason == "replaced":
        assert all(r.density is not None and r.density <= 0.03 for r in rows)


@pytest.mark.parametrize(
    ("shift", "reason"),
    [
        (2.0, "replaced"),
        (0.0, "of its neurons are computed: a GPU gains where at most 40 % are"),
        (None, "a GPU gains where at most 40 % of the neurons are active, which was not measured: give --inputs"),
    ],
)
def test_cuda_target(shift: float | None, reason: str, tmp_path: Path) -> None:
    """On a GPU, MLPs are replaced where few neurons are known to be active."""
    form = MlpForm(shift=shift or 0.0)
    inputs: tuple[str, ...] = ()
    if shift is not None:
        np.savez(tmp_path / "inputs.npz", **feeds(form, 9))
        inputs = (str(tmp_path / "inputs.npz"),)
    options = Options(target="cuda", dry_run=True, inputs=inputs)
    rows = mlps(stof.optimize(write(tmp_path, form), tmp_path / "out.onnx", options)).rows
    assert [r.replaced for r in rows] == [reason == "replaced"] * 2
    assert all(reason in r.reason for r in rows), [(r.reason, r.density) for r in rows]


def test_tensorrt_target_stays(tmp_path: Path) -> None:
    report = stof.optimize(write(tmp_path, MlpForm()), tmp_path / "out.onnx", Options(target="tensorrt", dry_run=True))
    assert {r.reason for r in mlps(report).rows} == {"StofSparseMLP has no TensorRT plugin"}


def test_wrong_nodes_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An emission with another activation fails at its site, and the model is written without it."""
    from stof.sparse_mlp import emit, rewrite
    from stof.sparse_mlp.checks import site_checks

    right = emit.emit_mlps

    def wrong(model, sites, folder):  # type: ignore[no-untyped-def]
        return right(model, [replace(s, activation="relu") for s in sites], folder)

    monkeypatch.setattr(rewrite, "emit_mlps", wrong)
    monkeypatch.setattr(site_checks, "emit_mlps", wrong)
    report = stof.optimize(write(tmp_path, MlpForm("relu2")), tmp_path / "out.onnx")
    assert mlps(report).replaced == 0
    assert all("differs" in r.reason for r in mlps(report).rows), [r.reason for r in mlps(report).rows]


@pytest.mark.filterwarnings("error")
def test_infinite_weights_are_compared_without_warnings(tmp_path: Path) -> None:
    """Neurons are left out whose zero times infinity is NaN: verification finds it, and the MLP stays."""
    model = make_mlp_model(MlpForm())
    stored = next(t for t in model.graph.initializer if t.name == "layers.0.down.weight")
    weight = numpy_helper.to_array(stored).copy()
    weight[5, 7] = np.inf
    stored.CopyFrom(numpy_helper.from_array(weight, stored.name))
    onnx.save(model, str(tmp_path / "model.onnx"))
    report = stof.optimize(tmp_path / "model.onnx", tmp_path / "out.onnx")
    (row,) = report.sections["mlps"].to_json()["mlps"]
    assert not row["replaced"]
    assert "inf or NaN in one of the two" in row["reason"]


def test_plan_and_selection(tmp_path: Path) -> None:
    source = write(tmp_path, MlpForm())
    code = cli.main(
        [str(source), "-o", str(tmp_path / "a.onnx"), "--skip", "mlp:0", "--save-plan", str(tmp_path / "p.json")]
    )
    assert code == 0
    plan = json.loads((tmp_path / "p.json").read_text())
    assert [e["replace"] for e in plan["mlps"]] == [False, True]
    report = stof.optimize(source, tmp_path / "b.onnx", Options(plan=tmp_path / "p.json"))
    assert [r.replaced for r in mlps(report).rows] == [False, True]
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()

    plan["mlps"][0]["mlp"] = "elsewhere"
    (tmp_path / "p.json").write_text(json.dumps(plan))
    with pytest.raises(ArgumentError, match="the plan has MLP 'elsewhere', which the model does not have"):
        stof.optimize(source, tmp_path / "c.onnx", Options(plan=tmp_path / "p.json"))


def test_optimized_again(tmp_path: Path) -> None:
    stof.optimize(write(tmp_path, MlpForm()), tmp_path / "out.onnx")
    report = stof.optimize(tmp_path / "out.onnx", tmp_path / "again.onnx")
    assert {r.reason for r in mlps(report).rows} == {"is StofSparseMLP already"}


def test_external_weights(tmp_path: Path) -> None:
    form = MlpForm(gated=True, size=64, neurons=256)
    source = tmp_path / "model.onnx"
    onnx.save(make_mlp_model(form, 2), str(source), save_as_external_data=True, location="w.data", size_threshold=1024)
    (tmp_path / "out").mkdir()
    report = stof.optimize(source, tmp_path / "out" / "model.onnx")
    assert mlps(report).replaced == 2
    feed = feeds(form, 1)
    found = session(tmp_path / "out" / "model.onnx", True).run(None, feed)
    for one, other in zip(session(source, False).run(None, feed), found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-4 * np.abs(one).max())


@pytest.mark.usefixtures("dequantized_mlps_gain")
def test_values_of_quantized_weights_do_not_change(tmp_path: Path) -> None:
    """Regrouped by neuron, each value, scale and zero point is the one of MatMulNBits."""
    form = MlpForm("relu", gated=True, bits=4, size=64, zero_points=True)
    source = write(tmp_path, form, layers=1)
    stof.optimize(source, tmp_path / "out.onnx")
    before = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(str(source)).graph.initializer}
    after = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(str(tmp_path / "out.onnx")).graph.initializer}
    weight, scales, zeros = (after[f"layers.0.down.{n}/by_neuron"] for n in ("weight", "scales", "zeros"))
    assert (weight.shape, scales.shape, zeros.shape) == ((160, 32), (5, 64), (5, 64))
    for neuron, output in ((0, 0), (37, 1), (101, 62), (159, 63)):
        block = neuron // BLOCK
        stored = before["layers.0.down.weight"][output, block, neuron % BLOCK // 2] >> 4 * (neuron % 2) & 15
        assert weight[neuron, output // 2] >> 4 * (output % 2) & 15 == stored
        assert scales[block, output] == before["layers.0.down.scales"][output, block]
        stored = before["layers.0.down.zeros"][output, block // 2] >> 4 * (block % 2) & 15
        assert zeros[block, output] == stored
    assert "layers.0.up.weight" in after  # it lies by neuron already


@pytest.mark.parametrize("form", [f for f in FORMS if f.bits], ids=str)
def test_body_of_quantized_weights(form: MlpForm, tmp_path: Path) -> None:
    """Without the library, the function body gives what the original gives."""
    source = write(tmp_path, form)
    stof.optimize(source, tmp_path / "out.onnx")
    tolerance = 2e-2 if form.accuracy_level == 4 else 1e-4
    for tokens in (1, 7):
        feed = feeds(form, tokens)
        wanted, found = (session(p, False).run(None, feed) for p in (source, tmp_path / "out.onnx"))
        for one, other in zip(wanted, found, strict=True):
            np.testing.assert_allclose(other, one, rtol=tolerance, atol=tolerance * np.abs(one).max())
