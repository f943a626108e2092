# SPDX-License-Identifier: Apache-2.0
"""Additive terms of a site that are products of its queries, or keys, with rows by relative position.

DeBERTa, Transformer-XL, Conformer, Shaw's keys and the grids of image encoders add such terms, each spelled in its own way.
What they share shows in the data flow: an element of the term is a sum over d of a query's, or key's, element d and that of a
row which the pair (q, k) names. The operator computes the product where it computes the score, so no tensor [.., S, T] is made.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from stof.errors import UnsupportedError
from stof.mask.check.checker import MaskChecker
from stof.mask.expression import MaskExpression
from stof.mask.from_condition import GraphNames, K, Q
from stof.mask.lift import domain_of, index_of_pair
from stof.mask.relative_bias.proof import constant_beyond
from stof.mask.relative_roles import RELATIVE_QUERY, TABLES_OF_QUERIES
from stof.mask.relative_terms.check import check_rows, run_rows
from stof.mask.relative_terms.contraction import TensorElement, read_contraction
from stof.mask.relative_terms.index import express_row, index_names, tabulate_rows
from stof.mask.relative_terms.linear import linear_sum, reach_of_check
from stof.mask.relative_terms.operands import Match, read_vectors
from stof.mask.relative_terms.products import Product
from stof.mask.relative_terms.table import find_table
from stof.mask.site import (
    AttentionSite,
    LiftedMask,
    MaskNote,
    MaskTerm,
    NoteReason,
    RelativeTable,
    RelativeTerm,
    TermKind,
)
from stof.symbolic import integer, var
from stof.symbolic.algebra.domain import Domain
from stof.symbolic.algebra.terms import Atom, Real, subterms
from stof.symbolic.trace import Trace, replace_atoms_of_real, simplify_real

_SHORTEST, _LONGEST = 300, 1300  # lengths at which a term is run for its rows
_MARGIN = 2  # entries kept beyond the proven radius, which float rounding may move
_COUNTS = {1: "one term", 2: "two terms"}
_BACK, _COLUMN = var("back"), Atom("var", ("k",))


def with_relative_terms(
    checker: MaskChecker, site: AttentionSite, mask: LiftedMask, roles: Collection[str]
) -> LiftedMask:
    """The mask with those of its biases that are products with relative tables as such; the same mask if there are none.

    Args:
        checker: of the model.
        site: the attention.
        mask: of the site.
        roles: of operands that the kernels take.
    """
    if (
        not {*TABLES_OF_QUERIES, RELATIVE_QUERY} & set(roles)
        or site.softcap
        or site.query_factor is not None
        or site.floored
    ):
        return mask
    for term in mask.bias:
        if term.kind is not TermKind.ADD or term in mask.by_data:
            continue
        try:
            mask = _lift_term(checker, site, mask, roles, term)
        except UnsupportedError as error:
            text = f"{term.tensor} is no product with rows by relative position: {error}"
            mask = replace(mask, notes=(*mask.notes, MaskNote(NoteReason.RELATIVE_TERM, text, term.tensor)))
        except _OtherTermError:
            continue
    return mask


def read_products(checker: MaskChecker, site: AttentionSite, mask: LiftedMask, term: MaskTerm) -> list[Product]:
    """The products that a term is the sum of; none where it is another kind of term.

    Raises:
        UnsupportedError: where its rows are no table.
    """
    try:
        return _Lifter(checker, checker.trace, site, mask, TABLES_OF_QUERIES).read_products(term)
    except _OtherTermError:
        return []


def _lift_term(
    checker: MaskChecker, site: AttentionSite, mask: LiftedMask, roles: Collection[str], term: MaskTerm
) -> LiftedMask:
    """The mask with a term's products in the place of the term, by the first trace that shows them."""
    try:
        return _Lifter(checker, checker.trace, site, mask, roles).lift(term)
    except (UnsupportedError, _OtherTermError) as first:
        if not mask.expression.window():  # all pairs lie in the rows that divisions give, or nothing tells which do
            raise
        trace = Trace(checker.symbolic, checker.index, domain_of(site))
        try:
            return _Lifter(checker, trace, site, mask, roles).lift(term)
        except _OtherTermError:
            raise first from None


