# SPDX-License-Identifier: Apache-2.0
"""Heads in two axes: queries [B, G, R, S, D] and keys [B, G, 1, T, D], grouped queries without repeated keys."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from attention_forms import assert_equivalent, model, only_site, reason, rewrite

import stof
from stof.mask.site import Layout

D = 8
SIZES = ({"B": 2, "S": 11, "T": 17}, {"B": 1, "S": 1, "T": 5}, {"B": 3, "S": 9, "T": 9})

# Of queries float[B, .., S, ..] and keys, how many groups and heads of each there are.
QUERIES = {
    "packed": (
        "float[B,S,{N}] x",
        "qs = Constant <value = int64[5] {{0, 0, {G}, {R}, 8}}> ()\nq5 = Reshape (x, qs)\n"
        "q = Transpose <perm = [0, 2, 3, 1, 4]> (q5)\n",
    ),
    "heads": (
        "float[B,{H},S,8] x",
        "qs = Constant <value = int64[5] {{0, {G}, {R}, -1, 8}}> ()\nq = Reshape (x, qs)\n",
    ),
    "apart": ("float[B,{G},{R},S,8] q", ""),
    "rows first": ("float[B,S,{G},{R},8] x", "q = Transpose <perm = [0, 2, 3, 1, 4]> (x)\n"),
    "other order": (
        "float[B,S,{N}] x",
        "qs = Constant <value = int64[5] {{0, 0, {R}, {G}, 8}}> ()\nq5 = Reshape (x, qs)\n"
        "q = Transpose <perm = [0, 3, 2, 1, 4]> (q5)\n",
    ),
}
KEYS = {
    "packed": (
        "float[B,T,{M}] y, float[B,T,{M}] z",
        "ks = Constant <value = int64[4] {{0, 0, {G}, 8}}> ()\ny4 = Reshape (y, ks)\nz4 = Reshape (z, ks)\n"
        "k4 = Transpose <perm = [0, 2, 3, 1]> (y4)\nv4 = Transpose <perm = [0, 2, 1, 3]> (z4)\n"
        "kt = Unsqueeze (k4, two1)\nv = Unsqueeze (v4, two1)\n",
    ),
    "cache": (
        "float[B,{G},T,8] y, float[B,{G},T,8] z",
        "k5 = Unsqueeze (y, two1)\nv = Unsqueeze (z, two1)\nkt = Transpose <perm = [0, 1, 2, 4, 3]> (k5)\n",
    ),
    "apart": ("float[B,{G},1,T,8] y, float[B,{G},1,T,8] v", "kt = Transpose <perm = [0, 1, 2, 4, 3]> (y)\n"),
    "rows first": (
        "float[B,T,{G},1,8] y, float[B,T,{G},1,8] z",
        "kt = Transpose <perm = [0, 2, 3, 4, 1]> (y)\nv = Transpose <perm = [0, 2, 3, 1, 4]> (z)\n",
    ),
    "expanded": (
        "float[B,{G},T,8] y, float[B,{G},T,8] z",
        "k5 = Unsqueeze (y, two1)\nv5 = Unsqueeze (z, two1)\nwide = Constant <value = int64[5] {{1, 1, {R}, 1, 1}}> ()\n"
        "k6 = Expand (k5, wide)\nv = Expand (v5, wide)\nkt = Transpose <perm = [0, 1, 2, 4, 3]> (k6)\n",
    ),
}
RESULTS = {
    "apart": ("float[a,b,c,d,e] out", "out = Identity (o)\n", Layout.BHSD),
    "rows first": ("float[a,b,c,d,e] out", "out = Transpose <perm = [0, 3, 1, 2, 4]> (o)\n", Layout.BSHD),
    "heads": (
        "float[a,b,c,d] out",
        "os = Constant <value = int64[4] {{0, {H}, -1, 8}}> ()\nout = Reshape (o, os)\n",
        Layout.BHSD,
    ),
    "packed": (
        "float[a,b,c] out",
        "o5 = Transpose <perm = [0, 3, 1, 2, 4]> (o)\nos = Constant <value = int64[3] {{0, 0, {N}}}> ()\n"
        "out = Reshape (o5, os)\n",
        Layout.BSN,
    ),
    "other order": (
        "float[a,b,c] out",
        "o5 = Transpose <perm = [0, 3, 2, 1, 4]> (o)\nos = Constant <value = int64[3] {{0, 0, {N}}}> ()\n"
        "out = Reshape (o5, os)\n",
        Layout.BHSD,
    ),
}
# A causal window of 5 for queries that are the last of the keys, and padding, as bool over five axes.
POSITIONS = """
  three = Constant <value = int64 {{3}}> ()
  four = Constant <value = int64 {{4}}> ()
  zero = Constant <value = int64 {{0}}> ()
  one = Constant <value = int64 {{1}}> ()
  five = Constant <value = int64 {{5}}> ()
  last = Constant <value = int64[1] {{1}}> ()
  sizes = Shape (raw)
  s = Gather (sizes, three)
  t = Gather (sizes, four)
  past = Sub (t, s)
  rows0 = Range (zero, s, one)
  rows1 = Add (rows0, past)
  columns = Range (zero, t, one)
  rows = Unsqueeze (rows1, last)
  causal = LessOrEqual (columns, rows)
  distance = Sub (rows, columns)
  near = Less (distance, five)
  w = And (causal, near)
  inf = Constant <value = float {{-inf}}> ()
  low = Constant <value = float {{-1e9}}> ()
  none = Constant <value = float {{0.0}}> ()
