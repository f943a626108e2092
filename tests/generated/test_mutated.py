# SPDX-License-Identifier: Apache-2.0
"""Changed exports, and two that other tools are known to fuse wrongly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import build
from stof.pipeline import optimize

from .judge import session
from .mutate import MUTATIONS
from .mutated import mutant_report, run_mutants

COUNT = 198
SEED = 5


def test_optimized_models_follow_small_changes() -> None:
    outcomes = run_mutants(SEED, COUNT)
    text = mutant_report(outcomes)
    print(f"seed {SEED}\n{text}")
    assert not [o for o in outcomes if o.state == "wrong"], text
    followed = [o for o in outcomes if o.state == "followed"]
    assert len(followed) > 0.8 * COUNT, text
    # The changes are felt, and every kind of them is made and followed.
    assert sum(o.matters for o in followed) > COUNT / 2, text
    assert {o.change.split(":")[0] for o in followed} >= {m.__name__ for m in MUTATIONS} - {"triangle"}, text


@pytest.mark.parametrize("exporter", ["dynamo.eager", "dynamo.sdpa", "torchscript.eager", "torchscript.sdpa"])
@pytest.mark.parametrize("length", [16, 17, 90])
def test_mistral_keeps_its_window(tmp_path: Path, exporter: str, length: int) -> None:
    _follows(tmp_path, f"mistral.{exporter}", length, "k <= q", "q - k <=")


@pytest.mark.parametrize("exporter", ["dynamo.eager", "dynamo.sdpa"])
@pytest.mark.parametrize("length", [16, 17, 90])
def test_embeddinggemma_sees_both_directions(tmp_path: Path, exporter: str, length: int) -> None:
    masks = _follows(tmp_path, f"embeddinggemma.{exporter}", length, "abs(q - k) <=")
    assert not any("k <= q" in m for m in masks)


def _follows(folder: Path, name: str, length: int, *words: str) -> list[str]:
    """Optimizes a stored graph, compares at a length with padding on either side; some mask holds the words."""
    path = folder / "model.onnx"
    onnx.save(build.fill(build.load_graph(f"narrow/{name}"), seed=2), str(path))
    report = optimize(path)
    assert report.sites
    assert all(s.replaced for s in report.sites), [s.reason for s in report.sites]
    masks = [s.mask for s in report.sites]
    assert any(all(w in m for w in words) for m in masks), masks
    rng = np.random.default_rng(length)
    pad = np.ones((3, length), np.int64)
    pad[1, : length // 3] = 0
    pad[2, length - length // 4 :] = 0
    given = {"input_ids": rng.integers(3, 90, pad.shape), "attention_mask": pad}
    wanted = session(onnx.load(str(path))).run(None, given)
    found = session(onnx.load(str(report.output)), library=True).run(None, given)
    for a, b in zip(wanted, found, strict=True):
        span = float(np.ptp(np.nan_to_num(a)))
        np.testing.assert_allclose(b, a, atol=1e-5 * span, rtol=0)
    return masks
