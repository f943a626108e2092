# SPDX-License-Identifier: Apache-2.0
"""The ways in which exporters write a key padding mask: each runs on real tokens, with the original's numbers for every mask."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from encoders import (
    BOOL,
    FLOAT,
    HEADS,
    INT32,
    INT64,
    TYPES,
    WIDTH,
    Graph,
    attentions,
    check_same,
    check_unpadded,
    feeds_for,
    masks,
    rows_of,
    unpadded,
)
from onnx import TensorProto, helper

LOWEST = float(np.finfo(np.float32).min)
PAD_ID = 1
Form = Callable[["Text"], tuple[str, str]]  # what is added to scores or selects them, and which of both


class Text(Graph):
    """A graph with a mask, in the type and shape that forms of masks begin with."""

    mask = ""
    dtype = INT64

    def number(self, value: float) -> str:
        return self.constant(value, np.float32)

    def like(self, value: float) -> str:
        return self.constant(value, TYPES[self.dtype])

    def wide(self) -> str:
        return self.unsqueeze(self.mask, 1, 2)

    def floats(self, tensor: str = "") -> str:
        tensor = tensor or self.wide()
        return tensor if self.dtype == FLOAT else str(self.add("Cast", tensor, to=FLOAT))

    def bools(self) -> str:
        return self.wide() if self.dtype == BOOL else str(self.add("Cast", self.wide(), to=BOOL))

    def one_less(self, tensor: str) -> str:
        return str(self.add("Sub", self.number(1.0), tensor))

    def sizes(self, *axes: int) -> str:
        return str(self.add("Gather", self.add("Shape", self.mask), self.constant(list(axes))))

    def among_heads(self, added: str) -> str:
        """[B, 1, 1, S] as [B * H, 1, S], and viewed as [B, H, 1, S], as torch does it."""
        length = self.sizes(1)
        spread = self.add("Expand", added, self.add("Concat", self.sizes(0), self.constant([HEADS, 1]), length, axis=0))
        flat = self.add("Reshape", spread, self.add("Concat", self.constant([-1, 1]), length, axis=0))
        return str(self.add("Reshape", flat, self.add("Concat", self.constant([-1, HEADS, 1]), length, axis=0)))


def one_less(fill: float) -> Form:
    """(1 - m) * fill, of BERT, T5 and BART."""
    return lambda g: (g.add("Mul", g.one_less(g.floats()), g.number(fill)), "add")


def less_one(g: Text) -> tuple[str, str]:
    """(m - 1) * 1e9."""
    return g.add("Mul", g.add("Sub", g.floats(), g.number(1.0)), g.number(1e9)), "add"


def integers(g: Text) -> tuple[str, str]:
    """1 - m in the mask's own type."""
    rest = g.add("Sub", g.like(1), g.wide())
    return g.add("Mul", g.floats(rest), g.number(LOWEST)), "add"


def half(g: Text) -> tuple[str, str]:
    """BERT's in fp16."""
    rest = g.add("Sub", g.constant(1.0, np.float16), g.add("Cast", g.wide(), to=TensorProto.FLOAT16))
    return g.add("Cast", g.add("Mul", rest, g.constant(-65504.0, np.float16)), to=FLOAT), "add"


def logarithm(g: Text) -> tuple[str, str]:
    return g.add("Log", g.floats()), "add"


def masked_fill_of_the_rest(g: Text) -> tuple[str, str]:
    """BART's and CLIP's: 1 - m, with the lowest number where that is not 0."""
    rest = g.one_less(g.floats())
    return g.add("Where", g.add("Cast", rest, to=BOOL), g.number(LOWEST), rest), "add"


def masked_fill(g: Text) -> tuple[str, str]:
    """-inf where the mask is 0."""
    return g.add("Where", g.add("Equal", g.wide(), g.like(0)), g.number(-np.inf), g.number(0.0)), "add"


def ones_alone(g: Text) -> tuple[str, str]:
    return g.add("Equal", g.wide(), g.like(1)), "where"


def positive(g: Text) -> tuple[str, str]:
    return g.add("Greater", g.wide(), g.like(0)), "where"


def condition(g: Text) -> tuple[str, str]:
    return g.bools(), "where"


