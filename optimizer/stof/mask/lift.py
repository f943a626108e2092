# SPDX-License-Identifier: Apache-2.0
"""From the mask tensors of a site to its mask expression.

Each tensor that is added to the scores, or that selects them, is evaluated symbolically at (b, h, q, k) and split into
cases. An entry forbids when it is -inf, at or below half of its type's lowest finite value, or the only value besides
0 and at most -1e4 (design: additive masks). What is neither 0 nor forbidding is a bias and stays one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from stof.errors import UnsupportedError
from stof.mask.document_ids import in_order
from stof.mask.families import describe
from stof.mask.from_condition import B, GraphNames, H, K, Q, to_expression
from stof.mask.tables import band_of, with_bands
from stof.site import (
    AttentionSite,
    EmptyRows,
    LiftedMask,
    MaskNote,
    MaskTerm,
    NoteReason,
    OperandView,
    RuntimeOperand,
    TermKind,
)
from stof.symbolic import Cond, Int, Real, Symbolic, SymTensor
from stof.symbolic.algebra.conditions import all_of, any_of, negate
from stof.symbolic.algebra.divisions import floor_div, floor_mod
from stof.symbolic.algebra.domain import Domain
from stof.symbolic.algebra.float_bounds import settled
from stof.symbolic.algebra.piecewise import cases, reads_input, to_cond
from stof.symbolic.algebra.terms import FALSE, TRUE, Atom, integer, of_atom, parts
from stof.symbolic.rules.broadcasting import project
from stof.symbolic.rules.cast import held

LOWEST: dict[int, float] = {
    TensorProto.FLOAT: 3.4028234663852886e38,
    TensorProto.DOUBLE: 1.7976931348623157e308,
    TensorProto.FLOAT16: 65504.0,
    TensorProto.BFLOAT16: 3.3895313892515355e38,
}
# Element types of run-time operands (docs/reference/operators.md).
_NUMBER_TYPES = frozenset({TensorProto.INT32, TensorProto.INT64})
_PAD_TYPES = _NUMBER_TYPES | {TensorProto.BOOL, TensorProto.UINT8, TensorProto.FLOAT, TensorProto.FLOAT16}
SOFT_FORBID = -1e4
UNDERFLOW = -1e3  # exp of it is 0 in fp32 and fp64
FLOOR = -LOWEST[TensorProto.FLOAT]
MAY_FORBID = MaskNote(NoteReason.BIAS_MAY_FORBID, "a bias may forbid as well; a row without any key may differ")
_DIFFERENT_STRENGTHS = MaskNote(
    NoteReason.DIFFERENT_STRENGTHS, "masks of different strength are added; a row without any key may differ"
)
_WEAK = -1e8  # what forbids less does not hide the scores that it is added to


@dataclass(frozen=True)
class _TermMask:
    """One term: the condition that it leaves to attend, the constants that forbid, whether a bias remains.

    ``by_data``: it depends on data of a run, of which no expression can be made.
    """

    allowed: Cond
    fills: tuple[float, ...]
    bias: bool
    note: MaskNote | None = None
    by_data: bool = False
    most: float = 0.0  # the largest number that is known to be added


def lift(symbolic: Symbolic, site: AttentionSite, kept: Collection[MaskTerm] = ()) -> LiftedMask:
    """The mask of a site as an expression; tensors that are ``kept`` stay a bias, whatever they forbid.

    What is made of data by operators of which no expression is known may still be a vector for the expression to read.

    Raises:
        UnsupportedError: with the tensor and what its value depends on.
    """
    failure: UnsupportedError | None = None
    found: LiftedMask | None = None
    try:
        found = _lift(symbolic, site, kept)
    except UnsupportedError as error:
        failure = error
    unread = () if found is None else [t for t in found.by_data if t not in kept]
    if found is not None and not unread:
        return found
    with contextlib.suppress(UnsupportedError):
        other = _lift(symbolic.coarse, site, kept)
        if found is None or len(other.by_data) < len(found.by_data):
            return other
    if found is None:
        assert failure is not None
        raise failure
    return found


def _lift(symbolic: Symbolic, site: AttentionSite, kept: Collection[MaskTerm]) -> LiftedMask:
    tables: dict[str, np.ndarray] = {}
    terms = [
        _TermMask(TRUE, (), True, _stays_bias(term), by_data=True)
        if term in kept
        else _lift_term(symbolic, site, term, tables)
        for term in site.terms
    ]
    domain = _domain(site)

    def banded(conditions: Iterable[Cond]) -> Cond:
        return domain.simplify(with_bands(all_of(conditions), lambda name: _table(symbolic, tables, name)))

    others = [t.allowed for term, t in zip(site.terms, terms, strict=True) if not term.zeroes]
    for term, found in zip(site.terms, terms, strict=True):
        if term.zeroes and banded([*others, negate(found.allowed)]) != FALSE:
            raise UnsupportedError(f"scores are multiplied by {term.tensor!r}, and nothing forbids all that it makes 0")
    _check_raised(site, terms)
    allowed = in_order(symbolic, banded(t.allowed for t in terms))
    operands: dict[str, RuntimeOperand] = {}
    names = GraphNames(
        _size_names(site),
        lambda tensor, indices, boolean: _operand(symbolic, operands, tensor, indices, boolean),
        lambda name: _table(symbolic, tables, name),
    )
    expression = to_expression(allowed, names)
    notes = [t.note for t in terms if t.note is not None]
    fills = [f for t in terms for f in t.fills]
    if any(t.bias for t in terms) and any(math.isfinite(f) for f in fills):
        notes.append(MAY_FORBID)
    return LiftedMask(
        expression=expression,
        operands=tuple(operands[role] for role in sorted(operands)),
        tables=tuple((n, str(a.dtype), tuple(a.shape), a.tobytes()) for n, a in names.tables.items()),
        bias=tuple(term for term, found in zip(site.terms, terms, strict=True) if found.bias),
        by_data=tuple(term for term, found in zip(site.terms, terms, strict=True) if found.by_data),
        empty_rows=_with_bias(site, empty_rows(site, fills, notes, terms), bool(fills), any(t.bias for t in terms)),
        family=describe(expression),
        notes=tuple(notes),
    )


def _table(symbolic: Symbolic, derived: dict[str, np.ndarray], name: str) -> np.ndarray:
    if name in derived:
        return derived[name]
    found = symbolic.constant(name)
    if found is None:
        raise UnsupportedError(f"tensor {name!r} is read as a table but is no constant")
    return found


def _index(site: AttentionSite) -> tuple[Int, Int, Int, Int]:
    past = site.dims[3] - site.dims[2] if site.query_offset else integer(0)
    return (B, H, Q - past, K)


def _domain(site: AttentionSite) -> Domain:
    """What indices are: below their sizes; ``q`` counts from the past length."""
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


def element(tensor: SymTensor, site: AttentionSite, term: MaskTerm) -> Int | Cond | Real:
    """A term's tensor, broadcast to the scores, at (b, h, q, k)."""
    index: tuple[Int, ...] = _index(site)
    if term.merged:
        index = (index[0] * integer(term.merged) + index[1], *index[2:])
    elif term.windows:
        count = term.windows[1]
        if count.constant is None:
            outer, window = (of_atom("opaque", kind, index[0], count) for kind in ("division", "modulo"))
        else:
            outer, window = floor_div(index[0], count.constant), floor_mod(index[0], count.constant)
        index = (outer, window, *index[1:])
    elif term.groups:
        index = (index[0], floor_div(index[1], term.groups[1]), floor_mod(index[1], term.groups[1]), *index[2:])
    return tensor.at(project(index, tensor.shape))


