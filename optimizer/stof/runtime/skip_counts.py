# SPDX-License-Identifier: Apache-2.0
"""How much attention left out in this process: skip by score, choose blocks and choose pages."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stof.runtime.library import EARLIER, LibraryError, library


@dataclass(frozen=True)
class SkipCounts:
    """Pairs of queries and keys: rows times keys of each tile, block or page.

    Attributes:
        scored: pairs that skip by score, choose blocks or choose pages could leave out.
        skipped: those among them that were left out.
    """

    scored: int
    skipped: int

    @property
    def share(self) -> float:
        """The share of these pairs that was left out, 0 to 1; 0 where there were none."""
        return self.skipped / self.scored if self.scored else 0.0


def skip_counts() -> SkipCounts:
    """What nodes with ``skip_threshold``, ``block_threshold`` or ``chosen_pages`` did in this process.

    It counts since the process began, or since ``reset_skip_counts``.

    All sessions of the process count together. Waits for the CUDA devices that such a node ran on.

    Raises:
        LibraryError: without a library, and for one of an earlier version, which does not count.
    """
    counts = (ctypes.c_uint64 * 2)()
    _function("stof_skip_counts")(counts)
    return SkipCounts(int(counts[0]), int(counts[1]))


def reset_skip_counts() -> None:
    """Sets the counts of ``skip_counts`` to 0.

    Raises:
        LibraryError: as of ``skip_counts``.
    """
    _function("stof_reset_skip_counts")()


def _function(name: str) -> Callable[..., None]:
    function: Any = getattr(library(), name, None)
    if function is None:
        raise LibraryError(f"the plugin library does not count what attention leaves out ({name}): {EARLIER}")
    function.restype = None
    found: Callable[..., None] = function
    return found
