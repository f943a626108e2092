# SPDX-License-Identifier: Apache-2.0
"""choose-blocks on trained models that have to find a record far away: accuracy, the share that is left out, and the gate.

``models/README.md`` says what the models are, ``trained_runs.py`` how long texts are.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from skip_runs import run, thresholds_of
from trained_runs import ALL, COUNT, LENGTH, NAMES, evaluate, measured_options, texts_of, write_model

import stof
from stof.arguments.threshold_kinds import CHOOSE_BLOCKS, SKIP_SCORES, ThresholdSite
from stof.runtime.limits import leaves_out
from stof.thresholds.layers import put_thresholds

pytestmark = pytest.mark.skipif(
    not leaves_out("StofAttention", "cpu", CHOOSE_BLOCKS), reason="the library's CPU kernels do not choose blocks"
)


@pytest.mark.parametrize("name", NAMES)
def test_calibrated_thresholds_keep_the_accuracy(name: str, tmp_path: Path) -> None:
    path = write_model(tmp_path, name)
    given = texts_of(name, LENGTH, 16 if ALL else 8, seed=1)
    # Few positions of a prompt answer: the mean over all of them hides these.
    gate = ["--max-kl", "0.01"] if name == "prompts" else []
    options = ["--no-verify", *gate, *measured_options(tmp_path, name, given)]
    status, target, report = run(tmp_path, path, "choose-blocks", *options)
    assert status == 0
    chosen = report["choose_blocks"]
    assert any(row["is_calibrated"] for row in chosen["layers"])
    for row in chosen["layers"]:
        if row["skips"]:
            assert row["share"] > 0
            assert 0 < row["mass_kept"] <= 1

    dense = tmp_path / "dense.onnx"
    stof.optimize(path, dense, verify=False)
    texts = texts_of(name, LENGTH, COUNT, seed=5)
    exact, nothing = evaluate(dense, name, texts)
    accuracy, share = evaluate(target, name, texts)
    assert nothing == 0
    assert exact >= 0.98
    assert accuracy >= exact - 0.05
    assert share >= 0.1
    assert share == pytest.approx(chosen["share"], abs=0.05)


@pytest.mark.parametrize("name", NAMES)
def test_both_kinds_are_calibrated_together(name: str, tmp_path: Path) -> None:
    """Each layer has a threshold of each kind within its part of the loss; together they leave out what either does, and more."""
    path = write_model(tmp_path, name)
    options = ["--no-verify", *measured_options(tmp_path, name, texts_of(name, LENGTH, 16 if ALL else 8, seed=1))]
    status, target, report = run(tmp_path, path, "skip-scores(threshold=auto);choose-blocks(threshold=auto)", *options)
    assert status == 0
    found = {kind: report[kind.key] for kind in (SKIP_SCORES, CHOOSE_BLOCKS)}
    allowed = 0.1 if name == "prompts" else 1e-3
    for kind, part in found.items():
        assert part["calibrated_on"]
        assert part["measured_on"]
        used = [row for row in part["layers"] if row["skips"]]
        assert used
        for row in used:
            assert row["is_calibrated"]
            assert row["threshold"] in kind.ladder
            assert row["share"] > 0
            assert row["loss"] <= 0.5 * allowed / 4  # two layers, two kinds
    assert found[SKIP_SCORES]["share"] == found[CHOOSE_BLOCKS]["share"]
    loss = report["loss"]["kl"] if name == "prompts" else 1 - min(found[SKIP_SCORES]["cosines"].values())
    assert loss <= allowed

    dense = tmp_path / "dense.onnx"
    stof.optimize(path, dense, verify=False)
    model, texts = onnx.load(dense), texts_of(name, LENGTH, COUNT, seed=5)
    sites = [ThresholdSite(kind, n) for kind in found for n in thresholds_of(target, kind)]
    chosen = {site: c for site in sites if (c := thresholds_of(target, site.kind)[site.name])}
    alone = [
        evaluate(put_thresholds(model, {site: c for site, c in chosen.items() if site.kind is kind}), name, texts)[1]
        for kind in found
    ]
    exact, _ = evaluate(dense, name, texts)
    accuracy, share = evaluate(target, name, texts)
    assert accuracy >= exact - 0.05
    assert min(alone) > 0
    assert max(alone) <= share
    assert share >= 0.4
    assert share == pytest.approx(found[SKIP_SCORES]["share"], abs=0.05)


@pytest.mark.parametrize("name", NAMES)
def test_a_threshold_that_breaks_retrieval_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """C = 1 keeps the best block of each pooled query alone: means hide the record that one query asks for."""
    path = write_model(tmp_path, name)
    options = ["--no-verify", *measured_options(tmp_path, name, texts_of(name, LENGTH, 2, seed=8))]
    status, target, report = run(tmp_path, path, "choose-blocks(threshold=1)", *options)
    assert status == 2
    assert not target.exists()
    assert "--sparsify changes outputs too much" in capsys.readouterr().err
    assert report["choose_blocks"]["share"] > 0.4

    assert run(tmp_path, path, "choose-blocks(threshold=1)", *options, "--force")[0] == 0
    accuracy, share = evaluate(target, name, texts_of(name, LENGTH, COUNT, seed=5))
    assert accuracy <= 0.9
    assert share == pytest.approx(report["choose_blocks"]["share"], abs=0.05)


def test_smaller_thresholds_leave_out_less(tmp_path: Path) -> None:
    """And the smallest one leaves the logits as they are, nearly."""
    path, dense = write_model(tmp_path, "prompts"), tmp_path / "dense.onnx"
    stof.optimize(path, dense, verify=False)
    model = onnx.load(dense)
    names = [n.name for n in model.graph.node if n.op_type == "StofAttention"]
    texts = texts_of("prompts", 1024, 4, seed=3)
    shares = []
    for c in (2.0**-120, 2.0**-8, 2.0**-4, 1.0):
        thresholds = dict.fromkeys((ThresholdSite(CHOOSE_BLOCKS, n) for n in names), c)
        shares.append(evaluate(put_thresholds(model, thresholds), "prompts", texts)[1])
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]


def test_both_kinds_leave_out_more_than_either(tmp_path: Path) -> None:
    path, dense = write_model(tmp_path, "documents"), tmp_path / "dense.onnx"
    stof.optimize(path, dense, verify=False)
    model = onnx.load(dense)
    names = [n.name for n in model.graph.node if n.op_type == "StofAttention"]
    texts = texts_of("documents", 1024, 4, seed=3)
    skips = dict.fromkeys((ThresholdSite(SKIP_SCORES, n) for n in names), 1.0)
    chooses = dict.fromkeys((ThresholdSite(CHOOSE_BLOCKS, n) for n in names), 2.0**-8)
    shares = [evaluate(put_thresholds(model, x), "documents", texts)[1] for x in (skips, chooses, skips | chooses)]
    assert 0 < max(shares[:2]) <= shares[2]


def test_the_switch_computes_every_block(tmp_path: Path) -> None:
    """Verification, which compares bits under STOF_SKIP_SCORES=0, passes for a model that leaves out blocks."""
    path = write_model(tmp_path, "prompts")
    status, target, _ = run(tmp_path, path, "choose-blocks(threshold=0.5)")
    assert status == 0
    assert set(thresholds_of(target, CHOOSE_BLOCKS).values()) == {0.5}
    assert evaluate(target, "prompts", texts_of("prompts", 512, 2, seed=3))[1] > 0
