# SPDX-License-Identifier: Apache-2.0
"""A site's op beside the nodes that it replaces, both held against attention in fp64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import helper

from stof.arguments.precisions import RoundedOperands, precision_of
from stof.attention.checks.row_sample import RowSample, choose_rows
from stof.attention.function_body import OP
from stof.execution.upcast import HALF
from stof.graph.node_fields import plain_attributes_of
from stof.mask.site import FORBIDDING_VALUE, AttentionSite, EmptyRows, Layout, Operand, heads_in_one
from stof.runtime.library import LibraryError, Op
from stof.verification.array_distance import relative_rms, ulp_of_largest
from stof.verification.compare import describe_nonfinite
from stof.verification.result import Comparison, Coverage

SITE_FACTOR = 2.0  # op error ≤ 2 × the original's own error + 4 ulp
_SOFT_FILL = -5e3  # a row whose largest score is lower has no key
_DIGITS = 0.02  # of the output's range: how far fills may take a row without a key from what it stands for
_ULPS = 4
_STRIDES = (1, -1, 7, -5)  # by which fp32 sums of a score take the elements of a head


@dataclass(frozen=True)
class Exact:
    """A site in fp64: the output [B, H, S, Dv]; of each row [B, H, S] the largest score and whether NaN leaks into it.

    NaN or infinity in the key or value of a forbidden key, which comes with a weight of 0 at most, is left out here. The
    nodes of the original multiply it with that weight, or add -inf to it, which gives NaN.
    """

    output: np.ndarray
    tops: np.ndarray
    leaks: np.ndarray


@dataclass(frozen=True)
class OperatorCall:
    """A node of the operator, and the names of what it is run on.

    ``rows``: those of the output that it computes, [B or 1, S]; None: all of them.
    """

    node: onnx.NodeProto
    inputs: Sequence[str]
    rows: np.ndarray | None = None


def compare_site(
    site: AttentionSite,
    calls: Sequence[OperatorCall],
    arrays: Mapping[str, np.ndarray],
    computed: np.ndarray,
    ignore_empty_rows: bool,
) -> Comparison:
    """The op on the tensors of ``arrays`` beside fp64 on the same, and beside what the original computed.

    ``calls``: a later one gives the rows that it computes in place of those of earlier ones.
    """
    multiplied, given = _multiply_query(site, arrays)
    original = undo_output_moves(multiplied, scores_shape(multiplied, given), given[site.output])
    operands = [_lay_out(given, o) for o in (multiplied.query, multiplied.key, multiplied.value)]
    try:
        mine, policies = _run_calls(multiplied, calls, operands, given, original)
    except (LibraryError, ValueError) as error:  # what the operator refuses, and arrays that the library does not read
        return Comparison(f"site {site.name!r}", np.inf, 0.0, False, site.name, str(error))
    all_keys = EmptyRows.ALL.value in policies
    precision = next(filter(None, (precision_of(plain_attributes_of(call.node)) for call in calls)), None)
    return compare_result(site, mine, arrays, computed, ignore_empty_rows, has_all_policy=all_keys, precision=precision)


def result_in_heads(site: AttentionSite, arrays: Mapping[str, np.ndarray], output: np.ndarray) -> np.ndarray:
    """A site's output as [B, H, S, Dv]; ``arrays`` has its query and key."""
    moved = undo_output_moves(site, scores_shape(site, arrays), output)
    return heads_in_layout(moved, site.output_layout, site.num_heads)