def times_ones(g: Text) -> tuple[str, str]:
    """TensorFlow's: rows of ones times the mask, and -10000."""
    ones = helper.make_tensor("ones", FLOAT, [1], [1.0])
    shape = g.add("Concat", g.sizes(0, 1), g.constant([1]), axis=0)
    square = g.add("Mul", g.add("ConstantOfShape", shape, value=ones), g.floats(g.unsqueeze(g.mask, 1)))
    return g.add("Mul", g.one_less(g.unsqueeze(square, 1)), g.number(-10000.0)), "add"


def products(g: Text) -> tuple[str, str]:
    """m[q] * m[k], [B, S, S]."""
    pairs = g.add("Mul", g.floats(), g.floats(g.unsqueeze(g.mask, 1, 3)))
    return g.add("Mul", g.one_less(pairs), g.number(LOWEST)), "add"


def products_as_condition(g: Text) -> tuple[str, str]:
    return g.add("Cast", g.add("Mul", g.wide(), g.unsqueeze(g.mask, 1, 3)), to=BOOL), "where"


def forbidden(g: Text) -> tuple[str, str]:
    """M * lowest: a mask of padding."""
    return g.add("Mul", g.floats(), g.number(LOWEST)), "add"


def zeros_alone(g: Text) -> tuple[str, str]:
    return g.add("Equal", g.wide(), g.like(0)), "where"


def negated(g: Text) -> tuple[str, str]:
    return g.add("Not", g.bools()), "where"


def of_torch(g: Text) -> tuple[str, str]:
    """torch.nn.TransformerEncoder's."""
    added = g.add("Where", g.mask, g.number(-np.inf), g.number(0.0))
    return g.among_heads(g.unsqueeze(str(added), 1, 2)), "add"


ATTENDED: dict[str, tuple[Form, tuple[int, ...]]] = {
    "one less, lowest": (one_less(LOWEST), (INT32, INT64, BOOL, FLOAT)),
    "one less, -10000": (one_less(-10000.0), (INT32, INT64, FLOAT)),
    "one less, -1e9": (one_less(-1e9), (INT64, FLOAT)),
    "less one": (less_one, (INT64, FLOAT)),
    "integers": (integers, (INT32, INT64, FLOAT)),
    "fp16": (half, (INT64, FLOAT)),
    "logarithm": (logarithm, (INT64, FLOAT)),
    "masked fill of the rest": (masked_fill_of_the_rest, (INT64, FLOAT)),
    "masked fill": (masked_fill, (INT32, INT64, FLOAT)),
    "ones alone": (ones_alone, (INT32, INT64, FLOAT)),
    "positive": (positive, (INT32, INT64, FLOAT)),
    "condition": (condition, (INT32, INT64, BOOL, FLOAT)),
    "times ones": (times_ones, (INT32, INT64, BOOL, FLOAT)),
    "products": (products, (INT32, INT64, BOOL, FLOAT)),
    "products as condition": (products_as_condition, (INT32, INT64, FLOAT)),
}
PADDED: dict[str, tuple[Form, tuple[int, ...]]] = {  # of masks that are 1 at padding
    "forbidden": (forbidden, (INT32, INT64, BOOL, FLOAT)),
    "zeros alone": (zeros_alone, (INT32, INT64, FLOAT)),
    "negated": (negated, (INT32, INT64, BOOL, FLOAT)),
    "of torch": (of_torch, (BOOL,)),
}


def cases(*but: int) -> list[list[Any]]:
    """Parameters of each form in each type but these: a list for each form."""
    name = TensorProto.DataType.Name
    return [
        [pytest.param(form, t, label in PADDED, id=f"{label}, {name(t)}") for t in types if t not in but]
        for label, (form, types) in {**ATTENDED, **PADDED}.items()
    ]


def sampled(*but: int) -> list[Any]:
    """One type of each form, another one of the next form; with STOF_TEST_ALL=1 all."""
    forms = [form for form in cases(*but) if form]
    is_long = os.environ.get("STOF_TEST_ALL") == "1"
    return list(itertools.chain(*forms)) if is_long else [form[i % len(form)] for i, form in enumerate(forms)]


