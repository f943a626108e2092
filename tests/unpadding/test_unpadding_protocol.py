# SPDX-License-Identifier: Apache-2.0
"""Unpadding as an op: plans, selection, explanations, reports, and what happens when verification fails."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from encoders import INT64, Graph, attentions, check_same, check_unpadded, encoder, masks, rows_of, unpadded
from onnx import helper, numpy_helper

import stof
from stof import cli
from stof.errors import ArgumentError, ModelError, StofError
from stof.op_rewrite import Interpretation
from stof.ops import PLAN_FORMATS
from stof.options import Options
from stof.plan import Plan, load, parse
from stof.report import Report
from stof.symbolic import Symbolic
from stof.unpadding import emit
from stof.unpadding.plan_entry import UnpadPlan
from stof.unpadding.region import UnpaddedRegion
from stof.unpadding.report import KEY


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An encoder of which all can be unpadded."""
    found = tmp_path / "model.onnx"
    onnx.save(encoder("mean", "first"), found)
    return found


def two_batches() -> onnx.ModelProto:
    """Two encoders of texts with their own masks in one model."""
    g = Graph()
    for name in ("first", "second"):
        ids, mask = (g.input(f"{name}_{n}", INT64, (f"{name}_batch", f"{name}_length")) for n in ("ids", "mask"))
        x = g.layer(g.embed(ids), g.bias(mask))
        g.output(g.pool(x, "mean", mask), f"{name}_mean", rank=2)
    return g.model()


def optimize(path: Path, **options: Any) -> tuple[onnx.ModelProto, Report]:
    out = path.with_name("out.onnx")
    report = stof.optimize(path, out, Options(**({"chains": "off", "verify": False} | options)))
    return onnx.load(out), report


def run_cli(*arguments: str | Path) -> int:
    return cli.main([str(a) for a in arguments])


def are_unpadded(model: onnx.ModelProto) -> list[bool]:
    return ["cumulative_sequence_length" in roles for _, roles in attentions(model)]


# ---- plans ----
def test_a_plan_is_applied_again(path: Path) -> None:
    plan = path.with_suffix(".json")
    first, _ = optimize(path, save_plan=plan)
    assert json.loads(plan.read_text())[KEY] == [{"batch": "attention_mask", "replace": True}]
    again, report = optimize(path, plan=plan)
    assert rows_of(report)[0].replaced
    assert first.SerializeToString() == again.SerializeToString()
    copy = path.with_suffix(".copy.json")
    optimize(path, plan=plan, save_plan=copy)
    assert copy.read_text() == plan.read_text()


def test_a_plan_without_the_key_leaves_padding(path: Path) -> None:
    """Older versions wrote it: the result is as theirs was."""
    plan = path.with_suffix(".json")
    optimize(path, save_plan=plan)
    data = json.loads(plan.read_text())
    del data[KEY]
    plan.write_text(json.dumps(data))
    result, report = optimize(path, plan=plan)
    assert are_unpadded(result) == [False, False]
    assert rows_of(report) == []
    off, _ = optimize(path, unpad="off")
    assert off.SerializeToString() == result.SerializeToString()


def test_a_plan_that_keeps_the_padding(path: Path) -> None:
    plan = path.with_suffix(".json")
    optimize(path, save_plan=plan, skip=("unpad:attention_mask",))
    (entry,) = json.loads(plan.read_text())[KEY]
    assert entry == {"batch": "attention_mask", "replace": False, "reason": "left out by --skip"}
    result, report = optimize(path, plan=plan)
    assert are_unpadded(result) == [False, False]
    assert not rows_of(report)[0].replaced
    assert rows_of(report)[0].reason


