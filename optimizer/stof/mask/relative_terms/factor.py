# SPDX-License-Identifier: Apache-2.0
"""Biases that are a table by distance times a number of each query: gated positions, as WavLM has them."""

from __future__ import annotations

from dataclasses import replace

from stof.graph.index import is_standard
from stof.mask.check.checker import MaskChecker
from stof.mask.relative_bias.lift import with_relative_bias
from stof.mask.site import AttentionSite, BiasFactor, LiftedMask, MaskNote, MaskTerm, NoteReason, TermKind
from stof.symbolic import Symbolic
from stof.symbolic.axis_atoms import ONE

_MOST_NODES = 8  # between the product and the term


def with_factor(checker: MaskChecker, site: AttentionSite, mask: LiftedMask) -> LiftedMask:
    """The mask with one of its biases as a table by distance and a factor of rows; the same mask where none is such a product."""
    if mask.relative is not None or site.softcap or site.floored:
        return mask
    for term in mask.bias:
        product = _read_product(checker, site, term)
        if product is None:
            continue
        factor, table_term = product
        others = tuple(t for t in mask.bias if t != term)
        table_site = replace(site, terms=tuple(table_term if t == term else t for t in site.terms))
        table_mask = replace(mask, bias=(table_term,), by_data=())
        lifted = with_relative_bias(checker, table_site, table_mask, heads_are_merged=factor.is_merged)
        if lifted.relative is None or lifted.bias:
            continue
        notes = [n for n in mask.notes if n.reason is not NoteReason.STAYS_BIAS or n.tensor != term.tensor]
        if not others:
            notes = [n for n in notes if n.reason is not NoteReason.BIAS_MAY_FORBID]
        text = f"{term.tensor} becomes a table of {lifted.relative.size} distances times {factor.tensor}"
        notes.append(MaskNote(NoteReason.RELATIVE_TERM, text, term.tensor))
        return replace(mask, bias=others, relative=lifted.relative, relative_factor=factor, notes=tuple(notes))
    return mask


def _read_product(checker: MaskChecker, site: AttentionSite, term: MaskTerm) -> tuple[BiasFactor, MaskTerm] | None:
    """The factor of each row, and the rest as a term of its own."""
    symbolic = checker.symbolic
    shape = symbolic.shape(term.tensor)
    if term.kind is not TermKind.ADD or shape is None:
        return None
    is_merged = _is_merged(site, term)
    if is_merged is None:
        return None
    tensor, scale = term.tensor, term.scale
    for _ in range(_MOST_NODES):
        node = checker.index.producer(tensor)
        if node is None or not is_standard(node) or not node.input or symbolic.shape(tensor) != shape:
            return None
        if node.op_type in ("Reshape", "Identity"):
            tensor = node.input[0]
            continue
        if node.op_type != "Mul":
            return None
        numbers = [symbolic.uniform(n) for n in node.input]
        if numbers[0] is None and numbers[1] is None:
            return _split(symbolic, term, (node.input[0], node.input[1]), scale, is_merged)
        number, rest = (numbers[1], node.input[0]) if numbers[1] is not None else (numbers[0], node.input[1])
        assert number is not None
        tensor, scale = rest, scale * number
    return None


def _split(
    symbolic: Symbolic, term: MaskTerm, factors: tuple[str, str], scale: float, is_merged: bool
) -> tuple[BiasFactor, MaskTerm] | None:
    """The two factors of a product as the factor of rows, which has one number for all keys, and the table's term."""
    whole = symbolic.shape(term.tensor)
    for rows, table in (factors, factors[::-1]):
        shape = symbolic.shape(rows)
        value = symbolic.value(table)
        if shape is None or whole is None or value is None or symbolic.shape(table) != whole:
            continue
        if len(shape) == len(whole) and shape[-1] == ONE and shape[:-1] == whole[:-1]:
            return BiasFactor(rows, is_merged, term), replace(term, tensor=table, scale=scale)
    return None


def _is_merged(site: AttentionSite, term: MaskTerm) -> bool | None:
    """Whether a term's axes are [B * H, S, T]; False for [B, H, S, T], None for others."""
    if term.view is None:
        return False
    axes = [[(a.axis, a.size) for a in group] for group in term.view.axes]
    B, H, S, T = site.dims
    return True if axes == [[(0, B), (1, H)], [(2, S)], [(3, T)]] and all(term.view.varies) else None
