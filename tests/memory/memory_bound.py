# SPDX-License-Identifier: Apache-2.0
"""Writes estimated and measured memory of stored graphs, before and after, at two lengths: docs/results/memory-bound.json.

``python tests/memory/memory_bound.py`` measures each run in a process of its own. ``--graphs NAME ...`` measures only these and
keeps the others' entries. Ends with 1 where an estimate is off by more than a quarter.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx
from run_peak import measure_run

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "models"))
import build
from stof import optimize
from stof.files import strict_json
from stof.memory.peak import estimate_peak
from stof.symbolic import Symbolic

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "memory-bound.json"
MOST_OFF = 0.25
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class BoundedGraph:
    """Sizes at which a graph and its result take at least 50 MiB.

    Attributes:
        original: of the graph, two sets.
        result: of what stof makes of it.
    """

    original: tuple[Sizes, Sizes]
    result: tuple[Sizes, Sizes]


def _texts(
    original: tuple[tuple[int, int], ...], result: tuple[tuple[int, int], ...], length: str, **more: int
) -> BoundedGraph:
    """Sizes by batches and lengths."""
    sets = [tuple({"batch": b, length: n, **more} for b, n in pairs) for pairs in (original, result)]
    return BoundedGraph((sets[0][0], sets[0][1]), (sets[1][0], sets[1][1]))


GRAPHS = {
    "relative/deberta-v3.torchscript.eager": _texts(((1, 1024), (1, 1500)), ((64, 1024), (48, 2048)), "sequence"),
    "relative/deberta-v1.dynamo.eager": _texts(((1, 1024), (2, 1200)), ((64, 1024), (48, 2048)), "sequence"),
    "relative/wav2vec2-bert.torchscript.eager": _texts(((1, 1024), (2, 800)), ((96, 1024), (64, 2048)), "frames"),
    "relative/conformer.dynamo.eager": _texts(((1, 20505), (1, 30505)), ((32, 40505), (24, 80505)), "samples"),
    "relative/parakeet.torchscript.eager": _texts(((1, 8185), (1, 12281)), ((8, 8185), (8, 16377)), "frames"),
    "relative/vits.torchscript.eager": _texts(((1, 1024), (1, 1500)), ((96, 1024), (48, 2048)), "sequence"),
    "zoo/longt5.torchscript.eager": _texts(((1, 4096), (2, 2048)), ((8, 4096), (8, 8192)), "sequence", target=1024),
    "narrow/modernbert.torchscript.sdpa": _texts(((2, 2048), (1, 1500)), ((16, 2048), (8, 6144)), "sequence"),
    "narrow/gemma3.torchscript.eager": _texts(((2, 2048), (1, 1500)), ((16, 2048), (8, 6144)), "sequence"),
    "narrow/mistral.dynamo.sdpa": _texts(((2, 2048), (1, 1500)), ((16, 2048), (8, 6144)), "sequence"),
}


@dataclass(frozen=True)
class PeakPair:
    """One run: sizes of its inputs, estimated and measured bytes, and the first over the second."""

    sizes: Sizes
    estimated: int
    measured: int
    ratio: float


def compare_peaks(path: Path, sizes: Sizes) -> PeakPair:
    """Estimates and measures a run of a model's file."""
    model = onnx.load(path)
    estimated = estimate_peak(model, Symbolic(model), sizes).activations
    measured = measure_run(path, sizes)
    return PeakPair(dict(sizes), estimated, measured, round(estimated / measured, 3))


def compare_graph(name: str, folder: Path) -> dict[str, list[PeakPair]]:
    """The pairs of a stored graph, and of its result."""
    source, target = folder / "model.onnx", folder / "result.onnx"
    onnx.save(build.fill(build.load_graph(name)), source)
    optimize(source, target, verify=False)
    graph = GRAPHS[name]
    return {
        "original": [compare_peaks(source, sizes) for sizes in graph.original],
        "result": [compare_peaks(target, sizes) for sizes in graph.result],
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", metavar="NAME", default=[])
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if arguments.graphs and RESULTS.is_file() else {}
    for name in arguments.graphs or GRAPHS:
        with tempfile.TemporaryDirectory() as folder:
            pairs = compare_graph(name, Path(folder))
        found[name] = {key: [asdict(p) for p in value] for key, value in pairs.items()}
        print(name, {key: [p.ratio for p in value] for key, value in pairs.items()}, flush=True)
        arguments.output.write_text(strict_json.dumps_by_line({n: found[n] for n in GRAPHS if n in found}) + "\n")
    ratios = [p["ratio"] for entry in found.values() for pairs in entry.values() for p in pairs]
    off = [ratio for ratio in ratios if abs(ratio - 1) > MOST_OFF]
    print(
        f"{len(ratios)} runs, estimated over measured {min(ratios)} to {max(ratios)}; {len(off)} are off by more than a quarter"
    )
    return int(bool(off))


if __name__ == "__main__":
    sys.exit(main())
