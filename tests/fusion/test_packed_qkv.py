# SPDX-License-Identifier: Apache-2.0
"""Attention that reads its heads inside of a wider tensor, and matmuls that are merged for its sake.

Over 500 lines: a list of cases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from chain_graphs import FLOAT, HALF, Builder
from fused import fuse_chains
from onnx import helper, numpy_helper

import stof
from stof.attention.function_body import OP, Variant, make_attention_function
from stof.fusion.decide.decision import ChainDecision
from stof.fusion.decide.estimated import EstimatedDecider
from stof.fusion.fusion_graph import FusionGraph
from stof.fusion.merge_matmuls import MergedMatmuls, merge_matmuls
from stof.fusion.packed_qkv import PackedHeads, read_packed_heads
from stof.fusion.policy import ChainPolicy
from stof.fusion.search.cost import MachineModel
from stof.fusion.translate import FusedChain
from stof.graph.index import DOMAIN
from stof.mask.expression import CAUSAL
from stof.mask.site import EmptyRows, Layout
from stof.options import Options
from stof.symbolic import Symbolic

K, H, D = 24, 4, 8
W = H * D  # of all heads


def attention(b: Builder, q: str, k: str, v: str, groups: int = H, layouts: str = "BSN") -> str:
    """A node as the optimizer writes it."""
    given = {"mask": "k <= q", "mask_id": 0, "scale": 0.3, "softcap": 0.0, "query_offset": 0, "empty_rows": "zero"}
    more = {"operands": "", "results": "", "num_heads": H, "kv_num_heads": groups, "layout": layouts}
    return str(b.add(OP, q, k, v, domain=DOMAIN, **given, **more))


def finish(b: Builder, *outputs: str, grouped: bool = False, layout: Layout = Layout.BSN) -> onnx.ModelProto:
    """The model with the function of its calls."""
    model = b.model(*outputs)
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    variant = Variant(CAUSAL, (layout,) * 4, grouped, EmptyRows.ZERO, 0, 0.0, (), b.dtype)
    model.functions.append(make_attention_function([variant], b.opset))
    return model


def split(b: Builder, tensor: str, *widths: int, axis: int = -1) -> list[str]:
    found: list[str] = b.add("Split", tensor, b.ints(*widths), outputs=len(widths), axis=axis)
    return found


def ops(model: onnx.ModelProto) -> Counter[str]:
    return Counter(n.op_type for n in model.graph.node)


def numbers(model: onnx.ModelProto) -> list[list[int]]:
    calls = [n for n in model.graph.node if n.op_type == OP]
    return [list(a.ints) for n in calls for a in n.attribute if a.name == "packed"]


def in_order(model: onnx.ModelProto) -> None:
    """Every node stands behind those that write what it reads."""
    known = {i.name for i in model.graph.input} | {t.name for t in model.graph.initializer}
    for node in model.graph.node:
        assert known.issuperset(node.input)
        known.update(node.output)


def run(model: onnx.ModelProto, library: bool, **sizes: int) -> list[np.ndarray]:
    in_order(model)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if library:
        stof.register(options)
    rng = np.random.default_rng(0)
    feeds = {}
    for info in model.graph.input:
        kind = info.type.tensor_type
        shape = [d.dim_value or sizes.get(d.dim_param, 5) for d in kind.shape.dim]
        feeds[info.name] = rng.standard_normal(shape).astype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
        if kind.elem_type == onnx.TensorProto.BOOL:
            feeds[info.name] = np.array(sizes.get(info.name, 1) != 0)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found: list[np.ndarray] = session.run(None, feeds)
    return found


def same(one: onnx.ModelProto, other: onnx.ModelProto, tolerance: float = 1e-5, **sizes: int) -> None:
    """Both models compute the same, with the library and by their functions alone."""
    wanted = run(one, True, **sizes)
    for library in (True, False):
        for found, own in zip(run(other, library, **sizes), wanted, strict=True):
            assert found.dtype == own.dtype
            np.testing.assert_allclose(
                found.astype(np.float64), own.astype(np.float64), rtol=tolerance, atol=tolerance, equal_nan=False
            )


def matmul(b: Builder, x: str, width: int, seed: int = 0) -> str:
    return str(b.add("MatMul", x, factor(b, K, width, seed)))


def factor(b: Builder, rows: int, width: int, seed: int) -> str:
    """A weight that keeps what it multiplies about as large as it is."""
    array = np.random.default_rng([rows, width, seed]).standard_normal((rows, width)) * rows**-0.5
    return b.array(array.astype(helper.tensor_dtype_to_np_dtype(b.dtype)))


@pytest.mark.parametrize("groups", [H, 2])
@pytest.mark.parametrize("opset", [13, 20])
@pytest.mark.parametrize("axis", [-1, 2])
def test_a_split_goes(groups: int, opset: int, axis: int) -> None:
    b = Builder(FLOAT, opset)
    own = groups * D
    wide = matmul(b, b.input("x", ["B", "S", K]), W + 2 * own)
    q, k, v = split(b, wide, W, own, own, axis=axis)
    model = finish(b, attention(b, q, k, v, groups), grouped=groups != H)
    found = read_packed_heads(model)
    total = H + 2 * groups
    assert ops(found) == {"MatMul": 1, OP: 1}
    assert numbers(found) == [[0, total, H, total, H + groups, total]]
    assert [list(f.attribute).count("packed") for f in found.functions] == [1]
    assert not numbers(model)  # which stays as it was
    same(model, found)
    before, after = (Symbolic(m).shape(m.graph.output[0].name) for m in (model, found))
    assert before is not None
    assert after is not None
    assert after[2].constant == before[2].constant == W
    assert read_packed_heads(found) is found


def test_widths_as_a_node_go_with_it() -> None:
    b = Builder(FLOAT)
    widths = b.add("Constant", value_ints=[W, W, W])
    parts = b.add("Split", matmul(b, b.input("x", ["B", "S", K]), 3 * W), widths, outputs=3, axis=-1)
    model = finish(b, attention(b, *parts))
    found = read_packed_heads(model)
    assert ops(found) == {"MatMul": 1, OP: 1}
    same(model, found)


def test_equal_parts_by_number() -> None:
    b = Builder(FLOAT)
    parts = b.add("Split", matmul(b, b.input("x", ["B", "S", K]), 3 * W), outputs=3, axis=-1, num_outputs=3)
    found = read_packed_heads(finish(b, attention(b, *parts)))
    assert ops(found) == {"MatMul": 1, OP: 1}
    same(finish(b, b.nodes[-1].output[0]), found)


def test_a_split_of_a_split() -> None:
    b = Builder(FLOAT)
    wide = matmul(b, b.input("x", ["B", "S", K]), 5 * W)
    _, both, key = split(b, wide, W, 3 * W, W)
    value, query, _ = split(b, both, W, W, W)
    model = finish(b, attention(b, query, key, value))
    found = read_packed_heads(model)
    assert ops(found) == {"MatMul": 1, OP: 1}
    assert numbers(found) == [[2 * H, 5 * H, 4 * H, 5 * H, H, 5 * H]]
    same(model, found)


@pytest.mark.parametrize("reader", ["node", "output", "branch"])
def test_what_others_read_stays(reader: str) -> None:
    b = Builder(FLOAT)
    wide = matmul(b, b.input("x", ["B", "S", K]), 3 * W)
    q, k, v = split(b, wide, W, W, W)
    y = attention(b, q, k, v)
    outputs = [y]
    if reader == "node":
        outputs.append(b.add("Gelu", k))
    elif reader == "output":
        outputs.append(k)
    else:
        chosen = b.input("chosen", [], onnx.TensorProto.BOOL)
        result = onnx.ValueInfoProto(name="branch")
        then = helper.make_graph([helper.make_node("Neg", [k], ["branch"])], "then", [], [result])
        outputs.append(b.add("If", chosen, then_branch=then, else_branch=then))
    model = finish(b, *outputs)
    found = read_packed_heads(model)
    assert ops(found)["Split"] == 1
    assert numbers(found) == [[0, 12, 4, 12, 8, 12]]
    same(model, found)


def test_other_calls_get_the_attribute_too() -> None:
    """One of them in a branch, where it reads what a Split of the graph wrote."""
    b = Builder(FLOAT)
    x = b.input("x", ["B", "S", K])
    q, k, v = split(b, matmul(b, x, 3 * W), W, W, W)
    y = attention(b, q, k, v)
    plain = attention(b, *(matmul(b, x, W, seed) for seed in (1, 2, 3)))
    inner = Builder(FLOAT, count=1000)
    result = attention(inner, q, k, plain)
    branch = helper.make_graph(inner.nodes, "branch", [], [onnx.ValueInfoProto(name=result)])
    z = b.add("If", b.input("chosen", [], onnx.TensorProto.BOOL), then_branch=branch, else_branch=branch)
    model = finish(b, y, plain, z)
    found = read_packed_heads(model)
    assert numbers(found) == [[0, 12, 4, 12, 8, 12], [0, 4, 0, 4, 0, 4]]
    then = next(a.g for n in found.graph.node for a in n.attribute if a.name == "then_branch")
    assert [list(a.ints) for n in then.node for a in n.attribute if a.name == "packed"] == [[0, 4, 0, 4, 0, 4]]
    assert ops(found)["Split"] == 1  # for the branch
    same(model, found)


@pytest.mark.parametrize("why", ["no whole heads", "another axis", "another domain", "no width", "no number of heads"])
def test_what_stays(why: str) -> None:
    b = Builder(FLOAT)
    x = b.input("x", ["B", "S", K])
    if why == "no whole heads":
        _, q, k, v = split(b, matmul(b, x, 3 * W + 4), 4, W, W, W)
    elif why == "another axis":
        q, k, v = split(b, matmul(b, b.input("y", ["B", 15, K]), W), 5, 5, 5, axis=1)
    elif why == "no width":
        shape = b.add(
            "Concat", b.add("Shape", x, start=0, end=2), b.input("width", [1], onnx.TensorProto.INT64), axis=0
        )
        q, k, v = split(b, b.add("Reshape", matmul(b, x, 3 * W), shape), W, W, W)
        b.nodes[-1].input.pop()  # equal parts, of whatever there is
        b.nodes[-1].attribute.append(helper.make_attribute("num_outputs", 3))
    else:
        q, k, v = split(b, matmul(b, x, 3 * W), W, W, W)
    if why == "another domain":
        b.nodes[-1].domain = "elsewhere"
    y = attention(b, q, k, v)
    if why == "no number of heads":
        kept = [a for a in b.nodes[-1].attribute if a.name != "num_heads"]
        del b.nodes[-1].attribute[:]
        b.nodes[-1].attribute.extend(kept)
    model = finish(b, y)
    assert read_packed_heads(model) is model


# ---- heads that views brought into other layouts ----


def heads_of(b: Builder, wide: str, first: int, count: int, layout: str, how: str) -> str:
    """``count`` heads from ``first`` on of a tensor [B, S, N], in a layout with an axis of heads."""
    if how == "split":
        heads = b.add("Reshape", wide, b.ints(0, 0, -1, D))
        parts = split(b, heads, first, count, TOTAL - first - count, axis=2)
        found = parts[1]
    elif how == "slice":
        heads = b.add("Reshape", wide, b.ints(0, 0, -1, D))
        found = b.add("Slice", heads, b.ints(first), b.ints(first + count), b.ints(2))
    else:  # query, key and value beside each other, as [B, S, parts, H, D]
        parts = b.add("Reshape", wide, b.ints(0, 0, -1, count, D))
        part = b.add("Slice", parts, b.ints(first // count), b.ints(first // count + 1), b.ints(2))
        found = b.add("Squeeze", part, b.ints(2))
    return str(b.add("Transpose", found, perm=[0, 2, 1, 3])) if layout == "BHSD" else str(found)


TOTAL = 4 * H


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
@pytest.mark.parametrize("how", ["split", "slice", "parts"])
@pytest.mark.parametrize("opset", [13, 20])
@pytest.mark.parametrize("batch", ["B", 1, 2])
def test_heads_in_other_layouts(layout: str, how: str, opset: int, batch: int | str) -> None:
    b = Builder(FLOAT, opset)
    wide = matmul(b, b.input("x", [batch, "S", K]), TOTAL * D)
    q, k, v = (heads_of(b, wide, first, H, layout, how) for first in (H, 0, 2 * H))
    model = finish(b, attention(b, q, k, v, layouts=layout), layout=Layout(layout))
    found = read_packed_heads(model)
    assert ops(found) == {"MatMul": 1, OP: 1}
    assert numbers(found) == [[H, TOTAL, 0, TOTAL, 2 * H, TOTAL]]
    assert not numbers(model)  # which stays as it was
    (layouts,) = [a.s.decode() for n in found.graph.node for a in n.attribute if a.name == "layout"]
    assert layouts == f"BSN BSN BSN {layout}"
    same(model, found)
    assert read_packed_heads(found) is found


def test_an_input_that_is_computed_keeps_its_layout() -> None:
    b = Builder(HALF)
    wide = matmul(b, b.input("x", ["B", "S", K]), TOTAL * D)
    q, k, v = (heads_of(b, wide, first, H, "BSHD", "slice") for first in (0, H, 2 * H))
    model = finish(b, attention(b, b.add("Sin", q), b.add("Cos", k), v, layouts="BSHD"), layout=Layout.BSHD)
    found = read_packed_heads(model)
    assert numbers(found) == [[0, H, 0, H, 2 * H, TOTAL]]
    (layouts,) = [a.s.decode() for n in found.graph.node for a in n.attribute if a.name == "layout"]
    assert layouts == "BSHD BSHD BSN BSHD"
    assert ops(found)["Slice"] == 2
    same(model, found, 2e-2)


def test_one_head() -> None:
    b = Builder(FLOAT)
    wide = matmul(b, b.input("x", ["B", "S", K]), TOTAL * D)
    key, value = (heads_of(b, wide, first, 1, "BHSD", "slice") for first in (3, 5))
    query = heads_of(b, wide, 8, H, "BHSD", "slice")
    model = finish(b, attention(b, query, key, value, 1, "BHSD"), grouped=True, layout=Layout.BHSD)
    found = read_packed_heads(model)
    assert numbers(found) == [[8, TOTAL, 3, TOTAL, 5, TOTAL]]
    same(model, found)


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_one_head_of_all(layout: str, size: int) -> None:
    """Dimensions of 1 have no place of their own in an index."""
    b = Builder(FLOAT)
    wide = matmul(b, b.input("x", ["B", "S", K]), 3 * size)
    heads = []
    for part in split(b, wide, size, size, size):
        head = b.add("Reshape", part, b.ints(0, 0, 1, size))
        heads.append(b.add("Transpose", head, perm=[0, 2, 1, 3]) if layout == "BHSD" else head)
    attention(b, *heads, groups=1, layouts=layout)
    for attribute in b.nodes[-1].attribute:
        if attribute.name == "num_heads":
            attribute.i = 1
    model = finish(b, b.nodes[-1].output[0], layout=Layout(layout))
    found = read_packed_heads(model)
    assert numbers(found) == [[0, 3, 1, 3, 2, 3]]
    same(model, found)


@pytest.mark.parametrize("to", ["rows", "batches"])
def test_rows_that_may_be_repeated_stay(to: str) -> None:
    """Sizes of different names need not be the same in a run: one may be 1."""
    b = Builder(FLOAT)
    x = b.input("x", ["B", "S", K])
    other = b.input("other", ["C", "T", W])
    parts = split(b, matmul(b, x, 3 * W), W, W, W)
    start = ("batches", "rows").index(to)
    size = b.add("Shape", other, start=start, end=start + 1)
    shape = [size, b.ints(1), b.ints(1)] if to == "batches" else [b.ints(1), size, b.ints(1)]
    parts = [b.add("Expand", p, b.add("Concat", *shape, axis=0)) for p in parts]
    model = finish(b, attention(b, *parts))
    assert read_packed_heads(model) is model


def test_only_so_many_steps_are_looked_at() -> None:
    b = Builder(FLOAT)
    wide = matmul(b, b.input("x", ["B", "S", K]), TOTAL * D)
    parts = [heads_of(b, wide, i * H, H, "BSHD", "slice") for i in range(3)]
    for _ in range(20):
        parts = [b.add("Transpose", p, perm=[0, 2, 1, 3]) for p in parts]
    model = finish(b, attention(b, *parts, layouts="BSHD"), layout=Layout.BSHD)
    assert read_packed_heads(model) is model
    same(model, read_packed_heads(model))


@pytest.mark.parametrize("how", ["raises", "wrong"])
@pytest.mark.parametrize("target", ["cuda", "cpu"])
def test_attention_stays_where_its_heads_cannot_be_read_elsewhere(
    how: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of this step costs the step."""

    def broken(model: onnx.ModelProto, symbolic: Symbolic | None = None) -> onnx.ModelProto:
        if how == "raises":
            raise RuntimeError("a fault")
        found = read_packed_heads(model, symbolic)
        assert found is not model
        for call in found.graph.node:
            for attribute in call.attribute:
                if attribute.name == "packed":
                    attribute.ints[4] = 0  # queries for values
        return found

    monkeypatch.setattr("stof.fusion.describe.working_copies.read_packed_heads", broken)
    onnx.save(_dense_model(), tmp_path / "model.onnx")
    settings: dict[str, Any] = {"capability": 90} if target == "cuda" else {"chains": "on"}
    report = stof.optimize(tmp_path / "model.onnx", options=Options(target=target, **settings))
    assert sum(s.replaced for s in report.sites) == 1
    assert report.verification is not None
    assert not report.verification.failures
    found = onnx.load(tmp_path / "model.stof.onnx")
    assert not numbers(found)
    for own, wanted in zip(run(found, True), run(_dense_model(), True), strict=True):
        np.testing.assert_allclose(own.astype(np.float32), wanted.astype(np.float32), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("target", ["cuda", "cpu"])
@pytest.mark.parametrize("to", ["rows", "batches"])
def test_queries_that_a_run_repeats(to: str, target: str, tmp_path: Path) -> None:
    """An Expand between sizes of different names does nothing in most runs, and all in one where its own is 1."""
    b = Builder(FLOAT)
    x, other = b.input("x", ["B", "S", K]), b.input("other", ["C", "T", W])
    query, _ = split(b, matmul(b, x, 2 * W), W, W)
    start = ("batches", "rows").index(to)
    size = b.add("Shape", other, start=start, end=start + 1)
    shape = [size, b.ints(1), b.ints(1)] if to == "batches" else [b.ints(1), size, b.ints(1)]
    query = b.add("Expand", query, b.add("Concat", *shape, axis=0))
    length = b.input("z", ["C" if to == "batches" else "B", "T", K])
    key, value = split(b, matmul(b, length, 2 * W, 1), W, W)
    far = b.add("Greater", b.add("Abs", _distance(b, other, length)), b.array(np.array(9)))
    own = b.add("Where", far, b.number(-np.inf), b.number(0.0))
    model = b.model(_dense(b, query, key, value, own if to == "rows" else b.number(0.0)))
    for info in model.graph.output:
        info.CopyFrom(helper.make_tensor_value_info(info.name, FLOAT, ["D", "R", W]))
    onnx.save(model, tmp_path / "model.onnx")
    settings: dict[str, Any] = {"capability": 90} if target == "cuda" else {"chains": "on"}
    report = stof.optimize(tmp_path / "model.onnx", options=Options(target=target, **settings))
    assert sum(s.replaced for s in report.sites) == 1
    found = onnx.load(tmp_path / "model.stof.onnx")
    sizes = {"B": 1, "S": 5, "C": 2, "T": 7} if to == "batches" else {"B": 2, "S": 1, "C": 2, "T": 7}
    for library in (True, False):
        for own_y, wanted in zip(run(found, library, **sizes), run(model, library, **sizes), strict=True):
            assert wanted.shape[("batches", "rows").index(to)] == (2, 7)[start]
            np.testing.assert_allclose(own_y, wanted, rtol=1e-5, atol=1e-5)


def _dense_model() -> onnx.ModelProto:
    """Attention over a Split of one matmul."""
    b = Builder(HALF)
    x = b.input("x", ["B", "S", W])
    far = b.add("Greater", b.add("Abs", _distance(b, x, x)), b.array(np.array(9)))
    mask = b.add("Where", far, b.number(-np.inf), b.number(0.0))
    own = split(b, b.add("MatMul", x, factor(b, W, 3 * W, 1)), W, W, W)
    model = b.model(b.add("MatMul", _dense(b, *own, mask), factor(b, W, W, 2)))
    for info in model.graph.output:
        info.CopyFrom(helper.make_tensor_value_info(info.name, HALF, ["B", "S", W]))
    return model


@pytest.mark.parametrize("target", ["cuda", "cpu"])
def test_heads_are_read_in_place_for_both_targets(target: str, tmp_path: Path) -> None:
    onnx.save(_dense_model(), tmp_path / "model.onnx")
    settings: dict[str, Any] = {"capability": 90} if target == "cuda" else {"chains": "on"}
    stof.optimize(tmp_path / "model.onnx", options=Options(target=target, **settings))
    found = onnx.load(tmp_path / "model.stof.onnx")
    assert numbers(found) == [[0, 12, 4, 12, 8, 12]]
    assert "Split" not in ops(found)
    same(_dense_model(), found, 2e-2)


@pytest.mark.parametrize("where", ["graph", "branch"])
def test_calls_share_their_layouts(where: str) -> None:
    """What one call cannot read elsewhere no call does."""
    b = Builder(FLOAT)
    x = b.input("x", ["B", "S", K])
    wide = matmul(b, x, TOTAL * D)
    q, k, v = (heads_of(b, wide, first, H, "BSHD", "slice") for first in (0, H, 2 * H))
    outputs = [attention(b, q, k, v, layouts="BSHD")]
    inner = Builder(FLOAT, count=1000) if where == "branch" else b
    outputs.append(attention(inner, q, inner.add("Cos", k), v, layouts="BSHD"))
    if where == "branch":
        result = onnx.ValueInfoProto(name=outputs.pop())
        branch = helper.make_graph(inner.nodes, "branch", [], [result])
        outputs.append(
            b.add("If", b.input("chosen", [], onnx.TensorProto.BOOL), then_branch=branch, else_branch=branch)
        )
    model = finish(b, *outputs, layout=Layout.BSHD)
    found = read_packed_heads(model)
    if where == "branch":
        assert found is model
        return
    assert numbers(found) == [[0, TOTAL, 0, H, 2 * H, TOTAL]] * 2
    assert ops(found)["Slice"] == 1
    same(model, found)


@pytest.mark.parametrize("why", ["rows", "batches", "channels", "order", "rank", "no copy", "concat", "batch of one"])
def test_heads_that_lie_otherwise_stay(why: str) -> None:
    b = Builder(FLOAT)
    x = b.input("x", ["B", 6, K]) if why != "batch of one" else b.input("x", [2, 6, K])
    wide = matmul(b, x, TOTAL * D)
    heads = b.add("Reshape", wide, b.ints(0, 0, -1, D))
    if why == "rank":  # the matmul wrote the rows of all batches in one dimension
        rows = b.add("Reshape", b.input("y", ["B", 6, K]), b.ints(-1, K))
        heads = b.add("Reshape", matmul(b, rows, TOTAL * D), b.ints(-1, 6, TOTAL, D))
    parts = [b.add("Slice", heads, b.ints(i * H), b.ints(i * H + H), b.ints(2)) for i in range(3)]
    if why == "rows":
        parts = [b.add("Slice", p, b.ints(1), b.ints(6), b.ints(1)) for p in parts]
    elif why in ("batches", "batch of one"):
        parts = [b.add("Slice", p, b.ints(0), b.ints(1), b.ints(0)) for p in parts]
    elif why == "channels":  # every second one
        both = b.add("Reshape", wide, b.ints(0, 0, -1, 2 * D))
        parts = [
            b.add("Slice", both, b.ints(i * H, i), b.ints(i * H + H, 2 * D), b.ints(2, 3), b.ints(1, 2)) for i in (0, 1)
        ]
        parts.append(parts[0])
    elif why == "order":  # a head's channels beside each other's
        apart = b.add("Transpose", b.add("Reshape", wide, b.ints(0, 0, D, -1)), perm=[0, 1, 3, 2])
        parts = [b.add("Slice", apart, b.ints(i * H), b.ints(i * H + H), b.ints(2)) for i in range(3)]
    elif why == "no copy":
        parts = [b.add("Reshape", matmul(b, x, W, i), b.ints(0, 0, -1, D)) for i in range(3)]
    elif why == "concat":
        parts = [b.add("Concat", b.add("Slice", p, b.ints(0), b.ints(2), b.ints(2)), p, axis=2) for p in parts]
        parts = [b.add("Slice", p, b.ints(0), b.ints(H), b.ints(2)) for p in parts]
    model = finish(b, attention(b, *parts, layouts="BSHD"), layout=Layout.BSHD)
    assert read_packed_heads(model) is model
    assert all(np.isfinite(y).all() for y in run(model, True))


def test_heads_of_a_part() -> None:
    assert PackedHeads(0, 4, 4).within(64, 32, 128) == PackedHeads(8, 4, 16)
    assert PackedHeads(2, 4, 8).within(64, 64, 192) == PackedHeads(10, 4, 24)
    assert PackedHeads(0, 4, 4).within(4, 32, 128) is None
    assert PackedHeads(0, 4, 4).within(0, 32, 100) is None
    assert PackedHeads(0, 4, 4).within(0, 30, 120) is None
    assert PackedHeads(0, 4, 4).within(0, 0, 0) is None
    assert PackedHeads(0, 1, 1).within(0, 1, 1 << 17) is None


# ---- keys and values of several layers ----


def layers(b: Builder, count: int = 3, groups: int = H) -> tuple[str, list[str]]:
    """Queries of their own, keys and values of one tensor, as a decoder's layers have them; and that tensor."""
    x = b.input("x", ["B", "T", K])
    found = []
    y = b.input("y", ["B", "S", W])
    for layer in range(count):
        query = b.add("MatMul", y, factor(b, W, W, layer + 50))
        key, value = (matmul(b, x, groups * D, 2 * layer + i) for i in range(2))
        y = b.add("Add", y, attention(b, query, key, value, groups))
        found.append(y)
    return x, found


def always(*_: object) -> bool:
    return True


@pytest.mark.parametrize("groups", [H, 2])
def test_keys_and_values_of_all_layers_are_one_matmul(groups: int) -> None:
    b = Builder(HALF)
    _, results = layers(b, 3, groups)
    model = finish(b, results[-1], grouped=groups != H)
    asked: list[tuple[int, bool]] = []

    def merges(_: onnx.ModelProto, __: Symbolic, matmuls: Sequence[onnx.NodeProto], apart: bool) -> bool:
        asked.append((len(matmuls), apart))
        return True

    merged = merge_matmuls(model, Symbolic(model), merges, reads_packed_heads=True)
    together, splits = merged.model, merged.splits
    assert asked == [(6, False)]
    assert not splits
    assert ops(together) == {"MatMul": 4, "Concat": 1, "Constant": 1, "Split": 1, OP: 3, "Add": 3}
    found = read_packed_heads(together)
    assert ops(found) == {"MatMul": 4, "Concat": 1, OP: 3, "Add": 3}
    total = 6 * groups
    wanted = [[0, H, 2 * i * groups, total, (2 * i + 1) * groups, total] for i in range(3)]
    assert numbers(found) == wanted
    same(model, together, 2e-2, T=7)
    same(model, found, 2e-2, T=7)
    assert merge_matmuls(model, Symbolic(model), always, reads_packed_heads=False) == MergedMatmuls(model)
    assert merge_matmuls(model, Symbolic(model), lambda *_: False, reads_packed_heads=True) == MergedMatmuls(model)


def test_the_merged_matmul_takes_the_first_ones_position() -> None:
    """Keys and values by matmuls far apart in the graph, of a tensor that is computed itself."""
    b = Builder(HALF)
    x = b.add("Gelu", b.input("x", ["B", "S", K]))
    first = matmul(b, x, W, 1)
    y = b.add("Relu", b.input("y", ["B", "S", W]))
    second = matmul(b, x, W, 2)
    y = attention(b, y, first, second)
    model = finish(b, attention(b, y, matmul(b, x, W, 3), matmul(b, x, W, 4)))
    together = merge_matmuls(model, Symbolic(model), always, reads_packed_heads=True).model
    found = read_packed_heads(together)
    assert [n.op_type for n in found.graph.node] == ["Gelu", "Concat", "MatMul", "Relu", OP, OP]
    same(model, found, 2e-2)


@pytest.mark.parametrize("reader", ["node", "output", "query too", "layout", "branch", "width"])
def test_matmuls_that_others_read_stay_alone(reader: str) -> None:
    """The rest of them is one nevertheless."""
    b = Builder(HALF)
    x, results = layers(b, 2)
    width = 12 if reader == "width" else W
    other = matmul(b, x, width, 90)
    if reader == "node":
        results.append(b.add("Relu", other))
    elif reader == "output":
        results.append(other)
    elif reader == "query too":
        results.append(attention(b, other, results[0], b.add("Relu", other)))
    elif reader == "layout":
        shaped = b.add("Reshape", other, b.ints(0, 0, H, D))
        results.append(b.add("Relu", shaped))
    elif reader == "branch":
        result = onnx.ValueInfoProto(name="branch")
        then = helper.make_graph([helper.make_node("Neg", [other], ["branch"])], "then", [], [result])
        chosen = b.input("chosen", [], onnx.TensorProto.BOOL)
        results.append(b.add("If", chosen, then_branch=then, else_branch=then))
    else:
        results.append(b.add("Relu", other))
    model = finish(b, *results[1:])
    merged = merge_matmuls(model, Symbolic(model), always, reads_packed_heads=True)
    together, splits = merged.model, merged.splits
    assert not splits
    found = read_packed_heads(together)
    assert "Split" not in ops(found)
    assert ops(found)["MatMul"] == 4  # two queries, one of four, and the other
    same(model, found, 2e-2)


def test_a_group_that_has_no_common_head_size_stays() -> None:
    b = Builder(HALF)
    x = b.input("x", ["B", "S", K])
    y = b.input("y", ["B", "S", W])
    z = attention(b, y, matmul(b, x, W, 1), matmul(b, x, W // 2, 2))
    v = matmul(b, x, W + H, 4)
    model = finish(b, z, attention(b, y, matmul(b, x, W, 3), v))
    assert merge_matmuls(model, Symbolic(model), always, reads_packed_heads=True) == MergedMatmuls(model)


def _decider(shapes: dict[str, tuple[int, int]]) -> EstimatedDecider:
    return EstimatedDecider(Options(target="cuda", shapes=shapes, products=False), MachineModel.cuda(2.6e12, 620e12))


@pytest.mark.parametrize(("size", "gains"), [((1, 128), True), ((8, 512), True), ((64, 65536), False)])
def test_many_matmuls_gain_by_what_they_take(size: tuple[int, int], gains: bool) -> None:
    """No chain splits them, which three matmuls at (8, 512) would not be worth."""
    b = Builder(HALF)
    x = b.input("x", ["B", "S", 768])
    own = [b.add("MatMul", x, factor(b, 768, 768, i)) for i in range(4)]
    y = attention(b, *own[:3])
    model = finish(b, attention(b, y, own[3], own[0]))
    matmuls = [n for n in model.graph.node if n.op_type == "MatMul"]
    decider = _decider({n: (v, v) for n, v in zip("BS", size, strict=True)})
    assert decider.should_merge(model, Symbolic(model), matmuls, False) == gains


def test_without_a_chain_for_three_the_others_are_one() -> None:
    b = Builder(HALF)
    _, results = layers(b, 2)
    y = b.add("Gelu", b.add("Mul", results[-1], b.weight(W)))
    three = [b.add("Add", b.add("MatMul", y, factor(b, W, W, i)), b.weight(W, seed=i + 7)) for i in range(3)]
    model = finish(b, *three)

    def decider(graph: FusionGraph, chain: FusedChain, key: object, left: int) -> ChainDecision:
        """Every region but those that split merged matmuls."""
        own = graph.with_leading_matmuls(chain.region.node_indices)
        if any(graph.nodes[p].op_type in ("Split", "MatMul") for p in own):
            return ChainDecision((), "no")
        return ChainDecision(((0, len(own)),))

    made = fuse_chains(model, decider, ChainPolicy(merge_decider=always, reads_packed_heads=True))
    assert made.replaced
    assert ops(made.model)["Split"] == 0
    assert ops(made.model)["MatMul"] == 2 + 1 + 3
    assert numbers(made.model)
    same(model, made.model, 3e-2)


def test_what_attention_reads_needs_no_chain_to_be_one() -> None:
    b = Builder(HALF)
    _, results = layers(b, 3)
    model = finish(b, results[-1])
    made = fuse_chains(
        model, lambda *_: ChainDecision((), "no"), ChainPolicy(merge_decider=always, reads_packed_heads=True)
    )
    assert not made.replaced
    assert ops(made.model)["MatMul"] == 4
    assert len(numbers(made.model)) == 3
    same(model, made.model, 2e-2, T=7)


# ---- all of it ----


def _dense(b: Builder, q: str, k: str, v: str, mask: str) -> str:
    """Attention as an exporter without a fused operator writes it."""
    heads = [b.add("Transpose", b.add("Reshape", t, b.ints(0, 0, H, D)), perm=[0, 2, 1, 3]) for t in (q, k, v)]
    scores = b.add("MatMul", heads[0], b.add("Transpose", heads[1], perm=[0, 1, 3, 2]))
    weights = b.add("Softmax", b.add("Add", scores, mask), axis=-1)
    rows = b.add("Transpose", b.add("MatMul", weights, heads[2]), perm=[0, 2, 1, 3])
    return str(b.add("Reshape", rows, b.ints(0, 0, W)))


def _norm(b: Builder, x: str, y: str) -> tuple[str, str]:
    """The sum of both, and that less its mean and by its deviation, times a weight."""
    total = b.add("Add", x, y)
    wide = b.add("Cast", total, to=FLOAT)
    square = b.add("ReduceMean", b.add("Mul", wide, wide), b.ints(-1), keepdims=1)
    epsilon, one = (b.array(np.array(value, np.float32)) for value in (1e-6, 1.0))
    rate = b.add("Div", one, b.add("Sqrt", b.add("Add", square, epsilon)))
    narrow = b.add("Cast", b.add("Mul", wide, rate), to=HALF)
    return str(total), str(b.add("Mul", b.weight(W), narrow))


def _t5(depth: int) -> onnx.ModelProto:
    """An encoder and a decoder as T5's: no biases, norms between, every layer of the decoder reads the encoder's result."""
    b = Builder(HALF)
    x, y = (b.input(name, ["B", length, W]) for name, length in (("x", "T"), ("y", "S")))
    masks = []
    for queries in (x, y):
        far = b.add("Greater", b.add("Abs", _distance(b, queries, x)), b.array(np.array(9)))
        masks.append(b.add("Where", far, b.number(-np.inf), b.number(0.0)))
    normed = _norm(b, x, x)[1]
    for layer in range(depth):
        own = [b.add("MatMul", normed, factor(b, W, W, 10 * layer + i)) for i in range(3)]
        x, normed = _norm(b, x, b.add("MatMul", _dense(b, *own, masks[0]), factor(b, W, W, 10 * layer + 3)))
    read = _norm(b, y, y)[1]
    for layer in range(depth):
        seed = 500 + 10 * layer
        own = [b.add("MatMul", t, factor(b, W, W, seed + i)) for i, t in enumerate((read, normed, normed))]
        y, read = _norm(b, y, b.add("MatMul", _dense(b, *own, masks[1]), factor(b, W, W, seed + 3)))
    return b.model(read)


def _distance(b: Builder, queries: str, keys: str) -> str:
    """[S, T]"""
    zero, one = (b.array(np.array(i)) for i in (0, 1))
    ranges = []
    for tensor in (queries, keys):
        length = b.add("Squeeze", b.add("Shape", tensor, start=1, end=2))
        ranges.append(b.add("Range", zero, length, one))
    return str(b.add("Sub", ranges[1], b.add("Unsqueeze", ranges[0], b.ints(1))))


@pytest.mark.parametrize("target", ["cuda", "cpu"])
def test_a_model_like_t5(target: str, tmp_path: Path) -> None:
    model = _t5(3)
    for info in model.graph.output:
        info.CopyFrom(helper.make_tensor_value_info(info.name, HALF, ["B", "S", W]))
    onnx.save(model, tmp_path / "model.onnx")
    shapes = {"B": (1, 1), "S": (128, 128), "T": (128, 128)}
    settings: dict[str, Any] = {"capability": 90} if target == "cuda" else {"chains": "on"}
    report = stof.optimize(tmp_path / "model.onnx", options=Options(target=target, shapes=shapes, **settings))
    assert sum(s.replaced for s in report.sites) == 6
    assert report.verification is not None
    assert not report.verification.failures
    assert len({c.site for c in report.verification.comparisons if c.site}) == 6
    found = onnx.load(tmp_path / "model.stof.onnx")
    assert bool(numbers(found)) == (target == "cuda")
    if target == "cuda":
        assert "Split" not in ops(found)
        # Of the encoder's layers each one for three, of the decoder's one for all keys and values; queries and outputs.
        matmuls = ops(found)["MatMul"] + ops(found)["StofGemm"]
        assert matmuls == 3 + 1 + 3 + 6
        assert sorted(n[3] for n in numbers(found)) == [12] * 3 + [24] * 3
    factors = [numpy_helper.to_array(t) for t in found.graph.initializer if list(t.dims) == [W, W]]
    assert len(factors) == 24
    for library in (True, False):
        for own, wanted in zip(
            run(found, library, S=128, T=128, B=1), run(model, library, S=128, T=128, B=1), strict=True
        ):
            np.testing.assert_allclose(own.astype(np.float32), wanted.astype(np.float32), rtol=2e-2, atol=2e-2)
