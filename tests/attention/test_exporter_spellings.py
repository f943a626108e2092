# SPDX-License-Identifier: Apache-2.0
"""Every spelling of attention that exporters write, as text: found, described correctly, equal after the rewrite."""

from __future__ import annotations

import pytest
from attention_forms import PACKED, PLAIN, assert_equivalent, model, only_site, rewrite

from stof.mask.site import Layout, TermKind

SIZES = ({"B": 2, "S": 19, "T": 19}, {"B": 1, "S": 3, "T": 3})
PAST = ({"B": 2, "S": 7, "P": 12, "T": 19}, {"B": 1, "S": 1, "P": 30, "T": 31})

# name: (inputs, body, layouts of query, key, value, output)
FORMS = {
    "sink": (
        PLAIN,
        """%kt
        %window
        %added
        s1 = MatMul (q, kt)
        s2 = Add (s1, added)
        logits = Constant <value = float[4] {0.5, -1.0, 2.0, 0.0}> ()
        place = Constant <value = int64[4] {1, 4, 1, 1}> ()
        logits4 = Reshape (logits, place)
        four = Shape (s2)
        ones = Constant <value = int64[1] {1}> ()
        zeros = Constant <value = int64[1] {0}> ()
        three = Constant <value = int64[1] {3}> ()
        front = Slice (four, zeros, three)
        wide = Concat <axis = 0> (front, ones)
        column = Expand (logits4, wide)
        s3 = Concat <axis = -1> (s2, column)
        axes = Constant <value = int64[1] {-1}> ()
        most = ReduceMax <keepdims = 1> (s3, axes)
        s4 = Sub (s3, most)
        p1 = Softmax <axis = -1> (s4)
        end = Constant <value = int64[1] {-1}> ()
        p = Slice (p1, zeros, end, axes)
        out = MatMul (p, v)""",
        "BHSD BHSD BHSD BHSD",
    ),
    "plain": (
        PLAIN,
        """%kt
        s1 = MatMul (q, kt)
        p = Softmax <axis = -1> (s1)
        out = MatMul (p, v)""",
        "BHSD BHSD BHSD BHSD",
    ),
    "packed, scaled, masked": (
        PACKED,
        """%heads
        %kt
        %scale
        %window
        %added
        s1 = MatMul (q, kt)
        s2 = Mul (s1, scale)
        s3 = Add (s2, added)
        p = Softmax <axis = -1> (s3)
        o = MatMul (p, v)
        %merge
        """,
        "BSN BSN BSN BSN",
    ),
    "key transposed at once, scale split, mask first in the sum": (
        PACKED,
        """%heads
        %scale
        %window
        %added
        qs = Mul (q, scale)
        kt1 = Transpose <perm = [0, 2, 3, 1]> (k4)
        kt = Mul (scale, kt1)
        s1 = MatMul (qs, kt)
        s3 = Add (added, s1)
        p = Softmax <axis = 3> (s3)
        o = MatMul (p, v)
        %merge
        """,
        "BSN BSN BSN BSN",
    ),
    "scale by Div after the mask, Mul by one": (
        PLAIN,
        """%kt
        %scale
        %window
        %added
        unit = Constant <value = float[1,1,1,1] {1.0}> ()
        s1 = MatMul (q, kt)
        s2 = Add (s1, added)
        s3 = Div (s2, scale)
        s4 = Mul (unit, s3)
        p = Softmax (s4)
        out = MatMul (p, v)""",
        "BHSD BHSD BHSD BHSD",
    ),
    "keep by Where": (
        PLAIN,
        """%kt
        %window
        least = Constant <value = float {-1e9}> ()
        s1 = MatMul (q, kt)
        s2 = Where (w, s1, least)
        p = Softmax (s2)
        out = MatMul (p, v)""",
        "BHSD BHSD BHSD BHSD",
    ),
    "drop by Where with a spread fill": (
        PLAIN,
        """%kt
        %window
        least = Constant <value = float[1] {-1e9}> ()
        s1 = MatMul (q, kt)
        shape = Shape (s1)
        spread = Expand (least, shape)
        not_w = Not (w)
        s2 = Where (not_w, spread, s1)
        p = Softmax (s2)
        out = MatMul (p, v)""",
        "BHSD BHSD BHSD BHSD",
    ),
    "softcap below the mask": (
        PLAIN,
        """%kt
        %window
        %added
        cap = Constant <value = float {3.0}> ()
        s1 = MatMul (q, kt)
        s2 = Div (s1, cap)
        s3 = Tanh (s2)
        s4 = Mul (s3, cap)
        s5 = Add (s4, added)
        p = Softmax (s5)
        out = MatMul (p, v)""",
        "BHSD BHSD BHSD BHSD",
    ),
    "softcap of scaled scores": (
        PLAIN,
        """%kt
        %scale
        cap = Constant <value = float {-2.0}> ()
        s1 = MatMul (q, kt)
        s2 = Mul (s1, scale)
        s3 = Div (s2, cap)
        s4 = Tanh (s3)
        s5 = Mul (s4, cap)
        p = Softmax (s5)
        out = MatMul (p, v)""",
        "BHSD BHSD BHSD BHSD",
    ),
    "NaN guard and Dropout": (
        PLAIN,
        """%kt
        %window
        %added
        s1 = MatMul (q, kt)
        s2 = Add (s1, added)
        p1 = Softmax (s2)
        nan = IsNaN (p1)
        p2 = Where (nan, nothing, p1)
        p = Dropout (p2)
        out = MatMul (p, v)""",
        "BHSD BHSD BHSD BHSD",
    ),
    "Dropouts of inference, with inputs, and of training that drops nothing": (
        PLAIN + ", float ratio, bool training",
        """%kt
        %window
        %added
        off32 = Constant <value = int32 {0}> ()
        off = Cast <to = 9> (off32)
        null = Constant <value = float {0.0}> ()
        s1 = MatMul (q, kt)
        s2 = Add (s1, added)
        s3 = Dropout (s2, ratio, off)
        p1 = Softmax (s3)
        p2 = Dropout (p1, , )
        p = Dropout (p2, null, training)
        out = MatMul (p, v)""",
        "BHSD BHSD BHSD BHSD",
    ),
    "rows shifted by their maximum": (
        PLAIN,
        """%kt
        %window
        %added
        s1 = MatMul (q, kt)
        s2 = Add (s1, added)
        end = Constant <value = int64[1] {-1}> ()
        most = ReduceMax <keepdims = 1> (s2, end)
        s3 = Sub (s2, most)
        p = Softmax (s3)
        out = MatMul (p, v)""",
        "BHSD BHSD BHSD BHSD",
    ),
    "grouped heads by Unsqueeze, Expand, Reshape": (
        "float[B,4,S,8] q, float[B,2,S,8] k0, float[B,2,S,8] v0",
        """
        axis = Constant <value = int64[1] {2}> ()
        batch = Shape <start = 0, end = 1> (k0)
        length = Shape <start = 2, end = 3> (k0)
        two1 = Constant <value = int64[1] {2}> ()
        eight = Constant <value = int64[1] {8}> ()
        four = Constant <value = int64[1] {4}> ()
        wide = Concat <axis = 0> (batch, two1, two1, length, eight)
        narrow = Concat <axis = 0> (batch, four, length, eight)
        k1 = Unsqueeze (k0, axis)
        k2 = Expand (k1, wide)
        k = Reshape (k2, narrow)
        v1 = Unsqueeze (v0, axis)
        v2 = Expand (v1, wide)
        v = Reshape (v2, narrow)
        %kt
        %window
        %added
        s1 = MatMul (q, kt)
        s2 = Add (s1, added)
        p = Softmax (s2)
        out = MatMul (p, v)""",
        "BHSD BHSD BHSD BHSD",
    ),
    "one key head for all by broadcasting": (
        "float[B,4,S,8] q, float[B,1,S,8] k, float[B,1,S,8] v",
        """%kt
        s1 = MatMul (q, kt)
        p = Softmax (s1)
        o = MatMul (p, v)
        %merge
        """,
        "BHSD BHSD BHSD BSN",
    ),
    "3-D matrices": (
        PACKED,
        """%heads
        %scale
        %window
        %added
        three = Constant <value = int64[3] {-1, 0, 8}> ()
        sq = Shape <start = 1, end = 2> (x)
        m1 = Constant <value = int64[1] {-1}> ()
        eight = Constant <value = int64[1] {8}> ()
        four = Constant <value = int64[1] {4}> ()
        to3 = Concat <axis = 0> (m1, sq, eight)
        batch = Shape <start = 0, end = 1> (x)
        to4 = Concat <axis = 0> (batch, four, sq, eight)
        qs = Mul (q, scale)
        q3 = Reshape (qs, to3)
        k3 = Reshape (k, to3)
        v3 = Reshape (v, to3)
        k3t = Transpose <perm = [0, 2, 1]> (k3)
        s1 = MatMul (q3, k3t)
        s2 = Add (s1, added)
        p = Softmax (s2)
        o3 = MatMul (p, v3)
        o = Reshape (o3, to4)
        %merge
        """,
        "BSN BSN BSN BSN",
    ),
    "4-D mask between 3-D matrices": (
        PACKED + ", int64[B,S] am",
        """%heads
        %scale
        %window
        m1 = Constant <value = int64[1] {-1}> ()
        eight = Constant <value = int64[1] {8}> ()
        four = Constant <value = int64[1] {4}> ()
        sq = Shape <start = 1, end = 2> (x)
        to3 = Concat <axis = 0> (m1, sq, eight)
        batch = Shape <start = 0, end = 1> (x)
        to4 = Concat <axis = 0> (batch, four, sq, eight)
        scores4 = Concat <axis = 0> (batch, four, sq, sq)
        scores3 = Concat <axis = 0> (m1, sq, sq)
        q3 = Reshape (q, to3)
        k3 = Reshape (k, to3)
        v3 = Reshape (v, to3)
        k3t = Transpose <perm = [0, 2, 1]> (k3)
        s1 = MatMul (q3, k3t)
        s2 = Reshape (s1, scores4)
        axes12 = Constant <value = int64[2] {1, 2}> ()
        am4 = Unsqueeze (am, axes12)
        amb = Cast <to = 9> (am4)
        both = And (amb, w)
        nothing = Constant <value = float {0.0}> ()
        least = Constant <value = float {-3.4028234663852886e38}> ()
        added = Where (both, nothing, least)
        s3 = Add (s2, added)
        s4 = Max (s3, least)
        s5 = Reshape (s4, scores3)
        p = Softmax (s5)
        o3 = MatMul (p, v3)
        o = Reshape (o3, to4)
        %merge
        """,
        "BSN BSN BSN BSN",
    ),
    "past keys": (
        "float[B,4,S,8] q, float[B,4,P,8] pk, float[B,4,S,8] nk, float[B,4,P,8] pv, float[B,4,S,8] nv",
        """
        k = Concat <axis = 2> (pk, nk)
        v = Concat <axis = 2> (pv, nv)
        %kt
        %window
        %added
        s1 = MatMul (q, kt)
        s2 = Add (s1, added)
        p = Softmax (s2)
        out = MatMul (p, v)""",
        "BHSD BHSD BHSD BHSD",
    ),
    "other keys": (
        "float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v, int64[B,T] am",
        """%kt
        axes12 = Constant <value = int64[2] {1, 2}> ()
        am4 = Unsqueeze (am, axes12)
        amf = Cast <to = 1> (am4)
        one = Constant <value = float {1.0}> ()
        hidden = Sub (one, amf)
        large = Constant <value = float {-10000.0}> ()
        added = Mul (hidden, large)
        s1 = MatMul (q, kt)
        s2 = Add (s1, added)
        p = Softmax (s2)
        out = MatMul (p, v)""",
        "BHSD BHSD BHSD BHSD",
    ),
    "bias from data and Where": (
        PLAIN + ", float[1,4,S,S] bias",
        """%kt
        %window
        half = Constant <value = float {0.5}> ()
        least = Constant <value = float {-inf}> ()
        s1 = MatMul (q, kt)
        s2 = Add (bias, s1)
        s3 = Mul (s2, half)
        s4 = Where (w, s3, least)
        p = Softmax (s4)
        out = MatMul (p, v)""",
        "BHSD BHSD BHSD BHSD",
    ),
    "subtracted bias and mask": (
        PLAIN + ", float[S,S] bias",
        """%kt
        %window
        %added
        s1 = MatMul (q, kt)
        s2 = Sub (s1, bias)
        s3 = Add (s2, added)
        p = Softmax (s3)
        out = MatMul (p, v)""",
        "BHSD BHSD BHSD BHSD",
    ),
    "FusedMatMul with a transposed key": (
        PLAIN,
        """%window
        %added
        s1 = com.microsoft.FusedMatMul <alpha = 0.4, transB = 1> (q, k)
        s2 = Add (s1, added)
        p = Softmax (s2)
        out = MatMul (p, v)""",
        "BHSD BHSD BHSD BHSD",
    ),
    "FusedMatMul with a transposed query and value, channels first": (
        "float[B,4,8,S] x, float[B,4,8,S] kt, float[B,4,8,S] y",
        """
        s1 = com.microsoft.FusedMatMul <alpha = 0.4, transA = 1> (x, kt)
        p = Softmax (s1)
        out = com.microsoft.FusedMatMul <transB = 1> (p, y)""",
        "BHSD BHSD BHSD BHSD",
    ),
    "packed query, key and value, split": (
        "float[B,S,96] x",
        """
        split = Constant <value = int64[5] {0, 0, 3, 4, 8}> ()
        x5 = Reshape (x, split)
        q5, k5, v5 = Split <axis = 2, num_outputs = 3> (x5)
        two1 = Constant <value = int64[1] {2}> ()
        q4 = Squeeze (q5, two1)
        k4 = Squeeze (k5, two1)
        v4 = Squeeze (v5, two1)
        q = Transpose <perm = [0, 2, 1, 3]> (q4)
        kt = Transpose <perm = [0, 2, 3, 1]> (k4)
        v = Transpose <perm = [0, 2, 1, 3]> (v4)
        s1 = MatMul (q, kt)
        p = Softmax (s1)
        o = MatMul (p, v)
        %merge
        """,
        "BSHD BSHD BSHD BSN",
    ),
}


