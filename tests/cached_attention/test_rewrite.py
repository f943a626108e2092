# SPDX-License-Identifier: Apache-2.0
"""Decoders through the whole command: what is replaced, verified, reported, planned, and left to attention sites."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from gqa_models import Shape, draw_step, feeds_of, model_of, session
from onnx import TensorProto, helper

import stof
from stof import cli
from stof.cached_attention import rewrite
from stof.cached_attention.checks import site_checks
from stof.cached_attention.emit import emit_caches
from stof.cached_attention.plan_entry import CachePlan
from stof.cached_attention.site import OP, CacheSite
from stof.errors import ArgumentError, ModelError
from stof.html_report import to_html
from stof.ops import PLAN_FORMATS
from stof.options import Options
from stof.plan import Plan, load
from stof.report import Report

GENAI = Shape(packed=True, rotary=16)


def optimized(model: onnx.ModelProto, folder: Path, options: Options | None = None) -> tuple[Report, onnx.ModelProto]:
    source, target = folder / "model.onnx", folder / "optimized.onnx"
    onnx.save(model, source)
    report = stof.optimize(source, target, options or Options())
    return report, onnx.load(target) if target.exists() else onnx.ModelProto()


def ops_of(model: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in model.graph.node if "Attention" in n.op_type]


VERIFIED = {
    "given lengths": model_of(Shape(rotary=16)),
    "masks": model_of(GENAI, GENAI, masks=True),
    "window": model_of(replace(GENAI, window=5), GENAI, masks=True),
    "sliding": model_of(Shape(window=6, sliding=True, sink=True), masks=True),
    "sliding beside full": model_of(Shape(window=6, sliding=True), Shape(smooth=True), masks=True),
    "positions": model_of(Shape(rotary=16, positions=True), masks=True),
    "bias": model_of(Shape(bias=(1, 4)), masks=True),
    "norms": model_of(Shape(norms=True, packed=True, rotary=16), masks=True),
    "norms, separate": model_of(Shape(norms=True), Shape(), masks=True),
    "everything": model_of(
        Shape(D=32, H=6, packed=True, rotary=16, interleaved=True, sink=True, window=7, scale=0.3, softcap=3.0),
        masks=True,
    ),
    "fixed capacity": model_of(GENAI, capacity=24, masks=True),
    "fp16": model_of(replace(GENAI, dtype="float16"), masks=True),
    "bf16": model_of(replace(GENAI, dtype="bfloat16"), masks=True),
    "opset 13": model_of(Shape(norms=True), masks=True, opset=13),
    "int8": model_of(replace(GENAI, cache="int8"), replace(GENAI, cache="int8", channels=(True, True)), masks=True),
    "int8, fp16": model_of(replace(GENAI, cache="int8", dtype="float16", window=5), masks=True),
    "int8, sliding": model_of(Shape(cache="int8", window=6, sliding=True, channels=(True, True)), masks=True),
}


@pytest.mark.parametrize("name", VERIFIED)
def test_replaced_and_verified(name: str, tmp_path: Path) -> None:
    """Every node is replaced, sites and outputs are compared, and no drawn input is refused."""
    model = VERIFIED[name]
    report, found = optimized(model, tmp_path)
    rows = report.caches
    assert [(r.replaced, r.reason) for r in rows] == [(True, "replaced")] * len(rows)
    assert set(ops_of(found)) == {OP}
    verification = report.verification
    assert verification is not None
    assert verification.complete
    assert not verification.failures
    assert {c.site for c in verification.comparisons if c.site} == {r.cache for r in rows}
    assert verification.expanded == ("norm" in name or name == "opset 13")
    assert len(verification.cases) == 5
    outputs = [c for c in verification.comparisons if not c.site]
    assert all(c.coverage.compared > 0 for c in verification.comparisons)
    assert any(c.coverage.unused for c in outputs if "present" in c.what)


def test_the_written_model_runs_as_the_original(tmp_path: Path) -> None:
    model = model_of(GENAI)
    _, found = optimized(model, tmp_path)
    step = draw_step(GENAI, [12, 7, 2], 1, 16)
    feeds = feeds_of(GENAI, step)
    wanted = session(model, library=False).run(None, feeds)
    for library in (True, False):
        mine = session(found, library=library).run(None, feeds)
        np.testing.assert_allclose(mine[0], wanted[0], atol=1e-5, rtol=1e-5)
        for b, count in enumerate(step.rows):
            for one, other in zip(mine[1:], wanted[1:], strict=True):
                np.testing.assert_allclose(one[b, :, :count], other[b, :, :count], atol=1e-6, rtol=1e-6)


def test_lengths_that_follow_from_sizes(tmp_path: Path) -> None:
    """A past whose rows are all full, with the total computed from its size: also an op's node, not an expanded one."""
    model = model_of(Shape(), masks=True)
    value = next(i for i in model.graph.input if i.name == "attention_mask")
    value.type.tensor_type.shape.dim[1].dim_param = "C + S"
    report, found = optimized(model, tmp_path)
    assert ops_of(found) == [OP]
    assert report.verification is not None
    assert len(report.verification.cases) >= 4


