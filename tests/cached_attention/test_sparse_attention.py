# SPDX-License-Identifier: Apache-2.0
"""SparseAttention nodes: what replaces them beside fp64 and beside ONNX Runtime's own node, refusals, function bodies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from gqa_models import Shape, model_of, run_shared, session
from onnx import helper
from sparse_models import (
    STRIDED,
    SparseShape,
    candidates_of,
    draw_sparse_step,
    random_layouts,
    sparse_feeds,
    sparse_model,
    strided,
)

import stof
from stof.cached_attention.checks import site_checks
from stof.cached_attention.checks.oracle import CacheStep, compute_step
from stof.cached_attention.emit import emit_caches
from stof.cached_attention.site import OP
from stof.execution.shared_buffers import find_shared_buffers
from stof.options import Options
from stof.report import Report


def emitted(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with every node replaced."""
    sites = [c.site for c in candidates_of(model) if c.site is not None]
    assert len(sites) == sum(n.op_type == "SparseAttention" for n in model.graph.node)
    return emit_caches(model, sites)


def optimized(model: onnx.ModelProto, folder: Path, **options: Any) -> tuple[Report, onnx.ModelProto]:
    source, target = folder / "model.onnx", folder / "optimized.onnx"
    onnx.save(model, source)
    report = stof.optimize(source, target, Options(**options))
    return report, onnx.load(target)


def largest_error(found: list[np.ndarray], step: CacheStep) -> float:
    """Of the output and of the caches' valid rows, beside fp64."""
    exact = compute_step(step)
    held = np.arange(step.capacity)[None] < step.rows[:, None]
    away = [np.abs(found[0][~step.padded].astype(np.float64) - exact.output[~step.padded]).max()]
    for mine, wanted in zip(found[1:], (exact.key, exact.value), strict=True):
        rows = [x.swapaxes(1, 2)[held] for x in (mine, wanted)]
        away.append(np.abs(rows[0].astype(np.float64) - rows[1]).max())
    return float(max(away))


LAYOUTS = {
    "stride": lambda n, blocks: strided(blocks, 2, 4, n),
    "one residue": lambda n, blocks: strided(blocks, 1, 3, n, step=0),
    "table": lambda n, blocks: random_layouts(blocks, n),
}
STEPS = {
    "prompt": ([70, 70], 70),
    "ragged prompt": ([70, 9, 33], 70),
    "decode": ([91, 91], 1),
    "ragged decode": ([91, 17, 64, 1], 1),
    "chunk": ([80], 9),
    "ragged chunk": ([80, 33], 9),
}


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_layouts_and_block_sizes(kind: str, count: int, block: int) -> None:
    """Steps beyond several blocks, beside fp64 and beside the runtime's node."""
    shape = SparseShape(LAYOUTS[kind](count, 6), block=block, H=4, G=2, rotary=16, packed=block == 32)
    model = sparse_model(shape)
    original, mine = session(model, library=False), session(emitted(model), library=True)
    length = min(5 * block, 384) + 3  # the rotary table has 512 rows
    for lengths, queries in (([length, length], length), ([length, length - 7], 1)):
        step = draw_sparse_step(shape, lengths, queries, shape.length)
        feeds = sparse_feeds(shape, step)
        assert largest_error(run_shared(mine, feeds), step) < 3e-6
        assert largest_error(mine.run(None, feeds), step) < 3e-6
        if len(set(lengths)) == 1:
            assert largest_error(run_shared(original, feeds), step) < 3e-6


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_steps(name: str, groups: int) -> None:
    """Prompts, chunks and single tokens of sequences of equal and of different lengths, under GQA and without."""
    lengths, queries = STEPS[name]
    for shape in (replace(STRIDED, G=groups), SparseShape(random_layouts(6, 4), G=groups, scale=0.3)):
        model = sparse_model(shape)
        step = draw_sparse_step(shape, lengths, queries, 96)
        feeds = sparse_feeds(shape, step)
        assert largest_error(run_shared(session(emitted(model), library=True), feeds), step) < 3e-6
        if "ragged" not in name:
            assert largest_error(run_shared(session(model, library=False), feeds), step) < 3e-6


@pytest.mark.parametrize(("rotary", "interleaved"), [(0, False), (16, False), (16, True), (32, False)])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rotary(rotary: int, interleaved: bool, packed: bool, dtype: str) -> None:
    shape = SparseShape(
        strided(8, 2, 4, 2), H=2, G=1, D=32, rotary=rotary, interleaved=interleaved, packed=packed, dtype=dtype
    )
    model = sparse_model(shape)
    step = draw_sparse_step(shape, [99, 99], 1, 128)
    feeds = sparse_feeds(shape, step)
    limit = 3e-6 if dtype == "float32" else 6e-3
    for made in (session(model, library=False), session(emitted(model), library=True)):
        assert largest_error(run_shared(made, feeds), step) < limit


def test_the_oracle_can_fail() -> None:
    """Another layout gives other outputs, by far more than what tests allow."""
    step = draw_sparse_step(STRIDED, [91, 17], 1, 128)
    dense = replace(step, layout=np.tril(np.ones((1, 8, 8), bool)))
    assert np.abs(compute_step(step).output - compute_step(dense).output).max() > 0.01


