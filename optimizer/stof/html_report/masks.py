# SPDX-License-Identifier: Apache-2.0
"""The distinct masks of a model as pictures."""

from __future__ import annotations

from stof.html_report import elements as e
from stof.report import MaskPicture, Report


def mask_part(report: Report) -> str:
    """The pictures with their legend; empty where there are none."""
    pictures = [p for s in report.sections.values() for p in s.page_pictures()]
    if not pictures:
        return ""
    legend = [("all", "every pair of the tile"), ("some", "some pairs"), ("none", "no pair: skipped")]
    key = e.tag("div", "".join(e.swatch(*entry) for entry in legend), class_="legend")
    return e.tag("h2", "Masks") + key + e.tag("div", "".join(map(_mask_figure, pictures)), class_="masks")


def _mask_figure(picture: MaskPicture) -> str:
    plots = []
    for grid in picture.grids:
        x, y = (
            e.tag(
                "div", e.tag("span", "0") + e.tag("span", f"{word} →") + e.tag("span", str(end)), class_=f"axis {name}"
            )
            for word, end, name in (("key", picture.keys, "x"), ("query", picture.queries, "y"))
        )
        name = e.tag("div", e.text(grid.label), class_="name") if grid.label else ""
        svg = e.tile_grid(grid.rows, f"{picture.title} {picture.mask} {grid.label}".strip())
        plots.append(e.tag("div", name + e.tag("div", x + y + svg, class_="frame"), class_="plot"))
    words = e.tag("h3", e.text(picture.title)) + e.tag("code", e.text(picture.mask))
    listed = e.tag("ul", "".join(e.tag("li", e.text(f)) for f in picture.facts))
    content = e.tag("div", "".join(plots), class_="plots") + e.tag("figcaption", words + listed)
    return e.tag("figure", content, class_="card mask wide" if len(plots) > 1 else "card mask")
