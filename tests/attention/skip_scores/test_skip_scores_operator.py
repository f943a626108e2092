# SPDX-License-Identifier: Apache-2.0
"""Attribute skip_threshold of StofAttention in ONNX Runtime: its bound, its switch, its counts, values it refuses."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tests.helpers.attention_sessions import KEY as K
from tests.helpers.attention_sessions import QUERY as Q
from tests.helpers.attention_sessions import VALUE as V
from tests.helpers.attention_sessions import draw_attention, make_session, run_switched_off
from tests.helpers.attention_sessions import run_attention as run
from tests.helpers.skip_scores import attend_exactly, most_moved, set_levels

import stof
from stof.runtime.library import LibraryError, Op, op_limits

LIMITS = {"float32": 2e-5, "float16": 3e-3}
draw = partial(draw_attention, set_levels)


@pytest.mark.parametrize("threshold", [1e-6, 0.01, 0.3, 4.0, 100.0, 4194304.0])
@pytest.mark.parametrize("mask", ["", "k <= q", "k <= q and q - k < 500"])
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("S", [1, 16, 700])
def test_outputs_are_within_the_bound(S: int, dtype: str, mask: str, threshold: float) -> None:
    T = 700
    feeds = draw(S, T, dtype)
    stof.reset_skip_counts()
    found = run(feeds, mask=mask, skip_threshold=threshold, query_offset=1)
    counts = stof.skip_counts()
    q, k = np.arange(T - S, T)[:, None], np.arange(T)
    allowed = (k <= q if mask else np.full((S, T), True)) & (q - k < (500 if "500" in mask else T))
    exact = attend_exactly(feeds[Q][0], feeds[K][0], feeds[V][0], allowed)
    moved = float(np.abs(found[0].astype(np.float64) - exact).max())
    assert moved <= most_moved(threshold, feeds[V]) + LIMITS[dtype]
    assert 0 < counts.scored <= 4 * S * T
    assert counts.share == counts.skipped / counts.scored
    if S == 700 and threshold >= 0.3:  # weights of other tiles are below e^-8 of the largest
        assert counts.share > 0.2
    if S == 700 and 4 <= threshold <= 100 and dtype == "float32":
        assert moved > 2 * LIMITS[dtype], "nothing that counts was left out"


def test_threshold_0_has_the_bits_of_the_plain_node_and_counts_nothing() -> None:
    feeds = draw(300, 500)
    stof.reset_skip_counts()
    np.testing.assert_array_equal(run(feeds, skip_threshold=0.0), run(feeds))
    assert stof.skip_counts() == stof.SkipCounts(0, 0)
    assert stof.skip_counts().share == 0.0


def check_switch() -> None:
    """In a process with STOF_SKIP_SCORES=0."""
    for S in (1, 12, 300):
        feeds = draw(S, 700)
        np.testing.assert_array_equal(run(feeds, skip_threshold=20.0), run(feeds))
    assert stof.skip_counts() == stof.SkipCounts(0, 0)


def test_environment_turns_skipping_off() -> None:
    feeds = draw(300, 700)
    assert (run(feeds, skip_threshold=20.0) != run(feeds)).any()
    run_switched_off(check_switch)


def test_packed_sequences_keep_the_bound() -> None:
    rng = np.random.default_rng(5)
    starts = np.array([0, 500, 590, 900], np.int32)
    q, k, v = (rng.standard_normal((2, int(starts[-1]), 64)).astype(np.float32) for _ in range(3))
    for begin, end in pairwise(starts.tolist()):
        set_levels(rng, q[:, begin:end], k[:, begin:end])
    feeds = {Q: q[None], K: k[None], V: v[None], "cumulative": starts}
    stof.reset_skip_counts()
    found = run(feeds, operands="cumulative_sequence_length", skip_threshold=5.0)[0]
    assert stof.skip_counts().share > 0.1
    for begin, end in pairwise(starts.tolist()):
        rows = slice(begin, end)
        exact = attend_exactly(q[:, rows], k[:, rows], v[:, rows], np.full((end - begin,) * 2, True))
        assert np.abs(found[:, rows] - exact).max() <= most_moved(5.0, v[:, rows]) + 2e-5


@pytest.mark.parametrize(
    ("value", "text"), [(-1.0, "-1"), (4194305.0, "4194305"), (float("nan"), "nan"), (float("inf"), "inf")]
)
@pytest.mark.parametrize("op", ["StofAttention", "StofCachedAttention", "StofPagedAttention"])
def test_wrong_values_are_refused(op: str, value: float, text: str) -> None:
    attributes: dict[str, Any] = {"skip_threshold": value, "mask": "k <= q", "num_heads": 2, "kv_num_heads": 2}
    with pytest.raises(LibraryError, match=f"skip_threshold is .?{text}.*expected 0 to 4194304"):
        Op(op, attributes)


def test_a_session_names_the_node_and_the_value() -> None:
    with pytest.raises(Exception, match=r"(?s)layer0.*skip_threshold.*-2"):
        make_session("StofAttention", draw(4, 4), skip_threshold=-2.0)


def test_limits_of_the_library_say_which_targets_skip() -> None:
    for op in ("StofAttention", "StofCachedAttention", "StofPagedAttention"):
        targets = op_limits()[op]["targets"]
        assert targets["cpu"]["skips_scores"] is True
        assert targets["cuda"]["skips_scores"] is True
        assert "skips_scores" not in targets["tensorrt"]
    assert "skips_scores" not in op_limits()["StofGemm"]["targets"]["cpu"]
