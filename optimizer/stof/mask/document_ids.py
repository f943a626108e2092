# SPDX-License-Identifier: Apache-2.0
"""What equal running counts say of positions: documents side by side, kept apart by positions that begin again.

Where C counts the places j at which Y(j) - Y(j-1) is not s, two places with the same count have none between them: so
Y(k) - Y(q) = s * (k - q) there. A mask that asks for the same count and compares Y as well compares k and q.
"""

from __future__ import annotations

from stof.symbolic import Cond, Int, Symbolic, integer, var
from stof.symbolic.algebra.conditions import all_of, any_of, children, equal, less_equal, negate
from stof.symbolic.algebra.domain import Domain
from stof.symbolic.algebra.terms import Atom

_Place = tuple[Int, Int]  # of a read: batch, position


def in_order(symbolic: Symbolic, cond: Cond) -> Cond:
    """An equal condition, in which what equal counts say is put in."""
    if cond.kind == "or":
        return any_of(in_order(symbolic, c) for c in children(cond))
    if cond.kind != "and":
        return cond
    parts = [in_order(symbolic, c) if c.kind == "or" else c for c in children(cond)]
    for same in list(parts):
        found = _same_count(symbolic, same)
        if found is not None:
            steps, first, second = found
            parts = [p if p == same else _stepped(p, steps, first, second) for p in parts]
    return all_of(parts)


def _same_count(symbolic: Symbolic, cond: Cond) -> tuple[dict[str, int], _Place, _Place] | None:
    """Of ``C(b, k) == C(b, q)``: the tensors that then grow with the position, by how much, and both places."""
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


def _read(atom: Atom) -> tuple[str, _Place] | None:
    if atom.kind != "read" or not isinstance(atom.args[1], tuple) or len(atom.args[1]) != 2:
        return None
    batch, place = atom.args[1]
    return (str(atom.args[0]), (batch, place)) if isinstance(batch, Int) and isinstance(place, Int) else None


def _steps(symbolic: Symbolic, counts: str) -> dict[str, int]:
    """The tensors that grow by a number from place to place, wherever a running count [B, L] stays the same."""
    source = symbolic.running_sums.get(counts)
    shape = symbolic.shape(counts)
    tensor = None if source is None else symbolic.value(source)
    if tensor is None or shape is None or len(shape) != 2 or tensor.kind != "i":
        return {}
    zero, one = integer(0), integer(1)
    batch, place = var("b"), var("place")
    domain = Domain({"b": (zero, shape[0] - one), "place": (one, shape[1] - one)})
    counted = domain.integer(tensor.at((batch, place)))  # type: ignore[arg-type]
    if len(counted.terms) != 1 or counted.terms[0][1] != 1 or len(counted.terms[0][0]) != 1:
        return {}
    atom = counted.terms[0][0][0]
    cond = atom.args[0]
    if atom.kind != "bool" or not isinstance(cond, Cond) or cond.kind != "ne" or not isinstance(cond.args[0], Int):
        return {}
    # 0 = Y(place) - Y(place - 1) - step, or the negative of that, is what is not counted.
    found: dict[tuple[str, Int], int] = {}
    step = 0
    for monomial, coefficient in cond.args[0].terms:
        if not monomial:
            step = coefficient
            continue
        read = _read(monomial[0]) if len(monomial) == 1 else None
        if read is None or read[1][0] != batch or abs(coefficient) != 1:
            return {}
        found[read[0], read[1][1]] = coefficient
    names = {name for name, _ in found}
    if len(found) != 2 or len(names) != 1:
        return {}
    name = names.pop()
    here, before = found.get((name, place)), found.get((name, place - one))
    return {name: -step * here} if here is not None and before == -here else {}


def _stepped(cond: Cond, steps: dict[str, int], first: _Place, second: _Place) -> Cond:
    """A condition on the difference of a tensor at two places, by that of the places."""
    if cond.kind in ("and", "or"):
        join = all_of if cond.kind == "and" else any_of
        return join(_stepped(c, steps, first, second) for c in children(cond))
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
