# SPDX-License-Identifier: Apache-2.0
"""skip-scores on trained models that have to find a record far away: accuracy, the share that is skipped, and the gate.

Texts have 2048 bytes, and 4096 with STOF_TEST_ALL=1. ``models/README.md`` says what the models are.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from skip_runs import run, thresholds_of
from trained_runs import ALL, COUNT, LENGTH, NAMES, evaluate, measured_options, session, texts_of, write_model

import stof
from stof.arguments.threshold_kinds import SKIP_SCORES, ThresholdSite
from stof.runtime.limits import leaves_out
from stof.thresholds.layers import put_thresholds

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "models" / "trained"))
from retrieval_models import build_model
from retrieval_texts import draw_documents, draw_votes, pad_documents

LARGEST = 4194304.0  # threshold that the option takes
REAL = pytest.mark.skipif(
    not leaves_out("StofAttention", "cpu"), reason="the library's CPU kernels do not skip by score"
)


def windowed(name: str, width: int, length: int) -> onnx.ModelProto:
    """The model whose rows attend the keys that are less than ``width`` away alone."""
    model = build_model(name)
    positions = np.arange(length)
    is_far = np.abs(positions[:, None] - positions) >= width
    model.graph.initializer.append(numpy_helper.from_array(np.where(is_far, np.float32(-1e9), np.float32(0)), "far"))
    for i, node in reversed(list(enumerate(model.graph.node))):
        if node.op_type == "Softmax":
            near = f"{node.input[0]}_near"
            model.graph.node.insert(i, helper.make_node("Add", [node.input[0], "far"], [near]))
            node.input[0] = near
    onnx.checker.check_model(model)
    return model


def width_of_share(name: str, share: float, length: int) -> int:
    """The narrowest window that keeps this share of the model's pairs."""
    low, high = 1, length
    while low < high:
        width = (low + high) // 2
        causal = np.minimum(np.arange(length) + 1, width).sum()
        kept = causal / (length * (length + 1) / 2) if name == "prompts" else (2 * causal - length) / length**2
        low, high = (low, width) if kept >= share else (width + 1, high)
    return low


def test_a_window_has_the_share_that_is_asked_for() -> None:
    """The formulas of shares, beside a count of pairs."""
    distances = np.abs(np.arange(90)[:, None] - np.arange(90))
    for name, pairs in (("prompts", np.tri(90, dtype=bool)), ("documents", np.ones((90, 90), bool))):
        for share in (0.07, 0.3, 0.55, 1.0):
            width = width_of_share(name, share, 90)
            kept = [((distances < w) & pairs).sum() / pairs.sum() for w in (width - 1, width)]
            assert kept[0] < share <= kept[1]


@pytest.mark.parametrize("name", NAMES)
def test_optimized_models_find_records(name: str, tmp_path: Path) -> None:
    """Of any length, at any depth, and beside padding."""
    path = write_model(tmp_path, name)
    target = tmp_path / "optimized.onnx"
    report = stof.optimize(path, target)
    assert report is not None
    assert sum(n.op_type == "StofAttention" for n in onnx.load(target).graph.node) == 2
    for length in (128, 1024, 4096) if ALL else (128, 1024):
        texts = texts_of(name, length, COUNT, seed=length)
        assert evaluate(target, name, texts)[0] >= 0.98
    depths = np.concatenate([t.depths for t in texts])
    assert depths.min() < 0.2
    assert depths.max() > 0.8
    if name == "documents":
        ids, mask, answers = pad_documents([draw_documents(np.random.default_rng(2), 5, n) for n in (200, 77, 333)])
        found = session(target).run(["logits"], {"input_ids": ids, "attention_mask": mask})[0].argmax(-1)
        assert (found == answers).all(1).mean() >= 0.98


