# SPDX-License-Identifier: Apache-2.0
"""How far outputs may differ: of models beside two legal runs of the original, of a site beside fp64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import helper

from stof.inputs import Case
from stof.passes.body import OP
from stof.runtime import Op
from stof.site import AttentionSite, EmptyRows, Layout, Operand, heads_in_one
from stof.widen import HALF

SITE_FACTOR = 2.0  # op error ≤ 2 × the original's own error + 4 ulp
MODEL_FACTOR = 4.0  # difference ≤ 4 × that of two legal runs + 1e-6 of the output's range
_ENOUGH = 64  # elements whose range tells how large an output is
_SOFT_FILL, _HARD_FILL = -5e3, -1e4  # scores of rows without a key are lower: -10000 is a fill, and no sum of products
_DIGITS = 0.02  # of the output's range: how far fills may take a row without a key from what it stands for
_EPSILON = {"float32": 1.2e-7, "float16": 9.8e-4, "bfloat16": 7.9e-3}


@dataclass(frozen=True)
class Comparison:
    """One comparison: what, the largest difference, the budget, whether it holds."""

    what: str
    difference: float
    budget: float
    ok: bool
    site: str = ""
    detail: str = ""


def compare_outputs(
    case: Case,
    floor: float,
    name: str,
    plain: np.ndarray,
    legal: Sequence[np.ndarray],
    found: np.ndarray,
    expanded: Sequence[np.ndarray] = (),
) -> Comparison:
    """What was found beside the original's own runs.

    Args:
        case: the inputs.
        floor: what is allowed anyway, of the output's range.
        name: of the output.
        plain: the original's, without graph optimizations.
        legal: its other runs.
        found: the optimized model's.
        expanded: runs of another graph that means the same; how far they are from its first one is allowed as well.
    """
    what = f"output {name!r}, {case}"
    if found.shape != plain.shape:
        return Comparison(what, np.inf, 0.0, False, detail=f"shape {found.shape}, expected {plain.shape}")
    if plain.dtype.kind != "f":
        same = any(np.array_equal(found, x) for x in (plain, *legal))
        return Comparison(what, 0.0 if same else np.inf, 0.0, same)
    if not np.array_equal(np.isfinite(found), np.isfinite(plain)):
        where = tuple(int(i) for i in np.argwhere(np.isfinite(found) != np.isfinite(plain))[0])
        return Comparison(what, np.inf, 0.0, False, detail=f"inf or NaN at {where} in one of the two")
    good = np.logical_and.reduce([np.isfinite(x) for x in (plain, *legal)])
    first, *others = (x[good].astype(np.float64) for x in (plain, *legal))
    own = found[good].astype(np.float64)
    # The range of a few numbers can be small by chance, and of one it is 0.
    span = float(first.max() - first.min()) if first.size >= _ENOUGH else float(np.abs(first).max(initial=0.0))
    # Of a few numbers, legal runs that happen to agree tell little.
    floor *= MODEL_FACTOR if first.size < _ENOUGH else 1.0
    rounded_by = [np.abs(first - x) for x in others]
    for x in expanded[1:]:
        both = good & np.isfinite(expanded[0]) & np.isfinite(x)
        rounded_by.append(np.abs(x[both].astype(np.float64) - expanded[0][both]))
    budget = MODEL_FACTOR * max(float(x.max(initial=0.0)) for x in rounded_by) + floor * span
    # Any legal run may be the nearest one.
    difference = min(float(np.abs(own - x).max(initial=0.0)) for x in (first, *others))
    return Comparison(what, difference, budget, difference <= budget)


def compare_site(
    site: AttentionSite,
    node: onnx.NodeProto,
    inputs: Sequence[str],
    known: Mapping[str, np.ndarray],
    computed: np.ndarray,
    ignore_empty_rows: bool,
) -> Comparison:
    """The op on the tensors of ``known`` beside fp64 on the same, and beside what the original computed."""
    exact, tops = site_fp64(site, known)
    site, known = _multiplied(site, known)
    original = known[site.output]
    if site.output_flat:
        outer = exact.shape[2] if site.output_perm else exact.shape[0]
        original, computed = (x.reshape(outer, -1, x.shape[-1]) for x in (original, computed))
    if site.output_perm:
        back = np.argsort(site.output_perm)
        original, computed = np.transpose(original, back), np.transpose(computed, back)
    if site.output_joined:
        original, computed = (a.reshape(-1, *a.shape[2:]) for a in (original, computed))
    if site.output_grouped:
        original, computed = (heads_in_one(a, site.output_layout) for a in (original, computed))
    operands = [_laid_out(known, o) for o in (site.query, site.key, site.value)]
    arrays = [np.ascontiguousarray(a) for a in (*operands, *(known[n] for n in inputs[3:]))]
    layouts = (site.query.layout, site.key.layout, site.value.layout, site.output_layout)
    attributes = {**attributes_of(node), "layout": " ".join(layout.value for layout in layouts)}
    attributes.pop("packed", None)  # of the tensors that the node reads; these hold the site's heads alone
    found = np.full(original.shape, np.nan, original.dtype)
    what = f"site {site.name!r}"
    try:
        Op(OP, attributes).run(arrays, [found], threads=2)
    except Exception as error:  # the message of the op says what it refused
        return Comparison(what, np.inf, 0.0, False, site.name, str(error))
    mine = _bhsd(found, site.output_layout, site.num_heads)
    own = _bhsd(computed, site.output_layout, site.num_heads)
    if not np.array_equal(np.isfinite(mine), np.isfinite(own)):
        where = tuple(int(i) for i in np.argwhere(np.isfinite(mine) != np.isfinite(own))[0])
        return Comparison(
            what, np.inf, 0.0, False, site.name, f"inf or NaN at (b, h, q, d) = {where} in one of the two"
        )
    # Rows without a key follow the original's own rounding (finfo.min absorbs the scores), not fp64; but where -65504 takes
    # digits from them alone, the operator computes what it stands for, and the original is off by these digits.
    finite = np.isfinite(own) & np.isfinite(exact)
    away = np.abs(np.where(finite, own.astype(np.float64) - exact, 0.0))
    rows = tops > _SOFT_FILL
    lost = float(away[~rows].max(initial=0.0))
    span = float(np.ptp(own[finite])) if finite.any() else 0.0
    soft = attributes.get("empty_rows") == EmptyRows.ALL.value and lost <= _DIGITS * span
    if not soft:
        rows = tops > _HARD_FILL
    rest = np.nan if ignore_empty_rows else exact if soft else own.astype(np.float64)
    target = np.where(rows[..., None], exact, rest)
    good = np.isfinite(own) & np.isfinite(target)
    errors = np.abs(mine.astype(np.float64) - target)
    base = np.abs(own.astype(np.float64) - target)
    found_in: list[tuple[float, float, str]] = []
    for part in (good & rows[..., None], good & ~rows[..., None]) if soft else (good,):
        budget = SITE_FACTOR * float(base[part].max(initial=0.0)) + _budget_ulp(original)
        worst = float(errors[part].max(initial=0.0))
        where = tuple(int(i) for i in np.unravel_index(int(np.argmax(np.where(part, errors, 0))), errors.shape))
        found_in.append((worst, budget, f"largest at (b, h, q, d) = {where}" if worst > budget else ""))
    worst, budget, detail = max(found_in, key=lambda x: x[0] / x[1] if x[1] else float(x[0] > 0))
    return Comparison(what, worst, budget, worst <= budget, site.name, detail)


def site_fp64(site: AttentionSite, known: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The site's output [B, H, S, Dv] in fp64 from its captured tensors, and the largest score of each row [B, H, S].

    Reads what the graph itself adds to the scores, never the lifted expression.
    """
    q = _bhsd(_laid_out(known, site.query), site.query.layout, site.num_heads).astype(np.float64)
    k = _bhsd(_laid_out(known, site.key), site.key.layout, site.kv_num_heads).astype(np.float64)
    v = _bhsd(_laid_out(known, site.value), site.value.layout, site.kv_num_heads).astype(np.float64)
    repeat = site.num_heads // site.kv_num_heads
    k, v = np.repeat(k, repeat, axis=1), np.repeat(v, repeat, axis=1)
    scores = np.einsum("bhsd,bhtd->bhst", q, k) * site.scale
    if site.query_factor is not None:
        factor = known[site.query_factor[1]].astype(np.float64)
        scores = scores * factor if site.query_factor[0] == "Mul" else scores / factor
    if site.softcap:
        scores = site.softcap * np.tanh(scores / site.softcap)
    for term in site.terms:
        scores = term.apply(scores, term.spread(known[term.tensor], len(q)))
    tops = scores.max(-1, initial=-np.inf)
    if site.sink is not None:
        logits = np.array(site.sink_values) if site.sink_values else known[site.sink]
        column = logits.astype(np.float64).reshape(1, -1, 1, 1)
        scores = np.concatenate([scores, np.broadcast_to(column, (*scores.shape[:3], 1))], axis=-1)
    with np.errstate(all="ignore"):
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
    weights = weights[..., : k.shape[2]]
    return np.einsum("bhst,bhtd->bhsd", weights, v), tops


