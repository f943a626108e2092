# SPDX-License-Identifier: Apache-2.0
"""Drawings of the masks of a model, for people: tiles, and what was assumed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from stof.mask.site import AttentionSite, LiftedMask, tables_of
from stof.mask.tile_grids import HeadGrid, tile_grids
from stof.runtime.library import LibraryError

_MOST_MASKS = 24
_MOST_GRIDS = 4  # of one mask
_MOST_NUMBERS = 3  # of heads, in a label


@dataclass(frozen=True)
class MaskDrawing:
    """A mask as grids of tiles.

    Attributes:
        length: S = T of the grids.
        grids: for each group of heads that are alike, its label and its rows of tiles (:class:`HeadGrid`).
        note: what the grids assume, and what they leave out.
    """

    length: int
    grids: tuple[tuple[str, tuple[str, ...]], ...]
    note: str


def draw_masks(sites: Iterable[tuple[AttentionSite, LiftedMask]]) -> dict[str, MaskDrawing]:
    """A drawing of each distinct mask, by its text, in the order of the graph; at most 24.

    Masks that cannot be evaluated at S = T are left out.
    """
    drawings: dict[str, MaskDrawing] = {}
    tried: set[str] = set()
    for site, mask in sites:
        text = mask.expression.text
        if text not in tried and len(drawings) < _MOST_MASKS:
            tried.add(text)
            with suppress(LibraryError):  # a picture is decoration; a mask of fixed size may not stretch to its length
                drawings[text] = _draw(site, mask)
    return drawings


def _draw(site: AttentionSite, mask: LiftedMask) -> MaskDrawing:
    fixed = site.dims[3].constant if site.dims[2] == site.dims[3] else 0
    tiling = tile_grids(mask.expression, tables_of(mask), site.num_heads, fixed or 0)
    several = len(tiling.grids) > 1
    shown = tiling.grids[:_MOST_GRIDS]
    notes = [
        f"a cell is {tiling.cell} × {tiling.cell} pairs" if tiling.cell > 1 else "a cell is one pair",
        tiling.assumed,
    ]
    if mask.expression.without_padding() != mask.expression:
        notes.append("padding is left out")
    if mask.expression.without_padding().vectors:
        notes.append("what the mask reads in a run decides which other tiles are skipped")
    if omitted_count := len(tiling.grids) - len(shown):
        notes.append(f"{omitted_count} more pattern{'' if omitted_count == 1 else 's'} of heads")
    grids = tuple((_label(g) if several else "", g.rows) for g in shown)
    return MaskDrawing(tiling.length, grids, "; ".join(filter(None, notes)))


def _label(grid: HeadGrid) -> str:
    rows = f"batch row {_numbers(grid.batches)}, " if grid.batches[0] else ""
    return f"{rows}head{'' if len(grid.heads) == 1 else 's'} {_numbers(grid.heads)}"


def _numbers(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_MOST_NUMBERS]))
    return shown if len(numbers) <= _MOST_NUMBERS else f"{shown}, ..."
