# SPDX-License-Identifier: Apache-2.0
"""Fused nodes that append to a cache with room for more keys, past_sequence_length of which are there."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from cache_steps import STEPS, Step, append, are_close, attend, merge_heads, split_heads
from fused_attention_nodes import forced, run
from onnx import parser

import stof

HEADS, SIZE = 4, 8
WIDTH = HEADS * SIZE

# name: (the node, the number of queries, the mask)
FORMS = {
    "MultiHeadAttention": (
        "MultiHeadAttention <num_heads = 4, unidirectional = 1>",
        ", , ",
        "S",
        "k <= lengths[b] + q",
    ),
    "MultiHeadAttention that sees new keys": (
        "MultiHeadAttention <num_heads = 4>",
        ", , ",
        "S",
        "k + 1 <= lengths[b] + S",
    ),
    "MultiHeadAttention, projection bias": (
        "MultiHeadAttention <num_heads = 4, unidirectional = 1>",
        "bias, , ",
        "S",
        "k <= lengths[b] + q",
    ),
    "DecoderMaskedMultiHeadAttention": (
        "DecoderMaskedMultiHeadAttention <num_heads = 4, past_present_share_buffer = 1>",
        ", ",
        "1",
        "k <= lengths[b]",
    ),
}


def make(name: str) -> onnx.ModelProto:
    """The node with symbolic sizes."""
    node, between, rows, _ = FORMS[name]
    new, whole = f"float[B, {rows}, {WIDTH}]", f"float[B, {HEADS}, C, {SIZE}]"
    bias = f", float[{3 * WIDTH}] bias" if "bias" in between else ""
    return parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 18, "com.microsoft" : 1]>
    step ({new} q, {new} k, {new} v, {whole} pk, {whole} pv, int32[1] n{bias}) => ({new} y, {whole} nk, {whole} nv) {{
        [node] y, nk, nv = com.microsoft.{node} (q, k, v, {between}, pk, pv, n)
    }}""")


def draw(name: str, step: Step, seed: int) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Inputs of a step, whose sequences have as many keys, and its results in fp64."""
    node, between, _, _ = FORMS[name]
    rng = np.random.default_rng(seed)
    capacity = step.past + step.new + 5
    feeds = {n: rng.standard_normal((step.batch, step.new, WIDTH)).astype(np.float32) for n in "qkv"}
    caches = [rng.standard_normal((step.batch, HEADS, capacity, SIZE)).astype(np.float32) for _ in range(2)]
    own = dict(feeds)
    feeds |= {"pk": caches[0], "pv": caches[1], "n": np.array([step.past], np.int32)}
    if "bias" in between:
        feeds["bias"] = rng.standard_normal(3 * WIDTH).astype(np.float32)
        own = {n: own[n] + feeds["bias"][i * WIDTH : (i + 1) * WIDTH] for i, n in enumerate("qkv")}
    query, key, value = (split_heads(own[n], HEADS) for n in "qkv")
    first = np.full(step.batch, step.past)
    present = [append(c, x, first) for c, x in zip(caches, (key, value), strict=True)]
    last = step.past + (np.arange(step.new)[:, None] if "unidirectional" in node else step.new - 1)
    return feeds, [merge_heads(attend(query, *present, np.arange(capacity) <= last)), *present]


def steps(name: str) -> list[Step]:
    return [s for s in STEPS if s.new == 1 or FORMS[name][2] == "S"]


@cache
def optimized(name: str) -> bytes:
    """The optimized graph, whose one site is replaced with the mask of the form."""
    with TemporaryDirectory() as folder:
        report, target = forced(make(name), Path(folder))
        (site,) = report.sites
        assert (site.replaced, site.mask) == (True, FORMS[name][3]), site.reason
        assert report.verification is not None
        assert not report.verification.expanded
        return onnx.load(target).SerializeToString()


@pytest.mark.parametrize("name", FORMS)
def test_steps(name: str) -> None:
    """Results and whole caches of the original, by kernels and by function body."""
    model = onnx.load_from_string(optimized(name))
    for seed, step in enumerate(steps(name)):
        feeds, wanted = draw(name, step, seed)
        found = {"original": run(make(name), feeds)}
        found |= {f"library {on}": run(model, feeds, library=on) for on in (True, False)}
        for which, results in found.items():
            assert all(are_close(a, b, np.float32) for a, b in zip(results, wanted, strict=True)), (step, which)


@pytest.mark.parametrize("name", FORMS)
def test_one_buffer(name: str) -> None:
    """Past and present of one buffer: the new rows are written into it."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    stof.register(options)
    session = ort.InferenceSession(optimized(name), options, providers=["CPUExecutionProvider"])
    for seed, step in enumerate(steps(name)[:6]):
        feeds, wanted = draw(name, step, seed)
        binding = session.io_binding()
        values = {n: ort.OrtValue.ortvalue_from_numpy(x) for n, x in feeds.items()}
        for n, value in values.items():
            binding.bind_ortvalue_input(n, value)
        binding.bind_output("y")
        for past, present in (("pk", "nk"), ("pv", "nv")):
            binding.bind_ortvalue_output(present, values[past])
        session.run_with_iobinding(binding)
        found = [binding.get_outputs()[0].numpy(), values["pk"].numpy(), values["pv"].numpy()]
        assert all(are_close(a, b, np.float32) for a, b in zip(found, wanted, strict=True)), step


_MULTI = "MultiHeadAttention <num_heads = 4, unidirectional = 1>"
REFUSED = {
    "padding": (_MULTI, "int32[B, T] m", "(q, k, v, , m, , pk, pv, n)", "for the keys that there are"),
    "a bias": (_MULTI, "float[1, 1, S, T] m", "(q, k, v, , , m, pk, pv, n)", "for the keys that there are"),
    "beams": (_MULTI, "int32[B, 2, C] m", "(q, k, v, , , , pk, pv, n, m)", "in the order of beam search"),
    "several tokens": (
        "DecoderMaskedMultiHeadAttention <num_heads = 4, past_present_share_buffer = 1>",
        "float[1] m",
        "(q, k, v, , , pk, pv, n)",
        "for one token",
    ),
    "a cache that is not shared": (
        "DecoderMaskedMultiHeadAttention <num_heads = 4>",
        "float[1] m",
        "(q, k, v, , , pk, pv)",
        "no cache that it shares",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    """What standard operators do not say, or no runtime computes, is left with the reason."""
    node, more, operands, reason = REFUSED[name]
    new, whole = f"float[B, S, {WIDTH}]", f"float[B, {HEADS}, C, {SIZE}]"
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 18, "com.microsoft" : 1]>
    step ({new} q, {new} k, {new} v, {whole} pk, {whole} pv, int32[1] n, {more}) => ({new} y, {whole} nk, {whole} nv) {{
        [node] y, nk, nv = com.microsoft.{node} {operands}
    }}""")
    onnx.save(model, tmp_path / "model.onnx")
    report = stof.optimize(tmp_path / "model.onnx", options=stof.options.Options(dry_run=True))
    assert [(s.site, s.replaced) for s in report.sites] == [("node", False)]
    assert reason in report.sites[0].reason
