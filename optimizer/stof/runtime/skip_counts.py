# SPDX-License-Identifier: Apache-2.0
"""Skip by score: how much attention left out in this process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stof.runtime.library import EARLIER, LibraryError, library, op_limits


@dataclass(frozen=True)
class SkipCounts:
    """Pairs of queries and keys of nodes with ``skip_threshold``: rows times keys of each group of rows and key tile.

    Of nodes with ``chosen_pages``: queries of a KV head times keys of each page; what is skipped has no scores.

    Attributes:
        scored: pairs whose scores were computed.
        skipped: those among them that were left out after it.
    """

    scored: int
    skipped: int

    @property
    def share(self) -> float:
        """The share of the scored pairs that was left out, 0 to 1; 0 where there were none."""
        return self.skipped / self.scored if self.scored else 0.0


def skip_counts() -> SkipCounts:
    """What nodes with ``skip_threshold`` did in this process since it began, or since ``reset_skip_counts``.

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


def skips_scores(op: str, target: str) -> bool:
    """Whether kernels of an attention operator read ``skip_threshold`` on a target of ``--target``.

    Raises:
        LibraryError: without a library, and for one that does not state its limits.
    """
    limits = op_limits().get(op, {}).get("targets", {}).get(target, {})
    return bool(limits.get("skips_scores", False))


def _function(name: str) -> Callable[..., None]:
    function: Any = getattr(library(), name, None)
    if function is None:
        raise LibraryError(f"the plugin library does not count what attention leaves out ({name}): {EARLIER}")
    function.restype = None
    found: Callable[..., None] = function
    return found
