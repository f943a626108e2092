# SPDX-License-Identifier: Apache-2.0
"""Masks that a caller gives to be added to the scores: 0 at tokens, and any number of at most -10000 at padding."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import pytest
from encoders import FLOAT, Graph, check_same, check_unpadded, count_tokens, masks, rows_of, session, unpadded
from onnx import TensorProto

from stof.unpadding.report import UnpadSection

HALF = TensorProto.FLOAT16
LOWEST = float(np.finfo(np.float32).min)
SHAPES: Mapping[str, tuple[int | str, ...]] = {
    "[B, S]": ("batch", "sequence"),
    "[B, 1, S]": ("batch", 1, "sequence"),
    "[B, 1, 1, S]": ("batch", 1, 1, "sequence"),
}
NUMBERS = {"lowest": LOWEST, "-inf": -np.inf, "-10000": -10000.0, "-1e9": -1e9}


def encoder(
    dims: tuple[int | str, ...], dtype: int = FLOAT, kinds: tuple[str, ...] = ("first", "middle")
) -> tuple[Graph, str]:
    """Two layers under such a mask, and the mask as it is added."""
    g = Graph()
    ids, mask = g.input("input_ids"), g.input("attention_mask", dtype, dims)
    added = mask if dtype == FLOAT else str(g.add("Cast", mask, to=FLOAT))
    bias = added if len(dims) == 4 else g.unsqueeze(added, *range(1, 5 - len(dims)))
    x = g.embed(ids)
    for _ in range(2):
        x = g.layer(x, bias)
    for kind in kinds:
        g.output(g.pool(x, kind, mask), kind)
    return g, mask


def given(mask: np.ndarray, number: float, dims: tuple[int | str, ...], dtype: type = np.float32) -> np.ndarray:
    shape = [len(mask), *[1] * (len(dims) - 2), mask.shape[1]]
    with np.errstate(over="ignore"):
        return np.where(mask != 0, 0, number).astype(dtype).reshape(shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_padding_is_left_out(shape: str) -> None:
    dims = SHAPES[shape]
    model = encoder(dims)[0].model()
    result, report = unpadded(model)
    (row,) = rows_of(report)
    assert (row.replaced, row.batch, row.attentions) == (True, "attention_mask", 2)
    assert "-10000 or less" in row.assumption
    assert f"        {row.assumption}" in UnpadSection(rows=[row]).lines()
    check_unpadded(result, 2)
    for number in NUMBERS.values():
        for label, mask in masks().items():
            check_same(model, result, {label: mask}, extra={"attention_mask": given(mask, number, dims)})


@pytest.mark.parametrize("number", NUMBERS)
def test_rows_of_padding_are_not_computed(number: str) -> None:
    dims = SHAPES["[B, 1, 1, S]"]
    result, _ = unpadded(encoder(dims, kinds=("first",))[0].model())
    mask = np.array([[1, 1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1], [1, 0, 1, 0, 0, 0, 0]])
    ids = np.arange(mask.size).reshape(mask.shape) % 20
    feeds = {"input_ids": ids, "attention_mask": given(mask, NUMBERS[number], dims)}
    assert count_tokens(result, feeds) == 3 + 1 + 7 + 3  # padding between two tokens stays
    padded_everywhere = np.where(np.arange(4)[:, None] == 1, 0, mask)
    feeds["attention_mask"] = given(padded_everywhere, NUMBERS[number], dims)
    assert count_tokens(result, feeds) == 3 + 7 + 7 + 3


def test_a_mask_in_fp16() -> None:
    dims = SHAPES["[B, 1, 1, S]"]
    model = encoder(dims, HALF)[0].model()
    result, report = unpadded(model)
    assert [r.replaced for r in rows_of(report)] == [True]
    for number in (-65504.0, -10000.0, -np.inf):
        for label, mask in masks().items():
            mask_given = given(mask, number, dims, np.float16)
            check_same(model, result, {label: mask}, extra={"attention_mask": mask_given})


def test_whatever_else_a_mask_holds_is_a_bias() -> None:
    """Of a text without a key of 0 all rows are computed: its padding may have weight."""
    dims = SHAPES["[B, 1, 1, S]"]
    model = encoder(dims)[0].model()
    result, _ = unpadded(model)
    rng = np.random.default_rng(3)
    numbers = np.array([0, 0, -np.inf, LOWEST, -5, 3, -9990, -10000, -10010, -20000], np.float32)
    for _ in range(6):
        mask = rng.choice(numbers, (8, 1, 1, 7))
        mask[0], mask[1], mask[2] = -9990, -10005, np.where(mask[2] > -1e4, -20000, -20007)
        check_same(model, result, {"numbers": np.ones((8, 7), np.int64)}, extra={"attention_mask": mask}, rtol=2e-3)
    ids = np.arange(7)[None]
    without_zero = {"input_ids": ids, "attention_mask": np.full((1, 1, 1, 7), -10005.0, np.float32)}
    without_zero["attention_mask"][..., :2] = -9990
    assert count_tokens(result, without_zero) == 7


def test_a_mask_that_something_else_reads_has_one_number() -> None:
    """Pooling may tell numbers of padding apart: -inf alone is padding."""
    dims = SHAPES["[B, S]"]
    g, mask = encoder(dims, kinds=("first",))
    g.output(str(g.reduce("ReduceMax", mask, 1)), "largest")
    model = g.model()
    result, report = unpadded(model)
    assert [(r.replaced, r.assumption) for r in rows_of(report)] == [(True, "")]
    tokens = np.array([[1, 1, 0, 0, 0]])
    for number, count in ((-np.inf, 2), (LOWEST, 5)):
        feeds = {"input_ids": np.arange(5)[None], "attention_mask": given(tokens, number, dims)}
        assert count_tokens(result, feeds) == count
        check_same(model, result, {str(number): tokens}, extra=feeds)


def test_a_mask_of_zeros_and_ones_with_axes_of_size_1() -> None:
    """Its bias is computed in the graph."""
    g = Graph()
    ids, mask = g.input("input_ids"), g.input("attention_mask", FLOAT, SHAPES["[B, 1, 1, S]"])
    rest = g.add("Sub", g.constant(1.0, np.float32), mask)
    bias = str(g.add("Mul", rest, g.constant(LOWEST, np.float32)))
    g.output(g.pool(g.layer(g.embed(ids), bias), "first", mask), "first")
    model = g.model()
    result, report = unpadded(model)
    assert [(r.replaced, r.assumption) for r in rows_of(report)] == [(True, "")]
    check_unpadded(result, 1)
    for label, real in masks().items():
        check_same(model, result, {label: real}, extra={"attention_mask": real.astype(np.float32)[:, None, None]})


def test_the_original_runs() -> None:
    """The oracle of these tests gives numbers, also for texts without a token."""
    model: onnx.ModelProto = encoder(SHAPES["[B, 1, 1, S]"])[0].model()
    mask = masks()
    for label, real in mask.items():
        feeds = {"input_ids": np.ones(real.shape, np.int64), "attention_mask": given(real, LOWEST, ("b", 1, 1, "s"))}
        assert all(np.isfinite(a).all() for a in session(model, False).run(None, feeds)), label
