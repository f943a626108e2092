# SPDX-License-Identifier: Apache-2.0
"""From the mask tensors of a site to its mask expression.

Each tensor that is added to the scores, or that selects them, is evaluated symbolically at (b, h, q, k) and split into
cases. An entry forbids when it is -inf, at or below half of its type's lowest finite value, or the only value besides
0 and at most -1e4. What is neither 0 nor forbidding is a bias and stays one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import TensorProto

from stof.errors import UnsupportedError
from stof.mask.document_ids import use_equal_counts
from stof.mask.empty_rows.from_fills import has_different_strengths, policy_from_fills, policy_with_bias
from stof.mask.empty_rows.key_proof import leaves_a_key
from stof.mask.empty_rows.levels import Forbidding, condition_down_to, find_levels
from stof.mask.expression import MaskExpression
from stof.mask.families import describe
from stof.mask.from_condition import B, GraphNames, H, K, Q, to_expression
from stof.mask.operand_roles import bind_operand
from stof.mask.site import (
    FORBIDDING_VALUE,
    AttentionSite,
    EmptyRows,
    LiftedMask,
    MaskNote,
    MaskTerm,
    NoteReason,
    RuntimeOperand,
    TermKind,
    WeakerMasks,
)
from stof.mask.strength import ABSORBING, forbidding_limit, forbids_softly
from stof.mask.tables import band_of, replace_bands
from stof.symbolic import Cond, Int, Real, Symbolic, SymTensor
from stof.symbolic.algebra.conditions import all_of, any_of, negate
from stof.symbolic.algebra.domain import Domain
from stof.symbolic.algebra.float_bounds import rounded_constant
from stof.symbolic.algebra.piecewise import reads_input, split_cases, to_cond
from stof.symbolic.algebra.terms import FALSE, TRUE, integer
from stof.symbolic.rules.broadcasting import project
from stof.symbolic.rules.cast import overflow_to_inf
from stof.symbolic.tensor import Index, Shape, constant_tensor

MAY_FORBID = MaskNote(NoteReason.BIAS_MAY_FORBID, "a bias may forbid as well; a row without any key may differ")

_DIFFERENT_STRENGTHS = MaskNote(
    NoteReason.DIFFERENT_STRENGTHS, "masks of different strength are added; a row without any key may differ"
)


_LARGEST_SPREAD = 1 << 24  # elements of a constant that is written out for all queries and keys


@dataclass(frozen=True)
class _TermMask:
    """One term: the condition that allows a pair, the constants that forbid, whether a bias remains.

    ``by_data``: it depends on run-time data of which no expression can be made.
    """

    allowed: Cond
    fills: tuple[float, ...]
    stays_bias: bool
    note: MaskNote | None = None
    by_data: bool = False
    largest: float = 0.0  # number that is known to be added


def lift(
    symbolic: Symbolic, site: AttentionSite, as_bias: Collection[MaskTerm] = (), *, with_weaker: bool = False
) -> LiftedMask:
    """The mask of a site as an expression. The terms ``as_bias`` stay a bias, whatever they forbid.

    ``with_weaker``: also the masks that fully masked rows attend by, where several forbid with finite numbers.

    A tensor that operators without a symbolic rule make of inputs may still be a vector for the expression to read.

    Raises:
        UnsupportedError: with the tensor and what its value depends on.
    """
    failure: UnsupportedError | None = None
    mask: LiftedMask | None = None
    try:
        mask = _lift(symbolic, site, as_bias, with_weaker)
    except UnsupportedError as error:
        failure = error
    unexplained = () if mask is None else [t for t in mask.by_data if t not in as_bias]
    if mask is not None and not unexplained:
        return mask
    with contextlib.suppress(UnsupportedError):
        other = _lift(symbolic.coarse, site, as_bias, with_weaker)
        if mask is None or len(other.by_data) < len(mask.by_data):
            return other
    if mask is None:
        assert failure is not None
        raise failure
    return mask


def _lift(symbolic: Symbolic, site: AttentionSite, as_bias: Collection[MaskTerm], with_weaker: bool) -> LiftedMask:
    tables: dict[str, np.ndarray] = {}
    terms = [
        _TermMask(TRUE, (), True, _stays_bias(term), by_data=True)
        if term in as_bias
        else _lift_term(symbolic, site, term, tables)
        for term in site.terms
    ]
    domain = domain_of(site)

    def simplify(conditions: Iterable[Cond]) -> Cond:
        return domain.simplify(replace_bands(all_of(conditions), lambda name: _table(symbolic, tables, name)))

    others = [t.allowed for term, t in zip(site.terms, terms, strict=True) if not term.zeroes]
    for term, term_mask in zip(site.terms, terms, strict=True):
        if term.zeroes and simplify([*others, negate(term_mask.allowed)]) != FALSE:
            raise UnsupportedError(f"scores are multiplied by {term.tensor!r}, and nothing forbids all that it makes 0")
    _check_biases(site, terms)
    allowed = use_equal_counts(symbolic, simplify(t.allowed for t in terms))
    operands: dict[str, RuntimeOperand] = {}
    names = GraphNames(
        _size_names(site),
        lambda tensor, indices, boolean: bind_operand(symbolic, operands, tensor, indices, boolean, site.dims[3]),
        lambda name: _table(symbolic, tables, name),
    )
    expression = to_expression(allowed, names)
    notes = [t.note for t in terms if t.note is not None]
    notes += _notes_of_longest(symbolic, site, operands)
    fills = [f for t in terms for f in t.fills]
    has_bias = any(t.stays_bias for t in terms)
    if has_bias and any(math.isfinite(f) for f in fills):
        notes.append(MAY_FORBID)
    policy = policy_from_fills(site, fills, [t.fills for t in terms])
    weaker = None
    if with_weaker:
        masks, keeps_scores = _weaker(symbolic, site, terms, simplify)
        weaker = WeakerMasks(tuple(to_expression(c, names) for c in masks), keeps_scores)
        if "segment_q" in operands or any("h" in e.reads for e in (expression, *weaker.expressions)):
            raise UnsupportedError("which rows are fully masked differs by head, or a vector of queries says it")
        policy = EmptyRows.ZERO if site.nan_guard else EmptyRows.NAN
    elif has_different_strengths(site, fills):
        notes.append(_DIFFERENT_STRENGTHS)
    mask = LiftedMask(
        expression=expression,
        operands=tuple(operands[role] for role in sorted(operands)),
        tables=names.stored_tables(),
        bias=tuple(term for term, term_mask in zip(site.terms, terms, strict=True) if term_mask.stays_bias),
        by_data=tuple(term for term, term_mask in zip(site.terms, terms, strict=True) if term_mask.by_data),
        weaker=weaker,
        empty_rows=policy if weaker else policy_with_bias(site, policy, forbids=bool(fills), has_bias=has_bias),
        family=describe(expression),
        notes=tuple(notes),
    )
    return _drop_unreached(site, mask)


def _drop_unreached(site: AttentionSite, mask: LiftedMask) -> LiftedMask:
    """The mask without weaker masks that no row needs, since one before them leaves every row a key; and a note about them."""
    if mask.weaker is None:
        return mask
    needed: list[MaskExpression] = []
    is_certain = False
    for expression in mask.weaker.expressions:
        needed.append(expression)
        if is_certain := leaves_a_key(site, replace(mask, expression=expression)):
            break
    keys = " else ".join(f"'{e}'" for e in needed)
    note = MaskNote(NoteReason.WEAKER_MASKS, f"a query that the mask leaves no key attends to those of {keys}")
    return replace(
        mask,
        weaker=replace(mask.weaker, expressions=tuple(needed)),
        # Scores may be -inf in a row that has a key.
        empty_rows=EmptyRows.ZERO if is_certain and not mask.weaker.keeps_scores else mask.empty_rows,
        notes=(*mask.notes, note),
    )


def _weaker(
    symbolic: Symbolic, site: AttentionSite, terms: Sequence[_TermMask], simplify: Callable[[Iterable[Cond]], Cond]
) -> tuple[list[Cond], bool]:
    """The pairs that fully masked rows attend, one condition after the other, and whether by their scores.

    Raises:
        UnsupportedError: where that depends on more than which terms forbid.
    """
    if any(symbolic.dtype(t.tensor) == TensorProto.FLOAT16 for t in site.terms) or site.dtype == TensorProto.FLOAT16:
        raise UnsupportedError(
            "the lowest number of fp16 absorbs scores in fp16 arithmetic alone, which runtimes replace"
        )
    allowed = [t.allowed for t in terms]

    def is_possible(pairs: Forbidding) -> bool:
        return simplify(negate(c) if i in pairs else c for i, c in enumerate(allowed)) != FALSE

    levels = find_levels(site, [t.fills for t in terms], [t.stays_bias for t in terms], is_possible)
    finite = [level for level in levels if math.isfinite(level.offset)]
    lower = finite[1:]
    if not lower or finite[0].pairs != (frozenset(),) or len({level.keeps_scores for level in lower}) > 1:
        raise UnsupportedError("forbidden scores are all -inf, or partly scores and partly one number")
    conditions = [condition_down_to(finite[: n + 1], allowed, is_possible) for n in range(1, len(finite))]
    return [simplify([c]) for c in conditions], lower[0].keeps_scores


def _notes_of_longest(
    symbolic: Symbolic, site: AttentionSite, operands: Mapping[str, RuntimeOperand]
) -> list[MaskNote]:
    """A note where the graph makes a mask as long as the largest of the numbers of keys.

    Such a mask of another length does not run, but for the length 1, which broadcasts.
    """
    lasts = [shape[-1] for t in site.terms if (shape := symbolic.shape(t.tensor))]
    if "lengths" not in operands or not any(a.kind == "read" for last in lasts for a in last.atoms()):
        return []
    tensor = operands["lengths"].tensor
    text = f"the largest number in {tensor} is taken to be the number of keys: the graph makes its mask of that length"
    return [MaskNote(NoteReason.LONGEST_IS_ALL, text, tensor)]


def _table(symbolic: Symbolic, derived: dict[str, np.ndarray], name: str) -> np.ndarray:
    if name in derived:
        return derived[name]
    array = symbolic.constant(name)
    if array is None:
        raise UnsupportedError(f"tensor {name!r} is read as a table but is no constant")
    return array


def _index(site: AttentionSite) -> tuple[Int, Int, Int, Int]:
    past = site.dims[3] - site.dims[2] if site.query_offset else integer(0)
    return (B, H, Q - past, K)


def domain_of(site: AttentionSite) -> Domain:
    """The ranges of indices: below their sizes; ``q`` counts from the past length."""
    past = site.dims[3] - site.dims[2] if site.query_offset else integer(0)
    zero, one = integer(0), integer(1)
    return Domain(
        {
            "b": (zero, site.dims[0] - one),
            "h": (zero, site.dims[1] - one),
            "q": (past, past + site.dims[2] - one),
            "k": (zero, site.dims[3] - one),
        }
    )


def element_of_pair(tensor: SymTensor, site: AttentionSite, term: MaskTerm) -> Int | Cond | Real:
    """The element of a term's tensor that is added to, or selects, the score at (b, h, q, k)."""
    return tensor.at(index_of_pair(tensor.shape, site, term))


