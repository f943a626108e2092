# SPDX-License-Identifier: Apache-2.0
"""skip-scores through the whole optimizer: the gates, calibration and plans.

Where a test says so, the loss is simulated: a threshold scales the scores of its node. Others run where kernels skip.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import skip_models
import test_prompts
from skip_runs import inputs_options, outputs_of, run, simulate_limits, simulate_loss, thresholds_of

from stof import cli
from stof.execution.session_process import session_environment
from stof.runtime.limits import leaves_out
from stof.thresholds import apply, runs
from stof.thresholds.layers import Thresholds


@pytest.fixture(name="limits")
def simulated_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_limits(monkeypatch)


@pytest.fixture(name="lossy")
def simulated_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_loss(monkeypatch)


@pytest.mark.usefixtures("lossy")
def test_a_threshold_that_changes_too_much_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Simulated: with c = 2^14 scores, which tell the mark from other tokens, are multiplied by 0.5."""
    model = skip_models.encoder(tmp_path / "model.onnx")
    options = ["--no-verify", *inputs_options(tmp_path)]
    status, target, report = run(tmp_path, model, "skip-scores(threshold=16384)", *options)
    assert status == 2
    assert not target.exists()
    message = capsys.readouterr().err
    assert "--sparsify changes outputs too much: the cosine of output 'pooled' with the original's is" in message
    assert "--min-cosine allows 0.999" in message
    cosines = report["skip_scores"]["cosines"]
    assert set(cosines) == {"hidden", "pooled"}
    assert min(cosines.values()) < 0.999
    assert report["skip_scores"]["share"] == 0.5
    assert run(tmp_path, model, "skip-scores(threshold=16384)", *options, "--force")[0] == 0
    assert target.exists()
    assert run(tmp_path, model, "skip-scores(threshold=16384)", *options, "--min-cosine", "0")[0] == 0


@pytest.mark.usefixtures("lossy")
def test_a_pattern_is_gated_where_no_layer_skips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = skip_models.encoder(tmp_path / "model.onnx")
    options = ["--no-verify", "--min-cosine", "0.9999", *inputs_options(tmp_path, 2)]
    status, target, report = run(tmp_path, model, "radial(tokens=16);skip-scores", *options)
    assert status == 2
    assert not target.exists()
    assert "--min-cosine allows 0.9999" in capsys.readouterr().err
    assert not any(row["skips"] for row in report["skip_scores"]["layers"])
    assert min(report["skip_scores"]["cosines"].values()) < 0.9999


@pytest.mark.usefixtures("lossy")
def test_a_decoder_that_changes_too_much_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = test_prompts.decoder(tmp_path)
    prompts = test_prompts.put(tmp_path / "prompts.npy", test_prompts.IDS)
    words = ("skip-scores(threshold=16384)", "--no-verify", "--prompts", str(prompts))
    status, target, report = run(tmp_path, path, *words)
    assert status == 2
    assert not target.exists()
    assert "--sparsify changes outputs too much: KL divergence" in capsys.readouterr().err
    assert report["loss"]["kl"] > 0.1
    assert run(tmp_path, path, *words, "--force")[0] == 0


@pytest.mark.usefixtures("lossy")
def test_calibration_on_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Simulated: each layer gets the largest threshold within its part, and what is held out measures them."""
    model = skip_models.encoder(tmp_path / "model.onnx")
    page = tmp_path / "page.html"
    options = ["--no-verify", "--report", str(page), "--min-cosine", "0.98", *inputs_options(tmp_path, 5)]
    status, target, report = run(tmp_path, model, "skip-scores", *options)
    assert status == 0
    skip = report["skip_scores"]
    rows = skip["layers"]
    assert all(row["is_calibrated"] and row["skips"] for row in rows)
    assert all(row["loss"] <= 0.005 for row in rows)  # half of 0.02 for two layers
    assert all(0 < row["share"] <= 0.5 for row in rows)
    assert [row["threshold"] for row in rows] == list(thresholds_of(target).values())
    assert skip["calibrated_on"].startswith("3 of 5 sets of --inputs ")
    assert skip["measured_on"].startswith("2 of 5 sets of --inputs ")
    assert len(rows) < skip["runs"] <= 5 * len(rows) + len(rows)
    assert min(skip["cosines"].values()) >= 0.98
    text = capsys.readouterr().out
    assert f"c = {rows[0]['threshold']:g}, calibrated; at most" in text
    assert "loss on 2 sets of inputs: 1 - cosine of output" in text
    assert "OUTPUTS CHANGE: --sparsify skips by score in 2 of 2 attentions" in page.read_text()
    assert f"alone: {100 * rows[0]['share']:.2f} % of the pairs skipped" in page.read_text()

    # The next power of 2 would lose more than the part of some layer.
    wider = f"skip-scores(threshold={2 * max(row['threshold'] for row in rows)})"
    _, _, report = run(tmp_path, model, wider, *options)
    assert max(row["loss"] for row in report["skip_scores"]["layers"]) > 0.005


@pytest.mark.usefixtures("lossy")
def test_no_threshold_runs_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the search found of a threshold is what the report says of it."""
    tried, put = [], runs.put_thresholds

    def record(model: onnx.ModelProto, thresholds: Thresholds) -> onnx.ModelProto:
        tried.extend(thresholds.items())
        return put(model, thresholds)

    monkeypatch.setattr(runs, "put_thresholds", record)
    model = skip_models.encoder(tmp_path / "model.onnx")
    options = ["--no-verify", "--min-cosine", "0.98", *inputs_options(tmp_path, 2)]
    status, _, report = run(tmp_path, model, "skip-scores", *options)
    assert status == 0
    assert len(tried) == len(set(tried)) == report["skip_scores"]["runs"]
    thresholds = {site.name: c for site, c in tried}
    assert set(thresholds) == {row["node"] for row in report["skip_scores"]["layers"]}


