# SPDX-License-Identifier: Apache-2.0
"""What an installation lacks is said, with the reason and the command that adds it, by everything that needs it."""

from __future__ import annotations

import importlib.resources
import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
from tests.command.test_cli import ATTENTION, WINDOW, text

import stof
from stof import cli
from stof.installation import CUDA, TENSORRT, how_to_add, missing, read_left_out
from stof.runtime.cuda import device_info
from stof.runtime.library import LibraryError
from stof.tensorrt.cli import main as stof_trt

ROOT = Path(__file__).resolve().parents[2]
REASONS = {CUDA: "nobody asked for them", TENSORRT: "no headers"}
ADD_CUDA = "in stof's source folder: CMAKE_ARGS=-DSTOF_CUDA=ON pip install ."
ADD_TENSORRT = "in stof's source folder: CMAKE_ARGS=-DSTOF_TENSORRT=ON pip install ."

pytestmark = pytest.mark.skipif("cuda" in stof.build_info()["backends"], reason="the library has CUDA kernels")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an installation that left out CUDA and TensorRT; its library answers by the one already loaded."""
    folder = tmp_path / "package" / "lib"
    folder.mkdir(parents=True)
    (folder / "libstof_ort.so").write_bytes(b"")
    (folder / "left_out.json").write_text(json.dumps(REASONS))
    monkeypatch.setenv("STOF_LIBRARY", str(folder / "libstof_ort.so"))
    monkeypatch.delenv("STOF_TRT_LIBRARY", raising=False)
    monkeypatch.setattr(importlib.resources, "files", lambda package: folder.parent)
    return folder


def plugin_in(folder: Path, reasons: dict[str, str]) -> Path:
    """A plugin library, as far as its path goes, of a build with these reasons."""
    path = folder / "libstof_trt.so"
    path.write_bytes(b"")
    (folder / "left_out.json").write_text(json.dumps(reasons))
    return path


def test_reasons(tmp_path: Path) -> None:
    assert read_left_out(tmp_path) == {}
    assert missing(CUDA, tmp_path) == f"not installed; {ADD_CUDA}"
    for damaged in ("{", "[]", "\xff"):
        (tmp_path / "left_out.json").write_text(damaged, "latin-1")
        assert read_left_out(tmp_path) == {}
    (tmp_path / "left_out.json").write_text(json.dumps(REASONS))
    assert read_left_out(tmp_path) == REASONS
    assert missing(CUDA, tmp_path) == f"not built (nobody asked for them); {ADD_CUDA}"


def test_version(installed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    first, runtime, cuda, plugin = capsys.readouterr().out.splitlines()
    assert first.startswith(f"stof {stof.__version__}, backends cpu, ")
    assert runtime.startswith("ONNX Runtime: 1.")
    assert cuda == f"CUDA kernels: not built (nobody asked for them); {ADD_CUDA}"
    assert plugin.startswith(f"TensorRT plugin: libstof_trt.so is not built (no headers); {ADD_TENSORRT}")

    path = plugin_in(installed, {CUDA: REASONS[CUDA]})
    assert cli.main(["--version"]) == 0
    without = f"without CUDA kernels it builds engines and cannot run them; {ADD_CUDA}"
    assert capsys.readouterr().out.splitlines()[3] == f"TensorRT plugin: {path}; {without}"

    plugin_in(installed, {})
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert cli.main(["--version"]) == 0
    _, runtime, _, plugin = capsys.readouterr().out.splitlines()
    assert runtime == "ONNX Runtime: not installed; to verify and run models: pip install onnxruntime"
    assert plugin == f"TensorRT plugin: {path}"


@pytest.mark.usefixtures("installed")
def test_plugin_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert stof_trt(["--plugin-path"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"libstof_trt.so is not built (no headers); {ADD_TENSORRT}" in printed.err


def test_targets(installed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report of a model for a target notes what this installation lacks to run it there."""
    onnx.save(text(WINDOW + ATTENTION), tmp_path / "model.onnx")
    arguments = [str(tmp_path / "model.onnx"), "--dry-run", "--target"]
    notes = {}
    for target in ("cpu", "cuda", "tensorrt"):
        assert cli.main([*arguments, target]) == 0
        notes[target] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert notes["cpu"] == []
    (cuda,), (tensorrt,) = notes["cuda"], notes["tensorrt"]
    assert "on the CPU, in the CUDA provider too, since the CUDA kernels are not built (nobody asked for them)" in cuda
    assert cuda.endswith(ADD_CUDA)
    assert f"libstof_trt.so is not built (no headers); {ADD_TENSORRT}" in tensorrt

    plugin_in(installed, REASONS)
    assert cli.main([*arguments, "tensorrt"]) == 0
    assert f"it builds engines and cannot run them; {ADD_CUDA}" in capsys.readouterr().out


def test_tuning_on_a_device_needs_its_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a model has attention to measure, and where it has nothing but chains."""
    chain = text("h = Relu (q)  out = Tanh (h)")
    for name, model in (("attention", text(WINDOW + ATTENTION)), ("chain", chain)):
        path = tmp_path / f"{name}.onnx"
        onnx.save(model, path)
        assert cli.main([str(path), "--target", "cuda", "--tune", "5", "--dry-run"]) == 1
        assert "--tune measures on a CUDA device: this build has no CUDA kernels; " in capsys.readouterr().err


def test_library_names_the_same_command() -> None:
    with pytest.raises(LibraryError) as caught:
        device_info()
    assert str(caught.value) == f"this build has no CUDA kernels; {how_to_add(CUDA)}"


@pytest.mark.usefixtures("installed")
def test_registration_beside_a_cuda_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[str] = []
    options = SimpleNamespace(register_custom_ops_library=registered.append)
    for providers in (["CPUExecutionProvider"], ["CUDAExecutionProvider", "CPUExecutionProvider"]):
        runtime = SimpleNamespace(get_available_providers=lambda providers=providers: providers)
        monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
        if len(providers) == 1:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                stof.register(options)
        else:
            with pytest.warns(UserWarning, match=r"run on the CPU.* not built \(nobody asked for them\); in stof's"):
                stof.register(options)
    assert len(registered) == 2


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no CMake")
@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"STOF_CUDA": "OFF", "STOF_TENSORRT": "AUTO"}, {CUDA, TENSORRT}),
        ({"STOF_CUDA": "OFF", "STOF_TENSORRT": "OFF"}, {CUDA, TENSORRT}),
        ({"STOF_CUDA": "OFF", "STOF_TENSORRT": "AUTO", "STOF_TRT_MAJOR": "10"}, {CUDA}),
        ({"STOF_CUDA": "ON", "STOF_TENSORRT": "ON", "STOF_TRT_MAJOR": "10"}, set()),
    ],
)
def test_build_says_what_it_leaves_out(tmp_path: Path, settings: dict[str, str], parts: set[str]) -> None:
    """The last lines of configuration and install, and the file beside the libraries."""
    (tmp_path / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.24)\nproject(p NONE)\ninclude({ROOT}/cmake/LeftOut.cmake)\n"
    )
    build = tmp_path / "build"
    configure = ["cmake", "-S", str(tmp_path), "-B", str(build), *(f"-D{n}={v}" for n, v in settings.items())]
    install = ["cmake", "--install", str(build), "--prefix", str(tmp_path / "installed")]
    for command in (configure, install):
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        said = [line for line in printed.splitlines() if line.startswith("-- Not built: ")]
        assert len(said) == len(parts)
        for part in parts:
            assert any(line.endswith(how_to_add(part).split(": ")[1]) for line in said), said
    assert set(read_left_out(tmp_path / "installed/stof/lib")) == parts