def index_of_pair(shape: Shape, site: AttentionSite, term: MaskTerm) -> Index:
    """The index of that element in a tensor of this shape."""
    index: Index = _index(site)
    if term.view is not None:
        index = term.view.element_index(index)
    return project(index, shape)


def weaker_terms(symbolic: Symbolic, site: AttentionSite) -> list[MaskTerm]:
    """Tensors that give fully masked rows the graph's result as biases, where the expression forbids the rest.

    Either [.., 1, T] that forbid less than another mask does: -10000 for padding beside -inf for later keys. A fully masked
    query attends to the keys that only these tensors forbid.
    Or, where another mask replaces scores by the lowest number, those that add it: both together are -inf.
    """
    row_terms, lowest = [], []
    strongest = 0.0
    replaces = False
    for term in site.terms:
        try:
            fills = read_term(symbolic, site, term, {}).fills
        except UnsupportedError:
            return []
        strongest = min((strongest, *fills))
        shape = symbolic.shape(term.tensor) or ()
        is_row = len(shape) >= 2 and all(d.constant == 1 for d in shape[1:-1])
        if term.kind is TermKind.ADD and is_row and fills and min(fills) > ABSORBING:
            row_terms.append(term)
        is_lowest = bool(fills) and math.isfinite(min(fills)) and max(fills) <= ABSORBING
        if term.kind is not TermKind.ADD:
            replaces |= is_lowest
        elif is_lowest:
            lowest.append(term)
    if row_terms and strongest <= ABSORBING:
        return row_terms
    return lowest if replaces else []


