# SPDX-License-Identifier: Apache-2.0
"""Splits a tensor that is the sum of a mask and a bias, so that the mask can be lifted alone.

Exporters often add position biases and the caller's mask to the model's own mask once, for all layers. What is known of the
mask is not known of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnx import TensorProto

from stof.errors import UnsupportedError
from stof.graph.index import GraphIndex, is_standard
from stof.mask.lift import lift
from stof.mask.site import FORBIDDING_VALUE, AttentionSite, LiftedMask, MaskTerm, TermKind
from stof.mask.strength import ABSORBING
from stof.symbolic import Symbolic, var
from stof.symbolic.algebra.piecewise import split_cases
from stof.symbolic.algebra.terms import to_real

_MAX_DEPTH = 4
_MAX_TERMS = 8


def split_term(index: GraphIndex, symbolic: Symbolic, term: MaskTerm, depth: int = 0) -> tuple[MaskTerm, ...]:
    """The addends of an additive term of scores [B, H, S, T], where exactly one side of the sum is a mask; else the term."""
    if depth == _MAX_DEPTH:
        return (term,)
    addends = _addends(index, term)
    shapes = [symbolic.shape(name) for name in addends]
    most = 4 if term.view is None else len(term.view.axes)
    if not addends or any(s is None or len(s) > most for s in shapes):
        return (term,)
    if _is_mask(symbolic, addends[0], term.scale) == _is_mask(symbolic, addends[1], term.scale):
        return (term,)
    terms = [with_tensor(symbolic, term, name) for name in addends]
    return tuple(t for addend in terms for t in split_term(index, symbolic, addend, depth + 1))


def split_terms(index: GraphIndex, symbolic: Symbolic, site: AttentionSite) -> AttentionSite:
    """The site with its additive sums split, where more of its mask can be lifted then (T5 exported by torch's tracer).

    The site itself where splitting would leave more terms as biases: layers may share the sum, and it would be computed
    again for each of them.
    """
    terms: list[MaskTerm] = []
    pending = list(site.terms)
    while pending and len(terms) + len(pending) <= _MAX_TERMS:
        term = pending.pop(0)
        addends = _fp32_addends(index, symbolic, term)
        pending[:0] = addends
        if not addends:
            terms.append(term)
    if pending or len(terms) == len(site.terms):
        return site
    unguarded = None if site.unguarded is None else replace(site.unguarded, terms=tuple(terms))
    split = replace(site, terms=tuple(terms), unguarded=unguarded)
    before, after = _lift(symbolic, site), _lift(symbolic, split)
    if after is None or (before is not None and len(after.bias) > len(before.bias)):
        return site
    return split if before is None or after.expression != before.expression else site


def split_filled_terms(
    index: GraphIndex, symbolic: Symbolic, site: AttentionSite, biases: Sequence[MaskTerm]
) -> AttentionSite:
    """The site with each of ``biases`` that is ``Where(c, fill, x)`` as x that is added, and scores that c drops.

    The fill is so low that no score shows beside it.
    """
    terms: list[MaskTerm] = []
    for term in site.terms:
        terms += (_split_filled(index, symbolic, term) if term in biases else []) or [term]
    unguarded = None if site.unguarded is None else split_filled_terms(index, symbolic, site.unguarded, biases)
    return replace(site, terms=tuple(terms), unguarded=unguarded) if len(terms) > len(site.terms) else site


def _split_filled(index: GraphIndex, symbolic: Symbolic, term: MaskTerm) -> list[MaskTerm]:
    node = index.producer(term.tensor)
    if term.kind is not TermKind.ADD or node is None or node.op_type != "Where" or not is_standard(node):
        return []
    condition, *values = node.input
    for kind, filled, kept in ((TermKind.DROP, *values), (TermKind.KEEP, *values[::-1])):
        fill = symbolic.uniform(filled)
        shapes = [symbolic.shape(n) for n in (condition, kept)]
        if fill is None or fill * term.scale > ABSORBING or symbolic.shape(kept) != symbolic.shape(term.tensor):
            continue
        if symbolic.uniform(kept) is not None or any(s is None for s in shapes):
            continue
        mask = with_tensor(symbolic, replace(term, kind=kind, fill=fill * term.scale, scale=1.0), condition)
        return [with_tensor(symbolic, term, kept), mask]
    return []


def with_tensor(symbolic: Symbolic, term: MaskTerm, tensor: str) -> MaskTerm:
    """The term of another tensor that meets the scores in the same axes."""
    view, shape = term.view, symbolic.shape(tensor)
    return replace(term, tensor=tensor, view=view if view is None or shape is None else view.of_tensor(shape))


def _addends(index: GraphIndex, term: MaskTerm) -> list[str]:
    """The two tensors whose sum an additive term is; [] where it is no sum."""
    node = index.producer(term.tensor)
    if term.kind is not TermKind.ADD:
        return []
    return list(node.input) if node is not None and node.op_type == "Add" and is_standard(node) else []


def _fp32_addends(index: GraphIndex, symbolic: Symbolic, term: MaskTerm) -> list[MaskTerm]:
    """The terms of an fp32 sum of two tensors with symbolic values: a sum in fp16 may overflow."""
    addends = _addends(index, term)
    if symbolic.dtype(term.tensor) != TensorProto.FLOAT or any(symbolic.value(name) is None for name in addends):
        return []
    return [with_tensor(symbolic, term, name) for name in addends]


def _is_mask(symbolic: Symbolic, tensor: str, scale: float) -> bool:
    """Whether every element is a number that is known under some condition, and some forbid."""
    value = symbolic.value(tensor)
    if value is None or value.kind != "f":
        return False
    element = to_real(value.at(tuple(var(f"any{i}") for i in range(value.rank))))
    numbers = [x for _, x in split_cases(element) if isinstance(x, float)]
    return len(numbers) == len(split_cases(element)) and any(x * scale <= FORBIDDING_VALUE for x in numbers)


def _lift(symbolic: Symbolic, site: AttentionSite) -> LiftedMask | None:
    try:
        return lift(symbolic, site)
    except UnsupportedError:
        return None
