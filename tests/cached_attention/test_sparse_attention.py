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
from sparse_models import SparseShape, draw_sparse_step, random_layouts, sparse_feeds, sparse_model, strided

import stof
from stof.cached_attention.checks import site_checks
from stof.cached_attention.checks.oracle import CacheStep, compute_step
from stof.cached_attention.emit import emit_caches
from stof.cached_attention.find import CacheCandidate, find_candidates
from stof.cached_attention.site import OP
from stof.execution.shared_buffers import find_shared_buffers
from stof.options import Options
from stof.report import Report
from stof.symbolic import Symbolic

STRIDED = SparseShape(strided(8, 2, 4, 4), packed=True, rotary=16)


def candidates_of(model: onnx.ModelProto) -> list[CacheCandidate]:
    return find_candidates(model, Symbolic(model), "cpu")


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


def expression_of(layout: np.ndarray, block: int = 16, heads: int = 8) -> tuple[str, np.ndarray | None]:
    shape = SparseShape(layout, block=block, H=heads, G=heads)
    (candidate,) = candidates_of(sparse_model(shape))
    assert candidate.site is not None
    assert candidate.site.layout is not None
    return candidate.site.mask, candidate.site.layout.table


EXPRESSIONS = {
    "dense": (np.tril(np.ones((2, 6, 6), bool)), "k <= q"),
    "local": (strided(9, 3, 64, 1, offset=1), "q // 16 - k // 16 < 3 and k <= q"),
    "one layout": (strided(12, 2, 4, 1), "(q // 16 - k // 16 < 2 or k // 16 % 4 == 3) and k <= q"),
    "a step for each head": (strided(12, 2, 8, 8), "(q // 16 - k // 16 < 2 or (k // 16 + h) % 8 == 7) and k <= q"),
    "step 2": (strided(24, 2, 8, 4, step=2), "(q // 16 - k // 16 < 2 or (k // 16 + h * 2) % 8 == 7) and k <= q"),
    "step back": (strided(24, 2, 8, 8, step=7), "(q // 16 - k // 16 < 2 or (k // 16 - h) % 8 == 7) and k <= q"),
    "cycle of layouts": (strided(24, 2, 8, 4), "(q // 16 - k // 16 < 2 or (k // 16 + h % 4) % 8 == 7) and k <= q"),
    "one for each key head": (
        np.repeat(strided(24, 2, 8, 4, step=2), 2, axis=0),
        "(q // 16 - k // 16 < 2 or (k // 16 + h // 2 * 2) % 8 == 7) and k <= q",
    ),
    "runs in a cycle": (
        np.repeat(strided(24, 2, 8, 2), 2, axis=0),
        "(q // 16 - k // 16 < 2 or (k // 16 + h % 4 // 2) % 8 == 7) and k <= q",
    ),
    "equal layouts": (
        np.repeat(strided(12, 2, 4, 1), 8, axis=0),
        "(q // 16 - k // 16 < 2 or k // 16 % 4 == 3) and k <= q",
    ),
    "columns that rows do not reach": (
        strided(7, 2, 8, 8),
        "(q // 16 - k // 16 < 2 or (k // 16 + h) % 8 == 7) and k <= q",
    ),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_short_expressions(name: str) -> None:
    layout, wanted = EXPRESSIONS[name]
    assert expression_of(layout) == (wanted, None)


def test_residues_without_a_step() -> None:
    """Heads whose columns do not move evenly read them from a table of numbers."""
    i, j = np.indices((12, 12))
    layout = (i >= j) & ((i - j < 2) | (j % 5 == np.array([0, 3, 4, 1])[:, None, None]))
    mask, table = expression_of(layout)
    assert mask == "(q // 16 - k // 16 < 2 or k // 16 % 5 == table0[h % 4]) and k <= q"
    assert table is not None
    np.testing.assert_array_equal(table, [0, 3, 4, 1])


@pytest.mark.parametrize("change", [(0, 11, 4), (3, 9, 0), (7, 11, 11)])
def test_one_block_more_or_less(change: tuple[int, int, int]) -> None:
    """A layout that a short expression misses in one block alone becomes a table."""
    layout = strided(12, 2, 4, 8)
    layout[change] ^= True
    mask, table = expression_of(layout)
    assert mask == "table0[h, q // 16, k // 16] and k <= q"
    assert table is not None
    np.testing.assert_array_equal(table, layout)


@pytest.mark.parametrize("seed", range(12))
def test_expressions_say_what_layouts_say(seed: int) -> None:
    """Random strides, steps and sizes, evaluated at every position."""
    rng = np.random.default_rng(seed)
    blocks, count = int(rng.integers(2, 14)), int(rng.choice([1, 2, 4, 8]))
    stride = int(rng.integers(2, 9))
    layout = strided(blocks, int(rng.integers(1, 4)), stride, count, int(rng.integers(0, stride)), int(rng.integers(9)))
    mask, table = expression_of(layout)
    h, q, k = np.ogrid[:8, : blocks * 16, : blocks * 16]
    expression = stof.mask.expression.MaskExpression.parse(mask, {} if table is None else {"table0": table})
    found = np.broadcast_to(expression.evaluate({"h": h, "q": q, "k": k, "table0": table}), (8, q.size, k.size))
    np.testing.assert_array_equal(found, layout[h % count, q // 16, k // 16] & (k <= q))


def test_tables_of_layouts_that_repeat() -> None:
    """A table holds each layout of a run or a cycle once."""
    layouts = random_layouts(6, 2)
    for given, index in ((np.repeat(layouts, 2, axis=0), "h % 4 // 2"), (np.tile(layouts, (2, 1, 1)), "h % 2")):
        mask, table = expression_of(given)
        assert mask == f"table0[{index}, q // 16, k // 16] and k <= q"
        assert table is not None
        np.testing.assert_array_equal(table, layouts)
    mask, table = expression_of(np.repeat(layouts[:1], 4, axis=0))
    assert mask == "table0[0, q // 16, k // 16] and k <= q"
    assert table is not None
    assert table.shape == (1, 6, 6)


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


def reason_of(model: onnx.ModelProto) -> str:
    (candidate,) = candidates_of(model)
    assert candidate.site is None
    return candidate.reason


BLOCKS = np.tril(np.ones((1, 3, 3), bool))
ROWS, COLUMNS = np.array([[0, 1, 3, 6]], np.int32), np.array([[0, 0, 1, 0, 1, 2]], np.int32)


def changed(array: np.ndarray, index: int, value: int) -> np.ndarray:
    found = array.copy()
    found[0, index] = value
    return found


DAMAGED: dict[str, tuple[dict[str, np.ndarray], str]] = {
    "negative": ({"columns": changed(COLUMNS, 2, -1)}, r"block_col_indices\[0\] has -1 in row 1, expected 0 to 1"),
    "beyond": ({"columns": changed(COLUMNS, 5, 3)}, r"block_col_indices\[0\] has 3 in row 2, expected 0 to 2"),
    "above the diagonal": ({"columns": changed(COLUMNS, 0, 2)}, r"block_col_indices\[0\] has 2 in row 0"),
    "huge": ({"columns": changed(COLUMNS, 1, 2**31 - 1)}, r"block_col_indices\[0\] has 2147483647 in row 1"),
    "twice": ({"columns": changed(COLUMNS, 4, 0)}, r"block_col_indices\[0\] has 0 behind 0 in row 2"),
    "not ascending": (
        {"columns": np.array([[0, 1, 0, 0, 1, 2]], np.int32)},
        r"block_col_indices\[0\] has 0 behind 1 in row 1: blocks must ascend",
    ),
    "first": ({"rows": changed(ROWS, 0, 1)}, r"block_row_indices\[0\] begins with 1, expected 0"),
    "descending": ({"rows": changed(ROWS, 2, 0)}, r"block_row_indices\[0\] has 0 at 2, behind 1"),
    "too many": ({"rows": changed(ROWS, 3, 7)}, r"block_row_indices\[0\] ends with 7, .* has 6 columns"),
    "an empty row": ({"rows": changed(ROWS, 1, 0)}, r"block_row_indices\[0\] names no block in row 0"),
    "layouts": (
        {"rows": np.repeat(ROWS, 3, axis=0)},
        r"block_row_indices has shape \[3, 4\], expected a divisor of 4 heads",
    ),
    "no layout": ({"rows": np.zeros((0, 4), np.int32)}, r"block_row_indices has shape \[0, 4\]"),
    "no block": ({"rows": np.zeros((1, 1), np.int32)}, r"block_row_indices has shape \[1, 1\]"),
    "other layouts": ({"columns": np.repeat(COLUMNS, 2, axis=0)}, "block_col_indices has 2 layouts, .* 1"),
    "rank": ({"columns": COLUMNS[0]}, r"block_col_indices is int32 \[6\], expected int32 with 2 axes"),
    "type": ({"rows": ROWS.astype(np.int64)}, r"block_row_indices is int64 \[1, 4\]"),
    "too large": ({"rows": np.zeros((1, 20001), np.int32)}, "1 layouts of 20000 blocks, whose table exceeds 256 MiB"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_layouts(name: str) -> None:
    arrays, words = DAMAGED[name]
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(reason_of(sparse_model(SparseShape(BLOCKS), **arrays)))


def test_the_layouts_that_are_damaged_are_fine_otherwise() -> None:
    (candidate,) = candidates_of(sparse_model(SparseShape(BLOCKS), rows=ROWS, columns=COLUMNS))
    assert candidate.site is not None
    assert candidate.site.mask == "k <= q"


def test_layouts_that_are_run_time_data() -> None:
    model = sparse_model(SparseShape(BLOCKS))
    stored = next(t for t in model.graph.initializer if t.name == "columns")
    model.graph.initializer.remove(stored)
    model.graph.input.append(helper.make_tensor_value_info("columns", onnx.TensorProto.INT32, [1, 6]))
    assert reason_of(model) == "its layouts are run-time data: block_col_indices 'columns' is no constant"


def with_input(index: int, name: str) -> onnx.ModelProto:
    model = sparse_model(replace(STRIDED, rotary=16))
    inputs = model.graph.node[0].input
    while len(inputs) <= index:
        inputs.append("")
    inputs[index] = name
    return model


NODES = {
    "block size": (sparse_model(replace(STRIDED, block=48)), "sparse_block_size is 48, expected 16, 32, 64 or 128"),
    "attribute": (
        sparse_model(replace(STRIDED, other={"causal": 1})),
        "attribute 'causal', whose meaning is not known",
    ),
    "type": (sparse_model(replace(STRIDED, other={"do_rotary": 1.0})), "do_rotary is 1.0, expected an integer"),
    "flag": (
        sparse_model(replace(STRIDED, other={"rotary_interleaved": 2})),
        "rotary_interleaved is 2, expected 0 or 1",
    ),
    "scale": (sparse_model(replace(STRIDED, other={"scale": float("nan")})), "scale is nan"),
    "heads": (sparse_model(replace(STRIDED, H=5, G=2)), "5 query heads on 2 key heads"),
    "input": (with_input(11, "total"), "it has input 11, 'total', whose meaning is not known"),
    "no past": (with_input(3, ""), "it has no input past_key"),
    "no lengths": (with_input(8, ""), "it has no input key_total_sequence_lengths"),
    "half a pair": (with_input(10, ""), "it has input cos_cache and no sin_cache"),
    "key alone": (with_input(1, "query"), "it has input key and no value"),
}


@pytest.mark.parametrize("name", NODES)
def test_nodes_that_are_refused(name: str) -> None:
    model, words = NODES[name]
    assert words in reason_of(model)


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
