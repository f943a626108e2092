# SPDX-License-Identifier: Apache-2.0
"""What tests of the operator need: random problems, attention in fp64, a comparison that says where it fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from stof.mask.expression import MaskExpression
from stof.mask.relative_roles import RELATIVE_BIAS, RELATIVE_BIAS_FACTOR, RELATIVE_QUERY, RELATIVE_VALUE
from stof.mask.site import EmptyRows
from stof.runtime.library import Mask, Op

# Half a unit in the last place at 1, by element type: what rounding the result alone may cost.
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass(frozen=True)
class Problem:
    """One attention: q [B, H, S, D], k [B, G, T, D], v [B, G, T, Dv] of one float type.

    ``mask`` is an expression (docs/reference/mask-format.md), empty for every pair; ``operands`` are what it reads, by
    role: ``pad`` [B or 1, T], ``segment_q`` [B or 1, S], ``table0`` and so on. ``scale`` None is 1/sqrt(D); ``bias``
    broadcasts to [B, H, S, T], ``relative_bias`` is [H or 1, L] and ``sink`` [H]. With ``query_offset`` the queries are the
    last S of T positions. ``relative`` has the tables of rows by relative position, by role, of which ``relative_index`` is the
    attribute; ``relative_bias_factor`` [B or 1, H or 1, S] multiplies ``relative_bias``.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    mask: str = ""
    operands: Mapping[str, np.ndarray] = field(default_factory=dict)
    scale: float | None = None
    softcap: float = 0.0
    bias: np.ndarray | None = None
    relative_bias: np.ndarray | None = None
    sink: np.ndarray | None = None
    relative: Mapping[str, np.ndarray] = field(default_factory=dict)
    relative_index: str = ""
    relative_bias_factor: np.ndarray | None = None
    empty_rows: EmptyRows = EmptyRows.ZERO
    query_offset: bool = False

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, H, S, Dv of the output."""
        return (*self.q.shape[:3], self.v.shape[3])

    def evaluate_mask(self) -> np.ndarray:
        """Which pairs may attend: booleans [B, H, S, T]; a bias of -inf is not counted in."""
        (B, H, S, _), T = self.q.shape, self.k.shape[2]
        if 0 in (B, H, S, T):
            return np.zeros((B, H, S, T), bool)
        tables = {n: np.ascontiguousarray(a) for n, a in self.operands.items() if n.startswith("table")}
        vectors = {n: a != 0 if n == "pad" else a for n, a in self.operands.items() if n not in tables}
        past = T - S if self.query_offset else 0
        return Mask(self.mask or "True", tables).evaluate(B, H, S, T, past, vectors)

    def rows(self, role: str) -> np.ndarray:
        """The row of a role's table that each pair reads: [S, T], clamped into the table."""
        texts = dict(entry.split(":", 1) for entry in self.relative_index.split(";"))
        text = next(text for name, text in texts.items() if name.strip() == role)
        S, T = self.q.shape[2], self.k.shape[2]
        past = T - S if self.query_offset else 0
        values = {"S": S, "T": T, "P": past, "q": (np.arange(S) + past)[:, None], "k": np.arange(T)[None, :]}
        tables = {n: a for n, a in self.operands.items() if n.startswith("table")}
        named = MaskExpression.parse_integer(text.strip(), tables).evaluate({**values, **tables})
        rows: np.ndarray = np.clip(np.broadcast_to(named, (S, T)), 0, self.relative[role].shape[1] - 1)
        return rows

    def attributes(self) -> dict[str, int | float | str]:
        """The attributes of StofAttention for this problem."""
        attributes: dict[str, int | float | str] = {
            "mask": self.mask,
            "operands": " ".join([*self.operands, *self._collect_added()]),
            "empty_rows": self.empty_rows.value,
            "query_offset": int(self.query_offset),
            "softcap": self.softcap,
        }
        if self.relative_index:
            attributes["relative_index"] = self.relative_index
        return attributes if self.scale is None else {**attributes, "scale": self.scale}

    def _collect_added(self) -> dict[str, np.ndarray]:
        added = {"bias": self.bias, RELATIVE_BIAS: self.relative_bias, "sink": self.sink}
        added |= {**self.relative, RELATIVE_BIAS_FACTOR: self.relative_bias_factor}
        return {role: array for role, array in added.items() if array is not None}

    def inputs(self) -> list[np.ndarray]:
        """The inputs of StofAttention for this problem, in order."""
        operands = (*self.operands.values(), *self._collect_added().values())
        return [np.ascontiguousarray(a) for a in (self.q, self.k, self.v, *operands)]

    def run(self, threads: int = 1) -> np.ndarray:
        """The operator's output [B, H, S, Dv], straight from the library."""
        out = np.full(self.shape, 12345.0, self.q.dtype)
        Op("StofAttention", self.attributes()).run(self.inputs(), [out], threads)
        return out

    def run_with_lse(self, threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """The operator's two outputs, the second [B, H, S] in fp32."""
        out, lse = np.full(self.shape, 12345.0, self.q.dtype), np.full(self.shape[:3], 12345.0, np.float32)
        Op("StofAttention", {**self.attributes(), "results": "lse"}).run(self.inputs(), [out, lse], threads)
        return out, lse


def random_problem(
    rng: np.random.Generator,
    B: int,
    H: int,
    S: int,
    D: int,
    *,
    G: int | None = None,
    T: int | None = None,
    Dv: int | None = None,
    mask: str = "",
    dtype: np.dtype | type = np.float32,
    padded: bool = False,
    **settings: object,
) -> Problem:
    """Normal q, k and v; with ``padded`` the mask also reads ``pad[b, k]``, see :func:`random_padding`.

    ``settings`` are further fields of :class:`Problem`.
    """
    G, T, Dv = G or H, S if T is None else T, Dv or D

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(dtype)

    problem = {"q": draw(B, H, S, D), "k": draw(B, G, T, D), "v": draw(B, G, T, Dv), "mask": mask, **settings}
    if padded:
        problem["mask"] = f"({mask}) and pad[b, k]" if mask else "pad[b, k]"
        problem["operands"] = {"pad": random_padding(rng, B, T)}
    return Problem(**problem)  # type: ignore[arg-type]


def random_padding(rng: np.random.Generator, B: int, T: int) -> np.ndarray:
    """int64 [B, T], 1 where a key is real: in turn padded left, right, on both sides and not at all; some key stays."""
    pad = np.ones((B, T), np.int64)
    for b in range(B):
        left = int(rng.integers(0, T // 2 + 1)) if b % 4 in (0, 2) else 0
        right = int(rng.integers(0, T - T // 2)) if b % 4 in (1, 2) and T else 0
        pad[b, :left] = 0
        pad[b, T - right :] = 0
    return pad


def reference(problem: Problem) -> np.ndarray:
    """The output [B, H, S, Dv] in fp64, by the formula of docs/reference/operators.md; softmax less the row's maximum.

    NaN rows and -inf in biases follow the same formula.
    """
    repeat = problem.q.shape[1] // problem.k.shape[1]
    v = np.repeat(problem.v.astype(np.float64), repeat, axis=1)
    T = v.shape[2]
    if T == 0:
        return np.zeros(problem.shape)
    plain, scores = _scores(problem)
    empty = ~(scores > -np.inf).any(-1, keepdims=True) & ~np.isnan(scores).any(-1, keepdims=True)
    weights = _softmax(scores if problem.sink is None else _beside_sink(problem, scores))[..., :T]
    if problem.empty_rows is EmptyRows.ZERO:
        weights = np.where(empty, 0.0, weights)
    elif problem.empty_rows is EmptyRows.MEAN:
        weights = np.where(empty, 1.0 / T, weights)
    elif problem.empty_rows is EmptyRows.ALL:
        weights = np.where(empty, _softmax(plain), weights)
    output: np.ndarray = np.einsum("bhst,bhtd->bhsd", weights, v)
    if RELATIVE_VALUE in problem.relative:
        rows = problem.relative[RELATIVE_VALUE].astype(np.float64)
        rows = np.broadcast_to(rows, (problem.q.shape[1], *rows.shape[1:]))[:, problem.rows(RELATIVE_VALUE)]
        output = output + np.einsum("bhst,hstd->bhsd", weights, rows)
    return output


def reference_lse(problem: Problem) -> np.ndarray:
    """The LSE of each row [B, H, S] in fp64: that of the sink for a row without a key, -inf without a sink."""
    _, scores = _scores(problem)
    if problem.sink is not None:
        scores = _beside_sink(problem, scores)
    top = np.max(scores, axis=-1, keepdims=True, initial=-1e300)
    with np.errstate(divide="ignore"):
        lse: np.ndarray = (np.log(np.exp(scores - top).sum(-1, keepdims=True)) + top)[..., 0]
    return lse


def _beside_sink(problem: Problem, scores: np.ndarray) -> np.ndarray:
    assert problem.sink is not None
    column = np.broadcast_to(problem.sink.astype(np.float64)[None, :, None, None], (*scores.shape[:3], 1))
    return np.concatenate([scores, column], axis=-1)


def _scores(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Scores [B, H, S, T] with biases, and those with the mask as well."""
    repeat = problem.q.shape[1] // problem.k.shape[1]
    q = problem.q.astype(np.float64)
    k = np.repeat(problem.k.astype(np.float64), repeat, axis=1)
    T = k.shape[2]
    scale = 1 / np.sqrt(q.shape[-1]) if problem.scale is None else problem.scale
    plain = np.einsum("bhsd,bhtd->bhst", q, k)
    for role in problem.relative:
        if role != RELATIVE_VALUE:
            plain = plain + _multiply_rows(problem, role, q, k)
    plain = plain * scale
    if problem.softcap:
        plain = problem.softcap * np.tanh(plain / problem.softcap)
    if problem.bias is not None:
        plain = plain + problem.bias.astype(np.float64)
    if problem.relative_bias is not None:
        S = q.shape[2]
        radius = problem.relative_bias.shape[1] // 2
        distance = np.arange(T)[None, :] - np.arange(S)[:, None] - (T - S if problem.query_offset else 0)
        added = problem.relative_bias.astype(np.float64)[None, :, np.clip(distance, -radius, radius) + radius]
        if problem.relative_bias_factor is not None:
            added = added * problem.relative_bias_factor.astype(np.float64)[..., None]
        plain = plain + added
    return plain, np.where(problem.evaluate_mask(), plain, -np.inf)


def _multiply_rows(problem: Problem, role: str, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The product of queries, or keys, with the rows that pairs name: [B, H, S, T]."""
    of_keys = role == RELATIVE_QUERY
    vectors = k if of_keys else q
    table, rows = problem.relative[role].astype(np.float64), problem.rows(role)
    D = vectors.shape[-1]
    full = np.einsum("bhnd,hld->bhnl", vectors, np.broadcast_to(table, (q.shape[1], *table.shape[1:]))[..., :D])
    if table.shape[-1] == D + 1:
        full = full + table[None, :, None, :, D]
    rows = rows.T if of_keys else rows
    term = np.take_along_axis(full, np.broadcast_to(rows, (*full.shape[:3], rows.shape[1])), -1)
    return np.swapaxes(term, 2, 3) if of_keys else term


def _softmax(scores: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # -inf less -inf, in rows without a key
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        probabilities: np.ndarray = weights / weights.sum(-1, keepdims=True)
    return probabilities


def assert_close(output: np.ndarray, wanted: np.ndarray, tolerance: float | None = None) -> None:
    """Compares an output with the reference, the placement of NaN and inf first.

    ``tolerance`` is absolute; by default 16 roundings of ``output``'s type at the largest finite value, plus 4e-6 for fp32 sums.

    Raises:
        AssertionError: with the largest difference and its (b, h, q, d).
    """
    assert output.shape == wanted.shape, f"shape {output.shape}, expected {wanted.shape}"
    mine = output.astype(np.float64)
    odd = np.argwhere((np.isnan(mine) != np.isnan(wanted)) | (np.isposinf(mine) != np.isposinf(wanted)))
    if len(odd):
        where = tuple(int(i) for i in odd[0])
        raise AssertionError(
            f"{len(odd)} NaN or inf out of place, first at {where}: {mine[where]}, not {wanted[where]}"
        )
    good = np.isfinite(wanted) & np.isfinite(mine)
    if tolerance is None:
        largest = float(np.abs(wanted[good]).max(initial=0.0))
        tolerance = 16 * ROUNDING[output.dtype.name] * max(1.0, largest) + 4e-6
    error = np.where(good, np.abs(np.where(good, mine, 0) - np.where(good, wanted, 0)), 0.0)
    worst = float(error.max(initial=0.0))
    if worst > tolerance:
        where = tuple(int(i) for i in np.unravel_index(int(error.argmax()), error.shape))
        raise AssertionError(
            f"difference {worst:.3e} at {where}, allowed {tolerance:.3e}: {mine[where]}, not {wanted[where]}"
        )
