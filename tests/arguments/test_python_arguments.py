# SPDX-License-Identifier: Apache-2.0
"""Arguments of the Python API: what is wrong is the argument's fault, never the model's."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import stof
from stof.cli import _parser
from stof.options import CHAINS, OptionArguments
from stof.targets import TARGETS


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"target": "gpu"}, "target is 'gpu', expected 'cpu', 'cuda' or 'tensorrt'; did you mean 'cuda'?"),
        ({"target": "CUDA"}, "target is 'CUDA', expected 'cpu', 'cuda' or 'tensorrt'; did you mean 'cuda'?"),
        ({"target": None}, "target is None, expected 'cpu', 'cuda' or 'tensorrt'"),
        ({"chains": True}, "chains is True, expected 'on', 'off' or 'auto'; did you mean 'on'?"),
        ({"chains": "maybe"}, "chains is 'maybe', expected 'on', 'off' or 'auto'"),
        ({"only": "node"}, "only is 'node', expected a sequence of texts: ('node',)"),
        ({"skip": [1]}, "an element of skip is 1, expected a text"),
        ({"tune": -1}, "tune is -1, expected a number of seconds from 0 on"),
        ({"tune": True}, "tune is True, expected a number of seconds from 0 on"),
        ({"verify_budget": "45"}, "verify_budget is '45', expected a number of seconds from 0 on"),
        ({"verify_budget": float("inf")}, "verify_budget is inf, expected a number of seconds from 0 on"),
        ({"verify_memory": "2G"}, "verify_memory is '2G', expected an integer from 0 on"),
        ({"max_kl": float("nan")}, "max_kl is nan, expected a number from 0 on"),
        ({"min_cosine": 1.5}, "min_cosine is 1.5, expected a number from 0 to 1"),
        ({"verify": "no"}, "verify is 'no', expected True or False"),
        ({"json": 3}, "json is 3, expected a path"),
        ({"report": ""}, "report is '', expected a path that is not empty"),
        ({"plan": b"p.json"}, "plan is b'p.json', expected a path"),
        ({"shapes": ["S"]}, "shapes is ['S'], expected a mapping"),
        ({"shapes": {"S": (4, 2)}}, "shapes['S'] is (4, 2), expected a size, or a pair (least, most)"),
        ({"shapes": {"S": 2.5}}, "shapes['S'] is 2.5, expected a size, or a pair (least, most)"),
        ({"shapes": {1: 2}}, "a key of shapes is 1, expected a text"),
        ({"masks": {"0": None}}, "masks['0'] is None, expected a text"),
        ({"mask": {"0": "k <= q"}}, "has no argument 'mask'; did you mean 'masks'?"),
        ({"verify_buget": 1}, "has no argument 'verify_buget'; did you mean 'verify_budget'?"),
        ({"sparsify": None}, "sparsify is None, expected a text"),
    ],
)
def test_wrong_arguments(given: dict[str, Any], message: str, path: Path, tmp_path: Path) -> None:
    """The kind: wrong arguments end in errors that blame the model, or in AttributeError."""
    for call in (
        lambda: stof.Options(**given),
        lambda: stof.optimize(path, tmp_path / "new.onnx", **given),
        lambda: stof.optimize_folder(tmp_path, tmp_path / "new", **given),
    ):
        with pytest.raises(stof.ArgumentError) as error:
            call()
        assert message in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize("options", [{"target": "cuda"}, "cuda", Path("x")])
def test_options_of_another_type(options: Any, path: Path) -> None:
    with pytest.raises(
        stof.ArgumentError, match=r"expected stof.Options; options may also be given by name: .*target='cuda'"
    ):
        stof.optimize(path, None, options)


def test_options_by_name(path: Path, tmp_path: Path) -> None:
    """Those by name take the place of those of the options."""
    report = stof.optimize(path, target="cuda", dry_run=True)
    assert report.dry_run
    options = stof.Options(target="cuda", chains="off", dry_run=True)
    saved = tmp_path / "plan.json"
    stof.optimize(path, options=options, target="cpu", save_plan=str(saved))
    assert '"target": "cpu"' in saved.read_text()


def test_values_take_their_form() -> None:
    options = stof.Options(
        output="a.onnx", json="r.json", only=["1"], shapes={"S": 128, "B": [1, 4]}, masks={"0": "k <= q"}, tune=3
    )
    assert options.output == Path("a.onnx")
    assert options.json == Path("r.json")
    assert options.only == ("1",)
    assert options.shapes == {"S": (128, 128), "B": (1, 4)}
    assert options.tune == 3.0
    assert replace(options, target="cuda").shapes == options.shapes
    assert pickle.loads(pickle.dumps(options)) == copy.copy(options) == options


def test_reports_fit_a_screen(path: Path, tmp_path: Path) -> None:
    """The repr of a report is one line, however much the report holds."""
    report = stof.optimize(path, dry_run=True)
    assert re.fullmatch(r"<stof\.Report of .*model\.onnx: 1 softmax, 1 attention sites .*>", repr(report))
    folder = stof.optimize_folder(tmp_path, dry_run=True)
    assert repr(folder) == f"<stof.FolderReport of {tmp_path}: 1 models, 0 failed, output None>"
    assert len(repr(report)) < 400


def test_fields_are_listed_once() -> None:
    """What type checkers read, the fields and their documentation name the same arguments."""
    names = {f.name for f in fields(stof.Options)}
    assert {"output", *OptionArguments.__annotations__} == names
    documented = inspect.getdoc(stof.Options) or ""
    for name in names:
        assert f"    {name}: " in documented, name


def test_the_command_has_the_same_values() -> None:
    choices = {a.dest: a.choices for a in _parser()._actions}
    assert tuple(choices["target"]) == tuple(TARGETS)
    assert tuple(choices["chains"]) == CHAINS


def test_the_api_is_listed() -> None:
    listed = dir(stof)
    for name in stof.__all__:
        assert name in listed
        assert getattr(stof, name) is not None
    assert not hasattr(stof, "optimise")


USER = """
import os
from pathlib import Path

