# SPDX-License-Identifier: Apache-2.0
"""StofCachedAttention beside GroupQueryAttention in ONNX Runtime: one node over KV caches of many layers, in turns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from bench.core.candidate import Candidate, Runner
from bench.core.case import AttentionCase
from bench.core.problem import AttentionProblem
from bench.cpu.problem import TOLERANCE
from stof.bench.results import Record
from stof.bench.sessions import session
from stof.cached_attention.site import OP_INPUTS, PAST_BOUNDS, PRESENT_BOUNDS

_HEADS = 32
_LEAST_LAYERS = 8
_COLD_BYTES = 256 << 20  # of all layers together: several times the largest L3 cache
_MOST_BYTES = 2 << 30
_MOST_LAYERS = 256
_DRAWN = 1 << 20  # random values; caches repeat them
_SCALE = 0.03  # of quantized caches, whose numbers go up to 4


def step(B: int, T: int, D: int, G: int, window: int = 0, S: int = 1, cache: str = "") -> AttentionCase:
    """S new tokens of B sequences, which have T keys after it, all of one length.

    Args:
        B: sequences.
        T: keys after the step.
        D: the size of a head.
        G: heads of keys.
        window: how many keys a query attends at most; 0 is dense.
        S: new tokens.
        cache: "int8": the caches are quantized, with one scale for keys and one for values.
    """
    name, mask = (f"window {window}", f"k <= q and q - k < {window}") if window else ("dense", "k <= q")
    return AttentionCase("decode", name, mask, B, _HEADS, G, S, T, D, "float32", cache=cache, window=window)


def steps() -> Iterator[AttentionCase]:
    """The grid: decode steps, a prompt under a window, and decode steps over int8 caches. Layers beyond 1 GiB are left out."""
    for B, T, window, D, G in itertools.product((1, 8), (1024, 4096, 16384), (0, 1024), (64, 128), (1, 8, 32)):
        case = step(B, T, D, G, window)
        if DecodeProblem(case).cache_bytes <= 1 << 30 and window < T:
            yield case
    yield step(1, 8192, 128, 8, 1024, S=8192)
    for T, G in itertools.product((1024, 4096, 16384), (8, 32)):
        yield step(1, T, 128, G, cache="int8")


class DecodeProblem(AttentionProblem):
    """New tokens, and the caches of several layers, which take turns and which all candidates share.

    Attributes:
        is_quantized: whether the caches are.
    """

    tolerance = TOLERANCE

    def __init__(self, case: AttentionCase) -> None:
        super().__init__(case)
        self.is_quantized = bool(case.cache)

    @property
    def row_bytes(self) -> int:
        """Bytes of the keys and values of a position in a layer."""
        return 2 * self.case.G * self.case.D * (1 if self.is_quantized else 4)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of a layer."""
        return self.case.B * self.case.T * self.row_bytes

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values that the queries attend."""
        T = self.case.T
        keys = min(T, self.case.window + self.case.S - 1) if self.case.window else T
        return self.case.B * keys * self.row_bytes

    @property
    def layers(self) -> int:
        """Layers that take turns, so that a cache is not in L3 when its turn comes."""
        cold = max(_LEAST_LAYERS, -(-_COLD_BYTES // self.cache_bytes))
        return max(2, min(cold, _MOST_LAYERS, _MOST_BYTES // self.cache_bytes))

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it attends, of all heads and sequences."""
        keys = (min(self.case.P + i + 1, self.case.window or self.case.T) for i in range(self.case.S))
        return self.case.B * self.case.H * sum(keys)

    @cached_property
    def _drawn(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Random values that caches repeat, and those of the new tokens, by the names of the node's inputs."""
        case, rng = self.case, np.random.default_rng(0)
        repeated = rng.standard_normal(_DRAWN).astype(np.float32)
        widths = {"query": case.H * case.D, "key": case.G * case.D, "value": case.G * case.D}
        tokens = {name: rng.standard_normal((case.B, case.S, width), np.float32) for name, width in widths.items()}
        return repeated, tokens

    @cached_property
    def feeds(self) -> dict[str, np.ndarray]:
        """The inputs of the node but for the caches, by name."""
        lengths = np.full([self.case.B], self.case.T - 1, np.int32)
        total = np.array(self.case.T, np.int32)
        feeds = {**self._drawn[1], "seqlens_k": lengths, "total_sequence_length": total}
        if self.is_quantized:
            scale = np.full(1, _SCALE, np.float32)
            feeds |= {"k_scale": scale, "v_scale": scale}
        return feeds

    @cached_property
    def caches(self) -> list[list[np.ndarray]]:
        """Keys and values [B, G, T, D] of each layer."""
        shape = (self.case.B, self.case.G, self.case.T, self.case.D)
        stored = self.store(self._drawn[0])
        return [
            [np.resize(np.roll(stored, 7919 * (2 * layer + i)), shape) for i in range(2)]
            for layer in range(self.layers)
        ]

    @cached_property
    def output(self) -> np.ndarray:
        """The buffer [B, S, H * D] that all candidates write."""
        return np.full((self.case.B, self.case.S, self.case.H * self.case.D), np.nan, np.float32)

    def store(self, values: np.ndarray) -> np.ndarray:
        """The values as the caches hold them."""
        if not self.is_quantized:
            return values
        return np.clip(np.rint(values * np.float32(1 / _SCALE)), -128, 127).astype(np.int8)

    @cached_property
    def _expected(self) -> np.ndarray:
        """Output of the last query of each head of the first sequence and layer in fp64, [H, D]."""
        case = self.case
        H, D, G, S = case.H, case.D, case.G, case.S
        keys, values = (cache[0].astype(np.float64) for cache in self.caches[0])
        for cache, name in ((keys, "key"), (values, "value")):
            cache[:, case.T - S :] = self.store(self.feeds[name][0]).reshape(S, G, D).transpose(1, 0, 2)
        if self.is_quantized:
            keys, values = keys * float(np.float32(_SCALE)), values * float(np.float32(_SCALE))
        query = self.feeds["query"][0, -1].reshape(H, D).astype(np.float64)
        first = max(0, case.T - self.case.window) if self.case.window else 0
        found = np.empty((H, D))
        for h in range(H):
            g = h // (H // G)
            scores = keys[g, first:] @ query[h] / np.sqrt(D)
            weights = np.exp(scores - scores.max())
            found[h] = weights / weights.sum() @ values[g, first:]
        return found

    def error(self, output: np.ndarray) -> float:
        """The largest difference of the first layer's output [B, S, H * D] from fp64, over the largest value."""
        got = output[0, -1].reshape(self.case.H, self.case.D)
        return float(np.abs(got - self._expected).max() / np.abs(self._expected).max())

    def describe(self, threads: int) -> Record:
        """Key, mask, shape and layers."""
        case = self.case
        shape = {"B": case.B, "H": case.H, "G": case.G, "S": case.S, "T": case.T, "D": case.D, "dtype": "fp32"}
        shape |= {"cache": case.cache} if self.is_quantized else {}
        cache = [case.cache] if self.is_quantized else []
        return {
            "key": [case.B, case.G, case.S, case.T, case.D, self.case.window, threads, *cache],
            "grid": "decode",
            "mask": case.mask,
            "shape": shape,
            "layers": self.layers,
        }

    def figures(self, candidate: str, seconds: float, rates: Mapping[str, float]) -> dict[str, float]:
        """Useful GFLOP/s, GB/s of keys and values, and the share of the machine's bandwidth."""
        del candidate
        gbps = self.bytes / seconds * 1e-9
        return {
            "useful_gflops": round(self.useful_flops / seconds * 1e-9, 2),
            "gbps": round(gbps, 2),
            "bandwidth": round(gbps / rates["read_gbps"], 3),
        }


def _node(problem: DecodeProblem, op_type: str, domain: str, **attributes: Any) -> onnx.NodeProto:
    inputs = ["query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length"]
    inputs += [""] * 5 + ["k_scale", "v_scale"] if problem.is_quantized else []
    outputs = ["output", "present_key", "present_value"]
    case = problem.case
    node: onnx.NodeProto = helper.make_node(
        op_type, inputs, outputs, domain=domain, num_heads=case.H, kv_num_heads=case.G, **attributes
    )
    return node


def _group_query(problem: DecodeProblem, threads: int) -> Runner:
    attributes: dict[str, Any] = {"local_window_size": problem.case.window or -1}
    if problem.is_quantized:
        attributes |= {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}
    return _runner(problem, _node(problem, "GroupQueryAttention", "com.microsoft", **attributes), threads)


def stof_step(problem: DecodeProblem, threads: int, **pages: int) -> Runner:
    """StofCachedAttention.

    Args:
        problem: the step.
        threads: of the session.
        pages: ``chosen_pages`` and ``page_rows``, where steps attend the best pages alone.
    """
    node = _node(problem, "StofCachedAttention", "stof", mask=problem.case.mask, **pages)
    if pages:
        node.input.extend([""] * (OP_INPUTS.index(PAST_BOUNDS) - len(node.input)))
        node.input.append(PAST_BOUNDS)
        node.output.append(PRESENT_BOUNDS)
    return _runner(problem, node, threads, pages.get("page_rows", 0))


CANDIDATES: tuple[Candidate[DecodeProblem, int, Runner], ...] = (
    Candidate("stof", "stof in ONNX Runtime", stof_step),
    Candidate("ort-gqa", "ONNX Runtime GroupQueryAttention", _group_query),
)


def _runner(problem: DecodeProblem, node: onnx.NodeProto, threads: int, page_rows: int = 0) -> Runner:
    """Runs the node over the next layer's cache: past and present are one buffer.

    Args:
        problem: has the caches.
        node: the node.
        threads: of the session.
        page_rows: of a page, where the node reads bounds of pages: they are computed before, once a layer.
    """
    case = problem.case
    cache = [case.B, case.G, case.T, case.D]
    types = {a: helper.np_dtype_to_tensor_dtype(x.dtype) for a, x in problem.feeds.items()}
    inputs = [helper.make_tensor_value_info(n, types[n], x.shape) for n, x in problem.feeds.items()]
    stored = TensorProto.INT8 if problem.is_quantized else TensorProto.FLOAT
    inputs += [helper.make_tensor_value_info(n, stored, cache) for n in ("past_key", "past_value")]
    outputs = [helper.make_tensor_value_info("output", TensorProto.FLOAT, problem.output.shape)]
    outputs += [helper.make_tensor_value_info(n, stored, cache) for n in ("present_key", "present_value")]
    if page_rows:
        bounds: list[int | str | None] = [case.B, case.G, "pages", 2, case.D]
        inputs.append(helper.make_tensor_value_info(PAST_BOUNDS, TensorProto.FLOAT, bounds))
        outputs.append(helper.make_tensor_value_info(PRESENT_BOUNDS, TensorProto.FLOAT, bounds))
    graph = helper.make_graph([node], "step", inputs, outputs)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(node.domain, 1)]
    model = helper.make_model(graph, opset_imports=opsets)
    model.ir_version = 9
    found = session(model.SerializeToString(), threads, stof=node.domain == "stof")
    pages = (case.B, case.G, -(-case.T // page_rows) if page_rows else 0, 2, case.D)
    kept: list[np.ndarray] = []

    def bind(keys: np.ndarray, values: np.ndarray, past: np.ndarray | None, present: np.ndarray | None) -> Any:
        binding = found.io_binding()
        given = {**problem.feeds, "past_key": keys, "past_value": values}
        written = {"output": problem.output, "present_key": keys, "present_value": values}
        if past is not None and present is not None:
            given, written = {**given, PAST_BOUNDS: past}, {**written, PRESENT_BOUNDS: present}
        for bind_array, arrays in ((binding.bind_input, given), (binding.bind_output, written)):
            for name, array in arrays.items():
                bind_array(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        return binding

    bindings = []
    for keys, values in problem.caches:
        if not page_rows:
            bindings.append(bind(keys, values, None, None))
            continue
        kept.append(np.full(pages, np.nan, np.float32))
        unknown = np.zeros((*pages[:2], 0, *pages[3:]), np.float32)
        found.run_with_iobinding(bind(keys, values, unknown, kept[-1]))
        bindings.append(bind(keys, values, kept[-1], kept[-1]))
    order = itertools.cycle(bindings)

    def run() -> None:
        found.run_with_iobinding(next(order))

    def output() -> np.ndarray:
        problem.output.fill(np.nan)
        run()
        return problem.output

    return Runner(run, output, keep=(kept,))


def describe_record(record: Record) -> list[str]:
    """The record as text."""
    shape, machine = record["shape"], record["machine"]
    own, other = record["peers"]["stof"], record["peers"]["ort-gqa"]
    window = record["key"][5]
    kind = f"window {window}" if window else "dense"
    cache = f" {shape['cache']}" if "cache" in shape else ""
    sizes = " ".join(f"{k}{shape[k]}" for k in "BHGSTD")
    text = f"{sizes} {kind}{cache}"
    head = f"{text:44s} {machine['threads']} thread(s), {record['layers']:3d} layers: "
    if missing := [f"{row['label']} missing: {row['missing']}" for row in (own, other) if "us" not in row]:
        return [head + "; ".join(missing)]
    return [
        f"{head}stof {own['us']:9.1f} us, {own['bandwidth']:4.0%} of {machine['read_gbps']:.1f} GB/s; "
        f"GroupQueryAttention {other['us'] / own['us']:6.2f}x"
    ]
