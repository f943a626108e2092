# SPDX-License-Identifier: Apache-2.0
"""The protocol of an op, by ops that exist here only: each replaces nodes of one operator by calls of a local function."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from stof import pipeline
from stof.attention.rewrite import ATTENTION
from stof.errors import ArgumentError, ModelError, VerifyError
from stof.graph.index import DOMAIN, opset_of
from stof.graph.local_functions import add_functions
from stof.op_parts import LeftOut, Measures
from stof.op_rewrite import Decisions, Job, OpRewrite
from stof.options import Options
from stof.pipeline import optimize
from stof.plan import EntryFormat, Fields, Plan
from stof.report import Section
from stof.selection import CandidateNames, NamedCandidate
from stof.stages import StepChangedModelError
from stof.symbolic import Symbolic
from stof.verification.result import Comparison
from stof.verification.site_checks import SiteChecks
from stof.verification.verifier import Verifier


@dataclass(frozen=True)
class Entry:
    name: str
    replace: bool
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "replace": self.replace}


def read_entry(where: str, place: str, value: object) -> Entry:
    fields = Fields(where, place, value, {"name", "replace"})
    return Entry(fields.text("name", None), fields.take("replace", bool, None))


@dataclass(frozen=True)
class Row:
    name: str
    replaced: bool
    reason: str


class CallsSection(Section):
    def __init__(self, op: Calls, entries: Sequence[Entry]) -> None:
        self.names = op.names  # type: ignore[misc]
        self.key = op.key
        self.rows = [Row(e.name, e.replace, e.reason) for e in entries]

    def to_json(self) -> dict[str, Any]:
        return {self.key: [vars(row) for row in self.rows]}

    def lines(self) -> list[str]:
        return [f"  {row.name}: {row.reason}" for row in self.rows]

    def explain_rows(self, pattern: str) -> list[str]:
        return [row.name for i, row in enumerate(self.rows) if NamedCandidate(row.name, i).matches(pattern)]


@dataclass(frozen=True)
class CallsDecisions(Decisions):
    op: Calls
    before: onnx.ModelProto
    entries: tuple[Entry, ...]

    @property
    def section(self) -> Section:
        return CallsSection(self.op, self.entries)

    @property
    def plan(self) -> tuple[Entry, ...]:
        return self.entries

    @property
    def candidates(self) -> tuple[NamedCandidate, ...]:
        return tuple(NamedCandidate(e.name, i) for i, e in enumerate(self.entries))

    @property
    def has_replaced(self) -> bool:
        return any(e.replace for e in self.entries)

    def undo(self, reason: str) -> CallsDecisions | None:
        kept = tuple(replace(e, replace=False, reason=reason) for e in self.entries)
        return replace(self, entries=kept) if self.op.can_undo else None


@dataclass(frozen=True)
class CallsProblems:
    found: onnx.ModelProto | None
    calls: tuple[str, ...] = ()


@dataclass(eq=False)
class Calls(OpRewrite[onnx.ModelProto | None, CallsProblems, CallsDecisions], Measures):
    """Nodes of one operator become calls.

    Attributes:
        body: what the function computes; empty: the operator itself, which is right.
        impossible: why no node can be replaced; empty where they can.
    """

    operator: str
    key: str
    body: str = ""
    can_undo: bool = True
    has_checks: bool = False
    measures: bool = False
    left_out: str = ""
    impossible: str = ""
    spoils: str = ""  # the step that changes a model which it only reads
    found_in: list[onnx.ModelProto] = field(default_factory=list)  # models that were searched

    plan_format = EntryFormat("call", read_entry)

    def __post_init__(self) -> None:
        self.op = f"Test{self.operator}"
        self.op_types = frozenset({self.op})
        self.names = CandidateNames(self.operator.lower(), f"{self.operator.lower()}:")

    def find(self, job: Job, model: Callable[[], onnx.ModelProto]) -> onnx.ModelProto | None:
        if self.left_out:
            return None
        self.found_in.append(model())
        self.spoil("find", model())
        return model()

    def describe(self, job: Job, found: onnx.ModelProto | None) -> CallsProblems:
        if found is None:
            return CallsProblems(None)
        self.spoil("describe", found)
        return CallsProblems(found, tuple(n.name for n in found.graph.node if n.op_type == self.operator))

    def decide(self, job: Job, described: CallsProblems) -> CallsDecisions | LeftOut:
        if described.found is None:
            return LeftOut(self, self.left_out)
        self.spoil("decide", described.found)
        entries = []
        for i, name in enumerate(described.calls):
            reason = self.choice(job).reason_kept(NamedCandidate(name, i), self.impossible)
            entries.append(Entry(name, not reason, reason or "replaced"))
        decided = CallsDecisions(self, described.found, tuple(entries))
        self.check_plan(job, decided.candidates)
        return decided

    def emit(self, job: Job, decided: CallsDecisions) -> onnx.ModelProto:
        self.spoil("emit", decided.before)
        return self.emit_some(decided.before, [e.name for e in decided.entries if e.replace])

    def spoil(self, step: str, model: onnx.ModelProto) -> None:
        if step == self.spoils:
            model.graph.doc_string += "changed"

    def emit_some(self, model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
        found = onnx.ModelProto()
        found.CopyFrom(model)
        for node in found.graph.node:
            if node.name in names and node.op_type == self.operator:
                node.op_type, node.domain = self.op, DOMAIN
        body = [helper.make_node(self.body or self.operator, ["x"], ["y"])]
        opsets = [helper.make_opsetid("", opset_of(model))]
        add_functions(found, [helper.make_function(DOMAIN, self.op, ["x"], ["y"], body, opsets)])
        return found

    def empty_section(self) -> Section:
        return CallsSection(self, ())

    def has_to_measure(self, options: Options, plan: Plan) -> bool:
        return self.measures and self.key not in plan.entries

    def site_checks(self, job: Job, decided: CallsDecisions) -> SiteChecks | None:
        return CallsChecks(self, decided) if self.has_checks else None


class CallsChecks(SiteChecks):
    def __init__(self, op: Calls, decided: CallsDecisions) -> None:
        self.op = op
        self.working = decided.before
        self.symbolic = Symbolic(decided.before)
        self.sites = tuple(e.name for e in decided.entries if e.replace)
        self.types = frozenset({int(TensorProto.FLOAT)})

    def tensors(self) -> list[str]:
        return [t for n in self.working.graph.node if n.name in self.sites for t in (*n.input, *n.output)]

    def outputs(self) -> dict[str, list[str]]:
        return {n.name: list(n.output) for n in self.working.graph.node if n.name in self.sites}

    def compare(self, emitted: onnx.ModelProto, captured: Any) -> list[Comparison]:
        found = []
        for node in (n for n in emitted.graph.node if n.name in self.sites):
            x = captured[node.input[0]]
            values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in (*node.input, *node.output)]
            graph = helper.make_graph([node], "site", values[:1], values[1:])
            model = helper.make_model(graph, opset_imports=emitted.opset_import, functions=emitted.functions)
            (y,) = ReferenceEvaluator(model).run(None, {node.input[0]: x})
            off = float(np.abs(y - captured[node.output[0]]).max())
            found.append(Comparison(f"call {node.name!r}", off, 1e-6, off <= 1e-6, node.name))
        return found

    def emit(self, sites: Sequence[str]) -> onnx.ModelProto:
        return self.op.emit_some(self.working, sites)


NODES = (("Neg", "x", "a"), ("Exp", "a", "b"), ("Neg", "b", "c"), ("Floor", "c", "d"), ("Abs", "d", "e"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """negate, exponential, negate, floor, absolute value."""
    nodes = [helper.make_node(op, [x], [y], name=f"the {op} of {x}") for op, x, y in NODES]
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", 8]) for n in "xeabcd"]
    graph = helper.make_graph(nodes, "unary", values[:1], values[1:2], value_info=values[2:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes ops those of the pipeline."""

    def use_ops(*ops: OpRewrite[Any, Any, Any]) -> None:
        monkeypatch.setattr(pipeline, "OPS", ops)
        monkeypatch.setattr(pipeline, "PLAN_FORMATS", {op.key: op.plan_format for op in ops})

    return use_ops


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[onnx.ModelProto]:
    """The models that are verified."""
    found: list[onnx.ModelProto] = []
    run = Verifier.run

    def counted(self: Verifier, source: Path, final: onnx.ModelProto, scratch: Path) -> Any:
        found.append(final)
        return run(self, source, final, scratch)

    monkeypatch.setattr(Verifier, "run", counted)
    return found


