# SPDX-License-Identifier: Apache-2.0
"""Masks at tile granularity: each tile against NumPy, and which batch rows and heads share a picture."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from stof.mask.expression import MaskExpression
from stof.mask.tile_grids import CELLS, tile_grids
from stof.runtime.library import LibraryError

Pairs = Callable[[np.ndarray, np.ndarray, int], np.ndarray]


def classes(allowed: np.ndarray, cell: int) -> tuple[str, ...]:
    """The tiles of a mask [S, T], one by one."""
    length = len(allowed)
    tiles = [[allowed[i : i + cell, j : j + cell] for j in range(0, length, cell)] for i in range(0, length, cell)]
    return tuple("".join("#" if t.all() else "+" if t.any() else "." for t in row) for row in tiles)


@pytest.mark.parametrize("length", [0, 1, 31, 33, 65, 97, 200])
@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("k <= q", lambda q, k, n: k <= q),
        ("abs(q - k) <= 9", lambda q, k, n: abs(q - k) <= 9),
        ("(q - k) % 7 == 0 or k <= 3", lambda q, k, n: ((q - k) % 7 == 0) | (k <= 3)),
        ("k < T - 5", lambda q, k, n: (k < n - 5) | (q < 0)),
        ("q < S - 5", lambda q, k, n: (q < n - 5) & (k >= 0)),
        ("q + P <= k", lambda q, k, n: q <= k),
        ("k <= q and pad[b, k]", lambda q, k, n: k <= q),
    ],
)
def test_tiles_are_those_of_the_pairs(text: str, pairs: Pairs, length: int) -> None:
    found = tile_grids(MaskExpression.parse(text), length=length)
    positions = np.arange(found.length)
    (grid,) = found.grids
    assert grid.rows == classes(pairs(positions[:, None], positions[None], found.length), found.cell)
    assert len(grid.rows) <= CELLS
    assert length in (0, found.length)


@pytest.mark.parametrize(("window", "length"), [(1, 64), (19, 256), (64, 512), (511, 4096), (10_000, 4096)])
def test_length_shows_the_window(window: int, length: int) -> None:
    assert tile_grids(MaskExpression.parse(f"k <= q and q - k <= {window}")).length == length


def test_heads_that_are_alike_share_a_grid() -> None:
    found = tile_grids(MaskExpression.parse("abs(q - k) <= (h % 2) * 8 + 1"), heads=5)
    assert [g.heads for g in found.grids] == [(0, 2, 4), (1, 3)]
    assert len({g.rows for g in found.grids}) == 2


def test_tables_by_head_and_batch_row() -> None:
    table = np.zeros((3, 2, 40, 40), bool)
    table[0, 0] = np.tri(40, dtype=bool)
    table[1, 1, :, :20] = True
    table[2] = table[0]
    mask = MaskExpression.parse("table0[b % 3, h, q, k]", {"table0": table})
    found = tile_grids(mask, {"table0": table}, heads=2, length=40)
    assert [(g.batches[:2], g.heads) for g in found.grids] == [
        ((0, 2), (0,)),
        ((0, 2), (1,)),
        ((1, 4), (0,)),
        ((1, 4), (1,)),
    ]
    for grid in found.grids:
        assert grid.rows == classes(table[grid.batches[0] % 3, grid.heads[0]], found.cell)


def test_tables_of_few_batch_rows() -> None:
    table = np.tri(16, dtype=bool)[None, None].repeat(2, 0)
    mask = MaskExpression.parse("table0[b, 0, q, k]", {"table0": table})
    found = tile_grids(mask, {"table0": table}, length=16)
    assert found.grids[0].batches == (0,)
    assert found.grids[0].rows == classes(np.tri(16, dtype=bool), 1)


def test_documents_are_an_example() -> None:
    found = tile_grids(MaskExpression.parse("segment_q[b, q] == segment_k[b, k] and k <= q"))
    (grid,) = found.grids
    assert "4 documents, for example" in found.assumed
    assert [grid.rows[i][i] for i in range(CELLS)].count(".") == 0
    assert grid.rows[-1][0] == "."
    assert grid.rows[0][-1] == "."
    lengths = tile_grids(MaskExpression.parse("k < lengths[b]"), length=64)
    assert lengths.assumed == "lengths[b] = 48, for example"
    assert lengths.grids[0].rows == ("#" * 24 + "." * 8,) * 32


def test_a_mask_of_another_size_is_refused() -> None:
    table = np.ones((1, 1, 8, 8), bool)
    mask = MaskExpression.parse("table0[0, 0, q, k]", {"table0": table})
    with pytest.raises(LibraryError):
        tile_grids(mask, {"table0": table}, length=16)


def test_many_heads_of_a_long_mask_are_bounded() -> None:
    found = tile_grids(MaskExpression.parse("q - k <= 600 * h and k <= q"), heads=64, length=4096)
    assert sum(len(g.heads) for g in found.grids) == 4
    assert found.assumed == "the first 4 of 64 heads"
