# SPDX-License-Identifier: Apache-2.0
"""Writes which attentions of every graph of the zoo run on real tokens alone: docs/results/unpadding.json.

``python tests/zoo/unpadded_table.py`` looks at all graphs; with NAMEs at these, and keeps the others' entries.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import onnx
from zoo_inputs import filled, names

import stof
from stof.files import strict_json
from stof.options import Options

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "unpadding.json"


@dataclass(frozen=True)
class UnpaddedRow:
    """One key padding mask of a graph, with ``--unpad on``.

    Attributes:
        batch: the mask's tensor.
        attentions: that read it.
        unpadded: of these, those on real tokens alone.
        keys_only: those of which keys and values are.
        reason: why others are not.
    """

    batch: str
    attentions: int
    unpadded: int
    keys_only: int
    reason: str


def find_rows(name: str, folder: Path) -> list[UnpaddedRow]:
    """The masks of one graph."""
    path = folder / "model.onnx"
    onnx.save(filled(name), str(path))
    report = stof.optimize(path, options=Options(dry_run=True, unpad="on", chains="off"))
    return [
        UnpaddedRow(r.batch, r.of_attentions, r.attentions, r.keys_only, r.rest if r.replaced else r.reason)
        for r in report.rows("unpadding")
    ]


def read_rows() -> dict[str, list[UnpaddedRow]]:
    """The stored results by the name of the graph; graphs without a key padding mask have none."""
    stored = json.loads(RESULTS.read_text())
    return {name: [UnpaddedRow(*values) for values in rows] for name, rows in stored.items()}


def write_rows(rows: dict[str, list[UnpaddedRow]]) -> str:
    """The rows as the text of the results."""
    lists = {
        n: [[r.batch, r.attentions, r.unpadded, r.keys_only, r.reason] for r in found] for n, found in rows.items()
    }
    return strict_json.dumps_by_line(lists) + "\n"


def main(chosen: list[str]) -> None:
    """Looks at graphs and writes the results."""
    rows = read_rows() if RESULTS.exists() else {}
    for name in chosen or names():
        with tempfile.TemporaryDirectory() as folder:
            if found := find_rows(name, Path(folder)):
                rows[name] = found
            else:
                rows.pop(name, None)
        print(name, *rows.get(name, []), flush=True)
    RESULTS.write_text(write_rows({n: rows[n] for n in names() if n in rows}))


if __name__ == "__main__":
    main(sys.argv[1:])
