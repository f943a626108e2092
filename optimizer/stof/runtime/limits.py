# SPDX-License-Identifier: Apache-2.0
"""What kernels of a target do of their own accord, by the library's limits."""

from __future__ import annotations

from stof.runtime.library import op_limits


def chooses_pages(op: str, target: str) -> bool:
    """Whether kernels of an operator choose pages of a KV cache on a target of ``--target``.

    Raises:
        LibraryError: without a library, and for one that does not state its limits.
    """
    limits = op_limits().get(op, {}).get("targets", {}).get(target, {})
    return bool(limits.get("chooses_pages", False))