def compare_result(
    site: AttentionSite,
    mine: np.ndarray,
    arrays: Mapping[str, np.ndarray],
    computed: np.ndarray,
    ignore_empty_rows: bool,
    *,
    has_all_policy: bool,
    precision: RoundedOperands | None = None,
) -> Comparison:
    """A result [B, H, S, Dv] beside fp64 on the tensors of ``arrays``, and beside what the original computed.

    Of a large site some rows are compared (row_sample.py). Where NaN that forbidden keys carry makes the original NaN, fp32
    in its place tells how much rounding is allowed.

    Args:
        site: the attention.
        mine: what took its place computed.
        arrays: its tensors.
        computed: its output in the original.
        ignore_empty_rows: fully masked rows may differ.
        has_all_policy: fully masked rows attend all keys by their scores.
        precision: in which its products may be computed; None: that of the site.
    """
    captured = site, arrays
    site, arrays = _multiply_query(site, arrays)
    original = arrays[site.output]
    what = f"site {site.name!r}"
    baseline = result_in_heads(site, arrays, computed)
    shape = baseline.shape
    empty = ~np.isfinite(baseline).all(-1) | (mine == 0).all(-1)
    sample = choose_rows(_rows_away(mine, baseline), empty, scores_shape(site, arrays)[3])
    if sample is not None:
        mine, baseline = sample.pick(mine), sample.pick(baseline)
    reference = site_exactly(*captured, sample=sample)
    exact, tops = reference.output, reference.tops
    leaked = np.isnan(baseline) & np.isfinite(mine) & np.isfinite(exact) & reference.leaks[..., None]
    if leaked.any():
        baseline = np.where(leaked, site_exactly(*captured, np.float32, sample).output.astype(baseline.dtype), baseline)
    odd = np.isfinite(mine) != np.isfinite(baseline)
    if odd.any():
        return Comparison(
            what, np.inf, 0.0, False, site.name, describe_nonfinite(odd, mine, baseline, "(b, h, q, d) = ")
        )
    rows, soft = _choose_exact_rows(baseline, exact, tops, has_all_policy=has_all_policy)
    rest = np.nan if ignore_empty_rows else exact if soft else baseline.astype(np.float64)
    target = np.where(rows[..., None], exact, rest)
    good = np.isfinite(baseline) & np.isfinite(target)
    errors = np.abs(mine.astype(np.float64) - target)
    rms = relative_rms(mine, target, good)
    if precision is not None:
        errors = np.minimum(errors, _errors_in_precision((site, arrays), sample, mine, precision))
    baseline_errors = np.abs(baseline.astype(np.float64) - target)
    ulps = _ULPS * ulp_of_largest(original, original.dtype)
    parts = (good & rows[..., None], good & ~rows[..., None]) if soft else (good,)
    other_orders = partial(_rounded_scores, captured, exact, rows, sample)
    worst, budget, detail = _hold_to_budget(parts, errors, baseline_errors, ulps, sample, other_orders)
    coverage = _count_elements(baseline, good, shape, sample)
    return Comparison(what, worst, budget, worst <= budget, site.name, detail, coverage, relative_rms=rms)


