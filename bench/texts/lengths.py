# SPDX-License-Identifier: Apache-2.0
"""Lengths of texts, and batches of them: in the order of arrival, or sorted by length within a window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WINDOW = 1024  # texts that are sorted by length
_FIRST_TOKEN = 3  # the ids below are special ones; padding is 0
_QUERY_SHARE = 8  # of a pair, one token of so many is the query's


@dataclass(frozen=True)
class Lengths:
    """A log-normal distribution of lengths, and what batches are padded to.

    Attributes:
        name: in results and options.
        median: of the lengths, in tokens.
        sigma: the standard deviation of their logarithm.
        longest: what they are cut at.
        padded_to: the length of every batch in the order of arrival; None: that of its longest text.
        is_pairs: a text is a pair of a query and a passage.
    """

    name: str
    median: float
    sigma: float
    longest: int
    padded_to: int | None = None
    is_pairs: bool = False

    def draw(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """So many lengths."""
        drawn = self.median * np.exp(self.sigma * rng.standard_normal(count))
        return np.clip(np.rint(drawn), 1, self.longest).astype(np.int64)

    def describe(self) -> str:
        """The distribution and the padding in words."""
        padded = "the longest of the batch" if self.padded_to is None else str(self.padded_to)
        drawn = f"log-normal, median {self.median:g}, sigma {self.sigma:.2g}, 1 to {self.longest}"
        return f"{'pairs, ' if self.is_pairs else ''}{drawn}; padded to {padded}"


_P95 = 1.6449  # the 95th percentile of a standard normal distribution
LENGTHS = {
    lengths.name: lengths
    for lengths in (
        Lengths("padded-256", 40, 0.6, 256, padded_to=256),
        Lengths("longest", 60, math.log(250 / 60) / _P95, 512),
        Lengths("pairs", 120, 0.6, 512, is_pairs=True),
    )
}


@dataclass(frozen=True)
class TextBatches:
    """Padded batches that a candidate runs one after the other.

    Attributes:
        feeds: of each batch.
        real: tokens of the texts.
        padded: tokens that the batches have with their padding.
    """

    feeds: tuple[dict[str, np.ndarray], ...]
    real: int
    padded: int

    @property
    def largest(self) -> dict[str, np.ndarray]:
        """The batch with the most tokens; of equal ones, that with the most real ones."""
        return max(self.feeds, key=lambda f: (f["attention_mask"].size, int(f["attention_mask"].sum())))


class TextWindow:
    """Texts of random tokens, as many as are sorted at a time.

    Args:
        lengths: how long they are.
        vocabulary: how many tokens there are.
        inputs: the model's, by name.
        seed: of lengths and tokens.
        size: how many texts.

    Attributes:
        lengths: how long they are.
    """

    def __init__(self, lengths: Lengths, vocabulary: int, inputs: Sequence[str], seed: int, size: int = WINDOW) -> None:
        rng = np.random.default_rng([seed, lengths.longest])
        self.lengths = lengths
        self._inputs = tuple(inputs)
        self._counts = lengths.draw(size, rng)
        self._texts = [rng.integers(_FIRST_TOKEN, vocabulary, count) for count in self._counts]

    def arrival(self, rows: int, batches: int) -> TextBatches:
        """The first batches of so many texts, in the order of arrival."""
        self._check(rows, batches)
        chosen = [np.arange(i * rows, (i + 1) * rows) for i in range(batches)]
        return self._make_batches(chosen, self.lengths.padded_to)

    def by_length(self, rows: int, batches: int) -> TextBatches:
        """Batches of the whole window sorted by length, at even distances; each is padded to its longest text."""
        total = self._check(rows, batches)
        order = np.argsort(self._counts, kind="stable")
        chosen = [(2 * i + 1) * total // (2 * batches) for i in range(batches)]
        return self._make_batches([order[k * rows : (k + 1) * rows] for k in chosen], None)

    def _check(self, rows: int, batches: int) -> int:
        """How many batches the window has.

        Raises:
            ValueError: where that is less than what is asked for.
        """
        total = len(self._texts) // rows if rows > 0 else 0
        if not 1 <= batches <= total:
            raise ValueError(f"{batches} batches of {rows} texts are asked for, of {len(self._texts)} texts")
        return total

    def _make_batches(self, chosen: Sequence[np.ndarray], padded_to: int | None) -> TextBatches:
        feeds = tuple(self._make_batch(texts, padded_to or int(self._counts[texts].max())) for texts in chosen)
        masks = [f["attention_mask"] for f in feeds]
        return TextBatches(feeds, sum(int(m.sum()) for m in masks), sum(m.size for m in masks))

    def _make_batch(self, texts: np.ndarray, padded: int) -> dict[str, np.ndarray]:
        counts = self._counts[texts][:, None]
        positions = np.arange(padded)[None]
        mask = (positions < counts).astype(np.int64)
        ids = np.zeros(mask.shape, np.int64)
        ids[mask == 1] = np.concatenate([self._texts[i] for i in texts])
        is_passage = (positions >= np.maximum(counts // _QUERY_SHARE, 1)) & self.lengths.is_pairs
        made = {"input_ids": ids, "attention_mask": mask, "token_type_ids": is_passage * mask}
        return {name: made[name] for name in self._inputs}
