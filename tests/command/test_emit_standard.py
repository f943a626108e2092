# SPDX-License-Identifier: Apache-2.0
"""``--emit standard``: what a user types, the files and reports that come of it, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import stof
from stof import cli
from stof.arguments.emissions import EMISSIONS, STANDARD
from stof.errors import ArgumentError
from stof.graph.index import all_nodes
from stof.ops import PLAN_FORMATS
from stof.options import Options
from stof.plan import load

SHORT = ["--shape", "sequence=16..128", "-q"]


@pytest.fixture
def model(narrow: Callable[[str], Path]) -> Path:
    """BERT as PyTorch exports it: opset 20, padding, guards against NaN."""
    return narrow("bert.dynamo.sdpa")


def outputs(path: Path, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Those of a session without the library."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return list(ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, feeds))


def draw(path: Path, length: int = 23) -> dict[str, np.ndarray]:
    """Token ids, and padding on the right of the second text."""
    rng = np.random.default_rng(0)
    feeds = {}
    for value in onnx.load(path).graph.input:
        numbers = rng.integers(0, 90, (2, length))
        if "mask" in value.name:
            numbers = np.arange(length) < np.array([[length], [length - 9]])
        elif "type" in value.name:
            numbers = np.zeros_like(numbers)
        feeds[value.name] = numbers.astype(np.int64)
    return feeds


def test_a_whole_encoder(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plain file of opset 23, which gives what the original gives in ONNX Runtime alone; the report says so."""
    target, saved = model.with_name("plain.onnx"), model.with_name("report.json")
    assert cli.main([str(model), "-o", str(target), "--emit", "standard", "--json", str(saved), *SHORT]) == 0
    assert "it is plain ONNX: ONNX Runtime runs it without a library" in capsys.readouterr().out
    written = onnx.load(target)
    assert {e.domain: e.version for e in written.opset_import} == {"": 23}
    assert {n.domain for n in all_nodes(written.graph.node)} == {""}
    assert not written.functions
    assert [n.op_type for n in written.graph.node].count("Attention") == 2
    onnx.checker.check_model(written, full_check=True)
    report = json.loads(saved.read_text())
    assert report["emit"] == "standard"
    assert [s["kernel"] for s in report["sites"]] == ["Attention-23: float attn_mask"] * 2
    assert report["verification"]["ok"]
    assert report["chains"] == report["mlps"] == []
    assert [r["reason"] for r in report["unpadding"]] == ["output 'last_hidden_state' has a row for every position"]
    assert report["run"]["command"].count("--emit standard") == 1
    feeds = draw(model)
    for a, b in zip(outputs(target, feeds), outputs(model, feeds), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5)


def test_the_default_is_stof(model: Path) -> None:
    """Without the option nothing changes, and the report names what was written."""
    report = stof.optimize(model, options=Options(dry_run=True))
    assert json.loads(report.to_json())["emit"] == "stof"
    assert list(EMISSIONS) == ["stof", "standard"]


def test_in_memory(model: Path) -> None:
    """Models in memory take the option, too."""
    made = stof.optimize(onnx.load(model), emit="standard", shapes={"sequence": (16, 128)})
    assert isinstance(made, onnx.ModelProto)
    assert [n.op_type for n in made.graph.node].count("Attention") == 2
    assert {n.domain for n in made.graph.node} == {""}


def test_a_folder_gets_no_library(model: Path) -> None:
    """The folder of an encoder: no copy of the library lies beside the model."""
    target = model.parent / "fast"
    source = model.parent / "source"
    source.mkdir()
    model.rename(source / "model.onnx")
    report = stof.optimize_folder(source, target, options=Options(emit="standard", shapes={"sequence": (16, 128)}))
    assert not report.failures
    assert sorted(p.name for p in target.iterdir()) == ["model.onnx"]
    assert [n.op_type for n in onnx.load(target / "model.onnx").graph.node].count("Attention") == 2


