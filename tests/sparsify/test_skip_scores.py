# SPDX-License-Identifier: Apache-2.0
"""skip-scores through the whole optimizer: where thresholds are put, refusals, the gates, plans and the report.

Kernels that skip are simulated where a test says so: limits state them, and a threshold scales the softmax's scores instead.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import skip_models
import test_prompts
from onnx import helper

from stof import cli
from stof.execution.session_process import session_environment
from stof.graph.index import DOMAIN, all_nodes
from stof.runtime.library import library_path
from stof.runtime.skip_counts import SkipCounts, skips_scores
from stof.skip_scores import apply, layers, runs

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "paged_attention"))
import paged_models

LENGTH = 1100  # tokens, as many as calibration asks for


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's limits state that CPU and CUDA kernels skip."""
    for module in (layers, apply):
        monkeypatch.setattr(module, "skips_scores", lambda op, target: target != "tensorrt")


@pytest.fixture
def lossy(limits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A threshold c multiplies the scores of its node by 1 - c / 2^15, and half of the pairs count as skipped."""

    def put(model: onnx.ModelProto, thresholds: Mapping[str, float]) -> onnx.ModelProto:
        copy = layers.put_thresholds(model, thresholds)
        for node in all_nodes(copy.graph.node):
            values = {a.name: a for a in node.attribute}
            if "skip_threshold" in values:
                usual = values["scale"].f or skip_models.D**-0.5
                values["scale"].f = usual * (1 - values["skip_threshold"].f / (1 << 15))
        return copy

    for module in (runs, apply):
        monkeypatch.setattr(module, "put_thresholds", put)
        monkeypatch.setattr(module, "take_skip_counts", lambda: SkipCounts(1000, 500))


def run(folder: Path, model: Path, spec: str, *options: str) -> tuple[int, Path, dict[str, Any]]:
    """Status, the file that is written, and ``sparsify`` of the report."""
    target, report = folder / "out.onnx", folder / "report.json"
    for file in (target, report):
        file.unlink(missing_ok=True)
    words = [str(model), "-o", str(target), "--json", str(report), "--sparsify", spec, *options]
    status = cli.main(words)
    return status, target, json.loads(report.read_text())["sparsify"] if report.exists() else {}


def inputs_options(folder: Path, count: int = 4, length: int = LENGTH, *, padding: bool = False) -> list[str]:
    options = []
    for i, ids in enumerate(skip_models.texts(count, length)):
        feed = {"input_ids": ids[None]} | ({"attention_mask": np.ones_like(ids[None])} if padding else {})
        np.savez(folder / f"feed{i}.npz", **feed)
        options += ["--inputs", str(folder / f"feed{i}.npz")]
    return options


def thresholds_of(path: Path) -> dict[str, float]:
    """The attribute of each of stof's attentions."""
    nodes = [n for n in onnx.load(path).graph.node if n.domain == DOMAIN and n.op_type in layers.OPS]
    return {n.name: next((a.f for a in n.attribute if a.name == "skip_threshold"), 0.0) for n in nodes}


def outputs_of(path: Path, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(library_path()))
    made = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return list(made.run(None, feed))


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("padding", [False, True])
def test_an_encoder_gets_thresholds(padding: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Attention without a mask, or with padding alone. Nothing but attributes and metadata is added."""
    model = skip_models.encoder(tmp_path / "model.onnx", (9.0, 9.0, 9.0), padding=padding)
    spec = "skip-scores(threshold=0.5,layers=1:);skip-scores:threshold=3,layers=0,dense_layers=2"
    status, target, report = run(tmp_path, model, spec)
    assert status == 0
    text = capsys.readouterr().out
    assert "OUTPUTS CHANGE: --sparsify skips by score in 3 of 3 attentions" in text.splitlines()[0]
    assert "skip by score in layer 0: c = 3; at most 75.00 % of a row's mass is left out" in text
    assert "skip by score in layer 1 to 2: c = 0.5; at most 33.33 %" in text
    assert "loss: not measured; --prompts FILE or --inputs FILE measures it" in text
    assert "verified: 3 sites against fp64" in text
    assert report["outputs_change"]
    assert [row["threshold"] for row in report["skip_scores"]["layers"]] == [3, 0.5, 0.5]
    found = thresholds_of(target)
    assert list(found.values()) == [3, 0.5, 0.5]
    assert [row["node"] for row in report["skip_scores"]["layers"]] == list(found)
    changed = onnx.load(target)
    assert {e.key: e.value for e in changed.metadata_props}[layers.METADATA].startswith("outputs change; layer0")
    onnx.checker.check_model(changed)

    assert cli.main([str(model), "-o", str(tmp_path / "exact.onnx")]) == 0
    exact = onnx.load(tmp_path / "exact.onnx")
    for node in changed.graph.node:
        kept = [a for a in node.attribute if a.name != "skip_threshold"]
        del node.attribute[:]
        node.attribute.extend(kept)
    kept_entries = [e for e in changed.metadata_props if e.key != layers.METADATA]
    del changed.metadata_props[:]
    changed.metadata_props.extend(kept_entries)
    assert changed == exact


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize(
    ("spec", "expected"), [("skip-scores(threshold=2)", [0.0]), ("window=64;skip-scores(threshold=2)", [1.0])]
)
def test_a_decoder_over_a_cache(spec: str, expected: list[float], tmp_path: Path) -> None:
    """Alone, and with a pattern: the loss is measured on prompts and in decoding."""
    path = test_prompts.decoder(tmp_path, strength=0.1)
    prompts = test_prompts.put(tmp_path / "prompts.npy", test_prompts.IDS)
    status, target, report = run(tmp_path, path, spec, "--prompts", str(prompts), "--max-kl", "100")
    assert status == 0
    assert list(thresholds_of(target).values()) == [2]
    assert [n.op_type for n in onnx.load(target).graph.node if n.domain == DOMAIN] == ["StofCachedAttention"]
    assert [float(row["sparsified"]) for row in report["sites"]] == expected * len(report["sites"])
    assert bool(report["sites"]) == ("window" in spec)
    skip = report["skip_scores"]
    assert skip["measure"] == "kl"
    assert skip["measured_on"] == f"2 prompts of --prompts {prompts}"
    assert "300 keys; below 1024" in skip["warnings"][0]
    assert (report["loss"]["tokens"], report["decode_loss"]["tokens"]) == (600, 32)
    assert skip["layers"][0]["loss"] is not None


@pytest.mark.usefixtures("limits")
def test_a_decoder_over_pages(tmp_path: Path) -> None:
    onnx.save(paged_models.model_of(paged_models.Shape(H=4, G=2, D=16)), tmp_path / "model.onnx")
    status, target, report = run(tmp_path, tmp_path / "model.onnx", "skip-scores(threshold=2)")
    assert status == 0
    assert list(thresholds_of(target).values()) == [2]
    assert report["skip_scores"]["layers"][0]["node"].endswith("StofPagedAttention")


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (
            "skip-scores",
            [],
            "threshold=auto is calibrated on runs; give --prompts FILE for a model with logits, --inputs",
        ),
        ("skip-scores(threshold=2,layers=5)", [], "layers=5 selects from 2 layers"),
        (
            "skip-scores(threshold=2)",
            ["--target", "tensorrt"],
            "no attention kernel of this library skips by score for",
        ),
        (
            "skip-scores(threshold=2)",
            ["--min-cosine", "0.9"],
            "--min-cosine is for --inputs with --sparsify skip-scores",
        ),
        ("skip-scores(threshold=2)", ["--min-cosine", "1.5"], "number from 0 to 1"),
        ("skip-scores(threshold=2)", ["--force"], "--force is for --prompts and --sparse-mlp"),
    ],
)
def test_refusals(
    spec: str, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, target, _ = run(tmp_path, skip_models.encoder(tmp_path / "model.onnx"), spec, *options)
    assert status == 1
    assert message in capsys.readouterr().err
    assert not target.exists()


@pytest.mark.usefixtures("limits")
def test_short_inputs_prove_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Calibration refuses them, a stated threshold is warned of."""
    model = skip_models.encoder(tmp_path / "model.onnx")
    options = inputs_options(tmp_path, length=300)
    status, target, _ = run(tmp_path, model, "skip-scores", *options)
    assert status == 1
    assert "the longest has 300 keys, and thresholds are calibrated on 1024 at least" in capsys.readouterr().err
    assert not target.exists()
    status, _, report = run(tmp_path, model, "skip-scores(threshold=1)", *options)
    assert status == 0
    assert "the longest has 300 keys; below 1024" in report["skip_scores"]["warnings"][0]
    assert "warning: --inputs" in capsys.readouterr().out


@pytest.mark.usefixtures("limits")
def test_prompts_need_logits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Inputs do without them, also beside prompts."""
    model = skip_models.encoder(tmp_path / "model.onnx")
    prompts = test_prompts.put(tmp_path / "p.npy", skip_models.texts(2, LENGTH))
    assert run(tmp_path, model, "skip-scores", "--prompts", str(prompts))[0] == 1
    assert "needs a model with output 'logits', which this one has not; --inputs FILE" in capsys.readouterr().err
    options = ["--prompts", str(prompts), *inputs_options(tmp_path, 1)]
    status, _, report = run(tmp_path, model, "skip-scores(threshold=1)", *options)
    assert status == 0
    assert report["loss"] is None
    assert report["skip_scores"]["measure"] == "cosine"


@pytest.mark.usefixtures("limits")
def test_kernels_of_some_operators_skip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where none of the model's attentions can skip, that is an error with the reason."""
    monkeypatch.setattr(layers, "skips_scores", lambda op, target: op == "StofCachedAttention")
    status, target, _ = run(tmp_path, skip_models.encoder(tmp_path / "model.onnx"), "skip-scores(threshold=2)")
    assert status == 1
    expected = "no attention can skip by score: no kernel of StofAttention skips by score on target cpu"
    assert expected in capsys.readouterr().err
    assert not target.exists()


@pytest.mark.usefixtures("limits")
def test_the_cpu_measures_for_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A loss that the CPU's kernels cannot show is warned of, and nothing is calibrated on them."""
    for module in (layers, apply):
        monkeypatch.setattr(module, "skips_scores", lambda op, target: target == "cuda")
    model = skip_models.encoder(tmp_path / "model.onnx")
    options = ["--target", "cuda", *inputs_options(tmp_path, 1)]
    status, target, report = run(tmp_path, model, "skip-scores(threshold=2)", *options)
    assert status == 0
    assert list(thresholds_of(target).values()) == [2, 2]
    assert "runs on the CPU compute every key tile of StofAttention" in report["skip_scores"]["warnings"][0]
    assert run(tmp_path, model, "skip-scores", *options)[0] == 1
    assert "thresholds are calibrated in runs on the CPU, whose kernels" in capsys.readouterr().err


@pytest.mark.usefixtures("lossy")
def test_a_threshold_that_changes_too_much_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Simulated: c = 2^14 halves the scores, which tell the mark from other tokens."""
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
    assert all(row["share"] == 0.5 for row in rows)
    assert [row["threshold"] for row in rows] == list(thresholds_of(target).values())
    assert skip["calibrated_on"].startswith("3 of 5 sets of --inputs ")
    assert skip["measured_on"].startswith("2 of 5 sets of --inputs ")
    assert len(rows) < skip["runs"] <= 5 * len(rows) + len(rows)
    assert min(skip["cosines"].values()) >= 0.98
    text = capsys.readouterr().out
    assert f"c = {rows[0]['threshold']:g}, calibrated; at most" in text
    assert "loss on 2 sets of inputs: cosine of output" in text
    assert "OUTPUTS CHANGE: --sparsify skips by score in 2 of 2 attentions" in page.read_text()
    assert "alone: 50.00 % of the pairs skipped" in page.read_text()

    # The next power of 2 would lose more than the part of some layer.
    wider = f"skip-scores(threshold={2 * max(row['threshold'] for row in rows)})"
    _, _, report = run(tmp_path, model, wider, *options)
    assert max(row["loss"] for row in report["skip_scores"]["layers"]) > 0.005


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
    for other in ("skip-scores(threshold=0.5)", "window=64"):
        assert run(tmp_path, model, other, "--no-verify", "--plan", str(plan))[0] == 1
        assert "the plan has patterns of --sparsify that are not those given" in capsys.readouterr().err
    assert cli.main([str(model), "--no-verify", "--plan", str(plan)]) == 1

    changed = data | {"skip_thresholds": {"layer0/StofAttention": 0.25, "layer1/StofAttention": 0}}
    plan.write_text(json.dumps(changed))
    again = tmp_path / "again.json"
    status, target, report = run(tmp_path, model, spec, "--no-verify", "--plan", str(plan), "--save-plan", str(again))
    assert status == 0
    assert list(thresholds_of(target).values()) == [0.25, 0.0]
    assert [row["reason"] for row in report["skip_scores"]["layers"]] == ["", "the plan says so"]
    assert json.loads(again.read_text()) == changed
    for value, message in (
        (-1, "expected a number from 0 to 4194304"),
        ("x", "expected a number from 0"),
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


@pytest.mark.usefixtures("limits")
def test_dry_runs_calibrate_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, plan = skip_models.encoder(tmp_path / "model.onnx"), tmp_path / "plan.json"
    options = ["--dry-run", "--save-plan", str(plan), *inputs_options(tmp_path, 1)]
    status, target, report = run(tmp_path, model, "skip-scores", *options)
    assert status == 0
    assert not target.exists()
    assert "skip by score in layer 0 to 1: calibrated where a model is written" in capsys.readouterr().out
    assert report["skip_scores"]["runs"] == 0
    assert "skip_thresholds" not in json.loads(plan.read_text())


def test_thresholds_that_change_the_rewrite_are_found(
    limits: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With skipping off the file has to give the bits of the verified model."""

    def put(model: onnx.ModelProto, thresholds: Mapping[str, float]) -> onnx.ModelProto:
        copy = layers.put_thresholds(model, thresholds)
        node = next(n for n in copy.graph.node if n.domain == DOMAIN and n.op_type == "StofAttention")
        next(a for a in node.attribute if a.name == "scale").f *= 1.001
        return copy

    monkeypatch.setattr(apply, "put_thresholds", put)
    status, target, _ = run(tmp_path, skip_models.encoder(tmp_path / "model.onnx"), "skip-scores(threshold=1)")
    assert status == 2
    assert not target.exists()
    assert "is not that of the verified one under STOF_SKIP_SCORES=0" in capsys.readouterr().err


def test_an_attention_of_two_nodes_is_one_layer(limits: None) -> None:
    """Fully masked rows that attend by a weaker mask are a second node, with the same operands."""
    make = helper.make_node
    nodes = [
        make("StofAttention", ["q0", "k0", "v0"], ["a"], name="x", domain=DOMAIN),
        make("StofAttention", ["q0", "k0", "v0", "m"], ["b"], name="x_2", domain=DOMAIN),
        make("StofAttention", ["q1", "k0", "v0"], ["c"], name="x", domain=DOMAIN),
    ]
    model = helper.make_model(helper.make_graph(nodes, "g", [], []))
    from stof.sparsify.spec import parse_spec
    from stof.targets import CPU

    found = layers.find_layers(model, parse_spec("skip-scores(threshold=4,layers=0)"), CPU)
    assert [(x.name, x.layer, x.reason) for x in found] == [("x", 0, ""), ("x_2", 1, "--sparsify leaves it exact")]
    changed = layers.put_thresholds(model, {"x": 4.0})
    assert [[a.f for a in n.attribute] for n in changed.graph.node] == [[4.0], [4.0], []]


def test_log_sum_exp_of_layers(tmp_path: Path, limits: None) -> None:
    """The outputs by which the mass that is kept is measured, against fp64."""
    path = skip_models.encoder(tmp_path / "model.onnx", (2.0, 3.0))
    assert cli.main([str(path), "-o", str(tmp_path / "out.onnx"), "--no-verify"]) == 0
    model = onnx.load(tmp_path / "out.onnx")
    names = layers.add_lse_outputs(model, ["layer0/StofAttention"])
    onnx.save(model, tmp_path / "lse.onnx")
    ids = skip_models.texts(2, 70)
    found = outputs_of(tmp_path / "lse.onnx", {"input_ids": ids})
    stored = {t.name: onnx.numpy_helper.to_array(t).astype(np.float64) for t in onnx.load(path).graph.initializer}
    x = stored["table"][ids]
    q, k = ((x @ stored[f"{n}0"]).reshape(2, 70, skip_models.H, -1).swapaxes(1, 2) for n in "qk")
    scores = q @ k.swapaxes(2, 3) * stored["scale"]
    expected = np.log(np.exp(scores).sum(-1))
    np.testing.assert_allclose(found[-1], expected, atol=1e-4)
    assert list(names) == ["layer0/StofAttention"]


def test_sessions_have_their_own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process says does not count, and it stays as it is."""
    from stof.execution import session_process

    monkeypatch.setenv("STOF_SKIP_SCORES", "0")
    seen = []
    start = session_process.subprocess.Popen

    def popen(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["env"]["STOF_SKIP_SCORES"])
        return start(*args, **kwargs)

    monkeypatch.setattr(session_process.subprocess, "Popen", popen)
    with session_environment(STOF_SKIP_SCORES="1"):
        session_process.take_skip_counts()
        with session_environment(OTHER="x"):
            session_process.take_skip_counts()
    session_process.take_skip_counts()
    assert seen == ["1", "1", "0"]
    session_process.end_process()


REAL = pytest.mark.skipif(
    not skips_scores("StofAttention", "cpu"), reason="the library's CPU kernels do not skip by score"
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


@pytest.mark.skipif(skips_scores("StofAttention", "cpu"), reason="the library's CPU kernels skip by score")
def test_a_library_that_skips_nothing_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, _ = run(tmp_path, skip_models.encoder(tmp_path / "model.onnx"), "skip-scores(threshold=1)")
    assert status == 1
    assert "no attention kernel of this library skips by score for --target cpu" in capsys.readouterr().err