def weaker_terms(symbolic: Symbolic, site: AttentionSite) -> list[MaskTerm]:
    """Tensors [.., 1, T] that forbid less than another mask does: -10000 for padding beside -inf for what is to come.

    A query whose keys are all forbidden by one of them attends to those that only they forbid. As biases they say that.
    """
    found = []
    strongest = 0.0
    for term in site.terms:
        try:
            fills = read_term(symbolic, site, term, {}).fills
        except UnsupportedError:
            return []
        strongest = min((strongest, *fills))
        shape = symbolic.shape(term.tensor) or ()
        flat = len(shape) >= 2 and all(d.constant == 1 for d in shape[1:-1])
        if term.kind is TermKind.ADD and flat and fills and min(fills) > _WEAK:
            found.append(term)
    return found if strongest <= _WEAK else []


def _lift_term(symbolic: Symbolic, site: AttentionSite, term: MaskTerm, tables: dict[str, np.ndarray]) -> _TermMask:
    """One term; it stays a bias where no expression says which pairs it leaves, and a bias can stand for it."""
    found = read_term(symbolic, site, term, tables)
    if found.allowed == TRUE:
        return found
    names = GraphNames(
        _size_names(site), lambda *read: _operand(symbolic, {}, *read), lambda n: _table(symbolic, tables, n)
    )
    try:
        to_expression(_domain(site).simplify(found.allowed), names)
    except UnsupportedError as error:
        if term.kind is not TermKind.ADD and not _is_only_mask(symbolic, site, term):
            raise UnsupportedError(f"mask tensor {term.tensor!r}: {error}") from error
        fills = () if term.kind is TermKind.ADD else found.fills
        return _TermMask(TRUE, fills, True, _stays_bias(term, error), by_data=True)
    return found


