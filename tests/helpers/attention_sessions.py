# SPDX-License-Identifier: Apache-2.0
"""Nodes of attention in ONNX Runtime, and inputs for them whose scores a caller arranges."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnx import helper

import stof

Array = npt.NDArray[Any]
# Gives queries and keys scores by blocks of keys, in place.
SetLevels = Callable[[np.random.Generator, Array, Array], None]

QUERY, KEY, VALUE = "query", "key", "value"
H, G, D = 4, 2, 64  # of all drawn inputs
CAPACITY = 1000  # of drawn caches
CACHED = (QUERY, KEY, VALUE, "past_key", "past_value", "seqlens_k", "total_sequence_length")


def make_session(
    op: str, feeds: dict[str, Array], outputs: Sequence[str] = ("output",), **attributes: Any
) -> ort.InferenceSession:
    """A session of one node, whose inputs have the names, types and shapes of the feeds."""
    node = helper.make_node(op, list(feeds), list(outputs), name="layer0", domain="stof", **attributes)
    element = helper.np_dtype_to_tensor_dtype(feeds[QUERY].dtype)
    types = {n: helper.np_dtype_to_tensor_dtype(x.dtype) for n, x in feeds.items()}
    inputs = [helper.make_tensor_value_info(n, types[n], x.shape) for n, x in feeds.items()]
    results = [helper.make_tensor_value_info(n, element, None) for n in outputs]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("stof", 1)]
    model = helper.make_model(helper.make_graph([node], "g", inputs, results), opset_imports=opsets, ir_version=9)
    options = ort.SessionOptions()
    stof.register(options)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run_attention(feeds: dict[str, Array], **attributes: Any) -> Array:
    """The output of a StofAttention."""
    return np.asarray(make_session("StofAttention", feeds, **attributes).run(None, feeds)[0])


def run_cached(feeds: dict[str, Array], mask: str, **attributes: Any) -> Array:
    """The output [B, S, H * D] of a StofCachedAttention with the inputs ``CACHED``."""
    results = ("output", "present_key", "present_value")
    made = make_session("StofCachedAttention", feeds, results, num_heads=H, kv_num_heads=G, mask=mask, **attributes)
    return np.asarray(made.run(None, feeds)[0])


def draw_attention(set_levels: SetLevels, S: int, T: int, dtype: str = "float32", B: int = 1) -> dict[str, Array]:
    """Query [B, H, S, D], key and value [B, G, T, D]."""
    rng = np.random.default_rng(S + T)
    q, k, v = (rng.standard_normal((B, n, length, D)) for n, length in ((H, S), (G, T), (G, T)))
    set_levels(rng, q, k)
    return {n: x.astype(dtype) for n, x in ((QUERY, q), (KEY, k), (VALUE, v))}


@dataclass(frozen=True, eq=False)
class CachedProblem:
    """A step over ragged caches of the first token on.

    Attributes:
        feeds: of a StofCachedAttention; rows of the caches behind the past are NaN.
        query: [B, H, S, D].
        key, value: [B, G, CAPACITY, D], past and new rows; NaN behind them.
        lengths: keys of each sequence.
    """

    feeds: dict[str, Array]
    query: Array
    key: Array
    value: Array
    lengths: Array


def draw_cached(set_levels: SetLevels, S: int, past: Sequence[int], dtype: str) -> CachedProblem:
    """S new tokens behind each past."""
    rng = np.random.default_rng(S)
    B, lengths = len(past), np.array(past) + S
    query = rng.standard_normal((B, H, S, D))
    key, value = np.full((2, B, G, CAPACITY, D), np.nan)
    for b, n in enumerate(lengths):
        keys, values = rng.standard_normal((2, G, n, D))
        set_levels(rng, query[b], keys)
        key[b, :, :n], value[b, :, :n] = keys, values
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    new = [x[np.arange(B)[:, None], :, lengths[:, None] - S + np.arange(S)] for x in (key, value)]  # [B, S, G, D]
    past_key, past_value = key.copy(), value.copy()
    for b, n in enumerate(past):
        past_key[b, :, n:] = past_value[b, :, n:] = np.nan
    flat = (query.swapaxes(1, 2).reshape(B, S, -1), *(x.reshape(B, S, -1) for x in new))
    ends = ((lengths - 1).astype(np.int32), np.array(lengths.max(), np.int32))
    feeds = dict(zip(CACHED, (*flat, past_key, past_value, *ends), strict=True))
    return CachedProblem(feeds, query, key, value, lengths)


def run_switched_off(function: Callable[[], None]) -> None:
    """Calls a function of a test's module in a process with STOF_SKIP_SCORES=0, which a library reads once."""
    module = function.__module__.rpartition(".")[2]
    program = f"from {module} import {function.__name__}; {function.__name__}(); print('done')"
    paths = [str(Path(function.__code__.co_filename).parent), *sys.path]
    environment = {**os.environ, "STOF_SKIP_SCORES": "0", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "done"