def _lift_term(symbolic: Symbolic, site: AttentionSite, term: MaskTerm, tables: dict[str, np.ndarray]) -> _TermMask:
    """One term. It stays a bias where no expression says which pairs it allows, and a bias can replace it."""
    term_mask = read_term(symbolic, site, term, tables)
    if term_mask.allowed == TRUE:
        return term_mask
    names = GraphNames(
        _size_names(site),
        lambda tensor, at, boolean: bind_operand(symbolic, {}, tensor, at, boolean, site.dims[3]),
        lambda n: _table(symbolic, tables, n),
    )
    try:
        to_expression(domain_of(site).simplify(term_mask.allowed), names)
    except UnsupportedError as error:
        if term.kind is not TermKind.ADD and not _is_only_mask(symbolic, site, term):
            raise UnsupportedError(f"mask tensor {term.tensor!r}: {error}") from error
        fills = () if term.kind is TermKind.ADD else term_mask.fills
        return _TermMask(TRUE, fills, True, _stays_bias(term, error), by_data=True)
    return term_mask


def _stays_bias(term: MaskTerm, reason: object = "") -> MaskNote:
    text = f"{term.tensor} stays a bias{f': {reason}' if reason else ''}"
    return MaskNote(NoteReason.STAYS_BIAS, text, term.tensor)