@REAL
@pytest.mark.parametrize("name", NAMES)
def test_calibrated_thresholds_keep_the_accuracy(name: str, tmp_path: Path) -> None:
    """At least 40 % of the pairs are skipped; a window that keeps as many finds much less."""
    path = write_model(tmp_path, name)
    given = texts_of(name, LENGTH, 8 if ALL else 2, seed=1)
    options = ["--no-verify", *measured_options(tmp_path, name, given)]
    status, target, report = run(tmp_path, path, "skip-scores", *options)
    assert status == 0
    assert all(row["is_calibrated"] for row in report["skip_scores"]["layers"])

    dense = tmp_path / "dense.onnx"
    stof.optimize(path, dense, verify=False)
    texts = texts_of(name, LENGTH, COUNT, seed=5)
    exact, nothing = evaluate(dense, name, texts)
    accuracy, share = evaluate(target, name, texts)
    assert nothing == 0
    assert exact >= 0.98
    assert accuracy >= exact - 0.005
    assert share >= 0.4
    assert share == pytest.approx(report["skip_scores"]["share"], abs=0.05)

    width = width_of_share(name, 1 - share, LENGTH)
    assert evaluate(windowed(name, LENGTH, LENGTH), name, texts[:4])[0] >= 0.98
    assert evaluate(windowed(name, width, LENGTH), name, texts[:20])[0] <= exact - 0.2


@REAL
@pytest.mark.parametrize("name", NAMES)
def test_no_threshold_loses_a_single_record(name: str, tmp_path: Path) -> None:
    """The tile with a row's largest score is always computed, whatever the threshold: that is where the record is."""
    spec = f"skip-scores(threshold={LARGEST:.0f})"
    status, target, _ = run(tmp_path, write_model(tmp_path, name), spec, "--no-verify")
    assert status == 0
    accuracy, share = evaluate(target, name, texts_of(name, 4096 if ALL else 1024, COUNT, seed=6))
    assert accuracy >= 0.99
    assert share >= 0.3


@REAL
def test_a_threshold_that_loses_votes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What several records say together breaks: rows keep the tiles that raise their largest score, and lose the others."""
    path = write_model(tmp_path, "documents")
    rng = np.random.default_rng(7)
    draw = partial(draw_votes, rng, 1, 1024)
    options = ["--no-verify", *measured_options(tmp_path, "documents", [draw() for _ in range(4)])]
    spec = f"skip-scores(threshold={LARGEST:.0f})"
    status, target, _ = run(tmp_path, path, spec, *options)
    assert status == 2
    assert not target.exists()
    assert "--sparsify changes outputs too much: the cosine of output 'logits'" in capsys.readouterr().err

    texts = [draw() for _ in range(200 if ALL else 60)]
    dense = tmp_path / "dense.onnx"
    stof.optimize(path, dense, verify=False)
    exact, _ = evaluate(dense, "documents", texts)
    layers = [ThresholdSite(SKIP_SCORES, n.name) for n in onnx.load(dense).graph.node if n.op_type == "StofAttention"]
    broken, _ = evaluate(put_thresholds(onnx.load(dense), dict.fromkeys(layers, LARGEST)), "documents", texts)
    assert broken <= exact - 0.15

    status, target, _ = run(tmp_path, path, "skip-scores", *options)
    assert status == 0
    assert 0 < max(thresholds_of(target).values()) < LARGEST
    calibrated, share = evaluate(target, "documents", texts)
    assert calibrated >= exact - 0.05
    assert share >= 0.4


@REAL
def test_a_window_that_loses_records_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Static patterns pass the same gate. This one keeps as many pairs as calibrated thresholds do, 38 %."""
    path = write_model(tmp_path, "prompts")
    options = ["--no-verify", *measured_options(tmp_path, "prompts", texts_of("prompts", 2048, 2, seed=8))]
    status, target, report = run(tmp_path, path, "window=435,sink=8", *options)
    assert status == 2
    assert not target.exists()
    assert "--sparsify changes outputs too much: KL divergence" in capsys.readouterr().err
    assert report["loss"]["kl"] > 0.1
