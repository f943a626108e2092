# SPDX-License-Identifier: Apache-2.0
"""StofCachedAttention beside GroupQueryAttention in ONNX Runtime: one node over KV caches of many layers, in turns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from bench.cpu.problem import TOLERANCE
from stof.bench import measure
from stof.bench.results import Record
from stof.bench.sessions import session

_HEADS = 32
_LEAST_LAYERS = 8
_COLD_BYTES = 256 << 20  # of all layers together: several times the largest L3 cache
_MOST_BYTES = 2 << 30
_MOST_LAYERS = 256
_DRAWN = 1 << 20  # random values; caches repeat them
_SCALE = 0.03  # of quantized caches, whose numbers go up to 4


@dataclass(frozen=True)
class DecodePoint:
    """One step of a decoder: S new tokens of B sequences, which have T keys after it, all of one length.

    Attributes:
        window: how many keys a query attends at most; 0 is dense.
        cache: the type of the caches: "fp32", or "int8" with one scale for keys and one for values.
    """

    B: int
    T: int
    D: int
    G: int
    window: int
    S: int = 1
    cache: str = "fp32"

    @property
    def is_quantized(self) -> bool:
        """Whether the caches are."""
        return self.cache != "fp32"

    @property
    def row_bytes(self) -> int:
        """Bytes of the keys and values of a position in a layer."""
        return 2 * self.G * self.D * (1 if self.is_quantized else 4)

    @property
    def mask(self) -> str:
        """The mask expression."""
        return "k <= q" if not self.window else f"k <= q and q - k < {self.window}"

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of a layer."""
        return self.B * self.T * self.row_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes of the keys and values that the queries attend."""
        keys = min(self.T, self.window + self.S - 1) if self.window else self.T
        return self.B * keys * self.row_bytes

    @property
    def layers(self) -> int:
        """Layers that take turns, so that a cache is not in L3 when its turn comes."""
        cold = max(_LEAST_LAYERS, -(-_COLD_BYTES // self.cache_bytes))
        return max(2, min(cold, _MOST_LAYERS, _MOST_BYTES // self.cache_bytes))

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it attends, of all heads and sequences."""
        past = self.T - self.S
        keys = (min(past + i + 1, self.window or self.T) for i in range(self.S))
        return self.B * _HEADS * sum(keys)

    def __str__(self) -> str:
        kind = f"window {self.window}" if self.window else "dense"
        cache = f" {self.cache}" if self.is_quantized else ""
        return f"B{self.B} H{_HEADS} G{self.G} S{self.S} T{self.T} D{self.D} {kind}{cache}"


def points() -> Iterator[DecodePoint]:
    """The grid: decode steps, a prompt under a window, and decode steps over int8 caches. Layers beyond 1 GiB are left out."""
    for B, T, window, D, G in itertools.product((1, 8), (1024, 4096, 16384), (0, 1024), (64, 128), (1, 8, 32)):
        point = DecodePoint(B, T, D, G, window)
        if point.cache_bytes <= 1 << 30 and window < T:
            yield point
    yield DecodePoint(1, 8192, 128, 8, 1024, S=8192)
    for T, G in itertools.product((1024, 4096, 16384), (8, 32)):
        yield DecodePoint(1, T, 128, G, 0, cache="int8")


class _Problem:
    """The tensors of a point: new tokens, and the caches of its layers, which all candidates share."""

    def __init__(self, point: DecodePoint) -> None:
        self.point = point
        rng = np.random.default_rng(0)
        self._drawn = rng.standard_normal(_DRAWN).astype(np.float32)
        B, S, D, G = point.B, point.S, point.D, point.G
        self.feeds = {
            "query": rng.standard_normal((B, S, _HEADS * D), np.float32),
            "key": rng.standard_normal((B, S, G * D), np.float32),
            "value": rng.standard_normal((B, S, G * D), np.float32),
            "seqlens_k": np.full([B], point.T - 1, np.int32),
            "total_sequence_length": np.array(point.T, np.int32),
        }
        shape = (B, G, point.T, D)
        stored = self.store(self._drawn)
        if point.is_quantized:
            scale = np.full(1, _SCALE, np.float32)
            self.feeds |= {"k_scale": scale, "v_scale": scale}
        self.caches = [
            [np.resize(np.roll(stored, 7919 * (2 * layer + i)), shape) for i in range(2)]
            for layer in range(point.layers)
        ]
        self.output = np.full((B, S, _HEADS * D), np.nan, np.float32)

    def store(self, values: np.ndarray) -> np.ndarray:
        """The values as the caches hold them."""
        if not self.point.is_quantized:
            return values
        return np.clip(np.rint(values * np.float32(1 / _SCALE)), -128, 127).astype(np.int8)

    @cached_property
    def expected(self) -> np.ndarray:
        """Output of the last query of each head of the first sequence and layer in fp64, [H, D]."""
        point = self.point
        D, G, S = point.D, point.G, point.S
        keys, values = (cache[0].astype(np.float64) for cache in self.caches[0])
        for cache, name in ((keys, "key"), (values, "value")):
            cache[:, point.T - S :] = self.store(self.feeds[name][0]).reshape(S, G, D).transpose(1, 0, 2)
        if point.is_quantized:
            keys, values = keys * float(np.float32(_SCALE)), values * float(np.float32(_SCALE))
        query = self.feeds["query"][0, -1].reshape(_HEADS, D).astype(np.float64)
        first = max(0, point.T - point.window) if point.window else 0
        found = np.empty((_HEADS, D))
        for h in range(_HEADS):
            g = h // (_HEADS // G)
            scores = keys[g, first:] @ query[h] / np.sqrt(D)
            weights = np.exp(scores - scores.max())
            found[h] = weights / weights.sum() @ values[g, first:]
        return found

    def error(self) -> float:
        """The largest difference of `output` from fp64, over the largest value."""
        got = self.output[0, -1].reshape(_HEADS, self.point.D)
        return float(np.abs(got - self.expected).max() / np.abs(self.expected).max())


