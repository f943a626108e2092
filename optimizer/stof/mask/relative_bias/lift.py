# SPDX-License-Identifier: Apache-2.0
"""Biases that depend on the distance of key and query alone, as T5 has them: a table [H, L] instead of [H, S, T].

The bias tensors of a site are run at one size and read by distance wherever the mask allows a pair. Exporters compute
buckets with logarithms, of which no closed form is sought. Beyond some distance the table has to stay constant, since no
run shows what it does farther out. The check by execution then compares it at the sizes and paddings of the mask.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from stof.errors import UnsupportedError
from stof.execution.case import Case, Padding
from stof.mask.check.checker import MaskChecker
from stof.mask.relative_bias.distance_table import shorten, tabulate
from stof.mask.relative_bias.proof import proven_radius
from stof.mask.site import AttentionSite, LiftedMask, MaskNote, NoteReason, RelativeBias

_SHORTEST, _LONGEST = 300, 1300  # lengths at which a bias is run
_MARGIN = 2  # entries kept beyond the proven radius, which float rounding may move


def with_relative_bias(
    checker: MaskChecker, site: AttentionSite, mask: LiftedMask, *, heads_are_merged: bool = False
) -> LiftedMask:
    """The mask with those of its biases that are functions of h and k - q as a table; the same mask if there are none.

    ``heads_are_merged``: biases may have batch and heads in one axis.
    """
    key = (mask, site.dims, site.query_offset, heads_are_merged)  # layers share their bias
    if key not in checker.relatives:
        checker.relatives[key] = _make_table(checker, site, mask, heads_are_merged)
    return checker.relatives[key]


def _make_table(checker: MaskChecker, site: AttentionSite, mask: LiftedMask, heads_are_merged: bool) -> LiftedMask:
    biases = [t for t in mask.bias if t not in mask.by_data]
    radii = {t: proven_radius(checker.symbolic, site, t, heads_are_merged=heads_are_merged) for t in biases}
    terms = tuple(t for t, radius in radii.items() if radius is not None)
    if not terms:
        return mask
    radius = max(r for r in radii.values() if r is not None) + _MARGIN
    # Nothing is padded, and run-time operands forbid nothing: the run shows every distance that any run can read.
    pads = tuple(o for o in mask.operands if o.role == "pad")
    widest = replace(mask, expression=mask.expression.static_part(), operands=pads)
    is_fixed = all(d.constant is not None for d in site.dims[2:])
    length = max(_SHORTEST, radius + 40)
    if length > _LONGEST and not is_fixed:
        return mask
    try:
        added, allowed, past = checker.run_bias(site, widest, terms, Case(1, length, Padding.NONE))
    except UnsupportedError:
        return mask
    if not is_fixed and added.shape[-1] < length:  # the graph has no runs of that length
        return mask
    table = tabulate(added, allowed, past)
    if table is None or not np.isfinite(table[~np.isnan(table)]).all():
        return mask
    shortened = shorten(table, is_fixed)
    if shortened is None or (not is_fixed and shortened.shape[1] // 2 > radius):
        return mask
    bias = RelativeBias(terms, shortened.shape[0], shortened.shape[1], shortened.astype(np.float32).tobytes())
    names = ", ".join(dict.fromkeys(t.tensor for t in terms))
    tensors = {t.tensor for t in terms}
    notes = [n for n in mask.notes if n.reason is not NoteReason.STAYS_BIAS or n.tensor not in tensors]
    notes.append(MaskNote(NoteReason.BIAS_TABLE, f"{names} becomes a table of {shortened.shape[1]} distances"))
    others = tuple(t for t in mask.bias if t not in terms)
    table_mask = replace(mask, bias=others, relative=bias, notes=tuple(notes))
    try:
        checker.check(site, table_mask)
    except UnsupportedError:  # no such function at other sizes, or a mask that is none: as it was before
        return mask
    return table_mask