@pytest.mark.usefixtures("lossy")
def test_calibration_on_prompts(tmp_path: Path) -> None:
    """Simulated: one prompt both calibrates and measures."""
    path = test_prompts.decoder(tmp_path, strength=0.3)
    ids = np.random.default_rng(5).integers(0, test_prompts.WORDS, (1, 1200))
    model = onnx.load(path)
    angles = np.arange(1200)[:, None] * 0.7 / (1 + np.arange(8))
    for table in model.graph.initializer:
        if table.name in ("cos", "sin"):
            values = (np.cos if table.name == "cos" else np.sin)(angles).astype(np.float32)
            table.CopyFrom(onnx.numpy_helper.from_array(values, table.name))
    onnx.save(model, path)
    prompts = test_prompts.put(tmp_path / "prompts.npy", ids)
    status, target, report = run(tmp_path, path, "skip-scores", "--no-verify", "--prompts", str(prompts))
    assert status == 0
    skip = report["skip_scores"]
    (row,) = skip["layers"]
    assert row["is_calibrated"]
    assert row["loss"] <= 0.05
    assert skip["calibrated_on"] == skip["measured_on"] == f"1 prompt of --prompts {prompts}"
    assert max(report["loss"]["kl"], report["decode_loss"]["kl"]) <= 0.1
    assert list(thresholds_of(target).values()) == [row["threshold"]]


@pytest.mark.usefixtures("limits")
def test_a_plan_keeps_thresholds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plan = skip_models.encoder(tmp_path / "model.onnx"), tmp_path / "plan.json"
    spec = "skip-scores(threshold=0.75)"
    status, target, _ = run(tmp_path, model, spec, "--no-verify", "--save-plan", str(plan))
    assert status == 0
    first, data = target.read_bytes(), json.loads(plan.read_text())
    assert data["skip_thresholds"] == {"layer0/StofAttention": 0.75, "layer1/StofAttention": 0.75}
    assert run(tmp_path, model, spec, "--no-verify", "--plan", str(plan))[0] == 0
    assert target.read_bytes() == first
    assert data["threshold_clauses"] == [spec]
    for other, words in (
        ("skip-scores(threshold=0.5)", "skip-scores(threshold=0.5)"),
        ("skip-scores(threshold=0.75,layers=1:)", "skip-scores(threshold=0.75,layers=1:)"),
        ("choose-blocks", "choose-blocks"),  # which is not calibrated before the plan is looked at
        (f"{spec};choose-blocks(dense_layers=0+-1)", f"{spec}; choose-blocks(dense_layers=0+-1)"),
        ("window=64", "no thresholds"),
    ):
        assert run(tmp_path, model, other, "--no-verify", "--plan", str(plan))[0] == 1
        assert f"the plan was saved with {spec}, and --sparsify has {words};" in capsys.readouterr().err
    assert cli.main([str(model), "--no-verify", "--plan", str(plan)]) == 1
    assert f"the plan was saved with {spec}, and --sparsify has no thresholds;" in capsys.readouterr().err
    assert run(tmp_path, model, f"window=64;{spec}", "--no-verify", "--plan", str(plan))[0] == 1
    assert "the plan has patterns of --sparsify that are not those given" in capsys.readouterr().err

    # Plans of earlier versions have no clauses.
    plan.write_text(json.dumps({key: value for key, value in data.items() if key != "threshold_clauses"}))
    assert run(tmp_path, model, spec, "--no-verify", "--plan", str(plan))[0] == 0
    assert run(tmp_path, model, "choose-blocks", "--no-verify", "--plan", str(plan))[0] == 1
    assert "the plan was saved with skip-scores, and --sparsify has choose-blocks;" in capsys.readouterr().err
    plan.write_text(json.dumps(data | {"threshold_clauses": [1]}))
    assert run(tmp_path, model, spec, "--no-verify", "--plan", str(plan))[0] == 1
    assert "has threshold_clauses [1], expected a list of strings" in capsys.readouterr().err

    patterns = tmp_path / "patterns.json"
    assert run(tmp_path, model, "radial(tokens=16)", "--no-verify", "--save-plan", str(patterns))[0] == 0
    for other in ("skip-scores", "radial(tokens=16);skip-scores"):
        assert run(tmp_path, model, other, "--no-verify", "--plan", str(patterns))[0] == 1
        assert "the plan has patterns of --sparsify that are not those given" in capsys.readouterr().err
    plain = tmp_path / "plain.json"
    assert cli.main([str(model), "--no-verify", "--save-plan", str(plain), "-o", str(tmp_path / "plain.onnx")]) == 0
    capsys.readouterr()
    assert run(tmp_path, model, "skip-scores", "--no-verify", "--plan", str(plain))[0] == 1
    assert "the plan was saved with no thresholds, and --sparsify has skip-scores;" in capsys.readouterr().err

    changed = data | {"skip_thresholds": {"layer0/StofAttention": 0.25, "layer1/StofAttention": 0}}
    plan.write_text(json.dumps(changed))
    again = tmp_path / "again.json"
    status, target, report = run(tmp_path, model, spec, "--no-verify", "--plan", str(plan), "--save-plan", str(again))
    assert status == 0
    assert list(thresholds_of(target).values()) == [0.25, 0.0]
    assert [row["reason"] for row in report["skip_scores"]["layers"]] == ["", "the plan says so"]
    assert json.loads(again.read_text()) == changed
    for value, message in (
        (-1, "expected 0, or a number from 1.2e-38 to 4194304"),
        (1e-50, "expected 0, or a number from 1.2e-38 to 4194304"),
        ("x", "expected 0, or a number from"),
        (True, "expected"),
    ):
        plan.write_text(json.dumps(data | {"skip_thresholds": {"layer0/StofAttention": value}}))
        assert run(tmp_path, model, spec, "--no-verify", "--plan", str(plan))[0] == 1
        assert message in capsys.readouterr().err
    plan.write_text(json.dumps(data | {"skip_thresholds": {"other": 1.0}}))
    assert run(tmp_path, model, spec, "--no-verify", "--plan", str(plan))[0] == 1
    assert "the plan has a threshold of 'other'" in capsys.readouterr().err


