# SPDX-License-Identifier: Apache-2.0
"""Masks with key columns on the CPU, against fp64 NumPy: single keys, strided blocks, sinks, tables, per KV head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from tests.cached_attention.oracle import DecoderStep, run_step

from stof.runtime.library import library_path

H, G, D = 4, 2, 32
LENGTH = 700
TABLE = np.random.default_rng(7).random((H, LENGTH)) < 0.03
GROUP_TABLE = np.repeat(TABLE[:G], H // G, 0)  # equal rows for the heads of a group
# Masks with the table that they read, and the same in NumPy.
Allowed = Callable[[int, Any, Any], Any]
MASKS: dict[str, tuple[str, npt.NDArray[Any] | None, Allowed]] = {
    "columns": ("q - k < 20 or k % 37 == 0", None, lambda h, q, k: (q - k < 20) | (k % 37 == 0)),
    "columns per KV head": (
        "k <= q and (q - k < 20 or (k + 5 * (h // 2)) % 37 == 0)",
        None,
        lambda h, q, k: (q - k < 20) | ((k + 5 * (h // 2)) % 37 == 0),
    ),
    "columns per head": (
        "q - k < 20 or (k + 5 * h) % 37 == 0",
        None,
        lambda h, q, k: (q - k < 20) | ((k + 5 * h) % 37 == 0),
    ),
    "columns of a table": (
        "q - k < 9 or table0[h // 2, k]",
        TABLE[:G],
        lambda h, q, k: (q - k < 9) | TABLE[h // 2][k + 0 * q],
    ),
    "equal rows of a table": (
        "q - k < 9 or table0[h, k]",
        GROUP_TABLE,
        lambda h, q, k: (q - k < 9) | GROUP_TABLE[h][k + 0 * q],
    ),
    "rows of a table": ("q - k < 9 or table0[h, k]", TABLE, lambda h, q, k: (q - k < 9) | TABLE[h][k + 0 * q]),
    "columns and diagonals": (
        "k % 41 == 3 or q - k < 5 or q - k == 100",
        None,
        lambda h, q, k: (k % 41 == 3) | (q - k < 5) | (q - k == 100),
    ),
    "columns alone": ("k <= q and k % 50 == 7 and k >= 0", None, lambda h, q, k: (k % 50 == 7) & (q >= 0)),
    "strided blocks": (
        "k <= q and (q // 16 - k // 16 < 4 or (k // 16 + h // 2) % 8 == 0)",
        None,
        lambda h, q, k: (q // 16 - k // 16 < 4) | ((k // 16 + h // 2) % 8 == 0),
    ),
    "wide strided blocks": (
        "k <= q and (q // 64 - k // 64 < 2 or (k // 64 + h // 2) % 4 == 0)",
        None,
        lambda h, q, k: (q // 64 - k // 64 < 2) | ((k // 64 + h // 2) % 4 == 0),
    ),
    "sinks and a window": ("k <= q and (k < 4 or q - k < 33)", None, lambda h, q, k: (k < 4) | (q - k < 33)),
    "factored": (
        "(k <= q and q - k < 20) or (k <= q and k % 37 == 0)",
        None,
        lambda h, q, k: (q - k < 20) | (k % 37 == 0),
    ),
}


def _run(node: Any, feeds: dict[str, npt.NDArray[Any]], table: npt.NDArray[Any] | None, outputs: int) -> list[Any]:
    names = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.float16): TensorProto.FLOAT16}
    kinds = {**names, np.dtype(np.int32): TensorProto.INT32}
    inputs = [helper.make_tensor_value_info(n, kinds[a.dtype], a.shape) for n, a in feeds.items()]
    kind = names[feeds["query"].dtype]
    infos = [helper.make_tensor_value_info(n, kind, None) for n in node.output[:outputs]]
    constants = []
    if table is not None:
        constants.append(helper.make_tensor("table0", TensorProto.BOOL, table.shape, table.ravel().tolist()))
    graph = helper.make_graph([node], "g", inputs, infos, constants)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("stof", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(library_path()))
    found: list[Any] = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run(None, feeds)
    return found


@pytest.mark.parametrize(
    ("length", "past", "dtype"),
    [(1, 600, np.float32), (1, 37, np.float16), (5, 500, np.float32), (300, 333, np.float32), (400, 0, np.float16)],
)
@pytest.mark.parametrize("name", MASKS)
def test_caches(name: str, length: int, past: int, dtype: Any) -> None:
    text, table, allowed = MASKS[name]
    rng = np.random.default_rng(length + past)
    B, S, C = 3, length, LENGTH

    def draw(*shape: int) -> npt.NDArray[Any]:
        return rng.standard_normal(shape).astype(dtype)

    lengths = np.array([past + S - (0 if past == 0 else b * past // 4) for b in range(B)])
    q, k, v = draw(B, S, H, D), draw(B, S, G, D), draw(B, S, G, D)
    past_key, past_value = (np.full((B, G, C, D), np.nan, dtype) for _ in range(2))
    kept = []
    for b in range(B):
        n = 0 if past == 0 else int(lengths[b]) - S
        keys, values = draw(G, n, D), draw(G, n, D)
        kept.append((keys.astype(np.float64), values.astype(np.float64)))
        past_key[b, :, :n], past_value[b, :, :n] = keys, values
    feeds = {"query": q.reshape(B, S, -1), "key": k.reshape(B, S, -1), "value": v.reshape(B, S, -1)}
    feeds |= {"past_key": past_key, "past_value": past_value, "seqlens_k": (lengths - 1).astype(np.int32)}
    feeds["total_sequence_length"] = np.array(lengths.max(), np.int32)
    node = helper.make_node(
        "StofCachedAttention",
        [*feeds, *[""] * 10, "table0"] if table is not None else [*feeds],
        ["output", "present_key", "present_value"],
        domain="stof",
        num_heads=H,
        kv_num_heads=G,
        mask=text,
    )
    found = _run(node, feeds, table, 3)[0].reshape(B, S, H, D).astype(float)
    step = DecoderStep(
        *(x.astype(np.float64) for x in (q, k, v)),
        past=kept,
        lengths=lengths,
        is_first_prompt=past == 0,
        allowed=lambda b, h, rows, keys: np.broadcast_to(allowed(h, rows, keys), np.broadcast(rows, keys).shape),
        scale=D**-0.5,
    )
    output, _present = run_step(step)
    bound = 3e-3 if dtype == np.float16 else 2e-5
    assert not np.isnan(output).any()
    np.testing.assert_allclose(found, output, rtol=bound, atol=bound * 4)


@pytest.mark.parametrize(
    ("queries", "keys", "dtype"), [(400, 400, np.float32), (130, 500, np.float16), (17, 640, np.float32)]
)
@pytest.mark.parametrize("name", [*MASKS, "both sides"])
def test_attention(name: str, queries: int, keys: int, dtype: Any) -> None:
    both_sides = ("abs(q - k) < 12 or k % 29 == 2", None, lambda h, q, k: (abs(q - k) < 12) | (k % 29 == 2))
    text, table, allowed = MASKS.get(name, both_sides)
    if name != "both sides" and "k <= q" not in text:
        text = f"({text}) and k <= q"
    rng = np.random.default_rng(queries)
    B, past = 2, keys - queries
    q, k, v = (rng.standard_normal((B, heads, n, D)).astype(dtype) for heads, n in ((H, queries), (G, keys), (G, keys)))
    node = helper.make_node(
        "StofAttention",
        ["query", "key", "value", *(["table0"] if table is not None else [])],
        ["output"],
        domain="stof",
        mask=text,
        operands="table0" if table is not None else "",
        query_offset=1,
        scale=D**-0.5,
    )
    found = _run(node, {"query": q, "key": k, "value": v}, table, 1)[0].astype(float)
    rows, columns = past + np.arange(queries)[:, None], np.arange(keys)[None, :]
    for h in range(H):
        g = h // (H // G)
        mask = np.broadcast_to(allowed(h, rows, columns), (queries, keys))
        mask = mask if name == "both sides" else mask & (columns <= rows)
        scores = np.where(
            mask, np.einsum("bqd,bkd->bqk", q[:, h].astype(float), k[:, g].astype(float)) / D**0.5, -np.inf
        )
        top = np.where(np.isfinite(scores.max(-1, keepdims=True)), scores.max(-1, keepdims=True), 0.0)
        weights = np.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        expected = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0) @ v[:, g].astype(float)
        bound = 3e-3 if dtype == np.float16 else 2e-5
        np.testing.assert_allclose(found[:, h], expected, rtol=bound, atol=bound * 4)
