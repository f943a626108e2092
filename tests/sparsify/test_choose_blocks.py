# SPDX-License-Identifier: Apache-2.0
"""choose-blocks through the whole optimizer: where thresholds are put, what is refused, calibration, plans and reports.

Where a test says so, kernels are simulated. tests/sparsify/test_trained_blocks.py has those that choose.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import skip_models
import test_prompts
from onnx import helper
from skip_runs import inputs_options, run, simulate_limits, simulate_loss, thresholds_of

from stof import cli
from stof.arguments.threshold_kinds import CHOOSE_BLOCKS, SKIP_SCORES, ThresholdSite
from stof.errors import ArgumentError
from stof.graph.index import DOMAIN
from stof.sparsify.sparsity import digest_of
from stof.sparsify.spec import parse_spec
from stof.targets import CPU
from stof.thresholds import apply, layers
from stof.thresholds.cosines import CosineMeter, row_cosines

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "paged_attention"))
import paged_models


@pytest.fixture(name="limits")
def simulated_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_limits(monkeypatch)


@pytest.fixture(name="lossy")
def simulated_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_loss(monkeypatch)


@pytest.mark.usefixtures("limits")
def test_an_encoder_gets_thresholds_of_both_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each kind has its own layers, attribute, metadata and part of the report."""
    model = skip_models.encoder(tmp_path / "model.onnx", (9.0, 9.0, 9.0), padding=True)
    page = tmp_path / "page.html"
    spec = "choose-blocks(threshold=0.25,layers=1:);skip-scores(threshold=0.5,layers=0:2)"
    status, target, report = run(tmp_path, model, spec, "--report", str(page))
    assert status == 0
    text = capsys.readouterr().out
    assert "skips by score in 2 of 3 attentions and chooses blocks in 2 of 3 attentions" in text.splitlines()[0]
    for line in (
        "skip by score in layer 0 to 1: c = 0.5; at most 33.33 % of a row's mass is left out",
        "every key tile in layer 2: --sparsify leaves it exact",
        "every key block in layer 0: --sparsify leaves it exact",
        "choose blocks in layer 1 to 2: c = 0.25\n",
    ):
        assert line in text
        assert line.strip().replace("'", "&#x27;") in page.read_text().replace("&#39;", "&#x27;")
    assert list(thresholds_of(target, SKIP_SCORES).values()) == [0.5, 0.5, 0.0]
    assert list(thresholds_of(target, CHOOSE_BLOCKS).values()) == [0.0, 0.25, 0.25]
    assert [row["threshold"] for row in report["skip_scores"]["layers"]] == [0.5, 0.5, 0.0]
    assert [row["threshold"] for row in report["choose_blocks"]["layers"]] == [0.0, 0.25, 0.25]
    assert all("mass_bound" not in row for row in report["choose_blocks"]["layers"])
    entries = {e.key: e.value for e in onnx.load(target).metadata_props}
    assert entries["stof_choose_blocks"] == "outputs change; layer1/StofAttention: 0.25; layer2/StofAttention: 0.25"
    assert entries["stof_skip_scores"].startswith("outputs change; layer0/StofAttention: 0.5")
    onnx.checker.check_model(onnx.load(target))


@pytest.mark.usefixtures("limits")
def test_without_the_option_nothing_is_added(tmp_path: Path) -> None:
    model = skip_models.encoder(tmp_path / "model.onnx")
    status, target, report = run(tmp_path, model, "skip-scores(threshold=0.5)", "--no-verify")
    assert status == 0
    assert set(thresholds_of(target, CHOOSE_BLOCKS).values()) == {0.0}
    assert b"block_threshold" not in target.read_bytes()
    assert report["choose_blocks"] is None