VERIFIED = {
    "given lengths": sparse_model(STRIDED),
    "masks": sparse_model(STRIDED, STRIDED, masks=True),
    "table": sparse_model(SparseShape(random_layouts(6, 2)), masks=True),
    "table and stride": sparse_model(SparseShape(random_layouts(6, 2)), SparseShape(strided(6, 1, 2, 1)), masks=True),
    "fixed capacity": sparse_model(STRIDED, capacity=112, masks=True),
    "fp16": sparse_model(replace(STRIDED, dtype="float16"), masks=True),
    "bf16": sparse_model(replace(STRIDED, dtype="bfloat16"), masks=True),
    "blocks of 64": sparse_model(SparseShape(strided(12, 8, 4, 4), block=64), masks=True),
}


@pytest.mark.parametrize("name", VERIFIED)
def test_replaced_and_verified(name: str, tmp_path: Path) -> None:
    """Sites and whole models are compared: the original runs as it is."""
    report, found = optimized(VERIFIED[name], tmp_path)
    assert [r.reason for r in report.caches] == ["replaced"] * len(report.caches)
    kinds = [n.op_type for n in found.graph.node]
    assert "SparseAttention" not in kinds
    assert kinds.count("Sub") == 1  # layers share their lengths
    verification = report.verification
    assert verification is not None
    assert verification.complete
    assert not verification.failures
    assert not verification.expanded
    assert {c.site for c in verification.comparisons if c.site} == {r.cache for r in report.caches}
    assert len(verification.cases) == 5


def beside_dense() -> onnx.ModelProto:
    """A SparseAttention beside a GroupQueryAttention, which read their lengths from inputs of their own."""
    model, other = sparse_model(STRIDED), model_of(Shape(rotary=16))
    node = other.graph.node[0]
    renamed = {n: f"dense/{n}" for n in (*node.input, *node.output) if n and n != "total"}
    for names in (node.input, node.output):
        names[:] = [renamed.get(n, n) for n in names]
    node.name = "dense"
    for info in (*other.graph.input, *other.graph.output):
        info.name = renamed.get(info.name, info.name)
    model.graph.node.append(node)
    model.graph.input.extend(i for i in other.graph.input if i.name != "total")
    model.graph.output.extend(other.graph.output)
    return model


def test_beside_group_query_attention(tmp_path: Path) -> None:
    """Sparse and dense layers of one model are replaced together."""
    report, found = optimized(beside_dense(), tmp_path)
    assert [r.reason for r in report.caches] == ["replaced", "replaced"]
    masks = [a.s.decode() for n in found.graph.node for a in n.attribute if a.name == "mask"]
    assert masks == ["(q // 16 - k // 16 < 2 or (k // 16 + h) % 4 == 3) and k <= q", "k <= q"]


@pytest.mark.parametrize("shape", [STRIDED, SparseShape(random_layouts(6, 2), H=2, G=1)], ids=["stride", "table"])
def test_without_the_library(shape: SparseShape) -> None:
    """The function body is the original node: it gives the same bits."""
    model = sparse_model(shape)
    step = draw_sparse_step(shape, [77, 77], 1, 96)
    feeds = sparse_feeds(shape, step)
    wanted = run_shared(session(model, library=False), feeds)
    found = run_shared(session(emitted(model), library=False), feeds)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_attributes_of_several_kinds() -> None:
    """Nodes with other attributes are variants of one function body, and the operator tells them apart."""
    shapes = STRIDED, replace(STRIDED, scale=0.1, interleaved=True, layout=random_layouts(8, 1))
    model = sparse_model(*shapes)
    steps = [draw_sparse_step(s, [91, 91], 1, 128, seed=i) for i, s in enumerate(shapes)]
    feeds: dict[str, np.ndarray] = {}
    for i, (shape, step) in enumerate(zip(shapes, steps, strict=True)):
        own = sparse_feeds(shape, step)
        feeds |= {n if n in ("lengths", "total") else f"layer{i}/{n}": a for n, a in own.items()}
    found = run_shared(session(emitted(model), library=True), feeds)
    for i, step in enumerate(steps):
        assert largest_error(found[3 * i : 3 * i + 3], step) < 3e-6


def test_heads_of_a_group() -> None:
    """The report says where query heads of one key head differ, which makes the group read the union."""

    def words(shape: SparseShape) -> list[str]:
        (candidate,) = candidates_of(sparse_model(shape))
        assert candidate.site is not None
        return [w for w in candidate.site.features if "differ" in w]

    assert words(STRIDED) == ["query heads of a key head differ"]
    assert words(replace(STRIDED, G=4)) == []
    assert words(replace(STRIDED, layout=strided(8, 2, 4, 1))) == []
    same = np.repeat(strided(8, 2, 4, 2), 2, axis=0)  # each layout for the two heads of a group
    assert words(replace(STRIDED, layout=same)) == []


