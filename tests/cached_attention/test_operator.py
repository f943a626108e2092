# SPDX-License-Identifier: Apache-2.0
"""StofCachedAttention in ONNX Runtime on the CPU, against fp64 NumPy: outputs and caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from tests.cached_attention.oracle import DecoderStep, run_step

from stof.runtime.library import LibraryError, Op, library_path

NAMES = (
    "query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length", "cos_cache", "sin_cache",
    "position_ids", "attention_bias", "head_sink", "k_scale", "v_scale", "q_norm_weight", "k_norm_weight",
)  # fmt: skip
TYPES = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.float16): TensorProto.FLOAT16,
         np.dtype(np.int32): TensorProto.INT32, np.dtype(np.int64): TensorProto.INT64}  # fmt: skip
POISON = np.nan  # rows of a cache beyond the valid ones may hold anything
# Masks by their text, and the same in NumPy.
MASKS: dict[str, Callable[[int, Any, Any], Any]] = {
    "q - k < 4 or k % 3 == 0": lambda h, q, k: (q - k < 4) | (k % 3 == 0),
    "k <= q and k % 4 >= h": lambda h, q, k: k % 4 >= h + 0 * q,
}


@dataclass(frozen=True)
class Case:
    """One step: `past` valid keys of the longest sequence, of which sequence b has past - b * ragged."""

    batch: int = 2
    length: int = 1
    past: int = 17
    ragged: int = 5
    heads: int = 4
    groups: int = 2
    size: int = 32
    capacity: int = 600
    packed: bool = False
    shared: bool = True
    window: int = 0
    softcap: float = 0.0
    sink: bool = False
    rotary: int = 0
    interleaved: bool = False
    positions: bool = False
    norm: bool = False
    bias: bool = False
    sliding: bool = False
    dtype: Any = np.float32
    mask: str | None = None

    def lengths(self) -> npt.NDArray[np.int64]:
        """Valid keys after the step."""
        total = self.past + self.length
        least = 1 if self.past == 0 else self.length
        return np.array([max(least, total - b * self.ragged) for b in range(self.batch)])


def resident_rows(keys: int, capacity: int, window: int) -> int:
    """The rows that a sliding-window cache holds."""
    if keys <= capacity:
        return keys
    evicted = capacity - window + 1
    return keys - evicted * -(-(keys - capacity) // evicted)


def _model(case: Case, feeds: dict[str, npt.NDArray[Any]], outputs: list[Any]) -> bytes:
    mask = case.mask or (f"k <= q and q - k < {case.window}" if case.window else "k <= q")
    node = helper.make_node(
        "StofCachedAttention",
        [n if n in feeds else "" for n in NAMES],
        ["output", "present_key", "present_value"],
        domain="stof",
        num_heads=case.heads,
        kv_num_heads=case.groups,
        mask=mask,
        softcap=case.softcap,
        do_rotary=int(case.rotary > 0),
        rotary_interleaved=int(case.interleaved),
        qk_norm_epsilon=1e-5,
        sliding_window_cache=case.window if case.sliding else 0,
    )
    inputs = [helper.make_tensor_value_info(n, TYPES[a.dtype], a.shape) for n, a in feeds.items()]
    graph = helper.make_graph([node], "g", inputs, outputs)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("stof", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()


def _session(model: bytes) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(library_path()))
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def check(case: Case, seed: int = 0) -> None:
    """Runs a case and compares outputs and caches with fp64."""
    rng = np.random.default_rng(seed)
    T = case.dtype

    def draw(*shape: int) -> npt.NDArray[Any]:
        return rng.standard_normal(shape).astype(T)

    B, S, H, G, D = case.batch, case.length, case.heads, case.groups, case.size
    lengths, total = case.lengths(), int(case.past + S)
    total = int(lengths.max())
    q, k, v = draw(B, S, H, D), draw(B, S, G, D), draw(B, S, G, D)
    feeds: dict[str, npt.NDArray[Any]] = {}
    if case.packed:
        feeds["query"] = np.concatenate([x.reshape(B, S, -1) for x in (q, k, v)], 2)
    else:
        feeds |= {"query": q.reshape(B, S, -1), "key": k.reshape(B, S, -1), "value": v.reshape(B, S, -1)}
    C = case.capacity
    past_key = np.full((B, G, C, D), POISON, T)
    past_value = np.full((B, G, C, D), POISON, T)
    past = []  # all keys since the beginning
    for b in range(B):
        n = 0 if case.past == 0 else int(lengths[b]) - S
        keys, values = draw(G, n, D), draw(G, n, D)
        past.append((keys.astype(np.float64), values.astype(np.float64)))
        kept = resident_rows(n, C, case.window) if case.sliding else n
        past_key[b, :, :kept], past_value[b, :, :kept] = keys[:, n - kept :], values[:, n - kept :]
    feeds |= {"past_key": past_key, "past_value": past_value}
    feeds["seqlens_k"] = (lengths - 1).astype(np.int32)
    feeds["total_sequence_length"] = np.array(total, np.int32)
    extra: dict[str, Any] = {}
    if case.rotary:
        angles = rng.uniform(-3, 3, (total + 3, case.rotary // 2))
        feeds["cos_cache"], feeds["sin_cache"] = np.cos(angles).astype(T), np.sin(angles).astype(T)
        extra |= {"cos": feeds["cos_cache"].astype(float), "sin": feeds["sin_cache"].astype(float)}
        if case.positions:
            feeds["position_ids"] = rng.integers(0, total + 3, (B, S))
            extra["position_ids"] = feeds["position_ids"]
    if case.norm:
        feeds["q_norm_weight"], feeds["k_norm_weight"] = draw(D), draw(D)
        extra |= {"query_norm": feeds["q_norm_weight"].astype(float), "key_norm": feeds["k_norm_weight"].astype(float)}
    if case.bias:
        feeds["attention_bias"] = draw(B, 1, S, total)
        extra["bias"] = np.broadcast_to(feeds["attention_bias"].astype(float), (B, H, S, total))
    if case.sink:
        feeds["head_sink"] = draw(H)
        extra["sink"] = feeds["head_sink"].astype(float)

    def allowed(b: int, h: int, rows: Any, keys: Any) -> Any:
        if case.mask:
            return MASKS[case.mask](h, rows, keys)
        return rows - keys < case.window if case.window else np.broadcast_to(True, np.broadcast(rows, keys).shape)

    step = DecoderStep(
        *(x.astype(np.float64) for x in (q, k, v)),
        past=past,
        lengths=lengths,
        is_first_prompt=total == S,
        allowed=allowed,
        scale=D**-0.5,
        softcap=case.softcap,
        is_interleaved=case.interleaved,
        epsilon=1e-5,
        **extra,
    )
    output, present = run_step(step)
    kind = TYPES[np.dtype(T)]
    rows = C if case.sliding else max(C, total)
    shapes = {"output": (B, S, H * D), "present_key": (B, G, rows, D), "present_value": (B, G, rows, D)}
    infos = [helper.make_tensor_value_info(n, kind, s) for n, s in shapes.items()]
    session = _session(_model(case, feeds, infos))
    given = {n: ort.OrtValue.ortvalue_from_numpy(a.copy()) for n, a in feeds.items()}
    binding = session.io_binding()
    for name, value in given.items():
        binding.bind_ortvalue_input(name, value)
    results = {n: ort.OrtValue.ortvalue_from_numpy(np.full(s, POISON, T)) for n, s in shapes.items()}
    if case.shared:
        results |= {"present_key": given["past_key"], "present_value": given["past_value"]}
    for name, value in results.items():
        binding.bind_ortvalue_output(name, value)
    session.run_with_iobinding(binding)
    found = results["output"].numpy().reshape(B, S, H, D).astype(float)
    bound = 3e-3 if np.float16 == T else 2e-5
    real = ~np.isnan(output)
    assert real.any()
    np.testing.assert_allclose(found[real], output[real], rtol=bound, atol=bound * 4)
    for index, name in enumerate(("present_key", "present_value")):
        cache = results[name].numpy().astype(float)
        for b in range(B):
            expected = present[b][index]
            count = int(lengths[b])
            kept = resident_rows(count, C, case.window) if case.sliding else count
            np.testing.assert_allclose(cache[b, :, :kept], expected[:, count - kept :], rtol=bound, atol=bound)
            if case.shared and not case.sliding:  # rows behind the new ones stay as they are
                end = count if case.past else max(count, S)
                assert np.isnan(cache[b, :, end:]).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("past", [0, 1, 517])
@pytest.mark.parametrize("length", [1, 3, 16, 300])
def test_lengths(length: int, past: int, dtype: Any) -> None:
    capacity = past + length + 13
    check(Case(length=length, past=past, capacity=capacity, dtype=dtype, batch=3, ragged=2))
    check(Case(length=length, past=past, capacity=capacity, dtype=dtype, shared=False, packed=True, rotary=32))
    check(Case(length=length, past=past, capacity=capacity, dtype=dtype, window=20, rotary=32, batch=3, ragged=100))


BASE = Case()
FORMS = {
    "packed": replace(BASE, packed=True),
    "separate buffers": replace(BASE, shared=False),
    "a cache that grows": replace(BASE, shared=False, capacity=17),
    "window": replace(BASE, window=6),
    "softcap": replace(BASE, softcap=2.0),
    "sinks": replace(BASE, sink=True, window=7),
    "rotary": replace(BASE, rotary=32),
    "partial rotary": replace(BASE, rotary=16),
    "interleaved rotary": replace(BASE, rotary=32, interleaved=True),
    "partial interleaved rotary": replace(BASE, rotary=20, interleaved=True),
    "position ids": replace(BASE, rotary=32, positions=True, length=3),
    "norms": replace(BASE, norm=True, rotary=32),
    "norms alone": replace(BASE, norm=True),
    "bias": replace(BASE, bias=True, length=4),
    "no grouping": replace(BASE, groups=4),
    "groups of seven": replace(BASE, heads=14, groups=2, length=3),
    "one key head": replace(BASE, groups=1),
    "odd head size": replace(BASE, size=20, rotary=8, packed=True),
    "largest head size": replace(BASE, size=256, heads=2, groups=1),
    "strided keys": replace(BASE, mask="q - k < 4 or k % 3 == 0", past=70, length=5),
    "by head": replace(BASE, mask="k <= q and k % 4 >= h", past=70, length=5),
}
SLIDING = {
    f"capacity {capacity}, length {length}, past {past}": Case(
        sliding=True,
        window=16,
        capacity=capacity,
        length=length,
        past=past,
        rotary=32,
        batch=3,
        ragged=3,
        shared=shared,
    )
    for capacity, length, past, shared in [
        (16, 1, 5, True),
        (16, 1, 40, True),
        (16, 1, 40, False),
        (16, 4, 40, True),
        (16, 40, 0, True),
        (20, 1, 19, True),
        (20, 1, 20, True),
        (20, 1, 63, True),
        (20, 7, 33, False),
        (20, 50, 33, True),
        (32, 9, 0, True),
    ]
}


@pytest.mark.parametrize("name", list(FORMS))
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_forms(name: str, dtype: Any) -> None:
    case = replace(FORMS[name], dtype=dtype)
    check(case)
    check(replace(case, past=0, length=9, ragged=2, capacity=20))


@pytest.mark.parametrize("name", list(SLIDING))
def test_sliding_window_caches(name: str) -> None:
    check(SLIDING[name])
    check(replace(SLIDING[name], dtype=np.float16, sink=True))


# What is wrong with a step of B = 2, S = 1, H = 4, G = 2, D = 32, C = 64, and what the message says of it.
WRONG: dict[str, tuple[dict[str, npt.NDArray[Any]], str]] = {
    "a length beyond total": ({"seqlens_k": np.array([9, 70], np.int32)}, r"seqlens_k\[1\] is 70, expected 0 to 19"),
    "a negative length": ({"seqlens_k": np.array([-1, 9], np.int32)}, r"seqlens_k\[0\] is -1, expected 0 to 19"),
    "lengths of another batch": ({"seqlens_k": np.zeros(3, np.int32)}, "seqlens_k has shape \\[3\\]"),
    "lengths of another type": ({"seqlens_k": np.zeros(2, np.int64)}, "seqlens_k has shape .* data type 7"),
    "total too small": ({"total_sequence_length": np.array(0, np.int32)}, "total_sequence_length is 0, expected 1"),
    "total too large": (
        {"total_sequence_length": np.array(2**30, np.int32)},
        "total_sequence_length is 1073741824, expected 1",
    ),
    "more past than the cache": (
        {"seqlens_k": np.array([80, 80], np.int32), "total_sequence_length": np.array(81, np.int32)},
        "seqlens_k\\[0\\] is 80: 80 keys of the past, expected at most the capacity of past_key, 64",
    ),
    "a cache of other heads": ({"past_key": np.zeros((2, 3, 64, 32), np.float32)}, "past_key has shape"),
    "a cache of another head size": ({"past_value": np.zeros((2, 2, 64, 16), np.float32)}, "past_value has shape"),
    "a query of another width": ({"query": np.zeros((2, 1, 130), np.float32)}, "query has shape"),
    "a key of another length": ({"key": np.zeros((2, 2, 64), np.float32)}, "key has shape"),
    "a position beyond the table": ({"position_ids": np.array([[3], [30]])}, "position_ids"),
    "a negative position": ({"position_ids": np.array([[-3], [1]])}, "position_ids"),
    "a short rotary table": (
        {n: np.ones((9, 16), np.float32) for n in ("cos_cache", "sin_cache")},
        "cos_cache",
    ),
    "a wide rotary table": ({n: np.ones((30, 17), np.float32) for n in ("cos_cache", "sin_cache")}, "cos_cache"),
    "a bias of another width": (
        {"attention_bias": np.zeros((1, 1, 1, 7), np.float32)},
        "attention_bias: bias has shape",
    ),
    "sinks of other heads": ({"head_sink": np.zeros(3, np.float32)}, "head_sink: sink has shape"),
    "quantized caches": ({"k_scale": np.ones(1, np.float32)}, "k_scale is given, expected none"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_inputs_are_named(name: str) -> None:
    rng = np.random.default_rng(1)
    case = Case(rotary=32, positions=True)

    def draw(*shape: int) -> npt.NDArray[Any]:
        return rng.standard_normal(shape).astype(np.float32)

    feeds: dict[str, npt.NDArray[Any]] = {
        "query": draw(2, 1, 128), "key": draw(2, 1, 64), "value": draw(2, 1, 64),
        "past_key": draw(2, 2, 64, 32), "past_value": draw(2, 2, 64, 32),
        "seqlens_k": np.array([19, 7], np.int32), "total_sequence_length": np.array(20, np.int32),
        "cos_cache": draw(30, 16), "sin_cache": draw(30, 16), "position_ids": np.array([[19], [7]]),
    }  # fmt: skip
    infos = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("output", "present_key", "present_value")
    ]
    assert len(_session(_model(case, feeds, infos)).run(None, feeds)) == 3
    changes, message = WRONG[name]
    feeds |= changes
    if "cos_cache" in changes:
        del feeds["position_ids"]
    with pytest.raises(Exception, match=f"StofCachedAttention.*{message}"):
        _session(_model(case, feeds, infos)).run(None, feeds)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"num_heads": 3}, "attribute num_heads is 3, expected a multiple of kv_num_heads, 2"),
        ({"num_heads": 0}, "attribute num_heads is 0, expected 1"),
        ({"softcap": -1.0}, "attribute softcap is -1"),
        ({"mask": "k < T"}, "the mask reads T"),
        ({"mask": "pad[b, k]"}, "the mask reads a run-time operand"),
        ({"mask": "k <="}, "mask expression"),
        ({"sliding_window_cache": 16, "mask": "k % 2 == 0"}, "not one of distances"),
        ({"sliding_window_cache": -1}, "attribute sliding_window_cache is -1"),
        ({"do_rotary": 2}, "attribute do_rotary is 2"),
        ({"precision": "int4"}, "attribute precision is 'int4', expected nothing, int8 or int8_fp8"),
    ],
)
def test_wrong_attributes_are_named(attributes: dict[str, Any], message: str) -> None:
    given = {"num_heads": 4, "kv_num_heads": 2, **attributes}
    node = helper.make_node(
        "StofCachedAttention", list(NAMES[:7]), ["output", "present_key", "present_value"], domain="stof", **given
    )
    kinds = [TensorProto.FLOAT] * 5 + [TensorProto.INT32] * 2
    inputs = [helper.make_tensor_value_info(n, t, None) for n, t in zip(NAMES, kinds, strict=False)]
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in node.output]
    graph = helper.make_graph([node], "g", inputs, outputs)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("stof", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
    with pytest.raises(Exception, match=message):
        _session(model)


@pytest.mark.parametrize(
    "attributes", [{"do_rotary": 1}, {"do_rotary": 1, "sliding_window_cache": 4, "mask": "q - k < 4"}]
)
def test_a_step_without_tokens_copies_the_cache(attributes: dict[str, Any]) -> None:
    rng = np.random.default_rng(4)
    past = [rng.standard_normal((2, 1, 6, 8)).astype(np.float32) for _ in range(2)]
    tables = [np.ones((6, 4), np.float32)] * 2
    inputs = [
        np.zeros((2, 0, 24), np.float32),
        None,
        None,
        *past,
        np.array([2, 4], np.int32),
        np.array(5, np.int32),
        *tables,
    ]
    outputs = [np.zeros((2, 0, 8), np.float32), *(np.full((2, 1, 6, 8), np.nan, np.float32) for _ in range(2))]
    Op("StofCachedAttention", {"num_heads": 1, "kv_num_heads": 1, **attributes}).run(inputs, outputs)
    for before, after in zip(past, outputs[1:], strict=True):
        for b, keys in enumerate((3, 5)):
            np.testing.assert_array_equal(after[b, :, :keys], before[b, :, :keys])


@pytest.mark.parametrize(
    ("buffers", "message"),  # first elements of past_key, past_value, present_key and present_value in one array
    [
        ((0, 96, 96, 0), "past_key and present_value overlap in memory, expected a buffer each"),
        ((0, 96, 192, 192), "present_key and present_value overlap in memory, expected a buffer each"),
        ((0, 96, 80, 192), "past_key and present_key overlap in memory, expected one buffer or two"),
        ((0, 96, 0, 192), "share the buffer of keys or of values alone"),
        ((0, 0, 0, 0), "present_key and present_value overlap in memory"),
        ((0, 96, 0, 96), ""),
        ((0, 0, 96, 192), ""),
    ],
)
def test_caches_that_overlap_are_refused(buffers: tuple[int, ...], message: str) -> None:
    memory = np.random.default_rng(5).standard_normal(400).astype(np.float32)
    past_key, past_value, present_key, present_value = (memory[i : i + 96].reshape(2, 1, 6, 8) for i in buffers)
    query, lengths = np.ones((2, 1, 24), np.float32), np.array([2, 4], np.int32)
    inputs = [query, None, None, past_key, past_value, lengths, np.array(5, np.int32)]
    outputs = [np.full((2, 1, 8), np.nan, np.float32), present_key, present_value]
    op = Op("StofCachedAttention", {"num_heads": 1, "kv_num_heads": 1})
    if message:
        with pytest.raises(LibraryError, match=message):
            op.run(inputs, outputs)
        return
    op.run(inputs, outputs)
    assert np.isfinite(outputs[0]).all()
