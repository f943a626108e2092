# SPDX-License-Identifier: Apache-2.0
"""Writes what stof does to every graph of the zoo: docs/results/zoo.json, and its summary docs/reference/zoo.md.

``python tests/zoo/zoo_table.py`` optimizes all graphs and writes both files. ``--graphs NAME ...`` optimizes only these and
keeps the others' entries; ``--graphs`` without a name writes the page anew from the stored results. ``--check`` compares
instead of writing. Optimizing needs the compiled library (STOF_LIBRARY) and onnxruntime.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import onnx
from count_sites import count
from peak_memory import read_costs
from zoo_inputs import build, filled, names

import stof
import stof.errors
from stof.files import strict_json
from stof.options import Options

_REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = _REPOSITORY / "docs" / "results" / "zoo.json"
PAGE = _REPOSITORY / "docs" / "reference" / "zoo.md"
_WIDEST = 260
_BUDGET = 20.0


@dataclass(frozen=True)
class Row:
    """One graph: nodes, sites that count, how many of them are replaced, by what mask, and why others are left."""

    nodes: int
    sites: int
    replaced: int
    masks: dict[str, int]
    left: dict[str, int]  # reasons of softmaxes that stayed


def read_rows() -> dict[str, Row]:
    """The stored results by the name of the graph."""
    return {name: Row(**entry) for name, entry in json.loads(RESULTS.read_text()).items()}


def write_rows(rows: dict[str, Row]) -> str:
    """The rows as the text of the results."""
    return strict_json.dumps_by_line({name: asdict(r) for name, r in rows.items()}) + "\n"


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
        return Row(len(model.graph.node), len(counted), 0, {}, {_short(str(error), str(path)): len(counted)})
    done = {s.site: s for s in report.sites if s.replaced}
    masks = Counter(_mask(s.mask, s.notes) for s in done.values())
    attention = {c.name for c in counted}
    left = Counter(_short(s.reason, s.site) for s in report.sites if not s.replaced and s.site in attention)
    told = {c.name: c.words for c in every}
    for other in (s for s in report.sites if not s.replaced and s.site not in attention):
        left[f"does not count: {told.get(other.site, 'it weighs no values')}"] += 1
    replaced = sum(c.name in done for c in counted)
    return Row(len(model.graph.node), len(counted), replaced, dict(sorted(masks.items())), dict(sorted(left.items())))


def _mask(expression: str, notes: Sequence[str]) -> str:
    words = f"`{expression or 'True'}`"
    if any("becomes a table of" in n for n in notes):
        return f"{words} and a bias by distance"
    if any("becomes relative_" in n for n in notes):
        return f"{words} and rows by relative position"
    return f"{words} and a bias" if any("stays a bias" in n for n in notes) else words


def _short(reason: str, site: str) -> str:
    text = reason.replace(site, "…").replace("|", "/")
    return text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "…"


def page(rows: dict[str, Row]) -> str:
    """The summary: sites by exporter, masks, and the graphs in which sites are left."""
    manifest = build.manifest()
    total, done = sum(r.sites for r in rows.values()), sum(r.replaced for r in rows.values())
    lines = [
        "<!-- Written by tests/zoo/zoo_table.py from docs/results/zoo.json; do not edit. -->",
        "# The zoo",
        "",
        f"{len(rows)} graphs of {len({manifest[n]['model_class'] for n in rows})} model classes of transformers "
        "([models](../../models/README.md)), each optimized and verified.",
        f"**{done} of {total} sites are replaced ({100 * done / total:.1f} %).** "
        "Every graph: [zoo.json](../results/zoo.json).",
        "",
        "* A *site* is a softmax that weighs values and whose mask is the same for other tokens, pixels or samples.",
        "* `tests/zoo/count_sites.py` counts sites and knows nothing of the matcher.",
        "* Terms of relative positions that activations compute may be in its scores: products of query or key with a table.",
        "* Softmaxes that do not count are replaced, too, where they can be: with another bias that activations compute.",
        "* `tests/zoo/test_zoo.py` runs originals and optimized graphs in ONNX Runtime on inputs of its own.",
        "",
        "| exporter | graphs | sites | replaced |",
        "|---|---|---|---|",
    ]
    for exporter in sorted({manifest[n]["exporter"] for n in rows}):
        own = [r for n, r in rows.items() if manifest[n]["exporter"] == exporter]
        lines.append(f"| {exporter} | {len(own)} | {sum(r.sites for r in own)} | {sum(r.replaced for r in own)} |")
    masks = sum((Counter(r.masks) for r in rows.values()), Counter[str]())
    lines += ["", "| mask | sites |", "|---|---|"]
    lines += [f"| {mask} | {count} |" for mask, count in sorted(masks.items(), key=lambda item: (-item[1], item[0]))]
    lines += ["", "## What is left", "", "| graph | sites | replaced | why |", "|---|---|---|---|"]
    for name, r in rows.items():
        if r.replaced < r.sites:
            why = "; ".join(f"{count} × {reason}" for reason, count in r.left.items())
            lines.append(f"| {name} | {r.sites} | {r.replaced} | {why} |")
    return "\n".join([*lines, *_cost_lines()]) + "\n"


def _cost_lines() -> list[str]:
    """The section about memory, from what peak_memory.py has measured."""
    costs = sorted(read_costs().items(), key=lambda item: -item[1].peak_mb)
    seconds = sorted(cost.cpu_seconds for _, cost in costs)
    (largest, cost), middle = costs[0], len(costs) // 2
    return [
        "",
        "## What a run takes",
        "",
        f"`tests/zoo/peak_memory.py` runs `stof-optimize` with default options on {len(costs)} graphs: "
        "[zoo-memory.json](../results/zoo-memory.json).",
        "",
        "| | median | most | graph |",
        "|---|---|---|---|",
        f"| resident memory of all processes, MiB | {costs[middle][1].peak_mb} | {cost.peak_mb} | {largest} |",
        f"| CPU seconds | {seconds[middle]:g} | {seconds[-1]:g} | {max(costs, key=lambda item: item[1].cpu_seconds)[0]} |",
    ]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Writes the results of the zoo and their summary.")
    parser.add_argument("-o", "--output", type=Path, default=PAGE, help="the summary (default: docs/reference/zoo.md)")
    parser.add_argument("--graphs", nargs="*", metavar="NAME", help="optimize only these; the others' entries stay")
    parser.add_argument("--check", action="store_true", help="compare with the files instead of writing them")
    arguments = parser.parse_args()
    rows = {} if arguments.graphs is None else read_rows()
    for name in names() if arguments.graphs is None else arguments.graphs:
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = row(name, Path(folder))
        print(f"{name}: {rows[name].replaced} of {rows[name].sites}", file=sys.stderr, flush=True)
    rows = {name: rows[name] for name in names() if name in rows}
    files = {RESULTS: write_rows(rows), arguments.output: page(rows)}
    if not arguments.check:
        for path, text in files.items():
            path.write_text(text)
        return 0
    different = [path for path, text in files.items() if path.read_text() != text]
    print("\n".join(f"{path} differs; write it again" for path in different) or "the files are as they were")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
