# SPDX-License-Identifier: Apache-2.0
"""Pattern kinds as mask expressions beside masks made from their definitions, and the facts that reports have of them."""

from __future__ import annotations

import masks
import numpy as np
import pytest

from stof.errors import ArgumentError
from stof.runtime.library import Mask
from stof.sparsify.measure import allowed_pairs, measure_pattern
from stof.sparsify.patterns import (
    BlockPattern,
    HeadCounts,
    HeadPattern,
    Pattern,
    StreamingPattern,
    StridedPattern,
    TextPattern,
    VerticalSlashPattern,
    WindowPattern,
    build_pattern,
)

SIZE = 300
HEADS = HeadCounts(8, 4)
TABLE = np.random.default_rng(3).random((4, 6, 6)) < 0.4
TABLE |= np.eye(6, dtype=bool)
TABLE_8 = np.concatenate([TABLE, ~TABLE | np.eye(6, dtype=bool)])
COLUMNS = [[0, 3, 50], [7], [], [1, 299]]
DIAGONALS = [[1, 2, 9], [], [64, 100], [5]]


def slash(columns: list[list[int]], diagonals: list[list[int]]) -> VerticalSlashPattern:
    return VerticalSlashPattern(tuple(map(tuple, columns)), tuple(map(tuple, diagonals)))


KINDS: dict[str, tuple[HeadPattern, np.ndarray]] = {
    "s2": (StridedPattern(3, 4, 16), masks.s2(4, SIZE, 3, 4, 16)),
    "s2, block 64": (StridedPattern(1, 3, 64), masks.s2(4, SIZE, 1, 3, 64)),
    "s2, block 128": (StridedPattern(1, 2, 128), masks.s2(4, SIZE, 1, 2, 128)),
    "s2, stride of many heads": (StridedPattern(2, 16, 16), masks.s2(4, SIZE, 2, 16, 16)),
    "s2, offset": (StridedPattern(2, 5, 32, offset=3), masks.s2(4, SIZE, 2, 5, 32, offset=3)),
    "s2, relative": (StridedPattern(2, 3, 16, relative=True), masks.s2(4, SIZE, 2, 3, 16, relative=True)),
    "s2, homogeneous": (StridedPattern(2, 4, 16, homogeneous=True), masks.s2(4, SIZE, 2, 4, 16, homogeneous=True)),
    "s2, dense heads": (StridedPattern(2, 4, 16, dense_heads=1), masks.s2(4, SIZE, 2, 4, 16, dense_heads=1)),
    "s2, query heads": (StridedPattern(2, 4, 16, by_query_head=True), masks.s2(8, SIZE, 2, 4, 16)),
    "s2, dense": (StridedPattern(1, 1, 16), masks.dense(4, SIZE)),
    "window": (WindowPattern(40), masks.window(4, SIZE, 40)),
    "window and sinks": (WindowPattern(40, 7), masks.window(4, SIZE, 40, 7)),
    "text": (TextPattern("q - k < 9 or k % 5 == 0"), masks.window(4, SIZE, 9) | (np.arange(SIZE) % 5 == 0)),
    "streaming": (
        StreamingPattern((True, False, False, True), 4, 30),
        np.where(np.array([1, 0, 0, 1])[:, None, None] == 1, masks.dense(4, SIZE), masks.window(4, SIZE, 30, 4)),
    ),
    "blocks": (BlockPattern(TABLE, 32), masks.blocks(TABLE, SIZE, 32)),
    "blocks of query heads": (BlockPattern(TABLE_8, 64), masks.blocks(TABLE_8, SIZE, 64)),
    "blocks of all heads": (BlockPattern(TABLE[:1], 16), masks.blocks(TABLE[:1], SIZE, 16)),
    "vertical-slash": (slash(COLUMNS, DIAGONALS), masks.vertical_slash(COLUMNS, DIAGONALS, SIZE)),
    "columns": (slash([[4]], [[]]), masks.vertical_slash([[4]], [[]], SIZE)),
    "diagonals": (slash([[]], [[64, 65]]), masks.vertical_slash([[]], [[64, 65]], SIZE)),
}


def whole(pattern: HeadPattern, heads: HeadCounts = HEADS) -> Pattern:
    return build_pattern([(None, pattern)], heads)


