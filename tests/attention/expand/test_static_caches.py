# SPDX-License-Identifier: Apache-2.0
"""Attention over a static cache that TensorScatter writes to: each sequence has keys up to its own nonpad_kv_seqlen."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import pytest
from cache_steps import STEPS, Step, append, are_close, attend, merge_heads, split_heads
from fused_attention_nodes import forced, run
from onnx import parser

HEADS, GROUPS, SIZE = 4, 2, 8
_MASKS = {"pad": "mask", "bias": "m", "": ""}  # the tensor that is attn_mask


@dataclass(frozen=True)
class Form:
    """A graph: what its Attention has, and the mask that it becomes.

    Attributes:
        mask: of the replaced site.
        left: left_window_size, None where there is none; likewise right.
        rank: of query, key and value.
        extra: "pad" for a boolean attn_mask [B, C] on the left, "bias" for a float one.
        stated: nonpad_kv_seqlen is an input; otherwise the graph adds S to write_indices.
    """

    mask: str
    causal: bool = False
    left: int | None = None
    right: int | None = None
    softcap: float = 0.0
    rank: int = 3
    extra: str = ""
    stated: bool = True
    circular: bool = False

    def model(self, dtype: type) -> onnx.ModelProto:
        """The graph with symbolic sizes."""
        kind = "float" if dtype is np.float32 else "float16"
        if self.rank == 3:
            sizes = [f"B, S, {HEADS * SIZE}", f"B, S, {GROUPS * SIZE}", f"B, C, {GROUPS * SIZE}"]
        else:
            sizes = [f"B, {HEADS}, S, {SIZE}", f"B, {GROUPS}, S, {SIZE}", f"B, {GROUPS}, C, {SIZE}"]
        query, new, whole = sizes
        inputs = [
            f"{kind}[{query}] q",
            f"{kind}[{new}] k",
            f"{kind}[{new}] v",
            f"{kind}[{whole}] ck",
            f"{kind}[{whole}] cv",
        ]
        inputs += ["int64[B] w", *(["int64[B] n"] if self.stated else [])]
        inputs += {"pad": ["bool[B, C] m"], "bias": [f"{kind}[B, 1, S, C] m"], "": []}[self.extra]
        attributes = [f"is_causal = {int(self.causal)}"]
        attributes += [] if self.left is None else [f"left_window_size = {self.left}"]
        attributes += [] if self.right is None else [f"right_window_size = {self.right}"]
        attributes += [f"softcap = {self.softcap}"] if self.softcap else []
        attributes += [f"q_num_heads = {HEADS}, kv_num_heads = {GROUPS}"] if self.rank == 3 else []
        opset = 24 if self.left is self.right is None else 25
        axis = f'axis = {1 if self.rank == 3 else 2}, mode = "{"circular" if self.circular else "linear"}"'
        length = (
            "" if self.stated else f"s = Shape <start = {self.rank - 2}, end = {self.rank - 1}> (k)\n n = Add (w, s)"
        )
        # ONNX Runtime wants a mask of as many rows as there are queries.
        mask = """a = Constant <value_ints = [1, 2]> ()
            m4 = Unsqueeze (m, a)
            rows = Shape <start = 1, end = 2> (q)
            one = Constant <value_ints = [1]> ()
            wide = Concat <axis = 0> (one, one, rows, one)
            mask = Expand (m4, wide)"""
        text = f"""<ir_version: 11, opset_import: ["" : {opset}]>
        step ({", ".join(inputs)}) => ({kind}[{query}] y, {kind}[{whole}] uk, {kind}[{whole}] uv) {{
            uk = TensorScatter <{axis}> (ck, k, w)
            uv = TensorScatter <{axis}> (cv, v, w)
            {length}
            {mask if self.extra == "pad" else ""}
            [node] y = Attention <{", ".join(attributes)}> (q, uk, uv, {_MASKS[self.extra]}, , , n)
        }}"""
        return parser.parse_model(text)

    def draw(self, step: Step, dtype: type, seed: int) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
        """Inputs of a step, and its results in fp64."""
        rng = np.random.default_rng(seed)
        capacity = step.past + step.new + 7

        def numbers(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(dtype)

        query = numbers(step.batch, HEADS, step.new, SIZE)
        key, value = (numbers(step.batch, GROUPS, step.new, SIZE) for _ in range(2))
        caches = [numbers(step.batch, GROUPS, capacity, SIZE) for _ in range(2)]
        first = step.lengths(rng)
        if self.circular:
            first = first + rng.integers(0, capacity, step.batch)
        ends = np.minimum(first + step.new, capacity)
        feeds = {"w": first, **({"n": ends} if self.stated else {})}
        present = [append(c, x, first, circular=self.circular) for c, x in zip(caches, (key, value), strict=True)]
        rows = (ends - step.new)[:, None, None, None] + np.arange(step.new)[:, None]
        keys = np.arange(capacity)
        allowed = keys < ends[:, None, None, None]
        right = 0 if self.causal else self.right
        if right is not None:
            allowed = allowed & (keys <= rows + right)
        if self.left is not None:
            allowed = allowed & (keys >= rows - self.left)
        bias: np.ndarray | float = 0.0
        if self.extra == "pad":
            padding = np.minimum(rng.integers(0, 4, step.batch), ends)
            feeds["m"] = keys >= padding[:, None]
            allowed = allowed & feeds["m"][:, None, None]
        elif self.extra == "bias":
            bias = feeds["m"] = numbers(step.batch, 1, step.new, capacity)
        tensors = {"q": query, "k": key, "v": value, "ck": caches[0], "cv": caches[1]}
        result = attend(query, *present, allowed, bias=bias, softcap=self.softcap)
        wanted = [result, *(p.astype(np.float64) for p in present)]
        if self.rank == 3:
            tensors = {n: merge_heads(x) for n, x in tensors.items()}
            wanted = [merge_heads(x) for x in wanted]
        return feeds | tensors, wanted


CAUSAL = "S + k <= lengths[b] + q"
FORMS = {
    "no mask": Form("k + 1 <= lengths[b]"),
    "causal": Form(CAUSAL, causal=True),
    "causal, rank 4": Form(CAUSAL, causal=True, rank=4),
    "causal, softcap": Form(CAUSAL, causal=True, softcap=3.0),
    "causal, lengths that the graph adds up": Form("k <= lengths[b] + q", causal=True, stated=False),
    "causal, padding on the left": Form(f"{CAUSAL} and pad[b, k]", causal=True, extra="pad"),
    "a bias": Form("k + 1 <= lengths[b]", extra="bias"),
    "a window": Form(f"{CAUSAL} and lengths[b] + q <= S + k + 5", causal=True, left=5),
    "a window on both sides": Form(
        "S + k <= lengths[b] + q + 2 and k + 1 <= lengths[b] and lengths[b] + q <= S + k + 5", left=5, right=2, rank=4
    ),
    "a circular cache": Form("k + 1 <= lengths[b]", circular=True),
}


@cache
def optimized(name: str, dtype: type) -> bytes:
    """The optimized graph; its one site is replaced with the mask of the form."""
    form = FORMS[name]
    with TemporaryDirectory() as folder:
        report, target = forced(form.model(dtype), Path(folder))
        (site,) = report.sites
        assert (site.replaced, site.mask) == (True, form.mask), site.reason
        assert report.verification is not None
        found = onnx.load(target)
    assert [n.op_type for n in found.graph.node].count("TensorScatter") == 2  # which the runtime does in place
    return found.SerializeToString()


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("name", FORMS)
def test_steps(name: str, dtype: type) -> None:
    """Results and caches of prompts, of chunks and of single tokens, by kernels and by function body."""
    form = FORMS[name]
    model = onnx.load_from_string(optimized(name, dtype))
    for seed, step in enumerate(STEPS):
        feeds, wanted = form.draw(step, dtype, seed)
        for library in (True, False):
            found = run(model, feeds, library=library)
            assert are_close(found[0], wanted[0], dtype), (step, library, np.abs(found[0] - wanted[0]).max())
            assert all(np.array_equal(a, b) for a, b in zip(found[1:], wanted[1:], strict=True)), step


@pytest.mark.parametrize("name", ["no mask", "causal", "a circular cache"])
def test_the_original_gives_the_same(name: str) -> None:
    """The steps' fp64 is what ONNX Runtime makes of the original."""
    form = FORMS[name]
    for seed, step in enumerate(STEPS[:6]):
        feeds, wanted = form.draw(step, np.float32, seed)
        found = run(form.model(np.float32), feeds)
        assert all(are_close(a, b, np.float32) for a, b in zip(found, wanted, strict=True)), step


def test_lengths_below_the_new_tokens() -> None:
    """Queries before the first position have no key and give 0."""
    form = FORMS["causal"]
    model = onnx.load_from_string(optimized("causal", np.float32))
    step = Step(7, 20)
    feeds, _ = form.draw(step, np.float32, 0)
    feeds["n"] = np.array([3, 0])
    found, original = (run(m, feeds, library=m is model)[0] for m in (model, form.model(np.float32)))
    np.testing.assert_allclose(found, original, atol=2e-5)
    assert not found[0, :4].any()
    assert not found[1].any()
    assert split_heads(found, HEADS)[0, :, 4:].all()


def test_the_scores_are_an_output(tmp_path: Path) -> None:
    """A used qk_matmul_output keeps the node."""
    model = FORMS["causal"].model(np.float32)
    model.graph.node[-1].output.extend(["", "", "scores"])
    model.graph.output.append(onnx.helper.make_tensor_value_info("scores", onnx.TensorProto.FLOAT, [None] * 4))
    report, _ = forced(model, tmp_path)
    assert [(s.replaced, "qk_matmul_output" in s.reason) for s in report.sites] == [(False, True)]
