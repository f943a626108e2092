# SPDX-License-Identifier: Apache-2.0
"""The table of the candidates of one op, in the order of the graph; many rows that are alike become one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from stof.html_report import elements as e
from stof.report import PageRow, PageTable

_MOST_SINGLE = 200  # rows of their own
_MOST_ROWS = 1000
_LONG = 40  # characters from which on a column is wide
_LONG_CODE = 24
_SHORT_NAME = 26  # characters of names that are kept on one line
# The number of a layer in names of modules: "/model/layers.3/attn/Softmax", "encoder.block.7.attention".
_LAYER = re.compile(r"(?:^|[^a-z])(?:layers?|blocks?|stages?|h)[./_](\d{1,5})(?=[^0-9]|$)", re.IGNORECASE)


@dataclass(frozen=True)
class _Line:
    """Rows of the table that are shown as one, with the number of the first one."""

    number: int
    rows: tuple[PageRow, ...]


def candidate_table(table: PageTable, dry_run: bool) -> str:
    """The table as HTML."""
    lines = [_Line(i, (row,)) for i, row in enumerate(table.rows)]
    if is_merged := len(lines) > _MOST_SINGLE:
        lines = _merge(lines)
    left = sum(len(line.rows) for line in lines[_MOST_ROWS:])
    lines = lines[:_MOST_ROWS]
    layers = [_layers(line.rows) for line in lines]
    columns = [
        _Column(i, i in table.code, [line.rows[0].cells[i] for line in lines]) for i in range(len(table.columns))
    ]
    columns = [c for c in columns if any(c.texts)]
    headings = [
        "row",
        *(["layer"] if any(layers) else []),
        "name",
        "result",
        *(table.columns[c.index] for c in columns),
    ]
    rows = []
    for i, line in enumerate(lines):
        cells = [e.tag("td", str(line.number) if len(line.rows) == 1 else f"{len(line.rows)} ×", class_="number")]
        if any(layers):
            cells.append(e.tag("td", e.text(layers[i]), class_="short"))
        cells += [_name_cell(line), _result_cell(line, dry_run)]
        rows.append(cells + [c.cell(i, shortens=not is_merged) for c in columns])
    replaced = sum(row.replaced for row in table.rows)
    summary = f"{len(table.rows)} rows, {replaced} of them replaced"
    more = e.tag("p", e.text(f"{left} more rows are in the report as JSON (--json)."), class_="quiet") if left else ""
    return e.table(headings, rows, summary) + more


def _name_cell(line: _Line) -> str:
    first, last = line.rows[0].name, line.rows[-1].name
    name = first if len(line.rows) == 1 else f"{first} ... {last}"
    return e.tag("td", e.tag("code", e.text(name)), class_="short" if len(name) <= _SHORT_NAME else "text")


def _result_cell(line: _Line, dry_run: bool) -> str:
    if not line.rows[0].replaced:
        return e.tag("td", e.pill("kept", "kept"), class_="short")
    return e.tag("td", e.pill("can be replaced" if dry_run else "replaced", "good"), class_="short")


class _Column:
    """One column of the table: its texts, line by line."""

    def __init__(self, index: int, is_code: bool, texts: Sequence[str]) -> None:
        self.index = index
        self.is_code = is_code
        self.texts = texts
        self.is_wide = any(len(words) > (_LONG_CODE if is_code else _LONG) for words in texts)
        self.first: dict[str, int] = {}  # the line that has a text first
        for i, words in enumerate(texts):
            self.first.setdefault(words, i)

    def cell(self, i: int, shortens: bool) -> str:
        """The cell of a line; ``shortens``: of a long text that an earlier line has it says only which."""
        words = self.texts[i]
        if shortens and len(words) > _LONG and not self.is_code and self.first[words] < i:
            return e.tag("td", f"as row {self.first[words]}", class_="short quiet")
        if self.is_code:
            return e.tag(
                "td", e.tag("code", e.text(words)) if words else "", class_="text" if self.is_wide else "short"
            )
        return e.tag("td", e.text(words), class_="text long" if self.is_wide else "short")


def _merge(lines: Sequence[_Line]) -> list[_Line]:
    """Lines whose rows differ in their names alone become one, where the first of them stands."""
    groups: dict[tuple[bool, tuple[str, ...]], list[_Line]] = {}
    for line in lines:
        groups.setdefault((line.rows[0].replaced, line.rows[0].cells), []).append(line)
    return [_Line(group[0].number, tuple(r for line in group for r in line.rows)) for group in groups.values()]


def _layers(rows: Sequence[PageRow]) -> str:
    """The layers that names tell of: "3", or "0 to 11"; empty where they tell of none."""
    found = [int(match[1]) for row in rows if (match := _LAYER.search(row.name))]
    if not found:
        return ""
    return str(found[0]) if min(found) == max(found) else f"{min(found)} to {max(found)}"
