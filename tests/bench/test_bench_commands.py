# SPDX-License-Identifier: Apache-2.0
"""``stof-bench`` as it is installed, and ``python -m bench`` in a clone: what each has, and what the first says of the other."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import cli as clone
from bench.options import make_parser
from stof.bench import cli, measure

ROOT = Path(__file__).resolve().parents[2]


def test_the_installed_command_names_every_other_one() -> None:
    (commands,) = [a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    assert {*cli.CLONE_COMMANDS, "model"} == set(commands.choices)
    assert all(option in commands.choices["model"]._option_string_actions for option in cli.CLONE_OPTIONS)


@pytest.mark.parametrize("command", cli.CLONE_COMMANDS)
def test_a_command_of_a_clone_says_where_it_runs(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--device", "cuda", "--whatever"]) == 1
    error = capsys.readouterr().err
    assert error == (
        f"stof-bench: {command} runs from a clone of the repository: python -m bench {command} ..., in its folder\n"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--device", "cuda"], "python -m bench model NAME --device cuda, in its folder"),
        (["--prepare"], "python -m bench model NAME --prepare ..., in its folder"),
        (["--lock=x"], "python -m bench model NAME --lock ..., in its folder"),
        ([], "none.onnx is no file; a graph of models/ is timed in a clone of the repository"),
    ],
)
def test_models_of_a_clone(
    options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["model", "none.onnx", *options]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_clone_adds_peers_and_the_quotient(
    narrow: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "rates", lambda threads: {"fma_gflops": 1.0, "read_gbps": 1.0})
    path = narrow("modernbert.dynamo.sdpa")
    options = ["--lengths", "24", "--threads", "1", "--rounds", "1", "--without", "memory"]
    for main, folder in ((cli.main, "user"), (clone.main, "clone")):
        assert main(["model", str(path), *options, "--results", str(tmp_path / folder)]) == 0
    of_user, of_clone = (
        json.loads((tmp_path / folder / "models-cpu.json").read_text())[0] for folder in ("user", "clone")
    )
    assert set(of_user["seconds"]) == {"original", "optimized"}
    assert of_user["missing"] == {}
    assert "openvino" in {*of_clone["seconds"], *of_clone["missing"]}
    assert of_clone["quotient"]["quotient"] > 0
    assert set(of_clone) - set(of_user) == {"quotient"}
    assert "quotient" in capsys.readouterr().out
    assert clone.main(["model", str(path), *options[:-2], "--without", "memory", "openvino", "quotient"]) == 0
    assert "missing: left out by --without" in capsys.readouterr().out


def test_a_clone_needs_no_installation(tmp_path: Path) -> None:
    """In its folder alone, with the optimizer that lies there."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-m", "bench", "table", "-o", str(tmp_path / "page.md")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "page.md").read_text() == (ROOT / "docs/reference/numbers.md").read_text()


def test_cpus_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = os.sched_getaffinity(0)
    with measure.pinned(1):
        assert len(os.sched_getaffinity(0)) == 1
        assert os.environ["OMP_NUM_THREADS"] == "1"
    assert os.sched_getaffinity(0) == before
    assert "OMP_NUM_THREADS" not in os.environ
    with pytest.raises(ValueError, match=f"but only {len(before)} CPUs are available"), measure.pinned(len(before) + 1):
        pass
    assert os.sched_getaffinity(0) == before
