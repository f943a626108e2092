# SPDX-License-Identifier: Apache-2.0
"""Swin's shifted windows on images of any height and width: found, with masks that the graph makes of these sizes."""

from __future__ import annotations

import numpy as np
import pytest
from attention_forms import model, rewrite, run

HEAD = """
    zero = Constant <value = int64 {0}> ()
    one = Constant <value = int64 {1}> ()
    at0 = Constant <value = int64[1] {0}> ()
    at1 = Constant <value = int64[1] {1}> ()
    at2 = Constant <value = int64[1] {2}> ()
    at3 = Constant <value = int64[1] {3}> ()
    side = Constant <value = int64[1] {4}> ()
    area = Constant <value = int64[1] {16}> ()
    heads = Constant <value = int64[1] {4}> ()
    channels = Constant <value = int64[1] {32}> ()
    rest = Constant <value = int64[1] {-1}> ()
    size = Shape (x)
    B = Slice (size, at0, at1)
    h0 = Slice (size, at1, at2)
    w0 = Slice (size, at2, at3)
"""
# An image is padded to whole windows, or is taken to consist of them.
PADDED = """
    over_h = Mod (h0, side)
    under_h = Sub (side, over_h)
    more_h = Mod (under_h, side)
    over_w = Mod (w0, side)
    under_w = Sub (side, over_w)
    more_w = Mod (under_w, side)
    before = Constant <value = int64[5] {0, 0, 0, 0, 0}> ()
    pads = Concat <axis = 0> (before, more_h, more_w, at0)
    image = Pad (x, pads)
    h = Add (h0, more_h)
    w = Add (w0, more_w)
"""
WHOLE = "image = Identity (x)\nh = Identity (h0)\nw = Identity (w0)\n"
ROLLED = """
    end = Constant <value = int64[1] {9223372036854775807}> ()
    lower = Slice (image, at2, end, at1)
    upper = Slice (image, at0, at2, at1)
    once = Concat <axis = 1> (lower, upper)
    right = Slice (once, at2, end, at2)
    left = Slice (once, at0, at2, at2)
    rolled = Concat <axis = 2> (right, left)
"""
WINDOWS = """
    down = Div (h, side)
    across = Div (w, side)
    six = Concat <axis = 0> (B, down, side, across, side, channels)
    x6 = Reshape (rolled, six)
    x6t = Transpose <perm = [0, 1, 3, 2, 4, 5]> (x6)
    three = Concat <axis = 0> (rest, area, channels)
    y = Reshape (x6t, three)
    split = Constant <value = int64[4] {-1, 16, 4, 8}> ()
    y4 = Reshape (y, split)
    q = Transpose <perm = [0, 2, 1, 3]> (y4)
    kt = Transpose <perm = [0, 2, 3, 1]> (y4)
    s1 = MatMul (q, kt)
"""
# The region of each pixel: 0 to 2 by rows and by columns, in one number.
BY_RANGES = """
    hn = Squeeze (h, at0)
    wn = Squeeze (w, at0)
    i = Range (zero, hn, one)
    j = Range (zero, wn, one)
    h4 = Sub (h, side)
    h2 = Sub (h, at2)
    w4 = Sub (w, side)
    w2 = Sub (w, at2)
    c1 = GreaterOrEqual (i, h4)
    c2 = GreaterOrEqual (i, h2)
    c3 = GreaterOrEqual (j, w4)
    c4 = GreaterOrEqual (j, w2)
    n1 = Cast <to = 7> (c1)
    n2 = Cast <to = 7> (c2)
    n3 = Cast <to = 7> (c3)
    n4 = Cast <to = 7> (c4)
    by_row = Add (n1, n2)
    by_column = Add (n3, n4)
    tripled = Mul (by_row, at3)
    column = Unsqueeze (tripled, at1)
    regions = Add (column, by_column)
"""
# The same for the rows alone, as a stored image that is written to.
BY_SCATTER = """
    plane = Concat <axis = 0> (h, w)
    blank = ConstantOfShape <value = int64[1] {0}> (plane)
    hn = Squeeze (h, at0)
    i = Range (zero, hn, one)
    h4 = Sub (h, side)
    h4n = Squeeze (h4, at0)
    last = Range (h4n, hn, one)
    where = Unsqueeze (last, at1)
    strip = Concat <axis = 0> (side, w)
    ones = ConstantOfShape <value = int64[1] {1}> (strip)
    regions = ScatterND (blank, where, ones)
"""
MASK = """
    four = Concat <axis = 0> (down, side, across, side)
    r4 = Reshape (regions, four)
    r4t = Transpose <perm = [0, 2, 1, 3]> (r4)
    two = Concat <axis = 0> (rest, area)
    r = Reshape (r4t, two)
    r1 = Unsqueeze (r, at1)
    r2 = Unsqueeze (r, at2)
    apart = Sub (r1, r2)
    same = Equal (apart, zero)
    nothing = Constant <value = float {0.0}> ()
    fill = Constant <value = float {-100.0}> ()
    m3 = Where (same, nothing, fill)
    m4 = Unsqueeze (m3, at1)
    m = Unsqueeze (m4, at0)
"""
# The number of windows of an image comes from its sides, or from the mask.
BY_SIDES = "count = Mul (down, across)\nfive = Concat <axis = 0> (B, count, heads, area, area)\n"
BY_MASK = (
    "of_mask = Shape (m3)\ncount = Slice (of_mask, at0, at1)\nof_scores = Shape (s1)\nall = Slice (of_scores, at0, at1)\n"
    "images = Div (all, count)\nfive = Concat <axis = 0> (images, count, heads, area, area)\n"
)
ADDED = """
    s5 = Reshape (s1, five)
    s6 = Add (s5, m)
    back = Concat <axis = 0> (rest, heads, area, area)
    s = Reshape (s6, back)
"""
PLAIN = "s = Identity (s1)\n"
TAIL = """
    p = Softmax (s)
    v = Transpose <perm = [0, 2, 1, 3]> (y4)
    o = MatMul (p, v)
    ot = Transpose <perm = [0, 2, 1, 3]> (o)
    o3 = Reshape (ot, three)
    last6 = Concat <axis = 0> (B, down, across, side, side, channels)
    o6 = Reshape (o3, last6)
    o6t = Transpose <perm = [0, 1, 3, 2, 4, 5]> (o6)
    whole = Concat <axis = 0> (B, h, w, channels)
    out = Reshape (o6t, whole)
"""