def test_a_plan_keeps_what_is_emitted(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A saved plan gives the same file; with another --emit it is refused."""
    first, second, plan = (model.with_name(n) for n in ("a.onnx", "b.onnx", "plan.json"))
    assert cli.main([str(model), "-o", str(first), "--emit", "standard", "--save-plan", str(plan), *SHORT]) == 0
    assert json.loads(plan.read_text())["emit"] == "standard"
    assert load(plan, PLAN_FORMATS).emission is STANDARD
    assert cli.main([str(model), "-o", str(second), "--emit", "standard", "--plan", str(plan), "-q"]) == 0
    assert first.read_bytes() == second.read_bytes()
    capsys.readouterr()
    assert cli.main([str(model), "--plan", str(plan), "-q"]) == 1
    assert "the plan is for --emit standard, not stof; use --emit standard" in capsys.readouterr().err
    other = model.with_name("other.json")
    assert cli.main([str(model), "--dry-run", "--save-plan", str(other), "-q"]) == 0
    assert "emit" not in json.loads(other.read_text())
    capsys.readouterr()
    assert cli.main([str(model), "--plan", str(other), "--emit", "standard", "-q"]) == 1
    assert "the plan is for --emit stof, not standard" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["onnx", 3, ["standard"], None])
def test_a_plan_with_another_word(value: object, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged ``emit`` is named."""
    plan = model.with_name("plan.json")
    plan.write_text(json.dumps({"format": "stof-plan", "version": 1, "emit": value, "sites": []}))
    assert cli.main([str(model), "--plan", str(plan), "-q"]) == 1
    assert "has emit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sparsify": "window=64"}, "sparsify needs emit 'stof'"),
        ({"sparse_mlp": "prompts.npz"}, "sparse_mlp needs emit 'stof'"),
        ({"tune": 5.0}, "tune needs emit 'stof'"),
        ({"chains": "on"}, "chains 'on' needs emit 'stof'"),
        ({"unpad_capacity": 64}, "unpad_capacity needs emit 'stof'"),
        ({"target": "cuda"}, "target 'cuda' needs emit 'stof'"),
        ({"target": "tensorrt"}, "target 'tensorrt' needs emit 'stof'"),
    ],
)
def test_options_that_need_operators(arguments: dict[str, Any], words: str) -> None:
    """What only stof's operators do is refused, and not left out in silence."""
    with pytest.raises(ArgumentError, match=words):
        Options(emit="standard", **arguments)


@pytest.mark.parametrize("value", ["Standard", "", "onnx", None, 1])
def test_other_words(value: Any) -> None:
    """Words that name no emission."""
    with pytest.raises(ArgumentError, match=r"emit .*expected"):
        Options(emit=value)


def test_sites_that_others_name(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Chains are not looked for; naming one is an error, as for any candidate that there is not."""
    assert cli.main([str(model), "--emit", "standard", "--skip", "chain:0", "-q"]) == 1
    assert "names no site of the model" in capsys.readouterr().err


def test_skip_and_explain(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sites are chosen and explained as with stof's operators."""
    target = model.with_name("plain.onnx")
    assert cli.main([str(model), "-o", str(target), "--emit", "standard", "--skip", "0", *SHORT]) == 0
    assert [n.op_type for n in onnx.load(target).graph.node].count("Attention") == 1
    capsys.readouterr()
    assert cli.main([str(model), "--emit", "standard", "--explain", *SHORT]) == 0
    shown = capsys.readouterr().out
    assert "kernel Attention-23: float attn_mask" in shown
    assert shown.count("-> replaced") == 2


def test_times(model: Path) -> None:
    """Whole models are timed."""
    options = Options(emit="standard", time=True, shapes={"sequence": (16, 32)})
    report = stof.optimize(model, model.with_name("plain.onnx"), options)
    assert report.times is not None, report.notes