def _is_only_mask(symbolic: Symbolic, site: AttentionSite, term: MaskTerm) -> bool:
    """Whether a selection of scores is the only mask of a site, and the fill stays as it is.

    Then -inf may be added in its place, and a fully masked row gives what the fill gives.
    """
    others = [t for t in site.terms if t != term]
    are_opaque = all(t.kind is TermKind.ADD and symbolic.value(t.tensor) is None for t in others)
    is_infinite = term.fill is not None and math.isinf(term.fill)
    return are_opaque and not term.zeroes and (is_infinite or site.terms[-1] == term)


def read_term(symbolic: Symbolic, site: AttentionSite, term: MaskTerm, tables: dict[str, np.ndarray]) -> _TermMask:
    """What one term allows, forbids with, and leaves to a bias. Tables that it needs are added to ``tables``.

    Raises:
        UnsupportedError: when it can neither be evaluated nor stay a bias.
    """
    tensor = symbolic.value(term.tensor)
    shape = symbolic.shape(term.tensor)
    most = 4 if term.view is None else len(term.view.axes)
    if tensor is None or shape is None or len(shape) > most:
        if term.kind is TermKind.ADD and shape is not None and len(shape) <= most:
            return _TermMask(TRUE, (), True, _stays_bias(term, symbolic.reason(term.tensor)))
        raise UnsupportedError(
            f"mask tensor {term.tensor!r} cannot be evaluated from shapes and model inputs: "
            f"{symbolic.reason(term.tensor) or 'its shape is unknown'}"
        )
    spread = _spread_constant(tensor, site, term)
    if spread is not None:
        tables[f"{term.tensor} spread"] = spread
        tensor, term = constant_tensor(f"{term.tensor} spread", spread), replace(term, view=None)
    value = element_of_pair(tensor, site, term)
    if term.kind is not TermKind.ADD:
        cond = to_cond(value)
        fill = -math.inf if term.fill is None else term.fill
        fills = () if term.zeroes else (fill,)
        return _TermMask(cond if term.kind is TermKind.KEEP else negate(cond), fills, False)
    if not isinstance(value, Real):
        raise UnsupportedError(f"mask tensor {term.tensor!r} is added to the scores but is no float")
    return _read_additive(symbolic, term, value, symbolic.dtype(term.tensor), tables)


def _spread_constant(tensor: SymTensor, site: AttentionSite, term: MaskTerm) -> np.ndarray | None:
    """A constant of a grid of queries or keys as one of [B, H, S, T], of which tables are made; None for other terms."""
    view, array = term.view, tensor.constant
    if view is None or array is None or not (view.splits(2) or view.splits(3)):
        return None
    sizes = [d.constant if view.varies_along(axis) else 1 for axis, d in enumerate(site.dims)]
    static_sizes = [n for n in sizes if n is not None]
    if len(static_sizes) < len(sizes) or math.prod(static_sizes) > _LARGEST_SPREAD:
        return None
    try:
        return view.spread(array, static_sizes)
    except ValueError:
        return None