def test_outputs_that_do_not_say_what_is_padding(tmp_path: Path) -> None:
    """Scores of the last token alone: prompts are not padded then, and outputs agree."""
    model = model_of(GENAI, masks=True)
    last = helper.make_node("Gather", ["output", "end"], ["final"], axis=1)
    model.graph.node.extend([helper.make_node("Constant", [], ["end"], value_int=-1), last])
    model.graph.output.append(helper.make_tensor_value_info("final", TensorProto.FLOAT, ["B", 64]))
    report, _ = optimized(model, tmp_path)
    assert report.replaced == 1
    assert report.verification is not None
    assert report.verification.cases[0].startswith("B 3, S 11")
    assert "padded" not in report.verification.cases[0]


def test_rounding_alone_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of the original agree to the last bit, and the kernels round otherwise: perturbed runs say how far that goes."""
    monkeypatch.setattr("stof.verification.verified_models._FLOOR", 1e-9)
    report, _ = optimized(model_of(GENAI, replace(GENAI, norms=True), masks=True), tmp_path)
    assert report.replaced == 2
    assert report.verification is not None
    compared = [c for c in report.verification.comparisons if "layer0/present_key" in c.what]
    assert all(0 < c.difference < c.budget < 1e-4 for c in compared if "S 1," not in c.what)


def test_inputs_of_the_user(tmp_path: Path) -> None:
    """Lengths are read from them, and rows of caches beyond are not compared."""
    model = model_of(GENAI, masks=True)
    step = draw_step(GENAI, [12, 7], 1, 16)
    feeds = feeds_of(GENAI, step)
    mask = (np.arange(12)[None] < step.lengths[:, None]).astype(np.int64)
    given = {n: a for n, a in feeds.items() if n not in ("seqlens_k", "total")} | {"attention_mask": mask}
    np.savez(tmp_path / "inputs.npz", **given)
    report, _ = optimized(model, tmp_path, Options(inputs=(tmp_path / "inputs.npz",)))
    assert report.replaced == 1
    assert report.verification is not None
    (first, *_) = [c for c in report.verification.comparisons if "present_key" in c.what and "inputs.npz" in c.what]
    assert first.coverage.unused == (2 * 16 - 12 - 7) * 2 * 16
    assert first.coverage.compared == (12 + 7) * 2 * 16


def test_chains_beside_caches(tmp_path: Path) -> None:
    """Operators around the node become chains; both ops are verified."""
    model = model_of(Shape(), masks=True)
    rest = list(model.graph.node)
    del model.graph.node[:]
    norm = helper.make_node("LayerNormalization", ["sum", "weight", "shift"], ["normed"], axis=-1)
    model.graph.node.extend([*rest, helper.make_node("Add", ["output", "query"], ["sum"]), norm])
    for name in ("weight", "shift"):
        numbers = np.random.default_rng(0).standard_normal(64).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(numbers, name))
    model.graph.output.append(helper.make_tensor_value_info("normed", TensorProto.FLOAT, ["B", "S", 64]))
    report, found = optimized(model, tmp_path, Options(chains="on"))
    assert {n.op_type for n in found.graph.node} >= {OP, "StofChain"}
    assert report.verification is not None
    assert not report.verification.failures


def test_nodes_in_functions_are_inlined(tmp_path: Path) -> None:
    model = model_of(GENAI, masks=True)
    node = model.graph.node.pop()
    inputs = list(dict.fromkeys(i for i in node.input if i))
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model.functions.append(helper.make_function("own", "Layer", inputs, list(node.output), [node], opsets))
    model.opset_import.append(helper.make_opsetid("own", 1))
    model.graph.node.append(helper.make_node("Layer", inputs, list(node.output), name="layer", domain="own"))
    report, found = optimized(model, tmp_path)
    assert report.replaced == 1
    assert ops_of(found) == [OP]
    assert report.verification is not None
    assert not report.verification.failures


def with_softmax(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with causal attention of primitive nodes beside its caches."""
    nodes = [
        helper.make_node("Transpose", ["a"], ["at"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["a", "at"], ["scores"]),
        helper.make_node("Trilu", ["ones"], ["upper"], upper=0),
        helper.make_node("Shape", ["scores"], ["sizes"], start=2),
        helper.make_node(
            "ConstantOfShape", ["sizes"], ["ones"], value=helper.make_tensor("v", TensorProto.INT64, [1], [1])
        ),
        helper.make_node("Cast", ["upper"], ["causal"], to=TensorProto.BOOL),
        helper.make_node("Constant", [], ["lowest"], value_float=float(np.finfo(np.float32).min)),
        helper.make_node("Where", ["causal", "scores", "lowest"], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["weights"], name="softmax", axis=-1),
        helper.make_node("MatMul", ["weights", "a"], ["b"]),
    ]
    order = [0, 1, 3, 4, 2, 5, 6, 7, 8, 9]
    model.graph.node.extend(nodes[i] for i in order)
    model.graph.input.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, ["B", 2, "S", 16]))
    model.graph.output.append(helper.make_tensor_value_info("b", TensorProto.FLOAT, ["B", 2, "S", 16]))
    return model


