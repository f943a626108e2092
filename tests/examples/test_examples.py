# SPDX-License-Identifier: Apache-2.0
"""The programs of examples/ run and end with status 0; each file of the folder is listed, and run by a test."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import stof

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
MODEL = "modernbert.dynamo.sdpa"


def run(*command: str | Path) -> str:
    """What a program prints; it has to end with status 0."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "optimizer")}
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def known_headers() -> list[str]:
    """Where the build of the library found ONNX Runtime's headers, if it unpacked them; CMake looks for them otherwise."""
    builds = [Path(os.environ.get("STOF_LIBRARY", "none")).parent, *sorted((ROOT / "build").glob("*"))]
    found = next((f for f in (b / "onnxruntime-headers" for b in builds) if f.is_dir()), None)
    return [f"-DONNXRUNTIME_INCLUDE_DIR={found}"] if found and "ONNXRUNTIME_INCLUDE_DIR" not in os.environ else []


def test_python(narrow: Callable[[str], Path]) -> None:
    model = narrow(MODEL)
    printed = run(sys.executable, EXAMPLES / "optimize_and_run.py", model, "--length", "64")
    assert "4 attention sites replaced" in printed
    assert "batch 2, length 64" in printed
    assert model.with_suffix(".stof.onnx").is_file()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="links libonnxruntime.so")
def test_cpp(narrow: Callable[[str], Path], tmp_path: Path) -> None:
    original, build = narrow(MODEL), tmp_path / "build"
    optimized = original.with_suffix(".stof.onnx")
    stof.optimize(original, optimized, stof.Options(verify=False))
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    python = f"-DPython3_EXECUTABLE={sys.executable}"
    run("cmake", "-S", EXAMPLES / "cpp", "-B", build, *generator, python, *known_headers())
    run("cmake", "--build", build)
    library = stof.get_library_path()
    printed = run(build / "run_model", original, optimized, library)
    assert len(re.findall(r"\d+ values in [\d.]+ ms$", printed, re.MULTILINE)) == 2

    # It compares: another model's outputs are found to differ, and without the library an error names the file.
    shutil.copy(narrow("bert.dynamo.sdpa"), tmp_path / "other.onnx")
    wrong = [str(build / "run_model"), str(tmp_path / "other.onnx"), str(optimized)]
    assert subprocess.run([*wrong, library], capture_output=True).returncode == 1
    missing = subprocess.run([*wrong, "none.so"], capture_output=True, text=True)
    assert missing.returncode == 2
    assert "none.so" in missing.stderr


def test_each_example_is_listed_and_run() -> None:
    """What no test runs is stale one day: the others are run by tools/test.sh, in environments of their own."""
    listed = (EXAMPLES / "README.md").read_text()
    tests = "".join(
        p.read_text() for p in (ROOT / "tools/test.sh", Path(__file__), *ROOT.glob("tests/integrations/*.py"))
    )
    programs = [p for p in EXAMPLES.rglob("*") if p.suffix in (".py", ".cc", ".mjs") or p.name == "workflow.json"]
    assert len(programs) >= 10
    assert [p.name for p in programs if f"({p.relative_to(EXAMPLES)})" not in listed] == []
    folders_of = {p: f'"{p.parent.name}"' if p.suffix == ".cc" else p.name for p in programs}
    assert [p.name for p, name in folders_of.items() if name not in tests] == []
