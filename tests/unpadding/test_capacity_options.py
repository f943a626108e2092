# SPDX-License-Identifier: Apache-2.0
"""The option of a fixed capacity: commands, plans, reports, and verification on batches with more tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from encoders import attentions, check_same, encoder, feeds_for, masks, rows_of

import stof
from stof import cli
from stof.errors import ArgumentError, StofError
from stof.ops import PLAN_FORMATS
from stof.options import MOST_TOKENS, Options
from stof.plan import parse
from stof.report import Report
from stof.unpadding.report import KEY


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An encoder of which all can be unpadded."""
    found = tmp_path / "model.onnx"
    onnx.save(encoder("mean", "first"), found)
    return found


def optimize(path: Path, **options: Any) -> tuple[onnx.ModelProto, Report]:
    out = path.with_name("out.onnx")
    report = stof.optimize(path, out, Options(**({"chains": "off", "verify": False} | options)))
    return onnx.load(out), report


def run_cli(*arguments: str | Path) -> int:
    return cli.main([str(a) for a in arguments])


# ---- values ----
@pytest.mark.parametrize("capacity", [-1, 1.5, "64", None, True, MOST_TOKENS + 1])
def test_values_that_are_none(capacity: Any) -> None:
    with pytest.raises(ArgumentError, match="unpad_capacity is "):
        Options(unpad_capacity=capacity)


def test_a_capacity_of_padded_batches_is_refused() -> None:
    with pytest.raises(ArgumentError, match="unpad_capacity is for batches without padding, and unpad is 'off'"):
        Options(unpad_capacity=64, unpad="off")


def test_command(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, json_file = path.with_name("out.onnx"), path.with_suffix(".json")
    arguments = (path, "-o", out, "--chains", "off", "--no-verify", "--json", json_file)
    assert run_cli(*arguments, "--unpad-capacity", "80") == 0
    assert "2 of 2 attentions, room for 80 tokens in every run" in capsys.readouterr().out
    data = json.loads(json_file.read_text())
    assert data[KEY][0]["capacity"] == 80
    assert data[KEY][0]["gains"] == []
    check_same(onnx.load(path), onnx.load(out))
    assert run_cli(*arguments, "--unpad-capacity", "many") != 0
    assert run_cli(*arguments, "--unpad-capacity", "-3") != 0
    assert "unpad_capacity is -3, expected an integer from 0 on" in capsys.readouterr().err


# ---- plans ----
def test_a_plan_has_the_capacity(path: Path) -> None:
    plan = path.with_suffix(".json")
    first, _ = optimize(path, save_plan=plan, unpad_capacity=64)
    entry = {"batch": "attention_mask", "replace": True, "capacity": 64}
    assert json.loads(plan.read_text())[KEY] == [entry]
    again, report = optimize(path, plan=plan)
    assert rows_of(report)[0].capacity == 64
    assert first.SerializeToString() == again.SerializeToString()
    other, report = optimize(path, plan=plan, unpad_capacity=96)  # what is asked for goes before the plan
    assert rows_of(report)[0].capacity == 96
    assert other.SerializeToString() != again.SerializeToString()


def test_a_plan_without_a_capacity(path: Path) -> None:
    """Older versions wrote it."""
    plan = path.with_suffix(".json")
    exact, _ = optimize(path, save_plan=plan)
    assert json.loads(plan.read_text())[KEY] == [{"batch": "attention_mask", "replace": True}]
    again, report = optimize(path, plan=plan)
    assert rows_of(report)[0].capacity == 0
    assert exact.SerializeToString() == again.SerializeToString()
    _, report = optimize(path, plan=plan, unpad_capacity=64)
    assert rows_of(report)[0].capacity == 64


@pytest.mark.parametrize("capacity", [-1, MOST_TOKENS + 1, "64", 1.0, True])
def test_capacities_of_plans_that_are_none(capacity: Any) -> None:
    entry = {"batch": "attention_mask", "replace": True, "capacity": capacity}
    text = json.dumps({"format": "stof-plan", "version": 1, "target": "cpu", "sites": [], KEY: [entry]})
    with pytest.raises(ArgumentError, match=r"capacity .*expected"):
        parse(text, PLAN_FORMATS)


# ---- verification ----
@pytest.mark.parametrize("capacity", [30, 150, 4096])
@pytest.mark.parametrize("poolings", [("mean", "first", "last real"), ("all",)])
def test_verification_leaves_batches_out_for_which_there_is_no_room(
    tmp_path: Path, poolings: tuple[str, ...], capacity: int
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(encoder(*poolings), path)
    result, report = optimize(path, verify=True, unpad="on", unpad_capacity=capacity)
    assert rows_of(report)[0].replaced
    assert report.verification is not None
    assert report.verification.comparisons
    assert all("cumulative_sequence_length" in roles for _, roles in attentions(result))


def test_inputs_for_which_there_is_no_room(path: Path, tmp_path: Path) -> None:
    feeds = feeds_for(onnx.load(path), masks()["full"])
    file = tmp_path / "feeds.npz"
    np.savez(file, **feeds)
    result, _ = optimize(path, verify=True, unpad_capacity=35, inputs=(file,))
    check_same(onnx.load(path), result)
    with pytest.raises(StofError, match="attention_mask_has_fewer_rows_than_tokens"):
        optimize(path, verify=True, unpad_capacity=34, inputs=(file,))


def test_batches_of_which_none_fits(tmp_path: Path) -> None:
    path, file = tmp_path / "model.onnx", tmp_path / "feeds.npz"
    onnx.save(encoder("mean", batch=4, length=8), path)
    with pytest.raises(StofError, match=r"none of the batches that stof drew has as few tokens as --unpad-capacity"):
        optimize(path, verify=True, unpad_capacity=6)
    assert not path.with_name("out.onnx").exists()
    mask = np.array([[1] * n + [0] * (8 - n) for n in (1, 2, 2, 1)])
    np.savez(file, **feeds_for(onnx.load(path), mask))
    result, report = optimize(path, verify=True, unpad_capacity=6, inputs=(file,))
    assert rows_of(report)[0].capacity == 6
    check_same(onnx.load(path), result, {"short": mask})