def _multiplied(site: AttentionSite, known: Mapping[str, np.ndarray]) -> tuple[AttentionSite, Mapping[str, np.ndarray]]:
    """The site with a query that is multiplied beforehand, where the graph multiplies its scores, as it is emitted."""
    if site.query_factor is None:
        return site, known
    op, factor = site.query_factor
    query = _bhsd(_laid_out(known, site.query), site.query.layout, site.num_heads)
    scaled = query * known[factor] if op == "Mul" else query / known[factor]
    name = f"{site.query.tensor} {op} {factor}"
    return replace(site, query=Operand(name, Layout.BHSD), query_factor=None), {**known, name: scaled}


def _laid_out(known: Mapping[str, np.ndarray], operand: Operand) -> np.ndarray:
    return operand.laid_out(known[operand.tensor])


def _bhsd(array: np.ndarray, layout: Layout, heads: int) -> np.ndarray:
    if layout is Layout.BSN:
        array = array.reshape(*array.shape[:2], heads, -1)
    return array if layout is Layout.BHSD else array.transpose(0, 2, 1, 3)


def attributes_of(node: onnx.NodeProto) -> dict[str, int | float | str | list[int]]:
    found: dict[str, int | float | str | list[int]] = {}
    for attribute in node.attribute:
        value = helper.get_attribute_value(attribute)
        found[attribute.name] = value.decode() if isinstance(value, bytes) else value
    return found


def rounded(array: np.ndarray, dtype: int) -> np.ndarray:
    """In the site's type, where the model ran widened."""
    if dtype not in HALF or array.dtype != np.float32:
        return array
    return array.astype(helper.tensor_dtype_to_np_dtype(dtype))


def _budget_ulp(array: np.ndarray) -> float:
    finite = np.abs(array[np.isfinite(array)].astype(np.float64))
    return 4 * _EPSILON.get(array.dtype.name, 1.2e-7) * float(finite.max(initial=0.0))