def _errors_in_precision(
    multiplied: tuple[AttentionSite, Mapping[str, np.ndarray]],
    sample: RowSample | None,
    mine: np.ndarray,
    precision: RoundedOperands,
) -> np.ndarray:
    """The distance of each element to the definition in a precision, less the precision's slack; infinite where not finite."""
    site, arrays = multiplied
    rounded = site_exactly(site, arrays, sample=sample, precision=precision).output
    values = heads_in_layout(_lay_out(arrays, site.value), site.value.layout, site.kv_num_heads)
    largest = np.abs(np.where(np.isfinite(values), values, 0)).max((2, 3), initial=0.0).astype(np.float64)
    heads = sample.heads if sample is not None else np.arange(site.num_heads)
    slack = precision.slack * largest[:, heads // (site.num_heads // site.kv_num_heads), None, None]
    away = np.abs(mine.astype(np.float64) - rounded)
    errors: np.ndarray = np.where(np.isfinite(away), np.maximum(away - slack, 0.0), np.inf)
    return errors


def _run_calls(
    site: AttentionSite,
    calls: Sequence[OperatorCall],
    operands: Sequence[np.ndarray],
    arrays: Mapping[str, np.ndarray],
    original: np.ndarray,
) -> tuple[np.ndarray, set[object]]:
    """What the op writes, as ``heads_in_layout`` lays it out, and the policies of its calls for fully masked rows."""
    layouts = (site.query.layout, site.key.layout, site.value.layout, site.output_layout)
    mine = np.full(heads_in_layout(original, site.output_layout, site.num_heads).shape, np.nan, original.dtype)
    policies: set[object] = set()
    for call in calls:
        inputs = [np.ascontiguousarray(a) for a in (*operands, *(arrays[n] for n in call.inputs[3:]))]
        attributes = {**plain_attributes_of(call.node), "layout": " ".join(layout.value for layout in layouts)}
        attributes.pop("packed", None)  # of the tensors that the node reads; these hold the site's heads alone
        policies.add(attributes.get("empty_rows"))
        output = np.full(original.shape, np.nan, original.dtype)
        Op(OP, attributes).run(inputs, [output], threads=2)
        computed_rows = True if call.rows is None else call.rows[:, None, :, None]
        mine = np.where(computed_rows, heads_in_layout(output, site.output_layout, site.num_heads), mine)
    return mine, policies


def _count_elements(
    baseline: np.ndarray, good: np.ndarray, shape: tuple[int, ...], sample: RowSample | None
) -> Coverage:
    """What of an output of this shape is compared: ``good`` of the sampled ``baseline``."""
    compared, total = int(good.sum()), int(np.prod(shape))
    ignored = int((np.isfinite(baseline) & ~good).sum())
    coverage = Coverage(compared, baseline.size - compared - ignored, ignored, left_out=total - baseline.size)
    if sample is not None:
        coverage = replace(coverage, sampled_rows=baseline[..., 0].size, all_rows=int(np.prod(shape[:3])))
    return coverage


def _rounded_scores(
    captured: tuple[AttentionSite, Mapping[str, np.ndarray]],
    exact: np.ndarray,
    rows: np.ndarray,
    sample: RowSample | None,
) -> np.ndarray:
    """The largest error in fp32 of each batch and head, with sums of scores in several orders: of ``rows`` [B, H, S], else 0.

    The original's sums have one order, by chance a good one: large scores of others may be rounded further. That is chance in
    each row, so heads are bounded, not rows: a few orders of one row say little of the next order.
    """
    errors = np.zeros((*exact.shape[:2], 1))
    for stride in _STRIDES:
        away = np.abs(site_exactly(*captured, np.float32, sample, stride).output - exact)
        counted = np.where(np.isfinite(away) & rows[..., None], away, 0.0)
        errors = np.maximum(errors, counted.max((2, 3), initial=0.0)[..., None])
    return np.where(rows, errors, 0.0)


def _hold_to_budget(
    parts: Sequence[np.ndarray],
    errors: np.ndarray,
    baseline_errors: np.ndarray,
    ulps: float,
    sample: RowSample | None,
    other_orders: Callable[[], np.ndarray],
) -> tuple[float, float, str]:
    """As :func:`_find_largest_difference`: by the largest error of the original in each part, else by that of other orders, too.

    Args:
        parts: elements [B, H, S, Dv] that count.
        errors: of all elements.
        baseline_errors: those of the original.
        ulps: what is allowed besides.
        sample: of which rows they are.
        other_orders: gives the errors of rows [B, H, S] in fp32 with other orders of sums.
    """
    budgets = [np.full(errors.shape[:3], SITE_FACTOR * baseline_errors[p].max(initial=0.0) + ulps) for p in parts]
    worst, budget, detail = _find_largest_difference(parts, errors, budgets, sample)
    if not np.isfinite(worst) or worst <= budget:
        return worst, budget, detail
    widened = SITE_FACTOR * other_orders() + ulps
    worst, budget, detail = _find_largest_difference(parts, errors, [np.maximum(b, widened) for b in budgets], sample)
    return worst, budget, "; ".join(filter(None, (detail, "fp32 sums in other orders widened the budget")))


def _find_largest_difference(
    parts: Sequence[np.ndarray],
    errors: np.ndarray,
    budgets: Sequence[np.ndarray],
    sample: RowSample | None,
) -> tuple[float, float, str]:
    """The error that exceeds what is allowed most, or is nearest to that; what is allowed there; and where a larger one is.

    Args:
        parts: elements [B, H, S, Dv] that count.
        errors: of all elements.
        budgets: what is allowed in each row [B, H, S], by part.
        sample: of which rows they are.
    """
    differences: list[tuple[float, float, str]] = []
    for part, allowed in zip(parts, budgets, strict=True):
        counted = np.where(part, errors, 0.0)
        beyond = np.where(counted > 0, np.inf, 0.0)  # where nothing is allowed
        np.divide(counted, allowed[..., None], out=beyond, where=allowed[..., None] > 0)
        b, h, q, d = np.unravel_index(int(beyond.argmax()), beyond.shape)
        worst, budget = float(counted[b, h, q, d]), float(allowed[b, h, q])
        where = _position((b, h, q, d), sample)
        differences.append((worst, budget, f"largest at (b, h, q, d) = {where}" if worst > budget else ""))
    return max(differences, key=lambda x: x[0] / x[1] if x[1] else float(x[0] > 0))


def undo_output_moves(site: AttentionSite, scores: tuple[int, int, int, int], output: np.ndarray) -> np.ndarray:
    """A site's output in the layout in which the op writes it; ``scores`` is their shape."""
    if site.output_flat:
        output = output.reshape(scores[2] if site.output_perm else scores[0], -1, output.shape[-1])
    if site.output_perm:
        output = np.transpose(output, np.argsort(site.output_perm))
    if site.output_joined:
        output = output.reshape(-1, *output.shape[2:])
    return heads_in_one(output, site.output_layout) if site.output_grouped else output


def _choose_exact_rows(
    baseline: np.ndarray, exact: np.ndarray, tops: np.ndarray, *, has_all_policy: bool
) -> tuple[np.ndarray, bool]:
    """The rows [B, H, S] that are compared with fp64, and whether the others are, too.

    Rows without a key follow the original's own rounding (finfo.min absorbs the scores), not fp64; but where -65504 takes
    digits from them alone, the operator computes what it stands for, and the original is off by these digits.
    """
    finite = np.isfinite(baseline) & np.isfinite(exact)
    away = np.abs(np.where(finite, baseline.astype(np.float64) - exact, 0.0))
    rows = tops > _SOFT_FILL
    lost = float(away[~rows].max(initial=0.0))
    span = float(np.ptp(baseline[finite])) if finite.any() else 0.0
    soft = has_all_policy and lost <= _DIGITS * span
    return (rows if soft else tops > FORBIDDING_VALUE), soft


def scores_shape(site: AttentionSite, arrays: Mapping[str, np.ndarray]) -> tuple[int, int, int, int]:
    """B, H, S, T of a run."""
    query, key = _lay_out(arrays, site.query), _lay_out(arrays, site.key)
    rows, keys = (x.shape[2 if o.layout is Layout.BHSD else 1] for x, o in ((query, site.query), (key, site.key)))
    return query.shape[0], site.num_heads, rows, keys


def _rows_away(mine: np.ndarray, baseline: np.ndarray) -> np.ndarray:
    """How far two outputs are apart in each row [B, H, S]: infinite where elements are finite in one of them alone."""
    with np.errstate(invalid="ignore"):
        away = np.abs(mine.astype(np.float32) - baseline.astype(np.float32))
    away = np.where(np.isfinite(away), away, np.where(np.isfinite(mine) == np.isfinite(baseline), 0.0, np.inf))
    distances: np.ndarray = away.max(-1, initial=0.0)
    return distances


def _position(where: Sequence[Any], sample: RowSample | None) -> tuple[int, ...]:
    """An element's (b, h, q, d) in the whole output."""
    b, h, q, d = (int(i) for i in where)
    return (b, h, q, d) if sample is None else (b, int(sample.heads[h]), int(sample.rows[q]), d)


def site_exactly(
    site: AttentionSite,
    arrays: Mapping[str, np.ndarray],
    dtype: type[np.floating[Any]] = np.float64,
    sample: RowSample | None = None,
    stride: int = 1,
    precision: RoundedOperands | None = None,
) -> Exact:
    """The site from its captured tensors in fp64, or another type; of a sample its rows and heads alone.

    Sums of scores take elements of a head in the order of ``stride``. Reads what the graph itself adds to the scores, never
    the lifted expression. With a precision, the operands of both products are rounded to it, as docs/reference/operators.md
    has it; a row is divided by the sum of unrounded weights.
    """
    narrow = np.asarray if precision is None else precision.round
    pick = sample.pick if sample is not None else np.asarray
    heads = sample.heads if sample is not None else np.arange(site.num_heads)
    q = pick(heads_in_layout(_lay_out(arrays, site.query), site.query.layout, site.num_heads)).astype(dtype)
    shared = heads // (site.num_heads // site.kv_num_heads)  # the head of key and value of each head
    k = heads_in_layout(_lay_out(arrays, site.key), site.key.layout, site.kv_num_heads)[:, shared].astype(dtype)
    v = heads_in_layout(_lay_out(arrays, site.value), site.value.layout, site.kv_num_heads)[:, shared].astype(dtype)
    order = np.argsort(np.arange(q.shape[-1]) * stride % max(q.shape[-1], 1), kind="stable")
    scores = np.matmul(narrow(q[..., order]), narrow(k[..., order]).swapaxes(2, 3)) * dtype(site.scale)
    if site.query_factor is not None:
        factor = pick(arrays[site.query_factor[1]]).astype(dtype)
        scores = scores * factor if site.query_factor[0] == "Mul" else scores / factor
    if site.softcap:
        scores = dtype(site.softcap) * np.tanh(scores / dtype(site.softcap))
    added = None if np.isfinite(k).all() and np.isfinite(v).all() else np.zeros_like(scores)  # to scores of 0
    sizes = scores_shape(site, arrays)
    for term in site.terms:
        value = pick(term.spread(arrays[term.tensor], sizes))
        scores = term.apply(scores, value)
        added = None if added is None else term.apply(added, value)
    leaks = np.zeros(1, bool)  # of pairs
    if added is not None:
        is_clean = np.isfinite(k).all(-1, keepdims=True) & np.isfinite(v).all(-1, keepdims=True)
        leaks = (added <= FORBIDDING_VALUE) & ~np.swapaxes(is_clean, 2, 3)
        scores = np.where(leaks & ~(scores < np.inf), added, scores)
    tops = scores.max(-1, initial=-np.inf)
    if site.sink is not None:
        logits = np.array(site.sink_values) if site.sink_values else arrays[site.sink]
        column = pick(logits.astype(dtype).reshape(1, -1, 1, 1))
        scores = np.concatenate([scores, np.broadcast_to(column, (*scores.shape[:3], 1))], axis=-1)
    with np.errstate(all="ignore"):
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        sums = weights.sum(-1, keepdims=True)
        weights = narrow(weights) / sums
    weights = weights[..., : k.shape[2]]
    odd = ~np.isfinite(v)
    output = np.matmul(weights, narrow(np.where(odd, dtype(0), v)))
    if odd.any():
        counts = ~leaks | (weights != 0)
        output[np.matmul(counts.astype(np.float32), odd.astype(np.float32)) > 0] = np.nan
    if site.added_values is not None:
        output = output + pick(arrays[site.added_values.tensor].reshape(*sizes[:3], -1)).astype(dtype)
    return Exact(output, tops, np.broadcast_to(leaks.any(-1), tops.shape))


def _multiply_query(
    site: AttentionSite, arrays: Mapping[str, np.ndarray]
) -> tuple[AttentionSite, Mapping[str, np.ndarray]]:
    """The site with a query that is multiplied beforehand, where the graph multiplies its scores, as it is emitted."""
    if site.query_factor is None:
        return site, arrays
    op, factor = site.query_factor
    query = heads_in_layout(_lay_out(arrays, site.query), site.query.layout, site.num_heads)
    scaled = query * arrays[factor] if op == "Mul" else query / arrays[factor]
    name = f"{site.query.tensor} {op} {factor}"
    return replace(site, query=Operand(name, Layout.BHSD), query_factor=None), {**arrays, name: scaled}


def _lay_out(arrays: Mapping[str, np.ndarray], operand: Operand) -> np.ndarray:
    return operand.lay_out(arrays[operand.tensor])


def read_heads(
    site: AttentionSite, arrays: Mapping[str, np.ndarray]
) -> tuple[AttentionSite, np.ndarray, np.ndarray, np.ndarray]:
    """Query, key and value as [B, heads, length, size], and the site without what the graph multiplies its scores with."""
    site, arrays = _multiply_query(site, arrays)
    operands = ((site.query, site.num_heads), (site.key, site.kv_num_heads), (site.value, site.kv_num_heads))
    query, key, value = (heads_in_layout(_lay_out(arrays, o), o.layout, heads) for o, heads in operands)
    return site, query, key, value


def heads_in_layout(array: np.ndarray, layout: Layout, heads: int) -> np.ndarray:
    """A tensor in a layout as [B, heads, length, size]."""
    if layout is Layout.BSN:
        array = array.reshape(*array.shape[:2], heads, -1)
    return array if layout is Layout.BHSD else array.transpose(0, 2, 1, 3)


def round_to_site_type(array: np.ndarray, dtype: int) -> np.ndarray:
    """In the site's type, where the model ran widened."""
    if dtype not in HALF or array.dtype != np.float32:
        return array
    return array.astype(helper.tensor_dtype_to_np_dtype(dtype))
