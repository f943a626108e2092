# SPDX-License-Identifier: Apache-2.0
"""--sparse-mlp with the files of others: PowerInfer's predictors, TEAL's histograms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from mlp_models import VOCABULARY, MlpForm, make_mlp_model
from onnx import helper, numpy_helper
from tests.sparse_mlp.predictors.torch_files import save

import stof
from stof.errors import ArgumentError
from stof.options import Options
from stof.report import Report
from stof.sparse_mlp.report import MlpReport, MlpSection
from stof.sparse_mlp.site import OP

pytestmark = pytest.mark.usefixtures("small_mlps_gain")

SIZE, NEURONS, RANK = 48, 160, 10


@pytest.fixture(name="prompts", scope="module")
def make_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "p.npz"
    rng = np.random.default_rng(0)
    np.savez(path, *[rng.integers(0, VOCABULARY, 20) for _ in range(10)])
    return path


def put(folder: Path, form: MlpForm, *, is_normalized: bool = False) -> Path:
    """A model of two layers; normalized: what each MLP reads is multiplied by a vector, as a normalization ends."""
    model = make_mlp_model(form, 2)
    if is_normalized:
        graph = model.graph
        graph.initializer.append(numpy_helper.from_array(np.linspace(0.5, 2, SIZE, dtype=np.float32), "norm"))
        for i, source in ((0, "mixed"), (1, "layers.0/residual")):
            for node in graph.node:
                if node.op_type == "MatMul" and node.input[0] == source:
                    node.input[0] = f"normalized.{i}"
            place = next(k for k, n in enumerate(graph.node) if source in n.output)
            graph.node.insert(place + 1, helper.make_node("Mul", [source, "norm"], [f"normalized.{i}"]))
    onnx.save(model, str(folder / "model.onnx"))
    return folder / "model.onnx"


def powerinfer(folder: Path, model: Path, layers: int = 2, threshold: float | None = None) -> Path:
    """Predictors that keep the directions of the gate with the largest singular values, each with both signs."""
    folder.mkdir()
    stored = {t.name: numpy_helper.to_array(t) for t in onnx.load(str(model)).graph.initializer}
    for i in range(layers):
        weight = stored[f"layers.{min(i, 1)}.gate.weight"].T
        up, values, down = np.linalg.svd(weight, full_matrices=False)
        up, down = up[:, :RANK] * values[:RANK], down[:RANK]
        tensors = {"fc1.weight": np.concatenate([down, -down]), "fc2.weight": np.concatenate([up, -up], 1)}
        save(folder / f"model_{i}.pt", {n: np.ascontiguousarray(t, np.float32) for n, t in tensors.items()})
    if threshold is not None:
        (folder / "config.json").write_text(f'{{"sparse_threshold": {threshold}}}')
    return folder


def rows(report: Report) -> list[MlpReport]:
    found = report.sections["mlps"]
    assert isinstance(found, MlpSection)
    return found.rows


def test_powerinfer_predictors_with_their_relu(prompts: Path, tmp_path: Path) -> None:
    source = put(tmp_path, MlpForm("relu", bias=False))
    spec = f"powerinfer={powerinfer(tmp_path / 'p', source)}"
    report = stof.optimize(source, tmp_path / "out.onnx", Options(sparse_mlp=spec, prompts=prompts, max_kl=1e9))
    for row in rows(report):
        assert (row.replaced, row.selection) == (True, "predictor"), row.reason
        assert row.prediction is not None
        assert (row.prediction.kind, row.prediction.rank) == ("powerinfer", 2 * RANK)
        assert row.prediction.recall is not None
        assert row.prediction.recall > 0.7  # half of the neurons are active: chance is 0.5
    nodes = [n for n in onnx.load(str(tmp_path / "out.onnx")).graph.node if n.op_type == OP]
    for node in nodes:
        assert {a.name: helper.get_attribute_value(a) for a in node.attribute}["predictor_activation"] == b"relu"


def test_powerinfer_predictors_for_cuda(prompts: Path, tmp_path: Path) -> None:
    """CUDA has kernels for predictors with ReLU. An MLP is replaced where its predictor selects at most 40 % of the neurons."""
    source = put(tmp_path, MlpForm("relu", bias=False))
    for threshold, is_replaced in ((0.9, True), (0.1, False)):
        spec = f"powerinfer={powerinfer(tmp_path / str(threshold), source, threshold=threshold)}"
        options = Options(sparse_mlp=spec, prompts=prompts, max_kl=1e9, target="cuda", force=True)
        report = stof.optimize(source, tmp_path / "out.onnx", options)
        assert [r.replaced for r in rows(report)] == [is_replaced] * len(rows(report)), rows(report)
        reason = "replaced" if is_replaced else "% of its neurons are computed: a GPU gains where at most 40 % are"
        assert all(r.reason.endswith(reason) for r in rows(report)), rows(report)
        nodes = [n for n in onnx.load(str(tmp_path / "out.onnx")).graph.node if n.op_type == OP]
        assert len(nodes) == (len(rows(report)) if is_replaced else 0)
        for node in nodes:
            assert {a.name: helper.get_attribute_value(a) for a in node.attribute}["predictor_activation"] == b"relu"


def test_threshold_of_a_file_is_fitted_where_asked_for(prompts: Path, tmp_path: Path) -> None:
    source = put(tmp_path, MlpForm("relu", bias=False))
    spec = f"{prompts},powerinfer={powerinfer(tmp_path / 'p', source)},recall=0.97"
    report = stof.optimize(source, tmp_path / "out.onnx", Options(sparse_mlp=spec, max_kl=1e9))
    for row in rows(report):
        assert row.prediction is not None
        assert row.prediction.recall == pytest.approx(0.97, abs=0.02)


def test_powerinfer_predictors_of_gated_mlps_read_in_front_of_the_normalization(prompts: Path, tmp_path: Path) -> None:
    source = put(tmp_path, MlpForm("relu", gated=True, bias=False), is_normalized=True)
    spec = f"powerinfer={powerinfer(tmp_path / 'p', source)}"
    report = stof.optimize(source, tmp_path / "out.onnx", Options(sparse_mlp=spec, prompts=prompts, max_kl=1e9))
    assert [r.selection for r in rows(report)] == ["predictor"] * 2
    (tmp_path / "plain").mkdir()
    source = put(tmp_path / "plain", MlpForm("relu", gated=True, bias=False))
    report = stof.optimize(source, tmp_path / "out.onnx", Options(sparse_mlp=spec, prompts=prompts))
    assert all("in front of an RMS normalization" in r.reason for r in rows(report)), [r.reason for r in rows(report)]


def teal(folder: Path, layers: int = 2, *, has_gate: bool = True) -> Path:
    centers = np.linspace(-2, 2, 401).astype(np.float32)
    counts = np.exp(-np.abs(centers) * 3).astype(np.float32)
    for i in range(layers):
        (folder / f"layer-{i}" / "mlp").mkdir(parents=True)
        names = ["h1", "h2", *(["h1.5"] if has_gate else [])]
        tensors = {f"{n}_centers": centers for n in names} | dict.fromkeys(names, counts)
        save(folder / f"layer-{i}" / "mlp" / "histograms.pt", tensors)
    return folder


@pytest.mark.parametrize("gated", [False, True])
def test_thresholds_of_histograms(gated: bool, prompts: Path, tmp_path: Path) -> None:
    source = put(tmp_path, MlpForm("silu", gated=gated))
    spec = f"teal={teal(tmp_path / 't')},active=0.3"
    report = stof.optimize(source, tmp_path / "out.onnx", Options(sparse_mlp=spec, prompts=prompts, max_kl=1e9))
    assert [r.selection for r in rows(report)] == ["magnitude"] * 2
    stored = {t.name: numpy_helper.to_array(t) for t in onnx.load(str(tmp_path / "out.onnx")).graph.initializer}
    (threshold,) = stored[next(n for n in stored if n.endswith("/threshold"))]
    assert threshold == pytest.approx(-np.log(0.3) / 3, abs=0.02)  # of an exponential distribution


def test_histograms_without_the_gate_keep_gated_mlps(tmp_path: Path) -> None:
    source = put(tmp_path, MlpForm("silu", gated=True))
    spec = f"teal={teal(tmp_path / 't', has_gate=False)}"
    report = stof.optimize(source, tmp_path / "out.onnx", Options(sparse_mlp=spec))
    assert all("has no histogram h1.5 of its activated gate" in r.reason for r in rows(report))


def test_files_of_a_model_with_other_layers(tmp_path: Path) -> None:
    source = put(tmp_path, MlpForm("relu"))
    for spec in (f"powerinfer={powerinfer(tmp_path / 'p', source, 3)}", f"teal={teal(tmp_path / 't', 3)}"):
        with pytest.raises(ArgumentError, match="is for 3 layers, and the model has 2 MLPs"):
            stof.optimize(source, tmp_path / "out.onnx", Options(sparse_mlp=spec))