"""
PAD = """
  present = Cast <to = 9> (pad)
  outer = Constant <value = int64[3] {{1, 2, 3}}> ()
  padded = Unsqueeze (present, outer)
"""
MASKS = {
    "none": ("", "masked = Identity (raw)\n"),
    "window": ("", POSITIONS + "masked = Where (w, raw, inf)\n"),
    "padding": (", int64[B,T] pad", POSITIONS + PAD + "both = And (w, padded)\nmasked = Where (both, raw, low)\n"),
    "added": (
        ", int64[B,T] pad",
        POSITIONS + PAD + "both = And (w, padded)\nadded = Where (both, none, low)\nmasked = Add (raw, added)\n",
    ),
    "bias of all": (", float[B,{G},{R},S,T] bias", "masked = Add (raw, bias)\n"),
    "bias of groups": (", float[{G},1,S,T] bias", POSITIONS + "w0 = Where (w, raw, inf)\nmasked = Add (w0, bias)\n"),
    "bias of each": (", float[{R},1,T] bias", "masked = Add (raw, bias)\n"),
    "bias by data": (
        ", bool[B,1,{R},S,T] kept",
        "low = Constant <value = float {{-1e9}}> ()\nmasked = Where (kept, raw, low)\n",
    ),
    "bias of rows": (", float[B,1,1,S,T] bias", "masked = Add (raw, bias)\n"),
}


def graph(sizes: tuple[int, int], query: str, key: str, result: str, mask: str = "none") -> onnx.ModelProto:
    groups, each = sizes
    given, result_type = (QUERIES[query], KEYS[key], MASKS[mask]), RESULTS[result][0]
    inputs = f"{given[0][0]}, {given[1][0]}{given[2][0]}"
    body = (
        "two1 = Constant <value = int64[1] {{2}}> ()\nscale = Constant <value = float {{0.35}}> ()\n"
        + given[0][1]
        + given[1][1]
        + "product = MatMul (q, kt)\nraw = Mul (product, scale)\n"
        + given[2][1]
        + "p = Softmax <axis = -1> (masked)\no = MatMul (p, v)\n"
        + RESULTS[result][1]
    )
    numbers = {"G": groups, "R": each, "H": groups * each, "N": groups * each * D, "M": groups * D}
    return model(inputs.format(**numbers), result_type, body.format(**numbers))


@pytest.mark.parametrize("sizes", [(2, 3), (1, 4), (3, 1)])
@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("key", KEYS)
def test_operands_of_groups(sizes: tuple[int, int], query: str, key: str) -> None:
    made = graph(sizes, query, key, "packed")
    site = only_site(made)
    assert (site.num_heads, site.kv_num_heads) == (sizes[0] * sizes[1], sizes[0])
    assert_equivalent(made, *SIZES)


@pytest.mark.parametrize("sizes", [(2, 3), (1, 4)])
@pytest.mark.parametrize("result", RESULTS)
def test_results_of_groups(sizes: tuple[int, int], result: str) -> None:
    made = graph(sizes, "packed", "cache", result)
    site = only_site(made)
    # With one group its axis may be anywhere: the heads are in order.
    assert site.output_layout is (Layout.BSN if (sizes[0], result) == (1, "other order") else RESULTS[result][2])
    assert_equivalent(made, *SIZES)


WINDOW = "S + k <= T + q and T + q <= S + k + 4"
EXPRESSIONS = {"window": WINDOW, "padding": f"{WINDOW} and pad[b, k]", "added": f"{WINDOW} and pad[b, k]"}


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (1, 4), (3, 1)])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", ["packed", "apart"])
def test_masks_of_groups(sizes: tuple[int, int], mask: str, layout: str) -> None:
    made = graph(sizes, layout, "cache", layout, mask)
    (found,) = rewrite(made)[1]
    assert found.mask.expression.text == (WINDOW if mask == "bias of groups" else EXPRESSIONS.get(mask, ""))
    assert bool(found.mask.bias) == mask.startswith("bias")
    assert_equivalent(made, *SIZES, tolerance=5e-6)


@pytest.mark.parametrize("of_each", [False, True])
def test_a_stored_mask_of_each_head(of_each: bool) -> None:
    """Of G groups of R heads, by group or by each head in a group: heads are counted group by group."""
    groups, each = 2, 3
    made = graph((groups, each), "packed", "cache", "packed", "window")
    where = next(n for n in made.graph.node if n.op_type == "Where")
    shape = (1, each, 1, 1) if of_each else (groups, 1, 1, 1)
    far = np.arange(2, 2 + max(shape), dtype=np.int64).reshape(shape)
    made.graph.initializer.append(onnx.numpy_helper.from_array(far, "far"))
    near = next(n for n in made.graph.node if n.output[0] == "near")
    near.input[1] = "far"
    (found,) = rewrite(made)[1]
    assert where.input[0] == "w"
    assert "h % 3" in found.mask.expression.text if of_each else "h // 3" in found.mask.expression.text
    assert_equivalent(made, *SIZES)


EINSUM = """
  product = Einsum <equation = "{0}"> (q, k)
  scale = Constant <value = float {{0.35}}> ()
  raw = Mul (product, scale)
  {2}
  p = Softmax <axis = -1> (masked)
  out = Einsum <equation = "{1}"> ({3})
