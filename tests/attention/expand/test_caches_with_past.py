# SPDX-License-Identifier: Apache-2.0
"""Attention that appends new keys to those of the past, in fused nodes and as exporters write it: steps in fp64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import pytest
from cache_steps import STEPS, Step, are_close, attend, merge_heads, split_heads
from fused_attention_nodes import forced, run
from onnx import parser

HEADS, SIZE = 4, 8
WIDTH = HEADS * SIZE
WEIGHTS = (np.eye(3 * WIDTH) + 0.1 * np.random.default_rng(0).standard_normal((3 * WIDTH, 3 * WIDTH))).astype(
    np.float32
)

_STANDARD = """
    [node] y, nk, nv = Attention <is_causal = 1{0}> (q, k, v, {1}, pk, pv)"""
_MULTI_HEAD = """
    [node] y, nk, nv = com.microsoft.MultiHeadAttention <num_heads = 4, unidirectional = 1{0}> (q, k, v, , {1}, pk, pv)"""
_PROJECTING = """
    keys = Unsqueeze (pk, first)
    values = Unsqueeze (pv, first)
    past = Concat <axis = 0> (keys, values)
    x = Concat <axis = 2> (q, k, v)
    [node] y, present = com.microsoft.Attention <num_heads = 4, unidirectional = 1> (x, weights, bias, {1}, past)
    nk4, nv4 = Split <axis = 0, num_outputs = 2> (present)
    nk = Squeeze (nk4, first)
    nv = Squeeze (nv4, first)"""
# As torch's exporters write scaled_dot_product_attention and DynamicCache.
_EXPORTED = """
    nk = Concat <axis = 2> (pk, k)
    nv = Concat <axis = 2> (pv, v)
    total = Shape <start = 2, end = 3> (nk)
    t = Squeeze (total)
    before = Shape <start = 2, end = 3> (pk)
    p = Squeeze (before)
    ks = Range (zero, t, one)
    rows = Range (p, t, one)
    qs = Unsqueeze (rows, at1)
    causal = LessOrEqual (ks, qs)
    {1}
    nothing = Constant <value_float = 0.0> ()
    lowest = Constant <value_float = -3.4028234663852886e38> ()
    added = Where (allowed, nothing, lowest)
    kt = Transpose <perm = [0, 1, 3, 2]> (nk)
    scale = Constant <value_float = 0.35355339059327373> ()
    s1 = MatMul (q, kt)
    s2 = Mul (s1, scale)
    s3 = Add (s2, added)
    w = Softmax <axis = -1> (s3)
    y = MatMul (w, nv)"""
_PADDED = "real = Cast <to = 9> (m)\n wide = Unsqueeze (real, both)\n allowed = And (causal, wide)"


@dataclass(frozen=True)
class Form:
    """A graph of a step.

    Attributes:
        body: the nodes, in which {0} stands for attributes and {1} for the mask.
        opset: of the graph.
        groups: key heads.
        rank: of query, key and value.
        attributes: more of the node's.
        mask: an input for the mask, with its type and shape, and the tensor that the node takes.
        window: keys that a query attends at most; 0: no window.
        types: what ONNX Runtime's CPU provider computes it in.
    """

    body: str
    opset: int
    groups: int = HEADS
    rank: int = 3
    attributes: str = ""
    mask: tuple[str, str] = ("", "")
    window: int = 0
    softcap: float = 0.0
    types: tuple[type, ...] = (np.float32,)

    def model(self, dtype: type) -> onnx.ModelProto:
        """The graph with symbolic sizes."""
        kind = "float" if dtype is np.float32 else "float16"
        query = f"B, S, {WIDTH}" if self.rank == 3 else f"B, {HEADS}, S, {SIZE}"
        new = f"B, S, {self.groups * SIZE}" if self.rank == 3 else f"B, {self.groups}, S, {SIZE}"
        past, present = (f"{kind}[B, {self.groups}, {n}, {SIZE}]" for n in "PT")
        inputs = [f"{kind}[{query}] q", f"{kind}[{new}] k", f"{kind}[{new}] v", f"{past} pk", f"{past} pv"]
        inputs += [self.mask[0]] if self.mask[0] else []
        model = parser.parse_model(f"""<ir_version: 11, opset_import: ["" : {self.opset}, "com.microsoft" : 1]>
        step ({", ".join(inputs)}) => ({kind}[{query}] y, {present} nk, {present} nv) {{
            zero = Constant <value_int = 0> ()
            one = Constant <value_int = 1> ()
            first = Constant <value_ints = [0]> ()
            at1 = Constant <value_ints = [1]> ()
            both = Constant <value_ints = [1, 2]> ()
            {self.body.format(self.attributes, self.mask[1])}
        }}""")
        if self.body is _PROJECTING:
            tensors = {"weights": WEIGHTS, "bias": WEIGHTS[0]}
            model.graph.initializer.extend(onnx.numpy_helper.from_array(x, n) for n, x in tensors.items())
        return model


_NODE = (np.float32, np.float16)
_ROWS = """rows = Shape <start = 2, end = 3> (q)
    wanted = Concat <axis = 0> (at1, at1, rows, at1)
    narrow = Unsqueeze (m, both)
    mask = Expand (narrow, wanted)"""
FORMS = {
    "Attention 23": Form(_STANDARD, 23, 2, 4, types=_NODE),
    "Attention 24, softcap": Form(_STANDARD, 24, 2, 4, ", softcap = 3.0", softcap=3.0, types=_NODE),
    "Attention 24, rank 3": Form(_STANDARD, 24, 2, 3, ", q_num_heads = 4, kv_num_heads = 2", types=_NODE),
    "Attention 24, padding": Form(_ROWS + _STANDARD, 24, 2, 4, mask=("bool[B, T] m", "mask"), types=_NODE),
    "Attention 25, window": Form(_STANDARD, 25, 2, 4, ", left_window_size = 5", window=6, types=_NODE),
    "MultiHeadAttention": Form(_MULTI_HEAD, 18, mask=("", ", ")),
    "MultiHeadAttention, padding": Form(_MULTI_HEAD, 18, mask=("int32[B, T] m", "m, ")),
    "com.microsoft Attention": Form(_PROJECTING, 18),
    "com.microsoft Attention, padding": Form(_PROJECTING, 18, mask=("int32[B, T] m", "m")),
    "exported": Form(_EXPORTED, 20, rank=4, mask=("", "allowed = Identity (causal)")),
    "exported, padding": Form(_EXPORTED, 20, rank=4, mask=("int64[B, T] m", _PADDED)),
}


def draw(form: Form, step: Step, dtype: type, side: str, seed: int) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Inputs of a step, padded on the left or the right where the form has padding, and its results in fp64."""
    rng = np.random.default_rng(seed)

    def numbers(heads: int, length: int) -> np.ndarray:
        return rng.standard_normal((step.batch, heads, length, SIZE)).astype(dtype)

    query, key, value = (numbers(n, step.new) for n in (HEADS, form.groups, form.groups))
    past = [numbers(form.groups, step.past) for _ in range(2)]
    total = step.past + step.new
    keys, rows = np.arange(total), step.past + np.arange(step.new)[:, None]
    allowed = (keys <= rows)[None, None]
    if form.window:
        allowed = allowed & (keys > rows - form.window)
    feeds = {"q": query, "k": key, "v": value}
    if form.rank == 3:
        feeds = {n: merge_heads(x) for n, x in feeds.items()}
    feeds |= {"pk": past[0], "pv": past[1]}
    if form.mask[0]:  # every query keeps a key
        count = rng.integers(0, min(step.past, 4) if side == "left" else min(total - 1, 4), step.batch, endpoint=True)
        real = keys >= count[:, None] if side == "left" else keys < total - count[:, None]
        kind = form.mask[0].partition("[")[0]
        feeds["m"] = real.astype({"bool": np.bool_, "int32": np.int32, "int64": np.int64}[kind])
        allowed = allowed & real[:, None, None]
    if form.body is _PROJECTING:
        x = np.concatenate([feeds[n].astype(np.float64) for n in "qkv"], axis=2)
        projected = x @ WEIGHTS + WEIGHTS[0]
        query, key, value = (split_heads(p, HEADS) for p in np.split(projected, 3, axis=2))
    present = [np.concatenate(pair, axis=2) for pair in zip(past, (key, value), strict=True)]
    result = attend(query, *present, allowed, softcap=form.softcap)
    return feeds, [merge_heads(result) if form.rank == 3 else result, *present]


