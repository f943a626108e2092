# SPDX-License-Identifier: Apache-2.0
"""What guards read: it is computed before the tokens are known, and is not always a tensor of the original."""

from __future__ import annotations

import onnx
import pytest
from encoders import FLOAT, check_same, check_unpadded, rows_of, unpadded
from test_forms_of_masks import LOWEST, Form, Text, many, model_of, ones_alone, positive, products_as_condition


def scaled_embeddings(opset: int) -> onnx.ModelProto:
    """A float mask in one other tensor, by which embeddings are multiplied, and of which the bias is computed."""
    g = Text(opset=opset)
    g.dtype = FLOAT
    ids, g.mask = g.input("input_ids"), g.input("attention_mask", FLOAT)
    scaled = str(g.add("Mul", g.mask, g.number(1.0)))
    x = str(g.add("Mul", g.embed(ids), g.unsqueeze(scaled, 2)))
    bias = str(g.add("Mul", g.one_less(g.unsqueeze(scaled, 1, 2)), g.number(LOWEST)))
    for _ in range(2):
        x = g.layer(x, bias)
    for kind in ("mean", "first"):
        g.output(g.pool(x, kind, g.mask, FLOAT), kind)
    return g.model()


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("capacity", [0, 70])
def test_what_a_guard_is_computed_from_stays_padded(opset: int, capacity: int) -> None:
    """Tokens and bias read one tensor that is 0 at padding: the bias decides which rows are tokens."""
    model = scaled_embeddings(opset)
    result, report = unpadded(model, **({"unpad_capacity": capacity} if capacity else {}))
    assert [r.replaced for r in rows_of(report)] == [True]
    check_unpadded(result, 2)
    check_same(model, result, many())


@pytest.mark.parametrize("unpad", ["auto", "on"])
@pytest.mark.parametrize("form", [ones_alone, positive, products_as_condition])
def test_verification_at_a_capacity(form: Form, unpad: str) -> None:
    """The original gets the same limit, although the operand that a guard reads is none of its tensors."""
    model = model_of(form, FLOAT, False, "mean", "all" if unpad == "on" else "first")
    _, report = unpadded(model, unpad, unpad_capacity=70, verify=True)
    assert [(r.replaced, r.capacity) for r in rows_of(report)] == [(True, 70)], rows_of(report)[0].reason
    assert report.verification is not None
    assert not report.verification.failures