def operators(path: str | None) -> list[str]:
    assert path is not None
    return [n.op_type for n in onnx.load(path).graph.node]


def negate(**given: Any) -> Calls:
    return Calls("Neg", "negations", **given)


def absolute(**given: Any) -> Calls:
    return Calls("Abs", "absolutes", **given)


BOTH = ["TestNeg", "Exp", "TestNeg", "Floor", "TestAbs"]


@pytest.mark.parametrize("has_checks", [False, True])
def test_two_ops_from_end_to_end(model: Path, use: Callable[..., None], has_checks: bool) -> None:
    use(negate(has_checks=has_checks), absolute(has_checks=has_checks))
    plan, target = model.with_name("plan.json"), model.with_name("report.json")
    report = optimize(model, options=Options(save_plan=plan, json=target))
    assert operators(report.output) == BOTH
    assert report.replaced == 3
    assert [len(report.rows(key)) for key in ("negations", "absolutes")] == [2, 1]
    assert report.verification is not None
    assert not report.verification.failures
    assert len([c for c in report.verification.comparisons if c.site]) == (3 if has_checks else 0)
    data = json.loads(target.read_text())
    assert [row["name"] for row in data["negations"]] == ["the Neg of x", "the Neg of b"]
    assert "  the Abs of d: replaced" in report.to_text()
    entries = json.loads(plan.read_text())
    assert {key: [e["replace"] for e in entries[key]] for key in ("negations", "absolutes")} == {
        "negations": [True, True],
        "absolutes": [True],
    }
    entries["negations"][0]["replace"] = False
    plan.write_text(json.dumps(entries))
    again = optimize(model, options=Options(plan=plan))
    assert operators(again.output) == ["Neg", *BOTH[1:]]
    with pytest.raises(ArgumentError, match="the plan is for target cpu, not cuda; use --target cpu"):
        optimize(model, options=Options(plan=plan, target="cuda"))


