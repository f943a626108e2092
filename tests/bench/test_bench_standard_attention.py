# SPDX-License-Identifier: Apache-2.0
"""The bench of ONNX's Attention: every candidate computes the same attention, and the table has them all."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

from bench.cpu import standard_attention
from bench.cpu.standard_attention import CANDIDATES, TimedAttention

_LENGTH = 200


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda c: c.name)
def test_candidates(candidate: TimedAttention, rank: int) -> None:
    """Nodes and operator against fp64."""
    rng = np.random.default_rng(0)
    heads = [rng.standard_normal((1, 12, _LENGTH, 64)).astype(np.float32) for _ in range(3)]
    given = [x.transpose(0, 2, 1, 3).reshape(1, _LENGTH, -1) for x in heads] if rank == 3 else heads
    feed = dict(zip("qkv", given, strict=True)) | candidate.feed(_LENGTH, np.float32)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(
        candidate.model(rank).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    (found,) = session.run(None, feed)
    q, k, v = (x.astype(np.float64) for x in heads)
    i, j = np.arange(_LENGTH)[:, None], np.arange(_LENGTH)
    masks = {"causal": j <= i, "padding": j < _LENGTH * 3 // 4, "window": abs(i - j) <= 64}
    scores = np.where(masks.get(candidate.mask, True), q @ np.swapaxes(k, 2, 3) / 8, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = weights / weights.sum(-1, keepdims=True) @ v
    wanted = wanted.transpose(0, 2, 1, 3).reshape(1, _LENGTH, -1) if rank == 3 else wanted
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One row a candidate, one column a length and rank."""
    monkeypatch.setattr(standard_attention, "_LENGTHS", (64,))
    monkeypatch.setattr(standard_attention, "measure", lambda *_: dict.fromkeys((c.name for c in CANDIDATES), 0.001))
    standard_attention.main(["--seconds", "1"])
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head == "| ms | 64, rank 3 | 64, rank 4 |"
    assert [row.split(" | ")[0] for row in rows] == [f"| {c.name}" for c in CANDIDATES]
    assert all(row.count("| 1 ") == 2 for row in rows)