def test_beside_attention_sites(tmp_path: Path) -> None:
    """Both ops write into one model, and the sites of both are compared."""
    report, found = optimized(with_softmax(model_of(GENAI, GENAI, masks=True)), tmp_path)
    assert ops_of(found) == [OP, OP, "StofAttention"]
    assert {f.name for f in found.functions} == {OP, "StofAttention"}
    assert report.verification is not None
    assert {c.site for c in report.verification.comparisons if c.site} == {"layer0/node", "layer1/node", "softmax"}
    again, _ = optimized(found, tmp_path)
    assert not again.replaced
    assert [r.reason for r in again.caches] == [f"is {OP} already"] * 2
    assert [s.reason for s in again.sites] == ["is StofAttention already"]


def test_left_to_attention_sites(tmp_path: Path) -> None:
    """A node that this op leaves may still become an attention site."""
    model = model_of(Shape(window=4), masks=True)
    value = next(i for i in model.graph.input if i.name == "attention_mask")
    value.type.tensor_type.shape.dim[1].dim_param = "C + S"
    report, _ = optimized(model, tmp_path, Options(skip=("cache:node",), dry_run=True))
    assert [(r.replaced, r.reason) for r in report.caches] == [(False, "left out by --skip")]
    assert [s.site for s in report.sites] == ["node"]


@pytest.mark.parametrize(
    ("options", "replaced"),
    [
        (Options(only=("cache:1",)), [False, True]),
        (Options(skip=("cache:layer0/*",)), [False, True]),
        (Options(skip=("cache:*",)), [False, False]),
        (Options(only=("cache:layer0/node",)), [True, False]),
    ],
)
def test_selection(options: Options, replaced: list[bool], tmp_path: Path) -> None:
    report, found = optimized(model_of(GENAI, GENAI, masks=True), tmp_path, options)
    assert [r.replaced for r in report.caches] == replaced
    assert [op == OP for op in ops_of(found)] == replaced


def test_wrong_selections(tmp_path: Path) -> None:
    model = model_of(GENAI, GENAI, masks=True)
    with pytest.raises(
        ArgumentError, match="names no cache of the model; its caches are 0 'layer0/node', 1 'layer1/node'"
    ):
        optimized(model, tmp_path, Options(skip=("cache:7",)))


def test_targets(tmp_path: Path) -> None:
    model = model_of(GENAI, masks=True)
    report, _ = optimized(model, tmp_path, Options(target="cuda"))
    assert report.replaced == 1
    report, found = optimized(model, tmp_path, Options(target="tensorrt", verify=False))
    assert "has no TensorRT plugin" in report.caches[0].reason
    assert ops_of(found) == ["GroupQueryAttention"]


