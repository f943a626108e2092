# SPDX-License-Identifier: Apache-2.0
"""Models over a paged cache through the whole command: what is replaced, verified, reported and planned."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from paged_models import Shape, draw_step, feeds_of, model_of, session

import stof
from stof import cli
from stof.cached_attention.find import find_candidates
from stof.cached_attention.paged import checks, emit
from stof.cached_attention.paged.oracle import compute_paged_step
from stof.cached_attention.paged.run_inputs import PagedInputMaker
from stof.cached_attention.paged.site import OP, PagedSite
from stof.html_report import to_html
from stof.options import Options
from stof.report import Report
from stof.symbolic import Symbolic

PLAIN = Shape(packed=True, rotary=16, metadata=True)


def optimized(model: onnx.ModelProto, folder: Path, options: Options | None = None) -> tuple[Report, onnx.ModelProto]:
    source, target = folder / "model.onnx", folder / "optimized.onnx"
    onnx.save(model, source)
    report = stof.optimize(source, target, options or Options())
    return report, onnx.load(target)


def ops_of(model: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in model.graph.node if "Attention" in n.op_type]


VERIFIED = {
    "plain": model_of(PLAIN),
    "window beside full": model_of(replace(PLAIN, window=9), PLAIN),
    "everything": model_of(
        Shape(D=32, H=6, rotary=8, rotary_offset=8, interleaved=True, sink=True, window=7, scale=0.3, softcap=3.0,
              norms=True, slots=True)
    ),
    "fp16": model_of(replace(PLAIN, dtype="float16")),
    "bf16": model_of(replace(PLAIN, dtype="bfloat16", norms=True)),
    "opset 13": model_of(replace(PLAIN, norms=True), opset=13),
}  # fmt: skip


@pytest.mark.parametrize("name", VERIFIED)
def test_replaced_and_verified(name: str, tmp_path: Path) -> None:
    report, found = optimized(VERIFIED[name], tmp_path)
    rows = report.caches
    assert [(r.replaced, r.reason) for r in rows] == [(True, "replaced")] * len(rows)
    assert set(ops_of(found)) == {OP}
    verification = report.verification
    assert verification is not None
    assert verification.complete
    assert not verification.failures
    assert verification.expanded
    assert {c.site for c in verification.comparisons if c.site} == {r.cache for r in rows}


def test_result_runs_on_the_cpu(tmp_path: Path) -> None:
    shapes = (replace(PLAIN, window=9), PLAIN)
    _, found = optimized(model_of(*shapes), tmp_path)
    step = draw_step(PLAIN, [30, 0], [2, 17])
    feeds = feeds_of(PLAIN, step, "layer0/") | feeds_of(PLAIN, step, "layer1/")
    outputs = session(found, library=True).run(None, feeds)
    for i, shape in enumerate(shapes):
        exact = compute_paged_step(replace(step, window=shape.window))
        assert np.abs(outputs[3 * i] - exact.output).max() < 1e-5


def test_function_body_is_the_node(tmp_path: Path) -> None:
    shapes = (replace(PLAIN, window=9), PLAIN, PLAIN)
    model = model_of(*shapes)
    _, found = optimized(model, tmp_path)
    assert [helper.get_node_attr_value(n, "mask_id") for n in found.graph.node] == [0, 1, 1]
    (function,) = (f for f in found.functions if f.name == OP)
    (choice,) = (n for n in function.node if n.op_type == "If")
    bodies = [helper.get_node_attr_value(choice, f"{word}_branch").node for word in ("then", "else")]
    for (body,), original in zip(bodies, model.graph.node, strict=False):
        assert (body.op_type, body.domain) == ("PagedAttention", "com.microsoft")
        assert sorted(map(str, body.attribute)) == sorted(map(str, original.attribute))
        assert [bool(n) for n in body.input] == [bool(n) for n in original.input]
    onnx.checker.check_model(found)


def test_report_and_page(tmp_path: Path) -> None:
    report, _ = optimized(VERIFIED["window beside full"], tmp_path, Options(report=tmp_path / "page.html"))
    text = report.to_text()
    assert "2 of 2 attentions over a KV cache replaced" in text
    assert "pages of 16 rows, packed QKV, rotary of 16" in text
    assert "with them expanded" in text
    assert "pages of 16 rows" in to_html(report)
    (first, second) = json.loads(report.to_json())["caches"]
    assert (first["mask"], second["mask"]) == ("k <= q and q - k < 9", "k <= q")
    assert first["predicted_gain"] is None


def test_plan_and_skip(tmp_path: Path) -> None:
    source, target, plan = tmp_path / "model.onnx", tmp_path / "out.onnx", tmp_path / "plan.json"
    onnx.save(VERIFIED["window beside full"], source)
    arguments = [str(source), "-o", str(target), "--save-plan", str(plan), "--skip", "cache:1", "--no-verify"]
    assert cli.main(arguments) == 0
    assert ops_of(onnx.load(target)) == [OP, "PagedAttention"]
    entries = json.loads(plan.read_text())["caches"]
    assert [e["replace"] for e in entries] == [True, False]
    assert cli.main([str(source), "-o", str(target), "--plan", str(plan), "--no-verify"]) == 0
    assert ops_of(onnx.load(target)) == [OP, "PagedAttention"]


def test_an_optimized_model_stays(tmp_path: Path) -> None:
    _, found = optimized(VERIFIED["plain"], tmp_path)
    again = tmp_path / "again.onnx"
    onnx.save(found, again)
    report = stof.optimize(again, tmp_path / "more.onnx")
    assert [r.reason for r in report.caches] == [f"is {OP} already"]


def test_tensorrt_has_no_plugin(tmp_path: Path) -> None:
    report, _ = optimized(VERIFIED["plain"], tmp_path, Options(target="tensorrt", verify=False))
    assert report.caches[0].reason == f"{OP} has no TensorRT plugin: plugins cannot append to a cache in place"


@pytest.mark.parametrize(
    ("name", "value"), [("mask", "k <= q and q - k < 8"), ("softcap", 5.0), ("rotary_interleaved", 1), ("scale", 0.2)]
)
def test_damaged_nodes_are_found(
    name: str, value: str | float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong node is left out, and the report says why."""
    original = emit.rewrite_node

    def wrong(node: onnx.NodeProto, *others: Any) -> None:
        original(node, *others)
        kept = [a for a in node.attribute if a.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])

    monkeypatch.setattr(emit, "rewrite_node", wrong)
    report, found = optimized(model_of(replace(PLAIN, window=9)), tmp_path)
    assert ops_of(found) == ["PagedAttention"]
    assert not report.caches[0].replaced
    assert "site 'node'" in report.caches[0].reason


