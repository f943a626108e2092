# SPDX-License-Identifier: Apache-2.0
"""The end of a report says how to run the result, in one form for files and folders."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
from tests.command.test_cli import ATTENTION, WINDOW, text
from tests.folders.test_folders import put

import stof
from stof.options import Options
from stof.report import describe_registration
from stof.runtime.library import LIBRARY


def write(folder: Path, nodes: str = WINDOW + ATTENTION) -> Path:
    path = folder / "model.onnx"
    onnx.save(text(nodes), str(path))
    return path


def test_a_file_ends_with_what_registers_the_library(tmp_path: Path) -> None:
    """The report of a single file ended with its name; that of a folder said more."""
    report = stof.optimize(write(tmp_path), options=Options(verify=False))
    *_, written, last = report.to_text().splitlines()
    assert written.startswith("written: ")
    library = stof.get_library_path()
    assert last == f"{Path(library).name}: {describe_registration(library)}; without it the model runs, slowly"
    options = ort.SessionOptions()
    exec(describe_registration(library).partition(": ")[2].partition(", or ")[0], {"options": options})
    ort.InferenceSession(str(report.output), options, providers=["CPUExecutionProvider"])


def test_a_folder_says_it_in_the_same_words(tmp_path: Path) -> None:
    put(tmp_path / "in" / "model.onnx")
    words = stof.optimize_folder(tmp_path / "in", tmp_path / "out", Options(verify=False)).to_text()
    assert f"{LIBRARY}: copied; {describe_registration(str(tmp_path / 'out' / LIBRARY))}" in words.splitlines()


@pytest.mark.parametrize("settings", [{"dry_run": True}, {"skip": ("*",)}], ids=str)
def test_what_needs_no_library_names_none(settings: dict[str, object], tmp_path: Path) -> None:
    report = stof.optimize(write(tmp_path), tmp_path / "out.onnx", Options(**settings))  # type: ignore[arg-type]
    assert "register" not in report.to_text()


def test_tensorrt_builds_an_engine(tmp_path: Path) -> None:
    report = stof.optimize(write(tmp_path), tmp_path / "out.onnx", Options(target="tensorrt", verify=False))
    assert report.to_text().splitlines()[-1] == f"build an engine: stof-trt build {tmp_path / 'out.onnx'}"
