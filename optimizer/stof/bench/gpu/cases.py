# SPDX-License-Identifier: Apache-2.0
"""The grids of the GPU: masks (three problems), paper (short and medium, D = 64), long (D = 128), decode (one query) and
bits (in every tile).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from stof.mask.expression import MaskExpression

_BLOCK = 64  # of BigBird's random part and of S2
_RANDOM_BLOCK = 128  # of the masks of random blocks
GRIDS = ("masks", "paper", "long", "decode", "bits")


@dataclass(frozen=True)
class Case:
    """One attention problem: q [B, H, S, D] at positions T-S … T-1 on k, v [B, G, T, D]."""

    grid: str
    name: str
    mask: str  # the expression; "" is dense
    B: int
    H: int
    G: int
    S: int
    T: int
    D: int
    dtype: str  # float16 or bfloat16
    tables: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False)

    @property
    def expression(self) -> MaskExpression:
        """The mask as a value."""
        return MaskExpression.parse(self.mask, self.tables)

    @property
    def P(self) -> int:
        """The position of the first query."""
        return self.T - self.S

    @property
    def length(self) -> int:
        """What the grid varies: T, which is S but in the decode grid."""
        return self.T

    @property
    def key(self) -> list[str | int]:
        """What names the point."""
        return [self.grid, self.name, self.dtype, self.B, self.H, self.G, self.D, self.T]

    def __str__(self) -> str:
        heads = f"H{self.H}" + (f" G{self.G}" if self.G != self.H else "")
        sizes = f"S{self.S}" if self.S == self.T else f"S{self.S} T{self.T}"
        kind = {"float16": "fp16", "bfloat16": "bf16"}[self.dtype]
        return f"{self.grid} {self.name} B{self.B} {heads} {sizes} D{self.D} {kind}"


def random_blocks(length: int, block: int, fill: float, seed: int = 0) -> np.ndarray:
    """Blocks [ceil(length / block), the same] that are allowed with probability ``fill``."""
    count = -(-length // block)
    return np.random.default_rng(seed).random((count, count)) < fill


def mask(name: str, length: int) -> tuple[str, dict[str, np.ndarray]]:
    """The expression and tables of a mask, as docs/guide/benchmarks.md lists them.

    Raises:
        KeyError: when there is no such mask.
    """
    side = round(math.sqrt(length))
    band = f"abs(q - k) <= {side}"
    glob = f"{band} or q < {side} or k < {side}"
    match name:
        case "dense":
            return "", {}
        case "bits":
            return "(q - k) % 5 != 0", {}
        case "causal":
            return "k <= q", {}
        case "window":
            return band, {}
        case "dilated":
            return f"abs(q - k) <= {side + 1} and (q - k) % 2 == 0", {}
        case "longformer":
            return glob, {}
        case "bigbird":
            table = random_blocks(length, _BLOCK, 0.1)
            return f"{glob} or table0[q // {_BLOCK}, k // {_BLOCK}]", {"table0": table}
        case "s2":
            near = f"q // {_BLOCK} - k // {_BLOCK}"
            return f"k <= q and ({near} < 8 or (k // {_BLOCK} + h) % 8 == 0)", {}
        case "longformer-128":
            return "abs(q - k) <= 128 or q < 64 or k < 64", {}
        case "dilated-256":
            return "abs(q - k) <= 256 and (q - k) % 2 == 0", {}
        case "bigbird-23":  # as if random, without a table: 1 of 23 blocks
            row, column = f"(q // {_BLOCK})", f"(k // {_BLOCK})"
            blocks = f"(7 * {row} + 13 * {column} + {row} * {column}) % 23 == 0"
            return f"abs({row} - {column}) <= 1 or q < {_BLOCK} or k < {_BLOCK} or {blocks}", {}
    kind, _, number = name.partition("-")
    if kind == "window" and number.isdigit():
        return f"abs(q - k) <= {number}", {}
    if kind == "causal" and number.isdigit():
        return f"k <= q and q - k <= {int(number) - 1}", {}
    if kind == "random" and number.isdigit():
        table = random_blocks(length, _RANDOM_BLOCK, int(number) / 100)
        np.fill_diagonal(table, True)  # so that no query is without a key
        return f"table0[q // {_RANDOM_BLOCK}, k // {_RANDOM_BLOCK}]", {"table0": table}
    raise KeyError(name)


MASKS = (
    "dense", "causal", "window-128", "causal-1024", "longformer-128", "bigbird-23", "s2", "dilated-256",
)  # fmt: skip
MASKS_SHAPES = ((1, 16, 4096, 64), (1, 32, 8192, 128), (8, 12, 1024, 64))  # B, H, S, D
# Without a mask of its own: the dense kernels' long case, and what a short launch costs.
MASKS_PLAIN = (
    (1, 32, 16384, 128), (1, 16, 8192, 64), (1, 12, 128, 64), (1, 12, 512, 64), (1, 12, 1024, 64),
)  # fmt: skip
# Blocks of 128 that are allowed or not, so that all tiles are full: what they cost beside those of a dense kernel.
MASKS_FULL = ("random-10", "random-20")
MASKS_FULL_SHAPES = ((1, 32, 8192, 128), (1, 32, 16384, 128), (1, 16, 8192, 64))
PAPER_MASKS = ("causal", "window", "longformer", "bigbird", "dilated")
PAPER_BATCHES = (1, 8, 16)
PAPER_LENGTHS = (128, 256, 512, 1024, 2048, 4096)
LONG_MASKS = ("window-128", "causal-1024", "longformer", "bigbird", "s2", "random-5", "random-10", "random-20")
LONG_LENGTHS = (4096, 8192, 16384, 32768, 65536)
LONG_GROUPS = ((32, "bfloat16"), (8, "float16"))  # one type a number of key heads: half of all combinations
BITS_SHAPES = (
    (1, 16, 4096, 64), (1, 32, 8192, 128), (8, 12, 1024, 64), (1, 12, 512, 64), (1, 12, 2048, 64), (1, 32, 2048, 128),
)  # fmt: skip
DECODE_MASKS = ("dense", "causal-1024", "s2")
DECODE_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def grid(
    name: str,
    masks: Sequence[str] | None = None,
    lengths: Sequence[int] | None = None,
    batches: Sequence[int] | None = None,
) -> Iterator[Case]:
    """The points of a grid; each of ``masks``, ``lengths``, ``batches`` keeps only what it lists.

    Raises:
        KeyError: when there is no such grid.
    """

    def kept(values: Sequence[int], chosen: Sequence[int] | None) -> list[int]:
        return [v for v in values if chosen is None or v in chosen]

    def named(values: Sequence[str]) -> list[str]:
        return [v for v in values if masks is None or v in masks]

    match name:
        case "masks":
            plain = (MASKS_PLAIN, MASKS[:2])
            for shapes, kinds in ((MASKS_SHAPES, MASKS), plain, (MASKS_FULL_SHAPES, MASKS_FULL)):
                for B, H, S, D in shapes:
                    for kind in named(kinds) if kept([S], lengths) else []:
                        expression, tables = mask(kind, S)
                        yield Case(name, kind, expression, B, H, H, S, S, D, "float16", tables)
        case "paper":
            for kind in named(PAPER_MASKS):
                for length in kept(PAPER_LENGTHS, lengths):
                    expression, tables = mask(kind, length)
                    for batch in kept(PAPER_BATCHES, batches):
                        yield Case(name, kind, expression, batch, 12, 12, length, length, 64, "float16", tables)
        case "long":
            for length in kept(LONG_LENGTHS, lengths):  # the longest last: they are what a limit of time leaves out
                for kind in named(LONG_MASKS):
                    expression, tables = mask(kind, length)
                    for groups, dtype in LONG_GROUPS:
                        yield Case(name, kind, expression, 1, 32, groups, length, length, 128, dtype, tables)
        case "decode":
            for kind in named(DECODE_MASKS):
                for length in kept(DECODE_LENGTHS, lengths):
                    expression, tables = mask(kind, length)
                    yield Case(name, kind, expression, 1, 32, 8, 1, length, 128, "float16", tables)
        case "bits":
            for B, H, S, D in BITS_SHAPES:
                for kind in named(("bits",)) if kept([S], lengths) else []:
                    expression, tables = mask(kind, S)
                    yield Case(name, kind, expression, B, H, H, S, S, D, "float16", tables)
        case _:
            raise KeyError(name)


def anchor(D: int, dtype: str) -> Case:
    """The dense problem that says what a full tile costs: S = 8192."""
    H = {64: 16}.get(D, 32)
    return Case("anchor", "dense", "", 1, H, H, 8192, 8192, D, dtype)
