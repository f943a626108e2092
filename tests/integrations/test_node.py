# SPDX-License-Identifier: Apache-2.0
"""onnxruntime-node: optimized models run by their function bodies; it has no option for libraries of operators yet."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tool_folders import ROOT, run_program

_PACKAGE = "onnxruntime-node@1.30.0"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example and the package. Its install script would fetch CUDA's libraries."""
    folder = tmp_path_factory.mktemp("node")
    (folder / "package.json").write_text('{"private": true}')
    run_program("npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--silent", _PACKAGE, cwd=folder)
    shutil.copy(ROOT / "examples/node/run_model.mjs", folder)
    return folder


@pytest.mark.parametrize("name", ["features", "classifier"])
def test_example(node: Path, folders: Path, name: str) -> None:
    models = (folders / name / "model.onnx", folders / f"fast-{name}" / "model.onnx")
    assert "largest difference" in run_program("node", "run_model.mjs", *models, cwd=node)


def test_the_example_compares(node: Path, folders: Path) -> None:
    models = [str(folders / name / "model.onnx") for name in ("features", "fast-classifier")]
    assert subprocess.run(["node", "run_model.mjs", *models], cwd=node, capture_output=True).returncode == 1


def test_there_is_no_option_for_libraries(node: Path) -> None:
    """The page says so. Once there is one, the example and the page have to use it."""
    package = node / "node_modules/onnxruntime-node"
    binding = next((package / "bin").rglob("linux/x64/onnxruntime_binding.node")).read_bytes()
    assert b"intraOpNumThreads" in binding  # options are found by their names
    texts = [path.read_bytes() for path in (node / "node_modules").rglob("onnxruntime-*/dist/**/*.d.ts")]
    assert any(b"intraOpNumThreads" in text for text in texts)
    for text in (binding, *texts):
        assert b"customop" not in text.lower()
