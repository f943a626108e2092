# SPDX-License-Identifier: Apache-2.0
"""One line on a terminal that says how far something is; nothing where standard error is no terminal."""

from __future__ import annotations

import contextlib
import os
import sys
import time

from stof.errors import shown
from stof.terminal import encodable

_EVERY = 0.2  # seconds


class Progress:
    """Writes over its own line."""

    def __init__(self) -> None:
        self.shown = False
        self.last = 0.0

    def show(self, text: str) -> None:
        """The line from now on; asked too often, not all of them."""
        now = time.monotonic()
        if sys.stderr is not None and sys.stderr.isatty() and now - self.last >= _EVERY:
            # A longer line would wrap, and only its last part could be taken away.
            _put(f"\r\033[K{shown(text, _width())}")
            self.last, self.shown = now, True

    def close(self) -> None:
        """Takes the line away."""
        if self.shown:
            _put("\r\033[K")
            self.shown = False


def _width() -> int:
    """Characters of a line that does not wrap."""
    try:
        return max(20, os.get_terminal_size(sys.stderr.fileno()).columns - 1)
    except (OSError, ValueError):
        return 79


def _put(text: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that is gone shows no progress
        sys.stderr.write(encodable(text, sys.stderr))
        sys.stderr.flush()
