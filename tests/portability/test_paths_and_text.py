# SPDX-License-Identifier: Apache-2.0
"""Paths as Windows writes them, consoles without UTF-8, and ends of lines."""

from __future__ import annotations

import ast
import io
import shlex
import sys
from pathlib import Path, PureWindowsPath

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests.command.test_cli import ATTENTION, WINDOW, text
from tests.portability.test_systems import COMMAND, ROOT, run_python

from stof.errors import ArgumentError, ModelError
from stof.execution.given_inputs import read_given_inputs
from stof.files import check_input, write_text
from stof.files.reading import os_reason
from stof.graph import external_data
from stof.graph.external_data import DataLocation, check_external, set_location, use_forward_slashes
from stof.installation import library_file
from stof.options import Options
from stof.run_facts.command import command_of
from stof.terminal import make_encodable, read_pairs


def with_weights_at(location: str) -> onnx.ModelProto:
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2])
    set_location(weight, DataLocation(location, 0, 8))
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", [x], [y], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def test_a_drive_is_no_address(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="does not exist"):
        check_input(Path("C:/models/model.onnx"))
    with pytest.raises(ArgumentError, match="is an address"):
        check_input(Path("s3:/bucket/model.onnx"))


def test_values_of_options_may_have_drives() -> None:
    assert read_pairs([r"weights=C:\models\a=b.npz"], "--x") == {"weights": r"C:\models\a=b.npz"}


def test_a_path_with_a_drive_is_no_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """``module:function`` is a function, a path with a colon is a file."""
    model = with_weights_at("w")
    for path in (r"C:\models\inputs.npz", "C:/models/inputs.npz"):
        with pytest.raises(ArgumentError, match="no such file or folder"):
            read_given_inputs(path, model)


@pytest.mark.parametrize(
    "location", [r"C:\w.bin", "C:w.bin", r"\w.bin", "C:/w.bin", "//server/share/w.bin", r"..\w.bin"]
)
def test_external_data_stays_in_its_folder_on_windows(
    location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_data, "Path", PureWindowsPath)
    with pytest.raises(ModelError, match="outside its folder"):
        check_external(tmp_path / "model.onnx", with_weights_at(location))


def test_backslashes_of_locations_become_slashes() -> None:
    model = with_weights_at(r"data\weights\w.bin")
    use_forward_slashes(model)
    assert external_data.external_files(model) == {"data/weights/w.bin"}


def test_backslashes_of_locations_are_told_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/w.bin").write_bytes(np.zeros(2, np.float32).tobytes())
    with pytest.raises(ModelError, match="its location has backslashes"):
        check_external(tmp_path / "model.onnx", with_weights_at(r"data\w.bin"))


def test_a_long_path_is_told_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    error = FileNotFoundError(2, "No such file or directory", f"/{'x' * 300}")
    assert os_reason(error) == "No such file or directory"
    monkeypatch.setattr(sys, "platform", "win32")
    assert "(the path has 301 characters; Windows takes 259 unless long paths are enabled)" in os_reason(error)
    assert os_reason(FileNotFoundError(2, "No such file", "/short")) == "No such file"


def test_the_command_of_a_report_is_quoted_as_the_system_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(output=Path("my models/out.onnx"))
    assert shlex.split(command_of("my models/in.onnx", options))[1] == "my models/in.onnx"
    monkeypatch.setattr(sys, "platform", "win32")
    words = command_of(r"C:\my models\in.onnx", options)
    assert words == r'stof-optimize "C:\my models\in.onnx" -o "my models/out.onnx"'


@pytest.mark.parametrize(
    ("system", "name"), [("linux", "libstof_ort.so"), ("darwin", "libstof_ort.dylib"), ("win32", "stof_ort.dll")]
)
def test_the_library_has_the_name_of_the_system(system: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    assert library_file("stof_ort") == name


def test_text_has_the_same_lines_on_each_system(tmp_path: Path) -> None:
    write_text("report", tmp_path / "report", ["a", "×"])
    assert (tmp_path / "report").read_bytes() == "a\n×\n".encode()


@pytest.mark.parametrize("encoding", ["cp1252", "cp437", "ascii"])
def test_a_console_takes_the_report(encoding: str, tmp_path: Path) -> None:
    """A name that the encoding lacks is escaped."""
    model = text(WINDOW + ATTENTION)
    model.graph.name = "→ń"
    next(n for n in model.graph.node if n.op_type == "Softmax").name = "→ńode"
    onnx.save(model, tmp_path / "model.onnx")
    arguments = (tmp_path / "model.onnx", "--dry-run", "--explain")
    done = run_python("", COMMAND, tmp_path, *arguments, PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"\u2192\u0144ode" in done.stdout


@pytest.mark.parametrize(
    ("encoding", "words"),
    [
        ("utf-8", "2.0× [B·H] →"),
        ("cp1252", r"2.0× [B·H] \u2192"),
        ("cp437", r"2.0x [B·H] \u2192"),
        ("ascii", r"2.0x [B*H] \u2192"),
    ],
)
def test_signs_of_reports_have_ascii_forms(encoding: str, words: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    assert make_encodable("2.0× [B·H] →", stream) == words


def _opens_text(call: ast.Call) -> bool:
    """Whether a call reads or writes text."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in ("read_text", "write_text"):
        return isinstance(call.func, ast.Attribute)
    if name != "open" or (isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") == "os"):
        return False
    modes = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return bool(modes) and not any("b" in mode for mode in modes)


def test_every_text_file_has_an_encoding() -> None:
    """Python's default is that of the system: cp1252 on many."""
    found = 0
    for folder in ("optimizer/stof", "models", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and _opens_text(node):
                    found += 1
                    assert any(k.arg == "encoding" for k in node.keywords), f"{path}:{node.lineno} names no encoding"
    assert found > 5


@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_a_name_that_is_no_text_is_refused(system: str, tmp_path: Path) -> None:
    script = r"""
from pathlib import Path
from stof.errors import ArgumentError
from stof.execution.ort_sessions import _utf8_path
try:
    with _utf8_path(Path("a\udcff")):
        pass
except ArgumentError as error:
    print(error)
"""
    done = run_python(system, script, tmp_path)
    assert "rename it" in done.stdout, done.stderr
