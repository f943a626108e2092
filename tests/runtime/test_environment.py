# SPDX-License-Identifier: Apache-2.0
"""Environment variables: a wrong value is one error, of commands and of sessions; the library lists what is set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from onnx import TensorProto, helper
from tests.helpers.cpu_isas import CPU_ISAS

from stof.arguments.environment import CACHE, LIBRARY, TRACEBACK
from stof.errors import ArgumentError, StofError
from stof.runtime.library import environment_variables, library_path
from stof.terminal import run_command

ISA_ERROR = f"the environment variable STOF_CPU_ISA is 'avx3', expected {', '.join(CPU_ISAS[:-1])} or {CPU_ISAS[-1]}"


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments and environment variables."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)


def save_model(path: Path) -> Path:
    """One StofAttention."""
    node = helper.make_node("StofAttention", ["q", "k", "v"], ["y"], "att", domain="stof", mask="k <= q")
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 2, 4, 8]) for n in "qkvy"]
    graph = helper.make_graph([node], "g", infos[:3], infos[3:])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("stof", 1)]
    path.write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString())
    return path


SESSION = """
import sys
import onnxruntime as ort
options = ort.SessionOptions()
options.log_severity_level = 4
options.register_custom_ops_library(sys.argv[2])
try:
    ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
except Exception as error:
    sys.exit(str(error))
"""


def test_a_wrong_value_is_an_error_of_commands(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model.onnx")
    done = run("-m", "stof", str(model), STOF_CPU_ISA="avx3")
    assert done.returncode == 1
    assert done.stderr == f"stof-optimize: {ISA_ERROR}\n"
    assert run("-m", "stof", str(model), "--dry-run", STOF_CPU_ISA="portable").returncode == 0


def test_a_wrong_value_is_an_error_of_sessions(tmp_path: Path) -> None:
    """Without Python's part of stof: the library alone. Of kernels, too, that do not run on the CPU."""
    arguments = ("-c", SESSION, str(save_model(tmp_path / "model.onnx")), str(library_path()))
    done = run(*arguments, STOF_CPU_ISA="avx3")
    assert done.returncode == 1
    assert ISA_ERROR in done.stderr
    done = run(*arguments, STOF_CUDA_SPARSE_MLP="list")
    assert "STOF_CUDA_SPARSE_MLP is 'list', expected lists or gemms" in done.stderr
    assert run(*arguments, STOF_CPU_ISA="portable", STOF_CUDA_GEMM="cublaslt", STOF_MLP_HOT_MB="").returncode == 0


def test_the_library_lists_what_is_set() -> None:
    program = (
        "from stof.runtime.library import environment_variables\n"
        "print({v['name']: v['value'] for v in environment_variables() if 'value' in v})"
    )
    done = run("-c", program, STOF_CPU_ISA="portable", STOF_CHAIN_CACHE='/a "b"', STOF_TRT_LOG="")
    found = eval(done.stdout)
    assert {name: found[name] for name in ("STOF_CPU_ISA", "STOF_CHAIN_CACHE")} == {
        "STOF_CPU_ISA": "portable",
        "STOF_CHAIN_CACHE": '/a "b"',
    }
    assert "STOF_TRT_LOG" not in found
    variables = environment_variables()
    assert len(variables) == 21
    paths = {v["name"] for v in variables if v["type"] == "path"}
    assert {v["name"] for v in variables if not v["read_in_setuid"]} == paths


def test_variables_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv(TRACEBACK.name, value)
        assert TRACEBACK.flag() is expected
    monkeypatch.setenv(TRACEBACK.name, "yes")
    with pytest.raises(ArgumentError, match="the environment variable STOF_TRACEBACK is 'yes', expected 0 or 1"):
        TRACEBACK.flag()
    monkeypatch.setenv(LIBRARY.name, str(tmp_path / "none.so"))
    with pytest.raises(StofError, match=r"STOF_LIBRARY is '.*none\.so', expected a file that exists"):
        LIBRARY.file(StofError)
    monkeypatch.setenv(LIBRARY.name, "")
    assert LIBRARY.file() is None
    monkeypatch.delenv(CACHE.name)
    assert CACHE.text() == ""


def test_a_wrong_value_of_python_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(TRACEBACK.name, "on")
    assert run_command("x", lambda: 0) == ArgumentError.exit_code
    assert capsys.readouterr().err == "x: the environment variable STOF_TRACEBACK is 'on', expected 0 or 1\n"
