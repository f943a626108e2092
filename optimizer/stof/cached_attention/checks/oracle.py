# SPDX-License-Identifier: Apache-2.0
"""StofCachedAttention in NumPy, in fp64 or another type: the contract of docs/reference/cached-attention.md for one step.

It knows causal masks, windows and block layouts, as the runtime's nodes have them, and never reads the emitted mask
expression. A declared pattern is evaluated in NumPy from the pattern itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from stof.cached_attention.checks.attention_step import AttentionStep
from stof.cached_attention.checks.quantized import dequantize, is_quantized, quantize, scale_of
from stof.cached_attention.site import count_held_rows
from stof.sparsify.measure import allowed_pairs


@dataclass(frozen=True, kw_only=True)
class CacheStep(AttentionStep):
    """One step of B sequences. Arrays have the layouts of the contract; all floats one type T, but for quantized caches.

    Attributes:
        query: [B, S, H·D], or packed [B, S, (H + 2G)·D], and then ``key`` and ``value`` are None.
        key: [B, S, G·D].
        value: likewise.
        past_key: [B, G, C, D]; None: no past.
        past_value: likewise.
        lengths: [B], valid keys after this step.
        total: total_sequence_length; S says that no sequence has a past.
        sliding: the cache holds the last positions only.
        position_ids: [B, S]; None: n[b] + i.
        bias: [B or 1, H or 1, S, total].
        layout: [L, blocks, blocks]: whether the queries of a block attend the keys of a block, for heads h % L; None: all.
        block_size: positions of a block.
        key_scale: fp32, of one element or one a channel [G·D] in any shape, where the caches are quantized.
        value_scale: likewise.
    """

    query: np.ndarray
    key: np.ndarray | None
    value: np.ndarray | None
    past_key: np.ndarray | None
    past_value: np.ndarray | None
    lengths: np.ndarray
    total: int
    sliding: bool = False
    position_ids: np.ndarray | None = None
    bias: np.ndarray | None = None
    layout: np.ndarray | None = None
    block_size: int = 0
    key_scale: np.ndarray | None = None
    value_scale: np.ndarray | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether the caches are."""
        return is_quantized(self.past_key)

    @property
    def before(self) -> np.ndarray:
        """The keys n [B] of each sequence before this step."""
        queries = self.query.shape[1]
        return np.zeros_like(self.lengths) if self.total == queries else self.lengths - queries

    @property
    def capacity(self) -> int:
        """The rows of present: those of past where they suffice."""
        rows = 0 if self.past_key is None else int(self.past_key.shape[2])
        return rows if self.sliding else max(rows, self.total)

    @property
    def rows(self) -> np.ndarray:
        """The rows [B] of present that hold keys after this step."""
        return self.count_held(self.lengths)

    def count_held(self, lengths: np.ndarray) -> np.ndarray:
        """How many rows [B] the cache holds after ``lengths`` [B] positions."""
        if not self.sliding:
            return lengths
        return count_held_rows(lengths, self.capacity, self.window)

    @property
    def padded(self) -> np.ndarray:
        """Which queries [B, S] are padding of a first prompt; their outputs are undefined."""
        queries = self.query.shape[1]
        if self.total != queries:
            return np.zeros((len(self.lengths), queries), bool)
        return np.asarray(np.arange(queries)[None] >= self.lengths[:, None])


@dataclass(frozen=True)
class AttendedSequence:
    """The queries of one sequence, rotated, and the keys and values that they attend.

    Attributes:
        query: [H, S, D], padding among them.
        keys: [G, keys, D], new ones behind those of the cache; none of padding.
        values: likewise.
        first: the position of the first query.
        origin: the position of the first key.
        tokens: the queries that are no padding.
    """

    query: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    first: int
    origin: int
    tokens: int


@dataclass(frozen=True)
class CacheStepResult:
    """Output [B, S, H·D], and the caches [B, G, capacity, D], in which undefined rows are NaN, 0 in quantized ones."""

    output: np.ndarray
    key: np.ndarray
    value: np.ndarray