def _stays_bias(term: MaskTerm, reason: object = "") -> MaskNote:
    text = f"{term.tensor} stays a bias{f': {reason}' if reason else ''}"
    return MaskNote(NoteReason.STAYS_BIAS, text, term.tensor)


def _is_only_mask(symbolic: Symbolic, site: AttentionSite, term: MaskTerm) -> bool:
    """Whether a selection of scores is the only mask of a site, and what it fills in stays as it is: then -inf may be added
    in its place, and a row without a key gives what the number gives.
    """
    others = [t for t in site.terms if t != term]
    opaque = all(t.kind is TermKind.ADD and symbolic.value(t.tensor) is None for t in others)
    infinite = term.fill is not None and math.isinf(term.fill)
    return opaque and not term.zeroes and (infinite or site.terms[-1] == term)


def read_term(symbolic: Symbolic, site: AttentionSite, term: MaskTerm, tables: dict[str, np.ndarray]) -> _TermMask:
    """What one term allows, forbids with, and leaves to a bias; ``tables`` gets those that it reads.

    Raises:
        UnsupportedError: when it can neither be evaluated nor stay a bias.
    """
    tensor = symbolic.value(term.tensor)
    shape = symbolic.shape(term.tensor)
    most = 5 if term.windows or term.groups else 4
    if tensor is None or shape is None or len(shape) > most:
        if term.kind is TermKind.ADD and shape is not None and len(shape) <= most:
            return _TermMask(TRUE, (), True, _stays_bias(term, symbolic.reason(term.tensor)))
        raise UnsupportedError(
            f"mask tensor {term.tensor!r} cannot be evaluated from shapes and model inputs: "
            f"{symbolic.reason(term.tensor) or 'its shape is unknown'}"
        )
    value = element(tensor, site, term)
    if term.kind is not TermKind.ADD:
        cond = to_cond(value)
        fill = -math.inf if term.fill is None else term.fill
        fills = () if term.zeroes else (fill,)
        return _TermMask(cond if term.kind is TermKind.KEEP else negate(cond), fills, False)
    if not isinstance(value, Real):
        raise UnsupportedError(f"mask tensor {term.tensor!r} is added to the scores but is no float")
    return _additive(symbolic, term, value, symbolic.dtype(term.tensor), tables)


