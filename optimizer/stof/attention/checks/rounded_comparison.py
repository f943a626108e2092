# SPDX-License-Identifier: Apache-2.0
"""A site with roundings to 8 bits beside the nodes that it replaces, both held against fp64 with the same roundings.

Roundings make steps of differences in the last place: a number in the middle between two codes is rounded either way. So fp64
gives an interval. Its width is 0 except in rows with a number within rounding error of a tie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper

from stof.attention.checks.row_sample import choose_rows
from stof.attention.checks.site_comparison import (
    SITE_FACTOR,
    heads_in_layout,
    result_in_heads,
    scores_shape,
    undo_output_moves,
)
from stof.graph.node_fields import plain_attributes_of
from stof.mask.roundings import Quantizer, Steps
from stof.mask.site import AttentionSite, Operand
from stof.runtime.library import LibraryError, Op
from stof.verification.array_distance import ulp_of_largest
from stof.verification.compare import describe_nonfinite
from stof.verification.result import Comparison, Coverage

_SUM_ERROR = 2.0**-21  # of a sum of products, relative to that of their magnitudes
_EXP_ERROR = 2.0**-19  # of a weight, relative to it
_ULPS = 8


@dataclass(frozen=True)
class Interval:
    """Numbers between two bounds: what roundings may make of one."""

    low: np.ndarray
    high: np.ndarray

    @classmethod
    def around(cls, x: np.ndarray, error: np.ndarray) -> Interval:
        """Numbers that are off by an error."""
        return cls(x - error, x + error)

    def round(self, steps: Steps | None) -> Interval:
        """Behind a rounding, which is monotone."""
        return self if steps is None else Interval(steps.round(self.low), steps.round(self.high))

    def widen(self, relative: float) -> Interval:
        """Off by a share of themselves."""
        return Interval(self.low - relative * np.abs(self.low), self.high + relative * np.abs(self.high))


def compare_rounded_site(
    site: AttentionSite, nodes: Sequence[onnx.NodeProto], arrays: Mapping[str, np.ndarray], computed: np.ndarray
) -> Comparison:
    """The operator of a site with roundings beside fp64, and beside what the original computed.

    Args:
        site: the attention; query, key and value are numbers of codes.
        nodes: in its place: one, since all rows attend by one mask.
        arrays: the tensors of the site, and the operands of the node.
        computed: the site's output in the original.
    """
    (node,) = nodes
    what = f"site {site.name!r}"
    try:
        mine = _run(site, node, arrays, computed)
    except (LibraryError, ValueError) as error:  # what the operator refuses, and arrays that the library does not read
        return Comparison(what, np.inf, 0.0, False, site.name, str(error))
    baseline = result_in_heads(site, arrays, computed)
    total = baseline.size
    away = np.abs(mine - baseline).max(-1, initial=0.0)
    sample = choose_rows(np.where(np.isnan(away), np.inf, away), (mine == 0).all(-1), scores_shape(site, arrays)[3])
    pick = np.asarray if sample is None else sample.pick
    mine, baseline = pick(mine), pick(baseline)
    odd = np.isfinite(mine) != np.isfinite(baseline)
    if odd.any():
        detail = describe_nonfinite(odd, mine, baseline, "(b, h, q, d) = ")
        return Comparison(what, np.inf, 0.0, False, site.name, detail)
    heads = np.arange(site.num_heads) if sample is None else sample.heads
    exact = round_exactly(site, arrays, heads, pick)
    good = np.isfinite(mine)
    beyond, baseline_beyond = (
        np.where(good, np.maximum(np.maximum(exact.low - x, x - exact.high), 0.0), 0.0) for x in (mine, baseline)
    )
    budget = SITE_FACTOR * float(baseline_beyond.max(initial=0.0)) + _ULPS * ulp_of_largest(computed, computed.dtype)
    worst = float(beyond.max(initial=0.0))
    where = tuple(int(i) for i in np.unravel_index(int(beyond.argmax()), beyond.shape)) if beyond.size else ()
    detail = (
        "" if worst <= budget else f"beyond what roundings explain; largest at (b, h, q, d) = {where} of those compared"
    )
    coverage = Coverage(int(good.sum()), int((~good).sum()), left_out=total - mine.size)
    return Comparison(what, worst, budget, worst <= budget, site.name, detail, coverage)


def round_exactly(
    site: AttentionSite,
    arrays: Mapping[str, np.ndarray],
    heads: np.ndarray,
    pick: Callable[[np.ndarray], np.ndarray] = np.asarray,
) -> Interval:
    """The output [B, H, S, Dv] of a site with roundings in fp64, as far as it is determined.

    Args:
        site: the attention.
        arrays: its tensors, and scales and zero points.
        heads: those that are computed.
        pick: takes these, and the rows that are computed, of what broadcasts to [B, H, S, ...].
    """
    assert site.roundings is not None
    rounds, steps = site.roundings, {r: steps_of(q, arrays) for r, q in site.roundings.by_role.items()}
    shared = heads // (site.num_heads // site.kv_num_heads)
    q = pick(_numbers(site.query, steps["query"], arrays, site.num_heads))
    k = _numbers(site.key, steps["key"], arrays, site.kv_num_heads)[:, shared]
    v = _numbers(site.value, steps["value"], arrays, site.kv_num_heads)[:, shared]
    error = _SUM_ERROR * np.matmul(np.abs(q), np.abs(k).swapaxes(2, 3))
    scores = Interval.around(np.matmul(q, k.swapaxes(2, 3)), error).round(steps.get("score"))
    scores = Interval(scores.low * site.scale, scores.high * site.scale)
    if rounds.scaled_score is not None:
        scores = scores.widen(_SUM_ERROR).round(steps["scaled_score"])
    sizes = scores_shape(site, arrays)
    for term in site.terms:
        value = pick(term.spread(arrays[term.tensor], sizes))
        scores = Interval(term.apply(scores.low, value), term.apply(scores.high, value))
    if rounds.biased_score is not None:
        scores = scores.widen(_SUM_ERROR).round(steps["biased_score"])
    weights = _softmax(scores).round(steps["weight"])
    middle, radius = (weights.low + weights.high) / 2, (weights.high - weights.low) / 2
    output, spread = np.matmul(middle, v), np.matmul(radius, np.abs(v))
    return Interval(output - spread, output + spread)


def steps_of(quantizer: Quantizer, arrays: Mapping[str, np.ndarray]) -> Steps:
    """The numbers of a quantizer."""
    return Steps.of(arrays[quantizer.scale], arrays[quantizer.zero_point] if quantizer.zero_point else None)


def _softmax(scores: Interval) -> Interval:
    top = scores.high.max(-1, keepdims=True, initial=-np.inf)
    with np.errstate(invalid="ignore"):  # -inf less -inf, in rows without a key
        low, high = (np.exp(x - top) for x in (scores.low, scores.high))
        if np.array_equal(scores.low, scores.high):
            weights = high / high.sum(-1, keepdims=True)
            return Interval(weights, weights).widen(_EXP_ERROR)
        # A weight is largest where the others are lowest, and the other way round.
        least = low / (high.sum(-1, keepdims=True) - high + low)
        most = high / (low.sum(-1, keepdims=True) - low + high)
    return Interval(least, most).widen(_EXP_ERROR)


def _numbers(operand: Operand, steps: Steps, arrays: Mapping[str, np.ndarray], heads: int) -> np.ndarray:
    """What codes of an operand stand for, [B, heads, length, size], in fp64; the graph has the nearest fp32 numbers."""
    laid = heads_in_layout(operand.lay_out(arrays[operand.tensor]), operand.layout, heads)
    return steps.dequantize(np.rint(laid.astype(np.float64) / steps.scale) + steps.zero_point)


def _run(
    site: AttentionSite, node: onnx.NodeProto, arrays: Mapping[str, np.ndarray], computed: np.ndarray
) -> np.ndarray:
    """What the operator writes, as [B, H, S, Dv]."""
    assert site.roundings is not None
    roundings, operands = site.roundings, (site.query, site.key, site.value)
    codes = []
    for operand, role, kind in zip(operands, ("query", "key", "value"), roundings.code_types, strict=True):
        steps = steps_of(roundings.by_role[role], arrays)
        numbers = np.rint(operand.lay_out(arrays[operand.tensor]).astype(np.float64) / steps.scale) + steps.zero_point
        codes.append(np.ascontiguousarray(numbers.astype(helper.tensor_dtype_to_np_dtype(kind))))
    layouts = (*(o.layout for o in operands), site.output_layout)
    attributes = {**plain_attributes_of(node), "layout": " ".join(layout.value for layout in layouts)}
    output = np.full(undo_output_moves(site, scores_shape(site, arrays), computed).shape, np.nan, np.float32)
    inputs = [*codes, *(np.ascontiguousarray(arrays[n]) for n in node.input[3:])]
    Op(node.op_type, attributes).run(inputs, [output], threads=2)
    return heads_in_layout(output, site.output_layout, site.num_heads)