def test_positions_beyond_the_layouts() -> None:
    """A table refuses them, as the runtime's node does; the short expression goes on."""
    for shape, is_refused in ((SparseShape(random_layouts(3, 1)), True), (SparseShape(strided(3, 1, 2, 1)), False)):
        step = draw_sparse_step(replace(shape, layout=strided(8, 1, 2, 1)), [60], 1, 96)
        model = sparse_model(shape)
        feeds = sparse_feeds(shape, step)
        with pytest.raises(Exception, match="max_sequence_length should be no less"):
            run_shared(session(model, library=False), feeds)
        mine = session(emitted(model), library=True)
        if is_refused:
            with pytest.raises(Exception, match="index 1 of table0 runs from 3 to 3, expected 0 to 2"):
                run_shared(mine, feeds)
        else:
            assert largest_error(run_shared(mine, feeds), step) < 3e-6


@pytest.mark.parametrize("what", ["table", "mask"])
def test_faults_are_found(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with another table or mask is dropped at its site."""

    def emit(model: onnx.ModelProto, sites: Any) -> onnx.ModelProto:
        found = emit_caches(model, sites)
        for tensor in found.graph.initializer:
            if what == "table" and "block_table" in tensor.name:
                tensor.raw_data = bytes(tensor.raw_data[:-1]) + b"\0"
        for attribute in (a for n in found.graph.node for a in n.attribute if a.name == "mask"):
            if what == "mask":
                attribute.s = attribute.s.replace(b"q // 16", b"q // 17")
        return found

    monkeypatch.setattr("stof.cached_attention.rewrite.emit_caches", emit)
    monkeypatch.setattr(site_checks, "emit_caches", emit)
    layout = random_layouts(6, 2)
    layout[-1, -1, -1] = True
    report, found = optimized(sparse_model(SparseShape(layout), masks=True), tmp_path)
    assert [n.op_type for n in found.graph.node if "Attention" in n.op_type] == ["SparseAttention"]
    (row,) = report.caches
    assert ("table0" if what == "table" else "the node's mask is") in row.reason


def test_nodes_share_tables() -> None:
    """Layers with equal layouts read one table, others another one."""
    one, other = random_layouts(6, 2, 1), random_layouts(6, 2, 2)
    found = emitted(sparse_model(*(SparseShape(x) for x in (one, other, one))))
    tables = [n.input[17] for n in found.graph.node if n.op_type == OP]
    assert tables[0] == tables[2] != tables[1]


def test_shared_buffers() -> None:
    """The pasts and presents of nodes, and of calls in whose bodies they lie; not those of other nodes."""
    pairs = (("past_key", "present_key"), ("past_value", "present_value"))
    model = sparse_model(STRIDED)
    assert find_shared_buffers(model) == pairs
    assert find_shared_buffers(emitted(model)) == pairs
    assert find_shared_buffers(beside_dense()) == pairs
    assert find_shared_buffers(model_of(Shape())) == ()
    model.graph.node[0].input[4] = "past_key"  # one buffer cannot be two outputs
    assert find_shared_buffers(model) == pairs[:1]


def in_a_function(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model's node in a local function whose inputs have another order."""
    found = onnx.ModelProto()
    found.CopyFrom(model)
    node = found.graph.node[0]
    inputs = [n for n in reversed(node.input) if n]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    body = helper.make_function("own", "Layer", inputs, list(node.output), [node], opsets)
    call = helper.make_node("Layer", inputs, list(node.output), name="call", domain="own")
    del found.graph.node[:]
    found.graph.node.append(call)
    found.functions.append(body)
    found.opset_import.append(helper.make_opsetid("own", 1))
    return found


def test_a_node_in_a_function(tmp_path: Path) -> None:
    model = in_a_function(sparse_model(STRIDED))
    assert sorted(find_shared_buffers(model)) == [("past_key", "present_key"), ("past_value", "present_value")]
    report, found = optimized(model, tmp_path)
    assert [r.reason for r in report.caches] == ["replaced"]
    assert OP in [n.op_type for n in found.graph.node]
    assert report.verification is not None
    assert report.verification.complete


def test_a_function_that_calls_itself() -> None:
    model = in_a_function(sparse_model(STRIDED))
    model.functions[0].node.append(model.graph.node[0])
    assert len(find_shared_buffers(model)) == 2


def test_times_of_whole_models(tmp_path: Path) -> None:
    """The original runs in sessions of its own file, too."""
    report, _ = optimized(sparse_model(STRIDED, masks=True), tmp_path, time=True)
    assert report.times is not None


def test_reports(tmp_path: Path) -> None:
    report, _ = optimized(sparse_model(STRIDED, masks=True), tmp_path, report=tmp_path / "page.html", verify=False)
    (row,) = report.caches
    assert row.features[2:] == (
        "4 layouts of 8 blocks of 16, 56.2 % of the causal blocks",
        "query heads of a key head differ",
    )
    assert row.length == 128
    assert row.predicted_gain is not None
    assert row.predicted_gain > 1.3


def test_the_gain_on_a_device(tmp_path: Path) -> None:
    """The runtime's kernel reads the blocks alone there."""
    report, _ = optimized(sparse_model(STRIDED), tmp_path, target="cuda", verify=False)
    assert report.caches[0].predicted_gain == 1.0