def _additive(symbolic: Symbolic, term: MaskTerm, value: Real, dtype: int, tables: dict[str, np.ndarray]) -> _TermMask:
    split: list[tuple[Cond, float | Real]] = []
    for cond, x in cases(value):
        if isinstance(x, Real) and x.kind == "table":
            split.extend((all_of([cond, c]), y) for c, y in _table_cases(symbolic, x, dtype, tables))
        else:
            number = settled(x) if isinstance(x, Real) else x
            split.append((cond, x if number is None else held(number, dtype)))
    limit = -LOWEST.get(dtype, LOWEST[TensorProto.FLOAT]) / 2
    numbers = [x for _, x in split if isinstance(x, float) and x != 0]
    soft = len(numbers) + sum(x == 0 for _, x in split) == len(split) and forbids_softly(numbers, term.scale)

    def forbids(x: float) -> bool:
        return x <= limit or (soft and x < 0)

    dropped = [(c, held(x * term.scale, dtype)) for c, x in split if isinstance(x, float) and forbids(x * term.scale)]
    bias = any(not isinstance(x, float) or (x != 0 and not forbids(x * term.scale)) for _, x in split)
    if any(isinstance(x, float) and math.isnan(x) for _, x in split):
        raise UnsupportedError(f"mask tensor {term.tensor!r} has NaN entries")
    allowed = negate(any_of(c for c, _ in dropped))
    # The cases exclude each other and leave nothing out: what is not dropped says the same, often in fewer words.
    dropping = {c for c, _ in dropped}
    other = any_of(c for c, _ in split if c not in dropping)
    allowed = min(allowed, other, key=lambda c: len(str(c)))
    if allowed == FALSE:
        raise UnsupportedError(f"mask tensor {term.tensor!r} forbids every pair")
    note = _stays_bias(term) if bias else None
    kept = [(c, x) for c, x in split if c not in dropping]
    by_data = any(reads_input(x) for _, x in kept) or (len(kept) > 1 and any(reads_input(c) for c, _ in kept))
    most = max((_most(x, term.scale) for _, x in kept), default=0.0)
    return _TermMask(allowed, tuple(x for _, x in dropped), bias, note, bias and by_data, max(most, 0.0))


def _most(value: float | Real, scale: float) -> float:
    """The largest number, times ``scale``, that is stored; 0 for what is computed."""
    if isinstance(value, float):
        return value * scale
    ends = value.args[2] if value.kind == "table" and len(value.args) == 3 else ()
    return max((x * scale for x in ends if isinstance(x, float)), default=0.0) if isinstance(ends, tuple) else 0.0


def _check_raised(site: AttentionSite, terms: Sequence[_TermMask]) -> None:
    """Raises where what one mask forbids another may raise to what it allows: -1e9 and 1e9.

    Raises:
        UnsupportedError: naming both.
    """
    for i, (raising, found) in enumerate(zip(site.terms, terms, strict=True)):
        for j, (term, other) in enumerate(zip(site.terms, terms, strict=True)):
            # A selection replaces what was added before it.
            if found.most == 0 or i == j or not other.fills or (term.kind is not TermKind.ADD and i < j):
                continue
            if found.most == math.inf or found.most > -max(other.fills) / 2:
                raise UnsupportedError(
                    f"{raising.tensor!r} adds up to {found.most:g} to scores that {term.tensor!r} forbids with "
                    f"{max(other.fills):g}: they may be allowed again; expected masks and biases that differ in size"
                )


def forbids_softly(numbers: Sequence[float], scale: float) -> bool:
    """Whether the values of a mask besides 0 are so low that they forbid, times ``scale`` as well."""
    strengths = [x if scale > 0 else -x for x in numbers]
    return bool(strengths) and max(strengths) <= SOFT_FORBID and max(strengths) * abs(scale) <= UNDERFLOW


