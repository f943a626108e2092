# SPDX-License-Identifier: Apache-2.0
"""Queries and keys of a site as sums, to which the factors of its additive terms are compared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stof.mask.from_condition import B, H, K, Q
from stof.mask.relative_terms.linear import ONE, Sum, is_same, linear_sum, ratio
from stof.mask.site import AttentionSite, Layout, Operand
from stof.symbolic import Int, Symbolic, integer, var
from stof.symbolic.algebra.divisions import floor_div
from stof.symbolic.algebra.domain import Domain
from stof.symbolic.algebra.terms import Real
from stof.symbolic.tensor import Index
from stof.symbolic.trace import Trace, simplify_real, variables_of

D = var("d")
_LARGEST_SHIFT = 1 << 22  # elements that are evaluated one by one


@dataclass(frozen=True)
class Match:
    """A vector is ``factor`` times an operand's of the site, plus ``shift`` [heads, D] where that is no None."""

    factor: float
    shift: np.ndarray | None


@dataclass(frozen=True)
class HeadVectors:
    """The vectors of a site's queries, or keys: the sum that element (b, h, position, d) is."""

    elements: Sum

    def match(self, symbolic: Symbolic, site: AttentionSite, other: Sum) -> Match | None:
        """How vectors are made of these; None where they are others."""
        own, others = (_without_constants(s) for s in (self.elements, other))
        factor = ratio(others, own)
        if factor is None:
            return None
        rest: dict[Real, float] = dict(other)
        for term, number in self.elements.items():
            difference = rest.get(term, 0.0) - factor * number
            rest[term] = 0.0 if is_same(rest.get(term, 0.0), factor * number) else difference
        added = {term: number for term, number in rest.items() if number and term not in others}
        if not added:
            return Match(factor, None)
        shift = _evaluate_constants(symbolic, site, added)
        return None if shift is None else Match(factor, shift if shift.any() else None)


def read_vectors(trace: Trace, domain: Domain, site: AttentionSite, operand: Operand) -> HeadVectors | None:
    """The queries or keys of a site; None where their tensor has unusual axes."""
    index = _element_index(trace.symbolic, site, operand)
    value = None if index is None else trace.element(operand.tensor, index)
    return None if value is None else HeadVectors(linear_sum(simplify_real(domain, value)))


def _element_index(symbolic: Symbolic, site: AttentionSite, operand: Operand) -> Index | None:
    """The index of element d of a head's vector at a position."""
    if operand.joined or operand.grouped:
        return None
    is_query = operand == site.query
    past = site.dims[3] - site.dims[2] if site.query_offset else integer(0)
    position = Q - past if is_query else K
    group = site.num_heads // site.kv_num_heads
    head = integer(0) if site.num_heads == 1 else H if is_query or group == 1 else floor_div(H, group)
    index: tuple[Int, ...] = {
        Layout.BHSD: (B, head, position, D),
        Layout.BSHD: (B, position, head, D),
        Layout.BSN: (B, position, head * integer(site.head_size) + D),
    }[operand.layout]
    shape = symbolic.shape(operand.tensor)
    if shape is None or len(shape) != len(index):
        return None
    moved = list(index)
    for axis, source in enumerate(operand.perm):
        moved[source] = index[axis]
    zero, one = integer(0), integer(1)
    return tuple(zero if size == one else i for i, size in zip(moved, shape, strict=True))


def _without_constants(total: Sum) -> dict[Real, float]:
    return {t: f for t, f in total.items() if not _is_constant(t)}


def _is_constant(term: Real) -> bool:
    """Whether a term is a stored number for each head and d."""
    if term == ONE:
        return True
    indices = term.args[1] if term.kind == "table" else None
    return isinstance(indices, tuple) and variables_of(indices) <= {"h", "d"}


def _evaluate_constants(symbolic: Symbolic, site: AttentionSite, added: Sum) -> np.ndarray | None:
    """A sum of stored numbers as an array [H or 1, D]."""
    shape = site.num_heads, site.head_size
    if shape[0] * shape[1] > _LARGEST_SHIFT:
        return None
    total = np.zeros(shape)
    heads, columns = np.indices(shape)
    for term, factor in added.items():
        if term == ONE:
            total += factor
            continue
        if not _is_constant(term):
            return None
        name, indices = term.args[:2]
        array = symbolic.constant(str(name))
        assert isinstance(indices, tuple)
        at = [_evaluate(i, heads, columns) for i in indices]
        if array is None or any(a is None for a in at):
            return None
        total += factor * np.asarray(array, np.float64)[tuple(a for a in at if a is not None)]
    return total[:1] if np.array_equal(total, np.broadcast_to(total[:1], shape)) else total


def _evaluate(value: Int, heads: np.ndarray, columns: np.ndarray) -> np.ndarray | None:
    """A linear integer of h and d at all of them."""
    total = np.zeros_like(heads)
    for monomial, coefficient in value.terms:
        product = np.full_like(heads, coefficient)
        for atom in monomial:
            if atom.kind != "var" or atom.args[0] not in ("h", "d"):
                return None
            product = product * (heads if atom.args[0] == "h" else columns)
        total = total + product
    return total
