# SPDX-License-Identifier: Apache-2.0
"""Slices of layers and heads in the text of options: ``3``, ``0:2``, ``-2:``, with ``+`` between them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stof.errors import ArgumentError


@dataclass(frozen=True)
class Slice:
    """Indices as Python has them: ``2``, ``0:2``, ``4:``, ``-2:``.

    Attributes:
        text: as the user wrote it.
        start: the first index; None: 0.
        stop: the index behind the last one; None: there is no end.
        option: that it is in, for messages.
    """

    text: str
    start: int | None
    stop: int | None
    option: str

    def of(self, count: int, what: str) -> range:
        """The indices among so many.

        Raises:
            ArgumentError: when it selects none, or reaches beyond.
        """
        first, last = self.start or 0, count if self.stop is None else self.stop
        first, last = (x + count if x < 0 else x for x in (first, last))
        if not 0 <= first < last <= count:
            expected = f"0 to {count}" if ":" in self.text else f"{-count} to {count - 1}"
            raise ArgumentError(f"{self.option}: {what}={self.text} selects from {count} {what}, expected {expected}")
        return range(first, last)


def parse_slices(text: str, option: str) -> tuple[Slice, ...] | None:
    """Indices and slices with ``+`` between them; None where a part is neither."""
    found = []
    for part in text.split("+"):
        match = re.fullmatch(r"(-?[0-9]{1,6})?(:)?(-?[0-9]{1,6})?", part)
        if match is None or part in ("", ":") or (match[2] is None and match[3] is not None):
            return None
        first = None if match[1] is None else int(match[1])
        last = None if match[3] is None else int(match[3])
        if match[2] is None:
            assert first is not None
            last = None if first == -1 else first + 1
        found.append(Slice(part, first, last, option))
    return tuple(found)
