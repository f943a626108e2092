# SPDX-License-Identifier: Apache-2.0
"""Writes docs/reference/zoo.md: what stof does to every graph of the zoo, beside what there is to do.

``python tests/zoo/zoo_table.py -o docs/reference/zoo.md [--check]``. Needs the compiled library (STOF_LIBRARY) and onnxruntime.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from count_sites import count
from zoo_inputs import build, filled, names

import stof
import stof.errors
from stof.options import Options

_WIDEST = 260
_BUDGET = 20.0


@dataclass(frozen=True)
class Row:
    """One graph: sites that count, how many of them were replaced, and what was found."""

    name: str
    nodes: int
    counted: int
    replaced: int
    masks: tuple[tuple[str, int], ...]
    left: tuple[tuple[str, int], ...]  # reasons of softmaxes that stayed


def row(name: str, folder: Path) -> Row:
    """Counts, optimizes and verifies a graph."""
    path = folder / "model.onnx"
    model = filled(name)
    onnx.save(model, str(path))
    every = count(name)
    counted = [c for c in every if c.counts]
    try:
        report = stof.optimize(path, folder / "out.onnx", Options(verify_budget=_BUDGET))
    except stof.errors.StofError as error:  # nothing was written; the table says so, and the test fails
        return Row(name, len(model.graph.node), len(counted), 0, (), ((_short(str(error), str(path)), len(counted)),))
    done = {s.site: s for s in report.sites if s.replaced}
    masks = Counter(_mask(s.mask, s.notes) for s in done.values())
    attention = {c.name for c in counted}
    left = Counter(_short(s.reason, s.site) for s in report.sites if not s.replaced and s.site in attention)
    told = {c.name: c.words for c in every}
    for other in (s for s in report.sites if not s.replaced and s.site not in attention):
        left[f"does not count: {told.get(other.site, 'it weighs no values')}"] += 1
    replaced = sum(c.name in done for c in counted)
    return Row(name, len(model.graph.node), len(counted), replaced, _sorted(masks), _sorted(left))


def _mask(expression: str, notes: Sequence[str]) -> str:
    words = f"`{expression or 'True'}`"
    if any("becomes a table of" in n for n in notes):
        return f"{words} and a bias by distance"
    return f"{words} and a bias" if any("stays a bias" in n for n in notes) else words


def _short(reason: str, site: str) -> str:
    text = reason.replace(site, "…").replace("|", "/")
    return text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "…"


def _sorted(found: Counter[str]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(found.items()))


def text(rows: Sequence[Row]) -> str:
    """The document."""
    manifest = build.manifest()
    classes = {manifest[r.name]["model_class"] for r in rows}
    total, done = sum(r.counted for r in rows), sum(r.replaced for r in rows)
    lines = [
        "<!-- Written by tests/zoo/zoo_table.py; do not edit. -->",
        "# The zoo",
        "",
        f"{len(rows)} graphs of {len(classes)} model classes of transformers ([models](../models/README.md)), each optimized and",
        "verified. *Sites* are counted by `tests/zoo/count_sites.py`, which knows nothing of the matcher: softmaxes that weigh",
        "values and whose masks are the same for other tokens, pixels or samples, also where scores are assembled of parts, as",
        "Longformer's. Sites that do not count are replaced as well where they can be: with a bias that activations compute.",
        "`tests/zoo/test_zoo.py` runs originals and optimized graphs in ONNX Runtime on inputs of its own.",
        "",
        f"**{done} of {total} sites are replaced ({100 * done / total:.1f} %).**",
        "",
        "| exporter | graphs | sites | replaced |",
        "|---|---|---|---|",
    ]
    for exporter in sorted({manifest[r.name]["exporter"] for r in rows}):
        own = [r for r in rows if manifest[r.name]["exporter"] == exporter]
        lines.append(f"| {exporter} | {len(own)} | {sum(r.counted for r in own)} | {sum(r.replaced for r in own)} |")
    lines += ["", "| graph | nodes | sites | replaced | masks | left, and why |", "|---|---|---|---|---|---|"]
    for r in rows:
        cells = [r.name, str(r.nodes), str(r.counted), str(r.replaced), _cell(r.masks), _cell(r.left)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(items: Iterable[tuple[str, int]]) -> str:
    return "; ".join(f"{n} × {words}" for words, n in items)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Writes the table of the zoo.")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--check", action="store_true", help="compare with the file instead of writing it")
    arguments = parser.parse_args()
    rows = []
    for name in names():
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row(name, Path(folder)))
        print(f"{name}: {rows[-1].replaced} of {rows[-1].counted}", file=sys.stderr, flush=True)
    found = text(rows)
    if not arguments.check:
        arguments.output.write_text(found)
        return 0
    same = arguments.output.read_text() == found
    print("the table is as it was" if same else f"{arguments.output} differs; write it again")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