def _node(point: DecodePoint, op_type: str, domain: str, **attributes: Any) -> onnx.NodeProto:
    inputs = ["query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length"]
    inputs += [""] * 5 + ["k_scale", "v_scale"] if point.is_quantized else []
    outputs = ["output", "present_key", "present_value"]
    node: onnx.NodeProto = helper.make_node(
        op_type, inputs, outputs, domain=domain, num_heads=_HEADS, kv_num_heads=point.G, **attributes
    )
    return node


def _group_query(point: DecodePoint) -> onnx.NodeProto:
    attributes: dict[str, Any] = {"local_window_size": point.window or -1}
    if point.is_quantized:
        attributes |= {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}
    return _node(point, "GroupQueryAttention", "com.microsoft", **attributes)


def _stof(point: DecodePoint) -> onnx.NodeProto:
    return _node(point, "StofCachedAttention", "stof", mask=point.mask)


CANDIDATES: tuple[tuple[str, str, Callable[[DecodePoint], onnx.NodeProto]], ...] = (
    ("stof", "stof in ONNX Runtime", _stof),
    ("ort-gqa", "ONNX Runtime GroupQueryAttention", _group_query),
)


def _runner(problem: _Problem, node: onnx.NodeProto, threads: int) -> Callable[[], None]:
    """What runs the node over the next layer's cache: past and present are one buffer."""
    point = problem.point
    cache = [point.B, point.G, point.T, point.D]
    types = {a: helper.np_dtype_to_tensor_dtype(x.dtype) for a, x in problem.feeds.items()}
    inputs = [helper.make_tensor_value_info(n, types[n], x.shape) for n, x in problem.feeds.items()]
    stored = TensorProto.INT8 if point.is_quantized else TensorProto.FLOAT
    inputs += [helper.make_tensor_value_info(n, stored, cache) for n in ("past_key", "past_value")]
    outputs = [helper.make_tensor_value_info("output", TensorProto.FLOAT, problem.output.shape)]
    outputs += [helper.make_tensor_value_info(n, stored, cache) for n in ("present_key", "present_value")]
    graph = helper.make_graph([node], "step", inputs, outputs)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(node.domain, 1)]
    model = helper.make_model(graph, opset_imports=opsets)
    model.ir_version = 9
    found = session(model.SerializeToString(), threads, stof=node.domain == "stof")
    bindings = []
    for keys, values in problem.caches:
        binding = found.io_binding()
        for name, array in problem.feeds.items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        binding.bind_output("output", "cpu", 0, np.float32, problem.output.shape, problem.output.ctypes.data)
        for name, array in (("key", keys), ("value", values)):
            binding.bind_input(f"past_{name}", "cpu", 0, array.dtype, array.shape, array.ctypes.data)
            binding.bind_output(f"present_{name}", "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        bindings.append(binding)
    order = itertools.cycle(bindings)
    return lambda: found.run_with_iobinding(next(order))


def measure_point(point: DecodePoint, threads: int, rounds: int) -> Record:
    """Checks both candidates against fp64 and times them in turns.

    Raises:
        ValueError: when the output of one is wrong.
    """
    problem = _Problem(point)
    rows: dict[str, dict[str, Any]] = {}
    runs = []
    for name, label, node in CANDIDATES:
        problem.output.fill(np.nan)
        run = _runner(problem, node(point), threads)
        run()
        error = problem.error()
        if not error <= TOLERANCE:
            raise ValueError(f"{point}: {label} differs from fp64 by {error:.1e} of the largest value")
        rows[name] = {"label": label, "error": float(f"{error:.1e}")}
        runs.append(run)
    before = measure.rates(threads)
    timings = measure.interleave(runs, rounds)
    rates = measure.best_rates(before, measure.rates(threads))
    for (name, _, _), timing in zip(CANDIDATES, timings, strict=True):
        gbps = point.read_bytes / timing.best * 1e-9
        rows[name].update(
            us=round(timing.best * 1e6, 1),
            median_us=round(timing.median * 1e6, 1),
            worst_us=round(timing.worst * 1e6, 1),
            useful_gflops=round(4 * point.D * point.pairs / timing.best * 1e-9, 2),
            gbps=round(gbps, 2),
            bandwidth=round(gbps / rates["read_gbps"], 3),
        )
    shape = {"B": point.B, "H": _HEADS, "G": point.G, "S": point.S, "T": point.T, "D": point.D, "dtype": "fp32"}
    shape |= {"cache": point.cache} if point.is_quantized else {}
    cache = [point.cache] if point.is_quantized else []
    return {
        "key": [point.B, point.G, point.S, point.T, point.D, point.window, threads, *cache],
        "grid": "decode",
        "mask": point.mask,
        "shape": shape,
        "layers": point.layers,
        "machine": {**measure.machine(threads), **rates},
        "rounds": rounds,
        "peers": rows,
    }


def describe_record(point: DecodePoint, record: Record) -> str:
    """The record as a line of text."""
    own, other = record["peers"]["stof"], record["peers"]["ort-gqa"]
    return (
        f"{point!s:44s} {record['machine']['threads']} thread(s), {record['layers']:3d} layers: "
        f"stof {own['us']:9.1f} us, {own['bandwidth']:4.0%} of {record['machine']['read_gbps']:.1f} GB/s; "
        f"GroupQueryAttention {other['us'] / own['us']:6.2f}x"
    )
