# SPDX-License-Identifier: Apache-2.0
"""What the report says of sparse MLPs that may round to bf16: which, and their errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stof.sparsify.reduced_rows import ReducedRow, ReducedRows


@dataclass(frozen=True, kw_only=True)
class MlpPrecisionRow(ReducedRow):
    """An MLP that became StofSparseMLP; its weights, and many tokens with their hidden values, may be rounded.

    Attributes:
        neurons: how many it has; 0: not known.
    """

    neurons: int

    @property
    def kind(self) -> str:
        """Its size, where it is known."""
        return f" of {self.neurons} neurons" if self.neurons else ""


@dataclass
class MlpPrecisionReport(ReducedRows[MlpPrecisionRow]):
    """The sparse MLPs of a model."""

    noun: ClassVar[str] = "sparse MLP"

    def say_reduced(self, precision: str, count: str, kind: str) -> str:
        """That MLPs of a size round weights and many tokens to a precision."""
        return f"weights, and many tokens, rounded to {precision} in {count}{kind}"