def _sizes(inputs: str) -> tuple[dict[str, int], ...]:
    return PAST if "P," in inputs or "T," in inputs else SIZES


@pytest.mark.parametrize("name", FORMS)
def test_form_is_found_and_replaced(name: str) -> None:
    inputs, body, layouts = FORMS[name]
    graph = model(inputs, "float[a,b,c] out" if "merge" in body else "float[a,b,c,d] out", body)
    site = only_site(graph)
    found = [o.layout.value for o in (site.query, site.key, site.value)] + [site.output_layout.value]
    assert " ".join(found) == layouts
    assert (site.num_heads, site.head_size, site.value_head_size) == (4, 8, 8)
    optimized = assert_equivalent(graph, *_sizes(inputs))
    assert not any(n.op_type in ("Softmax", "MatMul", "FusedMatMul", "Where") for n in optimized.graph.node)


@pytest.mark.parametrize("opset", [13, 14, 17, 18, 20, 21])
def test_function_body_in_every_opset(opset: int) -> None:
    inputs, body, _ = FORMS["packed, scaled, masked"]
    optimized = assert_equivalent(model(inputs, "float[a,b,c] out", body, opset), *SIZES)
    assert {(e.domain, e.version) for e in optimized.functions[0].opset_import} == {("", opset)}


