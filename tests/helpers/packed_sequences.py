# SPDX-License-Identifier: Apache-2.0
"""Random problems of packed sequences, their definition in fp64, and calls of the operator.

``python -m tests.helpers.packed_sequences SEED DRAWS`` compares that many.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from stof.attention.checks.reference import Problem, assert_close
from stof.mask.site import EmptyRows
from stof.runtime.library import Op

POISON = 12345.0
GUARD = 64  # elements of NaN before and behind each tensor
BHSD = ("BHSD",) * 4
LENGTHS = (1, 2, 5, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 130, 193, 260)
MASKS = (
    "",
    "k <= q",
    "abs(q - k) <= 3",
    "k <= q and q - k < 40",
    "abs(q - k) <= 3 or k < 2 or q < 2",
    "q // 32 == k // 32",
    "h % 2 == 0 or k <= q",
    "(q + k + b) % 3 != 0",
    "k < T - 2 and q != S - 1",
    "table0[h, k]",
    "table0[q, k]",
    "table0[abs(q - k)]",
    "segment_q[b, q - P] == segment_k[b, k]",
    "k < lengths[b] or k == q",
)


@dataclass(frozen=True)
class PackedProblem:
    """A padded problem, of which sequence b has keys first[b] … first[b] + lengths[b] - 1, and those queries, too.

    Attributes:
        padded: with q, k and v of all positions. Rows that do not exist may hold anything.
        lengths: of the sequences, [B].
        first: the position of row 0 of each, [B]; None: 0, and no operand.
        has_queries: query and output are packed; else key and value alone.
        layouts: of query, key, value and output.
        spare: rows of packed tensors behind the last sequence: NaN in inputs, 0 in the output.
    """

    padded: Problem
    lengths: np.ndarray
    first: np.ndarray | None = None
    has_queries: bool = True
    layouts: Sequence[str] = field(default=BHSD)
    spare: int = 0

    @property
    def starts(self) -> np.ndarray:
        """[B + 1] int32, the cumulative lengths."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)

    def ranges(self) -> list[slice]:
        """The positions of each sequence."""
        first = np.zeros(len(self.lengths), int) if self.first is None else self.first
        return [slice(int(f), int(f + n)) for f, n in zip(first, self.lengths, strict=True)]

    def pack(self, padded: np.ndarray, spare: float = 0.0) -> np.ndarray:
        """Rows [B, heads, positions, D] that exist, as [1, heads, L, D]; spare rows hold one number."""
        rows = [padded[b, :, positions] for b, positions in enumerate(self.ranges())]
        behind = np.full((padded.shape[1], self.spare, padded.shape[3]), spare, padded.dtype)
        return np.concatenate([*rows, behind], axis=1)[None]

    def attributes(self) -> dict[str, Any]:
        """The attributes of StofAttention."""
        roles = "cumulative_sequence_length" if self.has_queries else "cumulative_key_length"
        if self.first is not None:
            roles += " first_position"
        found: dict[str, Any] = self.padded.attributes()
        found["operands"] = f"{found['operands']} {roles}"
        found["layout"] = " ".join(self.layouts)
        found["num_heads"], found["kv_num_heads"] = self.padded.q.shape[1], self.padded.k.shape[1]
        return found

    def inputs(self) -> list[np.ndarray]:
        """The inputs of StofAttention; each lies between NaN."""
        q, k, v, *operands = self.padded.inputs()
        heads = [self.pack(q, np.nan) if self.has_queries else q, self.pack(k, np.nan), self.pack(v, np.nan)]
        laid = [guard(lay_out(one, layout)) for one, layout in zip(heads, self.layouts, strict=False)]
        numbers = [self.starts, *([] if self.first is None else [self.first.astype(np.int32)])]
        return [*laid, *operands, *numbers]

    def run(self, threads: int = 1) -> np.ndarray:
        """The operator's output, [1, H, L, Dv] or [B, H, S, Dv]. What lies around it must stay."""
        q, v = self.padded.q, self.padded.v
        rows = int(self.starts[-1]) + self.spare
        shape = (1, q.shape[1], rows, v.shape[3]) if self.has_queries else self.padded.shape
        laid = lay_out(np.full(shape, POISON, q.dtype), self.layouts[3])
        out = guard(laid)
        whole = out.base
        assert whole is not None
        Op("StofAttention", self.attributes()).run(self.inputs(), [out], threads)
        around = np.concatenate([whole[:GUARD], whole[GUARD + out.size :]])
        assert np.isnan(around.astype(np.float32)).all(), "rows around the output were written"
        return restore(np.array(out), self.layouts[3], shape)

    def reference(self) -> np.ndarray:
        """The same in fp64: rows that exist of the padded problem, over the keys that exist."""
        p = self.padded
        B, H, S, _ = p.shape
        allowed, found = p.evaluate_mask(), np.zeros(p.shape)
        T, group = p.k.shape[2], H // p.k.shape[1]
        if T == 0:
            return self.pack(found) if self.has_queries else found
        past = T - S if p.query_offset else 0
        for b, keys in enumerate(self.ranges()):
            rows = keys if self.has_queries else slice(0, S)
            for h in range(H):
                q, k, v = (a.astype(np.float64) for a in (p.q[b, h], p.k[b, h // group], p.v[b, h // group]))
                scores = q[rows] @ k[keys].T * (1 / np.sqrt(q.shape[1]) if p.scale is None else p.scale)
                if p.softcap:
                    scores = p.softcap * np.tanh(scores / p.softcap)
                if p.bias is not None:
                    scores = scores + np.broadcast_to(p.bias, (B, H, S, T))[b, h, rows, keys].astype(np.float64)
                if p.relative_bias is not None:
                    table = np.broadcast_to(p.relative_bias, (H, p.relative_bias.shape[1]))[h]
                    distance = np.arange(T)[None, keys] - (past + np.arange(S))[rows, None]
                    radius = len(table) // 2
                    scores = scores + table[np.clip(distance, -radius, radius) + radius]
                sink = None if p.sink is None else float(p.sink[h])
                found[b, h, rows] = attend(scores, allowed[b, h, rows, keys], v[keys], sink, p.empty_rows)
        return self.pack(found) if self.has_queries else found

    def check(self, threads: int = 1) -> None:
        """Compares the operator with the definition."""
        assert_close(self.run(threads), self.reference())


def attend(
    scores: np.ndarray, allowed: np.ndarray, values: np.ndarray, sink: float | None, empty_rows: EmptyRows
) -> np.ndarray:
    """Attention of one head in fp64."""
    rows, keys = scores.shape
    if keys == 0:
        return np.full((rows, values.shape[1]), np.nan if empty_rows is EmptyRows.NAN else 0.0)
    masked = np.where(allowed, scores, -np.inf)
    empty = ~(masked > -np.inf).any(1)
    beside = masked if sink is None else np.concatenate([masked, np.full((rows, 1), sink)], 1)
    weights = softmax(beside)[:, :keys]
    weights[empty] = {EmptyRows.ZERO: 0.0, EmptyRows.NAN: np.nan, EmptyRows.MEAN: 1 / keys, EmptyRows.ALL: 0.0}[
        empty_rows
    ]
    if empty_rows is EmptyRows.ALL:
        weights[empty] = softmax(scores)[empty]
    found: np.ndarray = weights @ values
    return found


def softmax(scores: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(1, keepdims=True))
        found: np.ndarray = weights / weights.sum(1, keepdims=True)
    return found


def guard(array: np.ndarray) -> np.ndarray:
    """A copy between elements of NaN."""
    whole = np.full(array.size + 2 * GUARD, np.nan, array.dtype)
    inner = whole[GUARD : GUARD + array.size]
    inner[:] = array.ravel()
    return inner.reshape(array.shape)


def lay_out(heads: np.ndarray, layout: str) -> np.ndarray:
    """[B, H, S, D] in another layout."""
    rows = heads.transpose(0, 2, 1, 3)
    if layout == "BHSD":
        return heads
    return rows if layout == "BSHD" else rows.reshape(*rows.shape[:2], rows.shape[2] * rows.shape[3])


def restore(array: np.ndarray, layout: str, shape: tuple[int, ...]) -> np.ndarray:
    """lay_out backwards: [B, H, S, D] of that shape."""
    if layout == "BHSD":
        return array
    B, H, S, D = shape
    return array.reshape(B, S, H, D).transpose(0, 2, 1, 3)


def draw_lengths(rng: np.random.Generator, B: int, T: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Lengths with 0, 1, edges of tiles and T among them, and the positions of their first rows."""
    edges = [n + d for n in (24, 32, 48, 64, 96, 128) for d in (-1, 0, 1) if n + d <= T]
    choices = [0, 1, T, *edges, *rng.integers(0, T, 4, endpoint=True).tolist()]
    lengths = rng.choice(choices, B).astype(np.int32)
    kind = rng.integers(0, 4)
    first = {
        0: None,
        1: np.zeros(B, np.int32),
        2: (T - lengths).astype(np.int32),
        3: rng.integers(0, T - lengths, endpoint=True).astype(np.int32),
    }[int(kind)]
    return lengths, first


def draw_operands(rng: np.random.Generator, mask: str, sizes: tuple[int, int, int, int]) -> dict[str, np.ndarray]:
    """What a mask reads, for B, H, S and T."""
    B, H, S, T = sizes
    operands: dict[str, np.ndarray] = {}
    for text, shape in (("[h, k]", (H, T)), ("[q, k]", (S, T)), ("[abs(q - k)]", (max(S, T),))):
        if f"table0{text}" in mask:
            operands["table0"] = rng.random(shape) < 0.7
    if "segment_q" in mask:
        operands["segment_q"] = rng.integers(0, 3, (B, S)).astype(np.int32)
        operands["segment_k"] = rng.integers(0, 3, (B if rng.random() < 0.5 else 1, T)).astype(np.int64)
    if "lengths" in mask:
        operands["lengths"] = rng.integers(0, T, B, endpoint=True).astype(np.int32)
    return operands


def draw_pad(rng: np.random.Generator, problem: PackedProblem, T: int) -> np.ndarray:
    """A key padding mask: of the keys that exist, or of some of them."""
    B = len(problem.lengths)
    pad = np.zeros((B, T), bool)
    for b, positions in enumerate(problem.ranges()):
        pad[b, positions] = True
    kind = rng.integers(0, 4)
    if kind == 1:
        pad &= rng.random((B, T)) < 0.8
    if kind == 2 and B:
        pad = rng.random((1, T)) < 0.8
    if kind == 3:
        pad[:] = True
    dtype: type = (bool, np.uint8, np.int64, np.float32, np.int32)[int(rng.integers(0, 5))]
    return pad.astype(dtype)


def draw_problem(rng: np.random.Generator) -> PackedProblem:
    """A random problem."""
    has_queries = bool(rng.random() < 0.75)
    B, T = int(rng.integers(0, 6)), int(rng.choice(LENGTHS))
    H, G = [(1, 1), (2, 1), (4, 2), (3, 3), (8, 2)][int(rng.integers(0, 5))]
    D, Dv = int(rng.choice([3, 8, 16, 17, 32, 64])), int(rng.choice([3, 8, 16, 17, 32, 64]))
    S = T if has_queries else int(rng.choice([1, 2, 4, 7, 16, 17, 40, T]))
    query_offset = bool(rng.random() < 0.3) and T >= S
    dtype = [np.float32, np.float32, np.float16, np.dtype("bfloat16")][int(rng.integers(0, 4))]
    mask = str(rng.choice(MASKS))
    if "table0[q" in mask and query_offset:
        mask = "k <= q"
    lengths, first = draw_lengths(rng, B, T)
    operands = draw_operands(rng, mask, (B, H, S, T))
    settings: dict[str, Any] = {"query_offset": query_offset}
    if rng.random() < 0.2:
        settings["softcap"] = 5.0
    if rng.random() < 0.2:
        shape = [n if rng.random() < 0.6 else 1 for n in (B, H, S, T)]
        bias = rng.standard_normal(shape[int(rng.integers(0, 3)) :], np.float32)
        settings["bias"] = np.where(rng.random(bias.shape) < 0.1, -np.inf, bias).astype(np.float32)
    if rng.random() < 0.2:
        length = 2 * int(rng.choice([0, 3, 20, 300])) + 1
        settings["relative_bias"] = rng.standard_normal((H if rng.random() < 0.5 else 1, length), np.float32)
    if rng.random() < 0.15:
        settings["sink"] = rng.standard_normal(H, np.float32)
    else:
        settings["empty_rows"] = list(EmptyRows)[int(rng.integers(0, 4))]

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(dtype)

    layouts = [str(rng.choice(["BHSD", "BSHD", "BSN"])) for _ in range(4)]
    padded = Problem(draw(B, H, S, D), draw(B, G, T, D), draw(B, G, T, Dv), mask, operands, **settings)
    problem = PackedProblem(padded, lengths, first, has_queries, layouts, int(rng.choice([0, 0, 1, 5, 70])))
    if rng.random() < 0.5:
        reads = "pad[b, k]" if rng.random() < 0.7 else "(pad[b, k] or k == 1)"
        whole = f"({mask}) and {reads}" if mask else reads
        operands = {**operands, "pad": draw_pad(rng, problem, T)}
        problem = replace(problem, padded=replace(padded, mask=whole, operands=operands))
    return with_known_length(problem)


def with_known_length(problem: PackedProblem) -> PackedProblem:
    """The problem with an operand that says T, where there is none."""
    p = problem.padded
    T, S = p.k.shape[2], p.q.shape[2]
    if "pad" in p.operands or "segment_k" in p.operands:
        return problem
    if max((s.stop for s in problem.ranges()), default=0) == T:
        return problem
    B = len(problem.lengths)
    if p.bias is not None and p.bias.shape[-1] == T > 1:
        return problem
    if p.bias is not None and problem.has_queries and p.bias.ndim > 1 and p.bias.shape[-2] == S > 1:
        return problem
    mask = f"({p.mask}) and pad[b, k]" if p.mask else "pad[b, k]"
    return replace(problem, padded=replace(p, mask=mask, operands={**p.operands, "pad": np.ones((B, T), np.int64)}))


def compare(seed: int, draws: int) -> None:
    """Compares so many random problems. An error says which one it is.

    Raises:
        AssertionError: at the first difference.
    """
    for draw in range(draws):
        problem = draw_problem(np.random.default_rng([seed, draw]))
        try:
            problem.check(threads=(1, 2, 5)[draw % 3])
        except Exception as error:
            p = problem.padded
            sizes = f"q {p.q.shape} k {p.k.shape} {p.q.dtype} lengths {problem.lengths} first {problem.first}"
            raise AssertionError(f"seed {seed}, draw {draw}: {problem.attributes()} {sizes}: {error}") from error


assert ml_dtypes.bfloat16  # makes NumPy know the name bfloat16

if __name__ == "__main__":
    compare(int(sys.argv[1]), int(sys.argv[2]))
