# SPDX-License-Identifier: Apache-2.0
"""The command of a report: it gives the options back, whatever they are."""

from __future__ import annotations

import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stof import cli
from stof.options import Options
from stof.run_facts.command import command_of

CHANGED: dict[str, Any] = {
    "output": Path("a folder/out.onnx"),
    "target": "cuda",
    "emit": "standard",
    "allow_tf32": True,
    "allow_bf16": True,
    "attention_precision": "fp8",
    "max_error": 0.02,
    "json": Path("r.json"),
    "report": Path("r.html"),
    "time": True,
    "dry_run": True,
    "explain": "*",
    "verify": False,
    "verify_budget": 12.5,
    "verify_memory": 1 << 30,
    "memory_limit": 1 << 32,
    "inputs": ("feed.npz", "module:draw"),
    "only": ("/layers.0/*", "cache:1"),
    "skip": ("a 'quoted' \"name\"; rm -rf $HOME",),
    "shapes": {"batch": (1, 1), "past + 1": (1, 8)},
    "masks": {"0": "abs(q - k) <= 64"},
    "sparsify": "s2:local=16,stride=8;skip-scores",
    "sparse_mlp": "prompts.npz,kind=svd",
    "prompts": Path("p.txt"),
    "max_kl": 0.25,
    "min_cosine": 0.95,
    "force": True,
    "dequantize_attention": True,
    "float_model": Path("float.onnx"),
    "ignore_empty_rows": True,
    "chains": "on",
    "unpad": "on",
    "unpad_capacity": 4096,
    "products": False,
    "tune": 7.5,
    "ignore_measurements": True,
    "plan": Path("p.json"),
    "save_plan": Path("q.json"),
}
WITHOUT_OPTION = {"capability"}


def parse(command: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Options]:
    """The model and the options that the command line gives."""
    program, *arguments = shlex.split(command)
    assert program == "stof-optimize"
    seen: list[tuple[str, Options]] = []

    class Report:
        output = None

        def to_text(self) -> str:
            return ""

        def explain(self, pattern: str) -> str:
            return ""

    def optimize(model: Path, options: Options) -> Report:
        seen.append((str(model), options))
        return Report()

    monkeypatch.setattr("stof.pipeline.optimize", optimize)
    assert cli.main(arguments) == 0
    return seen[0]


def test_every_option_is_tested() -> None:
    assert {f.name for f in fields(Options)} == {*CHANGED, *WITHOUT_OPTION}


@pytest.mark.parametrize("name", CHANGED)
def test_one_option(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needed: set[str] = {
        "float_model": {"dequantize_attention"},
        "force": {"prompts", "sparsify"},
        "max_kl": {"prompts", "sparsify"},
        "min_cosine": {"inputs", "sparsify"},
        "prompts": {"sparsify"},
        "attention_precision": {"target"},
        "max_error": {"allow_bf16"},
    }.get(name, set())
    options = Options(**{n: CHANGED[n] for n in (name, *needed)})
    assert parse(command_of("my model.onnx", options), monkeypatch) == ("my model.onnx", options)


def test_all_options(monkeypatch: pytest.MonkeyPatch) -> None:
    # One refuses most others, two are for another target, and float attention refuses other changes of outputs.
    alone = ("emit", "allow_bf16", "attention_precision", "max_error", "dequantize_attention", "float_model")
    together = {n: value for n, value in CHANGED.items() if n not in alone}
    options = Options(**together)
    assert parse(command_of("model.onnx", options), monkeypatch) == ("model.onnx", options)
    assert command_of("model.onnx", Options()) == "stof-optimize model.onnx"
    assert command_of("model.onnx", Options(explain="site 1")) == "stof-optimize model.onnx --explain 'site 1'"


@pytest.mark.parametrize("given", [{"x": np.zeros(3)}, [{"x": np.zeros(3)}], lambda: [{}]])
def test_inputs_of_python_are_left_out(given: Any) -> None:
    assert command_of("model.onnx", Options(inputs=given, time=True)) == "stof-optimize model.onnx --time"
    assert command_of("m.onnx", Options(inputs=Path("a.npz"))) == "stof-optimize m.onnx --inputs a.npz"


def test_values_that_begin_as_options_do(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(
        output=Path("-out.onnx"), json=Path("-r.json"), only=("-a", "b"), skip=("--c",), masks={"-d": "k <= q"}
    )
    assert parse(command_of("-model.onnx", options), monkeypatch) == ("-model.onnx", options)


def test_numbers_of_many_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(verify_budget=1234567.25, tune=1 / 3)
    assert parse(command_of("model.onnx", options), monkeypatch) == ("model.onnx", options)