def test_a_plan_of_a_model_with_other_masks_is_refused(path: Path) -> None:
    plan = path.with_suffix(".json")
    optimize(path, save_plan=plan)
    data = json.loads(plan.read_text())
    data[KEY] = [{"batch": "another_mask", "replace": True}]
    plan.write_text(json.dumps(data))
    with pytest.raises(ArgumentError, match="another_mask"):
        optimize(path, plan=plan)
    data[KEY] = []
    plan.write_text(json.dumps(data))
    result, report = optimize(path, plan=plan)
    assert are_unpadded(result) == [False, False]
    assert rows_of(report)[0].reason == "not in the plan"


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"batch": "attention_mask"}, "no field 'replace'"),
        ({"replace": True}, "no field 'batch'"),
        ({"batch": 3, "replace": True}, "batch 3, expected"),
        ({"batch": "attention_mask", "replace": 1}, "replace 1, expected bool"),
        ({"batch": "attention_mask", "replace": True, "nodes": 3}, "has field 'nodes'"),
        (7, "is 7, expected an object"),
    ],
)
def test_entries_that_are_none(entry: object, words: str) -> None:
    text = json.dumps({"format": "stof-plan", "version": 1, "target": "cpu", "sites": [], KEY: [entry]})
    with pytest.raises(ArgumentError, match=words):
        parse(text, PLAN_FORMATS)


def test_an_entry_reads_back() -> None:
    from stof.targets import CPU

    entries = (UnpadPlan("a", True), UnpadPlan("ü\n", False, "because"))
    plan = Plan({"sites": (), KEY: entries}, CPU)
    assert parse(plan.to_json(), PLAN_FORMATS).entries[KEY] == entries
    assert entries[0].name == "a"


def test_a_plan_made_with_on_applies_with_on_alone(tmp_path: Path) -> None:
    path, plan = tmp_path / "model.onnx", tmp_path / "plan.json"
    onnx.save(encoder("all"), path)
    optimize(path, unpad="on", save_plan=plan)
    result, report = optimize(path, unpad="on", plan=plan)
    assert are_unpadded(result) == [True, True]
    assert rows_of(report)[0].zero_outputs == ("all",)
    # auto may not change outputs, whatever a plan says.
    with pytest.raises(
        ModelError, match=r"'attention_mask', which cannot be: output 'all' has a row for every position"
    ):
        optimize(path, unpad="auto", plan=plan)


def test_a_plan_with_an_attention_that_stays(path: Path) -> None:
    """Without its first attention, the rest of the model is no less right."""
    plan = path.with_suffix(".json")
    optimize(path, save_plan=plan)
    data = json.loads(plan.read_text())
    data["sites"][0] = {"site": data["sites"][0]["site"], "replace": False}
    plan.write_text(json.dumps(data))
    result, _ = optimize(path, plan=plan)
    assert len(are_unpadded(result)) == 1
    check_same(onnx.load(path), result)


# ---- selection and explanations ----
@pytest.mark.parametrize("name", ["unpad:attention_mask", "unpad:0", "unpad:*", "unpad:att*"])
def test_skip(path: Path, name: str) -> None:
    result, report = optimize(path, skip=(name,))
    assert are_unpadded(result) == [False, False]
    assert [(r.replaced, r.reason) for r in rows_of(report)] == [(False, "left out by --skip")]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [True, True]),
        ({"skip": ("unpad:first_mask",)}, [False, True]),
        ({"skip": ("unpad:1",)}, [True, False]),
        ({"only": ("unpad:second_mask",)}, [False, True]),
        ({"only": ("unpad:0",)}, [True, False]),
        ({"only": ("unpad:*",), "skip": ("unpad:0",)}, [False, True]),
        ({"unpad": "off"}, [False, False]),
    ],
)
def test_one_of_two_batches(tmp_path: Path, options: dict[str, Any], expected: list[bool]) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(two_batches(), path)
    result, report = optimize(path, **options)
    kinds = {n.input[3]: "cumulative_sequence_length" in roles for n, roles in attentions(result)}
    assert [kinds["first_mask"], kinds["second_mask"]] == expected
    if options.get("unpad") != "off":
        assert [r.replaced for r in rows_of(report)] == expected
    one, other = masks(), masks(2, 4)
    for label in ("right", "with empty rows"):
        extra = {"second_mask": other["left"], "second_ids": np.arange(8).reshape(2, 4)}
        check_same(onnx.load(path), result, {label: one[label]}, extra=extra)


def test_a_name_of_none(path: Path) -> None:
    with pytest.raises(
        ArgumentError, match=r"unpad:another.*names no padding mask.*its padding masks are 0 'attention_mask'"
    ):
        optimize(path, skip=("unpad:another",))