# Integers that a graph computes with are taken to be 0 and 1: the report says so.
COMPARED = {"masked fill", "ones alone", "positive", "condition", "products as condition"}
COMPUTED = {*ATTENDED, "forbidden"} - COMPARED
# These numbers take digits from the scores of a text without a key, which the operator leaves them.
SOFT = {"one less, -10000": 2e-2, "times ones": 2e-2, "fp16": 2e-2}


def model_of(form: Form, dtype: int, is_padding: bool, *poolings: str, from_ids: bool = False) -> onnx.ModelProto:
    """An encoder with a mask of such a form; ``from_ids``: the mask is computed from token ids."""
    g = Text()
    g.dtype = dtype
    ids = g.input("input_ids")
    if from_ids:
        is_pad = str(g.add("Equal", ids, g.constant(PAD_ID)))
        g.mask = is_pad if is_padding else str(g.add("Not", is_pad))
        g.mask = g.mask if dtype == BOOL else str(g.add("Cast", g.mask, to=dtype))
    else:
        g.mask = g.input("attention_mask", dtype)
    x = g.embed(ids)
    bias, apply = form(g)
    for _ in range(2):
        x = g.layer(x, str(bias), apply)
    for kind in poolings or ("mean", "max", "first", "middle", "last real"):
        g.output(g.pool(x, kind, g.mask, dtype, is_padding), kind.replace(" ", "_"), rank=3 if kind == "all" else None)
    return g.model()


def ragged(seed: int, batch: int = 6, length: int = 9) -> np.ndarray:
    """[batch, length]: padded on the left, on the right, on both sides, not at all, but for one token, wholly, with holes."""
    rng = np.random.default_rng(seed)
    mask = np.ones((batch + 1, length), np.int64)
    first, last = np.sort(rng.integers(0, length, (2, batch + 1)), axis=0)
    mask[0, : first[0]] = mask[1, last[1] + 1 :] = mask[2, : first[2]] = mask[2, last[2] + 1 :] = 0
    mask[4] = np.arange(length) == first[4]
    mask[5] = 0
    mask[6] = rng.random(length) < 0.5
    return rng.permutation(mask)


def many() -> dict[str, np.ndarray]:
    """Batches, by what is in them."""
    return {**masks(), **{f"ragged {seed}": ragged(seed) for seed in range(3)}}


def name_of(request: pytest.FixtureRequest) -> str:
    """The form that a test is about."""
    return str(request.node.callspec.id).rsplit(", ", 1)[0]


@pytest.mark.parametrize(("form", "dtype", "is_padding"), list(itertools.chain(*cases())))
def test_a_form_runs_on_real_tokens(form: Form, dtype: int, is_padding: bool, request: pytest.FixtureRequest) -> None:
    model = model_of(form, dtype, is_padding)
    result, report = unpadded(model)
    (row,) = rows_of(report)
    assert (row.replaced, row.batch, row.rest) == (True, "attention_mask", "")
    check_unpadded(result, 2)
    batches, tolerance = many(), SOFT.get(name_of(request))
    if tolerance is not None:
        without_key = {k: batches.pop(k) for k, m in many().items() if not m.any(1).all()}
        check_same(model, result, without_key, is_padding, rtol=tolerance)
    check_same(model, result, batches, is_padding)


@pytest.mark.parametrize(("form", "dtype", "is_padding"), sampled())
def test_zero_rows_of_a_form(form: Form, dtype: int, is_padding: bool, request: pytest.FixtureRequest) -> None:
    model = model_of(form, dtype, is_padding, "all")
    result, report = unpadded(model, "on")
    assert [r.zero_outputs for r in rows_of(report)] == [("all",)]
    check_unpadded(result, 2)
    tolerance = SOFT.get(name_of(request), 2e-4)
    batches = {f"ragged {seed}": ragged(seed) for seed in (3, 4)}
    check_same(model, result, batches, inverted=is_padding, zero_rows=("all",), rtol=tolerance)


def other_numbers(dtype: int) -> dict[str, np.ndarray]:
    """Masks that hold other numbers than 0 and 1: in rows with and without ones, and of nothing else."""
    found = {}
    for seed in range(4):
        rng = np.random.default_rng(seed)
        numbers = [0, 1, 2, -1, 3] if dtype != FLOAT else [0, 1, 0.5, -1, 2, 1e-4, 1 - 2**-24]
        mask = rng.choice(numbers, (8, 7))
        mask[0], mask[1] = rng.choice(numbers[:2] + numbers[2:3], (2, 7))
        mask[2], mask[3], mask[4] = 2, numbers[2], -1
        mask[5] = np.where(rng.random(7) < 0.5, 0, numbers[2])
        mask[6] = np.where(rng.random(7) < 0.5, 1, numbers[2])
        mask[7] = np.where(rng.random(7) < 0.5, 0, numbers[-2])
        found[f"numbers {seed}"] = mask
    return found


