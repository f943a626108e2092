# SPDX-License-Identifier: Apache-2.0
"""The table of the candidates of one op: those that differ in their names alone share a row, and rows may be grouped by mask."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from stof.html_report import elements as e
from stof.report import PageRow, PageTable

_MOST_LINES = 1000
_MOST_NAMES = 60  # of one line
_MOST_RANGES = 6  # of layers
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
    lines = _merge(table.rows)
    hidden = sum(len(line.rows) for line in lines[_MOST_LINES:])
    lines = lines[:_MOST_LINES]
    columns = [_Column(i, i in table.code, lines) for i in range(len(table.columns)) if i != table.group]
    columns = [c for c in columns if any(c.texts.values())]
    has_layers = any(_describe_layers(line.rows) for line in lines)
    headings = ["row", *(["layer"] if has_layers else []), "name", "result", *(table.columns[c.index] for c in columns)]
    groups: dict[str, list[_Line]] = {}
    for line in lines:
        groups.setdefault("" if table.group is None else line.rows[0].cells[table.group], []).append(line)
    row_groups = []
    for text, group_lines in groups.items():
        rows = [_cells(line, columns, has_layers, dry_run) for line in group_lines]
        below = {i: _list_names(line) for i, line in enumerate(group_lines) if len(line.rows) > 1}
        row_groups.append(e.RowGroup(rows, "" if table.group is None else _heading(table, text, group_lines), below))
    replaced = sum(row.replaced for row in table.rows)
    summary = f"{len(table.rows)} rows, {replaced} of them replaced"
    more = (
        e.tag("p", e.text(f"{hidden} more rows are in the report as JSON (--json)."), class_="quiet") if hidden else ""
    )
    return e.table(headings, row_groups, summary) + more


def _heading(table: PageTable, text: str, lines: Sequence[_Line]) -> str:
    """What the rows of a group have in common, and how many of them were replaced."""
    rows = [row for line in lines for row in line.rows]
    assert table.group is not None
    common = e.tag("code", e.text(text)) if table.group in table.code else e.text(text)
    what = common if text else e.text(f"no {table.columns[table.group]} known")
    count = f"{sum(row.replaced for row in rows)} of {len(rows)}"
    return f"{what} {e.tag('span', e.text(count), class_='quiet')}"


def _cells(line: _Line, columns: Sequence[_Column], has_layers: bool, dry_run: bool) -> list[str]:
    cells = [e.tag("td", str(line.number), class_="number")]
    if has_layers:
        cells.append(e.tag("td", e.text(_describe_layers(line.rows)), class_="layers"))
    return [*cells, _name_cell(line), _result_cell(line, dry_run), *(c.cell(line) for c in columns)]


def _name_cell(line: _Line) -> str:
    first = line.rows[0].name
    words = first if len(line.rows) == 1 else f"{len(line.rows)} × {first}, …"
    return e.tag("td", e.tag("code", e.text(words)), class_="short" if len(words) <= _SHORT_NAME else "text")


def _list_names(line: _Line) -> str:
    """The names of the rows that a line stands for, or the first of them."""
    names = [e.tag("code", e.text(row.name)) for row in line.rows[:_MOST_NAMES]]
    hidden = len(line.rows) - len(names)
    return e.fold(f"{len(line.rows)} names", ", ".join([*names, *([f"and {hidden} more"] if hidden else [])]))


def _result_cell(line: _Line, dry_run: bool) -> str:
    if not line.rows[0].replaced:
        return e.tag("td", e.pill("kept", "kept"), class_="short")
    return e.tag("td", e.pill("can be replaced" if dry_run else "replaced", "good"), class_="short")


class _Column:
    """One column of the table: its text by line."""

    def __init__(self, index: int, is_code: bool, lines: Sequence[_Line]) -> None:
        self.index = index
        self.is_code = is_code
        self.texts = {line.number: line.rows[0].cells[index] for line in lines}
        self.is_wide = any(len(words) > (_LONG_CODE if is_code else _LONG) for words in self.texts.values())
        self.first: dict[str, int] = {}  # the line that has a text first
        for number, words in self.texts.items():
            self.first.setdefault(words, number)

    def cell(self, line: _Line) -> str:
        """The cell of a line; of a long text that an earlier line has it says only which."""
        words = self.texts[line.number]
        if len(words) > _LONG and not self.is_code and self.first[words] != line.number:
            return e.tag("td", f"as row {self.first[words]}", class_="short quiet")
        if self.is_code:
            return e.tag(
                "td", e.tag("code", e.text(words)) if words else "", class_="text" if self.is_wide else "short"
            )
        return e.tag("td", e.text(words), class_="text long" if self.is_wide else "short")


def _merge(rows: Sequence[PageRow]) -> list[_Line]:
    """Rows that differ in their names alone become one line, where the first of them stands."""
    groups: dict[tuple[bool, tuple[str, ...]], list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault((row.replaced, row.cells), []).append(i)
    return [_Line(indices[0], tuple(rows[i] for i in indices)) for indices in groups.values()]


def _describe_layers(rows: Sequence[PageRow]) -> str:
    """The layers that names tell of: "3", "0 to 11" or "1 to 2, 4 to 5"; empty where they tell of none."""
    layers = sorted({int(match[1]) for row in rows if (match := _LAYER.search(row.name))})
    ranges: list[list[int]] = []
    for number in layers:
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    if len(ranges) > _MOST_RANGES:
        return f"{layers[0]} to {layers[-1]}, not all"
    return ", ".join(" to ".join(map(str, r)) for r in ranges)
