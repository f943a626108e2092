# SPDX-License-Identifier: Apache-2.0
"""Graphs in which something beside the usual layers reads, mixes or names tokens.

More than 500 lines: a graph for each way to do so.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from encoders import (
    BOOL,
    FLOAT,
    HEADS,
    INT64,
    LONGEST,
    WIDTH,
    WORDS,
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
from onnx import TensorProto, helper, numpy_helper

from stof.graph.index import opset_of
from stof.symbolic import Symbolic
from stof.unpadding.emit import emit_regions
from stof.unpadding.regions import find_regions


class Text(Graph):
    """An encoder's inputs, and what layers read."""

    def start(self, positions: str = "table") -> str:
        self.ids, self.mask = self.input("input_ids"), self.input("attention_mask")
        x = self.embed(self.ids, positions, self.mask)
        self.mask_bias = self.bias(self.mask)
        return x

    def layers(self, x: str, count: int = 1) -> str:
        for _ in range(count):
            x = self.layer(x, self.mask_bias)
        return x

    def end(self, x: str, *kinds: str) -> onnx.ModelProto:
        for kind in kinds or ("mean", "first"):
            self.output(self.pool(x, kind, self.mask), kind, rank=2)
        return self.model()


Between = Callable[[Text, str], str]


def with_node_between(between: Between, **sizes: int | str) -> onnx.ModelProto:
    """Two layers, and something between them."""
    g = Text(**sizes)
    x = g.layers(g.start())
    return g.end(g.layers(between(g, x)))


def _sizes(g: Text, *order: int) -> str:
    return str(g.add("Gather", g.add("Shape", g.ids), g.constant(list(order))))


def _other_order(g: Text, x: str) -> str:
    """Rows of all tokens, taken as [S, B, N] although they lie as [B, S, N]."""
    flat = g.add("Reshape", x, g.constant([-1, WIDTH]))
    turned = g.add("Reshape", flat, g.add("Concat", _sizes(g, 1, 0), g.constant([WIDTH]), axis=0))
    mixed = g.dense(turned)
    back = g.add("Reshape", mixed, g.constant([-1, WIDTH]))
    return str(g.add("Reshape", back, g.add("Concat", _sizes(g, 0, 1), g.constant([WIDTH]), axis=0)))


def _other_order_and_transpose(g: Text, x: str) -> str:
    """As before, and turned back to [B, S, N]: other tokens are at each place now."""
    flat = g.add("Reshape", x, g.constant([-1, WIDTH]))
    turned = g.add("Reshape", flat, g.add("Concat", _sizes(g, 1, 0), g.constant([WIDTH]), axis=0))
    return str(g.add("Transpose", turned, perm=[1, 0, 2]))


def _other_order_at_once(g: Text, x: str) -> str:
    turned = g.add("Reshape", x, g.add("Concat", _sizes(g, 1, 0), g.constant([WIDTH]), axis=0))
    return str(g.add("Transpose", turned, perm=[1, 0, 2]))


def _flat(g: Text, x: str) -> str:
    flat = g.dense(g.add("Reshape", x, g.constant([-1, WIDTH])))
    return str(g.add("Reshape", flat, g.add("Concat", _sizes(g, 0, 1), g.constant([WIDTH]), axis=0)))


def _flat_by_its_own_shape(g: Text, x: str) -> str:
    flat = g.dense(g.add("Reshape", x, g.constant([-1, WIDTH])))
    return str(g.add("Reshape", flat, g.add("Shape", x)))


def _position_first(g: Text, x: str) -> str:
    turned = g.dense(g.add("Transpose", x, perm=[1, 0, 2]))
    return str(g.add("Transpose", g.add("Relu", turned), perm=[1, 0, 2]))


def _other_order_that_is_read(g: Text, x: str) -> str:
    """Its first row of each position is not the first token of each text."""
    flat = g.add("Reshape", x, g.constant([-1, WIDTH]))
    turned = g.add("Reshape", flat, g.add("Concat", _sizes(g, 1, 0), g.constant([WIDTH]), axis=0))
    g.output(g.reduce("ReduceSum", g.add("Gather", turned, g.constant(0), axis=1), 0), "read", rank=1)
    return x


def _flat_rows_that_are_read(g: Text, x: str) -> str:
    flat = g.add("Reshape", x, g.constant([-1, WIDTH]))
    g.output(g.add("Gather", flat, g.constant([0, -1])), "read", rank=2)
    return x


def _mask_multiplies(g: Text, x: str) -> str:
    return str(g.add("Mul", x, g.unsqueeze(g.add("Cast", g.mask, to=FLOAT), 2)))


def _mean_over_texts(g: Text, x: str) -> str:
    return str(g.add("Sub", x, g.reduce("ReduceMean", x, 0, 1)))


def _softmax_over_positions(g: Text, x: str) -> str:
    return str(g.add("Add", x, g.add("Softmax", x, axis=1)))


def _sum_so_far(g: Text, x: str) -> str:
    return g.norm(str(g.add("CumSum", x, g.constant(1))))