def test_explanations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(two_batches(), path)
    assert run_cli(path, "--explain", "unpad:*") == 0
    out = capsys.readouterr().out
    assert "padding mask 0  first_mask" in out
    assert "padding mask 1  second_mask" in out
    assert out.count("-> replaced") == 2
    assert run_cli(path, "--explain", "unpad:second_mask", "--skip", "unpad:second_mask") == 0
    out = capsys.readouterr().out
    assert "padding mask 1  second_mask\n  stopped: left out by --skip" in out
    assert "padding mask 0" not in out


def test_why_an_output_of_tokens_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(encoder("all"), path)
    assert run_cli(path, "--explain", "unpad:*") == 0
    assert "stopped: output 'all' has a row for every position" in capsys.readouterr().out


# ---- reports ----
def test_reports(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_file, page, out = (path.with_suffix(s) for s in (".report.json", ".html", ".out.onnx"))
    assert run_cli(path, "-o", out, "--chains", "off", "--json", json_file, "--report", page) == 0
    text = capsys.readouterr().out
    assert "nodes run on real tokens alone" in text
    assert "real tokens alone, by attention_mask: " in text
    assert "2 of 2 attentions, estimated 1.0x at 0%, 2.0x at 50%, 4.0x at 75%, 6.7x at 85% padding" in text
    (row,) = json.loads(json_file.read_text())[KEY]
    assert row | {"nodes": 0} == {
        "batch": "attention_mask", "index": 0, "replaced": True, "reason": "replaced", "nodes": 0, "attentions": 2,
        "of_attentions": 2, "keys_only": 0, "gains": pytest.approx([1, 2, 4, 20 / 3]), "padding": [0, 0.5, 0.75, 0.85],
        "zero_outputs": [], "rest": "", "capacity": 0, "assumption": "",
    }  # fmt: skip
    html = page.read_text()
    assert "Padding masks" in html
    assert "attention_mask" in html
    assert "estimated 1.0x at 0%, 2.0x at 50%, 4.0x at 75%, 6.7x at 85% padding" in html


def test_the_padding_of_verification_is_stated(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_file, page = path.with_suffix(".report.json"), path.with_suffix(".html")
    assert run_cli(path, "--chains", "off", "--json", json_file, "--report", page) == 0
    verification = json.loads(json_file.read_text())["verification"]
    shares = dict(zip(verification["cases"], verification["padding_shares"], strict=True))
    assert all((share == 0) != ("padded" in case) and share < 0.75 for case, share in shares.items())
    most = f"padding was 0% to {max(shares.values()):.0%} of the rows of inputs"
    assert most in capsys.readouterr().out
    assert most[1:] in page.read_text()
    assert run_cli(path, "--unpad", "off", "--json", json_file) == 0
    assert set(json.loads(json_file.read_text())["verification"]["padding_shares"]) == {None}
    assert "of the rows of inputs" not in capsys.readouterr().out


def test_reports_of_zero_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(encoder("all", "mean", layers=1), path)
    json_file, page, out = (path.with_suffix(s) for s in (".report.json", ".html", ".out.onnx"))
    assert run_cli(path, "-o", out, "--chains", "off", "--unpad", "on", "--json", json_file, "--report", page) == 0
    text = capsys.readouterr().out
    assert "ROWS OF PADDING BECOME 0 in all: " in text
    assert "rows of padding are 0 in all" in text
    data = json.loads(json_file.read_text())
    assert data[KEY][0]["zero_outputs"] == ["all"]
    assert data["verification"]
    assert "--unpad on" in page.read_text()
    check_same(onnx.load(path), onnx.load(out), zero_rows=("all",))


def test_a_dry_run_writes_nothing(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(path, "--dry-run") == 0
    assert "can run on real tokens alone" in capsys.readouterr().out
    assert [p.name for p in path.parent.iterdir() if p.suffix == ".onnx"] == ["model.onnx"]


def test_a_model_without_padding_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    g = Graph()
    x = g.embed(g.input("input_ids"))
    length = g.add("Gather", g.add("Shape", "input_ids"), g.constant(1))
    columns = g.add("Range", g.constant(0), length, g.constant(1))
    causal = g.add("LessOrEqual", columns, g.unsqueeze(columns, 1))
    g.output(g.layer(x, str(causal), "where"), "y", rank=3)
    path = tmp_path / "model.onnx"
    onnx.save(g.model(), path)
    for unpad in ("on", "auto", "off"):
        result, report = optimize(path, unpad=unpad)
        assert rows_of(report) == []
        assert are_unpadded(result) == [False]


@pytest.mark.parametrize("target", ["cuda", "tensorrt"])
def test_targets_without_packed_sequences_leave_the_padding(path: Path, target: str) -> None:
    for unpad in ("auto", "on"):
        try:
            result, report = optimize(path, target=target, capability=90, unpad=unpad)
        except StofError as error:
            pytest.skip(str(error))
        is_unpadded = target == "cuda" and unpad == "on"
        assert are_unpadded(result) == [is_unpadded] * len(list(attentions(result)))
        assert all(r.replaced == is_unpadded for r in rows_of(report))
        assert is_unpadded or all(target in r.reason.lower() for r in rows_of(report))


def test_a_capacity_asks_for_no_padding_on_cuda(path: Path) -> None:
    result, report = optimize(path, target="cuda", capability=90, unpad_capacity=40)
    assert all(are_unpadded(result))
    assert all(r.replaced and r.capacity == 40 for r in rows_of(report))


@pytest.mark.parametrize("unpad", ["On", "", "yes", None, True])
def test_other_values_of_the_option(unpad: Any) -> None:
    with pytest.raises(ArgumentError, match="unpad"):
        Options(unpad=unpad)


# ---- verification ----
def wrong_emission(factor: float) -> Any:
    """As emit_regions, with weights that are no longer the model's."""
    right = emit.emit_regions

    def emit_wrongly(model: onnx.ModelProto, symbolic: Symbolic, regions: Sequence[UnpaddedRegion]) -> onnx.ModelProto:
        written = right(model, symbolic, regions)
        node = next(n for n in written.graph.node if n.op_type == "LayerNormalization")
        weight = next(t for t in written.graph.initializer if t.name == node.input[1])
        other = numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(factor), "wrong")
        written.graph.initializer.append(other)
        node.input[1] = "wrong"
        return written

    return emit_wrongly


def test_a_wrong_rewrite_is_undone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stof.unpadding.rewrite.emit_regions", wrong_emission(1.5))
    result, report = optimize(path, verify=True)
    assert are_unpadded(result) == [False, False]
    (row,) = rows_of(report)
    assert not row.replaced
    assert row.reason
    assert (row.nodes, row.attentions, row.gains) == (0, 0, ())
    check_same(onnx.load(path), result)
    assert report.verification is not None


def test_a_rewrite_that_does_not_run_is_undone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = emit.emit_regions

    def broken(model: onnx.ModelProto, symbolic: Symbolic, regions: Sequence[UnpaddedRegion]) -> onnx.ModelProto:
        written = right(model, symbolic, regions)
        written.graph.node.append(helper.make_node("NoSuchOperator", ["mean"], ["nothing"]))
        return written

    monkeypatch.setattr("stof.unpadding.rewrite.emit_regions", broken)
    result, report = optimize(path, verify=True)
    assert are_unpadded(result) == [False, False]
    assert "NoSuchOperator" in rows_of(report)[0].reason
    check_same(onnx.load(path), result)


def test_rows_of_padding_that_are_not_0_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --unpad on, verification compares with an original whose rows of padding are 0."""
    path = tmp_path / "model.onnx"
    onnx.save(encoder("all", layers=1), path)
    monkeypatch.setattr(
        "stof.unpadding.emit._Writer._write_padded", lambda self, name: self.builder.add("Relu", [name])
    )
    try:
        result, report = optimize(path, unpad="on", verify=True)
    except StofError:
        return
    assert are_unpadded(result) == [False]
    assert not rows_of(report)[0].replaced


@pytest.mark.parametrize("rank", [None, 3])
def test_outputs_whose_shapes_nobody_declared(tmp_path: Path, rank: int | None) -> None:
    g = Graph()
    ids, mask = g.input("input_ids"), g.input("attention_mask")
    x = g.layer(g.embed(ids), g.bias(mask))
    g.output(x, "all", rank=rank)
    g.output(g.add("Reshape", x, g.constant([-1, 16])), "flat", rank=rank and 2)
    path = tmp_path / "model.onnx"
    onnx.save(g.model(), path)
    result, report = optimize(path, unpad="on", verify=True)
    assert are_unpadded(result) == [True]
    assert rows_of(report)[0].zero_outputs == ("all", "flat")


def test_verification_of_a_table_of_few_positions(tmp_path: Path) -> None:
    """Drawn texts are at most as long as the table, also where the original gets zeros as rows of padding."""
    model = encoder("all", layers=1)
    table = next(t for t in model.graph.initializer if t.name == "c1")
    table.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(table)[:20], "c1"))
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    result, report = optimize(path, unpad="on", verify=True)
    assert rows_of(report)[0].reason == "replaced"
    assert are_unpadded(result) == [True]


@pytest.mark.parametrize("poolings", [("mean", "max", "last", "middle"), ("all",)])
@pytest.mark.parametrize("unpad", ["auto", "on"])
def test_verification_passes(tmp_path: Path, poolings: tuple[str, ...], unpad: str) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(encoder(*poolings, layers=1, types=True, positions="cumsum"), path)
    result, report = optimize(path, unpad=unpad, verify=True)
    assert report.verification is not None
    assert not report.verification.failures
    assert are_unpadded(result) == [poolings != ("all",) or unpad == "on"]


def test_steps_change_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOF_CHECK_STEPS", "1")
    model = encoder("mean", "all", layers=1)
    before = model.SerializeToString(deterministic=True)
    for unpad in ("on", "auto", "off"):
        unpadded(model, unpad)
        assert model.SerializeToString(deterministic=True) == before


def test_the_same_model_gives_the_same_bytes() -> None:
    model = encoder("mean", "first", "max")
    one, other = (unpadded(model)[0].SerializeToString(deterministic=True) for _ in range(2))
    assert one == other


def test_a_result_is_optimized_again() -> None:
    model = encoder("mean", "first")
    once, _ = unpadded(model)
    again, report = unpadded(once)
    assert not any(r.replaced for r in rows_of(report))
    check_unpadded(again, 2)
    check_same(model, again, {"mixed": masks()["with empty rows"]})


def test_chains_between_real_tokens() -> None:
    model = encoder("mean", "first", "last")
    for chains in ("on", "auto"):
        result, report = unpadded(model, chains=chains)
        assert rows_of(report)[0].replaced
        check_same(model, result, rtol=1e-3)


def test_a_saved_plan_is_as_the_file_says(path: Path) -> None:
    plan = path.with_suffix(".json")
    optimize(path, save_plan=plan)
    assert load(plan, PLAN_FORMATS).entries[KEY] == (UnpadPlan("attention_mask", True),)


# ---- what it costs ----
@pytest.mark.parametrize(("kind", "most"), [("all", 3), ("mean", 4)])
def test_a_model_is_interpreted_once_for_each_state(kind: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As exported; with its attention replaced; without padding, where it is left out; as it is written, for exact sizes.

    Where padding stays, fused chains are looked for in the model that padding was looked for in: by the same facts.
    """
    made: list[int] = []
    original = Symbolic.__init__

    def init(self: Symbolic, model: onnx.ModelProto, *given: object, **options: object) -> None:
        made.append(len(model.graph.node))
        original(self, model, *given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Symbolic, "__init__", init)
    _, report = unpadded(encoder(kind), chains="on")
    assert rows_of(report)[0].replaced == (kind == "mean")
    assert any(chain.replaced for chain in report.chains)
    assert len(made) == most, made


def test_facts_are_those_of_the_model_that_is_asked_for() -> None:
    facts, first, second = Interpretation(), encoder("mean"), encoder("mean", "first")
    found = facts.of(first)
    assert facts.of(first) is found
    assert facts.of(second).shape("first") is not None
    assert facts.of(first).shape("first") is None
