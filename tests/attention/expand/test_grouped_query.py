# SPDX-License-Identifier: Apache-2.0
"""GroupQueryAttention is expanded and replaced where the positions of its keys are known, else left with a reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from fused_attention_nodes import expanded, forced, run, same
from onnx import parser

SIZES = ((2, 13, 0), (1, 30, 0), (3, 1, 0))
WITH_PAST = ((1, 9, 5), (1, 2, 30), (2, 1, 17))  # ONNX Runtime takes several rows with a past one position at a time


def model(
    attributes: str = "",
    *,
    past: bool = False,
    lengths: str = "full",
    extra: str = "",
    given: str = "",
    packed: bool = False,
    rotary: int = 0,
    cached: bool = True,
) -> onnx.ModelProto:
    """A node with 4 query heads on 2, its lengths computed from sizes (full), from a padding mask (pad), or inputs."""
    inputs = ["float[B, S, 128] q"] if packed else ["float[B, S, 64] q", "float[B, S, 32] k", "float[B, S, 32] v"]
    if past:
        inputs += ["float[B, 2, P, 16] past_k", "float[B, 2, P, 16] past_v"]
    if rotary:
        inputs += [f"float[512, {rotary // 2}] cosines", f"float[512, {rotary // 2}] sines"]
    inputs += {"full": [], "pad": ["int64[B, S] pad"], "given": ["int32[B] last"]}[lengths]
    inputs += [given] if given else []
    size = "p = Gather (past_shape, two)\n t = Add (s, p)" if past else "t = Identity (s)"
    last = {
        "full": "wide = Expand (total1, batch)\n last = Cast <to = 6> (wide)",
        "pad": "n = ReduceSum <keepdims = 0> (pad, axis)\n less = Sub (n, one)\n last = Cast <to = 6> (less)",
        "given": "",
    }[lengths]
    lines = f"""
    one = Constant <value_int = 1> ()
    two = Constant <value_int = 2> ()
    zero = Constant <value_int = 0> ()
    axis = Constant <value_ints = [1]> ()
    first = Constant <value_ints = [0]> ()
    shape = Shape (q)
    s = Gather (shape, one)
    b = Gather (shape, zero)
    batch = Unsqueeze (b, first)
    {"past_shape = Shape (past_k)" if past else ""}
    {size}
    total = Cast <to = 6> (t)
    last64 = Sub (t, one)
    total1 = Unsqueeze (last64, first)
    {last}
    """
    operands = ["q", *(["", ""] if packed else ["k", "v"])]
    operands += ["past_k", "past_v"] if past else ["", ""]
    operands += ["last", "total"] + (["cosines", "sines"] if rotary else ["", ""])
    operands += ["", extra] if extra else []
    caches = "float[B, 2, T, 16] present_k, float[B, 2, T, 16] present_v"
    outputs = "y, present_k, present_v" if cached else "y"
    text = f"""
    <ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]>
    grouped ({", ".join(inputs)}) => (float[B, S, 64] y{f", {caches}" if cached else ""}) {{
        {lines}
        [node] {outputs} = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2{attributes}> ({", ".join(operands)})
    }}"""
    found = parser.parse_model(text)
    onnx.checker.check_model(found)
    return found


def feeds(graph: onnx.ModelProto, batch: int, length: int, past: int, seed: int) -> dict[str, np.ndarray]:
    """Random inputs; later rows end in padding."""
    rng = np.random.default_rng(seed)
    given = {}
    for value in graph.graph.input:
        sizes = {"B": batch, "S": length, "P": past}
        shape = [d.dim_value or sizes[d.dim_param] for d in value.type.tensor_type.shape.dim]
        if value.name == "pad":
            ends = rng.integers(1, length, batch, endpoint=True)
            given["pad"] = (np.arange(length)[None] < ends[:, None]).astype(np.int64)
        elif value.name == "last":
            given["last"] = rng.integers(0, length, batch).astype(np.int32)
        elif value.name in ("cosines", "sines"):
            angles = np.arange(512)[:, None] * 0.7 / (1 + np.arange(shape[1]))
            given[value.name] = (np.cos if value.name == "cosines" else np.sin)(angles).astype(np.float32)
        else:
            array = rng.standard_normal(shape).astype(np.float32)
            if value.name == "added":  # every query may see itself: of rows without a key, runtimes give this or that
                array = np.where((rng.random(shape) < 0.7) | np.eye(length, dtype=bool), array, np.float32(-np.inf))
            given[value.name] = array
    return given


CASES = {
    "causal": (model(), "k <= q"),
    "window": (model(", local_window_size = 4"), "k <= q and q - k <= 3"),
    "not causal": (model(", causal = 0"), ""),
    "scale and softcap": (model(", scale = 0.5, softcap = 1.5"), "k <= q"),
    "packed": (model(packed=True), "k <= q"),
    "rotary": (model(", do_rotary = 1", rotary=16), "k <= q"),
    "rotary, interleaved": (model(", do_rotary = 1, rotary_interleaved = 1", rotary=16), "k <= q"),
    "bias": (model(given="float[1, 1, S, S] added", extra="added"), "k <= q"),
    "padding on the right": (model(lengths="pad"), None),
    "padding on the right, window": (model(", local_window_size = 3", lengths="pad"), None),
    "past": (model(past=True), "k <= q"),
    "past, window": (model(", local_window_size = 6", past=True), "k <= q and q - k <= 5"),
    "past, rotary": (model(", do_rotary = 1", past=True, rotary=16), "k <= q"),
}


@pytest.mark.parametrize("name", CASES)
def test_expanded(name: str) -> None:
    """The working copy gives what the fused node gives."""
    graph, _ = CASES[name]
    working = expanded(graph).model
    assert not any(n.op_type == "GroupQueryAttention" for n in working.graph.node)
    for seed, sizes in enumerate(WITH_PAST if "past" in name else SIZES):
        given = feeds(graph, *sizes, seed)
        same(run(working, given), run(graph, given))


@pytest.mark.parametrize("name", CASES)
def test_replaced(name: str, tmp_path: Path) -> None:
    """The site is replaced with the mask that the node means; outputs and caches are the same."""
    graph, mask = CASES[name]
    report, target = forced(graph, tmp_path)
    (site,) = report.sites
    assert site.replaced, site.reason
    assert site.site == "node"
    assert mask is None or site.mask == mask
    assert mask is not None or "lengths[b]" in site.mask
    assert report.verification is not None
    assert not report.verification.expanded
    for seed, sizes in enumerate(WITH_PAST if "past" in name else SIZES):
        given = feeds(graph, *sizes, seed)
        for library in (True, False):
            same(run(target, given, library=library), run(graph, given))


REFUSED = {
    "a cache of rows of different lengths": (model(past=True, lengths="given"), "may have different lengths"),
    "smooth softmax": (model(", smooth_softmax = 1"), "attribute smooth_softmax is 1"),
    "a sink": (model(given="float[4] sink", extra=", sink"), "head_sink"),
    "a window with a softcap beside padding": (
        model(", local_window_size = 3, softcap = 2.0", lengths="pad"),
        "queries beyond the end of their row",
    ),
    "a window beside padding, and no cache": (
        model(", local_window_size = 3", lengths="pad", cached=False),
        "queries beyond the end of their row",
    ),
    "positions that are data": (model(", do_rotary = 1", lengths="given", rotary=16), "known at run time only"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    """What cannot be expanded is left, with the reason; the model is copied."""
    graph, reason = REFUSED[name]
    report, _ = forced(graph, tmp_path)
    assert [(s.site, s.replaced) for s in report.sites] == [("node", False)]
    assert reason in report.sites[0].reason
    assert report.copied
