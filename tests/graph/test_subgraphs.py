# SPDX-License-Identifier: Apache-2.0
"""Attention in branches of If and bodies of Loop is replaced there, with masks that outer nodes compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.compose
import pytest
from fused_attention_nodes import MICROSOFT, forced, run, same
from onnx import helper, parser

from stof.graph.index import all_nodes, subgraphs

HEADER = '<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]>'
# The mask is made outside, of the padding and of positions; one branch has a past, the other none.
MERGED = (
    HEADER
    + """
decoder (float[B, 2, S, 8] q, float[B, 2, S, 8] k, float[B, 2, S, 8] v, float[B, 2, P, 8] past_k, float[B, 2, P, 8] past_v,
         int64[B, S] pad, bool[1] use_cache) => (float[B, 2, S, 8] out, float[B, 2, T, 8] present) {
    scale = Constant <value = float {0.35}> ()
    one = Constant <value_int = 1> ()
    zero = Constant <value_int = 0> ()
    first = Constant <value_ints = [0]> ()
    last = Constant <value_ints = [1]> ()
    both = Constant <value_ints = [1, 2]> ()
    minus = Constant <value = float {-3.4028234663852886e38}> ()
    nothing = Constant <value = float {0.0}> ()
    shape = Shape (pad)
    s = Gather (shape, one)
    r = Range (zero, s, one)
    keys = Unsqueeze (r, first)
    rows = Unsqueeze (r, last)
    causal = LessOrEqual (keys, rows)
    padded = Unsqueeze (pad, both)
    real = Cast <to = 9> (padded)
    allowed = And (causal, real)
    added = Where (allowed, nothing, minus)
    qs = Mul (q, scale)
    out, present = If (use_cache) <
        then_branch = with_past () => (float[B, 2, S, 8] then_out, float[B, 2, T, 8] then_present) {
            then_present = Concat <axis = 2> (past_k, k)
            values = Concat <axis = 2> (past_v, v)
            kt = Transpose <perm = [0, 1, 3, 2]> (then_present)
            s1 = MatMul (qs, kt)
            whole = Shape (then_present)
            two = Constant <value_int = 2> ()
            t = Gather (whole, two)
            every = Range (zero, t, one)
            all_keys = Unsqueeze (every, first)
            p = Sub (t, s)
            places = Add (rows, p)
            before = LessOrEqual (all_keys, places)
            window = Sub (places, all_keys)
            limit = Constant <value_int = 21> ()
            near = LessOrEqual (window, limit)
            kept = And (before, near)
            s2 = Where (kept, s1, minus)
            [then_softmax] w = Softmax <axis = -1> (s2)
            then_out = MatMul (w, values)
        },
        else_branch = without () => (float[B, 2, S, 8] else_out, float[B, 2, T, 8] else_present) {
            else_present = Identity (k)
            kt = Transpose <perm = [0, 1, 3, 2]> (k)
            s1 = MatMul (qs, kt)
            s2 = Add (s1, added)
            [else_softmax] w = Softmax <axis = -1> (s2)
            else_out = MatMul (w, v)
        }
    >
}
"""
)


def feeds(batch: int, length: int, past: int, cache: bool, seed: int = 0) -> dict[str, np.ndarray]:
    """Random inputs; the last positions of a second row are padding."""
    rng = np.random.default_rng(seed)
    given: dict[str, np.ndarray] = {n: rng.standard_normal((batch, 2, length, 8)).astype(np.float32) for n in "qkv"}
    given |= {n: rng.standard_normal((batch, 2, past, 8)).astype(np.float32) for n in ("past_k", "past_v")}
    pad = np.ones((batch, length), np.int64)
    pad[1:, length // 2 + 1 :] = 0
    return given | {"pad": pad, "use_cache": np.array([cache])}


def test_branches(tmp_path: Path) -> None:
    """Both branches of a merged decoder: each its own mask, whichever is taken; outer nodes of no more use are gone."""
    original = parser.parse_model(MERGED)
    onnx.checker.check_model(original)
    report, target = forced(original, tmp_path)
    assert {(s.site, s.replaced, s.mask) for s in report.sites} == {
        ("then_softmax", True, "k <= q and q - k <= 21"),
        ("else_softmax", True, "k <= q and pad[b, k]"),
    }, [s.reason for s in report.sites]
    assert report.verification is not None
    assert {c.site for c in report.verification.comparisons if c.site} == {"then_softmax", "else_softmax"}
    optimized = onnx.load(target)
    onnx.checker.check_model(optimized)
    choice = next(n for n in optimized.graph.node if n.op_type == "If")
    assert [sum(n.op_type == "StofAttention" for n in g.node) for g in subgraphs(choice)] == [1, 1]
    assert not any(n.op_type == "Softmax" for n in all_nodes(optimized.graph.node))
    assert not any(n.op_type in ("And", "LessOrEqual", "Where") for n in optimized.graph.node)
    for seed, (batch, length, past) in enumerate(((2, 30, 14), (1, 5, 40), (2, 1, 33))):
        for cache in (True, False):
            given = feeds(batch, length, past, cache, seed)
            for library in (True, False):
                same(run(target, given, library=library), run(original, given))


def test_only_one_branch(tmp_path: Path) -> None:
    """A branch whose site stays comes out as it was, and what it needs outside stays."""
    text = MERGED.replace("[else_softmax] w = Softmax", "[else_softmax] w = LogSoftmax")
    original = parser.parse_model(text)
    report, target = forced(original, tmp_path)
    assert [(s.site, s.replaced) for s in report.sites] == [("then_softmax", True)]
    optimized = onnx.load(target)
    before, after = (
        next(a.g for n in m.graph.node if n.op_type == "If" for a in n.attribute if a.name == "else_branch")
        for m in (original, optimized)
    )
    assert before.SerializeToString() == after.SerializeToString()
    assert any(n.output[0] == "added" for n in optimized.graph.node)
    for cache in (True, False):
        given = feeds(2, 30, 14, cache)
        same(run(target, given, library=True), run(original, given))


FUSED_INSIDE = (
    HEADER
    + """
