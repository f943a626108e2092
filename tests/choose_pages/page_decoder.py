# SPDX-License-Identifier: Apache-2.0
"""A decoder of one StofCachedAttention node with ``chosen_pages``, in ONNX Runtime on the CPU, held to the definition."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnx import TensorProto, helper
from tests.choose_pages.pages_oracle import Mask, PagedStep, bounds_of

import stof

INPUTS = ("query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length")
OUTPUTS = ("output", "present_key", "present_value", "present_page_bounds")
BOUNDS = "past_page_bounds"
BOUNDS_INDEX = 21
TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
}
LIMITS = {"float32": 2e-5, "float16": 3e-3, "bfloat16": 3e-2}
Array = npt.NDArray[Any]


def np_type(dtype: str) -> Any:
    return ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)


def make_model(dtype: str, chosen: int, outputs: tuple[str, ...] = OUTPUTS, **attributes: Any) -> bytes:
    """One node with inputs and outputs of any shapes; key bounds only where pages are chosen."""
    inputs = [*INPUTS, *[""] * (BOUNDS_INDEX - len(INPUTS)), BOUNDS] if chosen else list(INPUTS)
    outputs = outputs if chosen else outputs[:3]
    if chosen:
        attributes |= {"chosen_pages": chosen}
    node = helper.make_node("StofCachedAttention", inputs, list(outputs), name="step", domain="stof", **attributes)
    ints = dict.fromkeys(INPUTS[5:], TensorProto.INT32)
    infos = [helper.make_tensor_value_info(n, ints.get(n, TYPES[dtype]), None) for n in inputs if n]
    results = [helper.make_tensor_value_info(n, TYPES[dtype], None) for n in outputs]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("stof", 1)]
    graph = helper.make_graph([node], "g", infos, results)
    return helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()


def make_session(model: bytes, threads: int = 2) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    stof.register(options)
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def to_value(array: Array) -> ort.OrtValue:
    """An OrtValue with memory of its own; bf16 has no NumPy type that ONNX Runtime knows."""
    array = np.ascontiguousarray(array)
    if array.dtype == ml_dtypes.bfloat16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), TensorProto.BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(array)


def run(session: ort.InferenceSession, feeds: dict[str, Array], rows: int = 64) -> dict[str, Array]:
    """The outputs; rows: of a page. bf16 is read from the memory of outputs that are given."""
    binding = session.io_binding()
    kept = {n: to_value(a) for n, a in feeds.items()}
    for name, value in kept.items():
        binding.bind_ortvalue_input(name, value)
    names = [o.name for o in session.get_outputs()]
    results: dict[str, Array] = {}
    if feeds["query"].dtype == ml_dtypes.bfloat16:
        for name, shape in shapes_of(feeds, names, rows).items():
            results[name] = np.full(shape, 0x7FC0, np.uint16)  # NaN
            value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(results[name], TensorProto.BFLOAT16)
            binding.bind_ortvalue_output(name, value)
        session.run_with_iobinding(binding)
        return {n: a.view(ml_dtypes.bfloat16) for n, a in results.items()}
    for name in names:
        binding.bind_output(name)
    session.run_with_iobinding(binding)
    return dict(zip(names, (o.numpy() for o in binding.get_outputs()), strict=True))


def shapes_of(feeds: dict[str, Array], names: list[str], rows: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the outputs, by the inputs."""
    _, heads, capacity, size = feeds["past_key"].shape
    batch = feeds["query"].shape[0]
    capacity = max(capacity, int(feeds["total_sequence_length"]))
    cache = (batch, heads, capacity, size)
    pages = -(-capacity // rows)
    return dict(zip(names, (feeds["query"].shape, cache, cache, (batch, heads, pages, 2, size)), strict=False))


@dataclass
class PageDecoder:
    """Steps of B sequences.

    Attributes:
        capacity: rows of caches; 0: they grow with the longest sequence.
        mask: text and the same in NumPy.
        lengths: [B], keys now.
        keys, values: of each sequence, [G, n, D], as caches hold them.
        near_ties: KV heads of steps whose choice rounding could turn; they are compared with neither set of pages.
    """

    rng: np.random.Generator
    batch: int = 2
    heads: int = 4
    groups: int = 2
    size: int = 64
    dtype: str = "float32"
    rows: int = 64
    chosen: int = 2
    capacity: int = 0
    mask: tuple[str, Mask] = ("k <= q", lambda h, q, k: k <= q)
    scale: float = 0.0
    threads: int = 2
    keys: list[Array] = field(default_factory=list)
    values: list[Array] = field(default_factory=list)
    cache: dict[str, Array] = field(default_factory=dict)
    near_ties: int = 0
    compared: int = 0

    def __post_init__(self) -> None:
        self.scale = self.scale or self.size**-0.5
        attributes = {"num_heads": self.heads, "kv_num_heads": self.groups, "mask": self.mask[0], "scale": self.scale}
        self.session = make_session(
            make_model(self.dtype, self.chosen, page_rows=self.rows, **attributes), self.threads
        )
        self.dense = make_session(make_model(self.dtype, 0, **attributes), self.threads)
        empty = np.zeros((self.groups, 0, self.size), np_type(self.dtype))
        self.keys, self.values = [empty] * self.batch, [empty] * self.batch
        shape = (self.batch, self.groups, self.capacity, self.size)
        self.cache = {n: np.full(shape, np.nan, np_type(self.dtype)) for n in ("key", "value")}
        pages = -(-self.capacity // self.rows)
        self.cache["bounds"] = np.full((self.batch, self.groups, pages, 2, self.size), np.nan, np_type(self.dtype))

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.array([k.shape[1] for k in self.keys])

    def draw(self, *shape: int) -> Array:
        return self.rng.standard_normal(shape).astype(np_type(self.dtype))

    def rewind(self, lengths: list[int]) -> None:
        """Drops the last tokens; caches and key bounds stay as they are."""
        self.keys = [k[:, :n] for k, n in zip(self.keys, lengths, strict=True)]
        self.values = [v[:, :n] for v, n in zip(self.values, lengths, strict=True)]

    def forget_bounds(self) -> None:
        """As a caller does whose cache another model wrote."""
        self.cache["bounds"] = self.cache["bounds"][:, :, :0]

    def run_dense(self) -> Array:
        """The output of the last step without ``chosen_pages``."""
        return run(self.dense, self.feeds)["output"]

    def fill(self, lengths: list[int]) -> None:
        """Has each sequence hold so many keys that another model wrote: no key bounds are known."""
        for b, n in enumerate(lengths):
            self.keys[b], self.values[b] = self.draw(self.groups, n, self.size), self.draw(self.groups, n, self.size)
        rows = max(self.capacity, *lengths)
        for name, own in (("key", self.keys), ("value", self.values)):
            self.cache[name] = np.full((self.batch, self.groups, rows, self.size), np.nan, np_type(self.dtype))
            for b, n in enumerate(lengths):
                self.cache[name][b, :, :n] = own[b]
        self.forget_bounds()

    def step(self, length: int, tokens: list[int] | None = None, *, is_checked: bool = True) -> None:
        """Adds tokens, of a first prompt so many of each sequence, and checks the output, the caches and the key bounds."""
        before = self.lengths
        is_first = int(before.max()) == 0
        own = tokens if tokens is not None else [length] * self.batch
        query = self.draw(self.batch, length, self.heads, self.size)
        key, value = (self.draw(self.batch, length, self.groups, self.size) for _ in range(2))
        self.keys = [
            np.concatenate([k, new[:n].swapaxes(0, 1)], 1) for k, new, n in zip(self.keys, key, own, strict=True)
        ]
        self.values = [
            np.concatenate([v, new[:n].swapaxes(0, 1)], 1) for v, new, n in zip(self.values, value, own, strict=True)
        ]
        total = length if is_first else int(self.lengths.max())
        feeds = {
            "query": query.reshape(self.batch, length, -1),
            "key": key.reshape(self.batch, length, -1),
            "value": value.reshape(self.batch, length, -1),
            "past_key": self.cache["key"],
            "past_value": self.cache["value"],
            "seqlens_k": (self.lengths - 1).astype(np.int32),
            "total_sequence_length": np.array(total, np.int32),
        }
        stof.reset_skip_counts()
        found = run(self.session, feeds | {BOUNDS: self.cache["bounds"]}, self.rows)
        counts = stof.skip_counts()
        self.feeds, self.output = feeds, found["output"]
        self.cache = {
            "key": found["present_key"],
            "value": found["present_value"],
            "bounds": found["present_page_bounds"],
        }
        if not is_checked:
            return
        self.check_caches(max(self.capacity, total, feeds["past_key"].shape[2]))
        self._check_output(query, found["output"].reshape(query.shape), own, counts)

    def check_caches(self, capacity: int) -> None:
        assert self.cache["key"].shape[2] == capacity
        assert self.cache["bounds"].shape == (self.batch, self.groups, -(-capacity // self.rows), 2, self.size)
        for b, keys in enumerate(self.keys):
            n = keys.shape[1]
            np.testing.assert_array_equal(self.cache["key"][b, :, :n], keys)
            np.testing.assert_array_equal(self.cache["value"][b, :, :n], self.values[b])
            expected = bounds_of(keys.astype(np.float64), self.rows)
            found = self.cache["bounds"][b, :, : expected.shape[1]].astype(np.float64)
            np.testing.assert_array_equal(found, expected)

    def _check_output(self, query: Array, output: Array, own: list[int], counts: stof.SkipCounts) -> None:
        scored = skipped = 0
        limit = LIMITS[self.dtype]
        for b, n in enumerate(own):
            step = PagedStep(
                query[b, :n].swapaxes(0, 1).astype(np.float64),
                self.keys[b].astype(np.float64),
                self.values[b].astype(np.float64),
                self.rows,
                self.chosen,
                self.scale,
                self.mask[1],
            )
            for g in range(self.groups):
                pages, allowed, gap = step.choose(g)
                rows = [min(self.rows, step.keys.shape[1] - p * self.rows) for p in sorted(allowed)]
                scored += sum(rows) * step.group * n
                skipped += sum(r for p, r in zip(sorted(allowed), rows, strict=True) if p not in pages) * step.group * n
                self.compared += 1
                if gap < 1e-6:
                    self.near_ties += 1
                    continue
                for h in range(g * step.group, (g + 1) * step.group):
                    found = output[b, :n, h].astype(np.float64)
                    np.testing.assert_allclose(found, step.attend(h, pages), rtol=limit, atol=4 * limit)
        assert counts.skipped == skipped
        assert counts.scored == (scored if skipped else counts.scored)
