# SPDX-License-Identifier: Apache-2.0
"""Small models of random weights in the folders that tools read, optimized and damaged; programs that run on them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from optimum.exporters.onnx import main_export
from text_models import LAYERS, make_embedder, make_reranker

import stof

ROOT = Path(__file__).resolve().parents[2]


def make_folders(folder: Path) -> None:
    """Writes checkpoints, exports and optimized folders of an encoder and of a reranker."""
    make_embedder(folder / "minilm", "mean")
    make_reranker(folder / "reranker")
    for source, name, task, unpad in (
        ("minilm", "features", "feature-extraction", "on"),
        ("reranker", "classifier", "text-classification", "auto"),
    ):
        main_export(str(folder / source), folder / name, task=task, library_name="transformers", do_validation=False)
        report = stof.optimize_folder(folder / name, folder / f"fast-{name}", unpad=unpad)
        assert f"{LAYERS} attention sites replaced" in report.to_text(), report.to_text()


def damage(source: Path, target: Path) -> Path:
    """A copy of an optimized folder whose operators attend to the first key alone. Function bodies stay as they are.

    A session with the library then gives other outputs than one without.
    """
    shutil.copytree(source, target)
    model = onnx.load(str(target / "model.onnx"))
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.domain == "stof" and attribute.name == "mask":
                attribute.s = f"({attribute.s.decode() or 'True'}) and k < 1".encode()
    onnx.save(model, str(target / "model.onnx"))
    return target


def run_program(*command: object, cwd: Path | None = None, more_path: Sequence[Path] = ()) -> str:
    """What a program prints; it has to end with status 0.

    Args:
        *command: the program and its arguments. ``python`` is that of this environment.
        cwd: where it runs.
        more_path: folders of modules that it imports, beside the optimizer's.
    """
    imported = os.pathsep.join(map(str, (ROOT / "optimizer", *more_path)))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "PYTHONPATH": imported, "PATH": path}
    words = [str(word) for word in command]
    done = subprocess.run(words, env=variables, cwd=cwd, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, (
        f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    )
    return done.stdout


def assert_close(found: object, wanted: object, what: str) -> None:
    """Fails where arrays differ by more than rounding of fp32."""
    one, other = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert one.shape == other.shape, f"{what}: {one.shape}, expected {other.shape}"
    worst = float(np.abs(one - other).max())
    assert worst <= 2e-5 * max(1.0, float(np.abs(other).max())), f"{what}: they differ by {worst:.1e}"