# name: (body, whether images of any size run, the terms that stay a bias)
CASES = {
    "windows without a shift": (PADDED + "rolled = Identity (image)\n" + WINDOWS + PLAIN, True, []),
    "shifted, padded": (PADDED + ROLLED + WINDOWS + BY_RANGES + MASK + BY_SIDES + ADDED, True, ["m"]),
    "shifted, of whole windows": (WHOLE + ROLLED + WINDOWS + BY_RANGES + MASK + BY_SIDES + ADDED, False, ["m"]),
    "images counted by the mask": (PADDED + ROLLED + WINDOWS + BY_RANGES + MASK + BY_MASK + ADDED, True, ["m"]),
    "regions written by ScatterND": (PADDED + ROLLED + WINDOWS + BY_SCATTER + MASK + BY_SIDES + ADDED, True, ["m"]),
    "a fill that forbids": (
        PADDED + ROLLED + WINDOWS + BY_RANGES + MASK.replace("-100.0", "-10000.0") + BY_MASK + ADDED,
        True,
        ["m"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_windows_of_images_of_any_size_are_replaced(name: str) -> None:
    body, any_size, biases = CASES[name]
    graph = model("float[B,H,W,32] x", "float[a,b,c,d] out", HEAD + body + TAIL)
    result, (made,) = rewrite(graph)
    assert [t.tensor for t in made.mask.bias] == biases
    assert (made.site.num_heads, made.site.head_size) == (4, 8)
    rng = np.random.default_rng(0)
    for sizes in ((2, 8, 12), (1, 16, 4), *([(3, 9, 14)] if any_size else [])):
        feed = {"x": rng.standard_normal((*sizes, 32)).astype(np.float32)}
        for library in (False, True):
            np.testing.assert_allclose(run(result, feed, library=library)[0], run(graph, feed)[0], atol=3e-6)
