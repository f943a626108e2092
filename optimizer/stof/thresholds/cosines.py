# SPDX-License-Identifier: Apache-2.0
"""How far outputs of a model are from another's: the cosine of their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

_MASK = "attention_mask"


@dataclass
class CosineMeter:
    """Collects the outputs of two models on several sets of inputs.

    Attributes:
        names: of the outputs.
    """

    names: Sequence[str]
    _cosines: dict[str, list[np.ndarray]] = field(default_factory=dict)

    def add(
        self, original: Sequence[np.ndarray], result: Sequence[np.ndarray], feed: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Adds the outputs of both models, in the order of the names.

        Args:
            original: of one model.
            result: of the other.
            feed: what they ran on. Rows of an output [B, S, N] that its ``attention_mask`` [B, S] calls padding do not count.
        """
        for name, one, other in zip(self.names, original, result, strict=True):
            cosines = row_cosines(one, other)
            rows = None if feed is None else rows_of_tokens(one, feed)
            if rows is not None and one.shape == other.shape and cosines.size == rows.size:
                cosines = cosines[rows.ravel()]
            self._cosines.setdefault(name, []).append(cosines)

    def means(self) -> Mapping[str, float]:
        """The mean cosine of all rows of each output that has some."""
        joined = {name: np.concatenate(found) for name, found in self._cosines.items()}
        return {name: float(found.mean()) for name, found in joined.items() if found.size}

    def loss(self) -> float:
        """1 minus the least of the means."""
        return max((1.0 - mean for mean in self.means().values()), default=0.0)


def rows_of_tokens(output: np.ndarray, feed: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Which rows [B, S] of an output [B, S, N] the ``attention_mask`` of its inputs does not call padding; None: all count."""
    mask = feed.get(_MASK)
    return (
        mask != 0
        if mask is not None and mask.ndim == 2 and output.ndim == 3 and output.shape[:2] == mask.shape
        else None
    )


def row_cosines(original: np.ndarray, result: np.ndarray) -> np.ndarray:
    """The cosine of each row of two arrays of one shape, fp64.

    A row is the last axis of [B, S, N], and all that follows the first axis of others. Two rows of zeros have cosine 1, one of
    them 0. Rows with NaN or infinity are 1 where they are equal, else -1.

    Args:
        original: numbers of any type.
        result: likewise.
    """
    if original.shape != result.shape:
        return np.array([-1.0])
    one, other = (_rows(x).astype(np.float64) for x in (original, result))
    if not one.size:
        return np.zeros(0)
    with np.errstate(invalid="ignore", over="ignore"):
        # Rows of large numbers would overflow when they are squared.
        one, other = (x / np.maximum(np.abs(x).max(-1, keepdims=True), np.finfo(np.float64).tiny) for x in (one, other))
        lengths = np.linalg.norm(one, axis=-1) * np.linalg.norm(other, axis=-1)
        products = (one * other).sum(-1)
    cosines = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
    cosines[~one.any(-1) & ~other.any(-1)] = 1.0
    strange = ~(np.isfinite(_rows(original)).all(-1) & np.isfinite(_rows(result)).all(-1))
    for i in np.flatnonzero(strange):
        is_equal = np.array_equal(_rows(original)[i], _rows(result)[i], equal_nan=True)
        cosines[i] = 1.0 if is_equal else -1.0
    return np.asarray(cosines.clip(-1.0, 1.0))


def _rows(array: np.ndarray) -> np.ndarray:
    if array.ndim < 2:
        return array.reshape(1, -1)
    return array.reshape(-1, array.shape[-1]) if array.ndim == 3 else array.reshape(len(array), -1)