def _shifted(g: Text, x: str) -> str:
    """Each token with the one before it."""
    before = g.add("Slice", x, g.constant([0]), g.constant([-1]), g.constant([1]))
    first = g.add("Slice", x, g.constant([0]), g.constant([1]), g.constant([1]))
    return g.norm(str(g.add("Add", x, g.add("Concat", first, before, axis=1))))


def _convolution(g: Text, x: str) -> str:
    y = g.add("Conv", g.add("Transpose", x, perm=[0, 2, 1]), g.weight(WIDTH, WIDTH, 3), pads=[1, 1])
    return g.norm(str(g.add("Add", x, g.add("Transpose", y, perm=[0, 2, 1]))))


def _short_convolution(g: Text, x: str) -> str:
    y = g.add("Conv", g.add("Transpose", x, perm=[0, 2, 1]), g.weight(WIDTH, WIDTH, 1))
    return g.norm(str(g.add("Add", x, g.add("Transpose", y, perm=[0, 2, 1]))))


def _turned_texts(g: Text, x: str) -> str:
    return str(
        g.add("Slice", x, g.constant([-1]), g.constant([np.iinfo(np.int64).min]), g.constant([0]), g.constant([-1]))
    )


def _first_token_to_all(g: Text, x: str) -> str:
    first = g.add("Slice", x, g.constant([0]), g.constant([1]), g.constant([1]))
    return g.norm(str(g.add("Add", x, first)))


def _mean_to_all(g: Text, x: str) -> str:
    return g.norm(str(g.add("Add", x, g.unsqueeze(g.pool(x, "mean", g.mask), 1))))


def _maximum_of_everything(g: Text, x: str) -> str:
    return g.norm(str(g.add("Sub", x, g.add("ReduceMax", x, keepdims=1))))


def _products_of_tokens(g: Text, x: str) -> str:
    scores = g.add("MatMul", x, g.add("Transpose", x, perm=[0, 2, 1]))
    return g.norm(str(g.add("MatMul", scores, x)))


def _number_of_tokens(g: Text, x: str) -> str:
    """Divided by a size of the batch that is read from an unpadded tensor."""
    size = g.add("Cast", g.add("Shape", x, start=1, end=2), to=FLOAT)
    return str(g.add("Div", x, size))


def _number_of_elements(g: Text, x: str) -> str:
    return str(g.add("Div", x, g.add("Cast", g.add("Size", x), to=FLOAT)))


def _type_of_tokens(g: Text, x: str) -> str:
    return str(g.add("Add", x, g.add("CastLike", g.constant(1, np.int64), x)))


def _type_of_tokens_read_outside(g: Text, x: str) -> str:
    one = g.add("CastLike", g.constant([1, 2], np.int64), x)
    return str(g.add("Add", x, g.add("ReduceSum", one, keepdims=0)))


def _dropout_mask(g: Text, x: str) -> str:
    kept, which = g.add("Dropout", x, outputs=2)
    g.output(g.reduce("ReduceSum", g.add("Cast", which, to=FLOAT), 1), "kept", rank=2)
    return str(kept)


def _means_of_norm(g: Text, x: str) -> str:
    y, mean = g.add("LayerNormalization", x, g.weight(WIDTH), outputs=2)
    g.output(g.reduce("ReduceSum", mean, 1), "means", rank=2)
    return str(y)


def _zeros_at_other_places(g: Text, x: str) -> str:
    """A factor that is 0 where the mask is 0 once its rows are read in another order; then the largest of all positions."""
    mixed = g.add("Reshape", g.add("Cast", g.mask, to=FLOAT), _sizes(g, 1, 0))
    factor = g.unsqueeze(mixed, 2)
    product = g.add("Mul", g.add("Transpose", x, perm=[1, 0, 2]), factor)
    g.output(g.reduce("ReduceMax", product, 0), "largest", rank=2)
    return x


def _padding_without_ones(g: Text, x: str) -> str:
    """A condition that is not 0 at padding, and then is."""
    padding = g.add("Sub", g.constant(0), g.add("Sub", g.constant(1), g.mask))
    nothing = g.add("Cast", g.add("Relu", g.add("Cast", padding, to=FLOAT)), to=BOOL)
    g.output(
        g.reduce("ReduceMax", g.add("Where", g.unsqueeze(nothing, 2), g.constant(-9.0, np.float32), x), 1),
        "most",
        rank=2,
    )
    return x


def _sum_of_hidden_halves(g: Text, x: str) -> str:
    one, other = g.add("Split", x, outputs=2, axis=-1, num_outputs=2)
    y = g.add("Concat", g.add("Mul", one, g.add("Sigmoid", other)), one, axis=2)
    return str(g.add("Add", x, y))


