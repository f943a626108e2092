# SPDX-License-Identifier: Apache-2.0
"""A mask at tile granularity, head by head, for pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from stof.mask.expression import MaskExpression
from stof.runtime.library import LibraryError, Mask

CELLS = 32  # rows and columns of a grid, at most
_WINDOWS = 8  # times the largest number of a mask: a window shows at its proportions
_SHORTEST, _LONGEST = 64, 4096
_LONGEST_AT_ONCE = 1024  # where the mask reads run-time operands or its own sizes
_MOST_PAIRS = 1 << 26  # that are evaluated
_BATCHES = 16  # images, windows of images: masks that read b differ between them
_DOCUMENT_ENDS = (0.3, 0.45, 0.8, 1.0)  # of the length


@dataclass(frozen=True)
class HeadGrid:
    """The tiles of batch rows and heads that are alike.

    Attributes:
        batches: batch rows.
        heads: heads of the first of them.
        rows: ``#`` all, ``+`` some, ``.`` none of a tile's pairs; a text for each row of tiles.
    """

    batches: tuple[int, ...]
    heads: tuple[int, ...]
    rows: tuple[str, ...]


@dataclass(frozen=True)
class MaskGrids:
    """The distinct grids of a mask, the first heads first.

    Attributes:
        length: S = T.
        cell: rows and columns of a tile.
        grids: of heads that are alike.
        assumed: what run-time operands hold in the picture, and which heads it leaves out, for people; or empty.
    """

    length: int
    cell: int
    grids: tuple[HeadGrid, ...]
    assumed: str


def tile_grids(
    expression: MaskExpression, tables: Mapping[str, np.ndarray] | None = None, heads: int = 1, length: int = 0
) -> MaskGrids:
    """The tiles of a mask without its key padding.

    Args:
        expression: the mask.
        tables: the constants that it looks up.
        heads: query heads H.
        length: S = T of a mask of fixed size; 0: one that shows the mask at its proportions.

    Raises:
        LibraryError: when the mask cannot be evaluated at this length.
    """
    shown = expression.without_padding()
    vectors = shown.vectors
    is_whole = bool(shown.reads & {"S", "P"})  # rows by themselves are other sizes
    length = length or _representative_length(shown)
    if vectors or is_whole:
        length = min(length, _LONGEST_AT_ONCE)
    runtime, assumed = _example_operands(vectors, length)
    if "h" not in shown.reads:
        heads = 1
    elif heads > (most := max(1, _MOST_PAIRS // length**2)):
        assumed = ", ".join(filter(None, (assumed, f"the first {most} of {heads} heads")))
        heads = most
    batches = min(_BATCHES, max(1, _MOST_PAIRS // (heads * length**2))) if "b" in shown.reads and not vectors else 1
    mask = Mask(shown.text, tables)
    height = length if is_whole else _cell(length)
    try:
        classes = _classify(mask, (batches, heads), length, height, runtime)
    except LibraryError:  # tables of fewer batch rows
        if batches == 1:
            raise
        classes = _classify(mask, (1, heads), length, height, runtime)
    return MaskGrids(length, _cell(length), _distinct(classes), assumed)


def _representative_length(mask: MaskExpression) -> int:
    wanted = _WINDOWS * max(mask.literals, default=_SHORTEST)
    return int(min(_LONGEST, max(_SHORTEST, 1 << (wanted - 1).bit_length())))


def _cell(length: int) -> int:
    return -(-length // CELLS)


def _example_operands(vectors: frozenset[str], length: int) -> tuple[dict[str, np.ndarray], str]:
    """Vectors that a mask reads in each run, as an example, and what they hold."""
    ends = np.array([max(1, round(share * length)) for share in _DOCUMENT_ENDS])
    documents = np.searchsorted(ends, np.arange(length), side="right").astype(np.int64)[None]
    operands: dict[str, np.ndarray] = {}
    words = []
    if vectors & {"segment_q", "segment_k"}:
        operands |= dict.fromkeys(vectors & {"segment_q", "segment_k"}, documents)
        words.append(f"{len(ends)} documents, for example")
    if "lengths" in vectors:
        operands["lengths"] = np.array([3 * length // 4], np.int64)
        words.append(f"lengths[b] = {3 * length // 4}, for example")
    if "pad" in vectors:  # read otherwise than as key padding
        operands["pad"] = np.ones((1, length), bool)
    return operands, ", ".join(words)


def _classify(
    mask: Mask, sizes: tuple[int, int], length: int, height: int, runtime: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Of each tile, as [B, H, rows, columns]: 0 none, 1 some, 2 all of its pairs.

    Args:
        mask: the mask.
        sizes: B and H.
        length: S = T.
        height: query rows that are evaluated at a time, which bounds the memory: all, or a row of tiles.
        runtime: the run-time operands.
    """
    cell = _cell(length)
    starts = np.arange(0, length, cell)
    widths = np.diff([*starts, length])
    parts = []
    for first in range(0, length, height):
        allowed = mask.evaluate(*sizes, min(height, length - first), length, first, runtime)
        counts = np.add.reduceat(allowed, starts, axis=-1, dtype=np.int64)
        parts.append(np.add.reduceat(counts, np.arange(0, allowed.shape[2], cell), axis=2))
    count = np.concatenate(parts, axis=2)
    classes: np.ndarray = (count > 0).astype(np.uint8) + (count == widths[:, None] * widths)
    return classes


def _distinct(classes: np.ndarray) -> tuple[HeadGrid, ...]:
    """Groups of batch rows that are alike, and in the first row of each, groups of heads."""
    batches: dict[bytes, list[int]] = {}
    for b, batch_classes in enumerate(classes):
        batches.setdefault(batch_classes.tobytes(), []).append(b)
    grids = []
    for alike in batches.values():
        heads: dict[bytes, list[int]] = {}
        for h, head_classes in enumerate(classes[alike[0]]):
            heads.setdefault(head_classes.tobytes(), []).append(h)
        for same in heads.values():
            texts = tuple("".join(".+#"[x] for x in row) for row in classes[alike[0], same[0]])
            grids.append(HeadGrid(tuple(alike), tuple(same), texts))
    return tuple(grids)