def test_nodes_that_are_faster_on_the_device_stay(tmp_path: Path) -> None:
    """The kind: a replaced node must not be slower. A plan takes the place of the estimate."""
    model = model_of(Shape(H=16, G=1, dtype="float16"))
    saved = tmp_path / "plan.json"
    report, _ = optimized(model, tmp_path, Options(target="cuda", verify=False, save_plan=saved))
    assert not report.caches[0].replaced
    assert "ONNX Runtime's CUDA kernel is faster for 16 query heads on 1 KV heads" in report.caches[0].reason
    saved.write_text(saved.read_text().replace('"replace": false', '"replace": true'))
    report, _ = optimized(model, tmp_path, Options(target="cuda", verify=False, plan=saved))
    assert report.caches[0].replaced


def test_two_element_types(tmp_path: Path) -> None:
    """All calls share one function body."""
    report, _ = optimized(model_of(Shape(), Shape(dtype="float16"), masks=True), tmp_path, Options(verify=False))
    assert [r.replaced for r in report.caches] == [True, False]
    assert "its element type is not that of 'layer0/node'" in report.caches[1].reason


def test_a_library_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "op_limits", lambda: {"StofAttention": {}})
    report, _ = optimized(model_of(GENAI, masks=True), tmp_path)
    assert "the plugin library has no StofCachedAttention" in report.caches[0].reason


def test_a_saved_plan_is_applied(tmp_path: Path) -> None:
    model = model_of(GENAI, replace(GENAI, window=4), masks=True)
    saved = tmp_path / "plan.json"
    _, first = optimized(model, tmp_path, Options(save_plan=saved, skip=("cache:1",)))
    plan = load(saved, PLAN_FORMATS)
    assert plan.entries["caches"] == (
        CachePlan("layer0/node", True, 1.339),
        CachePlan("layer1/node", False, reason="left out by --skip"),
    )
    again = tmp_path / "again.json"
    report, second = optimized(model, tmp_path, Options(plan=saved, save_plan=again))
    assert second == first
    assert again.read_bytes() == saved.read_bytes()
    assert [r.reason for r in report.caches] == ["replaced", "left out by --skip"]


def applied(plan: Plan, model: onnx.ModelProto, folder: Path) -> Report:
    plan.save(folder / "plan.json")
    return optimized(model, folder, Options(plan=folder / "plan.json", verify=False))[0]


def test_plans(tmp_path: Path) -> None:
    model = model_of(GENAI, GENAI, masks=True)
    only = Plan({"sites": (), "caches": (CachePlan("layer1/node", True),)})
    assert [r.reason for r in applied(only, model, tmp_path).caches] == ["not in the plan", "replaced"]
    older = Plan({"sites": ()})
    assert [r.replaced for r in applied(older, model, tmp_path).caches] == [True, True]
    kept = Plan({"sites": (), "caches": (CachePlan("layer0/node", False),)})
    reasons = [r.reason for r in applied(kept, model, tmp_path).caches]
    assert reasons == ["left as it is by the plan", "not in the plan"]
    with pytest.raises(ArgumentError, match="the plan has cache 'x', which the model does not have"):
        applied(Plan({"sites": (), "caches": (CachePlan("x", True),)}), model, tmp_path)
    impossible = model_of(replace(GENAI, other={"causal": 0}), masks=True)
    with pytest.raises(ModelError, match="the plan replaces cache 'node', which cannot be: causal is 0"):
        applied(Plan({"sites": (), "caches": (CachePlan("node", True),)}), impossible, tmp_path)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"cache": "a"}, "has no field 'replace'"),
        ({"cache": "a", "replace": True, "mask": ""}, "has field 'mask'"),
        ({"cache": 3, "replace": True}, "has cache 3, expected str"),
        ({"cache": "a", "replace": True, "predicted_gain": 10**400}, "expected a number below 1e300"),
    ],
)
def test_entries_that_are_none(entry: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"format": "stof-plan", "version": 1, "sites": [], "caches": [entry]}))
    with pytest.raises(ArgumentError, match=words):
        load(path, PLAN_FORMATS)


