# SPDX-License-Identifier: Apache-2.0
"""Simplifies conditions for indices within their limits: ``k + 1 <= T`` holds for k < T, and ``(q * T + k) // T`` is q."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from stof.symbolic.algebra.conditions import all_of, any_of, children, equal, less_equal, negate
from stof.symbolic.algebra.int_bounds import bound, rebuild
from stof.symbolic.algebra.terms import FALSE, TRUE, Atom, Cond, Int, integer, of_atom

ZERO = integer(0)
_MAX_STEPS = 16  # of a polynomial division


@dataclass(frozen=True)
class Domain:
    """The limits of index variables, and simplification within them."""

    limits: Mapping[str, tuple[Int, Int]]  # by name: least and largest value
    memo: dict[Cond, Cond] = field(default_factory=dict)

    def simplify(self, cond: Cond) -> Cond:
        """An equal condition for indices within their limits."""
        simplified = self.memo.get(cond)
        if simplified is None:
            simplified = self.memo[cond] = self._simplify(cond)
        return simplified

    def _simplify(self, cond: Cond) -> Cond:
        if cond.kind in ("and", "or"):
            join = all_of if cond.kind == "and" else any_of
            return join(self.simplify(c) for c in children(cond))
        if cond.kind in ("le", "eq", "ne"):
            value = cond.args[0]
            assert isinstance(value, Int)
            return self._test(cond.kind, self.integer(value))
        if cond.kind in ("read", "unread", "table", "untable"):
            name, indices = cond.args
            assert isinstance(indices, tuple)
            return Cond(cond.kind, (name, tuple(self.integer(i) for i in indices)))
        return cond

    def _test(self, kind: str, value: Int) -> Cond:
        high, low = self.bound(value, upper=True), self.bound(value, upper=False)
        if kind == "le":
            if high <= 0:
                return TRUE
            if low > 0:
                return FALSE
            return self._split_le(value) or less_equal(value, ZERO)
        if low > 0 or high < 0:
            return FALSE if kind == "eq" else TRUE
        same = self._split_eq(value) or equal(value, ZERO)
        return same if kind == "eq" else negate(same)

    def _split_le(self, value: Int) -> Cond | None:
        """``value <= 0`` where a term is min or max: a condition on both arguments joined by and, or by or."""
        for monomial, coefficient in value.terms:
            if len(monomial) != 1 or monomial[0].kind not in ("min", "max"):
                continue
            rest = value - Int(((monomial, coefficient),))
            sums = [rest + a * integer(coefficient) for a in monomial[0].args if isinstance(a, Int)]
            both = (monomial[0].kind == "max") == (coefficient > 0)
            return (all_of if both else any_of)(self._test("le", x) for x in sums)
        return None

    def _split_eq(self, value: Int) -> Cond | None:
        """``value == 0`` where a term is min or max: max(a, b) == x is a == x where b <= a, and b == x elsewhere."""
        for monomial, coefficient in value.terms:
            if len(monomial) != 1 or monomial[0].kind not in ("min", "max"):
                continue
            rest = value - Int(((monomial, coefficient),))
            first, second = monomial[0].args
            assert isinstance(first, Int)
            assert isinstance(second, Int)
            chosen = self._test("le", second - first if monomial[0].kind == "max" else first - second)
            tests = [self._test("eq", rest + x * integer(coefficient)) for x in (first, second)]
            return any_of([all_of([chosen, tests[0]]), all_of([negate(chosen), tests[1]])])
        return None

    def bound(self, value: Int, *, upper: bool) -> float:
        """A bound of an integer for indices within their limits."""
        total = ZERO
        for monomial, coefficient in value.terms:
            term = Int(((monomial, coefficient),))
            indices = [a for a in monomial if a.kind == "var" and str(a.args[0]) in self.limits]
            if len(indices) == 1 and all(a.kind == "size" for a in monomial if a is not indices[0]):
                rest = list(monomial)
                rest.remove(indices[0])
                limit = self.limits[str(indices[0].args[0])][(coefficient > 0) == upper]
                term = Int(((tuple(rest), coefficient),)) * limit
            total = total + term
        # The plain bounds may be tighter where the remaining sizes have opposite signs.
        return (min if upper else max)(bound(total, upper), bound(value, upper))

    def integer(self, value: Int) -> Int:
        """An equal integer for indices within their limits, in simpler terms."""
        if all(a.kind in ("var", "size") for a in value.atoms()):
            return value
        total = ZERO
        for monomial, coefficient in value.terms:
            product = integer(coefficient)
            for atom in monomial:
                product = product * self._atom(atom)
            total = total + product
        return _collect_remainders(total)

    def _atom(self, atom: Atom) -> Int:
        args = tuple(self._argument(a) for a in atom.args)
        if atom.kind == "opaque" and len(args) == 3 and args[0] in ("division", "modulo", "remainder"):
            _, value, divisor = args
            assert isinstance(value, Int)
            assert isinstance(divisor, Int)
            return self._divide(str(args[0]), value, divisor)
        if atom.kind in ("bool", "select") and args[0] in (TRUE, FALSE):
            yes, no = args[1:] if atom.kind == "select" else (integer(1), ZERO)
            branch = yes if args[0] == TRUE else no
            assert isinstance(branch, Int)
            return branch
        if atom.kind in ("min", "max", "abs"):
            return self._order_extreme(atom.kind, args)
        if atom.kind in ("div", "mod"):
            return self._divide_by_constant(atom.kind, args)
        return of_atom(atom.kind, *args)

    def _divide_by_constant(self, kind: str, args: tuple[object, ...]) -> Int:
        """Quotient or remainder by a constant: ``(4 * b + h) // 4`` is b where h < 4."""
        value, divisor = args
        assert isinstance(value, Int)
        assert isinstance(divisor, int)
        if divisor > 0:
            if self.bound(value, upper=False) >= 0 and self.bound(value, upper=True) < divisor:
                return integer(0) if kind == "div" else value
            rest = Int(tuple((m, c) for m, c in value.terms if c % divisor))
            low, high = self.bound(rest, upper=False), self.bound(rest, upper=True)
            if math.isfinite(low) and math.isfinite(high) and low // divisor == high // divisor:
                quotient = integer(int(low // divisor))
                if kind == "mod":
                    return rest - quotient * integer(divisor)
                whole = (value - rest).divide(integer(divisor))
                assert whole is not None
                return whole + quotient
        return rebuild(kind, args)

    def _argument(self, arg: object) -> object:
        if isinstance(arg, Int):
            return self.integer(arg)
        if isinstance(arg, Cond):
            return self.simplify(arg)
        return tuple(self._argument(a) for a in arg) if isinstance(arg, tuple) else arg

    def _order_extreme(self, kind: str, args: tuple[object, ...]) -> Int:
        first, second = args[0], args[1] if len(args) > 1 else ZERO
        assert isinstance(first, Int)
        assert isinstance(second, Int)
        if kind == "abs":
            if self.bound(first, upper=False) >= 0:
                return first
            return -first if self.bound(first, upper=True) <= 0 else rebuild(kind, args)
        if self.bound(first - second, upper=True) <= 0:
            return first if kind == "min" else second
        if self.bound(second - first, upper=True) <= 0:
            return second if kind == "min" else first
        return rebuild(kind, args)

    def _divide(self, kind: str, value: Int, divisor: Int) -> Int:
        """Quotient or remainder by a size, or of a value that proves not to be negative."""
        if divisor.constant is not None and divisor.constant > 0 and self.bound(value, upper=False) >= 0:
            return rebuild("div" if kind == "division" else "mod", (value, divisor.constant))
        for quotient, rest in divisions(value, divisor):
            is_floor = kind == "modulo" or self.bound(quotient, upper=False) >= 0  # others truncate
            if is_floor and self.bound(rest, upper=False) >= 0 and self.bound(rest - divisor, upper=True) < 0:
                return quotient if kind == "division" else rest
        return of_atom("opaque", kind, value, divisor)


def _collect_remainders(value: Int) -> Int:
    """Rewrites x - n * (x // n) as x % n."""
    for monomial, coefficient in value.terms:
        if len(monomial) != 1 or monomial[0].kind != "div":
            continue
        inner, divisor = monomial[0].args
        assert isinstance(inner, Int)
        assert isinstance(divisor, int)
        if coefficient % divisor:
            continue
        times = integer(coefficient // divisor)
        other = value - Int(((monomial, coefficient),)) + inner * times - of_atom("mod", inner, divisor) * times
        if len(other.terms) < len(value.terms):
            return _collect_remainders(other)
    return value


def divisions(value: Int, divisor: Int) -> Iterator[tuple[Int, Int]]:
    """Ways to write a polynomial as quotient * divisor + rest, one for each leading term of the divisor."""
    for lead in divisor.terms:
        if not lead[0] or abs(lead[1]) != 1:
            continue
        quotient, rest = ZERO, value
        for _ in range(_MAX_STEPS):
            step = next((x for t in rest.terms if (x := Int((t,)).divide(Int((lead,)))) is not None), None)
            if step is None:
                break
            quotient, rest = quotient + step, rest - step * divisor
        yield quotient, rest