def wanted(kind: str) -> np.ndarray:
    return masks.to_query_heads(KINDS[kind][1] & np.tri(SIZE, dtype=bool), HEADS.H)


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_are_those_of_the_definition(kind: str) -> None:
    """By Python's evaluator and by the library's, for every pair."""
    pattern = whole(KINDS[kind][0])
    rows = np.arange(SIZE)
    mine = np.stack([allowed_pairs(pattern, h, rows, rows) for h in range(HEADS.H)])
    np.testing.assert_array_equal(mine, wanted(kind))
    library = Mask(pattern.mask.text, dict(pattern.tables)).evaluate(1, HEADS.H, SIZE, SIZE)[0]
    np.testing.assert_array_equal(library.astype(bool), wanted(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_said_of_heads_and_caches(kind: str) -> None:
    facts = measure_pattern(whole(KINDS[kind][0]))
    size = min(SIZE, KINDS[kind][0].horizon or SIZE)  # behind a table all is dense
    mask = wanted(kind)[:, :size, :size].reshape(HEADS.G, HEADS.group, size, size)
    assert facts.is_per_kv_head == (mask == mask[:, :1]).all()
    returns = [(q, k) for m in mask.reshape(-1, size, size) for q, k in zip(*np.nonzero(m[1:] & ~m[:-1]), strict=True)
               if q >= k]  # fmt: skip
    assert facts.is_cache_efficient == (not returns)
    assert 0 < facts.density <= facts.read_density <= 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_have_the_patterns_of_their_heads(kind: str, ranks: int) -> None:
    """The graph of a rank has some KV heads of the model, whose pattern is stated."""
    rows = np.arange(SIZE)
    found = []
    for rank in range(ranks):
        heads = HeadCounts(HEADS.H // ranks, HEADS.G // ranks, rank * HEADS.G // ranks, HEADS.G)
        pattern = whole(KINDS[kind][0], heads)
        found += [allowed_pairs(pattern, h, rows, rows) for h in range(heads.H)]
        assert all(len(t) <= heads.H for t in pattern.tables.values())
    np.testing.assert_array_equal(np.stack(found), wanted(kind))


def test_a_text_with_heads_on_a_rank() -> None:
    pattern = whole(TextPattern("k == q or k % 8 == h"), HeadCounts(4, 2, 2, 4))
    rows = np.arange(40)
    for h in range(4):
        mask = (rows[None] == rows[:, None]) | ((rows % 8 == 4 + h)[None] & (rows[None] <= rows[:, None]))
        np.testing.assert_array_equal(allowed_pairs(pattern, h, rows, rows), mask)


def test_the_causal_mask_is_stated_once() -> None:
    assert whole(TextPattern("k <= q and q - k < 9")).mask.text == "k <= q and q - k < 9"
    assert whole(TextPattern("q - k < 9")).mask.text == "k <= q and q - k < 9"


def test_patterns_of_distances_alone() -> None:
    kinds = {kind for kind, (pattern, _) in KINDS.items() if whole(pattern).is_of_distances}
    assert kinds == {"window", "diagonals"}
    assert not whole(TextPattern("q - k < 9 or k - q > 3 and k < 5")).is_of_distances


def test_density_is_the_share_of_causal_pairs() -> None:
    facts = measure_pattern(whole(WindowPattern(1024, 128)))
    size = 32768
    exact = sum(min(q + 1, 1024) for q in range(size)) + sum(min(128, max(0, q - 1023)) for q in range(size))
    assert facts.density == pytest.approx(exact / (size * (size + 1) / 2), rel=0.05)


def test_the_union_of_a_group_is_what_is_read() -> None:
    """Two query heads of a group with disjoint strides read twice as much as each."""
    facts = measure_pattern(whole(StridedPattern(1, 8, 16, by_query_head=True)))
    assert not facts.is_per_kv_head
    assert facts.read_density == pytest.approx(2 * facts.density, rel=0.05)


def test_some_kv_heads_only() -> None:
    pattern = build_pattern([(range(1, 3), WindowPattern(20))], HEADS)
    rows = np.arange(SIZE)
    mine = np.stack([allowed_pairs(pattern, h, rows, rows) for h in range(HEADS.H)])
    by_group = masks.dense(4, SIZE)
    by_group[1:3] = masks.window(2, SIZE, 20)
    np.testing.assert_array_equal(mine, masks.to_query_heads(by_group, 8))


def test_parts_of_the_kv_heads_and_the_rest() -> None:
    pattern = build_pattern([(range(1), WindowPattern(20)), (range(1, 3), StridedPattern(1, 4, 16))], HEADS)
    rows = np.arange(SIZE)
    mine = np.stack([allowed_pairs(pattern, h, rows, rows) for h in range(HEADS.H)])
    by_group = masks.dense(4, SIZE)
    by_group[:1] = masks.window(1, SIZE, 20)
    by_group[1:3] = masks.s2(4, SIZE, 1, 4, 16)[1:3]
    np.testing.assert_array_equal(mine, masks.to_query_heads(by_group, 8))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (TextPattern("k % 2 == 0 and q - k > 3"), "query 0 of head 0 has no key"),
        (StridedPattern(1, 4, 16, dense_heads=5), "dense_heads=5, expected up to 4, the heads of the attention"),
        (StreamingPattern((True, False), 4, 30, "heads.tsv"), "heads.tsv has 2 heads, the attention has 4 KV heads"),
        (BlockPattern(TABLE[:3], 32, "t.npz"), r"t.npz has 3 heads, expected 1, 4 \(KV heads\) or 8"),
        (slash([[1], [2]], [[1], [2]]), "has 2 heads, expected"),
    ],
)
def test_patterns_that_fit_no_head_or_leave_a_query_alone(pattern: HeadPattern, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        measure_pattern(whole(pattern))


@pytest.mark.parametrize("text", ["q - k <", "pad[b, k]", "b == 0", "q < P", "table0[k]", "lengths[b] > k", "", "True"])
def test_texts_that_are_no_pattern(text: str) -> None:
    with pytest.raises(ArgumentError, match="mask="):
        TextPattern(text)
