# SPDX-License-Identifier: Apache-2.0
"""A picture for each grid: the fraction of the roofline by mask and length, with the best peer's beside it. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.core.candidate import require
from bench.gpu import summary
from bench.gpu.cases import GRIDS
from stof.bench.results import Record, read
from stof.files import write_bytes


def plots(results: Path, output: Path) -> list[Path]:
    """Writes ``<folder>-<grid>.png`` for the grids that a folder of results has, and gives the paths.

    Raises:
        Unavailable: when matplotlib is not installed.
    """
    matplotlib = require("matplotlib")
    matplotlib.use("Agg")
    found = []
    for grid in GRIDS:
        records = [r for r in read(results / f"attention-cuda-{grid}.json") if "us" in r["peers"].get("stof", {})]
        if records:
            output.mkdir(parents=True, exist_ok=True)
            draw = _bars if grid == "masks" else _plot
            found.append(draw(grid, records, output / f"{results.name}-{grid}.png"))
    return found


def _panel(record: Record) -> str:
    shape = record["shape"]
    return f"B = {shape['B']}, {shape['H']} heads on {shape['G']}, D = {shape['D']}, {shape['dtype']}"


def _plot(grid: str, records: Sequence[Record], path: Path) -> Path:
    pyplot = require("matplotlib.pyplot")
    panels = summary.groups(sorted(records, key=lambda r: (r["shape"]["B"], r["shape"]["G"])), _panel)
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.8), sharey=True, squeeze=False)
    for axis, (title, kept) in zip(axes[0], panels.items(), strict=True):
        for number, (mask, one) in enumerate(summary.groups(kept, lambda r: r["mask_name"]).items()):
            one = sorted(one, key=lambda r: int(r["shape"]["T"]))
            lengths = [r["shape"]["T"] for r in one]
            own = [100 * r["peers"]["stof"]["roofline"] for r in one]
            axis.plot(lengths, own, "o-", color=f"C{number}", label=mask, markersize=3)
            other: list[Any] = [_best_fraction(r) for r in one]
            axis.plot(lengths, other, ":", color=f"C{number}", linewidth=1)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("length")
        axis.set_title(title, fontsize=9)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("% of roofline (dotted: best peer)")
    axes[0][-1].legend(fontsize=7)
    figure.suptitle(f"{grid} grid, {records[0]['machine']['device']}", fontsize=10)
    figure.tight_layout()
    return _save(figure, path, pyplot)


def _save(figure: Any, path: Path, pyplot: Any) -> Path:
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:], dpi=110)
    pyplot.close(figure)
    write_bytes("picture", path, picture.getvalue())
    return path


def _bars(grid: str, records: Sequence[Record], path: Path) -> Path:
    """A panel for each problem: bars for the masks, stof's beside the best peer's."""
    pyplot = require("matplotlib.pyplot")
    panels = {k: v for k, v in summary.groups(records, summary.problem).items() if len(v) > 2}
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.8), sharey=True, squeeze=False)
    for axis, (title, kept) in zip(axes[0], panels.items(), strict=True):
        places = range(len(kept))
        own = [100 * r["peers"]["stof"]["roofline"] for r in kept]
        other = [_best_fraction(r) or 0.0 for r in kept]
        axis.bar([i - 0.2 for i in places], own, 0.4, label="stof")
        axis.bar([i + 0.2 for i in places], other, 0.4, label="best peer")
        axis.set_xticks(list(places), [r["mask_name"] for r in kept], rotation=40, ha="right", fontsize=8)
        axis.set_title(title, fontsize=9)
        axis.grid(axis="y", alpha=0.3)
    axes[0][0].set_ylabel("% of roofline")
    axes[0][-1].legend(fontsize=7)
    figure.suptitle(f"{grid} grid, {records[0]['machine']['device']}", fontsize=10)
    figure.tight_layout()
    return _save(figure, path, pyplot)


def _best_fraction(record: Record) -> float | None:
    best = summary.best_peer(record)
    return 100 * record["roof_us"] / best[1] if best else None
