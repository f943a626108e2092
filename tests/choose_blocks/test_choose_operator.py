# SPDX-License-Identifier: Apache-2.0
"""Attribute block_threshold of StofAttention in ONNX Runtime: its definition, switch and counts, values it refuses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.helpers.attention_sessions import KEY as K
from tests.helpers.attention_sessions import QUERY as Q
from tests.helpers.attention_sessions import VALUE as V
from tests.helpers.attention_sessions import draw_attention, make_session, run_switched_off
from tests.helpers.attention_sessions import run_attention as run
from tests.helpers.chosen_blocks import Chosen, attend, choose, set_levels

import stof
from stof.runtime.library import LibraryError, Op, op_limits

LIMITS = {"float32": 2e-5, "float16": 4e-3}
MASKS: dict[str, Callable[[Any, Any], Any]] = {
    "": lambda q, k: q + k >= 0,
    "k <= q": lambda q, k: k <= q,
    "k <= q and q - k < 500": lambda q, k: (k <= q) & (q - k < 500),
    "k > q + 300": lambda q, k: k > q + 300,  # own positions are forbidden
}
draw = partial(draw_attention, set_levels)
OPS = ("StofAttention", "StofCachedAttention", "StofPagedAttention")


def check(found: npt.NDArray[Any], q: Any, k: Any, v: Any, chosen: Chosen) -> None:
    moved = np.abs(found.astype(np.float64) - attend(q, k, v, chosen.kept)).max(-1)
    assert np.isfinite(moved).all()
    assert moved[~chosen.near].max(initial=0) <= LIMITS[str(q.dtype)]


@pytest.mark.parametrize("threshold", [1e-5, 0.1, 1.0])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(("S", "T"), [(128, 900), (700, 700), (300, 641), (700, 300)])
def test_outputs_are_those_of_the_definition(S: int, T: int, dtype: str, mask: str, threshold: float) -> None:
    feeds = draw(S, T, dtype)
    past = T - S if S < T else 0
    q, k = np.arange(past, past + S)[:, None], np.arange(T)
    allowed = np.asarray(MASKS[mask](q, k))
    stof.reset_skip_counts()
    found = run(feeds, mask=mask, block_threshold=threshold, query_offset=int(past > 0))
    counts = stof.skip_counts()
    chosen = choose(feeds[Q][0], feeds[K][0], allowed, threshold, position=past)
    check(found[0], feeds[Q][0], feeds[K][0], feeds[V][0], chosen)
    assert chosen.near.mean() < 0.25
    # Tiles of fewer rows than a query block are not counted where the mask forbids them.
    assert 0.9 * chosen.counted <= counts.scored <= chosen.counted
    assert 0.9 * chosen.skipped <= counts.skipped
    if mask == "":
        assert chosen.skipped <= counts.skipped <= counts.scored == chosen.counted
    if mask == "" and threshold >= 0.1 and T >= 600:
        assert counts.share > 0.15


def test_padding_left_and_right_is_in_no_pooled_key() -> None:
    S = T = 600
    feeds = draw(S, T, B=2)
    pad = np.ones((2, T), np.bool_)
    pad[0, :211] = pad[1, 390:] = False
    for b in range(2):  # what a mean would show
        feeds[K][b][:, ~pad[b]] = np.nan
    for mask in ("pad[b, k]", "k <= q and pad[b, k]"):
        stof.reset_skip_counts()
        found = run({**feeds, "pad": pad}, mask=mask, operands="pad", block_threshold=0.1)
        q, k = np.arange(S)[:, None], np.arange(T)
        allowed, counted = k <= q if "q" in mask else np.full((S, T), True), 0
        for b in range(2):
            x = {n: np.nan_to_num(feeds[n][b]) for n in (Q, K, V)}
            chosen = choose(x[Q], x[K], allowed, 0.1, pad=pad[b])
            check(found[b], x[Q], x[K], x[V], chosen)
            counted += chosen.counted
        assert 0.9 * counted <= stof.skip_counts().scored <= counted
        assert stof.skip_counts().share > 0.1


@pytest.mark.parametrize("mask", ["pad[b, k]", "k < q and pad[b, k]"])
def test_fully_masked_rows_have_the_mean(mask: str) -> None:
    """Blocks are left out, as torch's exports ask for. Rows without a key have the mean of all values, others the definition."""
    S = T = 600
    feeds = draw(S, T, B=3)
    pad = np.ones((3, T), np.bool_)
    pad[0, :211] = pad[1, 390:] = pad[2] = False
    stof.reset_skip_counts()
    found = run({**feeds, "pad": pad}, mask=mask, operands="pad", block_threshold=0.1, empty_rows="mean")
    assert stof.skip_counts().share > 0.05
    q, k = np.arange(S)[:, None], np.arange(T)
    for b in range(3):
        allowed = k < q if "q" in mask else np.full((S, T), True)
        x = {n: feeds[n][b] for n in (Q, K, V)}
        empty = ~(allowed & pad[b]).any(1)
        assert empty.any() == (b == 2 or "q" in mask)
        means = np.repeat(x[V].astype(np.float64).mean(1, keepdims=True), 2, 0)
        np.testing.assert_allclose(found[b][:, empty], np.broadcast_to(means, (4, empty.sum(), 64)), atol=2e-5)
        if b < 2:
            chosen = choose(x[Q], x[K], allowed, 0.1, pad=pad[b])
            moved = np.abs(found[b] - attend(x[Q], x[K], x[V], chosen.kept)).max(-1)
            assert moved[~chosen.near & ~empty].max(initial=0) <= LIMITS["float32"]
            assert (chosen.kept.any(-1) | empty).all()


