# SPDX-License-Identifier: Apache-2.0
"""Choose pages in fp64 NumPy, written from docs/reference/cached-attention.md alone: key bounds, choice, attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Mask = Callable[[int, npt.NDArray[np.int64], npt.NDArray[np.int64]], npt.NDArray[np.bool_]]
LONGEST_STEP = 16  # tokens of a step that chooses


def bounds_of(keys: Array, rows: int) -> Array:
    """Minima and maxima of keys [G, n, D] in pages of so many rows: [G, pages, 2, D]."""
    starts = range(0, keys.shape[1], rows)
    pages = [np.stack([k.min(1), k.max(1)], 1) for k in (keys[:, s : s + rows] for s in starts)]
    return np.stack(pages, 1) if pages else np.zeros((keys.shape[0], 0, 2, keys.shape[2]))


@dataclass(frozen=True)
class PagedStep:
    """The last S tokens of a sequence. query: [H, S, D]; keys, values: [G, n, D], those of the step included."""

    query: Array
    keys: Array
    values: Array
    rows: int
    chosen: int
    scale: float
    mask: Mask  # mask(h, q, k)

    @property
    def group(self) -> int:
        return self.query.shape[0] // self.keys.shape[0]

    def allowed(self, head: int) -> npt.NDArray[np.bool_]:
        n, length = self.keys.shape[1], self.query.shape[1]
        q, k = np.arange(n - length, n)[:, None], np.arange(n)[None]
        return (k <= q) & self.mask(head, q, k)

    def choose(self, g: int) -> tuple[set[int], set[int], float]:
        """Attended pages of KV head g, pages that the mask allows, and the gap between the last score taken and the next."""
        n, length = self.keys.shape[1], self.query.shape[1]
        heads = range(g * self.group, (g + 1) * self.group)
        allowed = np.stack([self.allowed(h).any(0) for h in heads]).any(0)
        pages = -(-n // self.rows)
        allowed_pages = {p for p in range(pages) if allowed[p * self.rows : (p + 1) * self.rows].any()}
        recent = max(0, (n - length) // self.rows - 1)
        others = sorted(p for p in allowed_pages if 0 < p < recent)
        if length > LONGEST_STEP or len(others) <= self.chosen:
            return allowed_pages, allowed_pages, np.inf
        x = self.scale * self.query[list(heads)].reshape(-1, 1, self.query.shape[2])
        low, high = (bounds_of(self.keys[g : g + 1], self.rows)[0][others, i] for i in (0, 1))
        scores = np.maximum(x * low, x * high).sum(-1).max(0)
        order = np.argsort(-scores, kind="stable")
        gap = scores[order[self.chosen - 1]] - scores[order[self.chosen]]
        spread = np.maximum(np.abs(x * low), np.abs(x * high)).sum(-1).max()
        taken = {others[i] for i in order[: self.chosen]}
        return (allowed_pages - set(others)) | taken, allowed_pages, float(gap / spread)

    def attend(self, head: int, pages: set[int]) -> Array:
        """The output [S, D] of a head that attends these pages."""
        g, n = head // self.group, self.keys.shape[1]
        is_page = np.isin(np.arange(n) // self.rows, list(pages))
        scores = np.where(self.allowed(head) & is_page, self.scale * self.query[head] @ self.keys[g].T, -np.inf)
        top = scores.max(-1, keepdims=True)
        weights = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
        total = weights.sum(-1, keepdims=True)
        return np.asarray(np.divide(weights, total, out=np.zeros_like(weights), where=total > 0) @ self.values[g])
