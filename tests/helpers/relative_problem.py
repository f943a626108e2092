# SPDX-License-Identifier: Apache-2.0
"""Attention with relative tables: random problems, calls of the operator, and the definition in fp64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stof.attention.checks.reference import Problem, assert_close
from stof.mask.site import EmptyRows
from stof.runtime.library import Op

SCORE_ROLES = ("relative_key", "relative_key1", "relative_query")


@dataclass(frozen=True)
class Table:
    """A table [H or 1, L, columns] and the expression that names its rows."""

    rows: np.ndarray
    index: str


@dataclass(frozen=True)
class RelativeProblem:
    """``plain`` with tables by role; ``constants`` are what expressions read, ``factor`` is relative_bias_factor."""

    plain: Problem
    tables: Mapping[str, Table] = field(default_factory=dict)
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)
    factor: np.ndarray | None = None

    def attributes(self) -> dict[str, Any]:
        """The attributes of StofAttention."""
        found: dict[str, Any] = self.plain.attributes()
        factor = ["relative_bias_factor"] if self.factor is not None else []
        found["operands"] = " ".join([found["operands"], *self.constants, *self.tables, *factor])
        if self.tables:
            found["relative_index"] = "; ".join(f"{role}: {table.index}" for role, table in self.tables.items())
        return found

    def inputs(self) -> list[np.ndarray]:
        """The inputs of StofAttention."""
        factor = [] if self.factor is None else [self.factor]
        more = (*self.constants.values(), *(table.rows for table in self.tables.values()), *factor)
        return [*self.plain.inputs(), *(np.ascontiguousarray(a) for a in more)]

    def run(self, threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Output and LSE, from the library."""
        out = np.full(self.plain.shape, 12345.0, self.plain.q.dtype)
        lse = np.full(self.plain.shape[:3], 12345.0, np.float32)
        Op("StofAttention", {**self.attributes(), "results": "lse"}).run(self.inputs(), [out, lse], threads)
        return out, lse

    def rows_of(self, table: Table, S: int, T: int, P: int) -> np.ndarray:
        """The row of each pair, [S, T]."""
        names = {name: Lookup(array) for name, array in self.constants.items()}
        q, k = (np.arange(S) + P)[:, None], np.arange(T)[None, :]
        found = eval(table.index, {"__builtins__": {}}, {"q": q, "k": k, "S": S, "T": T, "P": P, **FUNCTIONS, **names})
        clipped: np.ndarray = np.clip(np.broadcast_to(found, (S, T)), 0, table.rows.shape[1] - 1)
        return clipped

    def scores(self) -> np.ndarray:
        """Scores [B, H, S, T] without the mask."""
        p, sizes = self.plain, self.sizes()
        H, D, group = p.q.shape[1], p.q.shape[3], p.q.shape[1] // p.k.shape[1]
        q, k = p.q.astype(np.float64), np.repeat(p.k.astype(np.float64), group, axis=1)
        found = np.einsum("bhsd,bhtd->bhst", q, k)
        for role in SCORE_ROLES:
            if role not in self.tables:
                continue
            table = self.tables[role]
            rows = self.rows_of(table, *sizes)
            values = np.broadcast_to(table.rows.astype(np.float64), (H, *table.rows.shape[1:]))
            with np.errstate(invalid="ignore"):
                if role == "relative_query":
                    full = np.einsum("bhtd,hld->bhtl", k, values[..., :D])
                else:
                    full = np.einsum("bhsd,hld->bhsl", q, values[..., :D])
            if values.shape[2] > D:
                full = full + values[None, :, None, :, D]
            if role == "relative_query":
                index = np.broadcast_to(rows.T, (*full.shape[:3], sizes[0]))
                found = found + np.swapaxes(np.take_along_axis(full, index, 3), 2, 3)
            else:
                found = found + np.take_along_axis(full, np.broadcast_to(rows, (*full.shape[:3], sizes[1])), 3)
        found = found * (1 / np.sqrt(D) if p.scale is None else p.scale)
        if p.softcap:
            found = p.softcap * np.tanh(found / p.softcap)
        if p.bias is not None:
            found = found + p.bias.astype(np.float64)
        if p.relative_bias is not None:
            radius = p.relative_bias.shape[1] // 2
            distance = np.arange(sizes[1])[None, :] - (np.arange(sizes[0]) + sizes[2])[:, None]
            near = p.relative_bias.astype(np.float64)[None][:, :, np.clip(distance, -radius, radius) + radius]
            found = found + near * (1.0 if self.factor is None else self.factor.astype(np.float64)[..., None])
        return found

    def sizes(self) -> tuple[int, int, int]:
        """S, T, P."""
        S, T = self.plain.q.shape[2], self.plain.k.shape[2]
        return S, T, T - S if self.plain.query_offset else 0

    def reference(self) -> tuple[np.ndarray, np.ndarray]:
        """Output and LSE in fp64."""
        p = self.plain
        S, T, _ = self.sizes()
        H = p.q.shape[1]
        sink = None if p.sink is None else np.broadcast_to(p.sink.astype(np.float64)[None, :, None], p.shape[:3])
        if T == 0:
            lse = np.full(p.shape[:3], -np.inf) if sink is None else sink
            return np.zeros(p.shape), np.asarray(lse)
        plain = self.scores()
        masked = np.where(p.evaluate_mask(), plain, -np.inf)
        empty = ~(masked > -np.inf).any(3) & ~np.isnan(masked).any(3)
        weights, lse = softmax(masked, sink)
        if p.empty_rows is EmptyRows.ALL:
            weights[empty] = softmax(plain, None)[0][empty]
        else:
            weights[empty] = {EmptyRows.MEAN: 1 / T, EmptyRows.NAN: np.nan}.get(p.empty_rows, 0.0)
        output = multiply(weights, np.repeat(p.v.astype(np.float64), H // p.k.shape[1], axis=1))
        if "relative_value" in self.tables:
            table = self.tables["relative_value"]
            rows = self.rows_of(table, *self.sizes())
            values = np.broadcast_to(table.rows.astype(np.float64), (H, *table.rows.shape[1:]))
            for i in range(S):
                output[:, :, i] += multiply(weights[:, :, i : i + 1], values[None, :, rows[i]])[:, :, 0]
        return output, lse

    def check(self, tolerance: float | None = None) -> None:
        """Compares the operator with the definition, and one thread with two."""
        out, lse = self.run()
        wanted, wanted_lse = self.reference()
        assert_close(out, wanted, tolerance)
        assert_close(lse, wanted_lse)
        again, again_lse = self.run(threads=2)
        assert out.tobytes() == again.tobytes()
        assert lse.tobytes() == again_lse.tobytes()


class Lookup:
    """A table of an expression: ``table0[x]``, of arrays."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __getitem__(self, index: Any) -> np.ndarray:
        found: np.ndarray = self.array[index].astype(np.int64)
        return found


FUNCTIONS = {"abs": np.abs, "min": np.minimum, "max": np.maximum}


def softmax(scores: np.ndarray, sink: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Weights [B, H, S, T] and LSE [B, H, S]."""
    top = scores.max(3, keepdims=True)
    if sink is not None:
        top = np.maximum(top, sink[..., None])
    with np.errstate(invalid="ignore", divide="ignore"):
        weights = np.exp(scores - top)
        total = weights.sum(3, keepdims=True) + (0 if sink is None else np.exp(sink[..., None] - top))
        lse = np.where(np.isneginf(top), -np.inf, np.log(total) + top)
        return weights / total, lse[..., 0]


def multiply(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Weights times values; what has no weight may hold NaN."""
    if np.isfinite(values).all():
        found: np.ndarray = np.matmul(weights, values)
        return found
    with np.errstate(invalid="ignore"):
        products = np.where(weights[..., None] == 0, 0.0, weights[..., None] * values[:, :, None])
    return np.asarray(products.sum(3))