@pytest.mark.parametrize(("form", "dtype", "is_padding"), sampled(BOOL))
def test_other_numbers_than_0_and_1(form: Form, dtype: int, is_padding: bool, request: pytest.FixtureRequest) -> None:
    """They mean what they do in the original; or the report names a mask that must not have them."""
    model = model_of(form, dtype, is_padding, "first", "mean", "middle")
    result, report = unpadded(model)
    check_unpadded(result, 2)
    if dtype != FLOAT and name_of(request) in COMPUTED:
        words = "attention_mask is taken to hold 0 and 1 only: the graph computes with it"
        assert all(words in site.notes for site in report.sites)
        return
    for label, mask in other_numbers(dtype).items():
        given = {"attention_mask": mask.astype(TYPES[dtype])}
        check_same(model, result, {label: np.ones(mask.shape, np.int64)}, extra=given, rtol=2e-3)


@pytest.mark.parametrize("is_padding", [False, True])
@pytest.mark.parametrize("dtype", [BOOL, INT64, FLOAT])
def test_masks_from_token_ids(dtype: int, is_padding: bool) -> None:
    """fairseq's, sentence encoders' and Keras' masks: where an id is not that of padding."""
    model = model_of(forbidden if is_padding else one_less(LOWEST), dtype, is_padding, from_ids=True)
    result, report = unpadded(model)
    assert [(r.replaced, r.batch) for r in rows_of(report)] == [(True, "input_ids")]
    check_unpadded(result, 2)
    for label, mask in many().items():
        drawn = feeds_for(model, mask)["input_ids"]
        ids = np.where(mask != 0, np.where(drawn == PAD_ID, 5, drawn), PAD_ID)
        check_same(model, result, {label: mask}, extra={"input_ids": ids})


def test_an_output_of_a_mask_from_token_ids() -> None:
    model = model_of(one_less(LOWEST), BOOL, False, "all", from_ids=True)
    result, report = unpadded(model, "on")
    assert [r.zero_outputs for r in rows_of(report)] == [("all",)]
    for label, mask in many().items():
        ids = np.where(mask != 0, 3 + np.arange(mask.shape[1]), PAD_ID)
        check_same(model, result, {label: mask}, zero_rows=("all",), extra={"input_ids": ids})


@pytest.mark.parametrize("kinds", [("first", "mean", "last", "middle"), ("mean", "max")])
def test_a_bias_under_a_causal_mask(kinds: tuple[str, ...]) -> None:
    """A query may see weak keys alone, although the text has strong ones behind it."""
    g = Text()
    g.dtype = FLOAT
    ids, g.mask = g.input("input_ids"), g.input("attention_mask", FLOAT)
    x = g.embed(ids)
    row = g.add("Range", g.constant(0), g.add("Squeeze", g.sizes(1)), g.constant(1))
    later = g.add("Less", g.unsqueeze(str(row), 1), g.unsqueeze(str(row), 0))
    causal = g.add("Where", later, g.number(-np.inf), g.number(0.0))
    bias, _ = one_less(-10000.0)(g)
    for _ in range(2):
        x = g.layer(x, str(bias), "add", str(causal))
    for kind in kinds:
        g.output(g.pool(x, kind, g.mask, FLOAT), kind)
    model = g.model()
    result, report = unpadded(model)
    assert [r.replaced for r in rows_of(report)] == [True]
    assert all("k <= q" in mask_of(node) for node, _ in attentions(result))
    check_same(model, result, {k: m for k, m in many().items() if m.any(1).all()})
    for label, mask in other_numbers(FLOAT).items():
        given = {"attention_mask": np.abs(mask).clip(0, 1).astype(np.float32)}
        check_same(model, result, {label: np.ones(mask.shape, np.int64)}, extra=given, rtol=2e-3)
    weak = np.array([[0, 1e-5, 1, 1, 0], [0, 0, 2e-5, 1e-5, 1], [0, 1, 1, 1, 0], [1e-5, 0, 1, 0, 0]], np.float32)
    check_same(model, result, {"weak": np.ones(weak.shape, np.int64)}, extra={"attention_mask": weak}, rtol=2e-3)