def test_details_of_terms() -> None:
    inputs, body, _ = FORMS["bias from data and Where"]
    site = only_site(model(inputs, "float[a,b,c,d] out", body))
    assert [(t.kind, t.tensor, t.scale) for t in site.terms] == [(TermKind.ADD, "bias", 0.5), (TermKind.KEEP, "w", 1.0)]
    assert site.scale == 0.5
    inputs, body, _ = FORMS["softcap of scaled scores"]
    site = only_site(model(inputs, "float[a,b,c,d] out", body))
    assert site.softcap == 2.0
    assert site.scale == pytest.approx(0.35)
    inputs, body, _ = FORMS["key transposed at once, scale split, mask first in the sum"]
    site = only_site(model(inputs, "float[a,b,c] out", body))
    assert site.scale == pytest.approx(0.35**2)
    assert site.output_layout is Layout.BSN
    inputs, body, _ = FORMS["past keys"]
    assert only_site(model(inputs, "float[a,b,c,d] out", body)).query_offset == 1


def test_masks_that_are_lifted() -> None:
    expected = {
        "packed, scaled, masked": "k <= q and q - k <= 4",
        "keep by Where": "k <= q and q - k <= 4",
        "past keys": "k <= q and q - k <= 4",
        "other keys": "pad[b, k]",
        "4-D mask between 3-D matrices": "k <= q and q - k <= 4 and pad[b, k]",
    }
    for name, mask in expected.items():
        inputs, body, _ = FORMS[name]
        _, (found,) = rewrite(model(inputs, "float out", body))
        assert found.mask.expression.text == mask, name


