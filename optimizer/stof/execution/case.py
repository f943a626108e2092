# SPDX-License-Identifier: Apache-2.0
"""Sets of inputs by their sizes, padding and numbers of keys."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum


class Padding(Enum):
    """Where a batch's rows are padded."""

    NONE = "none"
    LEFT = "left"
    RIGHT = "right"
    HOLES = "between tokens, and on the right"
    LEAST = "by one key on the right"  # of every second row, which leaves masks of most kinds a key for every query


class Counts(Enum):
    """What inputs hold that masks read as numbers of keys, in the last row and every second one before it.

    Other rows have from one key to all of them. A flag is false with ``NONE`` only.
    """

    USUAL = ""
    NONE = "counts of 0"
    NEGATIVE = "counts below 0"
    BEYOND = "counts beyond all keys"


@dataclass(frozen=True)
class Case:
    """One set of inputs: batch size, length, padding, numbers of keys; or one that a user gives."""

    batch: int
    length: int
    padding: Padding
    other: tuple[tuple[str, int], ...] = ()  # dimensions of another length
    counts: Counts = Counts.USUAL
    source: str = ""  # where a user's inputs come from; empty where they are drawn
    # What its sizes are called, and of which sizes that was said; None: nothing was.
    words: tuple[tuple[object, ...], str] | None = field(default=None, compare=False)

    def with_words(self, sizes: str) -> Case:
        """The case that names sizes as the model does; one that is made of it with other sizes does not."""
        return replace(self, words=(self._sizes, sizes))

    @property
    def _sizes(self) -> tuple[object, ...]:
        return self.batch, self.length, self.other

    def __str__(self) -> str:
        if self.source:
            return f"inputs {self.source}"
        other = "".join(f", {name} {size}" for name, size in self.other)
        sizes = f"batch {self.batch}, length {self.length}{other}"
        if self.words is not None and self.words[0] == self._sizes:
            sizes = self.words[1]
        pad = "" if self.padding is Padding.NONE else f", padded {self.padding.value}"
        counts = "" if self.counts is Counts.USUAL else f", {self.counts.value}"
        return f"{sizes}{pad}{counts}"
