# SPDX-License-Identifier: Apache-2.0
"""The attention problem of a benchmark's point, and its masks by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from bench.core import run_time
from stof.mask.expression import MaskExpression

_BLOCK = 64  # of BigBird's random part and of S2
_S2_LOCAL = 512  # queries behind a query whose blocks an S2 mask allows
_RANDOM_BLOCK = 128  # of the masks of random blocks
_SHORT_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class AttentionCase:
    """One attention problem: q [B, H, S, D] at positions T-S … T-1 on k, v [B, G, T, D].

    Attributes:
        grid: the grid that it is a point of.
        name: the mask's name there, or the model's that the case is of.
        mask: the mask expression; "" is dense.
        dtype: float32, float16 or bfloat16.
        tables: the expression's constant tables by name.
        pad: whether a key padding mask is an operand, as in exported models; it keeps every key.
        cache: the type of quantized KV caches; empty where they are of ``dtype``.
        window: in the CPU's decode grid, how many keys a query attends at most; 0: all that it may.
    """

    grid: str
    name: str
    mask: str
    B: int
    H: int
    G: int
    S: int
    T: int
    D: int
    dtype: str
    tables: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False)
    pad: bool = False
    cache: str = ""
    window: int = 0

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
        """What a grid varies: T, which is S but in the decode grid."""
        return self.T

    @property
    def key(self) -> list[str | int]:
        """The key of the point in a results file of a GPU."""
        return [self.grid, self.name, self.dtype, self.B, self.H, self.G, self.D, self.T]

    @property
    def shape(self) -> str:
        """The sizes as text."""
        heads = f"H{self.H}" + (f" G{self.G}" if self.G != self.H else "")
        sizes = f"S{self.S}" if self.S == self.T else f"S{self.S} T{self.T}"
        return f"B{self.B} {heads} {sizes} D{self.D}"

    def __str__(self) -> str:
        return f"{self.grid} {self.name} {self.shape} {_SHORT_DTYPES[self.dtype]}"


def random_blocks(length: int, block: int, fill: float, seed: int = 0) -> np.ndarray:
    """Blocks [ceil(length / block), the same] that are allowed with probability ``fill``."""
    count = -(-length // block)
    return np.random.default_rng(seed).random((count, count)) < fill


def named_mask(name: str, length: int, group: int = 1) -> tuple[str, dict[str, np.ndarray]]:
    """The expression and tables of a mask, as docs/design/benchmarks.md lists them.

    Longformer and BigBird take band = global = round(sqrt(length)), with one global range at the start. BigBird adds random
    blocks of 64 x 64, 10 % of all, seed 0. Heads of a group of ``group`` have one S2 mask.

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
    stride, _, size = number.partition("-")
    if kind == "s2" and stride.isdigit() and (not size or size.isdigit()):
        block = int(size or _BLOCK)
        local = _S2_LOCAL // block
        return (
            f"k <= q and (q // {block} - k // {block} < {local} or (k // {block} + h // {group}) % {stride} == 0)",
            {},
        )
    if kind == "sinks" and number.isdigit():
        return f"k <= q and (q - k < {number} or k < 4)", {}
    if kind == "slash" and number.isdigit():
        return f"k <= q and (q - k < 96 or k % {number} == 0)", {}
    if kind == "every" and number.isdigit():
        return f"k <= q and k // {run_time.BLOCK} % {number} == 0", {}
    if kind == "random" and number.isdigit():
        table = random_blocks(length, _RANDOM_BLOCK, int(number) / 100)
        np.fill_diagonal(table, True)  # so that no query is without a key
        return f"table0[q // {_RANDOM_BLOCK}, k // {_RANDOM_BLOCK}]", {"table0": table}
    raise KeyError(name)
