# SPDX-License-Identifier: Apache-2.0
"""Pieces of HTML: text that is escaped, tags, tables in boxes that scroll, and grids of tiles as SVG.

Names, masks and messages come from models, which nobody has to trust. Every text passes :func:`text`.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from stof.errors import shown as shown

FOLDED = 30  # rows: longer tables are closed until the reader opens them
_MOST_TEXT = 400  # characters of one text
_CLASSES = {"+": "some", "#": "all"}


def text(words: object, most: int = _MOST_TEXT) -> str:
    """Text as HTML, on one line. Of longer text the middle is left out."""
    return html.escape(shown(words, most))


def tag(name: str, content: str = "", **attributes: str) -> str:
    """An element; ``content`` is HTML. ``class_`` is the attribute ``class``."""
    written = "".join(f' {k.rstrip("_").replace("_", "-")}="{html.escape(v)}"' for k, v in attributes.items() if v)
    return f"<{name}{written}>{content}</{name}>"


def pill(words: str, kind: str) -> str:
    """A small mark; ``kind`` is "good", "bad" or "kept"."""
    return tag("span", text(words), class_=f"pill {kind}")


def card(label: str, value: str, more: str = "", kind: str = "") -> str:
    """One number of the summary."""
    content = tag("div", text(label), class_="label") + tag("div", text(value), class_="value")
    return tag("div", content + (tag("div", text(more), class_="more") if more else ""), class_=f"card {kind}".strip())


@dataclass(frozen=True)
class RowGroup:
    """Rows of a table that belong together.

    Attributes:
        rows: cells as elements ``td``.
        heading: HTML above them; empty where there is none.
        below: HTML over the whole width below a row, by the row's index.
    """

    rows: Sequence[Sequence[str]]
    heading: str = ""
    below: Mapping[int, str] = field(default_factory=dict)


def table(headings: Sequence[str], groups: Sequence[RowGroup], summary: str) -> str:
    """A table in a box of its own that scrolls sideways; a long one is closed at first.

    Args:
        headings: plain text.
        groups: the rows.
        summary: of a long table, plain text; empty: it stays open.
    """
    head = tag("thead", tag("tr", "".join(tag("th", text(h), scope="col") for h in headings)))
    bodies = "\n".join(_body(group, len(headings)) for group in groups)
    box = tag("div", tag("table", f"{head}\n{bodies}"), class_="scroll", tabindex="0")
    return fold(summary, box) if summary and sum(len(g.rows) for g in groups) > FOLDED else box


def _body(group: RowGroup, columns: int) -> str:
    cells = tag("th", group.heading, scope="rowgroup", colspan=str(columns))
    heading = tag("tr", cells, class_="group") + "\n" if group.heading else ""
    rows = []
    for i, row in enumerate(group.rows):
        rows.append(tag("tr", "".join(row)))
        if i in group.below:
            rows.append(tag("tr", tag("td", group.below[i], colspan=str(columns)), class_="below"))
    return tag("tbody", heading + "\n".join(rows))


def fold(summary: str, content: str, is_open: bool = False) -> str:
    """Content that is closed until the reader opens it, or prints it. ``summary`` is plain text."""
    return tag("details", tag("summary", text(summary)) + content, open="open" if is_open else "")


def facts(pairs: Mapping[str, object]) -> str:
    """Names and values, one pair a line."""
    return tag("dl", "".join(tag("dt", text(name)) + tag("dd", text(value)) for name, value in pairs.items()))


def notes(lines: Iterable[str]) -> str:
    """A list of sentences."""
    return tag("ul", "".join(tag("li", text(line, 3000)) for line in lines), class_="notes")


def callout(words: str, kind: str = "kept") -> str:
    """A sentence or two that the reader must not miss, as plain text; ``kind`` is "bad" or "kept"."""
    return tag("p", text(words, 1500), class_=f"callout {kind}")


def bar(label: str, share: float, words: str, kind: str = "") -> str:
    """A bar of so much of the whole width, 0 to 1, between its label and its number."""
    width = f"width:{100 * min(1.0, max(0.0, share)):.2f}%"
    track = tag("span", tag("i", class_=kind, style=width), class_="track")
    return tag("div", tag("span", text(label)) + track + tag("span", text(words)), class_="bar")


def tile_grid(rows: Sequence[str], description: str) -> str:
    """Rows of tiles as a picture: ``#`` all, ``+`` some, ``.`` none of the pairs. Equal neighbors are one rectangle."""
    paths: dict[str, list[str]] = {"some": [], "all": []}
    for y, row in enumerate(rows):
        x = 0
        for character, run in groupby(row):
            width = len(list(run))
            if character in _CLASSES:
                paths[_CLASSES[character]].append(f"M{x} {y}h{width}v1h-{width}z")
            x += width
    size = (max(map(len, rows), default=1), max(1, len(rows)))
    drawn = "".join(f'<path class="{kind}" d="{"".join(path)}"/>' for kind, path in paths.items() if path)
    return (
        f'<svg viewBox="0 0 {size[0]} {size[1]}" role="img" shape-rendering="crispEdges" preserveAspectRatio="none">'
        f'<title>{text(description)}</title><rect class="none" width="{size[0]}" height="{size[1]}"/>{drawn}</svg>'
    )


def swatch(kind: str, words: str) -> str:
    """One entry of the legend of tiles."""
    square = f'<svg viewBox="0 0 1 1" aria-hidden="true"><rect class="{kind}" width="1" height="1"/></svg>'
    return tag("span", square + text(words))
