# SPDX-License-Identifier: Apache-2.0
"""Inputs that a user gives to verification: files, folders, callables; what is wrong with them; and those that are drawn."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import stof
from stof import cli
from stof.errors import ArgumentError, InputsRefusedError
from stof.execution.given_inputs import read_given_inputs

# One head of attention over words of a table; PLACE makes their numbers.
_MODEL = """<ir_version: 10, opset_import: ["" : 18]>
g (int64[B, S] ids, float[1] speed) => (float[B, 2, S, 8] y) <float[40, 16] table, int64[4] split = {{0, 0, 2, 8}}> {{
    {place}
    e = Gather (table, place) f = Div (e, speed) r = Reshape (f, split)
    q = Transpose <perm = [0, 2, 1, 3]> (r) k = Transpose <perm = [0, 2, 3, 1]> (r)
    s = MatMul (q, k) w = Softmax <axis = -1> (s) y = MatMul (w, q)
}}"""
_HIDDEN = "f32 = Cast <to = 1> (ids) root = Sqrt (f32) back = Cast <to = 7> (root) place = Mul (back, back)"
# Runs where the largest number is 7777 alone: others lead to an index beyond the one element of a constant.
_UNDRAWABLE = """zero = Constant <value = int64[1] {0}> () one = Constant <value = int64[1] {1}> ()
    all = Constant <value = int64[1] {-1}> () m = ReduceMax <keepdims = 0> (ids) seven = Constant <value = int64 {60481729}> ()
    mm = Mul (m, m) d = Sub (mm, seven) d1 = Unsqueeze (d, zero) i = Unsqueeze (d1, one) flat = Reshape (ids, all)
    z = Mul (flat, zero) nothing = GatherND (one, i) n = Mul (nothing, zero) zeros = Mul (ids, n) place = Add (zeros, n)"""


@pytest.fixture
def make(tmp_path: Path) -> Callable[[str], Path]:
    def write(place: str = "place = Identity (ids)") -> Path:
        model = onnx.parser.parse_model(_MODEL.format(place=place))
        table = np.random.default_rng(0).standard_normal((40, 16)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
        del model.graph.value_info[:]
        path = tmp_path / "model.onnx"
        onnx.save(model, path)
        return path

    return write


def feed(length: int = 6, batch: int = 1) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(length).integers(0, 40, (batch, length))
    return {"ids": ids, "speed": np.array([1.5], np.float32)}


def cases_of(path: Path, *options: str) -> list[str]:
    report = path.with_name("report.json")
    assert cli.main([str(path), "-o", str(path.with_name("out.onnx")), "--json", str(report), *options]) == 0
    comparisons = json.loads(report.read_text())["verification"]["comparisons"]
    return [c["what"].partition(", ")[2] for c in comparisons if not c["site"]]


def write_tensors(folder: Path, arrays: dict[str, np.ndarray], named: bool) -> None:
    folder.mkdir(parents=True)
    for number, (name, array) in enumerate(arrays.items()):
        tensor = onnx.numpy_helper.from_array(array, name if named else None)
        (folder / f"input_{number}.pb").write_bytes(tensor.SerializeToString())


def test_a_file_comes_before_drawn_inputs(make: Callable[..., Path], tmp_path: Path) -> None:
    file = tmp_path / "feed.npz"
    np.savez(file, **feed(11))
    found = cases_of(make(), "--inputs", str(file))
    assert found[0] == f"inputs {file}"
    assert len(found) > 1
    assert not any("inputs" in case for case in found[1:])


@pytest.mark.parametrize("named", [True, False])
def test_folders_of_test_data_are_read(make: Callable[..., Path], tmp_path: Path, named: bool) -> None:
    for number in (0, 1, 10, 2):
        write_tensors(tmp_path / "data" / f"test_data_set_{number}", feed(4 + number), named)
    found = cases_of(make(), "--inputs", str(tmp_path / "data"))
    assert [Path(c).name for c in found[:4]] == [f"test_data_set_{n}" for n in (0, 1, 2, 10)]
    model = onnx.load(tmp_path / "model.onnx")
    one = read_given_inputs(tmp_path / "data" / "test_data_set_2", model)
    assert [f.arrays["ids"].shape for f in one] == [(1, 6)]


def test_a_callable_is_found_in_the_current_folder(
    make: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        "import numpy as np",
        "def feeds():",
        "    for n in (3, 8):",
        "        yield {'ids': np.ones((2, n), np.int64), 'speed': np.ones(1, np.float32)}",
    ]
    (tmp_path / "module_of_feeds.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    found = cases_of(make(), "--inputs", "module_of_feeds:feeds")
    assert found[:2] == ["inputs module_of_feeds:feeds (0)", "inputs module_of_feeds:feeds (1)"]
    assert sys.path == before


def test_options_are_repeatable(make: Callable[..., Path], tmp_path: Path) -> None:
    for length in (3, 5):
        np.savez(tmp_path / f"{length}.npz", **feed(length))
    found = cases_of(make(), "--inputs", str(tmp_path / "3.npz"), "--inputs", str(tmp_path / "5.npz"))
    assert [Path(c).name for c in found[:2]] == ["3.npz", "5.npz"]


@pytest.mark.parametrize("source", [feed(5), [feed(5), feed(7)], lambda: feed(5), lambda: iter([feed(5), feed(7)])])
def test_python_takes_arrays_and_callables(make: Callable[..., Path], tmp_path: Path, source: Any) -> None:
    report = stof.optimize(make(), tmp_path / "out.onnx", inputs=source)
    assert report.verification is not None
    assert any("given in Python" in c.what or "lambda" in c.what for c in report.verification.comparisons)


_ids = np.zeros((1, 4), np.int64)
_speed = np.ones(1, np.float32)
_WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a name": ({"ids": _ids, "speed": _speed, "idz": _ids}, r"no input 'idz'; expected 'ids', 'speed'"),
    "one less": ({"ids": _ids}, r"input 'speed' is missing; found 'ids'"),
    "a type": ({"ids": _ids.astype(np.int32), "speed": _speed}, r"'ids' has dtype int32; expected int64"),
    "a float type": ({"ids": _ids, "speed": np.ones(1)}, r"'speed' has dtype float64; expected float32"),
    "a rank": ({"ids": _ids[0], "speed": _speed}, r"'ids' has shape \[4\]; expected \[B, S\]"),
    "a size": ({"ids": _ids, "speed": np.ones(2, np.float32)}, r"'speed' has shape \[2\]; expected \[1\]"),
}


@pytest.mark.parametrize("name", _WRONG)
def test_what_is_wrong_is_said(make: Callable[..., Path], tmp_path: Path, name: str) -> None:
    arrays, message = _WRONG[name]
    np.savez(tmp_path / "feed.npz", **arrays)
    with pytest.raises(ArgumentError, match=message):
        stof.optimize(make(), tmp_path / "out.onnx", inputs=str(tmp_path / "feed.npz"))
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no-such.npz", "no such file or folder"),
        ("no_such_module:f", "ModuleNotFoundError"),
        ("json:no_such_function", "AttributeError"),
        ("json:__name__", "no function"),
        ("os:getcwd", "TypeError|gave str"),
        ("text.npz", "no .npz file that can be read"),
        ("array.npy", "one array without a name"),
        ("empty", "found no input_"),
        ("broken", "no tensor that can be read"),
    ],
)
def test_sources_that_cannot_be_read(
    make: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.npz").write_text("no archive")
    np.save(tmp_path / "array.npy", _ids)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "input_0.pb").write_bytes(b"\xff\xff")
    with pytest.raises(ArgumentError, match=message):
        stof.optimize(make(), tmp_path / "out.onnx", inputs=text)


def test_given_inputs_that_do_not_run_are_named(make: Callable[..., Path], tmp_path: Path) -> None:
    wrong = {**feed(4), "ids": np.full((1, 4), 99)}
    with pytest.raises(ArgumentError, match=r"inputs given in Python: the model does not run on them: .*idx=99"):
        stof.optimize(make(), tmp_path / "out.onnx", inputs=wrong)


def test_given_inputs_without_elements_are_named(make: Callable[..., Path], tmp_path: Path) -> None:
    path = make("six = Constant <value = int64[2] {1, 6}> () place = Reshape (ids, six)")
    with pytest.raises(
        ArgumentError, match=r"does not run on them \(without elements: 'ids' has the shape \[1, 0\]\): "
    ):
        stof.optimize(path, tmp_path / "out.onnx", inputs={**feed(6), "ids": np.zeros((1, 0), np.int64)})


def test_given_inputs_of_an_empty_batch_are_refused(make: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(
        ArgumentError, match=r"Python: every output is empty \(output 'y' has the shape \[0, 2, 6, 8\]\)"
    ):
        stof.optimize(make(), tmp_path / "out.onnx", inputs=feed(6, batch=0))
    assert not (tmp_path / "out.onnx").exists()


def test_inputs_are_drawn_again_until_they_run(make: Callable[..., Path], tmp_path: Path) -> None:
    report = stof.optimize(make(_HIDDEN), tmp_path / "out.onnx")
    assert [s.replaced for s in report.sites] == [True]
    assert report.verification is not None
    assert report.verification.comparisons


def test_where_no_drawn_input_runs_the_message_says_what_was_tried(make: Callable[..., Path], tmp_path: Path) -> None:
    path = make(_UNDRAWABLE)
    with pytest.raises(InputsRefusedError) as caught:
        stof.optimize(path, tmp_path / "out.onnx")
    message = str(caught.value)
    assert "'ids' int64 [" in message
    assert "'speed' float32 [1] of " in message
    assert "--inputs FILE" in message
    assert "GatherND" in message
    assert "cannot load" not in message
    assert caught.value.exit_code == 3
    assert not (tmp_path / "out.onnx").exists()


def test_given_inputs_suffice_where_drawn_ones_do_not_run(make: Callable[..., Path], tmp_path: Path) -> None:
    given = {"ids": np.full((2, 5), 7777), "speed": _speed}
    report = stof.optimize(make(_UNDRAWABLE), tmp_path / "out.onnx", inputs=given)
    assert report.verification is not None
    outputs = [c.what for c in report.verification.comparisons if not c.site]
    assert outputs == ["output 'y', inputs given in Python"]


@pytest.mark.parametrize(("option", "lengths"), [("S=33", {33}), ("S=12..20", {12, 20}), ("S=20..400", {20, 53})])
def test_verification_stays_in_the_lengths_in_use(
    make: Callable[..., Path], option: str, lengths: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from stof.verification.model_inputs import ModelInputs

    drawn: list[dict[str, np.ndarray]] = []
    draw = ModelInputs.draw
    monkeypatch.setattr(ModelInputs, "draw", lambda self, cases: drawn.extend(found := draw(self, cases)) or found)
    cases_of(make(), "--shape", option)
    found = {f["ids"].shape[1] for f in drawn}
    assert found
    assert min(lengths) <= min(found)
    assert max(found) <= max(int(n) for n in option.removeprefix("S=").split(".."))


def test_cases_name_the_sizes_that_failed_runs_have_changed(make: Callable[..., Path]) -> None:
    # A table of 20 positions, which the graph counts itself; a length that is computed hides how many there are.
    place = """shape = Shape <start = 1, end = 2> (ids) n = Squeeze (shape) nf = Cast <to = 11> (n) root = Sqrt (nf)
    square = Mul (root, root) rounded = Round (square) count = Cast <to = 7> (rounded) zero = Constant <value = int64 {0}> ()
    one = Constant <value = int64 {1}> () twenty = Constant <value = int64[1] {20}> () places = ConstantOfShape (twenty)
    range = Range (zero, count, one) p = Gather (places, range) none = Cast <to = 7> (p) place = Add (ids, none)"""
    found = cases_of(make(place))
    assert found
    assert {re.findall(r"\bS (\d+)", case)[0] for case in found} == {"20", "8", "9"}, found
