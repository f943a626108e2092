# SPDX-License-Identifier: Apache-2.0
"""What is timed: masks by name, attention cases, and the shapes of the models that are tested."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from stof.mask.expression import MaskExpression

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
_RANDOM_BLOCK = 64
_RANDOM_FILL = 0.1


@dataclass(frozen=True)
class Case:
    """One attention problem: q [B, H, S, D] on k, v [B, G, T, D], fp32, S = T."""

    name: str
    mask: str  # the expression; "" is dense
    B: int
    H: int
    G: int
    S: int
    D: int
    tables: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False)
    pad: bool = False  # a padding vector is an operand, as in exported models; here it keeps every key

    @property
    def expression(self) -> MaskExpression:
        """The mask as a value."""
        return MaskExpression.parse(self.mask, self.tables)

    @property
    def shape(self) -> str:
        """The sizes in words."""
        heads = f"H{self.H}" + (f" G{self.G}" if self.G != self.H else "")
        return f"B{self.B} {heads} S{self.S} D{self.D}"


def _side(length: int) -> int:
    return round(math.sqrt(length))


def _random_blocks(length: int) -> np.ndarray:
    blocks = -(-length // _RANDOM_BLOCK)
    return np.random.default_rng(0).random((blocks, blocks)) < _RANDOM_FILL


def mask(name: str, length: int) -> tuple[str, dict[str, np.ndarray]]:
    """The expression and tables of a mask of the grid.

    Longformer and BigBird take band = global = round(sqrt(S)), one global range at the start; BigBird adds random 64 × 64
    blocks, 10 % of all, seed 0.

    Raises:
        KeyError: when there is no such mask.
    """
    side = _side(length)
    glob = f"abs(q - k) <= {side} or q < {side} or k < {side}"
    match name:
        case "dense":
            return "", {}
        case "causal":
            return "k <= q", {}
        case "longformer":
            return glob, {}
        case "bigbird":
            table = f"table0[q // {_RANDOM_BLOCK}, k // {_RANDOM_BLOCK}]"
            return f"{glob} or {table}", {"table0": _random_blocks(length)}
    kind, _, width = name.partition("-")
    if kind == "window" and width.isdigit():
        return f"abs(q - k) <= {width}", {}
    if kind == "causal" and width.isdigit():
        return f"k <= q and q - k <= {int(width) - 1}", {}
    raise KeyError(name)


ATTENTION_MASKS = ("window-64", "window-256", "longformer", "bigbird", "causal", "dense", "causal-256")


def attention_case(name: str, length: int) -> Case:
    """A point of the CPU grid: B1 H12 D64."""
    expression, tables = mask(name, length)
    return Case(name, expression, 1, 12, 12, length, 64, tables)


# The attention of the first set of models: name, heads, key/value heads, head size, masks.
SITE_SHAPES: tuple[tuple[str, int, int, int, tuple[str, ...]], ...] = (
    ("BERT-base, ModernBERT-base global", 12, 12, 64, ("",)),
    ("ModernBERT-base local", 12, 12, 64, ("abs(q - k) <= 64",)),
    ("Mistral", 32, 8, 128, ("k <= q and q - k <= 511",)),
    ("Gemma 3 global, local", 4, 1, 256, ("k <= q", "k <= q and q - k <= 511")),
    ("EmbeddingGemma global, local", 3, 1, 256, ("", "abs(q - k) <= 256")),
)
SITE_LENGTHS = (128, 512, 2048)


def site_cases() -> list[Case]:
    """The attention of the first-set models, with the padding operand that their exports have."""
    return [
        Case(name, expression, 1, heads, groups, length, size, pad=True)
        for name, heads, groups, size, expressions in SITE_SHAPES
        for expression in expressions
        for length in SITE_LENGTHS
    ]
