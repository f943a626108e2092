# SPDX-License-Identifier: Apache-2.0
"""Masks that are added to a bias before both are added to the scores: T5's in the exports of torch's tracer."""

from __future__ import annotations

from dataclasses import replace

from onnx import TensorProto

from stof.errors import UnsupportedError
from stof.graph.index import GraphIndex, is_standard
from stof.mask.lift import lift
from stof.site import AttentionSite, LiftedMask, MaskTerm, TermKind
from stof.symbolic import Symbolic

_MOST = 8


def parted(index: GraphIndex, symbolic: Symbolic, site: AttentionSite) -> AttentionSite:
    """The site with sums among its additive terms taken apart, where more of the mask is found then.

    Not where more terms stay a bias: their sum, which layers may share, would be computed for each of them.
    """
    terms: list[MaskTerm] = []
    pending = list(site.terms)
    while pending and len(terms) + len(pending) <= _MOST:
        term = pending.pop(0)
        addends = _addends(index, symbolic, term)
        pending[:0] = addends
        if not addends:
            terms.append(term)
    if pending or len(terms) == len(site.terms):
        return site
    apart = replace(site, terms=tuple(terms), unguarded=_likewise(site.unguarded, terms))
    whole, found = _lifted(symbolic, site), _lifted(symbolic, apart)
    if found is None or (whole is not None and len(found.bias) > len(whole.bias)):
        return site
    return apart if whole is None or found.expression != whole.expression else site


def _likewise(site: AttentionSite | None, terms: list[MaskTerm]) -> AttentionSite | None:
    return None if site is None else replace(site, terms=tuple(terms))


def _lifted(symbolic: Symbolic, site: AttentionSite) -> LiftedMask | None:
    try:
        return lift(symbolic, site)
    except UnsupportedError:
        return None


def _addends(index: GraphIndex, symbolic: Symbolic, term: MaskTerm) -> list[MaskTerm]:
    """The terms whose sum a term is, each of which broadcasts to the scores as it does; [] when it is none."""
    node = index.producer(term.tensor)
    if term.kind is not TermKind.ADD or term.merged or term.windows or node is None or node.op_type != "Add":
        return []
    if not is_standard(node) or any(symbolic.value(name) is None for name in node.input):
        return []
    if symbolic.dtype(term.tensor) != TensorProto.FLOAT:  # halves overflow in the sum
        return []
    return [replace(term, tensor=name) for name in node.input]
