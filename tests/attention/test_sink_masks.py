# SPDX-License-Identifier: Apache-2.0
"""Masks of weights and of exponentials together with a sink, and weak masks of different strength."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from attention_forms import PLAIN, assert_equivalent, model, reason

import stof
from stof.options import Options

SIZES = ({"B": 2, "S": 1}, {"B": 2, "S": 9}, {"B": 1, "S": 33})

# column: float [B, 4, S, 1] of a sink; masked: scores under a causal window of 5
SINK = """
    %kt
    %window
    s1 = MatMul (q, kt)
    minus = Constant <value = float {-inf}> ()
    null = Constant <value = float {0.0}> ()
    masked = Where (w, s1, minus)
    logits = Constant <value = int64[4] {1, 4, 1, 1}> ()
    sink4 = Reshape (sink, logits)
    whole = Shape (masked)
    first = Constant <value = int64[1] {0}> ()
    third = Constant <value = int64[1] {3}> ()
    front = Slice (whole, first, third)
    spread = Concat <axis = 0> (front, last)
    column = Expand (sink4, spread)
"""
# w1: the window, as it is for the keys 0 to T, of which the scores have those below T
WIDER = """
    t1 = Add (t, one)
    wider = Range (zero, t1, one)
    causal1 = LessOrEqual (wider, rows)
    distance1 = Sub (rows, wider)
    near1 = Less (distance1, five)
    w1 = And (causal1, near1)
"""


def _guarded(before: bool) -> onnx.ModelProto:
    joined, start, end = ("column, masked", 1, 2**31) if before else ("masked, column", 0, -1)
    return model(
        PLAIN + ", float[4] sink",
        "float[B,4,S,8] out",
        SINK
        + WIDER
        + f"""
        both = Concat <axis = -1> ({joined})
        p0 = Softmax (both)
        p1 = Where (w1, p0, null)
        start = Constant <value = int64[1] {{{start}}}> ()
        end = Constant <value = int64[1] {{{end}}}> ()
        p = Slice (p1, start, end, third)
        out = MatMul (p, v)""",
    )


def test_weights_masked_again_before_the_last_column_is_dropped() -> None:
    assert_equivalent(_guarded(before=False), *SIZES)


def test_weights_masked_again_one_column_beside_the_keys() -> None:
    """The mask is written as that of the scores, but its column of a key is that of the key before."""
    assert "the attention weights go to the Where node" in reason(_guarded(before=True))


def test_exponentials_and_a_sink_masked_together() -> None:
    """A row that is masked whole is 0 / 0 in the graph; the operator's sink would make it 0."""
    graph = model(
        PLAIN + ", float[4] sink, int64[B,S] am",
        "float[B,4,S,8] out",
        SINK
        + """
        both = Concat <axis = -1> (masked, column)
        highest = ReduceMax <axes = [-1], keepdims = 1> (both)
        below = Sub (both, highest)
        e0 = Exp (below)
        places = Constant <value = int64[2] {1, 3}> ()
        am4 = Unsqueeze (am, places)
        real = Cast <to = 9> (am4)
        e = Where (real, e0, null)
        end = Constant <value = int64[1] {-1}> ()
        total = ReduceSum (e, end)
        p0 = Div (e, total)
        p = Slice (p0, first, end, third)
        out = MatMul (p, v)""",
        opset=17,
    )
    assert "a sink stands beside" in reason(graph)


@pytest.mark.parametrize("terms", ["padding, window", "window, padding"])
def test_a_weak_mask_that_tells_padded_keys_apart(terms: str, tmp_path: Path) -> None:
    """-1e4 beside -1e9: a row that is all padding attends to its window, not to all keys."""
    one, other = terms.split(", ")
    graph = model(
        PLAIN + ", int64[B,S] am",
        "float[B,4,S,8] out",
        f"""
        %kt
        %window
        s1 = MatMul (q, kt)
        places = Constant <value = int64[2] {{1, 2}}> ()
        am4 = Unsqueeze (am, places)
        real = Cast <to = 9> (am4)
        null = Constant <value = float {{0.0}}> ()
        low = Constant <value = float {{-1e9}}> ()
        soft = Constant <value = float {{-1e4}}> ()
        padding = Where (real, null, low)
        window = Where (w, null, soft)
        s2 = Add (s1, {one})
        s3 = Add (s2, {other})
        p = Softmax (s3)
        out = MatMul (p, v)""",
    )
    onnx.save(graph, tmp_path / "model.onnx")
    report = stof.optimize(tmp_path / "model.onnx", tmp_path / "new.onnx", Options(verify=False))
    (site,) = report.sites
    assert not site.replaced
    assert "masks of different strength are added" in site.reason