def test_threshold_0_and_short_queries_have_the_bits_of_the_plain_node() -> None:
    feeds = draw(300, 500)
    stof.reset_skip_counts()
    np.testing.assert_array_equal(run(feeds, block_threshold=0.0), run(feeds))
    for S in (1, 16, 127):
        feeds = draw(S, 500)
        np.testing.assert_array_equal(run(feeds, block_threshold=1.0), run(feeds))
    feeds = draw(300, 500)
    np.testing.assert_array_equal(run(feeds, block_threshold=1.0, empty_rows="all", mask="k < q"),
                                  run(feeds, empty_rows="all", mask="k < q"))  # fmt: skip
    # Residue classes are no neighbours.
    feeds, mask = draw(512, 512), "(q - k) % 4 == 0"
    np.testing.assert_array_equal(run(feeds, block_threshold=1.0, mask=mask), run(feeds, mask=mask))
    assert stof.skip_counts() == stof.SkipCounts(0, 0)


def check_switch() -> None:
    """In a process with STOF_SKIP_SCORES=0."""
    feeds = draw(300, 700)
    np.testing.assert_array_equal(run(feeds, block_threshold=1.0), run(feeds))
    assert stof.skip_counts() == stof.SkipCounts(0, 0)


def test_environment_turns_choosing_off() -> None:
    feeds = draw(300, 700)
    assert (run(feeds, block_threshold=1.0) != run(feeds)).any()
    run_switched_off(check_switch)


def test_blocks_of_packed_sequences_begin_at_each_sequence() -> None:
    rng = np.random.default_rng(5)
    starts = np.array([0, 500, 590, 1190], np.int32)
    q, k, v = (rng.standard_normal((2, int(starts[-1]), 64)).astype(np.float32) for _ in range(3))
    set_levels(rng, q, k)
    feeds = {Q: q[None], K: k[None], V: v[None], "cumulative": starts}
    stof.reset_skip_counts()
    found = run(feeds, operands="cumulative_sequence_length", block_threshold=0.1)[0]
    assert stof.skip_counts().share > 0.1
    for begin, end in pairwise(starts.tolist()):
        x = [y[:, begin:end] for y in (q, k, v)]
        check(found[:, begin:end], *x, choose(x[0], x[1], np.full((end - begin,) * 2, True), 0.1))


def test_both_thresholds_of_a_node() -> None:
    feeds = draw(700, 700)
    shares = []
    for attributes in ({"block_threshold": 1e-3}, {"block_threshold": 1e-3, "skip_threshold": 50.0}):
        stof.reset_skip_counts()
        found = run(feeds, **attributes)
        assert np.isfinite(found).all()
        shares.append(stof.skip_counts())
    assert shares[0].scored == shares[1].scored == 4 * 700 * 700
    assert shares[0].skipped < shares[1].skipped


@pytest.mark.parametrize(("value", "text"), [(-1.0, "-1"), (1.5, "1.5"), (float("nan"), "nan"), (float("inf"), "inf")])
@pytest.mark.parametrize("op", OPS)
def test_wrong_values_are_refused(op: str, value: float, text: str) -> None:
    attributes: dict[str, Any] = {"block_threshold": value, "mask": "k <= q", "num_heads": 2, "kv_num_heads": 2}
    with pytest.raises(LibraryError, match=f"block_threshold is .?{text}.*expected 0 to 1"):
        Op(op, attributes)


def test_a_session_names_the_node_and_the_value() -> None:
    with pytest.raises(Exception, match=r"(?s)layer0.*block_threshold.*-2"):
        make_session("StofAttention", draw(4, 4), block_threshold=-2.0)


def test_limits_of_the_library_say_which_targets_choose() -> None:
    for op in OPS:
        targets = op_limits()[op]["targets"]
        assert targets["cpu"]["chooses_blocks"] is True
        assert ("chooses_blocks" in targets["cuda"]) == (op != "StofPagedAttention")
        assert "chooses_blocks" not in targets["tensorrt"]
    assert "chooses_blocks" not in op_limits()["StofGemm"]["targets"]["cpu"]