def _read_by_if(g: Text, x: str) -> str:
    """A subgraph reads the tokens."""
    then = helper.make_graph(
        [helper.make_node("CumSum", [x, "if_axis"], ["then_y"])],
        "then",
        [],
        [helper.make_tensor_value_info("then_y", FLOAT, None)],
    )
    other = helper.make_graph(
        [helper.make_node("Identity", [x], ["else_y"])],
        "else",
        [],
        [helper.make_tensor_value_info("else_y", FLOAT, None)],
    )
    g.initializers.append(numpy_helper.from_array(np.array(1), "if_axis"))
    total = g.add("ReduceSum", g.mask, keepdims=0)
    chosen = g.add("If", g.add("Greater", total, g.constant(6)), then_branch=then, else_branch=other)
    return g.norm(str(chosen))


def _read_by_loop(g: Text, x: str) -> str:
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["go_on"]), helper.make_node("Add", ["sum", x], ["more"])],
        "body",
        [
            helper.make_tensor_value_info("i", INT64, []),
            helper.make_tensor_value_info("go", BOOL, []),
            helper.make_tensor_value_info("sum", FLOAT, None),
        ],
        [helper.make_tensor_value_info("go_on", BOOL, []), helper.make_tensor_value_info("more", FLOAT, None)],
    )
    return g.norm(str(g.add("Loop", g.constant(3), "", x, body=body)))


SAFE: list[Between] = [
    _flat,
    _flat_by_its_own_shape,
    _position_first,
    _mask_multiplies,
    _short_convolution,
    _number_of_tokens,
    _sum_of_hidden_halves,
    _type_of_tokens,
    _type_of_tokens_read_outside,
    _first_token_to_all,
    _mean_to_all,
    _zeros_at_other_places,
    _padding_without_ones,
]
MIXING: list[Between] = [
    _other_order,
    _other_order_and_transpose,
    _other_order_at_once,
    _other_order_that_is_read,
    _flat_rows_that_are_read,
    _mean_over_texts,
    _softmax_over_positions,
    _sum_so_far,
    _shifted,
    _convolution,
    _turned_texts,
    _maximum_of_everything,
    _products_of_tokens,
    _number_of_elements,
    _dropout_mask,
    _means_of_norm,
    _read_by_if,
    _read_by_loop,
]


@pytest.mark.parametrize("between", [*SAFE, *MIXING], ids=lambda f: f.__name__.strip("_"))
def test_between_two_layers(between: Between) -> None:
    model = with_node_between(between)
    result, _ = unpadded(model)
    check_same(model, result)


SQUARE = [
    f for f in (*SAFE, *MIXING) if any(word in f.__name__ for word in ("order", "flat", "first", "places", "products"))
]


@pytest.mark.parametrize("between", SQUARE, ids=lambda f: f.__name__.strip("_"))
def test_between_two_layers_of_a_square_batch(between: Between) -> None:
    """Both sizes are one number, so that they tell nothing apart."""
    model = with_node_between(between, batch=5, length=5)
    result, _ = unpadded(model)
    check_same(model, result, {k: m for k, m in masks(5, 5).items() if m.shape == (5, 5)})


@pytest.mark.parametrize(
    "between",
    [
        _flat,
        _position_first,
        _mask_multiplies,
        _short_convolution,
        _sum_of_hidden_halves,
    ],
    ids=lambda f: f.__name__.strip("_"),
)
def test_what_computes_each_token_by_itself_divides_nothing(between: Between) -> None:
    result, _ = unpadded(with_node_between(between))
    check_unpadded(result, 2)


@pytest.mark.parametrize(("batch", "length"), [(16, 16), (2, 8), (8, 2), (2, 2), (1, 16), (1, 2), (16, 2)])
def test_sizes_that_are_also_those_of_heads(batch: int, length: int) -> None:
    model = encoder("mean", "first", "last", layers=1, batch=batch, length=length)
    result, _ = unpadded(model)
    check_unpadded(result, 1)
    check_same(model, result, {k: m for k, m in masks(batch, length).items() if m.shape == (batch, length)})


# ---- tensors that broadcast ----
def _style(g: Text, *dims: int | str) -> str:
    return g.input("style", FLOAT, dims)