@pytest.mark.usefixtures("limits")
def test_a_decoder_over_a_cache_with_a_pattern(tmp_path: Path) -> None:
    path = test_prompts.decoder(tmp_path, strength=0.1)
    prompts = test_prompts.put(tmp_path / "prompts.npy", test_prompts.IDS)
    spec = "window=64;choose-blocks(threshold=0.01)"
    status, target, report = run(tmp_path, path, spec, "--prompts", str(prompts), "--max-kl", "100")
    assert status == 0
    assert list(thresholds_of(target, CHOOSE_BLOCKS).values()) == [pytest.approx(0.01)]
    assert [n.op_type for n in onnx.load(target).graph.node if n.domain == DOMAIN] == ["StofCachedAttention"]
    assert [row["sparsified"] for row in report["sites"]] == [True]
    chosen = report["choose_blocks"]
    assert chosen["measure"] == "kl"
    assert chosen["measured_on"] == f"2 prompts of --prompts {prompts}"
    assert report["skip_scores"] is None


@pytest.mark.usefixtures("limits")
def test_a_decoder_over_pages(tmp_path: Path) -> None:
    onnx.save(paged_models.model_of(paged_models.Shape(H=4, G=2, D=16)), tmp_path / "model.onnx")
    status, target, _ = run(tmp_path, tmp_path / "model.onnx", "choose-blocks(threshold=0.5)")
    assert status == 0
    assert list(thresholds_of(target, CHOOSE_BLOCKS).values()) == [0.5]


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("choose-blocks", [], "threshold=auto is calibrated on runs; give --prompts FILE for a model with logits"),
        ("skip-scores(threshold=1);choose-blocks", [], "threshold=auto is calibrated on runs"),
        ("choose-blocks(threshold=0.5,layers=5)", [], "layers=5 selects from 2 layers"),
        ("choose-blocks(threshold=1.5)", [], "has threshold=1.5, expected auto or a number from 1.2e-38 to 1"),
        ("choose-blocks(threshold=nan)", [], "has threshold=nan, expected auto or a number"),
        (
            "choose-blocks(threshold=0.5)",
            ["--target", "tensorrt"],
            "no attention kernel of this library chooses blocks for --target tensorrt",
        ),
        ("choose-blocks(threshold=0.5)", ["--min-cosine", "0.9"], "--min-cosine is for --inputs with --sparsify"),
    ],
)
def test_refusals(
    spec: str, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, target, _ = run(tmp_path, skip_models.encoder(tmp_path / "model.onnx"), spec, *options)
    assert status == 1
    assert message in capsys.readouterr().err
    assert not target.exists()


def test_kernels_that_skip_and_do_not_choose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit of each kind counts for it alone."""
    for module in (layers, apply):
        monkeypatch.setattr(module, "leaves_out", lambda op, target, kind: kind is SKIP_SCORES)
    model = skip_models.encoder(tmp_path / "model.onnx")
    assert run(tmp_path, model, "skip-scores(threshold=1);choose-blocks(threshold=1)", "--no-verify")[0] == 1
    assert "no attention kernel of this library chooses blocks for --target cpu" in capsys.readouterr().err
    assert run(tmp_path, model, "skip-scores(threshold=1)", "--no-verify")[0] == 0


@pytest.mark.usefixtures("limits")
def test_attentions_that_cannot_choose_have_a_reason() -> None:
    """Terms besides products, run-time masks, and fully masked rows that attend all keys."""

    def node(number: int, operands: str, mask: str = "k <= q", empty_rows: str = "mean") -> onnx.NodeProto:
        inputs = [f"{name}{number}" for name in ("q", "k", "v")] + [f"o{i}" for i in range(len(operands.split()))]
        attributes = {"mask": mask, "operands": operands, "empty_rows": empty_rows}
        return helper.make_node("StofAttention", inputs, [f"y{number}"], name=f"a{number}", domain=DOMAIN, **attributes)

    nodes = [
        node(0, ""),
        node(1, "pad", "pad[b, k] and k <= q"),
        node(2, "bias"),
        node(3, "unused relative_bias"),
        node(4, "relative_key relative_query"),
        node(5, "segment_q segment_k", "segment_q[b, q] == segment_k[b, k]"),
        node(6, "lengths", "k - lengths[b] < 9 or k <= q"),
        node(7, "", empty_rows="all"),
        node(8, "sink", ""),
    ]
    model = helper.make_model(helper.make_graph(nodes, "g", [], []))
    spec = parse_spec("choose-blocks(threshold=0.5)")
    reasons = [x.reason for x in layers.find_layers(model, spec, CHOOSE_BLOCKS, CPU)]
    terms = "its scores have terms besides products of queries and keys"
    assert reasons == [
        "",
        "",
        f"{terms} (bias)",
        f"{terms} (relative_bias)",
        f"{terms} (relative_key)",
        "its mask reads segment_k at run time",
        "its mask reads lengths at run time",
        "its fully masked rows attend all keys",
        "",
    ]
    skipping = layers.find_layers(model, parse_spec("skip-scores(threshold=0.5)"), SKIP_SCORES, CPU)
    assert not any(x.reason for x in skipping)
    alone = helper.make_model(helper.make_graph(nodes[2:4], "g", [], []))
    with pytest.raises(ArgumentError, match=r"no attention can choose blocks: its scores have terms besides products"):
        layers.find_layers(alone, spec, CHOOSE_BLOCKS, CPU)


@pytest.mark.usefixtures("lossy")
def test_calibration_of_both_kinds_on_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Simulated: each threshold gets the largest of its ladder within its part, and all together are within half."""
    model = skip_models.encoder(tmp_path / "model.onnx")
    options = ["--no-verify", "--min-cosine", "0.98", *inputs_options(tmp_path, 3)]
    status, target, report = run(tmp_path, model, "skip-scores;choose-blocks", *options)
    assert status == 0
    for kind in (SKIP_SCORES, CHOOSE_BLOCKS):
        rows = report[kind.key]["layers"]
        assert all(row["is_calibrated"] and row["threshold"] in kind.ladder for row in rows)
        assert all(row["loss"] <= 0.0025 for row in rows)  # half of 0.02 for two layers and two kinds
        assert [row["threshold"] for row in rows] == list(thresholds_of(target, kind).values())
        assert report[kind.key]["calibrated_on"].startswith("2 of 3 sets of --inputs ")
    assert min(report["choose_blocks"]["cosines"].values()) >= 0.98
    assert report["choose_blocks"]["cosines"] == report["skip_scores"]["cosines"]
    rows = report["choose_blocks"]["layers"]
    text = capsys.readouterr().out
    assert f"choose blocks in layer 0: c = {rows[0]['threshold']:g}, calibrated\n" in text
    assert f"% of the pairs skipped, 1 - cosine {rows[0]['loss']:.3g}" in text
    assert text.count("loss on 1 set of inputs: 1 - cosine of output") == 1


@pytest.mark.usefixtures("lossy")
def test_a_threshold_that_changes_too_much_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Simulated: with c = 1 scores are multiplied by 0.5."""
    model = skip_models.encoder(tmp_path / "model.onnx")
    options = ["--no-verify", *inputs_options(tmp_path, 1)]
    status, target, report = run(tmp_path, model, "choose-blocks(threshold=1)", *options)
    assert status == 2
    assert not target.exists()
    assert "--sparsify changes outputs too much: the cosine of output 'pooled'" in capsys.readouterr().err
    assert min(report["choose_blocks"]["cosines"].values()) < 0.999
    assert run(tmp_path, model, "choose-blocks(threshold=1)", *options, "--force")[0] == 0


@pytest.mark.usefixtures("limits")
def test_a_plan_keeps_both_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, plan = skip_models.encoder(tmp_path / "model.onnx"), tmp_path / "plan.json"
    spec = "choose-blocks(threshold=0.125);skip-scores(threshold=0.75,layers=0)"
    status, target, _ = run(tmp_path, model, spec, "--no-verify", "--save-plan", str(plan))
    assert status == 0
    first, data = target.read_bytes(), json.loads(plan.read_text())
    assert data["block_thresholds"] == {"layer0/StofAttention": 0.125, "layer1/StofAttention": 0.125}
    assert data["skip_thresholds"] == {"layer0/StofAttention": 0.75}
    assert run(tmp_path, model, spec, "--no-verify", "--plan", str(plan))[0] == 0
    assert target.read_bytes() == first
    assert run(tmp_path, model, "choose-blocks(threshold=0.125)", "--no-verify", "--plan", str(plan))[0] == 1
    saved = "choose-blocks(threshold=0.125); skip-scores(threshold=0.75,layers=0)"
    assert (
        f"the plan was saved with {saved}, and --sparsify has choose-blocks(threshold=0.125);"
        in capsys.readouterr().err
    )

    changed = data | {"block_thresholds": {"layer0/StofAttention": 0, "layer1/StofAttention": 2.0**-100}}
    plan.write_text(json.dumps(changed))
    status, target, report = run(tmp_path, model, spec, "--no-verify", "--plan", str(plan))
    assert status == 0
    assert list(thresholds_of(target, CHOOSE_BLOCKS).values()) == [0.0, 2.0**-100]
    assert list(thresholds_of(target, SKIP_SCORES).values()) == [0.75, 0.0]
    assert [row["reason"] for row in report["choose_blocks"]["layers"]] == ["the plan says so", ""]
    for value in (-1, 1.5, 1e-50, "x", True):
        plan.write_text(json.dumps(data | {"block_thresholds": {"layer0/StofAttention": value}}))
        assert run(tmp_path, model, spec, "--no-verify", "--plan", str(plan))[0] == 1
        assert "expected 0, or a number from 1.2e-38 to 1" in capsys.readouterr().err
    plan.write_text(json.dumps(data | {"block_thresholds": {"layer0/StofAttention": 0.5}}))
    assert run(tmp_path, model, spec, "--no-verify", "--plan", str(plan))[0] == 1
    assert "the plan has no threshold of 'layer1/StofAttention', which chooses blocks" in capsys.readouterr().err
    assert cli.main([str(model), "--no-verify", "--plan", str(plan)]) == 1


@pytest.mark.parametrize(
    ("spec", "digest"),
    [
        ("skip-scores", "f8c52719f1358c4d"),
        ("skip-scores(threshold=0.75,layers=1:)", "cf5208ad760e3fab"),
        ("skip-scores(threshold=0.5,dense_layers=0+-1);skip-scores(threshold=2,layers=0)", "dcd42c0108b99b3f"),
    ],
)
def test_plans_without_blocks_stay_valid(spec: str, digest: str) -> None:
    """Versions that knew skip-scores alone wrote these."""
    assert digest_of(None, parse_spec(spec)) == digest


def test_plans_tell_both_kinds_apart() -> None:
    skips, chooses = (
        digest_of(None, parse_spec(f"{name}(threshold=0.75)")) for name in ("skip-scores", "choose-blocks")
    )
    assert skips != chooses


@pytest.mark.usefixtures("limits")
def test_both_attributes_stand_on_one_node() -> None:
    nodes = [helper.make_node("StofAttention", ["q", "k", "v"], ["a"], name="x", domain=DOMAIN)]
    model = helper.make_model(helper.make_graph(nodes, "g", [], []))
    thresholds = {ThresholdSite(CHOOSE_BLOCKS, "x"): 0.25, ThresholdSite(SKIP_SCORES, "x"): 4.0}
    changed = layers.put_thresholds(model, thresholds).graph.node[0]
    assert {a.name: a.f for a in changed.attribute} == {"block_threshold": 0.25, "skip_threshold": 4.0}
    assert not model.graph.node[0].attribute


def test_rows_of_padding_have_no_cosine() -> None:
    """Those that ``attention_mask`` [B, S] calls padding, of outputs [B, S, N]; others count whole."""
    rng = np.random.default_rng(4)
    one, noise = rng.standard_normal((2, 2, 7, 5))
    mask = np.ones((2, 7), np.int64)
    mask[0, 4:], mask[1, :2] = 0, 0
    other = one + np.where(mask[..., None] == 0, 9.0, 0.1) * noise
    meter = CosineMeter(["hidden", "pooled"])
    meter.add([one, one[:, 0]], [other, other[:, 0]], {"attention_mask": mask})
    cosines = row_cosines(one, other).reshape(2, 7)
    assert meter.means()["hidden"] == pytest.approx(cosines[mask != 0].mean())
    assert meter.means()["hidden"] > cosines.mean() + 0.1
    assert meter.means()["pooled"] == pytest.approx(row_cosines(one[:, 0], other[:, 0]).mean())
    plain = CosineMeter(["hidden"])
    plain.add([one], [other], {"attention_mask": mask[:, :6]})
    assert plain.means()["hidden"] == pytest.approx(cosines.mean())
