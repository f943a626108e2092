# SPDX-License-Identifier: Apache-2.0
"""What the report says of attentions with 8-bit operands: which, in what precision, their errors, and the loss of the model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stof.arguments.precisions import AUTO, PRECISIONS, Precision
from stof.attention_precision.eight_bit_kernels import MOST_DECODED
from stof.cached_attention.site import OP as CACHED
from stof.sparsify.reduced_report import PrecisionRow, ReducedPrecisionReport
from stof.sparsify.threshold_report import number_ranges


@dataclass(frozen=True)
class EightBitRow(PrecisionRow):
    """An attention that became an operator.

    Attributes:
        precision: the name of that it may compute in; empty: that of its inputs.
        errors: relative RMS errors by the name of each precision that was measured.
        length: the keys of the run that the gain is estimated for; 0: nothing is estimated.
    """

    precision: str = ""
    errors: tuple[tuple[str, float], ...] = ()
    length: int = 0


@dataclass
class EightBitReport(ReducedPrecisionReport):
    """What --attention-precision did.

    Attributes:
        asked: the option's value.
        bounds: of errors, by the name of the precision; empty: any error is taken.
        measured_rows: query rows by which errors were measured, and all that there were.
        no_loss: why the loss of the whole model was not measured.
    """

    asked: str = AUTO
    bounds: Mapping[str, float] = field(default_factory=dict)
    measured_rows: tuple[int, int] = (0, 0)
    no_loss: str = ""

    @property
    def by_name(self) -> dict[str, Precision]:
        """The precision of each attention that may compute in 8 bits, by the operator's name; without those still undecided."""
        rows = [row for row in self.rows if isinstance(row, EightBitRow) and row.reduced and row.precision]
        return {row.node: PRECISIONS[row.precision] for row in rows}

    def by_plan(self) -> dict[str, Precision] | None:
        """As of the base class."""
        return self.by_name if self.is_decided else None

    @property
    def option(self) -> str:
        """What the user gave."""
        return f"--attention-precision {self.asked}"

    @property
    def headline(self) -> str:
        """For the report's first line."""
        if not self.reduced:
            return f"{self.option} changes nothing"
        counts = Counter(p.name for p in self.by_name.values())
        words = ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "errors decide"
        count = f"{len(self.reduced)} of {len(self.rows)} attentions"
        return f"OUTPUTS CHANGE: {self.option} lets {count} compute in 8 bits ({words})"

    def lines(self) -> list[str]:
        """A line for each kind of row, the error where it is the largest, and the loss."""
        if not self.rows:
            return ["  no attention became an operator, which could compute in 8 bits"]
        groups: dict[PrecisionRow, list[PrecisionRow]] = defaultdict(list)
        for row in self.rows:
            kind = replace(row, node="", layer=0, relative_rms=None, errors=())  # type: ignore[call-arg]
            groups[kind].append(row)
        lines = [self._line_of(group) for group in groups.values()]
        if self.measured_on:
            some, every = self.measured_rows
            part = f"{some} of {every} query rows" if some < every else "all query rows"
            lines += [
                f"errors of attentions: relative RMS against fp64, {part} of {self.measured_on}",
                "errors and loss are those of models that round as the kernels do; no kernel with 8-bit operands ran",
            ]
        if self.reduced:
            lines += self._loss_lines(self.no_loss or "--prompts FILE or --inputs FILE measures it")
        return [*lines, *(f"warning: {words}" for words in self.warnings)]

    def _line_of(self, group: list[PrecisionRow]) -> str:
        first, layers = group[0], ", ".join(number_ranges([r.layer for r in group]))
        if not isinstance(first, EightBitRow) or not first.reduced:
            return f"  full precision in layer {layers}: {first.reason}"
        words: list[str] = []
        if first.predicted_gain is not None:
            words.append(
                f"estimated {first.predicted_gain:.2f}x over 16 bits at {first.length} keys on compute capability 9.0"
            )
        errors = [r.relative_rms for r in group if r.relative_rms is not None]
        known = bool(errors) or first.predicted_gain is not None
        if errors:
            words.append(f"relative RMS error {'up to ' if len(errors) > 1 else ''}{max(errors):.2g}")
        if first.op == CACHED:
            words.append(f"in steps of more than {MOST_DECODED} tokens; others stay in full precision")
        return f"  {first.precision or '8 bits'} in layer {layers}: {'; '.join(words if known else [*words, 'error not known'])}"

    def to_json(self) -> dict[str, Any]:
        """Every fact by its key."""
        facts = super().to_json()
        for layer in facts["layers"]:
            layer["errors"] = dict(layer["errors"])
        some, every = self.measured_rows
        return facts | {
            "precision": self.asked,
            "bounds": dict(self.bounds),
            "measured_rows": some,
            "all_rows": every,
        }