@cache
def optimized(name: str, dtype: type) -> bytes:
    """The optimized graph, whose one site is replaced."""
    with TemporaryDirectory() as folder:
        report, target = forced(FORMS[name].model(dtype), Path(folder))
        (site,) = report.sites
        assert site.replaced, site.reason
        assert site.mask.startswith("k <= q")
        assert report.verification is not None
        return onnx.load(target).SerializeToString()


@pytest.mark.parametrize(("name", "dtype"), [(n, t) for n, f in FORMS.items() for t in f.types])
def test_steps(name: str, dtype: type) -> None:
    """Results and caches of prompts, of chunks and of single tokens, by kernels and by function body."""
    form = FORMS[name]
    model = onnx.load_from_string(optimized(name, dtype))
    for seed, step in enumerate(STEPS):
        for side in ("left", "right") if form.mask[0] else ("left",):
            feeds, wanted = draw(form, step, dtype, side, seed)
            for library in (True, False):
                found = run(model, feeds, library=library)
                for own, exact in zip(found, wanted, strict=True):
                    assert are_close(own, exact, dtype), (step, side, library)


@pytest.mark.parametrize("name", [n for n, f in FORMS.items() if f.opset < 25])
def test_the_original_gives_the_same(name: str) -> None:
    """The steps' fp64 is what ONNX Runtime makes of the original. It has no windows of opset 25."""
    form = FORMS[name]
    for seed, step in enumerate(STEPS[:6]):
        feeds, wanted = draw(form, step, np.float32, "left", seed)
        assert all(are_close(a, b, np.float32) for a, b in zip(run(form.model(np.float32), feeds), wanted, strict=True))
