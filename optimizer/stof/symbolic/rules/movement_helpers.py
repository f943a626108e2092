# SPDX-License-Identifier: Apache-2.0
"""Helpers of the rules of movement operators."""

from __future__ import annotations

from functools import lru_cache

from stof.symbolic.algebra.divisions import floor_mod
from stof.symbolic.algebra.int_bounds import may_be_negative
from stof.symbolic.algebra.terms import Atom, Int, integer, subterms
from stof.symbolic.facts import Fact, RuleContext, dtype_kind
from stof.symbolic.tensor import Shape, SymTensor

ONE = integer(1)


@lru_cache(maxsize=1 << 14)
def element_count(shape: Shape) -> Int:
    """The number of elements."""
    result = ONE
    for d in shape:
        result = result * d
    return result


def moved_fact(context: RuleContext, shape: Shape, function: object, source: int = 0) -> Fact:
    """The fact of an output whose elements are elements of input ``source``, chosen by ``function``."""
    fact = context.fact(source)
    kind = dtype_kind(fact.dtype)
    if fact.value is None or kind is None:
        return Fact(fact.dtype, shape)
    return Fact(fact.dtype, shape, SymTensor(shape, kind, function))  # type: ignore[arg-type]


def wrap_index(index: Int, limit: Int) -> Int:
    """An index into an axis of size ``limit``; a negative one counts from the end, and one that is read may be either."""
    if index.constant is not None:
        return index + limit if index.constant < 0 else index
    if (
        limit.constant
        and any(isinstance(p, Atom) and p.kind == "read" for p in subterms(index))
        and may_be_negative(index)
    ):
        return floor_mod(index, limit.constant)  # right for all indices of a valid run
    return index
