# SPDX-License-Identifier: Apache-2.0
"""Proofs that a bias depends on k - q alone, and from which distance on it is constant.

Running a bias shows its values at some lengths; only its formula shows the others. In the formula queries and keys must stand as
multiples of their difference; batches, sizes and data must not occur. Then the rows of the stored table that it looks up are
computed for every distance that the operator takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, reduce

import numpy as np

from stof.mask.lift import domain_of, element_of_pair
from stof.mask.site import AttentionSite, MaskTerm, TermKind
from stof.mask.strength import forbidding_limit
from stof.symbolic import LONGEST, Cond, Int, Real, Symbolic
from stof.symbolic.algebra.piecewise import split_cases
from stof.symbolic.algebra.terms import Atom

_CHUNK = 1 << 19
_HUGE = float(1 << 53)
_FUNCTIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {"Log": np.log, "Ceil": np.ceil, "Floor": np.floor}


class _UnprovenError(Exception):
    """The formula has a part of which nothing is known here."""


def proven_radius(
    symbolic: Symbolic, site: AttentionSite, term: MaskTerm, *, heads_are_merged: bool = False
) -> int | None:
    """The distance beyond which a bias is constant for each head, where it depends on head and k - q alone; else None.

    ``heads_are_merged``: batch and heads are one axis, of which the head is the remainder.
    """
    tensor = symbolic.value(term.tensor)
    is_split = term.view is not None and any(map(term.view.splits, (0, 2, 3)))
    if tensor is None or term.kind is not TermKind.ADD or is_split:
        return None
    value = element_of_pair(tensor, site, term)
    if not isinstance(value, Real):
        return None
    limit = forbidding_limit(symbolic.dtype(term.tensor))
    # Forbidden pairs do not count; for all others one formula must hold.
    formulas = [x for _, x in split_cases(value) if not (isinstance(x, float) and x * term.scale <= limit)]
    if len(formulas) != 1:
        return None
    if isinstance(formulas[0], float):
        return 0
    if formulas[0].kind != "table":
        return None
    indices = formulas[0].args[1]
    assert isinstance(indices, tuple)
    if heads_are_merged:
        indices = tuple(domain_of(site).integer(i) for i in indices)
    rows = [i for i in indices if i.constant is None and not _is_head(i)]
    try:
        return max((_last_change(row) for row in rows), default=0)
    except _UnprovenError:
        return None


def constant_beyond(row: Int) -> int | None:
    """The distance beyond which an integer is constant, where it depends on k - q alone; else None."""
    try:
        return _last_change(row)
    except _UnprovenError:
        return None


def _is_head(index: Int) -> bool:
    return index.atom is not None and index.atom.kind == "var" and index.atom.args == ("h",)


@lru_cache(maxsize=1024)  # every layer has the same
def _last_change(index: Int) -> int:
    """The largest distance next to which an index changes, over all distances of the operator."""
    far = 0
    for sign in (1, -1):
        before: int | None = None
        for distances in _chunks():
            indices = np.broadcast_to(_evaluate_int(index, sign * distances), distances.shape)
            if before is not None and indices[0] != before:
                far = max(far, int(distances[0]))
            changes = np.flatnonzero(indices[1:] != indices[:-1])
            if changes.size:
                far = max(far, int(distances[int(changes[-1]) + 1]))
            before = int(indices[-1])
    return far


def _chunks() -> Iterator[np.ndarray]:
    for start in range(0, LONGEST + 1, _CHUNK):
        yield np.arange(start, min(start + _CHUNK, LONGEST + 1), dtype=np.int64)


def _evaluate_int(value: Int, distance: np.ndarray) -> np.ndarray:
    total: np.ndarray = np.zeros(1, np.int64)
    factors = {"k": 0, "q": 0}
    for monomial, coefficient in value.terms:
        name = monomial[0].args[0] if len(monomial) == 1 and monomial[0].kind == "var" else None
        if isinstance(name, str) and name in factors:
            factors[name] += coefficient
            continue
        product = np.full(1, coefficient, np.int64)
        for atom in monomial:
            product = product * _evaluate_atom(atom, distance)
        total = total + product
    if factors["k"] != -factors["q"]:
        raise _UnprovenError
    return total + factors["k"] * distance if factors["k"] else total


def _evaluate_atom(atom: Atom, distance: np.ndarray) -> np.ndarray:
    args = atom.args
    match atom.kind:
        case "abs":
            return np.asarray(np.abs(_evaluate_int(_as_int(args[0]), distance)))
        case "min" | "max":
            both = [_evaluate_int(_as_int(a), distance) for a in args]
            return np.asarray(np.minimum(*both) if atom.kind == "min" else np.maximum(*both))
        case "div" | "mod":
            divisor = args[1] if isinstance(args[1], int) else _as_int(args[1]).constant
            if not divisor or divisor < 0:
                raise _UnprovenError
            dividend = _evaluate_int(_as_int(args[0]), distance)
            return np.asarray(dividend // divisor if atom.kind == "div" else dividend % divisor)
        case "select":
            yes, no = (_evaluate_int(_as_int(a), distance) for a in args[1:])
            return np.where(_evaluate_condition(args[0], distance), yes, no)
        case "bool":
            return np.asarray(_evaluate_condition(args[0], distance), np.int64)
        case "trunc":
            real = np.nan_to_num(_evaluate_real(args[0], distance), nan=0.0, posinf=_HUGE, neginf=-_HUGE)
            return np.asarray(np.trunc(np.clip(real, -_HUGE, _HUGE)), np.int64)
    raise _UnprovenError


def _as_int(value: object) -> Int:
    if not isinstance(value, Int):
        raise _UnprovenError
    return value


def _evaluate_condition(value: object, distance: np.ndarray) -> np.ndarray:
    if not isinstance(value, Cond):
        raise _UnprovenError
    match value.kind:
        case "true":
            return np.ones(1, np.bool_)
        case "false":
            return np.zeros(1, np.bool_)
        case "le":
            return np.asarray(_evaluate_int(_as_int(value.args[0]), distance) <= 0)
        case "eq":
            return np.asarray(_evaluate_int(_as_int(value.args[0]), distance) == 0)
        case "ne":
            return np.asarray(_evaluate_int(_as_int(value.args[0]), distance) != 0)
        case "and" | "or":
            unite = np.logical_and if value.kind == "and" else np.logical_or
            return np.asarray(reduce(unite, (_evaluate_condition(c, distance) for c in value.args)))
    raise _UnprovenError


def _evaluate_real(value: object, distance: np.ndarray) -> np.ndarray:
    if not isinstance(value, Real):
        raise _UnprovenError
    args = value.args
    with np.errstate(all="ignore"):
        match value.kind:
            case "const":
                return np.full(1, float(args[0]))  # type: ignore[arg-type]
            case "int" | "rounded":  # the fp32 value: a half-precision graph is executed so
                return np.asarray(_evaluate_int(_as_int(args[0]), distance), np.float64)
            case "add":
                return np.asarray(_evaluate_real(args[0], distance) + _evaluate_real(args[1], distance))
            case "sub":
                return np.asarray(_evaluate_real(args[0], distance) - _evaluate_real(args[1], distance))
            case "mul":
                return np.asarray(_evaluate_real(args[0], distance) * _evaluate_real(args[1], distance))
            case "div":
                return np.asarray(_evaluate_real(args[0], distance) / _evaluate_real(args[1], distance))
            case "neg":
                return -_evaluate_real(args[0], distance)
            case "min" | "max":
                both = [_evaluate_real(a, distance) for a in args]
                return np.asarray(np.minimum(*both) if value.kind == "min" else np.maximum(*both))
            case "bool":
                return np.asarray(_evaluate_condition(args[0], distance), np.float64)
            case "select":
                yes, no = (_evaluate_real(a, distance) for a in args[1:])
                return np.where(_evaluate_condition(args[0], distance), yes, no)
            case "opaque" if args[0] in _FUNCTIONS and len(args) == 2:
                return np.asarray(_FUNCTIONS[str(args[0])](_evaluate_real(args[1], distance)))
    raise _UnprovenError