layer (float[B, S, 8] x, int32[B, S] pad, bool[1] twice) => (float[B, S, 8] y) {
    [outside] a = com.microsoft.MultiHeadAttention <num_heads = 2, unidirectional = 1> (x, x, x)
    y = If (twice) <
        then_branch = again () => (float[B, S, 8] t) {
            [inside] t = com.microsoft.MultiHeadAttention <num_heads = 4> (a, a, a, , pad)
        },
        else_branch = once () => (float[B, S, 8] e) { e = Identity (a) }
    >
}
"""
)


def test_fused_inside(tmp_path: Path) -> None:
    """A fused node in a branch, and one before it."""
    original = parser.parse_model(FUSED_INSIDE)
    report, target = forced(original, tmp_path)
    assert [(s.site, s.replaced, s.mask) for s in report.sites] == [
        ("outside", True, "k <= q"),
        ("inside", True, "pad[b, k]"),
    ], [s.reason for s in report.sites]
    assert not any(n.domain == MICROSOFT for n in all_nodes(onnx.load(target).graph.node))
    rng = np.random.default_rng(0)
    for twice in (True, False):
        given = {
            "x": rng.standard_normal((2, 12, 8)).astype(np.float32),
            "pad": np.array([[1] * 12, [1] * 7 + [0] * 5], np.int32),
            "twice": np.array([twice]),
        }
        for library in (True, False):
            same(run(target, given, library=library), run(original, given))


LOOP = (
    HEADER
    + """
