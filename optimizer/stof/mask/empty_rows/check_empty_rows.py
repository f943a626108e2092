# SPDX-License-Identifier: Apache-2.0
"""The values that fully masked rows get in the graph, found by running its masks.

Where masks are added, a key that one of them forbids scores higher than a key that both forbid. A fully masked row attends to
the keys of the highest score. The op has four policies (docs/reference/operators.md); a graph that has another is left alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from stof.errors import UnsupportedError
from stof.execution.case import Case, Counts, Padding
from stof.mask.check.checker import MaskChecker
from stof.mask.check.sizes import cases_of_counts, cases_of_cross_attention, choose_lengths
from stof.mask.evaluate import evaluate_term
from stof.mask.lift import lift, read_term
from stof.mask.site import AttentionSite, EmptyRows, LiftedMask, MaskTerm, NoteReason
from stof.mask.strength import UNDERFLOW
from stof.symbolic import Symbolic

_SCORE = 32.0  # the largest score that -1e9 absorbs
_SPREAD = 3.0  # of drawn scores
_TOLERANCE = 1e-2  # of weights: scores beside -10000 have three digits


def check_empty_rows(checker: MaskChecker, site: AttentionSite, mask: LiftedMask) -> None:
    """Compares fully masked rows of graph and op, where several masks forbid.

    Raises:
        UnsupportedError: when a padded input shows a row of another policy.
    """
    # One mask alone gives equal scores; a guard gives zeros whatever the scores are.
    forbidding = [t for t in site.terms if t not in mask.bias or _forbids(checker.symbolic, site, t)]
    reasons = (NoteReason.DIFFERENT_STRENGTHS, NoteReason.WEAKER_MASKS)
    differs = any(n.reason in reasons for n in mask.notes)  # within one tensor, too
    if not differs and len(forbidding) < 2:
        return
    if not differs and _are_infinite(checker.symbolic, site) and mask.empty_rows in (EmptyRows.ZERO, EmptyRows.NAN):
        return
    guarded = site.zeroed or site.row_guard is not None or site.pair_guard is not None
    if mask.expression.allows_all or guarded or site.sink is not None:
        return
    key = checker.key(site, mask)
    if key in checker.checked_rows:
        return
    # What is computed from activations is no larger than scores are.
    evaluable_terms = tuple(t for t in site.terms if checker.symbolic.value(t.tensor) is not None)
    drawn = _lift_biases(checker.symbolic, site, mask)
    for seed, case in enumerate(_cases(site, mask, is_padded=bool(drawn.operands))):
        try:
            values, allowed = checker.run_terms(site, mask, evaluable_terms, case, seed, drawn)
        except UnsupportedError:
            if case.other or case.counts is not Counts.USUAL:  # no valid pair of lengths, or number of keys
                continue
            raise
        if mask.weaker is not None:
            _check_weaker(checker, site, mask, evaluable_terms, values, allowed, (case, seed, drawn))
            continue
        low, high = (_apply_masks(evaluable_terms, values, allowed.shape, score) for score in (0.0, _SCORE))
        if site.floored:
            low, high = (np.maximum(x, np.finfo(np.float32).min) for x in (low, high))
        empty = ~allowed.any(axis=-1)
        for row, other in zip(low[empty], high[empty], strict=True):
            policy = _policy_of(row, other, site.nan_guard)
            if policy is not mask.empty_rows:
                words = "another mixture of values" if policy is None else repr(policy.value)
                raise UnsupportedError(
                    f"a query without any key gives {words} in the graph, where masks of different strength are added, and "
                    f"{mask.empty_rows.value!r} in the operator; --empty-rows ignore accepts that"
                )
        if not _gives_same_weights(checker.symbolic, site, mask, evaluable_terms, values, allowed):
            raise UnsupportedError(
                "a query without any key gives another mixture of values in the graph, where masks of different strength are "
                "added, than a bias gives in the operator; --empty-rows ignore accepts that"
            )
    checker.checked_rows.add(key)


def _cases(site: AttentionSite, mask: LiftedMask, *, is_padded: bool) -> list[Case]:
    """The inputs that may have fully masked rows."""
    most = choose_lengths(mask.expression.literals)[-1]
    cases = [Case(3, most, Padding.LEFT), Case(3, most, Padding.RIGHT), Case(3, 7, Padding.LEFT)]
    cases += cases_of_cross_attention(site, most)
    # Rows of two scores can be rare: many paddings of short inputs, some of which leave a block or a band without a key.
    # Without padding it is the length, and that of the past, that can leave a row without a key.
    if is_padded:
        cases += [Case(12, n, side) for n in (7, 12, 17, 26) for side in (Padding.LEFT, Padding.RIGHT)]
    else:
        cases += [Case(1, n, Padding.NONE, other) for n in range(1, 33) for other in _queries(site)]
    return cases + cases_of_counts(mask, 4, (7, 12, 17))


def _check_weaker(
    checker: MaskChecker,
    site: AttentionSite,
    mask: LiftedMask,
    terms: tuple[MaskTerm, ...],
    values: list[np.ndarray],
    allowed: np.ndarray,
    drawn: tuple[Case, int, LiftedMask],
) -> None:
    """Compares the weights of fully masked rows with those that the weaker masks give.

    Raises:
        UnsupportedError: when they differ.
    """
    assert mask.weaker is not None
    case, seed, drawn_for = drawn
    rows = np.logical_not(allowed.any(axis=-1))
    attended = np.zeros_like(allowed)
    for expression in mask.weaker.expressions:
        weaker = replace(mask, expression=expression)
        _, pairs = checker.run_terms(site, weaker, terms, case, seed, drawn_for)
        attended |= pairs & np.expand_dims(rows & ~attended.any(axis=-1), -1)
    scores = np.random.default_rng(0).normal(0, _SPREAD, allowed.shape).astype(np.float32)
    weaker_scores = scores if mask.weaker.keeps_scores else np.zeros_like(scores)
    with np.errstate(over="ignore"):
        for term, value in zip(terms, values, strict=True):
            scores = term.apply(scores, value)
            weaker_scores = (
                term.apply(weaker_scores, value) if mask.weaker.keeps_scores and term in mask.bias else weaker_scores
            )
    if site.floored:
        scores = np.maximum(scores, np.finfo(np.float32).min)
    weights, wanted = _softmax(scores[rows]), _softmax(np.where(attended, weaker_scores, np.float32(-np.inf))[rows])
    if not np.allclose(weights, wanted, atol=_TOLERANCE, equal_nan=True):
        raise UnsupportedError(
            "a query without any key gives another mixture of values in the graph than the weaker masks give; --empty-rows "
            "ignore accepts that"
        )


def _lift_biases(symbolic: Symbolic, site: AttentionSite, mask: LiftedMask) -> LiftedMask:
    """The mask with what its biases forbid, where an expression has it: it says which inputs are padding."""
    if not mask.bias:
        return mask
    try:
        return lift(symbolic, site)
    except UnsupportedError:
        return mask


def _gives_same_weights(
    symbolic: Symbolic,
    site: AttentionSite,
    mask: LiftedMask,
    terms: tuple[MaskTerm, ...],
    values: list[np.ndarray],
    allowed: np.ndarray,
) -> bool:
    """Whether rows all of whose allowed keys a bias forbids have the graph's weights where that bias is added to scores.

    The operator gives the keys that its expression forbids no weight. In the graph these may be as high as the others.
    """
    biases = [(t, v) for t, v in zip(terms, values, strict=True) if t in mask.bias and _forbids(symbolic, site, t)]
    remaining_pairs = allowed
    for term, value in biases:
        remaining_pairs = remaining_pairs & evaluate_term(term, value, symbolic.dtype(term.tensor))
    rows = allowed.any(axis=-1) & ~remaining_pairs.any(axis=-1)
    if not rows.any():
        return True
    scores = np.random.default_rng(0).normal(0, _SPREAD, allowed.shape).astype(np.float32)
    operator_scores = scores
    with np.errstate(over="ignore"):
        for term, value in zip(terms, values, strict=True):
            scores = term.apply(scores, value)
            operator_scores = term.apply(operator_scores, value) if term in mask.bias else operator_scores
    if site.floored:
        scores, operator_scores = (np.maximum(x, np.finfo(np.float32).min) for x in (scores, operator_scores))
    operator_scores = np.where(allowed, operator_scores, np.float32(-np.inf))
    return np.allclose(_softmax(scores[rows]), _softmax(operator_scores[rows]), atol=_TOLERANCE, equal_nan=True)


def _softmax(rows: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        exponentials = np.exp(rows - rows.max(axis=-1, keepdims=True))
    weights: np.ndarray = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return weights


def _forbids(symbolic: Symbolic, site: AttentionSite, term: MaskTerm) -> bool:
    """Whether a term that stays a bias forbids: it may tell keys apart that another mask forbids, too."""
    try:
        return bool(read_term(symbolic, site, term, {}).fills)
    except UnsupportedError:
        return False


def _are_infinite(symbolic: Symbolic, site: AttentionSite) -> bool:
    """Whether all masks are known and forbid by -inf alone, so that nothing tells forbidden keys apart."""
    try:
        return all(np.isneginf(read_term(symbolic, site, t, {}).fills).all() for t in site.terms)
    except UnsupportedError:
        return False


def _queries(site: AttentionSite) -> list[tuple[tuple[str, int], ...]]:
    """Numbers of queries to try beside that of a case: few, where they are not the keys."""
    atom = site.dims[2].atom
    if atom is None or atom.kind != "size" or site.dims[2] == site.dims[3]:
        return [()]
    return [(), *(((str(atom.args[0]), n),) for n in (1, 2, 7))]


def _apply_masks(
    terms: tuple[MaskTerm, ...], values: list[np.ndarray], shape: tuple[int, ...], score: float
) -> np.ndarray:
    """Scores that are all equal, after all masks: fp32 [B, H, S, T]."""
    scores = np.full(shape, score, np.float32)
    with np.errstate(over="ignore"):
        for term, value in zip(terms, values, strict=True):
            scores = term.apply(scores, value)
    return scores


def _policy_of(row: np.ndarray, other: np.ndarray, nan_guard: bool) -> EmptyRows | None:
    """The policy that a row of masked scores shows, None for none; ``other`` is the same row of larger scores."""
    top = row.max()
    if np.isneginf(top):
        return EmptyRows.ZERO if nan_guard else EmptyRows.NAN
    vanishing = row == other  # the mask absorbs or replaces the score
    if vanishing[row == top].all():
        return EmptyRows.MEAN if bool(np.all(row == top)) else None
    # Scores keep their differences; ordinary biases among the masks only add to them.
    return EmptyRows.ALL if not vanishing.any() and float(top - row.min()) < -UNDERFLOW else None
