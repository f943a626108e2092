# SPDX-License-Identifier: Apache-2.0
"""Sessions in a forked child, as servers and data loaders make them, and masks whose element masks exceed their bound."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

import stof
from stof.runtime.library import Op, cache_stats

SIZE = 6000
MASK = "(q * k + q) % 7919 < 4000 or q == k"


def session() -> Any:
    """A model of one node with the mask, on one thread."""
    node = helper.make_node("StofAttention", ["q", "k", "v"], ["o"], domain="stof", mask=MASK)
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 1, "length", 1]) for n in "qkv"]
    output = helper.make_tensor_value_info("o", TensorProto.FLOAT, [1, 1, "length", 1])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("stof", 1)]
    model = helper.make_model(helper.make_graph([node], "one", inputs, [output]), opset_imports=opsets, ir_version=9)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    stof.register(options)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def feeds(size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(size)
    return {name: rng.uniform(-1, 1, (1, 1, size, 1)).astype(np.float32) for name in "qkv"}


def expected(given: dict[str, np.ndarray], rows: np.ndarray) -> np.ndarray:
    """Rows of the output in fp64; the head size is 1, and so is the scale."""
    q, k, v = (given[name][0, 0, :, 0].astype(np.float64) for name in "qkv")
    keys = np.arange(len(k))
    allowed = ((rows[:, None] * keys + rows[:, None]) % 7919 < 4000) | (rows[:, None] == keys)
    weights = np.exp(np.where(allowed, q[rows, None] * k, -np.inf))
    return np.asarray(weights @ v / weights.sum(-1))


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forks beside threads from 3.12 on
        return os.fork()


def test_child_is_forked_while_a_mask_is_built() -> None:
    """The child has a copy of the slot in which the parent's thread builds, but not the thread."""
    cache_stats(clear=True)
    given, rows = feeds(SIZE), np.arange(0, SIZE, 97)
    want = expected(given, rows)
    parent = session()
    outputs: list[np.ndarray] = []
    thread = threading.Thread(target=lambda: outputs.append(parent.run(None, given)[0]))
    thread.start()
    while cache_stats()["misses"] == 0:  # then it is built, for some tenths of a second
        time.sleep(0.001)
    child = fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(120)  # ends a child that waits for ever
            found = session().run(None, given)[0]
            code = 0 if np.allclose(found[0, 0, rows, 0], want, atol=1e-5) else 2
        finally:
            os._exit(code)
    thread.join()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with status {status}, {signal.SIGALRM.value} for one that waited for ever"
    assert np.allclose(outputs[0][0, 0, rows, 0], want, atol=1e-5)
    assert cache_stats()["builds"] == 1


def test_element_masks_beyond_their_bound_are_evaluated() -> None:
    """43 MiB of element masks in a mask of 128 × 96 pairs a tile, of which 40 MiB may be stored."""
    S, T = 300, 1_200_000
    rng = np.random.default_rng(1)
    q = rng.uniform(-1, 1, (1, 2, S, 1)).astype(np.float32)
    k, v = (rng.uniform(-1, 1, (1, 2, T, 1)).astype(np.float32) for _ in range(2))
    output = np.full_like(q, np.nan)
    cache_stats(clear=True)
    Op("StofAttention", {"mask": MASK}).run([q, k, v], [output], 2)
    assert 38 << 20 < cache_stats()["bytes"] < 42 << 20
    rows = np.array([0, 1, 95, 96, 200, S - 2, S - 1])
    for head in range(2):
        given = {name: array[:, head : head + 1] for name, array in (("q", q), ("k", k), ("v", v))}
        assert np.allclose(output[0, head, rows, 0], expected(given, rows), atol=1e-5)
