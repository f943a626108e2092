# SPDX-License-Identifier: Apache-2.0
"""Forms of attention and of masks whose tokens are unpadded: positions, biases, windows, heads, other inputs of masks."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from encoders import (
    BOOL,
    FLOAT,
    HEADS,
    WIDTH,
    Graph,
    attentions,
    check_same,
    check_unpadded,
    encoder,
    feeds_for,
    masks,
    rows_of,
    session,
    unpadded,
)
from onnxruntime.quantization import QuantType, quantize_dynamic

SIZE = WIDTH // HEADS


def finish(
    g: Graph, x: str, mask: str = "attention_mask", kinds: tuple[str, ...] = ("mean", "first", "last")
) -> onnx.ModelProto:
    for kind in kinds:
        g.output(g.pool(x, kind, mask), kind, rank=2)
    return g.model()


def columns_and_rows(g: Graph) -> tuple[str, str]:
    length = g.add("Gather", g.add("Shape", "input_ids"), g.constant(1))
    columns = g.add("Range", g.constant(0), length, g.constant(1))
    return str(columns), g.unsqueeze(columns, 1)


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("positions", ["range", "input", "cumsum"])
def test_rotary_embeddings_written_out(positions: str, opset: int) -> None:
    g = Graph(opset=opset)
    ids, mask = g.input("input_ids"), g.input("attention_mask")
    x = g.embed(ids, "", mask)
    if positions == "range":
        at = g.unsqueeze(columns_and_rows(g)[0], 0)
    elif positions == "input":
        at = g.input("position_ids")
    else:
        at = g.add("Sub", g.add("CumSum", mask, g.constant(1)), g.constant(1))
        at = g.add("Where", g.add("Equal", mask, g.constant(0)), g.constant(1), at)
    frequency = g.constant(1.0 / 10 ** np.linspace(0, 1, SIZE // 2), np.float32)
    angle = g.add("Mul", g.unsqueeze(g.add("Cast", at, to=FLOAT), 2), frequency)
    both = g.add("Concat", angle, angle, axis=-1)
    cos, sin = (g.unsqueeze(g.add(op, both), 1) for op in ("Cos", "Sin"))

    def turn(y: str) -> str:
        one = g.add("Slice", y, g.constant([0]), g.constant([SIZE // 2]), g.constant([3]))
        other = g.add("Slice", y, g.constant([SIZE // 2]), g.constant([2**63 - 1]), g.constant([3]))
        turned = g.add("Concat", g.add("Neg", other), one, axis=-1)
        return str(g.add("Add", g.add("Mul", y, cos), g.add("Mul", turned, sin)))

    q, k, v = (g.heads(g.dense(x)) for _ in range(3))
    y = g.merge_heads(g.attend(turn(q), turn(k), v, g.bias(mask)))
    model = finish(g, g.feed_forward(g.norm(str(g.add("Add", x, g.dense(y))))))
    result, _ = unpadded(model)
    check_unpadded(result, 1)
    check_same(model, result)


@pytest.mark.parametrize("form", ["slopes", "table", "input", "input of each text", "window", "window and first token"])
def test_what_depends_on_positions(form: str) -> None:
    g = Graph()
    ids, mask = g.input("input_ids"), g.input("attention_mask")
    x = g.embed(ids)
    columns, rows = columns_and_rows(g)
    distance = g.add("Abs", g.add("Sub", columns, rows))
    bias, apply, second = g.bias(mask), "add", ""
    shape: tuple[int, ...] = ()
    if form == "slopes":
        second = g.add("Mul", g.add("Cast", distance, to=FLOAT), g.constant([[[-0.3]], [[-0.7]]], np.float32))
    elif form == "table":
        rows_of_table = g.add("Gather", g.weight(12, HEADS), g.add("Min", distance, g.constant(11)))
        second = g.unsqueeze(g.add("Transpose", rows_of_table, perm=[2, 0, 1]), 0)
    elif form == "input":
        second, shape = g.input("score_bias", FLOAT, (1, HEADS, "sequence", "sequence")), (1, HEADS, 7, 7)
    elif form == "input of each text":
        second, shape = g.input("score_bias", FLOAT, ("batch", HEADS, "sequence", "sequence")), (5, HEADS, 7, 7)
    else:
        near = g.add("LessOrEqual", distance, g.constant(1))
        if "first" in form:
            near = g.add("Or", near, g.add("Equal", columns, g.constant(0)))
        bias, apply = g.add("And", near, g.allowed(mask)), "where"
    model = finish(g, g.layer(x, str(bias), apply, str(second)))
    result, _ = unpadded(model)
    assert len(list(attentions(result))) == 1
    # A mask that is added to numbers that nobody knows is a bias as they are, which the operator reads by positions.
    if not shape:
        check_unpadded(result, 1)
    if shape:
        drawn = np.random.default_rng(2).uniform(-1, 1, shape).astype(np.float32)
        check_same(model, result, {k: m for k, m in masks().items() if m.shape == (5, 7)}, extra={"score_bias": drawn})
    else:
        check_same(model, result)


@pytest.mark.parametrize("heads", [1, 2])
def test_heads_that_share_keys(heads: int) -> None:
    """Keys and values of fewer heads, repeated for the queries of four."""
    g = Graph()
    ids, mask = g.input("input_ids"), g.input("attention_mask")
    x = g.embed(ids)
    q = g.add("Transpose", g.add("Reshape", g.dense(x), g.constant([0, 0, 4, 4])), perm=[0, 2, 1, 3])
    pair = []
    for _ in range(2):
        y = g.add("Reshape", g.dense(x, WIDTH, 4 * heads), g.constant([0, 0, heads, 4]))
        y = g.unsqueeze(g.add("Transpose", y, perm=[0, 2, 1, 3]), 2)
        sizes = g.add("Shape", ids)
        batch, length = (g.add("Gather", sizes, g.constant([i])) for i in (0, 1))
        wide = g.add("Concat", batch, g.constant([heads, 4 // heads]), length, g.constant([4]), axis=0)
        four = g.add("Concat", batch, g.constant([4]), length, g.constant([4]), axis=0)
        pair.append(g.add("Reshape", g.add("Expand", y, wide), four))
    y = g.merge_heads(g.attend(str(q), *pair, g.bias(mask)))
    model = finish(g, g.feed_forward(g.norm(str(g.add("Add", x, y)))))
    result, _ = unpadded(model)
    check_unpadded(result, 1)
    check_same(model, result)


def test_queries_keys_and_values_of_one_product() -> None:
    g = Graph()
    ids, mask = g.input("input_ids"), g.input("attention_mask")
    x = g.embed(ids)
    packed = g.dense(x, WIDTH, 3 * WIDTH)
    packed = g.add("Reshape", packed, g.constant([0, 0, 3, HEADS, SIZE]))
    packed = g.add("Transpose", packed, perm=[2, 0, 3, 1, 4])
    q, k, v = (g.add("Gather", packed, g.constant(i), axis=0) for i in range(3))
    y = g.merge_heads(g.attend(q, k, v, g.bias(mask)))
    model = finish(g, g.feed_forward(g.norm(str(g.add("Add", x, y)))))
    result, _ = unpadded(model)
    check_unpadded(result, 1)
    check_same(model, result)


@pytest.mark.parametrize("dims", [("batch", 1, 1, "sequence"), (1, 1, 1, "sequence"), (1, "sequence"), ("sequence",)])
def test_masks_of_other_shapes(dims: tuple[int | str, ...]) -> None:
    g = Graph()
    ids, mask = g.input("input_ids"), g.input("attention_mask", BOOL, dims)
    x = g.layer(g.embed(ids), mask, "where")
    g.output(g.pool(x, "first", mask), "first", rank=2)
    g.output(g.pool(x, "last", mask), "last", rank=2)
    model = g.model()
    result, _ = unpadded(model)
    for label, real in masks().items():
        given = real if dims[0] == "batch" else real[:1]
        shape = (*((len(given), 1, 1) if len(dims) == 4 else (1,) * (len(dims) - 1)), real.shape[1])
        check_same(model, result, {label: real}, extra={"attention_mask": given.reshape(shape).astype(bool)})


@pytest.mark.parametrize("kind", ["last", "mean", "last real"])
def test_a_decoder_as_an_embedder(kind: str) -> None:
    """Causal and padded on the left."""
    g = Graph()
    ids, mask = g.input("input_ids"), g.input("attention_mask")
    at = g.add("Clip", g.add("Sub", g.add("CumSum", mask, g.constant(1)), g.constant(1)), g.constant(0))
    x = g.embed(ids, str(at))
    columns, rows = columns_and_rows(g)
    causal = g.add("Unsqueeze", g.add("LessOrEqual", columns, rows), g.constant([0, 1]))
    both = g.add("And", causal, g.allowed(mask))
    for _ in range(2):
        x = g.layer(x, str(both), "where")
    model = finish(g, x, kinds=(kind,))
    result, _ = unpadded(model)
    check_unpadded(result, 2)
    check_same(model, result)


@pytest.mark.parametrize("form", ["3-D", "4-D"])
def test_the_standard_attention_operator(form: str) -> None:
    g = Graph(opset=23)
    ids, mask = g.input("input_ids"), g.input("attention_mask")
    x = g.embed(ids)
    q, k, v = (g.dense(x) for _ in range(3))
    columns, rows = columns_and_rows(g)
    allowed = g.add("And", g.allowed(mask), g.add("LessOrEqual", columns, g.add("Add", rows, g.constant(3))))
    if form == "3-D":
        y = g.add("Attention", q, k, v, allowed, q_num_heads=HEADS, kv_num_heads=HEADS)
    else:
        y = g.merge_heads(g.add("Attention", *(g.heads(z) for z in (q, k, v)), allowed))
    model = finish(g, g.feed_forward(g.norm(str(g.add("Add", x, y)))))
    # Rows without a key are NaN in the original, or not, by the version of the runtime: they are left out.
    batches = {k: m for k, m in masks().items() if m.any(1).all()}
    oracle = session(model, False).run(None, feeds_for(model, masks()["right"]))
    assert not any(np.isnan(y).any() for y in oracle)
    result, _ = unpadded(model)
    check_unpadded(result, 1)
    check_same(model, result, batches)


def test_dynamic_int8(tmp_path) -> None:
    """Scales are those of the rows that are computed: exact where there is no padding, near elsewhere."""
    source, path = tmp_path / "model.onnx", tmp_path / "int8.onnx"
    onnx.save(encoder("mean", "first"), source)
    quantize_dynamic(source, path, weight_type=QuantType.QUInt8)
    model = onnx.load(path)
    assert any(n.op_type == "DynamicQuantizeLinear" for n in model.graph.node)
    result, report = unpadded(model)
    assert rows_of(report)[0].rest == ""
    check_unpadded(result, 2)
    full = {k: masks()[k] for k in ("full", "all empty")}
    check_same(model, result, full, rtol=1e-3)
    for mask in masks().values():
        feeds = feeds_for(model, mask)
        for one, other in zip(session(model, False).run(None, feeds), session(result).run(None, feeds), strict=True):
            assert np.abs(one - other).max() <= 0.1 * np.abs(one).max()