def compute_step(
    step: CacheStep,
    dtype: type[np.floating[Any]] = np.float64,
    storage: np.dtype | None = None,
    held: tuple[np.ndarray, np.ndarray] | None = None,
) -> CacheStepResult:
    """The results of a step.

    Args:
        step: its inputs.
        dtype: what is computed in.
        storage: the type that rotated queries, keys and the output are rounded to; None: they are not.
        held: quantized caches after the step, whose rows are attended in place of those that are computed here. A number
            between two steps of a quantizer is rounded either way, and the output depends on it.
    """
    sequences, caches = append_to_cache(step, dtype, storage, held)
    output = np.stack([_attend(step, b, sequence, dtype) for b, sequence in enumerate(sequences)])
    merged = output.transpose(0, 2, 1, 3).reshape(*step.query.shape[:2], -1)
    return CacheStepResult(merged if storage is None else merged.astype(storage).astype(dtype), *caches)


def append_to_cache(
    step: CacheStep,
    dtype: type[np.floating[Any]] = np.float64,
    storage: np.dtype | None = None,
    held: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[list[AttendedSequence], tuple[np.ndarray, np.ndarray]]:
    """What each sequence of a step attends, and the caches behind it. The arguments are those of ``compute_step``."""

    def store(array: np.ndarray) -> np.ndarray:
        return array if storage is None else array.astype(storage).astype(dtype)

    groups = step.kv_num_heads
    query, key, value = (x.astype(dtype) for x in _split_heads(step))
    batch, _, queries, size = query.shape
    before = step.before
    if step.query_norm is not None and step.key_norm is not None:
        query, key = (
            _normalize(x, w.astype(dtype), dtype(step.epsilon))
            for x, w in ((query, step.query_norm), (key, step.key_norm))
        )
    if step.cos is not None:
        counted = before[:, None] + np.arange(queries)[None]
        positions = counted if step.position_ids is None else step.position_ids
        query, key = (_rotate(x, step, positions, dtype) for x in (query, key))
    query, key = store(query), store(key)
    sequences = []
    caches = [_empty_cache(step, (batch, groups, step.capacity, size), dtype) for _ in range(2)]
    rows_before = step.count_held(before)
    for b in range(batch):
        count, first = int(step.lengths[b]), int(before[b])
        new = min(queries, count - first)  # tokens that are no padding
        rows, end = int(rows_before[b]), int(step.rows[b])
        whole = []
        scales = (step.key_scale, step.value_scale)
        for i, (past, fresh) in enumerate(((step.past_key, key), (step.past_value, value))):
            added, own_scale = fresh[b, :, :new], scales[i]
            if step.is_quantized and past is not None and own_scale is not None:
                factor = scale_of(own_scale, groups)
                # The contract quantizes numbers of type T: in bfloat16 one in fifty would become another step else.
                typed = added.astype(step.query.dtype).astype(dtype)
                source = np.concatenate([past[b, :, :rows], quantize(typed, factor, past.dtype)], axis=1)
                caches[i][b, :, :end] = source[:, source.shape[1] - end :]
                if held is not None:
                    source[:, source.shape[1] - end :] = held[i][b, :, :end]
                whole.append(dequantize(source, factor, dtype))
                continue
            old = np.zeros((groups, 0, size), dtype) if past is None else past[b, :, :rows].astype(dtype)
            whole.append(np.concatenate([old, added], axis=1))
            caches[i][b, :, :end] = whole[i][:, whole[i].shape[1] - end :]
        sequences.append(AttendedSequence(query[b], whole[0], whole[1], first, first - rows, new))
    return sequences, (caches[0], caches[1])


def _attend(step: CacheStep, b: int, sequence: AttendedSequence, dtype: type[np.floating[Any]]) -> np.ndarray:
    """The output [H, S, D] of a sequence, whose index is given."""
    query, keys, values, origin = sequence.query, sequence.keys, sequence.values, sequence.origin
    heads, queries, size = query.shape
    # Heads of one group lie beside each other.
    grouped = query.reshape(len(keys), -1, size)
    scale = dtype(step.scale or 1.0 / np.sqrt(size))
    key_scale, value_scale = (_factor_of(step, x, len(keys), dtype) for x in (step.key_scale, step.value_scale))
    narrow = np.asarray if step.precision is None else step.precision.round
    products = np.matmul(narrow(grouped * key_scale), narrow(keys / key_scale).swapaxes(1, 2))
    scores = products.reshape(heads, queries, -1) * scale
    if step.softcap:
        scores = dtype(step.softcap) * np.tanh(scores / dtype(step.softcap))
    if step.bias is not None:
        bias = step.bias[b if len(step.bias) > 1 else 0].astype(dtype)
        scores = scores + bias[:, :, origin : origin + keys.shape[1]]
    pairs = [find_allowed(step, sequence, h, np.arange(queries)) for h in range(heads)]
    scores = np.where(np.stack(pairs), scores, -np.inf)
    weights = _weights(scores, step, dtype).reshape(len(keys), -1, keys.shape[1])
    attended: np.ndarray = (np.matmul(weights, narrow(values / value_scale)) * value_scale).reshape(
        heads, queries, size
    )
    return attended


def _factor_of(step: CacheStep, scale: np.ndarray | None, groups: int, dtype: type[np.floating[Any]]) -> np.ndarray:
    """What queries and outputs are multiplied by where products are rounded, in place of keys and values of quantized caches."""
    if step.precision is None or scale is None:
        return np.ones(1, dtype)
    factor = scale_of(scale, groups).astype(dtype)
    return np.where(factor == 0, dtype(1), factor)  # keys are 0 there


def _empty_cache(step: CacheStep, shape: tuple[int, ...], dtype: type[np.floating[Any]]) -> np.ndarray:
    if step.is_quantized and step.past_key is not None:
        return np.zeros(shape, step.past_key.dtype)
    return np.full(shape, np.nan, dtype)


def find_allowed(step: CacheStep, sequence: AttendedSequence, h: int, queries: np.ndarray) -> np.ndarray:
    """Which keys some queries of a head attend, bool [queries, keys].

    Args:
        step: the inputs.
        sequence: of that step.
        h: the head.
        queries: the indices of its queries.
    """
    rows, columns = sequence.first + queries, sequence.origin + np.arange(sequence.keys.shape[1])
    distance = rows[:, None] - columns[None]
    pairs = (distance >= 0) & ((distance < step.window) if step.window else True)
    if step.layout is not None:
        blocks = step.layout[h % len(step.layout)]
        pairs = pairs & blocks[(rows // step.block_size)[:, None], (columns // step.block_size)[None]]
    if step.pattern is not None:
        run = {"past": sequence.first, "count": sequence.query.shape[1]}
        pairs = pairs & allowed_pairs(step.pattern, h, rows, columns, **run)
    return np.asarray(pairs)


def _weights(scores: np.ndarray, step: CacheStep, dtype: type[np.floating[Any]]) -> np.ndarray:
    """The softmax of scores [H, S, T]; rows without an allowed key are 0. A row is divided by the sum of unrounded weights."""
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    sink = None if step.sink is None else step.sink.astype(dtype).reshape(-1, 1, 1)
    if sink is not None:
        top = np.maximum(top, sink)
    top = np.where(np.isfinite(top), top, dtype(0))
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink - top)
    if step.precision is not None:
        weights = step.precision.round(weights)
    return np.asarray(weights / np.where(total > 0, total, dtype(1)))


def _split_heads(step: CacheStep) -> list[np.ndarray]:
    """Query, key and value as [B, heads, S, D]."""
    heads, groups = step.num_heads, step.kv_num_heads
    if step.key is None or step.value is None:
        size = step.query.shape[2] // (heads + 2 * groups)
        parts = np.split(step.query, [heads * size, (heads + groups) * size], axis=2)
    else:
        parts = [step.query, step.key, step.value]
    counts = (heads, groups, groups)
    return [x.reshape(*x.shape[:2], n, -1).transpose(0, 2, 1, 3) for x, n in zip(parts, counts, strict=True)]


def _normalize(x: np.ndarray, weight: np.ndarray, epsilon: np.floating[Any]) -> np.ndarray:
    """The RMS norm of each head."""
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight)


def _rotate(x: np.ndarray, step: CacheStep, positions: np.ndarray, dtype: type[np.floating[Any]]) -> np.ndarray:
    """The rotary embedding of [B, heads, S, D] at positions [B, S]; those of padding beyond the table count as its last."""
    assert step.cos is not None
    assert step.sin is not None
    positions = np.clip(positions, 0, len(step.cos) - 1)
    cos, sin = (table.astype(dtype)[positions][:, None] for table in (step.cos, step.sin))
    half = cos.shape[-1]
    before, rotated, rest = np.split(x, [step.rotary_offset, step.rotary_offset + 2 * half], axis=-1)
    pairs = (slice(0, None, 2), slice(1, None, 2)) if step.interleaved else (slice(0, half), slice(half, None))
    one, other = (rotated[..., p] for p in pairs)
    embedded = np.empty_like(rotated)
    embedded[..., pairs[0]] = one * cos - other * sin
    embedded[..., pairs[1]] = other * cos + one * sin
    return np.concatenate([before, embedded, rest], axis=-1)
