# SPDX-License-Identifier: Apache-2.0
"""Wheels: metadata of the CPU distribution and of the one with CUDA kernels, which is made from it, and what scripts refuse.

``tools/wheel.sh`` builds the first one and runs it in empty environments; the second one needs nvcc.
"""

from __future__ import annotations

import email
import os
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = runpy.run_path(str(ROOT / "tools/cuda_project.py"))
TEXT = (ROOT / "pyproject.toml").read_text()


def flat(table: dict[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flat(value, f"{path}{key}/") if isinstance(value, dict) else {path + key: value}
    return found


def test_the_cuda_distribution_differs_in_name_and_kernels_alone() -> None:
    cpu, cuda = (flat(tomllib.loads(text)) for text in (TEXT, PROJECT["convert"](TEXT)))
    assert cpu.keys() == cuda.keys()
    assert {key: cuda[key] for key in cpu if cpu[key] != cuda[key]} == {
        "project/name": "stof-onnx-cuda13",
        "project/description": f"{cpu['project/description']}; with kernels for CUDA 13",
        "tool/scikit-build/build-dir": "build/wheel-cuda13",
        "tool/scikit-build/cmake/define/STOF_CUDA": "ON",
    }
    assert cpu["project/name"] == "stof-onnx"
    assert cpu["tool/scikit-build/cmake/define/STOF_CUDA"] == "OFF"


def test_wheels_carry_the_package_alone(tmp_path: Path) -> None:
    """Comparisons with peers (``bench/``) run from a clone; test_rooms.py shows that the package imports none of them."""
    pytest.importorskip("scikit_build_core")
    for text in (TEXT, PROJECT["convert"](TEXT)):
        assert tomllib.loads(text)["tool"]["scikit-build"]["wheel"]["packages"] == ["optimizer/stof"]
    settings = {"wheel.cmake": "false", "build-dir": str(tmp_path / "build")}  # nothing is compiled
    script = f"from scikit_build_core.build import build_wheel; build_wheel({str(tmp_path)!r}, {settings!r})"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".py")]
    assert {name.split("/")[0] for name in names} == {"stof"}
    assert "stof/bench/model.py" in names
    assert not [name for name in names if name.startswith(("stof/bench/gpu", "stof/bench/cpu", "stof/bench/decoder"))]


@pytest.mark.parametrize("change", list(PROJECT["CHANGES"]))
@pytest.mark.parametrize("times", [0, 2])
def test_a_project_file_that_changed_is_noticed(change: str, times: int) -> None:
    with pytest.raises(ValueError, match=f"has {times} times"):
        PROJECT["convert"](TEXT.replace(change, change * times))


@pytest.fixture(params=["stof-onnx", "stof-onnx-cuda13"])
def metadata(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Any]:
    """The distribution's name, and the metadata that pip gets for it. Nothing is compiled."""
    pytest.importorskip("scikit_build_core")
    text = TEXT if request.param == "stof-onnx" else PROJECT["convert"](TEXT)
    (tmp_path / "pyproject.toml").write_text(text)
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "CMakeLists.txt").write_text('message(FATAL_ERROR "nothing may be built")')
    script = "from scikit_build_core.build import prepare_metadata_for_build_wheel as prepare; prepare('out')"
    (tmp_path / "out").mkdir()
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "out").glob("*.dist-info")
    return request.param, email.message_from_string((folder / "METADATA").read_text())


def test_metadata(metadata: tuple[str, Any]) -> None:
    name, found = metadata
    assert found["Name"] == name
    assert found["Requires-Python"] == ">=3.11"
    assert found["License-Expression"] == "Apache-2.0"
    versions = [c.rpartition(" ")[2] for c in found.get_all("Classifier") if "Python :: 3." in c]
    assert versions == ["3.11", "3.12", "3.13", "3.14"]
    assert {"cpu", "gpu", "trt", "pycuda"} <= set(found.get_all("Provides-Extra"))
    needs = [n.replace('"', "'") for n in found.get_all("Requires-Dist")]
    assert [n for n in needs if n.startswith("pycuda")] == ["pycuda; extra == 'pycuda'"]


@pytest.fixture
def run_cuda_script(tmp_path: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Runs ``wheel_cuda.sh`` where nothing but a few tools and perhaps an nvcc with some output is found."""

    def run(nvcc: str) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / "bin"
        folder.mkdir()
        for name in ("bash", "dirname", "grep"):
            (folder / name).symlink_to(str(shutil.which(name)))
        (folder / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        if nvcc:
            (folder / "nvcc").write_text(f"#!/bin/sh\necho '{nvcc}'\n")
        for path in folder.iterdir():
            if not path.is_symlink():
                path.chmod(0o755)
        script = str(ROOT / "tools/wheel_cuda.sh")
        return subprocess.run(
            ["bash", script], env={**os.environ, "PATH": str(folder)}, capture_output=True, text=True, check=False
        )

    return run


@pytest.mark.parametrize(
    ("nvcc", "words"),
    [
        ("", "no nvcc; install the CUDA toolkit 13"),
        ("Cuda compilation tools, release 12.8, V12.8.93", "nvcc is not of CUDA 13"),
        ("Cuda compilation tools, release 130.1, V13", "nvcc is not of CUDA 13"),
    ],
)
def test_the_cuda_wheel_needs_its_compiler(
    nvcc: str, words: str, run_cuda_script: Callable[[str], subprocess.CompletedProcess[str]]
) -> None:
    done = run_cuda_script(nvcc)
    assert (done.returncode, done.stderr) == (1, f"wheel_cuda.sh: {words}\n")
