# SPDX-License-Identifier: Apache-2.0
"""Masks and scales that architectures spell in ways of their own: found by the whole optimizer, equal after it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from attention_forms import PLAIN, assert_equivalent, feeds, model, only_site, reason, rewrite, run

import stof
from stof.errors import UnsupportedError

HEAD = "%kt\ns1 = MatMul (q, kt)\n"
TAIL = "p = Softmax <axis = -1> (masked)\nout = MatMul (p, v)"
SIZES = ({"B": 2, "S": 19}, {"B": 1, "S": 3})
OUT = "float[a,b,c,d] out"
# The mask w of a causal window of 5 as ones and zeros, and what is added where it is zero.
SWITCH = """%window
    switch = Cast <to = 1> (w)
    unit = Constant <value = float {1.0}> ()
    low = Constant <value = float {-10000.0}> ()
    off = Sub (unit, switch)
    added = Mul (off, low)
"""


@pytest.mark.parametrize("op", ["Mul", "Div"])
@pytest.mark.parametrize("shape", ["1,4,1,1", "4,1,1", "B,1,S,1"])
def test_scores_that_are_scaled_by_head_or_row(op: str, shape: str) -> None:
    body = HEAD + f"masked = {op} (s1, scale)\n" + TAIL
    graph = model(f"{PLAIN}, float[{shape}] scale", OUT, body)
    site = only_site(graph)
    assert site.query_factor == (op, "scale")
    optimized, _ = rewrite(graph)
    for seed, sizes in enumerate(SIZES):
        given = feeds(graph, sizes, seed)
        given["scale"] = np.abs(given["scale"]) + np.float32(0.5)
        (wanted,) = run(graph, given)
        for library in (False, True):
            assert np.abs(run(optimized, given, library=library)[0] - wanted).max() < 5e-6


@pytest.mark.parametrize("op", ["Mul", "Div"])
@pytest.mark.parametrize("scale", ["float", "float[1]", "float[1,1,1]"])
@pytest.mark.parametrize("of_keys", ["4", "4,1", "4,2", "1", None])
def test_scores_that_are_scaled_by_a_number_of_a_run(op: str, scale: str, of_keys: str | None) -> None:
    """A temperature, of scores of three axes, of four, and of five with heads or with a batch in two of them."""
    queries = {"4": "B,4,S,8", "4,1": "B,4,2,S,8", "4,2": "B,4,2,S,8", "1": "B,4,S,8", None: "B,S,8"}[of_keys]
    keys = queries if of_keys is None else f"B,{of_keys},T,8"
    keys = keys.replace("S", "T")
    rank = queries.count(",") + 1
    perm = ", ".join(map(str, (*range(rank - 2), rank - 1, rank - 2)))
    graph = model(
        f"float[{queries}] q, float[{keys}] k, float[{keys}] v, {scale} scale",
        f"float[{', '.join('abcde'[:rank])}] out",
        f"kt = Transpose <perm = [{perm}]> (k)\ns1 = MatMul (q, kt)\nmasked = {op} (s1, scale)\n{TAIL}",
    )
    assert only_site(graph).query_factor == (op, "scale")
    optimized, _ = rewrite(graph)
    for seed, sizes in enumerate(({"B": 2, "S": 9, "T": 14}, {"B": 1, "S": 3, "T": 2})):
        given = feeds(graph, sizes, seed)
        given["scale"] = np.full_like(given["scale"], (0.7, -1.3)[seed])
        (wanted,) = run(graph, given)
        for library in (False, True):
            assert np.abs(run(optimized, given, library=library)[0] - wanted).max() < 5e-6


@pytest.mark.parametrize("scale", ["float[1,4,1,1]", "float"])
def test_a_mask_before_such_a_scale_is_refused(scale: str) -> None:
    body = HEAD + "%window\n%added\ns2 = Add (s1, added)\nmasked = Mul (s2, scale)\n" + TAIL
    assert "masked or bounded before" in reason(model(f"{PLAIN}, {scale} scale", OUT, body))


def test_scores_that_are_multiplied_with_a_mask() -> None:
    body = HEAD + SWITCH + "s2 = Mul (s1, switch)\nmasked = Add (s2, added)\n" + TAIL
    graph = model(PLAIN, OUT, body)
    _, (found,) = rewrite(graph)
    assert found.mask.expression.text == "k <= q and q - k <= 4"
    assert_equivalent(graph, *SIZES)


def test_zeros_that_nothing_forbids_stay() -> None:
    alone = model(PLAIN, OUT, HEAD + SWITCH + "masked = Mul (s1, switch)\n" + TAIL)
    assert "the walk met the Mul node" in reason(alone)
    # What is added forbids less than the mask makes zero.
    body = HEAD + SWITCH + "later = Not (causal)\nsome = Cast <to = 1> (later)\npart = Mul (some, low)\n"
    other = model(PLAIN, OUT, body + "s2 = Mul (s1, switch)\nmasked = Add (s2, part)\n" + TAIL)
    with pytest.raises(UnsupportedError, match="nothing forbids all that it makes 0"):
        rewrite(other)


@pytest.mark.parametrize("shape", ["1,3,1,S,S", "3,1,S,S", "X,3,4,S,S", "X,1,1,1,S", "1,1,1,S,S"])
def test_masks_of_windows_in_five_axes(shape: str) -> None:
    body = """
        length = Shape <start = 3, end = 4> (q0)
        eight = Constant <value = int64[1] {8}> ()
        four = Constant <value = int64[2] {-1, 4}> ()
        sizes = Concat <axis = 0> (four, length, eight)
        q = Reshape (q0, sizes)
        k = Reshape (k0, sizes)
        v = Reshape (v0, sizes)
        %kt
        s1 = MatMul (q, kt)
        ahead = Constant <value = int64[3] {-1, 3, 4}> ()
        wide = Concat <axis = 0> (ahead, length, length)
        s5 = Reshape (s1, wide)
        s6 = Add (s5, mask)
        flat = Concat <axis = 0> (four, length, length)
        masked = Reshape (s6, flat)
        """
    inputs = "float[X,3,4,S,8] q0, float[X,3,4,S,8] k0, float[X,3,4,S,8] v0"
    graph = model(f"{inputs}, float[{shape}] mask", OUT, body + TAIL)
    assert [t.view is not None and t.view.splits(0) for t in only_site(graph).terms] == [True]
    optimized, _ = rewrite(graph)
    for seed, length in enumerate((11, 3)):
        given = feeds(graph, {"X": 2, "S": length}, seed)
        given["mask"][..., 0, -1] = -np.inf
        (wanted,) = run(graph, given)
        for library in (False, True):
            assert np.abs(run(optimized, given, library=library)[0] - wanted).max() < 5e-6


def test_a_result_in_another_order_of_axes() -> None:
    body = """%kt
        s1 = MatMul (q, kt)
        p = Softmax <axis = -1> (s1)
        out = Einsum <equation = "bhqk,bhkd->qbhd"> (p, v)"""
    graph = model(PLAIN, OUT, body)
    assert only_site(graph).output_perm == (2, 0, 1, 3)
    assert_equivalent(graph, *SIZES)


def _optimized(graph: onnx.ModelProto, folder: Path) -> tuple[stof.report.SiteReport, onnx.ModelProto]:
    path = folder / "model.onnx"
    onnx.save(graph, str(path))
    (site,) = stof.optimize(path, folder / "out.onnx").sites
    return site, onnx.load(str(folder / "out.onnx"))


def test_a_mask_that_is_added_to_a_bias_first(tmp_path: Path) -> None:
    body = HEAD + "%window\n%added\nboth = Add (bias, added)\nmasked = Add (s1, both)\n" + TAIL
    graph = model(PLAIN + ", float[1,4,S,S] bias", OUT, body)
    site, optimized = _optimized(graph, tmp_path)
    assert site.replaced
    assert site.mask == "k <= q and q - k <= 4"
    given = feeds(graph, SIZES[0])
    assert np.abs(run(optimized, given, library=True)[0] - run(graph, given)[0]).max() < 5e-6


def test_a_slice_that_counts_from_the_end_by_a_length(tmp_path: Path) -> None:
    body = (
        HEAD
        + """%window
        %added
        length = Shape <start = 2, end = 3> (q)
        back = Neg (length)
        far = Constant <value = int64[1] {9223372036854775807}> ()
        rowaxis = Constant <value = int64[1] {0}> ()
        mine = Slice (added, back, far, rowaxis)
        masked = Add (s1, mine)
        """
    )
    graph = model(PLAIN, OUT, body + TAIL)
    site, _ = _optimized(graph, tmp_path)
    assert site.mask == "k <= q and q - k <= 4"


DOCUMENTS = (
    HEAD
    + """
    zero1 = Constant <value = int64[1] {0}> ()
    one1 = Constant <value = int64[1] {1}> ()
    last1 = Constant <value = int64[1] {-1}> ()
    far = Constant <value = int64[1] {9223372036854775807}> ()
    one = Constant <value = int64 {1}> ()
    step = Constant <value = int64 {%step}> ()
    axis = Constant <value = int64 {-1}> ()
    first = Slice (position_ids, zero1, one1, one1)
    before = Sub (first, step)
    longer = Concat <axis = -1> (before, position_ids)
    now = Slice (longer, one1, far, one1)
    past = Slice (longer, zero1, last1, one1)
    change = Sub (now, past)
    same = Equal (change, step)
    begins = Not (same)
    begin = Cast <to = 7> (begins)
    document = CumSum <%sum> (begin, axis)
    ax13 = Constant <value = int64[2] {1, 3}> ()
    ax12 = Constant <value = int64[2] {1, 2}> ()
    dq = Unsqueeze (document, ax13)
    dk = Unsqueeze (document, ax12)
    pq = Unsqueeze (position_ids, ax13)
    pk = Unsqueeze (position_ids, ax12)
    together = Equal (dq, dk)
    earlier = %compare
    keep = And (together, earlier)
    nothing = Constant <value = float {0.0}> ()
    least = Constant <value = float {-inf}> ()
    added = Where (keep, nothing, least)
    masked = Add (s1, added)
    """
)


def documents(step: int = 1, total: str = "reverse = 0", compare: str = "LessOrEqual (pk, pq)") -> onnx.ModelProto:
    body = DOCUMENTS.replace("%step", str(step)).replace("%sum", total).replace("%compare", compare)
    return model(PLAIN + ", int64[B,S] position_ids", OUT, body + TAIL)


@pytest.mark.parametrize(
    ("step", "compare", "mask"),
    [
        (1, "LessOrEqual (pk, pq)", "k <= q and segment_k[b, k] == segment_q[b, q]"),
        (-1, "GreaterOrEqual (pk, pq)", "k <= q and segment_k[b, k] == segment_q[b, q]"),
        (2, "LessOrEqual (pk, pq)", "k <= q and segment_k[b, k] == segment_q[b, q]"),
    ],
)
def test_documents_kept_apart_by_positions(step: int, compare: str, mask: str, tmp_path: Path) -> None:
    graph = documents(step, compare=compare)
    site, optimized = _optimized(graph, tmp_path)
    assert site.mask == mask
    rng = np.random.default_rng(5)
    for drawn in (rng.integers(-2, 3, (2, 23)), np.cumsum(rng.choice([step, step, step, 5], (2, 23)), axis=1)):
        given = feeds(graph, {"B": 2, "S": 23})
        given["position_ids"] = drawn.astype(np.int64)
        assert np.abs(run(optimized, given, library=True)[0] - run(graph, given)[0]).max() < 5e-6


@pytest.mark.parametrize("total", ["reverse = 1", "exclusive = 1"])
def test_other_running_sums_say_nothing_of_order(total: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(documents(total=total), str(path))
    (site,) = stof.optimize(path, tmp_path / "out.onnx").sites
    assert "k <= q" not in site.mask


FIVE = "float[X,Y,S,4,8] q0, float[X,Y,S,4,8] k0, float[X,Y,S,4,8] v0"


@pytest.mark.parametrize("mask", ["", "1,1,4,S,S", "X,Y,1,1,S", "1,Y,1,S,S", "X,1,1,S,S"])
@pytest.mark.parametrize("einsum", [True, False])
def test_a_batch_in_two_axes(mask: str, einsum: bool) -> None:
    scores = (
        'raw = Einsum <equation = "...qhd,...khd->...hqk"> (q0, k0)\n'
        if einsum
        else "q = Transpose <perm = [0, 1, 3, 2, 4]> (q0)\nk = Transpose <perm = [0, 1, 3, 4, 2]> (k0)\nraw = MatMul (q, k)\n"
    )
    value = (
        'out = Einsum <equation = "...hqk,...khd->...qhd"> (p, v0)'
        if einsum
        else "v = Transpose <perm = [0, 1, 3, 2, 4]> (v0)\no = MatMul (p, v)\nout = Transpose <perm = [0, 1, 3, 2, 4]> (o)"
    )
    added = "masked = Add (raw, mask)\n" if mask else "masked = Identity (raw)\n"
    inputs = f"{FIVE}, float[{mask}] mask" if mask else FIVE
    graph = model(inputs, "float[a,b,c,d,e] out", scores + added + "p = Softmax <axis = -1> (masked)\n" + value)
    assert only_site(graph).output_joined
    optimized, _ = rewrite(graph)
    assert not any(n.op_type in ("Softmax", "MatMul", "Einsum") for n in optimized.graph.node)
    for seed, sizes in enumerate(({"X": 2, "Y": 3, "S": 11}, {"X": 1, "Y": 1, "S": 3})):
        given = feeds(graph, sizes, seed)
        if mask:
            given["mask"][..., 0] = -np.inf
        (wanted,) = run(graph, given)
        for library in (False, True):
            (found,) = run(optimized, given, library=library)
            assert found.shape == wanted.shape
            assert np.abs(found - wanted).max() < 5e-6


ZEROED = (
    HEAD
    + """axes = Constant <value = int64[2] {1, 2}> ()
    wide = Unsqueeze (am, axes)
    kept = Cast <to = 9> (wide)
    drop = Not (kept)
    other = Not (kept)
    nothing = Constant <value = float {0.0}> ()
    least = Constant <value = float {%fill}> ()
    masked = %mask
    p0 = Softmax <axis = -1> (masked)
    p = %again
    out = MatMul (p, v)"""
)


@pytest.mark.parametrize("fill", ["-3.4028234663852886e38", "-inf", "-10000.0"])
@pytest.mark.parametrize("mask", ["Where (drop, least, s1)", "Where (kept, s1, least)"])
@pytest.mark.parametrize(
    "again", ["Where (drop, nothing, p0)", "Where (other, nothing, p0)", "Where (kept, p0, nothing)"]
)
def test_weights_that_are_made_zero_once_more(fill: str, mask: str, again: str) -> None:
    body = ZEROED.replace("%fill", fill).replace("%mask", mask).replace("%again", again)
    graph = model(PLAIN + ", int64[B,S] am", OUT, body)
    assert only_site(graph).zeroed
    optimized, (found,) = rewrite(graph)
    assert found.mask.expression.text == "pad[b, k]"
    for padded in ((0, 9), (3, 17), (0, 17)):
        given = feeds(graph, {"B": 2, "S": 17})
        given["am"][0, slice(*padded)] = 0
        (wanted,) = run(graph, given)
        for library in (False, True):
            assert np.abs(run(optimized, given, library=library)[0] - wanted).max() < 2e-6
        assert padded != (0, 17) or not wanted[0].any()


def test_weights_that_another_mask_makes_zero_stay() -> None:
    again = "Where (w, p0, nothing)"
    body = "%window\n" + ZEROED.replace("%fill", "-inf").replace("%mask", "Where (drop, least, s1)").replace(
        "%again", again
    )
    with pytest.raises(UnsupportedError, match="the same mask before and after the softmax"):
        rewrite(model(PLAIN + ", int64[B,S] am", OUT, body))


@pytest.mark.parametrize("fill", ["-3.4028234663852886e38", "-inf", "-10000.0"])
def test_weights_that_data_of_pairs_makes_zero(fill: str) -> None:
    """The graph's mask stays a bias: -inf gives zeros as the graph does; one that is added does not, and nor do others."""
    body = ZEROED.replace("int64[2] {1, 2}", "int64[1] {1}").replace("%fill", fill)
    inputs = PLAIN + ", int64[B,S,S] am, int64[B,S,S] more"
    selected = body.replace("%mask", "Where (drop, least, s1)")
    graph = model(inputs, OUT, selected.replace("%again", "Where (drop, nothing, p0)"))
    optimized, (found,) = rewrite(graph)
    assert found.mask.expression.text == ""
    given = feeds(graph, {"B": 2, "S": 9})
    given["am"] = np.random.default_rng(0).integers(0, 2, (2, 9, 9))
    given["am"][0, 0] = 0
    (wanted,) = run(graph, given)
    assert not wanted[0, :, 0].any()
    for library in (False, True):
        assert np.abs(run(optimized, given, library=library)[0] - wanted).max() < 2e-6
    added = body.replace("%mask", "Add (s1, low)").replace("%again", "Where (drop, nothing, p0)")
    with pytest.raises(UnsupportedError, match="which stays a bias"):
        rewrite(model(inputs, OUT, added.replace("masked =", "low = Where (drop, least, nothing)\nmasked =")))
    others = "wide2 = Unsqueeze (more, axes)\nkept2 = Cast <to = 9> (wide2)\n"
    again = selected.replace("%again", "Where (kept2, p0, nothing)").replace("masked =", others + "masked =")
    with pytest.raises(UnsupportedError, match="no expression says whether"):
        rewrite(model(inputs, OUT, again))