layers (float[B, S, 16] x, int64[B, S] pad) => (float[B, S, 16] y) {
    count = Constant <value_int = 3> ()
    go = Constant <value = bool {1}> ()
    both = Constant <value_ints = [1, 2]> ()
    minus = Constant <value = float {-1e9}> ()
    scale = Constant <value = float {0.1}> ()
    heads = Constant <value_ints = [0, 0, 2, 8]> ()
    merged = Constant <value_ints = [0, 0, 16]> ()
    padded = Unsqueeze (pad, both)
    real = Cast <to = 9> (padded)
    y = Loop (count, go, x) <
        body = layer (int64 i, bool keep, float[B, S, 16] state) => (bool on, float[B, S, 16] next) {
            on = Identity (keep)
            h = Reshape (state, heads)
            qs = Transpose <perm = [0, 2, 1, 3]> (h)
            kt = Transpose <perm = [0, 2, 3, 1]> (h)
            s0 = MatMul (qs, kt)
            s1 = Mul (s0, scale)
            s2 = Where (real, s1, minus)
            [softmax] w = Softmax <axis = -1> (s2)
            o = MatMul (w, qs)
            t = Transpose <perm = [0, 2, 1, 3]> (o)
            next = Reshape (t, merged)
        }
    >
}
"""
)


def test_loop(tmp_path: Path) -> None:
    """The body of a loop over layers."""
    original = parser.parse_model(LOOP)
    onnx.checker.check_model(original)
    report, target = forced(original, tmp_path)
    assert [(s.site, s.replaced, s.mask) for s in report.sites] == [("softmax", True, "pad[b, k]")], report.sites
    rng = np.random.default_rng(0)
    for batch, length in ((2, 20), (1, 3)):
        pad = np.ones((batch, length), np.int64)
        pad[1:, :7] = 0
        given = {"x": rng.standard_normal((batch, length, 16)).astype(np.float32), "pad": pad}
        for library in (True, False):
            same(run(target, given, library=library), run(original, given))


def test_scan(tmp_path: Path) -> None:
    """The body of a Scan over the rows of a batch of sequences."""
    text = """
    layers (float[N, B, S, 16] x, int64[B, S] pad) => (float[N, B, S, 16] y) {
        both = Constant <value_ints = [1, 2]> ()
        minus = Constant <value = float {-1e9}> ()
        scale = Constant <value = float {0.1}> ()
        heads = Constant <value_ints = [0, 0, 2, 8]> ()
        merged = Constant <value_ints = [0, 0, 16]> ()
        padded = Unsqueeze (pad, both)
        real = Cast <to = 9> (padded)
        y = Scan <num_scan_inputs = 1, body = layer (float[B, S, 16] state) => (float[B, S, 16] next) {
            h = Reshape (state, heads)
            qs = Transpose <perm = [0, 2, 1, 3]> (h)
            kt = Transpose <perm = [0, 2, 3, 1]> (h)
            s0 = MatMul (qs, kt)
            s1 = Mul (s0, scale)
            s2 = Where (real, s1, minus)
            [softmax] w = Softmax <axis = -1> (s2)
            o = MatMul (w, qs)
            t = Transpose <perm = [0, 2, 1, 3]> (o)
            next = Reshape (t, merged)
        }> (x)
    }"""
    original = parser.parse_model(HEADER + text)
    onnx.checker.check_model(original)
    report, target = forced(original, tmp_path)
    assert [(s.site, s.replaced, s.mask) for s in report.sites] == [("softmax", True, "pad[b, k]")], report.sites
    rng = np.random.default_rng(0)
    given = {"x": rng.standard_normal((3, 2, 9, 16)).astype(np.float32), "pad": np.array([[1] * 9, [0] * 4 + [1] * 5])}
    same(run(target, given, library=True), run(original, given))


def test_nested(tmp_path: Path) -> None:
    """A branch in a branch, whose mask is made around it."""
    inner = LOOP.split("y = Loop", 1)[1]
    body = inner[inner.index("{") + 1 : inner.rindex("next = Reshape")].replace("on = Identity (keep)", "")
    text = (
        LOOP.split("y = Loop", 1)[0].replace("int64[B, S] pad)", "int64[B, S] pad, bool[1] a, bool[1] b)")
        + "y = If (a) <then_branch = yes () => (float[B, S, 16] u) { u = If (b) <then_branch = deep () => (float[B, S, 16] n) {"
        + body.replace("state", "x")
        + "n = Reshape (t, merged) }, else_branch = no () => (float[B, S, 16] m) { m = Neg (x) }> },"
        + "else_branch = off () => (float[B, S, 16] f) { f = Identity (x) }> }"
    )
    original = parser.parse_model(text)
    onnx.checker.check_model(original)
    report, target = forced(original, tmp_path)
    assert [(s.site, s.replaced, s.mask) for s in report.sites] == [("softmax", True, "pad[b, k]")], report.sites
    rng = np.random.default_rng(0)
    given = {"x": rng.standard_normal((2, 9, 16)).astype(np.float32), "pad": np.array([[1] * 9, [0] * 4 + [1] * 5])}
    for a, b in ((True, True), (True, False), (False, True)):
        flags = {"a": np.array([a]), "b": np.array([b])}
        same(run(target, given | flags, library=True), run(original, given | flags))


def test_loop_that_masks_by_its_number(tmp_path: Path) -> None:
    """Which iteration it is counts as a number of a run, like a length: here the second begins with other keys."""
    late = """zero = Constant <value = int64 {0}> ()
            one = Constant <value = int64 {1}> ()
            axis = Constant <value = int64 {1}> ()
            sizes = Shape (state)
            length = Gather (sizes, axis)
            places = Range (zero, length, one)
            far = GreaterOrEqual (places, i)
            s2 = Where (far, s1, minus)"""
    original = parser.parse_model(LOOP.replace("s2 = Where (real, s1, minus)", late))
    report, target = forced(original, tmp_path)
    assert [(s.replaced, s.mask) for s in report.sites] == [(True, "lengths[b] <= k")], report.sites
    rng = np.random.default_rng(0)
    given = {"x": rng.standard_normal((2, 9, 16)).astype(np.float32), "pad": np.ones((2, 9), np.int64)}
    same(run(target, given, library=True), run(original, given))


def test_loop_that_masks_by_its_result(tmp_path: Path) -> None:
    """A mask that depends on what the iteration before has computed cannot be lifted: left, with the reason."""
    text = LOOP.replace("s2 = Where (real, s1, minus)", "far = Greater (s1, scale)\n s2 = Where (far, s1, minus)")
    report, _ = forced(parser.parse_model(text), tmp_path)
    assert not report.replaced
    assert report.copied
    assert report.sites[0].reason


@pytest.mark.parametrize("broken", ["then_out = MatMul (w, values)", "else_out = MatMul (w, v)"])
def test_planted_fault(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong mask in either branch is found, whichever the inputs lead into."""
    import stof
    from stof.attention.subgraphs import emit_scopes
    from stof.errors import VerifyError
    from stof.options import Options

    index = 0 if broken.startswith("then") else 1

    def faulty(*arguments: object) -> onnx.ModelProto:
        result = emit_scopes(*arguments)  # type: ignore[arg-type]
        choice = next(n for n in result.graph.node if n.op_type == "If")
        graph = next(a.g for a in choice.attribute if a.name == ("then_branch", "else_branch")[index])
        node = next(n for n in graph.node if n.op_type == "StofAttention")
        next(a for a in node.attribute if a.name == "scale").f = 0.5
        return result

    monkeypatch.setattr("stof.attention.rewrite.emit_scopes", faulty)
    path = tmp_path / "model.onnx"
    onnx.save(parser.parse_model(MERGED), path)
    with pytest.raises(VerifyError, match=("then_softmax", "else_softmax")[index]):
        stof.optimize(path, tmp_path / "out.onnx", Options())