def _table_cases(
    symbolic: Symbolic, read: Real, dtype: int, tables: dict[str, np.ndarray]
) -> list[tuple[Cond, float | Real]]:
    """A look-up into a constant float mask: forbidden entries as a boolean table or, where they are one, a band."""
    name, indices = read.args[:2]
    assert isinstance(name, str)
    assert isinstance(indices, tuple)
    array = np.asarray(_table(symbolic, tables, name), dtype=np.float64)
    limit = -LOWEST.get(dtype, LOWEST[TensorProto.FLOAT]) / 2
    rest = array[array > limit]
    values = set(np.unique(rest[rest != 0]).tolist()) if rest.size < 1 << 24 else set()
    soft = bool(values) and max(values) <= SOFT_FORBID and not bool(np.any(array <= limit))
    forbidden = (array <= limit) | (soft & (array <= SOFT_FORBID))
    if not forbidden.any():
        return [(TRUE, read)]
    fill = float(array[forbidden].min())
    kept = ~forbidden
    cond = band_of(kept, indices)
    if cond is None:
        derived = f"{name} allows"
        tables[derived] = kept
        cond = Cond("table", (derived, indices))
    plain = bool(np.all(array[kept] == 0))
    return [(cond, 0.0 if plain else read), (negate(cond), fill)]


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


def _operand(
    symbolic: Symbolic,
    operands: dict[str, RuntimeOperand],
    tensor: str,
    indices: Sequence[Int],
    boolean: bool,
) -> tuple[str, int | None]:
    """The role of a model input that the mask reads, and its axis of positions."""
    shape = symbolic.shape(tensor)
    dtype = symbolic.dtype(tensor)
    if dtype not in (_PAD_TYPES if boolean else _NUMBER_TYPES):
        kind, wanted = TensorProto.DataType.Name(dtype), "padding of bool, uint8, int32, int64, fp32 or fp16"
        raise UnsupportedError(
            f"the mask reads {tensor!r} of type {kind}, of which the operator takes "
            f"{wanted if boolean else 'numbers of int32 or int64'} only; cast it before"
        )
    axes = [a for a, d in enumerate(shape or ()) if d.constant != 1]
    others = [a for a in axes if indices[a] != B]
    place = others[0] if others else None
    # By heads, for instance: no vector of the operator has an axis of these.
    foreign = place is not None and not _variables(indices[place]) <= {"q", "k"}
    view = None if shape is None or len(others) > 1 or foreign else _view(axes, place, len(shape))
    if view is None:
        words = ", ".join(str(d.constant or "?") for d in shape or ())
        raise UnsupportedError(
            f"the mask reads {tensor!r} of shape [{words}] at ({', '.join(_short(i) for i in indices)}); only vectors with one "
            "axis of positions, [B, length] or [length], and numbers for each batch, [B] or one, can be operands"
        )
    if place is None:
        role = "lengths"
    else:
        role = _vector_role(operands, RuntimeOperand("pad", tensor, view), indices[place], boolean)
    operand = RuntimeOperand(role, tensor, view)
    if operands.setdefault(role, operand) != operand:
        raise UnsupportedError(f"the mask reads {operands[role].tensor!r} and {tensor!r} as {role}; only one can be")
    return role, place


def _vector_role(operands: dict[str, RuntimeOperand], pad: RuntimeOperand, index: Int, boolean: bool) -> str:
    """The role of a vector of positions. There is one of padding, by keys; other conditions are numbers other than 0."""
    reads_query = "q" in _variables(index)
    if boolean and (operands.get("pad") == pad or ("pad" not in operands and not reads_query)):
        return "pad"
    return "segment_q" if reads_query else "segment_k"


def _variables(index: Int) -> set[str]:
    return {str(p.args[0]) for p in parts(index) if isinstance(p, Atom) and p.kind == "var"}


def _short(index: Int) -> str:
    found = index.atom
    if index.constant is not None:
        return str(index.constant)
    return str(found.args[0]) if found is not None and found.kind == "var" else "..."


