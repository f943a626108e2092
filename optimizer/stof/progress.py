# SPDX-License-Identifier: Apache-2.0
"""One line on a terminal that says how far something is; nothing where standard error is no terminal."""

from __future__ import annotations

import sys
import time

_EVERY = 0.2  # seconds


class Progress:
    """Writes over its own line."""

    def __init__(self) -> None:
        self.shown = False
        self.last = 0.0

    def show(self, text: str) -> None:
        """The line from now on; asked too often, not all of them."""
        now = time.monotonic()
        if sys.stderr.isatty() and now - self.last >= _EVERY:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
            self.last, self.shown = now, True

    def close(self) -> None:
        """Takes the line away."""
        if self.shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
            self.shown = False
