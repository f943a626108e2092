# SPDX-License-Identifier: Apache-2.0
"""What kernels of a target leave out at run time, by the library's limits."""

from __future__ import annotations

from stof.arguments.threshold_kinds import SKIP_SCORES, ThresholdKind
from stof.runtime.bf16_kernel import cpu_bf16_kernel
from stof.runtime.library import op_limits


def leaves_out(op: str, target: str, kind: ThresholdKind = SKIP_SCORES) -> bool:
    """Whether kernels of an attention operator read the threshold of a kind on a target of ``--target``.

    Raises:
        LibraryError: without a library, and for one that does not state its limits.
    """
    return _states(op, target, kind.limit)


def chooses_pages(op: str, target: str) -> bool:
    """Whether kernels of an attention operator choose pages of a KV cache on a target of ``--target``.

    Raises:
        LibraryError: as of ``leaves_out``.
    """
    return _states(op, target, "chooses_pages")


def _states(op: str, target: str, limit: str) -> bool:
    """Whether the library states a limit of an operator's kernels as true."""
    return bool(op_limits().get(op, {}).get("targets", {}).get(target, {}).get(limit, False))


def takes_attribute(op: str, attribute: str) -> bool:
    """Whether an attention operator knows an attribute.

    Raises:
        LibraryError: as of ``leaves_out``.
    """
    return attribute in op_limits().get(op, {}).get("attributes", ())


def kernel_in_precision(op: str, attribute: str) -> str:
    """The instructions by which this machine's CPU computes an operator with an attribute of ``stof.arguments.precisions``.

    Empty: it has none, and computes as without the attribute.

    Raises:
        LibraryError: as of ``leaves_out``.
    """
    return cpu_bf16_kernel() if takes_attribute(op, attribute) else ""
