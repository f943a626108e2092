# SPDX-License-Identifier: Apache-2.0
"""Attribute skip_threshold of StofCachedAttention in ONNX Runtime: prompts, chunks and steps over ragged caches."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from tests.helpers.skip_scores import attend_exactly, most_moved, set_levels

import stof

H, G, D, C = 4, 2, 64, 1000
INPUTS = ("query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length")


def run(feeds: dict[str, Any], mask: str, **attributes: Any) -> Any:
    element = helper.np_dtype_to_tensor_dtype(feeds["query"].dtype)
    node = helper.make_node("StofCachedAttention", list(INPUTS), ["output", "present_key", "present_value"],
                            domain="stof", num_heads=H, kv_num_heads=G, mask=mask, **attributes)  # fmt: skip
    types = dict.fromkeys(INPUTS, element) | dict.fromkeys(INPUTS[5:], TensorProto.INT32)
    inputs = [helper.make_tensor_value_info(n, types[n], feeds[n].shape) for n in INPUTS]
    outputs = [helper.make_tensor_value_info(n, element, None) for n in node.output]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("stof", 1)]
    graph = helper.make_graph([node], "g", inputs, outputs)
    options = ort.SessionOptions()
    stof.register(options)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run(None, feeds)[0]


@pytest.mark.parametrize("threshold", [1e-4, 0.3, 10.0])
@pytest.mark.parametrize("mask", ["k <= q", "k <= q and q - k < 300", "k <= q and k % 5 != 2"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("S", "past"), [(1, [900, 130]), (3, [900, 30]), (200, [700, 100]), (600, [0, 0])])
def test_outputs_are_within_the_bound(S: int, past: list[int], dtype: str, mask: str, threshold: float) -> None:
    rng = np.random.default_rng(S)
    B, lengths = len(past), np.array(past) + S
    query = rng.standard_normal((B, H, S, D))
    key, value = np.full((2, B, G, C, D), np.nan)
    for b, n in enumerate(lengths):
        keys, values = rng.standard_normal((2, G, n, D))
        set_levels(rng, query[b], keys)
        key[b, :, :n], value[b, :, :n] = keys, values
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    new = [x[np.arange(B)[:, None], :, lengths[:, None] - S + np.arange(S)] for x in (key, value)]  # [B, S, G, D]
    past_key, past_value = key.copy(), value.copy()
    for b, n in enumerate(past):
        past_key[b, :, n:] = past_value[b, :, n:] = np.nan
    feeds = {"query": query.swapaxes(1, 2).reshape(B, S, H * D), "key": new[0].reshape(B, S, G * D),
             "value": new[1].reshape(B, S, G * D), "past_key": past_key, "past_value": past_value,
             "seqlens_k": (lengths - 1).astype(np.int32), "total_sequence_length": np.array(lengths.max(), np.int32)}  # fmt: skip
    stof.reset_skip_counts()
    found = run(feeds, mask, skip_threshold=threshold).reshape(B, S, H, D)
    counts = stof.skip_counts()
    assert counts.scored > 0
    if threshold > 1 and S >= 200 and mask == "k <= q":
        assert counts.share > 0.1
    for b, n in enumerate(lengths):
        q, k = np.arange(n - S, n)[:, None], np.arange(n)
        allowed = (k <= q) & (q - k < (300 if "300" in mask else C)) & ((k % 5 != 2) | ("5" not in mask))
        exact = attend_exactly(query[b], key[b, :, :n], value[b, :, :n], allowed)
        limit = most_moved(threshold, value[b]) + (2e-5 if dtype == "float32" else 3e-3)
        assert np.abs(found[b].swapaxes(0, 1).astype(np.float64) - exact).max() <= limit
    np.testing.assert_array_equal(run(feeds, mask, skip_threshold=0.0), run(feeds, mask))
