# SPDX-License-Identifier: Apache-2.0
"""Graphs of the zoo without padding in ONNX Runtime's CUDA provider beside the originals on the CPU, on a machine with a GPU.

``python tests/cuda/check_unpadded.py [--all] [--processes N] [--results FILE]`` with onnxruntime-gpu and ``STOF_LIBRARY``:
one graph of each architecture, or all, on ragged batches. Ends with an error where an output is wrong.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import stof
from stof.files import strict_json
from stof.options import Options

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "zoo"))
import unpadded_table
import zoo_inputs
from ragged_batches import LENGTH, architecture, compare, counting, ragged_mask

CUDA = (("CUDAExecutionProvider", {"use_tf32": "0"}), "CPUExecutionProvider")


@dataclass(frozen=True)
class Finding:
    """What became of one graph.

    Attributes:
        name: of the graph.
        error: what is wrong; empty: nothing.
        padded: why its padding stays; empty: it does not.
        fixed_sizes: it takes no ragged batch.
        on_cpu: operators that the runtime placed on the CPU, with how often they ran.
        attention: the providers that ran StofAttention.
    """

    name: str
    error: str = ""
    padded: str = ""
    fixed_sizes: bool = False
    on_cpu: dict[str, int] | None = None
    attention: tuple[str, ...] = ()


def check(name: str) -> Finding:
    """Compares one graph on batches that are padded left and right."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return _check(name, Path(folder))
        except Exception as error:  # one graph must not end the others
            return Finding(name, f"{type(error).__name__}: {str(error)[:600]}")


def _check(name: str, folder: Path) -> Finding:
    model = zoo_inputs.runnable(zoo_inputs.filled(name))
    path, written = folder / "model.onnx", folder / "out.onnx"
    onnx.save(model, str(path))
    report = stof.optimize(path, written, Options(target="cuda", unpad="on", verify=False))
    rows = report.rows("unpadding")
    if not any(r.replaced for r in rows):
        return Finding(name, padded="; ".join(r.reason for r in rows))
    zero = {o: r.batch for r in rows for o in r.zero_outputs}
    plain, legal = zoo_inputs.session(model, optimized=False), zoo_inputs.session(model)
    optimized = zoo_inputs.session(
        onnx.load(str(written)), library=str(stof.library_path()), providers=CUDA, profile=str(folder / "run")
    )
    dtype = zoo_inputs.build.manifest()[name].get("dtype", "float32")
    inputs = {i.name for i in model.graph.input}
    for side in ("left", "right"):
        feed = zoo_inputs.feeds(name, model, 6, LENGTH, side, seed=7)
        masks = [r.batch for r in rows if r.batch in inputs] or ["attention_mask"]
        if feed[masks[0]].shape != (6, LENGTH):
            return Finding(name, fixed_sizes=True)
        rng = np.random.default_rng(5)
        feed |= {m: ragged_mask(side, rng).astype(feed[m].dtype) for m in masks if feed[m].shape == (6, LENGTH)}
        outputs = [s.run(None, feed) for s in (plain, legal, optimized)]
        for output, *found in zip(plain.get_outputs(), *outputs, strict=True):
            gone = ~counting(feed[zero[output.name]]) if output.name in zero else None
            compare(*found, gone, dtype, f"{output.name}, padded on the {side}")
    on_cpu, attention = _placement(Path(optimized.end_profiling()))
    error = (
        "" if attention == ("CUDAExecutionProvider",) else f"StofAttention ran on {', '.join(attention) or 'nothing'}"
    )
    return Finding(name, error, on_cpu=on_cpu, attention=attention)


def _placement(profile: Path) -> tuple[dict[str, int], tuple[str, ...]]:
    """The operators of a profile that ran on the CPU, and the providers of StofAttention."""
    on_cpu: Counter[str] = Counter()
    attention: set[str] = set()
    for event in json.loads(profile.read_text()):
        details: dict[str, Any] = event.get("args", {})
        if event.get("cat") != "Node" or "provider" not in details:
            continue
        if details["provider"] == "CPUExecutionProvider":
            on_cpu[details["op_name"]] += 1
        if details["op_name"] == "StofAttention":
            attention.add(details["provider"])
    return dict(on_cpu.most_common()), tuple(sorted(attention))


def _chosen(is_all: bool) -> list[str]:
    """The graphs of which an attention runs on real tokens on the CPU."""
    names = [n for n, rows in unpadded_table.read_rows().items() if any(r.unpadded or r.keys_only for r in rows)]
    by_architecture: dict[str, list[str]] = {}
    for name in names:
        by_architecture.setdefault(architecture(name), []).append(name)
    return names if is_all else [forms[i % len(forms)] for i, forms in enumerate(by_architecture.values())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="all graphs")
    parser.add_argument("names", nargs="*", metavar="NAME", help="graphs; default: one of each architecture")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--results", type=Path, default=None, help="a JSON file")
    arguments = parser.parse_args()
    names = arguments.names or _chosen(arguments.all)
    found = []
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        for finding in pool.imap_unordered(check, names):
            found.append(finding)
            if finding.error or finding.padded:
                print(finding.name, finding.error and f"FAIL: {finding.error}", finding.padded, flush=True)
            if arguments.results:
                rows = [asdict(f) for f in sorted(found, key=lambda f: f.name)]
                arguments.results.write_text(strict_json.dumps(rows, indent=1) + "\n")
    wrong = [f for f in found if f.error]
    padded, fixed = sum(1 for f in found if f.padded), sum(1 for f in found if f.fixed_sizes)
    without = len(found) - len(wrong) - padded - fixed
    print(
        f"{without} of {len(names)} graphs right without padding, {len(wrong)} wrong, {padded} padded, {fixed} of fixed sizes"
    )
    return 1 if wrong or not without else 0


if __name__ == "__main__":
    sys.exit(main())