def test_the_reason_of_the_options_goes_before_that_of_the_plan_and_that_before_the_ops(
    model: Path, use: Callable[..., None]
) -> None:
    plan = model.with_name("plan.json")
    use(negate(), absolute())
    optimize(model, options=Options(save_plan=plan, dry_run=True))
    saved = json.loads(plan.read_text())
    use(negate(impossible="no kernel"), absolute())

    def reasons(entries: list[dict[str, Any]] | None, **options: Any) -> list[str]:
        data = {key: value for key, value in saved.items() if key != "negations"}
        plan.write_text(json.dumps(data if entries is None else data | {"negations": entries}))
        report = optimize(model, options=Options(plan=plan, dry_run=True, **options))
        return [row.reason for row in report.rows("negations")]

    first, second = saved["negations"]
    kept = {**second, "replace": False}
    assert reasons(None) == ["no kernel", "no kernel"]
    assert reasons([kept]) == ["not in the plan", "left as it is by the plan"]
    assert reasons([first, kept], skip=("neg:0",)) == ["left out by --skip", "left as it is by the plan"]
    with pytest.raises(
        ModelError, match="the plan replaces neg 'the Neg of x', which cannot be: no kernel; set its replace to false"
    ):
        reasons([first])
    words = "the plan has neg 'x', which the model does not have: it is of another model or export; its negs are 0 'the"
    with pytest.raises(ArgumentError, match=words):
        reasons([{**kept, "name": "x"}])