# Length before batch, heads merged with the batch, as fairseq and torch's nn.MultiheadAttention have it.
MERGED = """
    length = Shape <start = 0, end = 1> (x)
    batch = Shape <start = 1, end = 2> (x)
    four = Constant <value = int64[1] {4}> ()
    eight = Constant <value = int64[1] {8}> ()
    one = Constant <value = int64[1] {1}> ()
    any = Constant <value = int64[1] {-1}> ()
    whole = Constant <value = int64[1] {32}> ()
    lanes = Mul (batch, four)
    split = Concat <axis = 0> (length, lanes, eight)
    qs = Reshape (x, split)
    ks = Reshape (y, split)
    vs = Reshape (z, split)
    q = Transpose <perm = [1, 0, 2]> (qs)
    kt = Transpose <perm = [1, 2, 0]> (ks)
    v = Transpose <perm = [1, 0, 2]> (vs)
    s1 = MatMul (q, kt)
    axes = Constant <value = int64[2] {1, 2}> ()
    kept = Cast <to = 9> (am)
    wide = Unsqueeze (kept, axes)
    drop = Not (wide)
    nothing = Constant <value = float {0.0}> ()
    least = Constant <value = float {-inf}> ()
    %mask
    p = Softmax <axis = -1> (masked)
    o = MatMul (p, v)
    os = Transpose <perm = [1, 0, 2]> (o)
    flat = Concat <axis = 0> (length, batch, whole)
    out = Reshape (os, flat)"""
