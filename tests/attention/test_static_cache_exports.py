# SPDX-License-Identifier: Apache-2.0
"""Static caches as exporters write them: a buffer that is written at cache_position, and a mask made of that."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import pytest
from cache_steps import STEPS, Step, append, are_close, attend
from fused_attention_nodes import forced, run
from onnx import parser

HEADS, SIZE, WINDOW = 4, 8, 6

_BY_ROWS = """
    t{0} = Transpose <perm = [2, 0, 1, 3]> (c{0})
    x{0} = Transpose <perm = [2, 0, 1, 3]> ({0})
    w{0} = ScatterND (t{0}, index, x{0})
    u{0} = Transpose <perm = [1, 2, 0, 3]> (w{0})"""
_BY_ELEMENTS = """
    s{0} = Shape ({0})
    e{0} = Expand (index, s{0})
    u{0} = ScatterElements <axis = 2> (c{0}, e{0}, {0})"""
_FIRST = "first = Gather (p, zero)\n rows = Add (i, first)"  # transformers 5
_EACH = "rows = Identity (p)"  # transformers 4
_LAST = "last = Gather (p, minus)\n behind = Sub (last, n)\n before = Add (behind, one)\n rows = Add (i, before)"

# name: (how the caches are written, positions of the queries, with a window, with padding, the mask)
FORMS = {
    "from the first position on": (_BY_ROWS, _FIRST, False, False, "k <= lengths[b] + q"),
    "position by position": (_BY_ROWS, _EACH, False, False, "k <= segment_q[b, q]"),
    "back from the last position": (_BY_ROWS, _LAST, False, False, "S + k <= lengths[b] + q + 1"),
    "written by elements": (_BY_ELEMENTS, _FIRST, False, False, "k <= lengths[b] + q"),
    "a window": (_BY_ROWS, _FIRST, True, False, f"k <= lengths[b] + q and lengths[b] + q <= k + {WINDOW - 1}"),
    "padding on the left": (_BY_ROWS, _FIRST, False, True, "k <= lengths[b] + q and pad[b, k]"),
    "a window, padding on the left": (
        _BY_ELEMENTS,
        _FIRST,
        True,
        True,
        f"k <= lengths[b] + q and lengths[b] + q <= k + {WINDOW - 1} and pad[b, k]",
    ),
}


def make(name: str, dtype: type) -> onnx.ModelProto:
    """The graph of a form with symbolic sizes."""
    write, rows, has_window, is_padded, _ = FORMS[name]
    kind, number = ("float", 1) if dtype is np.float32 else ("float16", 10)
    new, whole = (f"{kind}[B, {HEADS}, {n}, {SIZE}]" for n in "SC")
    window = f"""d = Sub (qs, ks)
        far = Constant <value_int = {WINDOW}> ()
        near = Less (d, far)
        m1 = And (m0, near)"""
    padding = "real = Cast <to = 9> (m)\n wide = Unsqueeze (real, both)\n allowed = And (m1, wide)"
    text = f"""<ir_version: 10, opset_import: ["" : 20]>
    step ({new} q, {new} k, {new} v, {whole} ck, {whole} cv, int64[S] p{", int64[B, C] m" if is_padded else ""})
        => ({new} y, {whole} uk, {whole} uv) {{
        zero = Constant <value_int = 0> ()
        one = Constant <value_int = 1> ()
        minus = Constant <value_int = -1> ()
        at1 = Constant <value_ints = [1]> ()
        both = Constant <value_ints = [1, 2]> ()
        index = Unsqueeze (p, at1)
        {write.format("k")}
        {write.format("v")}
        length = Shape <start = 2, end = 3> (q)
        n = Squeeze (length)
        i = Range (zero, n, one)
        {rows}
        qs = Unsqueeze (rows, at1)
        room = Shape <start = 2, end = 3> (ck)
        c = Squeeze (room)
        ks = Range (zero, c, one)
        m0 = LessOrEqual (ks, qs)
        {window if has_window else "m1 = Identity (m0)"}
        {padding if is_padded else "allowed = Identity (m1)"}
        nothing = Constant <value_float = 0.0> ()
        lowest = Constant <value_float = {-65504.0 if number == 10 else -3.4028234663852886e38}> ()
        added32 = Where (allowed, nothing, lowest)
        added = Cast <to = {number}> (added32)
        scale32 = Constant <value_float = {SIZE**-0.5!r}> ()
        scale = Cast <to = {number}> (scale32)
        kt = Transpose <perm = [0, 1, 3, 2]> (uk)
        s1 = MatMul (q, kt)
        s2 = Mul (s1, scale)
        s3 = Add (s2, added)
        w = Softmax <axis = -1> (s3)
        y = MatMul (w, uv)
    }}"""
    return parser.parse_model(text)


def draw(name: str, step: Step, dtype: type, seed: int) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Inputs of a step, whose sequences have as many tokens, and its results in fp64."""
    _, _, has_window, is_padded, _ = FORMS[name]
    rng = np.random.default_rng(seed)
    capacity = step.past + step.new + 5
    new = (step.batch, HEADS, step.new, SIZE)
    query, key, value = (rng.standard_normal(new).astype(dtype) for _ in range(3))
    caches = [rng.standard_normal((step.batch, HEADS, capacity, SIZE)).astype(dtype) for _ in range(2)]
    places = step.past + np.arange(step.new)
    feeds = {"q": query, "k": key, "v": value, "ck": caches[0], "cv": caches[1], "p": places}
    keys = np.arange(capacity)
    allowed = (keys <= places[:, None])[None, None]
    if has_window:
        allowed = allowed & (keys > places[:, None] - WINDOW)
    if is_padded:  # not all keys of the first query
        padding = np.minimum(np.array([0, 3]), step.past)
        feeds["m"] = (keys >= padding[:, None]).astype(np.int64)
        allowed = allowed & (feeds["m"] != 0)[:, None, None]
    present = [append(c, x, np.full(step.batch, step.past)) for c, x in zip(caches, (key, value), strict=True)]
    return feeds, [attend(query, *present, allowed), *present]


