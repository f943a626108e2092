# SPDX-License-Identifier: Apache-2.0
"""The command and the package do as their users' other tools do: names, options, help, supported versions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
from tests.command.test_cli import ATTENTION, WINDOW, text

import stof
from stof import cli, plan
from stof.ops import OPS

ROOT = Path(__file__).resolve().parents[2]
PROVIDERS = {"CPUExecutionProvider": "cpu", "CUDAExecutionProvider": "cuda", "TensorrtExecutionProvider": "tensorrt"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(text(WINDOW + ATTENTION), path)
    return path


# ---- the library's path ----
def test_library_path_is_given_as_text_too() -> None:
    path = stof.get_library_path()
    assert type(path) is str
    assert path == str(stof.library_path())
    ort.SessionOptions().register_custom_ops_library(path)
    assert "get_library_path" in stof.__all__


def test_library_path_as_text_fails_as_the_path_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOF_LIBRARY", "/none/libstof_ort.so")
    for function in (stof.get_library_path, stof.library_path):
        with pytest.raises(stof.errors.StofError, match=r"STOF_LIBRARY is '/none/libstof_ort\.so', expected a file"):
            function()


def test_session_options_have_the_library(model: Path) -> None:
    """A file without function bodies loads with the library alone."""
    optimized = model.with_suffix(".stof.onnx")
    stof.optimize(model, optimized, verify=False)
    proto = onnx.load(str(optimized))
    del proto.functions[:]
    options = stof.session_options(intra_op_num_threads=1, log_severity_level=3)
    assert (options.intra_op_num_threads, options.log_severity_level) == (1, 3)
    assert ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"]).get_inputs()
    with pytest.raises(ort.capi.onnxruntime_pybind11_state.Fail, match="StofAttention"):
        ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])


def test_session_options_refuse_what_they_do_not_have() -> None:
    with pytest.raises(stof.ArgumentError, match=r"no attribute 'threads'; expected one of .*, intra_op_num_threads, "):
        stof.session_options(threads=1)
    with pytest.raises(stof.ArgumentError, match="no attribute 'add_session_config_entry'"):
        stof.session_options(add_session_config_entry=1)
    with pytest.raises(stof.ArgumentError, match=r"SessionOptions\.intra_op_num_threads is '1', expected int"):
        stof.session_options(intra_op_num_threads="1")


def test_session_options_need_onnx_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(stof.errors.StofError, match="need ONNX Runtime: pip install onnxruntime"):
        stof.session_options()


@pytest.mark.parametrize(("name", "package"), [("fastembed", "fastembed>=0.9"), ("olive", "olive-ai")])
def test_hooks_of_other_tools_say_what_to_install(name: str, package: str) -> None:
    """In a process of its own, for which the tool is not installed."""
    hide = f"import sys; sys.modules[{name!r}] = None; import stof.integrations.{name}"
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "optimizer")}
    done = subprocess.run([sys.executable, "-c", hide], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: stof.integrations.{name} needs ")
    assert package in last


# ---- --provider ----
def saved_target(path: Path) -> str:
    return plan.load(path, {op.key: op.plan_format for op in OPS}).target.name


@pytest.mark.parametrize(("provider", "target"), list(PROVIDERS.items()))
def test_a_provider_names_a_target(provider: str, target: str, model: Path) -> None:
    found = []
    for arguments in (["--provider", provider], ["--target", target], ["--provider", provider, "--target", target]):
        saved = model.with_name("plan.json")
        assert cli.main([str(model), "--dry-run", "--save-plan", str(saved), *arguments]) == 0
        assert saved_target(saved) == target
        found.append(saved.read_text())
    assert len(set(found)) == 1


@pytest.mark.parametrize(
    ("target", "provider"), [(t, p) for p, own in PROVIDERS.items() for t in PROVIDERS.values() if t != own]
)
def test_a_provider_and_a_target_that_disagree(
    target: str, provider: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([str(model), "--target", target, "--provider", provider]) == 1
    error = capsys.readouterr().err
    assert (
        f"--target {target} and --provider {provider} disagree: the provider is target {PROVIDERS[provider]}" in error
    )
    assert list(model.parent.glob("*.stof.onnx")) == []


@pytest.mark.parametrize("provider", ["cpu", "ROCMExecutionProvider", "CPU"])
def test_other_providers_are_refused(provider: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([str(model), "--provider", provider]) == 1
    assert f"invalid choice: '{provider}'" in capsys.readouterr().err


# ---- --help ----
@pytest.fixture
def help_text(capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        cli._parser().parse_args(["--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_lists_what_works_and_nothing_else(
    help_text: str, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option is listed exactly where the command does not answer that it is of another version."""
    monkeypatch.chdir(model.parent)  # some options write a file
    listed = set(re.findall(r"--[a-z][a-z0-9-]*", help_text))
    for action in cli._parser()._actions:
        for option in (o for o in action.option_strings if o.startswith("--") and o not in ("--help", "--version")):
            cli.main([str(model), "--dry-run", option, *(["1"] if action.nargs is None else [])])
            is_later = "is not in this version" in capsys.readouterr().err
            assert (option in listed) != is_later, option


