# SPDX-License-Identifier: Apache-2.0
"""Biases by the distance of key and query: found, made a table, and left as they are where they are none."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from attention_forms import PLAIN, assert_equivalent, model, rewrite
from onnx import numpy_helper

from stof.mask.relative_bias.distance_table import shorten, spread, table_of, tabulate
from stof.mask.site import RelativeBias

BEFORE = """%kt
      s1 = MatMul (q, kt)
      %window
      """
AFTER = """
      s2 = Add (s1, bias)
      p = Softmax <axis = -1> (s2)
      out = MatMul (p, v)"""
# entry: int64 [S, T], the row of a table of 15 for each pair
CLIPPED = """
      less = Neg (distance)
      low = Constant <value = int64 {-7}> ()
      seven = Constant <value = int64 {7}> ()
      clipped = Clip (less, low, seven)
      entry = Add (clipped, seven)"""
GATHERED = """
      rows3 = Gather <axis = 0> (table, entry)
      by_head = Transpose <perm = [2, 0, 1]> (rows3)
      first = Constant <value = int64[1] {0}> ()
      bias = Unsqueeze (by_head, first)"""
MASKED = """
      inf = Constant <value = float {-inf}> ()
      unmasked = Unsqueeze (by_head, first)
      bias = Where (w, unmasked, inf)"""


def graph(body: str, sizes: str = PLAIN) -> onnx.ModelProto:
    """With a table [15, H] beside."""
    made = model(sizes, "float[B,4,S,8] out", BEFORE + body + AFTER)
    table = np.random.default_rng(3).standard_normal((15, 4)).astype(np.float32)
    made.graph.initializer.append(numpy_helper.from_array(table, "table"))
    return made


def roles(emitted: onnx.ModelProto) -> list[str]:
    """What the one StofAttention reads besides query, key and value."""
    node = next(n for n in emitted.graph.node if n.op_type == "StofAttention")
    return next(a.s.decode() for a in node.attribute if a.name == "operands").split()


BODIES = {
    "all pairs": CLIPPED + GATHERED,
    "under a mask": CLIPPED + GATHERED.replace("bias = Unsqueeze (by_head, first)", "") + MASKED,
    "buckets by logarithm": """
      distant = Abs (distance)
      oned = Max (distant, one)
      real = Cast <to = 1> (oned)
      logs = Log (real)
      three = Constant <value = float {3.0}> ()
      scaled = Mul (logs, three)
      floor = Cast <to = 7> (scaled)
      most = Constant <value = int64 {14}> ()
      entry = Min (floor, most)"""
    + GATHERED,
}
PAST = "float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v"


@pytest.mark.parametrize("name", BODIES)
def test_a_function_of_the_distance_becomes_a_table(name: str) -> None:
    made = graph(BODIES[name])
    emitted, rewrites = rewrite(made)
    relative = rewrites[0].mask.relative
    assert relative is not None
    assert rewrites[0].mask.bias == ()
    assert roles(emitted) == ["relative_bias"]
    assert "Gather" not in [n.op_type for n in emitted.graph.node], "the dense bias is still computed"
    assert_equivalent(made, {"B": 2, "S": 19}, {"B": 1, "S": 401}, tolerance=1e-5)


def test_fixed_sizes_need_no_constant_end() -> None:
    sizes = "float[2,4,7,8] q, float[2,4,7,8] k, float[2,4,7,8] v"
    made = graph(CLIPPED + GATHERED, sizes)
    _, rewrites = rewrite(made)
    assert rewrites[0].mask.relative is not None
    assert rewrites[0].mask.relative.size == 13
    assert_equivalent(made, {})


OTHERS = {
    "of the query alone": """
      most = Constant <value = int64 {14}> ()
      rows15 = Min (rows, most)
      entry = Add (rows15, zero)""",
    "of the key alone": """
      most = Constant <value = int64 {14}> ()
      columns15 = Min (columns, most)
      front = Constant <value = int64[1] {0}> ()
      entry = Unsqueeze (columns15, front)""",
    "of the distance, without an end": """
      fifteen = Constant <value = int64 {15}> ()
      far = Abs (distance)
      entry = Mod (far, fifteen)""",
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_table_stays_a_bias(name: str) -> None:
    made = graph(OTHERS[name] + GATHERED)
    emitted, rewrites = rewrite(made)
    assert rewrites[0].mask.relative is None
    assert roles(emitted) == ["bias"]
    assert_equivalent(made, {"B": 2, "S": 19}, {"B": 1, "S": 401}, tolerance=1e-5)


def test_dense_to_table_and_back() -> None:
    rng = np.random.default_rng(0)
    table = rng.standard_normal((3, 21)).astype(np.float32)
    bias = RelativeBias((), 3, 21, table.tobytes())
    assert np.array_equal(table_of(bias), table)
    for S, T, past in ((50, 50, 0), (9, 60, 51)):
        dense = spread(bias, S, T, past).astype(np.float64)
        allowed = rng.random((1, 3, S, T)) < 0.8
        found = tabulate(dense, allowed, past)
        assert found is not None
        wanted = dense[:, :, :, :][allowed]
        kept = shorten(found.copy(), is_fixed=True)
        assert kept is not None
        again = spread(RelativeBias((), *kept.shape, kept.astype(np.float32).tobytes()), S, T, past)
        assert np.array_equal(np.broadcast_to(again, dense.shape)[allowed], wanted)
        dense[0, 1, 3, 5] += 1
        allowed[0, 1, 3, 5] = allowed[0, 1, 2, 4] = True
        assert tabulate(dense, allowed, past) is None


def test_a_table_that_still_changes_at_its_end_is_none() -> None:
    table = np.arange(101.0)[None, :]
    assert shorten(table.copy(), is_fixed=False) is None
    table[:, :33], table[:, 68:] = -1, 1  # 33 equal ones on each side
    kept = shorten(table.copy(), is_fixed=False)
    assert kept is not None
    assert kept.shape == (1, 37)


LOGARITHM = """
      distant = Abs (distance)
      oned = Max (distant, one)
      real = Cast <to = 1> (oned)
      logs = Log (real)
      %s = Constant <value = float {%s}> ()
      scaled = Mul (logs, %s)
      floor = Cast <to = 7> (scaled)
      most = Constant <value = int64 {14}> ()
      entry = Min (floor, most)"""
BY_BATCH = """
      shape0 = Constant <value = int64 {0}> ()
      batch = Gather (shape_q, shape0)
      numbers = Range (shape0, batch, one)
      fifteen = Constant <value = int64 {15}> ()
      which = Mod (numbers, fifteen)
      chosen = Gather <axis = 0> (table, which)
      behind = Constant <value = int64[2] {2, 3}> ()
      bias = Unsqueeze (chosen, behind)"""
FAR = """
      far = Abs (distance)
      limit = Constant <value = int64 {5000}> ()
      beyond = Greater (far, limit)
      nothing0 = Constant <value = float {0.0}> ()
      penalty = Constant <value = float {-3.0}> ()
      bias = Where (beyond, penalty, nothing0)"""


@pytest.mark.parametrize(
    ("body", "relative"),
    [
        (LOGARITHM % ("f", "2.5", "f") + GATHERED, True),  # constant from 271 on
        (LOGARITHM % ("f", "1.0", "f") + GATHERED, False),  # constant from 1.2 million on, in long steps before
        (BY_BATCH, False),
        (FAR, False),
    ],
    ids=["ends", "ends too far", "by batch", "changes far away"],
)
def test_a_table_needs_a_proof_that_it_ends(body: str, relative: bool) -> None:
    made = graph(body)
    emitted, rewrites = rewrite(made)
    assert (rewrites[0].mask.relative is not None) is relative
    assert roles(emitted) == ["relative_bias" if relative else "bias"]
    assert_equivalent(made, {"B": 3, "S": 19}, {"B": 1, "S": 600}, tolerance=1e-5)
