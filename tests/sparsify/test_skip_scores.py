# SPDX-License-Identifier: Apache-2.0
"""skip-scores through the whole optimizer: where thresholds are put, what is refused, what is compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import skip_models
import test_prompts
from onnx import helper
from skip_runs import LENGTH, inputs_options, outputs_of, run, simulate_limits, thresholds_of

from stof import cli
from stof.arguments.threshold_kinds import SKIP_SCORES, ThresholdSite
from stof.execution.session_process import session_environment
from stof.graph.index import DOMAIN
from stof.runtime.limits import leaves_out
from stof.thresholds import apply, layers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "paged_attention"))
import paged_models


@pytest.fixture(name="limits")
def simulated_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_limits(monkeypatch)


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
    assert {e.key: e.value for e in changed.metadata_props}[SKIP_SCORES.metadata].startswith("outputs change; layer0")
    onnx.checker.check_model(changed)

    assert cli.main([str(model), "-o", str(tmp_path / "exact.onnx")]) == 0
    exact = onnx.load(tmp_path / "exact.onnx")
    for node in changed.graph.node:
        kept = [a for a in node.attribute if a.name != "skip_threshold"]
        del node.attribute[:]
        node.attribute.extend(kept)
    kept_entries = [e for e in changed.metadata_props if e.key != SKIP_SCORES.metadata]
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
    assert "measures the loss has 300 keys, and thresholds are calibrated on 1024 at least" in capsys.readouterr().err
    assert not target.exists()
    status, _, report = run(tmp_path, model, "skip-scores(threshold=1)", *options)
    assert status == 0
    assert "the longest that measures the loss has 300 keys; below 1024" in report["skip_scores"]["warnings"][0]
    assert "warning: --inputs" in capsys.readouterr().out


@pytest.mark.usefixtures("limits")
def test_prompts_need_logits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Inputs do without them, also beside prompts."""
    model = skip_models.encoder(tmp_path / "model.onnx")
    prompts = test_prompts.put(tmp_path / "p.npy", skip_models.texts(2, LENGTH))
    assert run(tmp_path, model, "skip-scores", "--prompts", str(prompts))[0] == 1
    assert "needs a model with output 'logits', which this one has not; --inputs FILE" in capsys.readouterr().err
    options = ["--prompts", str(prompts), *inputs_options(tmp_path, 1)]
    status, _, report = run(tmp_path, model, "skip-scores(threshold=0.001)", *options)
    assert status == 0
    assert report["loss"] is None
    assert report["skip_scores"]["measure"] == "cosine"


@pytest.mark.usefixtures("limits")
def test_kernels_of_some_operators_skip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where none of the model's attentions can skip, that is an error with the reason."""
    monkeypatch.setattr(layers, "leaves_out", lambda op, target, kind: op == "StofCachedAttention")
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
        monkeypatch.setattr(module, "leaves_out", lambda op, target, kind: target == "cuda")
    model = skip_models.encoder(tmp_path / "model.onnx")
    options = ["--target", "cuda", *inputs_options(tmp_path, 1)]
    status, target, report = run(tmp_path, model, "skip-scores(threshold=0.125)", *options, "--force")
    assert status == 0
    assert list(thresholds_of(target).values()) == [0.125, 0.125]
    assert "runs on the CPU compute every key tile of StofAttention" in report["skip_scores"]["warnings"][0]
    assert run(tmp_path, model, "skip-scores", *options)[0] == 1
    assert "thresholds are calibrated in runs on the CPU, whose kernels" in capsys.readouterr().err


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

    def put(model: onnx.ModelProto, thresholds: layers.Thresholds) -> onnx.ModelProto:
        copy = layers.put_thresholds(model, thresholds)
        node = next(n for n in copy.graph.node if n.domain == DOMAIN and n.op_type == "StofAttention")
        next(a for a in node.attribute if a.name == "scale").f *= 1.001
        return copy

    monkeypatch.setattr(apply, "put_thresholds", put)
    status, target, _ = run(tmp_path, skip_models.encoder(tmp_path / "model.onnx"), "skip-scores(threshold=1)")
    assert status == 2
    assert not target.exists()
    assert "is not that of the verified model under STOF_SKIP_SCORES=0" in capsys.readouterr().err


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

    found = layers.find_layers(model, parse_spec("skip-scores(threshold=4,layers=0)"), SKIP_SCORES, CPU)
    assert [(x.name, x.layer, x.reason) for x in found] == [("x", 0, ""), ("x_2", 1, "--sparsify leaves it exact")]
    changed = layers.put_thresholds(model, {ThresholdSite(SKIP_SCORES, "x"): 4.0})
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


@pytest.mark.skipif(leaves_out("StofAttention", "cpu"), reason="the library's CPU kernels skip by score")
def test_a_library_that_skips_nothing_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, _ = run(tmp_path, skip_models.encoder(tmp_path / "model.onnx"), "skip-scores(threshold=1)")
    assert status == 1
    assert "no attention kernel of this library skips by score for --target cpu" in capsys.readouterr().err