def test_a_wrong_expansion_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The original's standard nodes are held against fp64, too."""
    original = checks.expand_pages
    monkeypatch.setattr(checks, "expand_pages", lambda m, sites: original(m, [replace(s, window=3) for s in sites]))
    report, found = optimized(model_of(PLAIN), tmp_path)
    assert ops_of(found) == ["PagedAttention"]
    assert "computes something else than the operator's contract" in report.caches[0].reason


@pytest.mark.parametrize("name", ["plain", "everything", "window beside full"])
def test_inputs_agree(name: str) -> None:
    """Lengths, tables, slots and bounds of every case are legal, and blocks are owned by one sequence."""
    model = VERIFIED[name]
    symbolic = Symbolic(model)
    sites = [c.site for c in find_candidates(model, symbolic, "cpu") if isinstance(c.site, PagedSite)]
    maker = PagedInputMaker(model, symbolic, sites)
    cases = maker.steps(1000)
    assert len(cases) == 4
    reached = False
    for seed, case in enumerate(cases):
        feed = maker.draw(case, np.random.default_rng(seed))
        cumulative, past, table = feed["cumulative"], feed["past"], feed["table"]
        new = np.diff(cumulative)
        tokens = next(x for n, x in feed.items() if n.endswith("query"))
        cache = next(x for n, x in feed.items() if n.endswith("key_cache"))
        assert cumulative[0] == 0
        assert cumulative[-1] == len(tokens)
        assert (new >= 0).all()
        assert (past >= 0).all()
        assert (past + new <= table.shape[1] * cache.shape[1]).all()
        assert len(set(table.reshape(-1).tolist())) == table.size
        assert table.min() >= 0
        assert table.max() < len(cache)
        if "slots" in feed:
            assert len(set(feed["slots"].tolist())) == len(tokens)
        if "metadata" in feed:
            assert feed["metadata"].tolist() == [new.max(), (past + new).max(), 0]
        reached |= bool((past + new).max() > 30)
    assert reached
