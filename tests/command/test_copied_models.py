# SPDX-License-Identifier: Apache-2.0
"""A model with nothing to replace is copied to the output that the user names, so that make and pipelines find it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from tests.command.test_cli import ATTENTION, WINDOW, external, refused, snapshot, text

import stof
from stof import cli

PLAIN = "kt = Add (q, k)\nout = Add (kt, v)"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(text(PLAIN), path)
    return path


def test_a_graph_without_attention_is_copied(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, report = plain.with_name("copy.onnx"), plain.with_name("report.json")
    assert cli.main([str(plain), "-o", str(target), "--json", str(report)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("nothing to do: the graph has no Softmax node")
    assert lines[-2].endswith("; the model was copied as it is")
    assert lines[-1] == f"written: {target}"
    assert not any("verified" in line or "no file" in line for line in lines)
    assert target.read_bytes() == plain.read_bytes()
    data = json.loads(report.read_text())
    assert (data["output"], data["copied"], data["nodes_after"]) == (str(target), True, 0)
    assert set(plain.parent.iterdir()) >= {plain, target, report}
    assert list(plain.parent.glob(".stof-*")) == []


def test_what_is_left_out_is_copied_and_what_is_replaced_is_not(plain: Path) -> None:
    onnx.save(text(WINDOW + ATTENTION), plain)
    target = plain.with_name("copy.onnx")
    assert cli.main([str(plain), "-o", str(target), "--skip", "0", "--no-verify"]) == 0
    assert target.read_bytes() == plain.read_bytes()
    report = stof.optimize(plain, target, stof.Options(verify=False))
    assert (report.copied, report.replaced, report.output) == (False, 1, str(target))
    assert "StofAttention" in [n.op_type for n in onnx.load(target).graph.node]


def test_a_model_that_was_optimized_before_is_copied(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(text(WINDOW + ATTENTION), plain)
    once, twice = plain.with_name("once.onnx"), plain.with_name("twice.onnx")
    assert cli.main([str(plain), "-o", str(once), "--no-verify"]) == 0
    assert cli.main([str(once), "-o", str(twice)]) == 0
    assert "the model was copied as it is" in capsys.readouterr().out
    assert twice.read_bytes() == once.read_bytes()


def test_an_old_opset_is_copied_as_it_is(plain: Path) -> None:
    """Optimization works on a converted model; the copy is the user's file."""
    onnx.save(text(PLAIN, opset=9), plain)
    report = stof.optimize(plain, plain.with_name("copy.onnx"))
    assert report.copied
    assert plain.with_name("copy.onnx").read_bytes() == plain.read_bytes()


@pytest.mark.parametrize("option", ["--dry-run", "--explain"])
def test_reports_alone_copy_nothing(option: str, plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(plain.parent)
    assert cli.main([str(plain), "-o", str(plain.with_name("copy.onnx")), option]) == 0
    assert "no file was written" in capsys.readouterr().out
    assert snapshot(plain.parent) == before


def test_the_default_output_is_not_a_copy(plain: Path) -> None:
    before = snapshot(plain.parent)
    assert not stof.optimize(plain).copied
    assert snapshot(plain.parent) == before


def test_the_output_of_options_counts_too(plain: Path) -> None:
    target = plain.with_name("copy.onnx")
    assert stof.optimize(plain, options=stof.Options(output=target)).copied
    assert target.read_bytes() == plain.read_bytes()


def test_external_data_is_copied_with_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    path = external(text(PLAIN), folder)
    (tmp_path / "out").mkdir()
    report = stof.optimize(path, tmp_path / "out" / "renamed.onnx")
    assert report.copied
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"renamed.onnx", "model.onnx.data"}
    for name, copy in (("model.onnx", "renamed.onnx"), ("model.onnx.data", "model.onnx.data")):
        assert (folder / name).read_bytes() == (tmp_path / "out" / copy).read_bytes()
    report = stof.optimize(path, folder / "beside.onnx")
    assert report.copied
    assert {p.name for p in folder.iterdir()} == {"model.onnx", "model.onnx.data", "beside.onnx"}


def test_external_data_that_is_in_the_way_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    path = external(text(PLAIN), tmp_path / "in")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.onnx.data").write_bytes(b"other")
    refused([path, "-o", tmp_path / "out" / "m.onnx"], 1, "exists and differs from", tmp_path, capsys)


def test_a_copy_replaces_no_input_and_needs_its_folder(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused([plain, "-o", plain], 1, "is the input", plain.parent, capsys)
    refused([plain, "-o", plain.parent / "none" / "m.onnx"], 1, "does not exist", plain.parent, capsys)


def test_make_runs_the_command_once(plain: Path) -> None:
    """The rule's target exists after the first run, so that a second one has nothing to do."""
    command = f"{sys.executable} -m stof $< -o $@"
    (plain.parent / "Makefile").write_text(f"fast.onnx: model.onnx\n\t{command}\n")
    runs = [
        subprocess.run(
            ["make", "fast.onnx"],
            cwd=plain.parent,
            env={**os.environ, "PYTHONPATH": str(Path(stof.__file__).parents[1])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for _ in range(2)
    ]
    assert "copied as it is" in runs[0]
    assert "is up to date" in runs[1]