def mask_of(node: onnx.NodeProto) -> str:
    return next((a.s.decode() for a in node.attribute if a.name == "mask"), "")


def test_one_layer_with_a_bias_and_one_with_a_condition() -> None:
    """Both are of one mask; the function of both calls takes the length of texts from either."""
    g = Text()
    g.dtype = FLOAT
    ids, g.mask = g.input("input_ids"), g.input("attention_mask", FLOAT)
    x = g.embed(ids)
    bias, real = one_less(LOWEST)(g)[0], condition(g)[0]
    x = g.layer(g.layer(x, bias), real, "where")
    g.output(g.pool(x, "mean", g.mask, FLOAT), "mean")
    model = g.model()
    result, report = unpadded(model)
    assert [(r.replaced, r.attentions) for r in rows_of(report)] == [(True, 2)]
    assert {role for _, roles in attentions(result) for role in roles} >= {"bias", "pad"}
    check_same(model, result, many())


@pytest.mark.parametrize("dtype", [INT64, FLOAT])
@pytest.mark.parametrize("kind", ["middle", "last real"])
def test_a_hole_that_sees_no_key_is_read(kind: str, dtype: int) -> None:
    """A row of padding gives the average over all keys, so all are kept."""
    model = model_of(products, dtype, False, kind)
    result, _ = unpadded(model)
    holes = np.array([[0, 1, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 1, 0], [1, 1, 0, 1, 1, 0, 0], [0, 0, 1, 0, 1, 0, 0]])
    check_same(model, result, {"holes": holes, "flipped": holes[:, ::-1].copy(), **many()})


@pytest.mark.parametrize("spread", [False, True])
def test_a_mask_that_a_caller_adds(spread: bool) -> None:
    """0 and -inf, of torch.nn.TransformerEncoder with a float mask; what else it holds is a bias."""
    g = Text()
    g.dtype = FLOAT
    ids, g.mask = g.input("input_ids"), g.input("attention_mask", FLOAT)
    real = str(g.add("Cast", g.add("Equal", g.mask, g.number(0.0)), to=FLOAT))
    x, bias = g.embed(ids), g.wide()
    for _ in range(2):
        x = g.layer(x, g.among_heads(bias) if spread else bias)
    for kind in ("mean", "first"):
        g.output(g.pool(x, kind, real, FLOAT), kind)
    model = g.model()
    result, report = unpadded(model)
    assert [(r.replaced, r.batch, r.attentions) for r in rows_of(report)] == [(True, "attention_mask", 2)]
    for label, mask in many().items():
        given = np.where(mask != 0, 0, -np.inf).astype(np.float32)
        check_same(model, result, {label: mask}, extra={"attention_mask": given})
    rng = np.random.default_rng(5)
    numbers = np.array([0, 0, -np.inf, -np.inf, -5, 3, -9990, -10000, -10010, LOWEST], np.float32)
    for _ in range(6):
        given = rng.choice(numbers, (8, 7))
        given[0], given[1] = np.where(given[:2] > -np.inf, -9990, -np.inf)
        check_same(model, result, {"numbers": np.ones((8, 7), np.int64)}, extra={"attention_mask": given}, rtol=2e-3)


def test_a_decoder_with_a_bias_of_both_texts() -> None:
    """Its rows of padding attend to all keys alike, and are read: sequences with such rows keep theirs."""
    g = Text()
    g.dtype = FLOAT
    ids, g.mask = g.input("input_ids"), g.input("attention_mask", FLOAT)
    memory = g.layer(g.embed(ids), one_less(LOWEST)(g)[0])
    target = g.input("decoder_input_ids", INT64, ("batch", "target"))
    own = g.input("decoder_mask", FLOAT, ("batch", "target"))
    pairs = g.add("Mul", g.floats(), g.unsqueeze(own, 1, 3))
    bias = g.add("Mul", g.one_less(str(pairs)), g.number(LOWEST))
    y = g.self_attention(g.embed(target), str(bias), keys=memory)
    g.output(g.feed_forward(y), "tokens", rank=3)
    model = g.model()
    result, report = unpadded(model)
    assert [(r.attentions, r.keys_only) for r in rows_of(report)] == [(1, 1)]
    rng = np.random.default_rng(2)
    for label, mask in many().items():
        for share in (0.0, 0.6, 1.0):
            real = (rng.random((len(mask), 4)) < share).astype(np.float32)
            given = {"decoder_input_ids": rng.integers(0, 30, real.shape), "decoder_mask": real}
            check_same(model, result, {label: mask}, extra=given)