def _view(axes: Sequence[int], place: int | None, rank: int) -> OperandView | None:
    """How a tensor becomes a vector: ``axes`` are those of more than one element, ``place`` is the one of positions."""
    if place is None:
        if len(axes) > 1:
            return None
        return OperandView.SAME if rank == 1 else OperandView.FLAT
    match list(axes):
        case [only] if only == place:
            return OperandView.SAME if (rank, place) == (2, 1) else OperandView.ROW
        case [0, last] if last == place:
            return OperandView.SAME if rank == 2 else OperandView.ROWS
        case [0, 1] if place == 0 and rank == 2:
            return OperandView.TURNED
    return None


def _with_bias(site: AttentionSite, found: EmptyRows, forbids: bool, bias: bool) -> EmptyRows:
    """A bias that is -inf throughout a row makes it NaN."""
    if not bias or forbids or site.row_guard is not None or site.sink is not None:
        return found
    if site.floored:
        return EmptyRows.MEAN
    return found if site.nan_guard else EmptyRows.NAN


def _guarded(site: AttentionSite, fills: Sequence[float]) -> EmptyRows:
    """Rows without a key where the weights of all forbidden pairs are made 0."""
    assert site.pair_guard is not None
    missing = [f == -math.inf for f in fills]
    if site.pair_guard.fill is not None or site.floored or site.nan_guard or not any(missing):
        return EmptyRows.ZERO
    if not all(missing):
        raise UnsupportedError(
            f"{site.pair_guard.tensor!r} multiplies the attention weights after masks some of which fill with -inf: rows "
            "without a key would be NaN or 0 by which of them forbids"
        )
    return EmptyRows.NAN


def _replaced(site: AttentionSite, terms: Sequence[_TermMask]) -> bool:
    """Whether what is added to the scores forbids nothing, and is added before masks replace them by a number."""
    first = next((i for i, t in enumerate(site.terms) if t.kind is not TermKind.ADD), len(site.terms))
    adding = [(i, found) for i, (t, found) in enumerate(zip(site.terms, terms, strict=True)) if t.kind is TermKind.ADD]
    return first < len(site.terms) and all(i < first and not found.fills for i, found in adding)


def empty_rows(
    site: AttentionSite, fills: Sequence[float], notes: list[MaskNote], terms: Sequence[_TermMask] = ()
) -> EmptyRows:
    """What a row without a key gives in the graph, from the values that forbid; doubts are added to ``notes``."""
    if (
        not fills or site.zeroed or site.row_guard is not None or site.sink is not None
    ):  # a sink takes all of an empty row
        return EmptyRows.ZERO
    if site.pair_guard is not None:
        return _guarded(site, fills)
    if site.floored:
        fills = [max(f, FLOOR) for f in fills]
        if set(fills) == {FLOOR}:
            return EmptyRows.MEAN
    if all(math.isinf(f) for f in fills):
        return EmptyRows.ZERO if site.nan_guard else EmptyRows.NAN
    finite = [f for f in fills if math.isfinite(f)]
    # Two tensors that are added forbid some pairs twice: those are lower than the others.
    added = sum(t.kind is TermKind.ADD for t in site.terms)
    if len(set(finite)) > 1 or len(finite) < len(fills) or (added > 1 and len(finite) > 1):
        notes.append(_DIFFERENT_STRENGTHS)
    if all(t.kind is not TermKind.ADD for t in site.terms) or (terms and _replaced(site, terms)):
        return EmptyRows.MEAN  # every score of the row was replaced by the same number
    # The lowest finite number of fp32 and bf16 absorbs any score that is added to it; -1e9 those up to 32 (half
    # the distance of fp32 numbers there). That of fp16 absorbs only in fp16 arithmetic, which runtimes replace by fp32 as
    # they see fit.
    return EmptyRows.MEAN if min(finite) <= _WEAK else EmptyRows.ALL