def test_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of(
        replace(GENAI, window=64), replace(GENAI, window=64), replace(GENAI, other={"causal": 0}), masks=True
    )
    path, page, data = (tmp_path / n for n in ("model.onnx", "page.html", "report.json"))
    onnx.save(model, path)
    options = ["--json", str(data), "--report", str(page), "--no-verify"]
    assert cli.main([str(path), *options]) == 0
    out = capsys.readouterr().out
    assert "2 of 3 attentions over a KV cache replaced" in out
    assert "2 x attention over a KV cache: k <= q and q - k < 64" in out
    assert "4 heads on 2, D = 16, packed QKV, rotary of 16, estimated" in out
    assert "kept  layer2/node: causal is 0" in out
    rows = json.loads(data.read_text())["caches"]
    assert [(r["cache"], r["index"], r["replaced"]) for r in rows] == [
        ("layer0/node", 0, True),
        ("layer1/node", 1, True),
        ("layer2/node", 2, False),
    ]
    assert rows[0]["features"] == ["packed QKV", "rotary of 16"]
    words = page.read_text()
    assert "Attention over a KV cache" in words
    assert "k &lt;= q and q - k &lt; 64" in words
    assert "one token over a cache of 4096 keys" in words
    assert "causal, window of 64 keys" in words
    assert cli.main([str(path), "--explain"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("cache ")] == [
        f"cache {i}  layer{i}/node" for i in range(3)
    ]
    assert cli.main([str(path), "--explain", "cache:2"]) == 0
    assert "cache 2  layer2/node\n  stopped: causal is 0" in capsys.readouterr().out
    assert cli.main([str(path), "--explain", "cache:0"]) == 0
    out = capsys.readouterr().out
    assert (
        "  match  4 heads on 2, D = 16, packed QKV, rotary of 16\n  mask   k <= q and q - k < 64\n  cost   estimated"
        in out
    )
    assert "-> replaced" in out


def test_the_page_of_a_model_without_caches(tmp_path: Path) -> None:
    model = with_softmax(model_of(GENAI, masks=True))
    report, _ = optimized(model, tmp_path, Options(skip=("cache:*",), verify=False))
    assert "Attention sites" in to_html(report)


def test_an_optimized_model(tmp_path: Path) -> None:
    """A second run changes nothing, and its plan can be applied."""
    model = model_of(GENAI, GENAI, masks=True)
    _, once = optimized(model, tmp_path, Options(skip=("cache:1",)))
    saved = tmp_path / "saved.json"
    report, twice = optimized(once, tmp_path, Options(save_plan=saved))
    assert twice == once
    assert report.copied
    first, second = (r.reason for r in report.caches)
    assert first == f"is {OP} already"
    assert "optimize the model from which it was made" in second
    report, _ = optimized(once, tmp_path, Options(plan=saved))
    assert not report.replaced
    with pytest.raises(ArgumentError, match="names no cache"):
        optimized(once, tmp_path, Options(skip=("cache:nothing",)))


def wrong_emission(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Makes what is written differ from what is decided."""

    def emit(model: onnx.ModelProto, sites: Sequence[CacheSite]) -> onnx.ModelProto:
        found = emit_caches(model, sites)
        for node in found.graph.node:
            if node.op_type == OP:
                change(node)
        return found

    monkeypatch.setattr(rewrite, "emit_caches", emit)
    monkeypatch.setattr(site_checks, "emit_caches", emit)


def set_attribute(node: onnx.NodeProto, name: str, value: Any) -> None:
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


FAULTS = {
    "mask": lambda node: set_attribute(node, "mask", "k <= q and q - k < 700"),
    "scale": lambda node: set_attribute(node, "scale", 0.26),
    "softcap": lambda node: set_attribute(node, "softcap", 40.0),
    "rotary": lambda node: set_attribute(node, "do_rotary", 0),
    "interleaved": lambda node: set_attribute(node, "rotary_interleaved", 1),
    "epsilon": lambda node: set_attribute(node, "qk_norm_epsilon", 0.5),
    "sink": lambda node: node.input.pop(),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that computes something else is found at its site, and the model stays as it was."""
    wrong_emission(monkeypatch, FAULTS[name])
    report, found = optimized(model_of(Shape(rotary=16, sink=True, norms=name == "epsilon"), masks=True), tmp_path)
    assert ops_of(found) == ["GroupQueryAttention"]
    (row,) = report.caches
    assert not row.replaced
    assert "site 'node' differs by" in row.reason


def test_faults_of_caches_are_found_at_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values change places behind the node: no site is wrong."""

    def swap(node: onnx.NodeProto) -> None:
        node.output[1], node.output[2] = node.output[2], node.output[1]

    wrong_emission(monkeypatch, swap)
    report, found = optimized(model_of(Shape(), masks=True), tmp_path)
    assert ops_of(found) == ["GroupQueryAttention"]
    assert "output 'present_key'" in report.caches[0].reason