MASKS = {
    "scores split": """parts = Concat <axis = 0> (batch, four, length, length)
    s4 = Reshape (s1, parts)
    s5 = Where (drop, least, s4)
    joined = Concat <axis = 0> (lanes, length, length)
    masked = Reshape (s5, joined)""",
    "mask merged": """added = Where (drop, least, nothing)
    spread = Concat <axis = 0> (batch, four, one, length)
    every = Expand (added, spread)
    joined = Concat <axis = 0> (lanes, one, length)
    lane = Reshape (every, joined)
    masked = Add (s1, lane)""",
}


@pytest.mark.parametrize("name", MASKS)
def test_heads_that_are_merged_with_the_batch(name: str) -> None:
    inputs = "float[S,B,32] x, float[S,B,32] y, float[S,B,32] z, int64[B,S] am"
    graph = model(inputs, "float[a,b,c] out", MERGED.replace("%mask", MASKS[name]))
    site = only_site(graph)
    assert site.num_heads == 4
    optimized, (found,) = rewrite(graph)
    assert found.mask.expression.text == "pad[b, k]"
    for seed, sizes in enumerate(({"B": 3, "S": 19}, {"B": 1, "S": 3})):
        given = feeds(graph, sizes, seed)
        (wanted,) = run(graph, given)
        for library in (False, True):
            assert np.abs(run(optimized, given, library=library)[0] - wanted).max() < 5e-6


