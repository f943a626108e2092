# SPDX-License-Identifier: Apache-2.0
"""The function body of StofAttention against the library: every layout, policy and operand role, with sizes 0 and 1."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import stof
from stof.attention.function_body import OP, Variant, add_packed_inputs, make_attention_function
from stof.graph.index import DOMAIN
from stof.mask.expression import MaskExpression
from stof.mask.site import EmptyRows, Layout

D, DV = 8, 5
SIZES = list(itertools.product((0, 1, 2), (0, 1, 3), (0, 1, 7)))  # of B, S and T


@dataclass(frozen=True)
class Call:
    """One call: how its tensors lie, its mask and operands, and what rows without a key give."""

    layouts: tuple[Layout, Layout, Layout, Layout]
    mask: str
    roles: tuple[str, ...]
    policy: EmptyRows
    offset: bool
    heads: tuple[int, int]
    dtype: type
    lse: bool


MASKS: list[tuple[str, tuple[str, ...]]] = [
    ("", ()),
    ("k <= q", ()),
    ("k < 0", ()),
    ("abs(q - k) <= 1 and pad[b, k]", ("pad",)),
    ("pad[b, k]", ("pad", "bias")),
    ("", ("bias",)),
    ("k < 0", ("bias",)),
    ("", ("relative_bias",)),
    ("pad[b, k]", ("pad", "relative_bias", "bias")),
    ("segment_q[b, q - P] == segment_k[b, k]", ("segment_q", "segment_k")),
    ("k < lengths[b]", ("lengths", "unused")),
    ("table0[k]", ("table0",)),
    ("k <= q", ("sink",)),
    ("pad[b, k]", ("pad", "bias", "sink")),
]


def calls() -> Iterator[Call]:
    """Every combination of layouts, and in turn all others."""
    rng = np.random.default_rng(6)
    masks = itertools.cycle(MASKS)
    policies = list(EmptyRows)
    for i, layouts in enumerate(itertools.product(Layout, repeat=4)):
        mask, roles = next(masks)
        policy = EmptyRows.ZERO if "sink" in roles else policies[i // len(MASKS) % 4]
        heads = ((2, 2), (4, 2), (3, 1))[int(rng.integers(3))]
        offset, lse = bool(rng.integers(2)), bool(rng.integers(2))
        yield Call(layouts, mask, roles, policy, offset, heads, np.float16 if i % 5 == 4 else np.float32, lse)
    for (mask, roles), policy in itertools.product(MASKS, EmptyRows):
        if "sink" not in roles or policy is EmptyRows.ZERO:
            yield Call((Layout.BSN,) * 4, mask, roles, policy, True, (4, 2), np.float32, True)


def laid(array: np.ndarray, layout: Layout) -> np.ndarray:
    """[B, H, S, D] in a layout."""
    if layout is Layout.BHSD:
        return array
    turned = np.ascontiguousarray(array.transpose(0, 2, 1, 3))
    B, S, H, size = turned.shape
    return turned if layout is Layout.BSHD else turned.reshape(B, S, H * size)


def operand(role: str, call: Call, B: int, S: int, T: int, rng: np.random.Generator) -> np.ndarray:
    """What a role holds; biases forbid here and there, and in some rows everything."""
    H = call.heads[0]
    if role == "pad":
        return rng.random((B, T)) < 0.5
    if role == "bias":
        bias = rng.standard_normal((B, 1, S, T)).astype(call.dtype)
        bias[rng.random(bias.shape) < 0.3] = -np.inf
        bias[:, :, 1::2] = -np.inf
        return bias
    if role == "relative_bias":
        return np.array([[0.5, -np.inf, 1.0]] * H, np.float32)
    if role == "sink":
        return rng.standard_normal(H).astype(np.float32)
    if role == "table0":
        return rng.random(16) < 0.5
    if role == "lengths":
        return rng.integers(0, T + 1, B)
    return rng.integers(0, 3, (B, S if role == "segment_q" else T))  # and of a role that nobody reads


def inputs(call: Call, B: int, S: int, T: int) -> dict[str, np.ndarray]:
    """The tensors of a call by the names x0, x1, and so on."""
    rng = np.random.default_rng([B, S, T, len(call.mask)])
    H, G = call.heads
    shapes = ((B, H, S, D), (B, G, T, D), (B, G, T, DV))
    tensors = zip(shapes, call.layouts, strict=False)
    arrays = [laid(rng.standard_normal(s).astype(call.dtype), layout) for s, layout in tensors]
    arrays += [operand(role, call, B, S, T, rng) for role in call.roles]
    return {f"x{i}": np.ascontiguousarray(a) for i, a in enumerate(arrays)}


def model_of(call: Call, feed: dict[str, np.ndarray], fixed: bool) -> onnx.ModelProto:
    """A model of the one call, with sizes that are ``fixed`` or differ between runs."""
    H, G = call.heads
    kinds = {n: helper.np_dtype_to_tensor_dtype(a.dtype) for n, a in feed.items()}
    dims = {n: list(a.shape) if fixed else [None] * a.ndim for n, a in feed.items()}
    values = [helper.make_tensor_value_info(n, kinds[n], dims[n]) for n in feed]
    dtype = kinds["x0"]
    names = ["y", "lse"] if call.lse else ["y"]
    outputs = [helper.make_tensor_value_info("y", dtype, None)]
    outputs += [helper.make_tensor_value_info("lse", TensorProto.FLOAT, None)] if call.lse else []
    attributes: dict[str, Any] = {"layout": " ".join(x.value for x in call.layouts), "num_heads": H, "kv_num_heads": G}
    attributes |= {"mask": call.mask, "operands": " ".join(call.roles), "empty_rows": call.policy.value}
    attributes |= {"query_offset": int(call.offset), "scale": 0.4, "mask_id": 0, "results": "lse" if call.lse else ""}
    node = helper.make_node(OP, list(feed), names, domain=DOMAIN, **attributes)
    roles = tuple(call.roles)
    variant = Variant(
        MaskExpression.parse(call.mask), call.layouts, H != G, call.policy, int(call.offset), 0.0, roles, dtype
    )
    return helper.make_model(
        helper.make_graph([node], "g", values, outputs),
        opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)],
        functions=[make_attention_function([variant], 18, call.lse)],
        ir_version=9,
    )


def session(model: onnx.ModelProto, library: bool) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if library:
        stof.register(options)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def same(found: list[np.ndarray], wanted: list[np.ndarray], what: str) -> None:
    for name, a, b in zip(("y", "lse"), found, wanted, strict=False):
        assert a.shape == b.shape, f"{what}: {name} of the body has shape {a.shape}, of the library {b.shape}"
        tolerance = 4e-3 if a.dtype == np.float16 else 2e-5
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance, err_msg=f"{what}: {name}")


@pytest.mark.parametrize("call", list(calls()), ids=str)
def test_body_and_library_agree(call: Call) -> None:
    model = model_of(call, inputs(call, 2, 3, 7), fixed=False)
    body, library = (session(model, library=x) for x in (False, True))
    for B, S, T in SIZES:
        if call.offset and S > T:
            continue
        feed = inputs(call, B, S, T)
        same(body.run(None, feed), library.run(None, feed), f"B {B}, S {S}, T {T}")


@pytest.mark.parametrize("layouts", [("BSN",) * 4, ("BHSD", "BSN", "BSHD", "BSHD")], ids=" ".join)
def test_heads_among_others(layouts: tuple[str, ...]) -> None:
    """Slices of attribute ``packed``: one head before those of a tensor, and two behind."""
    query, key, value, output = (Layout(x) for x in layouts)
    call = Call((query, key, value, output), "pad[b, k]", ("pad",), EmptyRows.MEAN, True, (4, 2), np.float32, True)
    counts = (4, 2, 2)
    packed = [x for c, place in zip(counts, layouts, strict=False) for x in ((1, c + 3) if place == "BSN" else (0, c))]

    def wide(B: int, S: int, T: int) -> dict[str, np.ndarray]:
        feed = inputs(call, B, S, T)
        for name, count, place in zip(feed, counts, layouts, strict=False):
            if place == "BSN":
                size = feed[name].shape[2] // count
                feed[name] = np.pad(feed[name], ((0, 0), (0, 0), (size, 2 * size)))
        return feed

    model = model_of(call, wide(2, 3, 7), fixed=False)
    model.graph.node[0].attribute.append(helper.make_attribute("packed", packed))
    function = add_packed_inputs(model.functions[0], layouts, layouts)
    model.functions[0].CopyFrom(function)
    body, library = (session(model, library=x) for x in (False, True))
    for B, S, T in SIZES:
        if S <= T:
            same(body.run(None, wide(B, S, T)), library.run(None, wide(B, S, T)), f"B {B}, S {S}, T {T}")


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 7), (1, 3, 1)], ids=str)
@pytest.mark.parametrize("policy", list(EmptyRows))
def test_fixed_sizes(policy: EmptyRows, sizes: tuple[int, int, int]) -> None:
    """A runtime computes shapes, and what follows from them, as it loads the file. It takes no fixed sizes of 0."""
    call = Call((Layout.BSN,) * 4, "pad[b, k]", ("pad", "bias"), policy, False, (4, 2), np.float32, True)
    feed = inputs(call, *sizes)
    model = model_of(call, feed, fixed=True)
    body, library = (session(model, library=x).run(None, feed) for x in (False, True))
    same(body, library, "fixed sizes")