HALF = """
      %kt
      %window
      s1 = MatMul (q, kt)
      nothing = Constant <value = float {0.0}> ()
      least = Constant <value = float {-inf}> ()
      added32 = Where (w, nothing, least)
      added = Cast <to = 10> (added32)
      s2 = Add (s1, added)
      s3 = Cast <to = 1> (s2)
      p1 = Softmax (s3)
      p = Cast <to = 10> (p1)
      out = MatMul (p, v)"""


def test_half_precision_with_softmax_in_single() -> None:
    graph = model(PLAIN.replace("float", "float16"), "float16[a,b,c,d] out", HALF)
    assert only_site(graph).dtype == 10
    assert_equivalent(graph, *SIZES, tolerance=4e-3)


def test_half_precision_operands_of_attention_in_single() -> None:
    body = """
      k32 = Cast <to = 1> (k)
      q32 = Cast <to = 1> (q)
      v32 = Cast <to = 1> (v)
      kt = Transpose <perm = [0, 1, 3, 2]> (k32)
      s1 = MatMul (q32, kt)
      p = Softmax (s1)
      o32 = MatMul (p, v32)
      out = Cast <to = 10> (o32)"""
    graph = model(PLAIN.replace("float", "float16"), "float16[a,b,c,d] out", body)
    optimized = assert_equivalent(graph, *SIZES, tolerance=4e-3)
    assert [n.op_type for n in optimized.graph.node] == ["StofAttention"]
    single = model(PLAIN.replace("float", "float16"), "float[a,b,c,d] o32", body)
    assert only_site(single).dtype == 1
    assert_equivalent(single, *SIZES, tolerance=4e-3)