@pytest.mark.parametrize("fill", ["-3.4028234663852886e38", "-inf", "-1e9", "-10000.0"])
@pytest.mark.parametrize("body", ["Where (given, s1, least)", "Where (other, least, s1)"])
@pytest.mark.parametrize("shape", ["B,1,S,S", "B,4,1,S", "1,1,S,S"])
def test_scores_that_an_input_selects(fill: str, body: str, shape: str) -> None:
    text = f"""other = Not (given)
        least = Constant <value = float {{{fill}}}> ()
        masked = {body}
        """
    graph = model(f"{PLAIN}, bool[{shape}] given", OUT, HEAD + text + TAIL)
    optimized, (found,) = rewrite(graph)
    assert [t.kind.value for t in found.mask.bias] == ["keep" if "given" in body else "drop"]
    for seed, sizes in enumerate(SIZES):
        given = feeds(graph, sizes, seed)
        given["given"] = np.random.default_rng(seed).random(given["given"].shape) < 0.4
        given["given"][..., -1, :] = False  # a row without a key
        (wanted,) = run(graph, given)
        for library in (False, True):
            (got,) = run(optimized, given, library=library)
            np.testing.assert_allclose(got, wanted, atol=5e-6, rtol=0)


def test_an_input_that_selects_beside_another_mask_is_refused() -> None:
    text = """%window
        %added
        least = Constant <value = float {-1e9}> ()
        s2 = Where (given, s1, least)
        masked = Add (s2, added)
        """
    with pytest.raises(UnsupportedError, match="only vectors"):
        rewrite(model(PLAIN + ", bool[B,1,S,S] given", OUT, HEAD + text + TAIL))