"""
EINSUMS = {
    "positions first": ("bsgrd,btgd->bgrst", "bgrst,btgd->bsgrd", "B,S,{G},{R},8", "B,T,{G},8"),
    "heads first": ("bgrsd,bgtd->bgrst", "bgrst,bgtd->bgrsd", "B,{G},{R},S,8", "B,{G},T,8"),
    "other letters": ("xabjz, xyaz -> xabjy", "xabjy, xyae -> xjabe", "B,{G},{R},S,8", "B,T,{G},8"),
}


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (1, 4), (3, 1)])
@pytest.mark.parametrize("mask", ["none", "padding", "bias of all"])
@pytest.mark.parametrize("spelling", EINSUMS)
@pytest.mark.parametrize("swapped", [False, True])
def test_einsum_of_groups(sizes: tuple[int, int], mask: str, spelling: str, swapped: bool) -> None:
    scores, values, query, key = EINSUMS[spelling]
    operands = "p, v"
    if swapped:
        left, right = values.split("->")[0].split(",")
        values, operands = f"{right},{left}->{values.split('->')[1]}", "v, p"
    numbers = {"G": sizes[0], "R": sizes[1]}
    inputs = f"float[{query}] q, float[{key}] k, float[{key}] v{MASKS[mask][0]}".format(**numbers)
    body = EINSUM.format(scores, values, MASKS[mask][1].format(), operands)
    made = model(inputs, "float[a,b,c,d,e] out", body)
    site = only_site(made)
    assert (site.num_heads, site.kv_num_heads) == (sizes[0] * sizes[1], sizes[0])
    assert rewrite(made)[1][0].mask.expression.text == EXPRESSIONS.get(mask, "")
    assert_equivalent(made, *SIZES)


def test_groups_only_in_the_products() -> None:
    """Masks and softmax may see the scores as [B, H, S, T], between products of five axes."""
    made = graph((2, 3), "packed", "cache", "packed")
    sizes = onnx.parser.parse_graph(
        """g (float[B] a) => () {
          sh = Shape (raw)
          b = Shape <start = 0, end = 1> (raw)
          rest = Shape <start = 3, end = 5> (raw)
          six = Constant <value = int64[1] {6}> ()
          flat = Concat <axis = 0> (b, six, rest)
          masked = Reshape (raw, flat)
          weights = Softmax <axis = -1> (masked)
          p = Reshape (weights, sh)
        }"""
    )
    nodes = [n for n in made.graph.node if n.output[0] not in ("masked", "p")]
    place = next(i for i, n in enumerate(nodes) if n.output[0] == "raw") + 1
    nodes[place:place] = list(sizes.node)
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    site = only_site(made)
    assert (site.num_heads, site.kv_num_heads) == (6, 2)
    assert_equivalent(made, *SIZES)


@pytest.mark.parametrize("query", ["rows first", "packed"])
@pytest.mark.parametrize("result", ["apart", "rows first", "heads"])
@pytest.mark.parametrize("mask", ["padding", "bias of all", "bias of groups", "bias by data"])
def test_groups_are_verified(query: str, result: str, mask: str, tmp_path: Path) -> None:
    """The whole optimizer: each site's comparison with fp64, and the model's with the original."""
    path = tmp_path / "model.onnx"
    onnx.save(graph((2, 3), query, "cache", result, mask), str(path))
    report = stof.optimize(path, tmp_path / "out.onnx")
    (site,) = report.sites
    assert site.replaced
    assert report.verification is not None


def plain(query: str, key: str, value: str, between: str = "p = Softmax <axis = -1> (raw)\n") -> onnx.ModelProto:
    inputs = f"float[{query}] q, float[{key}] k, float[{value}] v"
    return model(
        inputs,
        "float[a,b,c,d,e] out",
        f"kt = Transpose <perm = [0, 1, 2, 4, 3]> (k)\nraw = MatMul (q, kt)\n{between}out = MatMul (p, v)",
    )


@pytest.mark.parametrize(
    "made",
    [
        plain("B,2,3,S,8", "B,1,3,T,8", "B,1,3,T,8"),  # heads of a key in turn, not side by side
        plain("B,2,2,S,8", "B,1,2,T,8", "B,1,2,T,8"),
        plain("B,2,3,S,8", "B,2,1,T,8", "B,1,3,T,8"),
        plain("B,2,3,S,8", "B,2,1,T,8", "B,2,3,T,8"),  # a value for each head
        plain("B,2,3,S,8", "B,2,1,T,8", "B,1,1,T,8"),
        plain("B,1,3,S,8", "B,2,1,T,8", "B,2,1,T,8"),  # queries are repeated
        plain("B,2,1,S,8", "B,2,3,T,8", "B,2,3,T,8"),
        plain("B,G,3,S,8", "B,G,1,T,8", "1,G,1,T,8"),
    ],
)
def test_no_groups(made: onnx.ModelProto) -> None:
    assert reason(made)


@pytest.mark.parametrize(
    "between",
    [
        # Other groups where the mask or the values are joined: the same elements, but of other heads.
        "n = Constant <value = int64[5] {0, 3, 2, 0, 0}> ()\nr = Reshape (raw, n)\np = Softmax <axis = -1> (r)\n",
        "n = Constant <value = int64[5] {0, 3, 2, 0, 0}> ()\nw = Softmax <axis = -1> (raw)\np = Reshape (w, n)\n",
    ],
)
def test_other_groups_in_between(between: str) -> None:
    assert reason(plain("B,2,3,S,8", "B,2,1,T,8", "B,3,1,T,8", between))
