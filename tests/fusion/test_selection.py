# SPDX-License-Identifier: Apache-2.0
"""Plans, --only and --skip for chains."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from stof import cli
from stof.errors import ArgumentError
from stof.fusion.decide.decision import ChainDecision
from stof.fusion.decide.selection import NAMES, ChainSelection
from stof.fusion.plan_entry import ChainPlan
from stof.ops import PLAN_FORMATS
from stof.options import Options
from stof.pipeline import optimize
from stof.plan import parse
from stof.progress import Progress
from stof.selection import Selection

Narrow = Callable[[str], Path]


def texts(path: str | None) -> list[str]:
    assert path is not None
    calls = [n for n in onnx.load(path).graph.node if n.op_type == "StofChain"]
    return [a.s.decode() for n in calls for a in n.attribute if a.name == "chain"]


def test_a_plan_gives_the_same_chains_again(narrow: Narrow, tmp_path: Path) -> None:
    """Also where the decider would decide otherwise: without the plan, none is taken on the CPU."""
    model, plan = narrow("bert.dynamo.sdpa"), tmp_path / "plan.json"
    first = optimize(model, options=Options(chains="on", verify=False, save_plan=plan))
    before = texts(first.output)
    assert len(before) >= 5
    again = optimize(model, options=Options(verify=False, plan=plan, save_plan=tmp_path / "again.json"))
    assert texts(again.output) == before
    assert (tmp_path / "again.json").read_bytes() == plan.read_bytes()
    assert optimize(model, options=Options(verify=False, plan=plan, chains="off")).chains == []
    with pytest.raises(ArgumentError, match=r"--tune has nothing to measure: .*plan\.json decides"):
        optimize(model, options=Options(verify=False, plan=plan, tune=1.0))


def test_an_edited_plan(narrow: Narrow, tmp_path: Path) -> None:
    model, plan = narrow("modernbert.dynamo.sdpa"), tmp_path / "plan.json"
    optimize(model, options=Options(chains="on", dry_run=True, save_plan=plan))
    data = json.loads(plan.read_text())
    largest = max(data["chains"], key=lambda c: len(c["operators"]))
    count = len(largest["operators"].split())
    largest["segments"] = [[count - 3, count]]
    data["chains"] = [largest]
    plan.write_text(json.dumps(data))
    report = optimize(model, options=Options(plan=plan))
    assert report.verification is not None
    assert not report.verification.failures
    assert len(texts(report.output)) == 1
    (taken,) = [c for c in report.chains if c.replaced]
    assert taken.operators == " ".join(largest["operators"].split()[-3:])
    assert {c.reason for c in report.chains if not c.replaced} <= {"not in the plan"}


def test_only_and_skip(narrow: Narrow) -> None:
    model = narrow("bert.dynamo.sdpa")
    names = [c.chain for c in optimize(model, options=Options(chains="on", dry_run=True)).chains]
    one = optimize(model, options=Options(chains="on", verify=False, only=(f"chain:{names[1]}", "chain:2")))
    assert len(texts(one.output)) == 2
    assert sum(s.replaced for s in one.sites) == 2  # sites are chosen by patterns without the prefix
    rest = optimize(model, options=Options(chains="on", verify=False, skip=("chain:*",)))
    assert texts(rest.output) == []
    assert {c.reason for c in rest.chains} == {"left out by --skip"}
    with pytest.raises(ArgumentError, match="--skip 'chain:nothing' names no chain of the model; its chains are 0"):
        optimize(model, options=Options(chains="on", skip=("chain:nothing",)))
    with pytest.raises(ArgumentError, match="no chain is looked for"):
        optimize(model, options=Options(chains="off", skip=("chain:0",)))


def test_explain(narrow: Narrow, capsys: pytest.CaptureFixture[str]) -> None:
    model = narrow("bert.dynamo.sdpa")
    assert cli.main([str(model), "--chains", "on", "--explain", "chain:1"]) == 0
    (chain,) = [part for part in capsys.readouterr().out.split("\n\n") if part.startswith("chain 1  ")]
    assert chain.rstrip().endswith("-> replaced")
    report = optimize(model, options=Options(chains="on", explain="chain:*", skip=("chain:0",)))
    assert report.output is None
    assert report.explain("chain:0").endswith("choice stopped: left out by --skip")
    assert len(report.explain("chain:*").split("\nchain ")) == len(report.chains)
    assert "chain" not in report.explain("*")
    with pytest.raises(ArgumentError, match="--explain 'chain:nothing' names no chain of the model"):
        optimize(model, options=Options(chains="on", explain="chain:nothing"))


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"chain": "a", "operators": "Add Mul", "replace": True}, "expected segments where replace is true"),
        ({"chain": "a", "operators": "Add", "replace": False, "segments": [[0, 1]]}, "and only there"),
        ({"chain": "a", "operators": "Add", "replace": True, "segments": [[0, 2], [1, 3]]}, "after the one before"),
        ({"chain": "a", "operators": "Add", "replace": True, "segments": [[1, 1]]}, "not empty"),
        ({"chain": "a", "operators": "Add", "replace": True, "segments": [[0, True]]}, "pairs of integers"),
        ({"chain": "a", "operators": "Add"}, "no field 'replace'"),
        ({"operators": "Add", "replace": False}, "no field 'chain'"),
        ({"chain": "a", "operators": "Add", "replace": False, "more": 1}, "field 'more'"),
    ],
)
def test_entries_that_are_none(entry: dict[str, Any], words: str) -> None:
    data = {"format": "stof-plan", "version": 1, "sites": [], "chains": [entry]}
    with pytest.raises(ArgumentError, match=words):
        parse(json.dumps(data), PLAN_FORMATS)


def test_a_plan_of_another_model() -> None:
    def check(plan: ChainPlan) -> None:
        ChainSelection(planned=(plan,)).check(["a", "b"], ["Add Mul", "Sub Div"])

    check(ChainPlan("a", "Add Mul", ((0, 2),)))
    for plan, words in (
        (ChainPlan("c", "Add Mul"), "the model does not have.*another version.*its chains are 0 'a', 1 'b'"),
        (ChainPlan("a", "Sub Div"), "is of Sub Div, in the model it is of Add Mul"),
        (ChainPlan("a", "Add Mul", ((0, 3),)), "segments beyond its operators"),
    ):
        with pytest.raises(ArgumentError, match=words):
            check(plan)


def test_the_users_word_goes_first() -> None:
    plan = (ChainPlan("a", "Add Mul", ((0, 2),)),)
    assert ChainSelection().of_chain(0, "a") is None
    assert ChainSelection(planned=plan).of_chain(0, "a") == ChainDecision(((0, 2),))
    assert ChainSelection(planned=plan).of_chain(1, "b") == ChainDecision((), "not in the plan")
    assert ChainSelection(Selection(NAMES, skip=("a",)), plan).of_chain(0, "a") == ChainDecision(
        (), "left out by --skip"
    )
    assert ChainSelection(Selection(NAMES, only=("1",))).of_chain(1, "b") is None
    assert ChainSelection(Selection(NAMES, only=("1",))).of_chain(0, "a") == ChainDecision((), "not among --only")


def test_progress_is_for_terminals(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    progress = Progress()
    progress.show("one of two")
    progress.close()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    progress.show("one of two")
    progress.show("too soon")
    progress.close()
    assert capsys.readouterr().err == "\r\033[Kone of two\r\033[K"
