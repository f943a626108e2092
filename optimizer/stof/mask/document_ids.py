# SPDX-License-Identifier: Apache-2.0
"""Documents packed side by side: masks that ask for equal running counts, where counts rise with each new document.

Let C count the positions j at which Y(j) - Y(j-1) is not s. Between two positions of equal count there is no such j, so
Y(k) - Y(q) = s * (k - q). A mask that asks for equal counts and also compares Y thus compares k and q.
"""

from __future__ import annotations

from stof.symbolic import Cond, Int, Symbolic, integer, var
from stof.symbolic.algebra.conditions import all_of, any_of, children, equal, less_equal, negate
from stof.symbolic.algebra.domain import Domain
from stof.symbolic.algebra.terms import Atom

_Indices = tuple[Int, Int]  # of an element: batch, position


def use_equal_counts(symbolic: Symbolic, cond: Cond) -> Cond:
    """An equal condition. Beside equal counts, differences of tensors become differences of positions."""
    if cond.kind == "or":
        return any_of(use_equal_counts(symbolic, c) for c in children(cond))
    if cond.kind != "and":
        return cond
    conjuncts = [use_equal_counts(symbolic, c) if c.kind == "or" else c for c in children(cond)]
    for equality in list(conjuncts):
        equal_counts = _read_equal_counts(symbolic, equality)
        if equal_counts is not None:
            steps, first, second = equal_counts
            conjuncts = [c if c == equality else _use_steps(c, steps, first, second) for c in conjuncts]
    return all_of(conjuncts)


def _read_equal_counts(symbolic: Symbolic, cond: Cond) -> tuple[dict[str, int], _Indices, _Indices] | None:
    """Of ``C(b, k) == C(b, q)``: the tensors that then grow with the position, by how much, and the indices on both sides."""
    value = cond.args[0] if cond.kind == "eq" else None
    if not isinstance(value, Int) or len(value.terms) != 2 or sum(c for _, c in value.terms) != 0:
        return None
    left, right = (_read(m[0]) if len(m) == 1 else None for m, _ in value.terms)
    if abs(value.terms[0][1]) != 1 or left is None or right is None:
        return None
    (name, first), (other, second) = left, right
    if name != other or first[0] != second[0]:
        return None
    steps = _steps(symbolic, name)
    return (steps, first, second) if steps else None


def _read(atom: Atom) -> tuple[str, _Indices] | None:
    if atom.kind != "read" or not isinstance(atom.args[1], tuple) or len(atom.args[1]) != 2:
        return None
    batch, position = atom.args[1]
    return (str(atom.args[0]), (batch, position)) if isinstance(batch, Int) and isinstance(position, Int) else None


def _steps(symbolic: Symbolic, counts: str) -> dict[str, int]:
    """The tensors that grow by a number from position to position, wherever a running count [B, L] stays the same."""
    source = symbolic.running_sums.get(counts)
    shape = symbolic.shape(counts)
    tensor = None if source is None else symbolic.value(source)
    if tensor is None or shape is None or len(shape) != 2 or tensor.kind != "i":
        return {}
    zero, one = integer(0), integer(1)
    batch, position = var("b"), var("position")
    domain = Domain({"b": (zero, shape[0] - one), "position": (one, shape[1] - one)})
    counted = domain.integer(tensor.at((batch, position)))  # type: ignore[arg-type]
    if len(counted.terms) != 1 or counted.terms[0][1] != 1 or len(counted.terms[0][0]) != 1:
        return {}
    atom = counted.terms[0][0][0]
    cond = atom.args[0]
    if atom.kind != "bool" or not isinstance(cond, Cond) or cond.kind != "ne" or not isinstance(cond.args[0], Int):
        return {}
    # Positions with 0 = Y(position) - Y(position - 1) - step, or with its negative, are not counted.
    coefficients: dict[tuple[str, Int], int] = {}
    step = 0
    for monomial, coefficient in cond.args[0].terms:
        if not monomial:
            step = coefficient
            continue
        read = _read(monomial[0]) if len(monomial) == 1 else None
        if read is None or read[1][0] != batch or abs(coefficient) != 1:
            return {}
        coefficients[read[0], read[1][1]] = coefficient
    names = {name for name, _ in coefficients}
    if len(coefficients) != 2 or len(names) != 1:
        return {}
    name = names.pop()
    here, before = coefficients.get((name, position)), coefficients.get((name, position - one))
    return {name: -step * here} if here is not None and before == -here else {}


def _use_steps(cond: Cond, steps: dict[str, int], first: _Indices, second: _Indices) -> Cond:
    """A condition in which differences of tensors at two positions are those of the positions."""
    if cond.kind in ("and", "or"):
        unite = all_of if cond.kind == "and" else any_of
        return unite(_use_steps(c, steps, first, second) for c in children(cond))
    value = cond.args[0] if cond.kind in ("le", "eq", "ne") else None
    if not isinstance(value, Int):
        return cond
    for name, step in steps.items():
        here = there = 0
        rest = integer(0)
        for monomial, coefficient in value.terms:
            read = _read(monomial[0]) if len(monomial) == 1 else None
            if read == (name, first):
                here = coefficient
            elif read == (name, second):
                there = coefficient
            else:
                rest = rest + Int(((monomial, coefficient),))
        if here and here == -there:
            value = rest + (first[1] - second[1]) * integer(here * step)
    if cond.kind == "le":
        return less_equal(value, integer(0))
    same = equal(value, integer(0))
    return same if cond.kind == "eq" else negate(same)
