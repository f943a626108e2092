# SPDX-License-Identifier: Apache-2.0
"""Whole encoders without padding compute what they did, in ONNX Runtime with the library and without."""

from __future__ import annotations

import numpy as np
import pytest
from encoders import BOOL, FLOAT, INT32, INT64, POOLINGS, check_same, check_unpadded, encoder, masks, rows_of, unpadded
from onnx import helper


@pytest.mark.parametrize("kind", POOLINGS)
def test_pooling(kind: str) -> None:
    model = encoder(kind)
    result, report = unpadded(model)
    (row,) = rows_of(report)
    assert row.replaced
    assert (row.attentions, row.of_attentions, row.rest) == (2, 2, "")
    check_unpadded(result, 2)
    check_same(model, result)


def test_several_outputs() -> None:
    model = encoder(*POOLINGS, layers=1)
    result, _ = unpadded(model)
    check_unpadded(result, 1)
    check_same(model, result)


@pytest.mark.parametrize("apply", ["add", "where"])
@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("dtype", [INT64, INT32, BOOL, FLOAT])
def test_types_of_masks(dtype: int, inverted: bool, apply: str) -> None:
    model = encoder("mean", "max", "first", layers=1, dtype=dtype, inverted=inverted, apply=apply)
    result, report = unpadded(model)
    assert [r.replaced for r in rows_of(report)] == [True]
    check_same(model, result, inverted=inverted)


@pytest.mark.parametrize("positions", ["table", "input", "cumsum", ""])
@pytest.mark.parametrize("types", [False, True])
def test_embeddings(positions: str, types: bool) -> None:
    model = encoder("mean", "first", layers=1, positions=positions, types=types)
    result, _ = unpadded(model)
    check_unpadded(result, 1)
    check_same(model, result)


@pytest.mark.parametrize("opset", [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22])
def test_opsets(opset: int) -> None:
    kinds = ("mean", "first", "last") if opset < 12 else ("mean", "first", "last", "last real")
    model = encoder(*kinds, layers=1, opset=opset)
    result, report = unpadded(model)
    if rows_of(report)[0].replaced:
        check_unpadded(result, 1)
    else:
        assert opset < 13
    check_same(model, result)


@pytest.mark.parametrize("batch", ["batch", 1, 2, 5])
@pytest.mark.parametrize("length", ["sequence", 1, 2, 7])
def test_sizes_with_numbers(batch: int | str, length: int | str) -> None:
    model = encoder("mean", "first", "last", "max", layers=1, batch=batch, length=length)
    result, _ = unpadded(model)
    if length != 1:
        check_unpadded(result, 1)
    b, s = batch if isinstance(batch, int) else 5, length if isinstance(length, int) else 7
    check_same(model, result, {k: m for k, m in masks(b, s).items() if m.shape == (b, s)})


@pytest.mark.parametrize("length", [1, 2, 24])
def test_short_and_long_texts(length: int) -> None:
    model = encoder("mean", "first", "last", layers=1)
    result, _ = unpadded(model)
    check_same(model, result, masks(3, length))


def test_an_empty_batch() -> None:
    model = encoder("mean", "first", layers=1)
    result, _ = unpadded(model)
    check_same(model, result, {"B = 0": np.zeros((0, 5), np.int64)})


@pytest.mark.parametrize("unpad", ["on", "auto", "off"])
def test_an_output_with_a_row_for_each_token(unpad: str) -> None:
    model = encoder("all", "mean")
    result, report = unpadded(model, unpad)
    if unpad == "on":
        assert rows_of(report)[0].zero_outputs == ("all",)
        check_unpadded(result, 2)
        check_same(model, result, zero_rows=("all",))
        assert any("ROWS OF PADDING" in line for line in str(report).splitlines())
        return
    assert not any(r.replaced for r in rows_of(report))
    check_same(model, result)


def test_on_keeps_outputs_by_which_nothing_is_known() -> None:
    """Of two outputs with a row for each token, one is written by a node that mixes tokens."""
    model = encoder("all", layers=1)
    model.graph.node.append(helper.make_node("CumSum", ["all", "one"], ["sums"]))
    model.graph.initializer.append(helper.make_tensor("one", INT64, [], [1]))
    model.graph.output.append(helper.make_tensor_value_info("sums", FLOAT, None))
    result, report = unpadded(model, "on")
    row = rows_of(report)[0]
    check_same(model, result, zero_rows=row.zero_outputs)
