# SPDX-License-Identifier: Apache-2.0
"""Unpadding at a fixed capacity: the same results where the tokens fit, an error where they do not, and no shape that
depends on padding.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from encoders import (
    FLOAT,
    INT64,
    POOLINGS,
    WIDTH,
    Graph,
    attentions,
    check_same,
    check_unpadded,
    count_tokens,
    encoder,
    feeds_for,
    masks,
    rows_of,
    session,
    unpadded,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, numpy_helper
from onnxruntime.quantization import quantize_dynamic
from test_unpadding_fuzz import batches, chains

_EXAMPLES = 300 if os.environ.get("STOF_TEST_ALL") else 25


def at_capacity(model: onnx.ModelProto, capacity: int, unpad: str = "auto") -> onnx.ModelProto:
    return unpadded(model, unpad, unpad_capacity=capacity)[0]


def check_refused(result: onnx.ModelProto, feeds: Mapping[str, np.ndarray], count: int, capacity: int) -> None:
    """Fails unless the model says that there are too many tokens, with the library and without."""
    words = rf"cumulative_.*expected \d+ \(the entry before it\) to {capacity} .*; a model .* needs a larger --unpad-capacity"
    with pytest.raises(Exception, match=words):
        session(result).run(None, dict(feeds))
    words = rf"_has_fewer_rows_than_tokens' .*Input shape:\{{{capacity},[\d,]*\}}, requested shape:\{{{count},"
    with pytest.raises(Exception, match=words):
        session(result, with_library=False).run(None, dict(feeds))


# ---- results ----
@pytest.mark.parametrize("kind", POOLINGS)
def test_pooling_with_room_for_more(kind: str) -> None:
    model = encoder(kind)
    result, report = unpadded(model, unpad_capacity=64)
    (row,) = rows_of(report)
    assert (row.replaced, row.capacity, row.gains) == (True, 64, ())
    assert "room for 64 tokens in every run" in "\n".join(
        str(report).splitlines() + report.sections["unpadding"].lines()
    )
    check_unpadded(result, 2)
    check_same(model, result)


@pytest.mark.parametrize("label", masks())
@pytest.mark.parametrize("poolings", [("mean", "max"), ("first", "last real"), ("all", "mean")])
def test_as_many_tokens_as_there_is_room(label: str, poolings: tuple[str, ...]) -> None:
    unpad = "on" if "all" in poolings else "auto"
    zero = ("all",) if unpad == "on" else ()
    model, mask = encoder(*poolings, layers=1), masks()[label]
    feeds = feeds_for(model, mask)
    count = count_tokens(unpadded(model, unpad)[0], feeds)
    for more in (0, 1, 9):
        check_same(model, at_capacity(model, count + more, unpad), {label: mask}, zero_rows=zero)
    if count > 1:
        check_refused(at_capacity(model, count - 1, unpad), feeds, count, count - 1)
        check_refused(at_capacity(model, 1, unpad), feeds, count, 1)


@pytest.mark.parametrize(("batch", "length"), [(5, 7), ("batch", 7), (5, "sequence"), (1, 7)])
def test_sizes_that_are_known(batch: int | str, length: int | str) -> None:
    model = encoder("mean", "first", layers=1, batch=batch, length=length)
    result, report = unpadded(model, unpad_capacity=50)
    (row,) = rows_of(report)
    # There is no need of more room than the padded batch has.
    assert row.capacity == (batch * length if isinstance(batch, int) and isinstance(length, int) else 50)
    b, s = batch if isinstance(batch, int) else 5, length if isinstance(length, int) else 7
    check_same(model, result, {k: m for k, m in masks(b, s).items() if m.shape == (b, s)})


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.DOUBLE])
def test_tokens_of_other_types(dtype: int) -> None:
    """What is unpacked between layers; attention is in fp32."""
    g = Graph()
    ids, mask = g.input("input_ids"), g.input("attention_mask")
    x = g.layer(g.embed(ids), g.bias(mask))
    x = g.add("Cast", g.add("Cast", x, to=dtype), to=FLOAT)
    g.output(g.pool(g.layer(x, g.bias(mask)), "mean", mask), "mean", rank=2)
    g.output(g.add("Cast", x, to=dtype), "all", dtype, rank=3)
    exact, result = unpadded(g.model(), "on")[0], at_capacity(g.model(), 40, "on")
    for label, mask in masks().items():
        feeds = feeds_for(g.model(), mask)
        for one, other in zip(session(exact).run(None, feeds), session(result).run(None, feeds), strict=True):
            np.testing.assert_allclose(other, one, rtol=2e-3, atol=2e-4, err_msg=label)


def test_two_masks_have_the_same_capacity() -> None:
    g = Graph()
    for name in ("first", "second"):
        ids, mask = (g.input(f"{name}_{n}", INT64, (f"{name}_batch", f"{name}_length")) for n in ("ids", "mask"))
        g.output(g.pool(g.layer(g.embed(ids), g.bias(mask)), "mean", mask), f"{name}_mean", rank=2)
    result, report = unpadded(g.model(), unpad_capacity=35)
    assert [r.capacity for r in rows_of(report)] == [35, 35]
    extra = {"second_mask": masks(2, 4)["left"], "second_ids": np.arange(8).reshape(2, 4)}
    check_same(g.model(), result, extra=extra)


def test_attention_over_the_real_tokens_of_another_text() -> None:
    g = Graph()
    ids, mask = g.input("input_ids"), g.input("attention_mask")
    other = g.input("other_ids", INT64, ("batch", "other"))
    bias, x = g.bias(mask), g.embed(ids)
    for _ in range(2):
        x = g.layer(x, bias)
    y = g.feed_forward(g.self_attention(g.embed(other, ""), bias, keys=x))
    g.output(y, "decoded", rank=3)
    result = at_capacity(g.model(), 35)
    roles = [r for _, found in attentions(result) for r in found if r.startswith("cumulative")]
    assert roles == ["cumulative_sequence_length"] * 2 + ["cumulative_key_length"]
    extra = {"other_ids": np.arange(15).reshape(5, 3)}
    same_batch = {k: m for k, m in masks().items() if len(m) == 5}
    check_same(g.model(), result, same_batch, extra=extra)
    check_refused(at_capacity(g.model(), 20), feeds_for(g.model(), masks()["full"]) | extra, 35, 20)


def test_scales_of_all_rows_are_those_of_tokens(tmp_path: Any) -> None:
    """Dynamic quantization takes scales from all rows: rows behind the last token may not move them."""
    path, int8 = tmp_path / "model.onnx", tmp_path / "int8.onnx"
    onnx.save(encoder("mean", "max", layers=2), path)
    quantize_dynamic(path, int8)
    model = onnx.load(int8)
    assert sum(n.op_type == "DynamicQuantizeLinear" for n in model.graph.node) == 8
    exact, result = unpadded(model)[0], at_capacity(model, 90)
    for label, mask in masks().items():
        feeds = feeds_for(model, mask)
        for one, other in zip(session(exact).run(None, feeds), session(result).run(None, feeds), strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6, err_msg=label)


def test_rows_before_attention_that_have_no_place() -> None:
    """A device gives no error: what does not depend on attention is NaN where there was no room, and right elsewhere."""
    g = Graph()
    ids, mask = g.input("input_ids"), g.input("attention_mask")
    x = g.embed(ids)
    g.output(x, "embedded", rank=3)
    g.output(g.layer(x, g.bias(mask)), "all", rank=3)
    model = at_capacity(g.model(), 12, "on")
    assert len(rows_of(unpadded(g.model(), "on", unpad_capacity=12)[1])[0].zero_outputs) == 2
    feeds = feeds_for(g.model(), masks()["full"])
    wanted = session(g.model(), False).run(["embedded"], feeds)[0].reshape(35, WIDTH)
    alone = onnx.utils.Extractor(model).extract_model(list(feeds), ["embedded"])
    found = session(alone).run(None, feeds)[0].reshape(35, WIDTH)
    np.testing.assert_allclose(found[:12], wanted[:12], rtol=1e-5, atol=1e-6)
    assert np.isnan(found[12:]).all()


# ---- shapes ----
# Whose shapes depend on numbers.
_BY_NUMBERS = {"NonZero", "Compress", "Unique", "NonMaxSuppression", "StringSplit", "Loop", "If", "Scan"}
# Operators that ONNX Runtime's CUDA provider has, by the inputs that it reads on the host.
_ELEMENTWISE = ("Add", "And", "Cast", "Equal", "Greater", "Less", "Min", "Mul", "Not", "Or", "Sub", "Where")
_MOVING = ("Concat", "Flatten", "Gather", "GatherElements", "GatherND", "ScatterElements", "Transpose")
_WITH_SIZES = ("CumSum", "Expand", "ReduceMax", "ReduceMin", "ReduceSum", "Reshape", "Squeeze", "Unsqueeze")
_ON_DEVICE: dict[str, frozenset[int]] = {
    **dict.fromkeys((*_ELEMENTWISE, *_MOVING), frozenset()),
    **dict.fromkeys(_WITH_SIZES, frozenset({1})),
    "ConstantOfShape": frozenset({0}),
    "Range": frozenset({0, 1, 2}),
    "Slice": frozenset({1, 2, 3, 4}),
}


def new_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [n for n in model.graph.node if n.name.startswith("stof_unpad")]


@pytest.mark.parametrize("poolings", [("mean", "first", "last", "middle"), ("last real", "highest id"), ("all",)])
@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("batch", ["batch", 4])
def test_shapes_do_not_depend_on_padding(poolings: tuple[str, ...], opset: int, batch: int | str) -> None:
    model = encoder(*poolings, opset=opset, positions="cumsum", batch=batch, types=True)
    result, report = unpadded(model, "on", unpad_capacity=24)
    assert not {n.op_type for n in result.graph.node} & _BY_NUMBERS
    inferred = onnx.shape_inference.infer_shapes(result, data_prop=True, strict_mode=True)
    dims = {v.name: v.type.tensor_type.shape.dim for v in inferred.graph.value_info}
    rows = 0
    for node in inferred.graph.node:
        if node.op_type in ("MatMul", "LayerNormalization", "Sigmoid", "StofAttention"):
            sizes = [d.dim_value for d in dims[node.output[0]]]
            assert sizes[:2] == [1, 24], node.name
            assert all(sizes), node.name
            rows += 1
    assert rows >= 16
    assert rows_of(report)[0].capacity == 24


@pytest.mark.parametrize(
    "poolings", [("mean", "first", "last", "middle"), ("last real", "highest id, elements"), ("all",)]
)
def test_nothing_is_copied_between_host_and_device(poolings: tuple[str, ...]) -> None:
    """ONNX Runtime leaves to the host what it computes from shapes; a node on the device may read that as a size alone.

    A copy cannot be captured in a CUDA graph. A graph's small inputs count as tensors of either.
    """
    result = at_capacity(encoder(*poolings, positions="input"), 24, "on")
    on_host: set[str] = set()
    constant = {n.output[0] for n in result.graph.node if n.op_type == "Constant"}
    constant |= {i.name for i in result.graph.initializer}
    checked = 0
    for node in result.graph.node:
        if node.op_type in ("Constant", "Shape"):
            on_host |= set(node.output) if node.op_type == "Shape" else set()
            continue
        reads = _ON_DEVICE.get(node.op_type, frozenset())
        if constant.issuperset(node.input):  # folded
            constant |= set(node.output)
            continue
        others = [n for j, n in enumerate(node.input) if n not in constant and j not in reads]
        is_host = bool(others) and all(n in on_host for n in others)
        is_host = is_host and not any(n in on_host for j, n in enumerate(node.input) if j in reads)
        if is_host:
            on_host |= set(node.output)
        elif node in new_nodes(result):
            assert node.op_type in _ON_DEVICE, node.op_type
            copied = [n for j, n in enumerate(node.input) if j not in reads and n in on_host]
            assert not copied, f"{node.op_type} {node.name} reads {copied}, computed on the host"
            to_host = [n for j, n in enumerate(node.input) if j in reads and n not in on_host | constant]
            assert not to_host, f"{node.op_type} {node.name} reads {to_host} on the host, computed on the device"
            checked += 1
    assert checked > 40


# ---- random graphs ----
@given(st.data())
@settings(max_examples=_EXAMPLES, print_blob=True)
def test_random_chains_at_a_capacity(data: st.DataObject) -> None:
    model, _ = data.draw(chains())
    dims = model.graph.input[0].type.tensor_type.shape.dim
    batch = dims[0].dim_value or data.draw(st.integers(1, 4))
    length = dims[1].dim_value or data.draw(st.integers(1, 6))
    capacity = data.draw(st.integers(1, batch * length + 3))
    exact, report = unpadded(model)
    result = at_capacity(model, capacity)
    found = {f"mask {i}": data.draw(batches(batch, length)) for i in range(2)}
    if not any(r.replaced for r in rows_of(report)):
        check_same(model, result, found, rtol=2e-3)
        return
    for label, mask in found.items():
        feeds = feeds_for(model, mask)
        if (count := count_tokens(exact, feeds)) <= capacity:
            check_same(model, result, {label: mask}, rtol=2e-3)
        else:
            check_refused(result, feeds, count, capacity)


def test_constants_of_a_large_capacity_are_small() -> None:
    model = encoder("mean", layers=1)
    small, large = (at_capacity(model, n).ByteSize() for n in (64, 1 << 22))
    assert large < small + 100
    assert all(numpy_helper.to_array(i).size < 1 << 16 for i in at_capacity(model, 1 << 22).graph.initializer)


def test_chains_at_a_capacity() -> None:
    model = encoder("mean", "first")
    result, report = unpadded(model, unpad_capacity=40, chains="on")
    assert any(n.op_type == "StofChain" for n in result.graph.node)
    assert rows_of(report)[0].replaced
    check_same(model, result)