def _read_additive(
    symbolic: Symbolic, term: MaskTerm, value: Real, dtype: int, tables: dict[str, np.ndarray]
) -> _TermMask:
    entries: list[tuple[Cond, float | Real]] = []
    for cond, x in split_cases(value):
        if isinstance(x, Real) and x.kind == "table":
            entries.extend((all_of([cond, c]), y) for c, y in _table_cases(symbolic, x, dtype, tables))
        else:
            number = rounded_constant(x) if isinstance(x, Real) else x
            entries.append((cond, x if number is None else overflow_to_inf(number, dtype)))
    limit = forbidding_limit(dtype)
    numbers = [x for _, x in entries if isinstance(x, float) and x != 0]
    is_soft = len(numbers) + sum(x == 0 for _, x in entries) == len(entries) and forbids_softly(numbers, term.scale)

    def forbids(x: float) -> bool:
        return x <= limit or (is_soft and x < 0)

    forbidden = [
        (c, overflow_to_inf(x * term.scale, dtype))
        for c, x in entries
        if isinstance(x, float) and forbids(x * term.scale)
    ]
    has_bias = any(not isinstance(x, float) or (x != 0 and not forbids(x * term.scale)) for _, x in entries)
    if any(isinstance(x, float) and math.isnan(x) for _, x in entries):
        raise UnsupportedError(f"mask tensor {term.tensor!r} has NaN entries")
    allowed = negate(any_of(c for c, _ in forbidden))
    # The cases exclude each other and leave nothing out, so those that allow are the same condition, often shorter.
    forbidding = {c for c, _ in forbidden}
    other = any_of(c for c, _ in entries if c not in forbidding)
    allowed = min(allowed, other, key=lambda c: len(str(c)))
    if allowed == FALSE:
        raise UnsupportedError(f"mask tensor {term.tensor!r} forbids every pair")
    note = _stays_bias(term) if has_bias else None
    rest = [(c, x) for c, x in entries if c not in forbidding]
    by_data = any(reads_input(x) for _, x in rest) or (len(rest) > 1 and any(reads_input(c) for c, _ in rest))
    largest = max((_largest_stored(x, term.scale) for _, x in rest), default=0.0)
    return _TermMask(allowed, tuple(x for _, x in forbidden), has_bias, note, has_bias and by_data, max(largest, 0.0))


def _largest_stored(value: float | Real, scale: float) -> float:
    """The largest stored number, times ``scale``; 0 for a computed value."""
    if isinstance(value, float):
        return value * scale
    ends = value.args[2] if value.kind == "table" and len(value.args) == 3 else ()
    return max((x * scale for x in ends if isinstance(x, float)), default=0.0) if isinstance(ends, tuple) else 0.0


def _check_biases(site: AttentionSite, terms: Sequence[_TermMask]) -> None:
    """Refuses a bias so large that it may lift forbidden scores to allowed ones: 1e9 beside -1e9.

    Raises:
        UnsupportedError: naming both.
    """
    for i, (raising, term_mask) in enumerate(zip(site.terms, terms, strict=True)):
        for j, (term, other) in enumerate(zip(site.terms, terms, strict=True)):
            # A selection replaces what was added before it.
            if term_mask.largest == 0 or i == j or not other.fills or (term.kind is not TermKind.ADD and i < j):
                continue
            if term_mask.largest == math.inf or term_mask.largest > -max(other.fills) / 2:
                raise UnsupportedError(
                    f"{raising.tensor!r} adds up to {term_mask.largest:g} to scores that {term.tensor!r} forbids with "
                    f"{max(other.fills):g}: they may be allowed again; expected masks and biases that differ in size"
                )


def _table_cases(
    symbolic: Symbolic, read: Real, dtype: int, tables: dict[str, np.ndarray]
) -> list[tuple[Cond, float | Real]]:
    """The cases of a look-up into a constant float mask: what it allows is a band where it can be, else a boolean table."""
    name, indices = read.args[:2]
    assert isinstance(name, str)
    assert isinstance(indices, tuple)
    array = np.asarray(_table(symbolic, tables, name), dtype=np.float64)
    limit = forbidding_limit(dtype)
    rest = array[array > limit]
    values = set(np.unique(rest[rest != 0]).tolist()) if rest.size < 1 << 24 else set()
    is_soft = bool(values) and max(values) <= FORBIDDING_VALUE and not bool(np.any(array <= limit))
    forbidden = (array <= limit) | (is_soft & (array <= FORBIDDING_VALUE))
    if not forbidden.any():
        return [(TRUE, read)]
    fill = float(array[forbidden].min())
    allowed = ~forbidden
    cond = band_of(allowed, indices)
    if cond is None:
        derived = f"{name} allows"
        tables[derived] = allowed
        cond = Cond("table", (derived, indices))
    is_mask_only = bool(np.all(array[allowed] == 0))
    return [(cond, 0.0 if is_mask_only else read), (negate(cond), fill)]


def _size_names(site: AttentionSite) -> dict[str, str]:
    sizes = [(site.dims[3], "T"), (site.dims[2], "S")]
    if site.query_offset:
        sizes.append((site.dims[3] - site.dims[2], "P"))
    names = {}
    for dim, letter in sizes:
        atom = dim.atom
        if atom is not None and atom.kind == "size":
            names[str(atom.args[0])] = letter
    return names
