# SPDX-License-Identifier: Apache-2.0
"""Rows by relative position that the weights of a site are multiplied by, beside its values (Shaw's values)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from stof.errors import UnsupportedError
from stof.mask.check.checker import MaskChecker
from stof.mask.from_condition import B, H, K, Q
from stof.mask.lift import domain_of
from stof.mask.relative_roles import RELATIVE_VALUE, most_value_rows
from stof.mask.relative_terms.check_values import check_values
from stof.mask.relative_terms.contraction import Contraction, TensorElement, read_contraction
from stof.mask.relative_terms.index import express_row, index_names
from stof.mask.relative_terms.linear import linear_sum, reach_of_check
from stof.mask.relative_terms.operands import D
from stof.mask.relative_terms.table import FoundTable, find_table
from stof.mask.site import (
    AddedValues,
    AttentionSite,
    LiftedMask,
    MaskNote,
    MaskTerm,
    NoteReason,
    RelativeTable,
    RelativeTerm,
    TermKind,
)
from stof.symbolic import Int, integer, var
from stof.symbolic.algebra.domain import Domain
from stof.symbolic.algebra.terms import Atom, Real
from stof.symbolic.rules.broadcasting import project
from stof.symbolic.tensor import Index
from stof.symbolic.trace import Trace, replace_atoms, simplify_real, variables_of

_SUMMED = "l"


def with_relative_values(
    checker: MaskChecker, site: AttentionSite, mask: LiftedMask, roles: Collection[str]
) -> LiftedMask:
    """The mask with what a site adds to its result as a relative term; the same mask where it adds nothing.

    Raises:
        UnsupportedError: where that is no product of its weights and rows by relative position.
    """
    added = site.added_values
    if added is None:
        return mask
    if RELATIVE_VALUE not in roles:
        raise UnsupportedError(
            f"the attention weights give {added.tensor!r}, too, and the kernels of this target take no {RELATIVE_VALUE}"
        )
    try:
        return _Values(checker, site, mask, added).lift()
    except UnsupportedError as error:
        raise UnsupportedError(
            f"the attention weights give {added.tensor!r}, too, which is no product with rows by relative position: {error}"
        ) from error


class _Values:
    """What one site adds to its result."""

    def __init__(self, checker: MaskChecker, site: AttentionSite, mask: LiftedMask, added: AddedValues) -> None:
        self.checker, self.site, self.mask, self.added = checker, site, mask, added
        limits = {**domain_of(site).limits, "d": (integer(0), integer(site.value_head_size - 1))}
        self.domain = Domain(limits)
        leaves = frozenset({added.weights})
        self.trace = Trace(checker.symbolic, checker.index, Domain(limits), leaves)

    def lift(self) -> LiftedMask:
        """The mask with the relative term.

        Raises:
            UnsupportedError: where there is none.
        """
        factor, contraction = self._read_sum()
        found, weight = self._read_sides(contraction)
        if inputs := self.checker.runner.inputs_behind(found.tensor):
            raise UnsupportedError(f"{found.tensor} depends on {', '.join(sorted(inputs))}")
        most = most_value_rows()  # kernels keep a sum of weights for each
        if found.data or found.rows.constant is None or found.rows.constant > most:
            raise UnsupportedError(f"{found.tensor} has more than {most} rows, or as many as inputs are long")
        names = index_names(self.checker, self.mask)
        index = express_row(self.site, self.domain, found.row, found.rows, names)
        tables = names.stored_tables()
        check_values(self.checker, self.site, replace(self.mask, tables=tables), found, index, factor * weight)
        table = RelativeTable(
            found.tensor, found.head_axis, found.row_axis, found.column_axis, factor * weight,
            is_padded=found.is_padded,
        )  # fmt: skip
        heads = 1 if found.head_axis is None else self.site.num_heads
        term = RelativeTerm(RELATIVE_VALUE, table, index, heads, MaskTerm(TermKind.ADD, self.added.tensor))
        text = f"{self.added.tensor} becomes {RELATIVE_VALUE} by {index}"
        return replace(
            self.mask,
            tables=tables,
            relative_terms=(*self.mask.relative_terms, term),
            notes=(*self.mask.notes, MaskNote(NoteReason.RELATIVE_TERM, text, self.added.tensor)),
        )

    def _element_index(self, tensor: str, last: Int) -> Index:
        """The index of a head's query in a tensor [B, H, S, ..] or [B * H, S, ..]."""
        shape = self.checker.symbolic.shape(tensor)
        batch, heads, queries, keys = self.site.dims
        position = Q - (keys - queries if self.site.query_offset else integer(0))
        if shape is not None and len(shape) == 4 and shape[1:3] == (heads, queries):
            return project((B, H, position, last), shape)
        if shape is not None and len(shape) == 3 and shape[:2] == (batch * heads, queries):
            return project((B * heads + H, position, last), shape)
        raise UnsupportedError(f"{tensor} has other axes than batch, heads and queries")

    def _read_sum(self) -> tuple[float, Contraction]:
        """The factor and the contraction of which the added tensor is made."""
        value = self.trace.element(self.added.tensor, self._element_index(self.added.tensor, D))
        addends = {} if value is None else linear_sum(simplify_real(self.domain, value), reach_of_check(self.site))
        leaf, factor = next(iter(addends.items()), (None, 0.0))
        if leaf is None or len(addends) > 1 or leaf.kind != "element":
            raise UnsupportedError("it is no product of two tensors")
        contraction = read_contraction(self.trace, leaf, _SUMMED)
        if contraction is None:
            raise UnsupportedError("it is no product of two tensors")
        return factor, contraction

    def _read_sides(self, contraction: Contraction) -> tuple[FoundTable, float]:
        """The rows that the weight of a pair is multiplied by, and a factor of the weights."""
        summed = Domain({**self.domain.limits, _SUMMED: (integer(0), contraction.size - integer(1))})
        for weights, rows in contraction.orders:
            value = self.trace.element(weights.tensor, tuple(summed.integer(i) for i in weights.index))
            addends = {} if value is None else linear_sum(simplify_real(summed, value), reach_of_check(self.site))
            leaf, factor = next(iter(addends.items()), (None, 0.0))
            key = None if leaf is None or len(addends) > 1 else self._key_of(leaf)
            if key is None:
                continue
            inverse = {Atom("var", (_SUMMED,)): K - (key - var(_SUMMED))}
            element = TensorElement(rows.tensor, tuple(replace_atoms(i, inverse) for i in rows.index))
            found = find_table(self.trace, self.domain, element)
            if found is None:
                raise UnsupportedError(f"{rows.tensor} holds no rows that all batches share")
            return found, factor
        raise UnsupportedError("neither factor is the weights, moved")

    def _key_of(self, leaf: Real) -> Int | None:
        """The key whose weight an element of the moved weights is: ``l`` and a number of the query; None for another one."""
        if leaf.kind != "element" or leaf.args[0] != self.added.weights:
            return None
        index = leaf.args[1]
        assert isinstance(index, tuple)
        *others, key = (self.domain.integer(i) for i in index)
        wanted = [self.domain.integer(i) for i in self._element_index(self.added.weights, K)[:-1]]
        if others != wanted or variables_of(key - var(_SUMMED)) - {"q"}:
            return None
        return key
