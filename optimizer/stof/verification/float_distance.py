# SPDX-License-Identifier: Apache-2.0
"""How far outputs with float attention are from those of the float model, or of the quantized one; for the report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class OutputDistance:
    """How far one output is from that of a reference, over all sets of inputs.

    Attributes:
        output: its name.
        cosine: the mean cosine of rows of the result with those of the reference.
        error: of the result, the root of the mean squared difference over that of the reference's squares.
        quantized_error: likewise of the quantized model; None where that is the reference.
    """

    output: str
    cosine: float
    error: float
    quantized_error: float | None = None

    @property
    def is_nearer(self) -> bool:
        """Whether the result is at least as near to the float model as the quantized model is."""
        return self.quantized_error is not None and self.error <= self.quantized_error

    def words(self) -> str:
        """For people."""
        before = "" if self.quantized_error is None else f", {self.quantized_error:.3g} before"
        return f"output {self.output!r}: error {self.error:.3g}{before}, cosine 1 - {1 - self.cosine:.3g}"


@dataclass
class DequantizedAttention:
    """What --dequantize-attention did.

    Attributes:
        sites: the names of attentions that compute in float now.
        kept: the names of quantized ones that do not, with the reason.
        reference: the file of the float model; empty: outputs are compared with those of the quantized model.
        measured_on: the sets of inputs; empty where nothing was measured.
        distances: of each output.
    """

    sites: list[str]
    kept: dict[str, str] = field(default_factory=dict)
    reference: str = ""
    measured_on: str = ""
    distances: list[OutputDistance] = field(default_factory=list)

    @property
    def headline(self) -> str:
        """For the report's first line."""
        if not self.sites:
            return "--dequantize-attention changes nothing"
        count, every = len(self.sites), len(self.sites) + len(self.kept)
        return f"OUTPUTS CHANGE: --dequantize-attention has {count} of {every} quantized attentions compute in float"

    def lines(self) -> list[str]:
        """What stays quantized, and how far outputs are from the reference."""
        reference = f"the float model {self.reference}" if self.reference else "the quantized model"
        lines = [f"  {name}: stays quantized: {reason}" for name, reason in self.kept.items()]
        if self.distances:
            lines.append(f"  distance to {reference} on {self.measured_on}:")
            lines += [f"    {distance.words()}" for distance in self.distances]
        return lines

    def to_json(self) -> dict[str, Any]:
        """For the report's JSON."""
        return asdict(self)