@pytest.mark.parametrize(
    "names",
    [
        ("gemma3.torchscript.sdpa", "gemma3.torchscript.eager"),
        ("modernbert.dynamo.sdpa", "modernbert.torchscript.eager"),
    ],
)
def test_merged_exports(names: tuple[str, str], narrow: Callable[[str], Path], tmp_path: Path) -> None:
    """Whole exports as the branches of one If: every site of both, with the masks that it has in its own graph."""
    parts = [onnx.load(narrow(name)) for name in names]
    masks = []
    for i, part in enumerate(parts):
        folder = tmp_path / f"alone{i}"
        folder.mkdir()
        masks.append([s.mask for s in forced(part, folder)[0].sites])
    branches = []
    initializers: list[onnx.TensorProto] = []
    for part, prefix in zip(parts, ("then/", "else/"), strict=True):
        given = [i.name for i in part.graph.input]
        graph = onnx.compose.add_prefix_graph(part.graph, prefix, rename_inputs=False, rename_outputs=True)
        initializers.extend(graph.initializer)
        del graph.initializer[:], graph.input[:], graph.value_info[:]
        assert given == [i.name for i in parts[0].graph.input]
        branches.append(graph)
    flag = helper.make_tensor_value_info("use_cache_branch", onnx.TensorProto.BOOL, [1])
    outputs = [o.name for o in parts[0].graph.output]
    node = helper.make_node("If", [flag.name], outputs, name="choice", then_branch=branches[0], else_branch=branches[1])
    graph = helper.make_graph(
        [node], "merged", [*parts[0].graph.input, flag], list(parts[0].graph.output), initializers
    )
    opset = max(e.version for p in parts for e in p.opset_import if e.domain == "")
    merged = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    folder = tmp_path / "merged"
    folder.mkdir()
    report, target = forced(merged, folder)
    assert all(s.replaced for s in report.sites), [s.reason for s in report.sites]
    assert [s.mask for s in report.sites] == [*masks[0], *masks[1]]
    assert not any(n.op_type == "Softmax" for n in all_nodes(onnx.load(target).graph.node))
    ids = np.random.default_rng(0).integers(1, 60, (2, 33))
    mask = np.ones((2, 33), np.int64)
    mask[1, 20:] = 0
    for flag_value in (True, False):
        given_all = {"input_ids": ids, "attention_mask": mask, flag.name: np.array([flag_value])}
        wanted, found = run(merged, given_all), run(target, given_all, library=True)
        same([f[mask.astype(bool)] for f in found], [w[mask.astype(bool)] for w in wanted], tolerance=1e-4)