def test_batches_and_heads_of_one_number_that_change_places() -> None:
    """[B*H, S, D] of four batches and four heads, read as [H, B, S, D] behind the product."""
    graph = model(
        "float[4,4,S,8] q0, float[4,4,S,8] k0, float[4,4,S,8] v0",
        OUT,
        """flat = Constant <value = int64[3] {16, -1, 8}> ()
        q = Reshape (q0, flat)
        k = Reshape (k0, flat)
        v = Reshape (v0, flat)
        kt = Transpose <perm = [0, 2, 1]> (k)
        raw = MatMul (q, kt)
        p = Softmax <axis = -1> (raw)
        o = MatMul (p, v)
        apart = Constant <value = int64[4] {4, 4, -1, 8}> ()
        o4 = Reshape (o, apart)
        out = Transpose <perm = [1, 0, 2, 3]> (o4)""",
    )
    assert_equivalent(graph, {"S": 5}, {"S": 1})


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ("X,Y,3", "X,1,3", "X,1,3"),
        ("X,2,3", "X,1,3", "X,1,3"),
        ("X,2,3", "1,2,3", "1,2,3"),
        ("X,Y,3", "X,Y,3", "1,Y,3"),
        ("X,2,3", "X,2,3", "X,1,3"),
        ("X,1,3", "X,2,3", "X,2,3"),
    ],
)
def test_a_batch_in_two_axes_is_not_repeated(query: str, key: str, value: str) -> None:
    inputs = f"float[{query},S,8] q, float[{key},T,8] k, float[{value},T,8] v"
    body = "kt = Transpose <perm = [0, 1, 2, 4, 3]> (k)\nraw = MatMul (q, kt)\np = Softmax <axis = -1> (raw)\n"
    told = reason(model(inputs, "float[a,b,c,d,e] out", f"{body}out = MatMul (p, v)"))
    assert "of the batch in two axes" in told or "has batch size 1" in told