def without_relative_terms(site: AttentionSite, mask: LiftedMask) -> AttentionSite:
    """The site without the terms that became products or have a factor: they are parts of its scores, as query times key is."""
    products = {t.term for t in mask.relative_terms}
    products |= set() if mask.relative_factor is None else {mask.relative_factor.term}
    if not products:
        return site
    unguarded = None if site.unguarded is None else without_relative_terms(site.unguarded, mask)
    return replace(site, terms=tuple(t for t in site.terms if t not in products), unguarded=unguarded)


class _OtherTermError(Exception):
    """A term that is nothing like a product with a table of rows."""


class _Lifter:
    """Lifts a term of one site."""

    def __init__(
        self, checker: MaskChecker, trace: Trace, site: AttentionSite, mask: LiftedMask, roles: Collection[str]
    ) -> None:
        self.checker, self.trace, self.site, self.mask, self.roles = checker, trace, site, mask, roles
        limits = {**domain_of(site).limits, "d": (integer(0), integer(site.head_size - 1))}
        self.domain = Domain(limits)

    def lift(self, term: MaskTerm) -> LiftedMask:
        """The mask with a term's products in the place of the term.

        Raises:
            UnsupportedError: with what stands against it.
            _OtherTermError: where it is another kind of term.
        """
        products = self.read_products(term)
        names = index_names(self.checker, self.mask)
        indices = [self._express(products, product, names) for product in products]
        tables = names.stored_tables()
        terms = self._assign_roles(products, indices)
        note = "; ".join(f"{t.role} by {t.index}" for t in terms)
        notes = [n for n in self.mask.notes if n.reason is not NoteReason.STAYS_BIAS or n.tensor != term.tensor]
        others = tuple(t for t in self.mask.bias if t != term)
        if not others:
            notes = [n for n in notes if n.reason is not NoteReason.BIAS_MAY_FORBID]
        notes.append(MaskNote(NoteReason.RELATIVE_TERM, f"{term.tensor} becomes {note}", term.tensor))
        lifted = replace(
            self.mask,
            tables=tables,
            bias=others,
            relative_terms=(*self.mask.relative_terms, *terms),
            notes=tuple(notes),
        )
        check_rows(self.checker, self.site, lifted, products, indices)
        return lifted

    def read_products(self, term: MaskTerm) -> list[Product]:
        shape = self.checker.symbolic.shape(term.tensor)
        try:
            value = None if shape is None else self.trace.element(term.tensor, index_of_pair(shape, self.site, term))
        except ValueError:  # it does not broadcast to the scores
            value = None
        addends = {} if value is None else linear_sum(self._simplify(value), reach_of_check(self.site))
        if not addends:
            raise _OtherTermError
        if others := [leaf for leaf in addends if leaf.kind != "element"]:
            if any(self._is_product(part) for leaf in others for part in subterms(leaf)):
                raise UnsupportedError(
                    "queries or keys meet rows in it, but by more than sums and factors that are numbers"
                )
            raise _OtherTermError
        return [self._read_product(term, leaf, factor) for leaf, factor in addends.items()]

    def _is_product(self, part: object) -> bool:
        """Whether a part of a formula is a product of the site's queries, or keys."""
        contraction = None
        if isinstance(part, Real) and part.kind == "element":
            contraction = read_contraction(self.trace, part, "d")
        if contraction is None:
            return False
        return any(self._match(vectors, is_query) for vectors, _ in contraction.orders for is_query in (True, False))

    def _simplify(self, value: Real) -> Real:
        """A term's element for pairs that the mask allows."""
        window = self.mask.expression.window()
        if window is None or window[1] != 0 or self.trace.domain is None:
            return simplify_real(self.domain, value)
        back = {_COLUMN: Q - _BACK}  # k <= q: a number of keys back from the query
        domain = Domain({**self.domain.limits, "back": (integer(0), self.domain.limits["q"][1])})
        simpler = simplify_real(domain, replace_atoms_of_real(value, back))
        return simplify_real(self.domain, replace_atoms_of_real(simpler, {Atom("var", ("back",)): Q - K}))

    def _read_product(self, term: MaskTerm, leaf: Real, factor: float) -> Product:
        contraction = read_contraction(self.trace, leaf, "d")
        if contraction is None or contraction.size.constant != self.site.head_size:
            raise _OtherTermError
        for vectors, rows in contraction.orders:
            for is_query in (True, False):
                match = self._match(vectors, is_query)
                if match is None:
                    continue
                table = find_table(self.trace, self.domain, rows)
                if table is None:
                    raise UnsupportedError(f"{rows.tensor} holds no rows that all batches share")
                if inputs := self.checker.runner.inputs_behind(table.tensor):
                    raise UnsupportedError(f"{table.tensor} depends on {', '.join(sorted(inputs))}")
                return Product(term, factor, vectors.tensor, is_query, match, table)
        if any(self._is_part(vectors) for vectors, _ in contraction.orders):
            raise UnsupportedError("it reads queries or keys of the attention under a condition, or the attention does")
        raise _OtherTermError

    def _match(self, vectors: TensorElement, is_query: bool) -> Match | None:
        """How vectors of a contraction are made of the site's queries, or keys."""
        operand = self.site.query if is_query else self.site.key
        own = read_vectors(self.trace, self.domain, self.site, operand)
        value = self._vector(vectors)
        if own is None or value is None:
            return None
        return own.match(self.checker.symbolic, self.site, linear_sum(value))

    def _vector(self, vectors: TensorElement) -> Real | None:
        value = self.trace.element(vectors.tensor, tuple(self.domain.integer(i) for i in vectors.index))
        return None if value is None else simplify_real(self.domain, value)

    def _is_part(self, vectors: TensorElement) -> bool:
        """Whether vectors of a contraction share elements with the site's queries, or keys, one of both being selected."""
        value = self._vector(vectors)
        for operand in (self.site.query, self.site.key):
            own = read_vectors(self.trace, self.domain, self.site, operand)
            if own is None or value is None:
                continue
            sides = [set(subterms(tuple(linear_sum(value)))), set(subterms(tuple(own.elements)))]
            kinds = [{p.kind for p in side if isinstance(p, Real)} for side in sides]
            shared = {p for p in sides[0] & sides[1] if isinstance(p, Real) and p.kind == "element"}
            if shared and any("select" in k for k in kinds):
                return True
        return False

    def _express(self, products: Sequence[Product], product: Product, names: GraphNames) -> MaskExpression:
        """The index of a product's rows."""
        table = product.table
        try:
            return express_row(self.site, self.domain, table.row, table.rows, names)
        except UnsupportedError as error:
            radius = constant_beyond(table.row)
            if radius is None:
                raise error
        length = max(_SHORTEST, radius + _MARGIN + 40)
        if length > _LONGEST:
            raise UnsupportedError(f"its row changes up to a distance of {radius}")
        pads = tuple(o for o in self.mask.operands if o.role == "pad")
        widest = replace(self.mask, expression=self.mask.expression.static_part(), operands=pads)
        run = run_rows(self.checker, self.site, widest, products, product, length)
        return tabulate_rows(run, radius + _MARGIN, names)

    def _assign_roles(self, products: Sequence[Product], indices: Sequence[MaskExpression]) -> list[RelativeTerm]:
        used = [t.role for t in self.mask.relative_terms]
        terms: list[RelativeTerm] = []
        for product, index in zip(products, indices, strict=True):
            roles = TABLES_OF_QUERIES if product.is_query else (RELATIVE_QUERY,)
            role = next((r for r in roles if r not in used), None)
            if role is None:
                raise UnsupportedError(
                    f"more than {_COUNTS[len(roles)]} of {'queries' if product.is_query else 'keys'}"
                )
            if role not in self.roles:
                raise UnsupportedError(f"the plugin library takes no {role}")
            used.append(role)
            terms.append(self._term(role, product, index))
        return terms

    def _term(self, role: str, product: Product, index: MaskExpression) -> RelativeTerm:
        found, match = product.table, product.match
        shift = None if match.shift is None else (match.shift / match.factor).astype(np.float32)
        heads = 1 if found.head_axis is None else self.site.num_heads
        shift_heads = 1 if shift is None else shift.shape[0]
        table = RelativeTable(
            "" if found.data else found.tensor,
            found.head_axis,
            found.row_axis,
            found.column_axis,
            product.factor * product.term.scale * match.factor / self.site.scale,
            b"" if shift is None else shift.tobytes(),
            shift_heads,
            found.data,
            is_padded=found.is_padded,
        )
        return RelativeTerm(role, table, index, max(heads, shift_heads), product.term)
