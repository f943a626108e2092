# SPDX-License-Identifier: Apache-2.0
"""What a query without an allowed key gives in the graph, found by running its masks.

A mask that is added to another has levels: a key that one of them forbids still stands above a key that both forbid, and a
row in which every key is forbidden attends to the highest. The op knows four answers (docs/reference/operators.md); a graph
that has another is left alone.
"""

from __future__ import annotations

import numpy as np

from stof.errors import UnsupportedError
from stof.execution.inputs import Case, Counts, Padding
from stof.mask.check.checker import MaskChecker
from stof.mask.check.sizes import counted, lengths, uneven
from stof.mask.lift import UNDERFLOW, read_term
from stof.site import AttentionSite, EmptyRows, LiftedMask, MaskTerm
from stof.symbolic import Symbolic

_SCORE = 32.0  # as large as scores may be and vanish


def check_rows(checker: MaskChecker, site: AttentionSite, mask: LiftedMask) -> None:
    """Compares what rows without a key give with what the op gives, where several masks forbid.

    Raises:
        UnsupportedError: when a padded input shows a row of another kind.
    """
    # One mask alone has one level; a guard gives zeros whatever the levels are.
    forbidding = [t for t in site.terms if t not in mask.bias or _forbids(checker.symbolic, site, t)]
    summed = any("different strength" in n for n in mask.notes)  # within one tensor
    if not summed and len(forbidding) < 2:
        return
    guarded = site.zeroed or site.row_guard is not None or site.pair_guard is not None
    if not mask.expression or guarded or site.sink is not None:
        return
    key = checker.key(site, mask)
    if key in checker.rows:
        return
    # What is computed from activations is no larger than scores are.
    known = tuple(t for t in site.terms if checker.symbolic.value(t.tensor) is not None)
    most = lengths(mask.expression)[-1]
    cases = [Case(3, most, Padding.LEFT), Case(3, most, Padding.RIGHT), Case(3, 7, Padding.LEFT), *uneven(site, most)]
    # Rows of two levels can be rare: many paddings of short inputs, some of which leave a block or a band without a key.
    # Without padding it is the length, and that of the past, that can leave a row without a key.
    if mask.operands:
        cases += [Case(12, n, side) for n in (7, 12, 17, 26) for side in (Padding.LEFT, Padding.RIGHT)]
    else:
        cases += [Case(1, n, Padding.NONE, other) for n in range(1, 33) for other in _queries(site)]
    cases += counted(mask, 4, (7, 12, 17))
    for seed, case in enumerate(cases):
        try:
            values, allowed = checker.terms(site, mask, known, case, seed)
        except UnsupportedError:
            if case.other or case.counts is not Counts.USUAL:  # no valid pair of lengths, or number of keys
                continue
            raise
        levels, others = (_levels(known, values, allowed.shape, score) for score in (0.0, _SCORE))
        if site.floored:
            levels, others = (np.maximum(x, np.finfo(np.float32).min) for x in (levels, others))
        empty = ~allowed.any(axis=-1)
        for row, other in zip(levels[empty], others[empty], strict=True):
            found = _kind(row, other, site.nan_guard)
            if found is not mask.empty_rows:
                words = "another mixture of values" if found is None else repr(found.value)
                raise UnsupportedError(
                    f"a query without any key gives {words} in the graph, where masks of different strength are added, and "
                    f"{mask.empty_rows.value!r} in the operator; --empty-rows ignore accepts that"
                )
    checker.rows.add(key)


def _forbids(symbolic: Symbolic, site: AttentionSite, term: MaskTerm) -> bool:
    """Whether a term that stays a bias has numbers that forbid: it tells keys apart that another mask forbids, too."""
    try:
        return bool(read_term(symbolic, site, term, {}).fills)
    except UnsupportedError:
        return False


def _queries(site: AttentionSite) -> list[tuple[tuple[str, int], ...]]:
    """Numbers of queries to try beside that of a case: few, where they are not the keys."""
    atom = site.dims[2].atom
    if atom is None or atom.kind != "size" or site.dims[2] == site.dims[3]:
        return [()]
    return [(), *(((str(atom.args[0]), n),) for n in (1, 2, 7))]


def _levels(terms: tuple[MaskTerm, ...], values: list[np.ndarray], shape: tuple[int, ...], score: float) -> np.ndarray:
    """Equal scores after all masks, fp32 [B, H, S, T]."""
    levels = np.full(shape, score, np.float32)
    with np.errstate(over="ignore"):
        for term, value in zip(terms, values, strict=True):
            levels = term.apply(levels, value)
    return levels


def _kind(row: np.ndarray, other: np.ndarray, nan_guard: bool) -> EmptyRows | None:
    """What a row of scores 0 after all masks gives; ``other`` is the same of larger scores."""
    top = row.max()
    if np.isneginf(top):
        return EmptyRows.ZERO if nan_guard else EmptyRows.NAN
    vanishing = row == other  # beside the mask, or replaced by it
    if vanishing[row == top].all():
        return EmptyRows.MEAN if bool(np.all(row == top)) else None
    # Scores keep their differences; ordinary biases among the masks only add to them.
    return EmptyRows.ALL if not vanishing.any() and float(top - row.min()) < -UNDERFLOW else None
