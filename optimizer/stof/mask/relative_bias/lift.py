# SPDX-License-Identifier: Apache-2.0
"""Biases that depend on the distance of key and query alone, as T5 has them: a table [H, L] instead of [H, S, T].

The bias tensors of a site are run at one size and read by distance wherever the mask allows a pair. Exporters compute
buckets with logarithms, of which no closed form is sought; beyond some distance the table has to stay constant, since no
run shows what it does farther out. The check by execution then compares it at the sizes and paddings of the mask's own.
"""

from __future__ import annotations

import ast
from dataclasses import replace

import numpy as np

from stof.errors import UnsupportedError
from stof.execution.inputs import Case, Padding
from stof.mask.check.checker import MaskChecker
from stof.mask.relative_bias.distance_table import by_distance, shorten
from stof.mask.relative_bias.proof import proven_radius
from stof.site import AttentionSite, LiftedMask, RelativeBias

_LEAST, _MOST = 300, 1300  # lengths at which a bias is run
_BEYOND = 2  # entries kept beyond the proven radius, whose place float rounding may move


def with_relative_bias(checker: MaskChecker, site: AttentionSite, mask: LiftedMask) -> LiftedMask:
    """The mask with those of its biases that are functions of h and k - q as a table; the same mask if there are none."""
    key = (mask, site.dims, site.query_offset)  # layers share their bias
    if key not in checker.relatives:
        checker.relatives[key] = _with_relative_bias(checker, site, mask)
    return checker.relatives[key]


def _with_relative_bias(checker: MaskChecker, site: AttentionSite, mask: LiftedMask) -> LiftedMask:
    radii = {t: proven_radius(checker.symbolic, site, t) for t in mask.bias if t not in mask.by_data}
    terms = tuple(t for t, radius in radii.items() if radius is not None)
    if not terms:
        return mask
    radius = max(r for r in radii.values() if r is not None) + _BEYOND
    # Without padding, but with what else is known at run time left to the bias: a distance that one run forbids is not read.
    pads = tuple(o for o in mask.operands if o.role == "pad")
    widest = replace(mask, expression=static_part(mask.expression), operands=pads)
    fixed = all(d.constant is not None for d in site.dims[2:])
    length = max(_LEAST, radius + 40)
    if length > _MOST and not fixed:
        return mask
    try:
        added, allowed, past = checker.added(site, widest, terms, Case(1, length, Padding.NONE))
    except UnsupportedError:
        return mask
    table = by_distance(added, allowed, past)
    if table is None or not np.isfinite(table[~np.isnan(table)]).all():
        return mask
    kept = shorten(table, fixed)
    if kept is None or (not fixed and kept.shape[1] // 2 > radius):
        return mask
    bias = RelativeBias(terms, kept.shape[0], kept.shape[1], kept.astype(np.float32).tobytes())
    names = ", ".join(dict.fromkeys(t.tensor for t in terms))
    notes = tuple(n for n in mask.notes if not any(n.startswith(f"{t.tensor} stays") for t in terms))
    note = f"{names} becomes a table of {kept.shape[1]} distances"
    left = tuple(t for t in mask.bias if t not in terms)
    found = replace(mask, bias=left, relative=bias, notes=(*notes, note))
    try:
        checker.check(site, found)
    except UnsupportedError:  # no such function at other sizes, or a mask that is none: as it was before
        return mask
    return found


def static_part(expression: str) -> str:
    """An expression that allows whatever the given one may allow for some padding, segments or lengths."""
    return ast.unparse(_Static().visit(ast.parse(expression or "True", mode="eval")))


class _Static(ast.NodeTransformer):
    """Conditions that read what is known at run time alone become True; printed masks negate nothing larger."""

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        return ast.Constant(True) if _reads(node) else node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        return ast.Constant(True) if _reads(node) else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        return ast.Constant(True) if _reads(node) else node


def _reads(node: ast.expr) -> bool:
    names = {n.value.id for n in ast.walk(node) if isinstance(n, ast.Subscript) and isinstance(n.value, ast.Name)}
    return any(n == "pad" or n == "lengths" or n.startswith("segment") for n in names)