@pytest.mark.parametrize("form", ["[B, 1, N]", "[B, N]", "[B, 1]", "position first", "heads", "head width", "4-D"])
def test_a_vector_of_each_text(form: str) -> None:
    g = Text()
    x = g.start()
    rng = np.random.default_rng(1)
    b = "batch"
    if form == "[B, 1, N]":
        style, shape = g.add("Add", x, _style(g, b, 1, WIDTH)), (5, 1, WIDTH)
    elif form == "[B, N]":
        style, shape = g.add("Add", x, g.unsqueeze(_style(g, b, WIDTH), 1)), (5, WIDTH)
    elif form == "[B, 1]":
        style, shape = g.add("Mul", x, g.unsqueeze(_style(g, b, 1), 2)), (5, 1)
    elif form == "position first":
        turned = g.add("Add", g.add("Transpose", x, perm=[1, 0, 2]), _style(g, b, WIDTH))
        style, shape = g.add("Transpose", turned, perm=[1, 0, 2]), (5, WIDTH)
    elif form == "heads":
        y = g.add("Mul", g.heads(x), _style(g, b, HEADS, 1, 1))
        style, shape = g.merge_heads(y), (5, HEADS, 1, 1)
    elif form == "head width":
        y = g.add("Mul", g.heads(x), _style(g, b, 1, 1, WIDTH // HEADS))
        style, shape = g.merge_heads(y), (5, 1, 1, WIDTH // HEADS)
    else:
        y = g.add("Mul", g.unsqueeze(x, 1), _style(g, b, 1, 1, WIDTH))
        squeezed = g.add("Squeeze", y, g.constant([1]))
        style, shape = squeezed, (5, 1, 1, WIDTH)
    model = g.end(g.layers(str(style)))
    result, _ = unpadded(model)
    check_unpadded(result, 1)
    batches = {k: m for k, m in masks().items() if len(m) == 5}
    check_same(model, result, batches, extra={"style": rng.uniform(0.5, 1.5, shape).astype(np.float32)})


@pytest.mark.parametrize("form", ["[S, N]", "[1, S, 1]", "[S, 1, 1]", "[H, S, D]"])
def test_a_vector_of_each_position(form: str) -> None:
    g = Text()
    x, s = g.start(), "sequence"
    if form == "[S, N]":
        y, shape = g.add("Add", x, _style(g, s, WIDTH)), (7, WIDTH)
    elif form == "[1, S, 1]":
        y, shape = g.add("Add", x, _style(g, 1, s, 1)), (1, 7, 1)
    elif form == "[S, 1, 1]":
        turned = g.add("Add", g.add("Transpose", x, perm=[1, 0, 2]), _style(g, s, 1, 1))
        y, shape = g.add("Transpose", turned, perm=[1, 0, 2]), (7, 1, 1)
    else:
        heads = g.add("Add", g.heads(x), _style(g, HEADS, s, WIDTH // HEADS))
        y, shape = g.merge_heads(heads), (HEADS, 7, WIDTH // HEADS)
    model = g.end(g.layers(str(y)))
    result, _ = unpadded(model)
    check_unpadded(result, 1)
    style = np.random.default_rng(1).uniform(0.5, 1.5, shape).astype(np.float32)
    check_same(model, result, {k: m for k, m in masks().items() if m.shape[1] == 7}, extra={"style": style})


def test_one_text_that_becomes_several() -> None:
    """A batch of one text is added to five others of the model's own, and their mean taken."""
    g = Text(batch=1, length=7)
    x = g.layers(g.start())
    several = g.add("Mul", x, g.weight(5, 7, WIDTH))
    x = g.norm(g.reduce("ReduceMean", str(several), 0, 1))
    model = g.end(g.layers(x))
    result, _ = unpadded(model)
    check_same(model, result, {k: m[:1] for k, m in masks(1, 7).items() if m.shape == (1, 7)})


# ---- masks ----
def two_masks(order: str, other: tuple[int | str, int | str] = ("batch", "sequence")) -> onnx.ModelProto:
    """Attentions under two masks, one after the other or side by side."""
    g = Text()
    x = g.start()
    second = g.input("second_mask", INT64, other)
    bias = g.bias(second)
    if order == "side by side":
        one, two = g.layers(x), g.layer(x, bias)
        x = g.norm(str(g.add("Add", one, two)))
    elif order == "alternating":
        x = g.layers(g.layer(g.layers(x), bias))
    else:
        x = g.layer(g.layers(x), bias)
    g.output(g.pool(x, "mean", second), "second_mean", rank=2)
    return g.end(x)


@pytest.mark.parametrize("order", ["one after the other", "side by side", "alternating"])
@pytest.mark.parametrize("is_same", [False, True])
def test_two_masks(order: str, is_same: bool) -> None:
    model = two_masks(order)
    result, _ = unpadded(model)
    batches = masks()
    for label, mask in batches.items():
        other = mask if is_same else np.roll(mask, 1, 0) | mask if label != "holes" else np.roll(mask, 2, 1)
        check_same(model, result, {label: mask}, extra={"second_mask": other})


@pytest.mark.parametrize("order", ["one after the other", "side by side"])
def test_two_masks_with_an_output_of_tokens(order: str) -> None:
    model = two_masks(order)
    written = {n.output[0]: n for n in model.graph.node}
    hidden = written[written["first"].input[0]].input[0]
    model.graph.output.append(helper.make_tensor_value_info(hidden, FLOAT, None))
    result, report = unpadded(model, "on")
    zero = tuple(n for r in rows_of(report) for n in r.zero_outputs)
    for label, mask in masks().items():
        check_same(model, result, {label: mask}, zero_rows=zero, extra={"second_mask": mask})


def test_a_mask_under_two_names() -> None:
    g = Text()
    x = g.start()
    again = g.add("Identity", g.mask)
    g.mask_bias = g.bias(str(again))
    model = g.end(g.layers(x))
    result, _ = unpadded(model)
    check_same(model, result)


def test_a_mask_that_is_computed() -> None:
    """Tokens other than 0 are real."""
    g = Graph()
    ids = g.input("input_ids")
    mask = g.add("Not", g.add("Equal", ids, g.constant(0)))
    x = g.embed(ids)
    x = g.layer(x, g.allowed(mask, BOOL), "where")
    g.output(g.pool(x, "mean", mask, BOOL), "mean", rank=2)
    model = g.model()
    result, _ = unpadded(model)
    for label, real in masks().items():
        check_same(model, result, {label: real}, extra={"input_ids": feeds_for(model, real)["input_ids"] * real})


def test_a_mask_is_an_output_too() -> None:
    g = Text()
    x = g.layers(g.start())
    g.output(g.add("Add", g.mask, g.constant(1)), "mask_again", INT64, rank=2)
    model = g.end(x)
    result, _ = unpadded(model)
    check_unpadded(result, 1)
    check_same(model, result)


@pytest.mark.parametrize("dims", [("mask_batch", "sequence"), ("batch", "mask_length"), ("b2", "s2")])
def test_sizes_of_other_names(dims: tuple[str, str]) -> None:
    g = Text()
    g.ids, g.mask = g.input("input_ids"), g.input("attention_mask", INT64, dims)
    x = g.embed(g.ids)
    g.mask_bias = g.bias(g.mask)
    model = g.end(g.layers(x))
    result, _ = unpadded(model)
    check_same(model, result)
    one = {"one mask for all texts": np.ones((3, 7), np.int64)}
    if dims[0] != "batch":
        check_same(model, result, one, extra={"attention_mask": np.array([[0, 1, 1, 1, 1, 0, 0]])})


def test_every_input_has_sizes_of_its_own() -> None:
    g = Text()
    g.ids = g.input("input_ids", INT64, ("b0", "s0"))
    g.mask = g.input("attention_mask", INT64, ("b1", "s1"))
    types = g.input("token_type_ids", INT64, ("b2", "s2"))
    at = g.input("position_ids", INT64, ("b3", "s3"))
    x = g.embed(g.ids, at, g.mask, types)
    g.mask_bias = g.bias(g.mask)
    model = g.end(g.layers(x))
    result, _ = unpadded(model)
    check_same(model, result)
    batch = {"one row of positions": masks()["right"]}
    check_same(
        model, result, batch, extra={"position_ids": np.arange(7)[None], "token_type_ids": np.ones((1, 1), np.int64)}
    )


def test_a_causal_mask_and_a_window_beside_padding() -> None:
    g = Text()
    x = g.start()
    length = g.add("Gather", g.add("Shape", g.ids), g.constant(1))
    columns = g.add("Range", g.constant(0), length, g.constant(1))
    rows = g.unsqueeze(columns, 1)
    causal = g.add("LessOrEqual", columns, rows)
    near = g.add("Less", g.add("Sub", rows, columns), g.constant(3))
    both = g.add("And", g.add("And", causal, near), g.allowed(g.mask))
    x = g.layer(x, both, "where")
    model = g.end(x, "mean", "last", "first")
    result, _ = unpadded(model)
    check_unpadded(result, 1)
    check_same(model, result)


# ---- outputs and names ----
@pytest.mark.parametrize("unpad", ["auto", "on"])
def test_an_output_that_is_used_inside(unpad: str) -> None:
    g = Text()
    x = g.layers(g.start())
    g.mark_output(x, rank=3)
    model = g.end(g.layers(x), "mean", "max")
    result, report = unpadded(model, unpad)
    zero = tuple(n for r in rows_of(report) for n in r.zero_outputs)
    assert zero == ((x,) if unpad == "on" else ())
    check_same(model, result, zero_rows=zero)


def test_outputs_in_other_layouts() -> None:
    """Merged, transposed, integer and boolean outputs, zero at padding."""
    g = Text()
    x = g.layers(g.start())
    outputs = {
        g.add("Transpose", x, perm=[2, 1, 0]): (FLOAT, 3),
        g.add("Reshape", x, g.constant([-1, WIDTH])): (FLOAT, 2),
        g.add("Cast", x, to=INT64): (INT64, 3),
        g.add("Greater", x, g.constant(0.0, np.float32)): (BOOL, 3),
        g.add("Cast", x, to=TensorProto.FLOAT16): (TensorProto.FLOAT16, 3),
        g.add("Cast", x, to=TensorProto.DOUBLE): (TensorProto.DOUBLE, 3),
        g.heads(x): (FLOAT, 4),
    }
    names = [g.output(t, f"o{i}", d, r) for i, (t, (d, r)) in enumerate(outputs.items())]
    model = g.end(x)
    result, report = unpadded(model, "on")
    assert rows_of(report)[0].zero_outputs == tuple(names)
    mask = masks()["left"] & masks()["right"] | masks()["right"]
    feeds = feeds_for(model, mask)
    real = mask.astype(bool)
    for with_library in (True, False):
        pairs = zip(session(model, False).run(None, feeds), session(result, with_library).run(None, feeds), strict=True)
        found = dict(zip([o.name for o in model.graph.output], pairs, strict=True))
        for name, places in zip(names, ["nsb", "f", "bs", "bs", "bs", "bs", "bhs"], strict=True):
            one, other = found[name]
            if places == "f":
                one, other = (y.reshape(*mask.shape, WIDTH) for y in (one, other))
            elif places == "nsb":
                one, other = (y.transpose(2, 1, 0) for y in (one, other))
            elif places == "bhs":
                one, other = (y.transpose(0, 2, 1, 3) for y in (one, other))
            assert one.dtype == other.dtype
            np.testing.assert_allclose(
                other[real].astype(float),
                one[real].astype(float),
                rtol=1e-2,
                atol=1e-2 if one.dtype == np.float16 else 1e-4,
            )
            assert not other[~real].any()


def test_names_like_those_of_new_tensors() -> None:
    model = encoder("mean", "first", layers=1)
    renamed = {
        "c0": "stof_unpad0_1",
        "c1": "stof_unpad0_22",
        "input_ids": "stof_unpad0_",
        "t3": "_stof_unpad0_5",
        "mean": "stof_unpad0_7",
    }
    for node in model.graph.node:
        for names in (node.input, node.output):
            for j, name in enumerate(names):
                names[j] = renamed.get(name, name)
    for values in (model.graph.initializer, model.graph.input, model.graph.output):
        for value in values:
            value.name = renamed.get(value.name, value.name)
    onnx.checker.check_model(model)
    result, _ = unpadded(model)
    check_unpadded(result, 1)
    onnx.checker.check_model(result)
    check_same(model, result)


def test_shapes_of_tokens() -> None:
    """All that Shape can say of unpadded tensors, as outputs."""
    g = Text()
    x = g.layers(g.start())
    h = g.heads(x)
    flat = g.add("Reshape", x, g.constant([-1, WIDTH]))
    found = [
        g.add("Shape", x),
        g.add("Shape", x, start=-2),
        g.add("Shape", h, start=1, end=-1),
        g.add("Shape", flat),
        g.add("Shape", h, start=2),
        g.add("Shape", x, start=5),
        g.add("Shape", x, start=2, end=1),
    ]
    for i, shape in enumerate(found):
        g.output(shape, f"shape{i}", INT64, rank=1)
    model = g.end(x)
    result, _ = unpadded(model)
    check_same(model, result)


def test_value_info_of_padded_shapes() -> None:
    model = onnx.shape_inference.infer_shapes(encoder("mean", layers=1))
    assert model.graph.value_info
    result, _ = unpadded(model)
    check_unpadded(result, 1)
    onnx.shape_inference.infer_shapes(result, strict_mode=False, data_prop=True)
    check_same(model, result)


# ---- several texts ----
@pytest.mark.parametrize("memory_batch", ["batch", "memory_batch"])
@pytest.mark.parametrize("layers", [1, 2])
def test_an_encoder_and_a_decoder(memory_batch: str, layers: int) -> None:
    g = Text()
    memory = g.layers(g.start(), layers)
    ids = g.input("decoder_input_ids", INT64, (memory_batch, "target"))
    y = g.embed(ids)
    length = g.add("Gather", g.add("Shape", ids), g.constant(1))
    columns = g.add("Range", g.constant(0), length, g.constant(1))
    causal = g.add("LessOrEqual", columns, g.unsqueeze(columns, 1))
    for _ in range(layers):
        y = g.self_attention(y, str(causal), "where")
        y = g.self_attention(y, g.mask_bias, keys=memory)
        y = g.feed_forward(y)
    g.output(y, "logits", rank=3)
    model = g.model()
    result, report = unpadded(model)
    row = rows_of(report)[0]
    assert (row.replaced, row.attentions, row.keys_only) == (True, layers, layers)
    rng = np.random.default_rng(4)
    for label, mask in masks().items():
        check_same(model, result, {label: mask}, extra={"decoder_input_ids": rng.integers(0, WORDS, (len(mask), 4))})


def test_two_texts_that_attend_to_each_other() -> None:
    g = Text()
    x = g.start()
    ids, mask = g.input("other_ids", INT64, ("batch", "other")), g.input("other_mask", INT64, ("batch", "other"))
    y, bias = g.embed(ids), g.bias(mask)
    x, y = g.layers(x), g.layer(y, bias)
    one = g.self_attention(x, bias, keys=y)
    two = g.self_attention(y, g.mask_bias, keys=x)
    x, y = g.layers(one), g.layer(two, bias)
    g.output(g.pool(x, "mean", g.mask), "one", rank=2)
    g.output(g.pool(y, "mean", mask), "two", rank=2)
    model = g.model()
    result, _ = unpadded(model)
    rng = np.random.default_rng(4)
    for label, real in masks().items():
        other = (rng.random((len(real), 4)) < 0.6).astype(np.int64)
        extra = {"other_ids": rng.integers(0, WORDS, other.shape), "other_mask": other}
        check_same(model, result, {label: real}, extra=extra)


def test_attention_in_a_subgraph() -> None:
    """A branch has an attention of its own; those of the graph have other operands than it."""
    g = Text()
    x = g.layers(g.start())
    q = g.input("q", FLOAT, ("batch", HEADS, "sequence", WIDTH // HEADS))
    inner = Graph(opset=g.opset)
    inner.initializers, inner.seed = g.initializers, 50
    count = len(g.nodes)
    inner.nodes = []
    y = inner.attend(q, q, q, g.mask_bias)
    names = {n: f"inner_{n}" for node in inner.nodes for n in node.output}
    for node in inner.nodes:
        for values in (node.input, node.output):
            for j, n in enumerate(values):
                values[j] = names.get(n, n)
    then = helper.make_graph(inner.nodes, "then", [], [helper.make_tensor_value_info(names[y], FLOAT, None)])
    other = helper.make_graph(
        [helper.make_node("Identity", [q], ["else_q"])],
        "else",
        [],
        [helper.make_tensor_value_info("else_q", FLOAT, None)],
    )
    assert len(g.nodes) == count
    condition = g.add("Greater", g.add("ReduceSum", g.mask, keepdims=0), g.constant(6))
    g.output(g.add("If", condition, then_branch=then, else_branch=other), "branch", rank=4)
    model = g.end(x)
    result, _ = unpadded(model)
    check_unpadded(result, 1)
    for label, mask in masks().items():
        drawn = (
            np.random.default_rng(5)
            .uniform(-1, 1, (len(mask), HEADS, mask.shape[1], WIDTH // HEADS))
            .astype(np.float32)
        )
        check_same(model, result, {label: mask}, extra={"q": drawn})


# ---- types and operators of others ----
def test_rotary_embedding_of_onnx_runtime_over_more_tokens_than_it_has_positions() -> None:
    g = Text()
    x = g.start("")
    at = g.input("position_ids")
    cos, sin = (g.weight(8, WIDTH // HEADS // 2, scale=1.0) for _ in range(2))
    q, k, v = (g.dense(x) for _ in range(3))
    q, k = (g.add("RotaryEmbedding", y, at, cos, sin, domain="com.microsoft", num_heads=HEADS) for y in (q, k))
    y = g.merge_heads(g.attend(g.heads(q), g.heads(k), g.heads(v), g.mask_bias))
    model = g.end(g.feed_forward(g.norm(str(g.add("Add", x, g.dense(y))))))
    result, _ = unpadded(model)
    check_same(model, result)


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.DOUBLE])
def test_other_types(dtype: int) -> None:
    g = Text()
    x = g.layers(g.start())
    wide = np.float16 if dtype == TensorProto.FLOAT16 else np.float64
    half = g.add("Mul", g.add("Cast", x, to=dtype), g.constant(0.5, wide))
    y = g.add("CumSum", g.add("Cast", half, to=FLOAT), g.constant(1))
    z = g.add("Add", g.add("Cast", g.add("Sum", half, half), to=FLOAT), y)
    model = g.end(g.layers(str(z)))
    result, _ = unpadded(model)
    check_same(model, result, rtol=0.02)


@pytest.mark.parametrize("index", [0, 1, 6, -1, -7, [0], [[3]], [-2], [0, 1], [2, 2]])
def test_positions_that_are_read(index: object) -> None:
    g = Text(length=7)
    x = g.layers(g.start())
    g.output(g.add("Gather", x, g.constant(index), axis=1), "read")
    model = g.end(x)
    result, _ = unpadded(model)
    check_same(model, result, {k: m for k, m in masks().items() if m.shape[1] == 7})


@pytest.mark.parametrize(
    ("starts", "ends", "axes", "steps"),
    [
        ([0], [1], [1], None),
        ([3], [4], [-2], None),
        ([-1], [2**63 - 1], [1], None),
        ([-3], [-2], [1], None),
        ([-1], [0], [1], None),
        ([50], [51], [1], None),
        ([-50], [-49], [1], None),
        ([0], [2], [1], None),
        ([0], [7], [1], [2]),
        ([-1], [-2], [1], [-1]),
        ([0], [1], [1], [-1]),
        ([0, 1], [1, 3], [1, 2], None),
        ([0, 1], [1, 2], [0, 1], None),
        ([0, 1], [99, 2], None, None),
        ([1, 1], [2, 2], [2, 1], [1, 1]),
    ],
)
def test_slices_that_are_read(
    starts: list[int], ends: list[int], axes: list[int] | None, steps: list[int] | None
) -> None:
    g = Text()
    x = g.layers(g.start())
    rest = [g.constant(axes) if axes is not None else "", *([] if steps is None else [g.constant(steps)])]
    g.output(g.add("Slice", x, g.constant(starts), g.constant(ends), *rest), "read")
    model = g.end(x)
    result, _ = unpadded(model)
    check_same(model, result)


@pytest.mark.parametrize("is_zero", [False, True])
@pytest.mark.parametrize("op", ["GatherND", "GatherElements"])
def test_indices_of_what_layers_compute_with(op: str, is_zero: bool) -> None:
    """What the kept rows are decided by cannot wait for them, although it is computed for each token."""
    g = Text()
    x = g.layers(g.start())
    number = g.add("Cast", g.mask, to=FLOAT)
    x = str(g.add("Mul" if is_zero else "Add", x, g.unsqueeze(number, 2)))
    count = g.add("Cast", g.reduce("ReduceSum", number, 1, 1), to=INT64)
    at = g.add("Sub", count, g.constant(1))
    if op == "GatherND":
        last = g.add("GatherND", x, at, batch_dims=1)
    else:
        indices = g.add("Expand", g.unsqueeze(at, 2), g.constant([1, 1, WIDTH]))
        last = g.add("Squeeze", g.add("GatherElements", x, indices, axis=1), g.constant([1]))
    g.output(last, "last", rank=2)
    model = g.end(x)
    result, _ = unpadded(model)
    check_unpadded(result, 1)
    check_same(model, result)


def test_elements_of_other_axes_are_no_rows() -> None:
    """GatherElements along the batch, along the width, and by positions that attention decides."""
    for axis in (0, 2):
        g = Text()
        x = g.layers(g.start())
        g.output(g.add("GatherElements", x, g.constant(np.zeros((1, 1, 1), np.int64)), axis=axis), "element", rank=3)
        model = g.end(x)
        result, report = unpadded(model)
        assert [r.replaced for r in rows_of(report)] == [False]
        check_same(model, result)
    g = Text()
    x = g.layers(g.start())
    at = g.add("ArgMax", g.add("ReduceSum", x, g.constant([2]), keepdims=0), axis=1)
    indices = g.add("Expand", g.unsqueeze(str(at), 2), g.constant([1, 1, WIDTH]))
    g.output(g.add("GatherElements", x, indices, axis=1), "row", rank=3)
    model = g.end(x)
    result, report = unpadded(model)
    assert [r.replaced for r in rows_of(report)] == [False]
    check_same(model, result)


def test_position_beyond_the_longest_text_fails_as_before() -> None:
    g = Text()
    x = g.layers(g.start())
    g.output(g.add("Gather", x, g.constant(LONGEST), axis=1), "read")
    model = g.end(x)
    result, _ = unpadded(model)
    feeds = feeds_for(model, masks()["right"])
    for m, library in ((model, False), (result, True), (result, False)):
        with pytest.raises(Exception, match=r"(?i)indices|out of"):
            session(m, library).run(None, feeds)


def test_attention_operands_of_tokens() -> None:
    """Documents in each text: an operand by positions, from a tensor with tokens."""
    g = Text()
    x = g.start()
    documents = g.input("document_type_ids")
    same = g.add("Equal", g.unsqueeze(documents, 1, 3), g.unsqueeze(documents, 1, 2))
    both = g.add("And", same, g.allowed(g.mask))
    model = g.end(g.layer(x, str(both), "where"))
    result, _ = unpadded(model)
    assert len(list(attentions(result))) == 1
    check_same(model, result)


def test_an_operand_that_is_a_copy_of_the_mask_stays_padded() -> None:
    """Attention reads it by positions, and it is 0 at padding: it was taken for a tensor of tokens."""
    g = Text()
    model = g.end(g.layers(g.start()))
    result, _ = unpadded(model, "off")
    for node, roles in attentions(result):
        node.input[3 + roles.index("pad")] = "copied_mask"
    result.graph.node.insert(0, helper.make_node("Cast", ["attention_mask"], ["copied_mask"], to=BOOL, name="copy"))
    symbolic, opset = Symbolic(result), opset_of(result)
    regions = [r.region for r in find_regions(result, symbolic, opset) if r.region is not None]
    written = emit_regions(result, symbolic, regions)
    check_unpadded(written, 1)
    check_same(model, written)


def test_a_subgraph_reads_a_tensor_that_is_zero_at_padding() -> None:
    g = Text()
    x = g.layers(g.start())
    hidden = str(g.add("Mul", x, g.unsqueeze(str(g.add("Cast", g.mask, to=FLOAT)), 2)))
    axis, ends = g.constant([1]), g.constant([1])
    branches = [
        helper.make_graph([node], name, [], [helper.make_tensor_value_info(name, FLOAT, None)])
        for name, node in (
            ("all", helper.make_node("ReduceSum", [hidden, axis], ["all"], keepdims=0)),
            ("some", helper.make_node("Slice", [hidden, g.constant([0]), ends, axis], ["some"])),
        )
    ]
    is_long = g.add("Greater", g.add("ReduceSum", g.mask, g.constant([0, 1]), keepdims=0), g.constant(6))
    chosen = g.add("If", is_long, then_branch=branches[0], else_branch=branches[1])
    g.output(g.add("ReduceSum", chosen, g.constant([-1]), keepdims=0), "branch")
    model = g.end(x, "mean")
    result, report = unpadded(model)
    assert all(r.replaced for r in rows_of(report))
    check_same(model, result)


@pytest.mark.parametrize("shape", [(3, 0), (0, 4), (0, 0), (1, 1)])
def test_batches_without_a_token(shape: tuple[int, int]) -> None:
    """Where the original takes them, so does what is written."""
    g = Text()
    model = g.end(g.layers(g.start()), "mean")
    result, _ = unpadded(model)
    check_unpadded(result, 1)
    check_same(model, result, {"no tokens": np.zeros(shape, np.int64)})