@pytest.mark.usefixtures("lossy")
def test_a_plan_keeps_what_was_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run needs no inputs."""
    model, plan = skip_models.encoder(tmp_path / "model.onnx"), tmp_path / "plan.json"
    options = ["--no-verify", "--min-cosine", "0.98", *inputs_options(tmp_path, 2)]
    status, target, _ = run(tmp_path, model, "skip-scores", *options, "--save-plan", str(plan))
    assert status == 0
    first = thresholds_of(target)
    assert all(first.values())
    assert run(tmp_path, model, "skip-scores", "--no-verify", "--plan", str(plan))[0] == 0
    assert thresholds_of(target) == first


REAL = pytest.mark.skipif(
    not leaves_out("StofAttention", "cpu"), reason="the library's CPU kernels do not skip by score"
)


@REAL
@pytest.mark.parametrize("padding", [False, True])
def test_a_known_structure_is_skipped(padding: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All rows attend the first key tile; the rest of the keys hardly counts."""
    model = skip_models.encoder(tmp_path / "model.onnx", (12.0, 12.0), padding=padding)
    options = inputs_options(tmp_path, 2, 2048, padding=padding)
    status, target, report = run(tmp_path, model, "skip-scores", "--no-verify", *options)
    assert status == 0
    skip = report["skip_scores"]
    assert skip["share"] > 0.4
    assert all(row["share"] > 0.4 for row in skip["layers"])
    assert all(1 - row["mass_bound"] <= row["mass_kept"] < 1 for row in skip["layers"])
    assert min(skip["cosines"].values()) >= 0.999
    # Twice: what the report says is what the file does, in another process's environment too.
    with session_environment(STOF_SKIP_SCORES="1"):
        feed = dict(np.load(tmp_path / "feed1.npz"))
        exact, skipping = (outputs_of(p, feed) for p in (model, target))
    cosines = {name: apply.CosineMeter([name]) for name in ("hidden", "pooled")}
    for (name, meter), one, other in zip(cosines.items(), exact, skipping, strict=True):
        meter.add([one], [other])
        assert meter.means()[name] == pytest.approx(skip["cosines"][name], abs=1e-5)


@REAL
def test_a_threshold_that_breaks_a_layer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Scores that differ little: a large threshold leaves out what the outputs are made of."""
    model = skip_models.encoder(tmp_path / "model.onnx", (0.5, 0.5))
    status, target, _ = run(
        tmp_path, model, "skip-scores(threshold=4194304)", "--no-verify", *inputs_options(tmp_path, 1, 2048)
    )
    assert status == 2
    assert not target.exists()
    assert "--min-cosine allows 0.999" in capsys.readouterr().err


def test_a_gate_that_measures_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = skip_models.encoder(tmp_path / "model.onnx")
    words = ["--no-verify", "--min-cosine", "0.9", *inputs_options(tmp_path, 1)]
    assert cli.main([str(model), "-o", str(tmp_path / "out.onnx"), "--sparsify", "window=64", *words]) == 1
    assert "--min-cosine is for --inputs with --sparsify skip-scores" in capsys.readouterr().err