@pytest.mark.parametrize("dtype", [INT64, FLOAT])
def test_rows_of_padding_that_average_are_read(dtype: int) -> None:
    """The only output has a row for each token, of queries that are not from the encoder."""
    g = Text()
    g.dtype = dtype
    ids, g.mask = g.input("input_ids"), g.input("attention_mask", dtype)
    key_bias, pair_bias = one_less(LOWEST)(g)[0], products(g)[0]
    memory = g.layer(g.embed(ids), key_bias)
    q = g.heads(g.dense(g.input("hidden", FLOAT, ("batch", "sequence", WIDTH))))
    k, v = (g.heads(g.dense(memory)) for _ in range(2))
    g.output(g.merge_heads(g.attend(q, k, v, pair_bias)), "tokens", rank=3)
    g.output(g.pool(memory, "mean", g.mask, dtype), "mean")
    model = g.model()
    result, _ = unpadded(model)
    check_same(model, result, many())


@pytest.mark.parametrize("fill", [-5.0, -9000.0])
def test_a_bias_that_only_weakens_is_no_padding(fill: float) -> None:
    model = model_of(one_less(fill), FLOAT, False, "mean")
    result, report = unpadded(model)
    assert not any(r.replaced for r in rows_of(report))
    check_same(model, result, many())


def test_a_bias_by_two_inputs_is_followed_by_one_of_them() -> None:
    """A finite number is added to the mask's: it is not known, and may be as large."""
    g = Text()
    g.dtype = FLOAT
    ids, g.mask, other = g.input("input_ids"), g.input("attention_mask", FLOAT), g.input("other", FLOAT)
    x = g.embed(ids)
    bias = g.add("Add", one_less(LOWEST)(g)[0], g.unsqueeze(other, 1, 2))
    g.output(g.pool(g.layer(x, str(bias)), "mean", g.mask, FLOAT), "mean")
    _, report = unpadded(g.model())
    assert not any(r.replaced for r in rows_of(report))


@pytest.mark.parametrize("shape", [(3, 0), (0, 4), (0, 0), (1, 1), (4, 1)])
@pytest.mark.parametrize(("form", "is_padding"), [(one_less(LOWEST), False), (products, False), (forbidden, True)])
def test_small_batches(form: Form, is_padding: bool, shape: tuple[int, int]) -> None:
    for dtype in (INT64, FLOAT):
        model = model_of(form, dtype, is_padding, "mean")
        result, _ = unpadded(model)
        check_same(model, result, {"zeros": np.zeros(shape, np.int64)}, inverted=is_padding)
        check_same(model, result, {"ones": np.ones(shape, np.int64)}, inverted=is_padding)


@pytest.mark.parametrize("unpad", ["auto", "on"])
@pytest.mark.parametrize(
    ("form", "dtype", "is_padding", "from_ids"),
    [
        (one_less(LOWEST), FLOAT, False, False),
        (one_less(-10000.0), FLOAT, False, False),
        (forbidden, INT64, True, False),
        (ones_alone, INT32, False, False),
        (one_less(LOWEST), BOOL, False, True),
        (of_torch, BOOL, True, False),
    ],
)
def test_verification_passes(form: Form, dtype: int, is_padding: bool, from_ids: bool, unpad: str) -> None:
    model = model_of(form, dtype, is_padding, "mean", "all" if unpad == "on" else "first", from_ids=from_ids)
    _, report = unpadded(model, unpad, verify=True)
    assert all(r.replaced for r in rows_of(report))
    assert report.verification is not None
    assert not report.verification.failures
    assert any("between tokens" in c.what for c in report.verification.comparisons) or from_ids
