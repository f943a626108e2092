# SPDX-License-Identifier: Apache-2.0
"""The error of a site whose operands are rounded to 8 bits, against fp64, on some of its query rows.

No kernel runs: a model in NumPy rounds as the CUDA kernels do, whatever machine this is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from onnx import helper

from stof.arguments.precisions import EightBits
from stof.attention.checks.eight_bit_model import FULL_PRECISION, SCORES_ALONE, KeyValueHead, Scheme
from stof.attention.checks.site_comparison import read_heads, scores_shape
from stof.attention.emit import Rewrite
from stof.mask.site import FORBIDDING_VALUE, AttentionSite

_MOST_SCORES = 1 << 22  # of the rows of a site
_LEAST_ROWS = 16  # of a head, before heads are left out


@dataclass(frozen=True)
class EightBitErrors:
    """Sums over rows of sites; those of several sets of inputs are added up.

    Attributes:
        squares: sums of squared errors by the name of the precision.
        wanted: the sum of the squares of the exact numbers.
        rows: that were drawn, fully masked ones among them.
        all_rows: that there are.
        sizes: B, H, G, S, T and D.
    """

    squares: Mapping[str, float]
    wanted: float
    rows: int
    all_rows: int
    sizes: tuple[int, int, int, int, int, int]

    @property
    def relative_rms(self) -> dict[str, float]:
        """By the name of the precision; empty where all numbers are 0 or some are not finite."""
        rms = {name: float(np.sqrt(x / self.wanted)) for name, x in self.squares.items() if self.wanted > 0}
        return {name: x for name, x in rms.items() if np.isfinite(x)}


class ErrorSums:
    """Squared errors of outputs in each precision, and squared fp64 outputs, summed over heads.

    Call :meth:`set_keys` once for each key head, then :meth:`add` for each of its query heads.

    Args:
        precisions: those to measure.
        kind: the type of the site's tensors.

    Attributes:
        squares: the squared errors by the name of the precision.
        exact_squares: the squared fp64 outputs.
    """

    def __init__(self, precisions: Sequence[EightBits], kind: np.dtype[Any]) -> None:
        schemes = {p.name: Scheme() if p.has_fp8 else replace(SCORES_ALONE, weight_type=kind) for p in precisions}
        self.squares, self.exact_squares = dict.fromkeys(schemes, 0.0), 0.0
        self._schemes = {**schemes, "": FULL_PRECISION}
        self._made: dict[str, KeyValueHead] = {}
        self._kind = kind

    def set_keys(self, key: np.ndarray, value: np.ndarray, real: np.ndarray | None) -> None:
        """Quantizes the keys [T, D] and values of a key head. real: which keys are not padding; None: all."""
        k, v = (x.astype(np.float64) for x in (key, value))
        self._made = {name: KeyValueHead.of(k, v, scheme, real) for name, scheme in self._schemes.items()}

    def add(self, query: np.ndarray, scale: float | None, allowed: np.ndarray | None, sink: float | None) -> None:
        """Adds the rows of a query [S, D], without fully masked ones. allowed: bool [S, T]; None: every pair."""
        if allowed is not None:
            some = allowed.any(1)
            query, allowed = query[some], allowed[some]
        q = query.astype(np.float64)
        outputs = {name: head.attend(q, scale, allowed, sink) for name, head in self._made.items()}
        exact = outputs.pop("")
        for name, output in outputs.items():
            self.squares[name] += float(np.square(output.astype(self._kind).astype(np.float64) - exact).sum())
        self.exact_squares += float(np.square(exact).sum())


def measure_eight_bits(
    rewrite: Rewrite, arrays: Mapping[str, np.ndarray], precisions: Sequence[EightBits]
) -> EightBitErrors:
    """The errors of a site in each precision. Fully masked rows are left out.

    Args:
        rewrite: the site, and its mask.
        arrays: its tensors; query, key and value in the type of the site.
        precisions: those to measure.
    """
    site, query, key, value = read_heads(rewrite.site, arrays)
    sizes = batch, heads, queries, keys = scores_shape(site, arrays)
    kept_heads, kept_rows = choose_rows(batch * heads, queries, keys)
    real = _real_keys(rewrite, arrays)
    kind = query.dtype if query.dtype.itemsize == 2 else np.dtype(helper.tensor_dtype_to_np_dtype(site.dtype))
    sums, rows = ErrorSums(precisions, kind), 0
    sink = _sinks(site, arrays)
    last = (-1, -1)
    for b, h in (divmod(int(i), heads) for i in kept_heads):
        shared = h // (heads // site.kv_num_heads)
        if last != (b, shared):
            sums.set_keys(key[b, shared], value[b, shared], None if real is None else real[b % len(real)])
            last = (b, shared)
        allowed = _allowed(site, arrays, sizes, (b, h, kept_rows))
        sums.add(query[b, h, kept_rows], site.scale, allowed, None if sink is None else sink[h])
        rows += len(kept_rows)
    shape = (batch, heads, site.kv_num_heads, queries, keys, query.shape[3])
    return EightBitErrors(sums.squares, sums.exact_squares, rows, batch * heads * queries, shape)


def choose_rows(heads: int, queries: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of heads of all batches, and of query rows, in ascending order: drawn, the same in every run."""
    rng = np.random.default_rng([heads, queries, keys])
    rows = min(queries, max(_MOST_SCORES // max(1, heads * keys), _LEAST_ROWS))
    some = min(heads, max(1, _MOST_SCORES // max(1, rows * keys)))
    return np.sort(rng.permutation(heads)[:some]), np.sort(rng.permutation(queries)[:rows])


def _allowed(
    site: AttentionSite,
    arrays: Mapping[str, np.ndarray],
    sizes: tuple[int, int, int, int],
    head_rows: tuple[int, int, np.ndarray],
) -> np.ndarray | None:
    """Which keys some rows of a head attend, bool [rows, T], by what the graph itself adds; None: all."""
    if not site.terms:
        return None
    b, h, rows = head_rows
    scores = np.zeros((1, 1, len(rows), sizes[3]))
    for term in site.terms:
        value = term.spread(arrays[term.tensor], sizes)
        value = np.broadcast_to(value, (*sizes[: 4 - value.ndim], *value.shape)) if value.ndim < 4 else value
        value = np.broadcast_to(value, sizes)[b : b + 1, h : h + 1, rows]
        scores = term.apply(scores, value)
    allowed: np.ndarray = scores[0, 0] > FORBIDDING_VALUE
    return allowed


def _real_keys(rewrite: Rewrite, arrays: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Which keys are not padding, bool [B or 1, T]; None: all, or it is not known."""
    for operand in rewrite.mask.operands:
        if operand.role == "pad" and operand.tensor in arrays:
            return np.asarray(operand.prepare(arrays[operand.tensor]) != 0)
    return None


def _sinks(site: AttentionSite, arrays: Mapping[str, np.ndarray]) -> np.ndarray | None:
    if site.sink is None:
        return None
    logits = np.array(site.sink_values) if site.sink_values else arrays[site.sink]
    return np.asarray(logits, np.float64).reshape(-1)