def test_a_selection_is_for_the_op_whose_prefix_it_has(model: Path, use: Callable[..., None]) -> None:
    use(ATTENTION, negate(), absolute())
    only = optimize(model, options=Options(only=("neg:0", "abs:*")))
    assert operators(only.output) == ["TestNeg", "Exp", "Neg", "Floor", "TestAbs"]
    skip = optimize(model, options=Options(skip=("neg:the Neg*",)))
    assert operators(skip.output) == ["Neg", "Exp", "Neg", "Floor", "TestAbs"]
    for option in ({"only": ("neg:7",)}, {"skip": ("neg:7",)}, {"explain": "neg:7"}):
        words = (
            f"--{next(iter(option))} 'neg:7' names no neg of the model; its negs are 0 'the Neg of x', 1 'the Neg of b'"
        )
        with pytest.raises(ArgumentError, match=words):
            optimize(model, options=Options(**option))  # type: ignore[arg-type]
    with pytest.raises(
        ArgumentError, match="names no site of the model; it has no site; neg:NAME names one neg; abs:NAME"
    ):
        optimize(model, options=Options(skip=("the Neg of x",)))


def test_explain_names_candidates_of_every_op(model: Path, use: Callable[..., None]) -> None:
    use(ATTENTION, negate(), absolute())
    report = optimize(model, options=Options(explain="neg:*"))
    assert report.output is None
    assert report.explain("neg:*") == "the Neg of x\nthe Neg of b"
    assert report.explain("abs:0") == "the Abs of d"
    assert report.explain("*") == ""


def test_a_name_for_no_op(model: Path, use: Callable[..., None]) -> None:
    use(negate(), absolute())
    with pytest.raises(
        ArgumentError, match="--only 'x' names nothing that is replaced; there is neg:NAME for a neg, abs:"
    ):
        optimize(model, options=Options(only=("x",)))


def test_tuning_is_refused_where_no_op_has_something_to_measure(model: Path, use: Callable[..., None]) -> None:
    plan = model.with_name("plan.json")
    use(negate(), absolute(left_out="see --abs"))
    optimize(model, options=Options(save_plan=plan, dry_run=True))
    assert "absolutes" not in json.loads(plan.read_text())
    # An op without entries in the plan, which measures nothing, is no reason to tune.
    with pytest.raises(ArgumentError, match=r"--tune has nothing to measure: .* decides all negs and abss"):
        optimize(model, options=Options(plan=plan, tune=1.0, dry_run=True))
    use(negate(measures=True), absolute())
    with pytest.raises(ArgumentError, match="--tune has nothing to measure"):
        optimize(model, options=Options(plan=plan, tune=1.0, dry_run=True))
    use(negate(), absolute(measures=True))
    assert optimize(model, options=Options(plan=plan, tune=1.0, dry_run=True)).replaced == 3


def test_an_op_without_candidates_is_in_the_plan_and_one_left_out_is_not(model: Path, use: Callable[..., None]) -> None:
    plan = model.with_name("plan.json")
    use(Calls("Tanh", "tangents"), absolute(left_out="see --abs"))
    optimize(model, options=Options(save_plan=plan))
    assert json.loads(plan.read_text())["tangents"] == []
    assert "absolutes" not in json.loads(plan.read_text())
    with pytest.raises(ArgumentError, match="--skip 'abs:0' names a abs, but no abs is looked for here; see --abs"):
        optimize(model, options=Options(skip=("abs:0",)))


@pytest.mark.parametrize("wrong", [0, 1])
def test_the_op_at_fault_is_dropped_and_the_other_one_kept(
    model: Path, use: Callable[..., None], runs: list[onnx.ModelProto], wrong: int
) -> None:
    first, second = negate(body="" if wrong else "Exp"), absolute(body="Floor" if wrong else "")
    use(first, second)
    report = optimize(model)
    kept = ["TestNeg", "Exp", "TestNeg", "Floor", "Abs"] if wrong else ["Neg", "Exp", "Neg", "Floor", "TestAbs"]
    assert operators(report.output) == kept
    rows = report.rows("absolutes" if wrong else "negations")
    assert all("differs by" in row.reason and not row.replaced for row in rows)
    assert report.replaced == (2 if wrong else 1)
    assert len(runs) == (2 if wrong else 3)  # the last op is dropped first
    assert report.verification is not None
    assert not report.verification.failures
    # What a dropped op wrote is nowhere any more, in the model or in one that a later op decides about.
    assert not any(n.op_type == "TestNeg" for n in second.found_in[-1].graph.node) or wrong
    assert [f.name for f in onnx.load(str(report.output)).functions] == ["TestNeg" if wrong else "TestAbs"]