@cache
def optimized(name: str, dtype: type) -> bytes:
    """The optimized graph; its one site is replaced with the mask of the form."""
    with TemporaryDirectory() as folder:
        report, target = forced(make(name, dtype), Path(folder))
        (site,) = report.sites
        assert (site.replaced, site.mask) == (True, FORMS[name][-1]), site.reason
        assert report.verification is not None
        return onnx.load(target).SerializeToString()


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("name", FORMS)
def test_steps(name: str, dtype: type) -> None:
    """Results and caches of prompts, of chunks and of single tokens, by kernels and by function body."""
    model = onnx.load_from_string(optimized(name, dtype))
    for seed, step in enumerate(STEPS):
        feeds, wanted = draw(name, step, dtype, seed)
        for library in (True, False):
            found = run(model, feeds, library=library)
            assert are_close(found[0], wanted[0], dtype), (step, library, np.abs(found[0] - wanted[0]).max())
            assert all(np.array_equal(a, b) for a, b in zip(found[1:], wanted[1:], strict=True)), step


@pytest.mark.parametrize("name", FORMS)
def test_the_original_gives_the_same(name: str) -> None:
    """The steps' fp64 is what ONNX Runtime makes of the original."""
    for seed, step in enumerate(STEPS[:6]):
        feeds, wanted = draw(name, step, np.float32, seed)
        assert all(are_close(a, b, np.float32) for a, b in zip(run(make(name, np.float32), feeds), wanted, strict=True))


def test_positions_are_passed_as_one_number() -> None:
    """The operator takes the first of the positions as ``lengths``: a vector of S numbers is none of its operands."""
    graph = onnx.load_from_string(optimized("from the first position on", np.float32)).graph
    node = next(n for n in graph.node if n.op_type == "StofAttention")
    assert {a.name: a.s for a in node.attribute if a.name == "operands"} == {"operands": b"lengths"}
    gather = next(n for n in graph.node if n.output[0] == node.input[3])
    assert gather.op_type == "Gather"
