# SPDX-License-Identifier: Apache-2.0
"""The error of one operator in reduced precision."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SiteError:
    """What was measured of one attention or GEMM in reduced precision.

    Attributes:
        relative_rms: the largest of all sets; None: not measured.
        fault: how it differs from what its kernels should compute; empty where it does not.
        overflows: whether a number beyond the largest of the precision takes a finite result away.
    """

    relative_rms: float | None = None
    fault: str = ""
    overflows: bool = False

    def join(self, other: SiteError) -> SiteError:
        """Both, of two sets."""
        errors = [x for x in (self.relative_rms, other.relative_rms) if x is not None]
        return SiteError(max(errors, default=None), self.fault or other.fault, self.overflows or other.overflows)