import numpy as np
import onnx
import stof
from stof.tensorrt import BuildOptions


def run(model: onnx.ModelProto, options: stof.Options) -> None:
    report: stof.Report = stof.optimize("model.onnx", "new.onnx", target="cuda", shapes={"S": 128, "B": (1, 8)})
    report = stof.optimize(Path("model.onnx"), options=stof.Options(json="r.json", only=["0"], plan=Path("p.json")))
    feed = {"q": np.ones((1, 2), np.float32)}
    report = stof.optimize(os.fsencode("m").decode(), inputs=[feed, "more.npz"], verify_budget=10)
    print(report.replaced, report.to_text(), report.to_json())
    folder: stof.FolderReport = stof.optimize_folder("folder", Path("new"), options, tune=30)
    print(folder.exit_code, stof.build_info()["backends"], stof.library_path().name, stof.get_library_path().upper())
    stof.register(object())
    try:
        stof.optimize("model.onnx", dry_run=True)
    except (stof.ArgumentError, stof.ModelError, stof.VerifyError) as error:
        problem: stof.StofError = error
        print(problem.exit_code)
    print(BuildOptions(verbose=True))
"""


def test_types_of_a_user(tmp_path: Path) -> None:
    """A script that touches each public function passes mypy --strict; the package says that it has types."""
    pytest.importorskip("mypy", reason="mypy is not installed")
    assert (Path(stof.__file__).parent / "py.typed").exists()
    script = tmp_path / "user.py"
    script.write_text(USER)
    source = Path(stof.__file__).parent.parent
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), "--follow-imports", "silent"]
    found = subprocess.run(
        [*command, "--config-file", "", str(script)],
        capture_output=True, text=True, cwd=tmp_path, env={"MYPYPATH": str(source), "PATH": ""},
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("name", sorted({"output", *OptionArguments.__annotations__} - {"inputs"}))
def test_values_of_any_type(name: str) -> None:
    """A value is taken or refused with an ArgumentError that begins with the argument; nothing else is raised."""
    wrong: list[Any] = [None, 3, -1, 2.5, True, "x", b"x", [], [1], {}, {"a": 1}, object(), float("nan"), (1, 2, 3)]
    messages = []
    for value in wrong:
        try:
            stof.Options(**{name: value})
        except stof.ArgumentError as error:
            messages.append(str(error))
    assert len(messages) >= 5
    assert all(name in message for message in messages)