def test_a_site_check_names_the_op_at_fault(model: Path, use: Callable[..., None], runs: list[onnx.ModelProto]) -> None:
    use(negate(body="Exp", has_checks=True), absolute(has_checks=True))
    report = optimize(model)
    assert operators(report.output) == ["Neg", "Exp", "Neg", "Floor", "TestAbs"]
    assert len(runs) == 2  # the other op is not suspected
    assert report.rows("negations")[0].reason.startswith("call 'the Neg of x' differs by")


def test_a_later_op_that_replaced_nothing_keeps_no_dropped_node(
    model: Path, use: Callable[..., None], runs: list[onnx.ModelProto]
) -> None:
    use(absolute(), negate(body="Exp"), Calls("Tanh", "tangents"))
    report = optimize(model)
    assert operators(report.output) == ["Neg", "Exp", "Neg", "Floor", "TestAbs"]
    assert [n.op_type for n in runs[-1].graph.node] == operators(report.output)


def test_two_wrong_ops_are_dropped(model: Path, use: Callable[..., None]) -> None:
    use(negate(body="Exp"), absolute(body="Floor"))
    report = optimize(model)
    assert report.output is None
    assert report.replaced == 0
    assert not model.with_name("m.stof.onnx").exists()


def test_an_op_that_cannot_be_dropped_is_an_error(model: Path, use: Callable[..., None]) -> None:
    use(negate(body="Exp", can_undo=False, has_checks=True), absolute())
    with pytest.raises(VerifyError, match=r"verification failed: .*differs by"):
        optimize(model)
    use(negate(body="Exp", can_undo=False), absolute())
    with pytest.raises(VerifyError, match="verification failed: output 'e'"):
        optimize(model)


def test_sites_beside_attention(tmp_path: Path, use: Callable[..., None], runs: list[onnx.ModelProto]) -> None:
    """A later op is dropped for its sites, and attention stays replaced."""
    nodes = [
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "kt"], ["s"]),
        helper.make_node("Mul", ["s", "scale"], ["s2"]),
        helper.make_node("Softmax", ["s2"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "v"], ["y"]),
        helper.make_node("Neg", ["y"], ["z"], name="negation"),
    ]
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 4, 1031, 8]) for n in "qkvz"]
    scale = numpy_helper.from_array(np.float32(0.35), "scale")
    graph = helper.make_graph(nodes, "attention", values[:3], values[3:], [scale])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    use(ATTENTION, negate(body="Exp", has_checks=True))
    report = optimize(path)
    assert operators(report.output) == ["StofAttention", "Neg"]
    assert len(runs) == 2
    use(ATTENTION, negate(has_checks=True))
    report = optimize(path)
    assert operators(report.output) == ["StofAttention", "TestNeg"]
    assert report.replaced == 2


@pytest.mark.parametrize("step", ["find", "describe", "decide", "emit"])
def test_a_step_that_changes_a_model_is_found_out(step: str, model: Path, use: Callable[..., None]) -> None:
    """The first op sees the model itself, the second one what the first has written."""
    spoiling = Calls("Exp", "exps", spoils=step)
    for ops in ((spoiling,), (Calls("Neg", "negs"), spoiling)):
        use(*ops)
        with pytest.raises(StepChangedModelError, match=f"exps: {step} changed a model that it only reads"):
            optimize(model, options=Options(verify=False))


def test_steps_are_not_watched_by_default(
    model: Path, use: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STOF_CHECK_STEPS")
    use(Calls("Exp", "exps", spoils="decide"))
    assert optimize(model, options=Options(verify=False)).output is not None
