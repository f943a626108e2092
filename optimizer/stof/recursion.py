# SPDX-License-Identifier: Apache-2.0
"""Room for deep recursion while a graph is analyzed; afterwards the interpreter's limit is as before."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LIMIT = 20_000  # frames: chains of movement operators are followed by recursion, as deep as a graph writes them
_lock = threading.Lock()
_users = 0
_before = 0


@contextmanager
def deep_recursion() -> Iterator[None]:
    """Raises the interpreter's recursion limit for a block; the last of several threads in such a block restores it."""
    global _users, _before
    with _lock:
        if _users == 0:
            _before = sys.getrecursionlimit()
            sys.setrecursionlimit(max(_before, _LIMIT))
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                sys.setrecursionlimit(_before)
