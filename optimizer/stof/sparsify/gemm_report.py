# SPDX-License-Identifier: Apache-2.0
"""What the report says of GEMMs in reduced precision: which, on what kernel, and their errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from stof.sparsify.reduced_rows import ReducedRow, ReducedRows


@dataclass(frozen=True, kw_only=True)
class GemmRow(ReducedRow):
    """A matmul by a constant weight.

    Attributes:
        operators: those that become one operator with it.
        weights: the shape of its weight.
    """

    operators: str
    weights: str

    @property
    def kind(self) -> str:
        """Its operators."""
        return self.operators


@dataclass
class GemmReport(ReducedRows[GemmRow]):
    """The matmuls of a model by constant weights.

    Attributes:
        kernel: that computes them in the precision on this machine; empty: none, and they stay as they are.
    """

    noun: ClassVar[str] = "GEMM"
    kernel: str = ""

    def say_reduced(self, precision: str, count: str, kind: str) -> str:
        """That GEMMs of these operators compute in a precision."""
        return f"{precision} in {count} of {kind}: kernel {self.kernel}"

    def to_json(self) -> dict[str, Any]:
        """Every fact by its key."""
        return {"kernel": self.kernel, **super().to_json()}