def test_help_gives_defaults_as_they_are(help_text: str) -> None:
    words = " ".join(help_text.split())
    assert f"time for verification ({stof.Options().verify_budget:g})" in words
    assert f"what choices are tuned for ({stof.Options().target})" in words


# ---- versions and extras ----
@pytest.fixture(scope="module")
def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_python_versions_are_the_same_everywhere(project: dict[str, dict[str, object]]) -> None:
    assert project["project"]["requires-python"] == ">=3.11"
    names = [c.rpartition(" ")[2] for c in project["project"]["classifiers"] if "Python :: 3." in c]
    assert names == ["3.11", "3.12", "3.13", "3.14"]
    assert project["tool"]["ruff"]["target-version"] == "py311"
    assert project["tool"]["mypy"]["python_version"] == "3.11"
    for name in ("README.md", "CONTRIBUTING.md", "docs/guide/quickstart.md", "docs/reference/support-matrix.md"):
        assert set(re.findall(r"Python \|? ?(3\.\d+)", (ROOT / name).read_text())) == {"3.11"}, name


def test_only_an_extra_of_its_own_needs_a_compiler(project: dict[str, dict[str, dict[str, list[str]]]]) -> None:
    """The wheels of cuda-python are binary; pycuda is source alone."""
    extras = project["project"]["optional-dependencies"]
    assert [name for name, needs in extras.items() if "pycuda" in needs] == ["pycuda"]
    for name in ("gpu", "trt"):
        assert "cuda-python" in extras[name]


def test_first_lines_of_the_readme_install_for_each_runtime(
    project: dict[str, dict[str, dict[str, list[str]]]],
) -> None:
    first = (ROOT / "README.md").read_text().partition("![")[0]
    commands = re.findall(r"^(.*)pip install '\.\[(.+)\]' +# (.+)$", first, re.MULTILINE)
    assert [name for _, _, name in commands] == ["ONNX Runtime on the CPU", "ONNX Runtime with CUDA", "TensorRT"]
    extras = project["project"]["optional-dependencies"]
    needs = [{n.partition(">")[0] for e in names.split(",") for n in extras[e]} for _, names, _ in commands]
    assert ["onnxruntime" in n or "onnxruntime-gpu" in n for n in needs] == [True] * 3  # each can verify
    assert "onnxruntime-gpu" in needs[1]
    assert "tensorrt" in needs[2]
    assert [prefix for prefix, _, _ in commands] == ["", *["CMAKE_ARGS=-DSTOF_CUDA=ON "] * 2]
    assert first.count("\n") < 40  # what runs on what, and the commands, fit the first screen
