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
    if len(lines) > _MOST_SINGLE:
        lines = _merge(lines)
    left = sum(len(line.rows) for line in lines[_MOST_ROWS:])
    lines = lines[:_MOST_ROWS]
    layers = [_layers(line.rows) for line in lines]
    has_layers = any(layers)
    columns = [i for i, _ in enumerate(table.columns) if any(line.rows[0].cells[i] for line in lines)]
    headings = ["#", *(["layer"] if has_layers else []), "name", "result", *(table.columns[i] for i in columns)]
    wide = {i for i in columns if any(len(line.rows[0].cells[i]) > _LONG for line in lines)}
    cells = []
    for line, layer in zip(lines, layers, strict=True):
        row = line.rows[0]
        count = f"{line.number}" if len(line.rows) == 1 else f"{len(line.rows)} ×"
        name = row.name if len(line.rows) == 1 else f"{row.name} ... {line.rows[-1].name}"
        done = "can be replaced" if dry_run else "replaced"
        cells.append(
            [
                e.tag("td", count, class_="number"),
                *([e.tag("td", e.text(layer), class_="short")] if has_layers else []),
                e.tag("td", e.tag("code", e.text(name)), class_="text"),
                e.tag("td", e.pill(done, "good") if row.replaced else e.pill("kept", "kept"), class_="short"),
                *(_cell(row.cells[i], i in table.code, i in wide) for i in columns),
            ]
        )
    replaced = sum(row.replaced for row in table.rows)
    summary = f"{len(table.rows)} rows, {replaced} of them replaced"
    more = e.tag("p", e.text(f"{left} more rows are in the report as JSON (--json)."), class_="quiet") if left else ""
    return e.table(headings, cells, summary) + more


def _cell(words: str, is_code: bool, is_wide: bool) -> str:
    content = e.tag("code", e.text(words)) if is_code and words else e.text(words)
    return e.tag("td", content, class_="text long" if is_wide and not is_code else "text" if is_wide else "short")


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
