# SPDX-License-Identifier: Apache-2.0
"""What the report says of choose pages: how many pages each attention over a cache attends in decoding."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from stof.sparsify.spec import SparsitySpec
from stof.sparsify.threshold_report import number_ranges


@dataclass(frozen=True)
class PageChoiceRow:
    """An attention over a contiguous KV cache.

    Attributes:
        node: the operator's name.
        layer: its index among those of the model, in the order of the graph.
        chooses: whether it chooses pages.
        reason: why it does not.
        pages: that each KV head attends besides those that it always attends.
        rows: of a page.
        past: the model's input with the bounds of the step before.
        present: the output with those of the step.
    """

    node: str
    layer: int
    chooses: bool
    reason: str = ""
    pages: int = 0
    rows: int = 0
    past: str = ""
    present: str = ""


@dataclass
class PagesReport:
    """What choose pages does.

    Attributes:
        spec: what --sparsify says.
        rows: a row for each attention over a contiguous cache.
    """

    spec: SparsitySpec
    rows: list[PageChoiceRow] = field(default_factory=list)

    @property
    def choosing(self) -> int:
        """How many attentions choose pages."""
        return sum(r.chooses for r in self.rows)

    @property
    def headline(self) -> str:
        """For the report's first line; empty where nothing chooses."""
        if not self.choosing:
            return ""
        return f"chooses pages in {self.choosing} of {len(self.rows)} attentions over a KV cache"

    def mark_unwritten(self, reason: str) -> None:
        """Says that no model that chooses pages is written."""
        self.rows = [replace(r, chooses=False, reason=reason) if r.chooses else r for r in self.rows]

    def lines(self) -> list[str]:
        """A line for each kind of row, and how to run the model."""
        groups: dict[PageChoiceRow, list[PageChoiceRow]] = defaultdict(list)
        for row in self.rows:
            groups[replace(row, node="", layer=0, past="", present="")].append(row)
        found = []
        for kind, group in groups.items():
            layers = ", ".join(number_ranges([r.layer for r in group]))
            if not kind.chooses:
                found.append(f"  every page in layer {layers}: {kind.reason}")
                continue
            found.append(
                f"  choose pages in layer {layers}: steps of up to 16 tokens attend the best {kind.pages} pages of "
                f"{kind.rows} rows, page 0 and the last ones"
            )
        if not self.choosing:
            return found
        first = next(r for r in self.rows if r.chooses)
        return [
            *found,
            f"  give {first.past!r} what {first.present!r} was in the step before, as caches; none at first: 0 pages",
            "  STOF_SKIP_SCORES=0 attends every page: outputs are then those that verification compares",
        ]

    def to_json(self) -> dict[str, Any]:
        """Every fact by its key."""
        return {"sites": [asdict(r) for r in self.rows]}
