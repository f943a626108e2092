# SPDX-License-Identifier: Apache-2.0
"""Sizes of a model's dimensions, chosen by the lengths that result at its attention."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from stof.errors import UnsupportedError
from stof.execution.case import Case
from stof.symbolic import LONGEST, Symbolic
from stof.symbolic.algebra.equations import Equation, solve_equations, substitute
from stof.symbolic.algebra.sizes import evaluate, evaluate_or_none, size_names
from stof.symbolic.algebra.terms import Int, dim, integer

_SIDES = 257  # sizes of a side of an image that are tried
_ONE_TOKEN = 10  # below this length a step of a static cache is one token
_EXCESS, _SHORT = 4, 512  # scores may be so many times as long as the case, and so long anyway
# Whether a case, with sizes that were chosen for it, takes the branches of an If: the tensors that decide, and their values.
IsTaken = Callable[[Sequence[tuple[str, bool]], Case, Mapping[str, int]], bool]


class InputSizes:
    """Chooses the sizes of dimensions. Those that are equal to others, or to numbers, in every valid run are chosen as one.

    Args:
        symbolic: shapes, sizes that are equal in a valid run, and lengths for which look-ups stay inside their tables.
        shapes: of the model's inputs.
        scores: the shapes of scores, with queries and keys last.
        row_lengths: shapes of inputs that hold the lengths of rows, each with the size that bounds them.
        caches: the capacity of each static cache, and how many positions a step writes to it.
        is_taken: whether a case, with sizes chosen before, takes the branch of these conditions; None: no branch is known.
        branch: sizes that are equal in the branches that are taken.

    Attributes:
        lengths: the numbers of queries and keys of all scores.
        batch_names: dimensions that count rows of a batch.
        fixed: what failed runs have shown that dimensions must be.
        most: likewise, what they may be at most.
        limits: sizes that are at most others for look-ups to stay inside their tables.
    """

    def __init__(
        self,
        symbolic: Symbolic,
        shapes: Sequence[Sequence[Int]],
        scores: Sequence[Sequence[Int]],
        row_lengths: Sequence[tuple[Sequence[Int], Int]] = (),
        caches: Sequence[tuple[Int, Int]] = (),
        is_taken: IsTaken | None = None,
        branch: tuple[Equation, ...] = (),
    ) -> None:
        self._make = partial(InputSizes, symbolic, shapes, scores, row_lengths, caches)
        self._symbolic, self._is_taken = symbolic, is_taken
        self._names = list(dict.fromkeys(n for shape in shapes for d in shape for n in sorted(size_names(d))))
        # What some exporters call a size that they took for dynamic and found fixed.
        numbers = [(dim(n), integer(int(n))) for n in self._names if n.isdecimal() and int(n) > 0]
        self._solved = solve_equations([*numbers, *symbolic.equalities, *branch], self._names)
        self._shapes = [self._merge(shape) for shape in shapes]
        self._caches = list(dict.fromkeys((self._merge(c)[0], self._merge(c)[1]) for c in caches))
        self.scores = [self._merge(shape) for shape in scores]
        limits = (*symbolic.lookup_limits, *symbolic.slice_limits)
        self._tables = [(a, b) for a, b in map(self._merge, limits) if a != b]
        self._divided = list(dict.fromkeys(d for shape in self.scores for d in shape if _divides(d)))
        # Sizes that strides and windows make; others are made to agree one by one.
        self._whole = [p for p in self._solved.rest if _divides(p[0]) or _divides(p[1])]
        self._batches = self._find_batch_names()
        for shape, most in row_lengths:
            self._batches -= size_names(self._merge([most])[0])
            self._batches |= size_names(self._merge(shape)[0]) if len(shape) == 1 else set()
        self.batch_names = {n for n in self._names if self._solved.name_of(n) in self._batches}
        # Words of a classifier are no length, nor is what counts rows of a batch.
        dims = dict.fromkeys(d for shape in self.scores for d in shape[-2:])
        self.lengths = [d for d in dims if (names := size_names(d)) and not names & self._batches]
        self.fixed: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.limits = symbolic.lookup_limits
        self._by_branch: dict[tuple[Equation, ...], InputSizes] = {}
        self._fitted: dict[object, Case] = {}

    def _merge(self, shape: Sequence[Int]) -> tuple[Int, ...]:
        """Sizes with one dimension for all that are equal."""
        return tuple(substitute(d, self._solved.values) for d in shape)

    def _find_batch_names(self) -> set[str]:
        """Dimensions that lead: of a vector, unless others have it behind their batch, or it is equal to such lengths."""
        shapes = [s for s in self._shapes if s]
        leading, alone = (
            {str(s[0].atom.args[0]) for s in shapes if (len(s) > 1) == several and s[0].atom is not None}
            for several in (True, False)
        )
        behind = {n for s in shapes for d in s[1:] for n in size_names(d)}
        pairs = [p for pair in self._solved.rest for p in (pair, pair[::-1])]
        equal = {n for one, other in pairs if size_names(other) & behind for n in size_names(one)}
        # A mask [S, S] leads with a length, which scores have behind the batch.
        first = {n for s in self.scores for d in s[:-2] for n in size_names(d)}
        last = {n for s in self.scores for d in s[-2:] for n in size_names(d)}
        # So does a table [M, D] whose rows are looked up by positions along lengths.
        rows = {n for needed, size in self._tables if not size_names(needed) <= leading for n in size_names(size)}
        return (leading - ((behind & last | rows) - first)) | (alone - behind - equal)

    @property
    def changed_names(self) -> set[str]:
        """Dimensions whose sizes failed runs have changed."""
        return {*self.fixed, *self.most}

    def fit(self, case: Case) -> Case:
        """The case, or a shorter one where look-ups of positions would leave their tables."""
        key = case, len(self.limits), tuple(self.fixed.items()), tuple(self.most.items())
        if key not in self._fitted:
            self._fitted[key] = self._shorten(case)
        return self._fitted[key]

    def fit_slices(self, case: Case) -> bool:
        """Keeps slices inside their tables, too, from now on; says whether that makes a case shorter."""
        before = self.fit(case)
        self.limits = tuple(dict.fromkeys((*self.limits, *self._symbolic.slice_limits)))
        return self.fit(case) != before

    def _shorten(self, case: Case) -> Case:
        wrong = self._find_overrunning(self.choose(case))
        # What overruns a table at any length is no look-up of positions that grow.
        wrong = (
            [x for x in wrong if x not in self._find_overrunning(self.choose(replace(case, length=1)))] if wrong else []
        )
        low, high = 1, case.length
        while wrong and high - low > 1:
            middle = (low + high) // 2
            overruns = set(wrong) & set(self._find_overrunning(self.choose(replace(case, length=middle))))
            low, high = (low, middle) if overruns else (middle, high)
        return replace(case, length=low) if wrong else case

    def _find_overrunning(self, sizes: Mapping[str, int]) -> list[Equation]:
        """The look-ups whose positions are beyond their tables."""
        lookups: list[Equation] = []
        for needed, rows in self.limits:
            least, most = evaluate_or_none(needed, sizes), evaluate_or_none(rows, sizes)
            if least is not None and most is not None and least > most:
                lookups.append((needed, rows))
        return lookups

    def choose(self, case: Case) -> dict[str, int]:
        """Every dimension name at a case: leading ones are batches, all others lengths."""
        sizes = self._choose(case)
        branches = self._symbolic.inner_equalities if self._is_taken is not None else []
        taken = [b.pairs for b in branches if self._is_taken is not None and self._is_taken(b.conditions, case, sizes)]
        return self._of_branch(tuple(p for pairs in taken for p in pairs))._choose(case) if taken else sizes

    def _of_branch(self, equalities: tuple[Equation, ...]) -> InputSizes:
        """These dimensions where branches are taken in which further sizes are equal."""
        if equalities not in self._by_branch:
            inner = self._by_branch[equalities] = self._make(branch=equalities)
            inner.fixed, inner.most = self.fixed, self.most
        return self._by_branch[equalities]

    def _choose(self, case: Case) -> dict[str, int]:
        names = [n for n in self._names if n not in self._solved.values]
        sizes = {n: case.batch if n in self._batches else case.length for n in names}
        stated = {n: size for n, size in {**self.fixed, **dict(case.other)}.items() if n in self._names}
        merged_stated = {self._solved.name_of(n): size for n, size in stated.items() if self._solved.name_of(n)}
        sizes |= merged_stated
        self._fit_scores(sizes, case, merged_stated)
        self._leave_room(sizes, case, merged_stated)
        self._agree(sizes, case, set(merged_stated))
        self._enlarge_tables(sizes, set(merged_stated))
        self._settle(sizes)
        for name, most in self.most.items():
            if (merged := self._solved.name_of(name)) in sizes:
                sizes[merged] = min(sizes[merged], most)
        sizes |= merged_stated
        # A case may state sizes of names one by one. What runs have shown of one name holds for all that are equal to it.
        apart = {n: size for n, size in stated.items() if n in dict(case.other) or not self._solved.name_of(n)}
        return {n: evaluate(self._merge([dim(n)])[0], sizes) for n in self._names} | apart

    def _fit_scores(self, sizes: dict[str, int], case: Case, stated: Mapping[str, int]) -> None:
        """Chooses dimensions for scores of the case's length: frames of so many samples, patches of an image.

        Where scores of several lengths depend on a dimension, all are at least that long, unless others become far longer.
        """
        wanted: dict[str, list[int]] = {}
        for size in self.lengths:
            names = size_names(size) - self._batches - set(stated)
            if not names or (not _divides(size) and not self._multiplies(size)):
                continue
            least = find_least(size, names, case.batch, case.length, stated)
            # A side of an image alone is no length.
            usual = least if self._multiplies(size) else max(least, case.length)
            for name in names & set(sizes):
                wanted.setdefault(name, []).append(usual)
        for name in set(wanted) & self._plain_names():
            wanted[name].append(case.length)
        sizes |= {name: max(options) for name, options in wanted.items()}
        if self._find_longest(sizes) > max(_EXCESS * case.length, _SHORT):
            sizes |= {name: min(options) for name, options in wanted.items()}

    def _leave_room(self, sizes: dict[str, int], case: Case, stated: Mapping[str, int]) -> None:
        """Makes steps shorter than the caches that they write to, which then have keys before them. Short cases are one token."""
        free = set(sizes) - set(stated) - self._batches
        for capacity, new in self._caches:
            for size, other in ((capacity, new), (new, capacity)):
                name = "" if size.atom is None or size.atom.kind != "size" else str(size.atom.args[0])
                if name not in free or name in size_names(other) or not size_names(other) <= set(sizes):
                    continue
                limit = evaluate(other, sizes)
                if size is new:
                    step = 1 if case.length < _ONE_TOKEN else case.length // 3
                    sizes[name] = max(1, min(step, limit // 2))
                elif other.constant is not None:
                    sizes[name] = max(sizes[name], 2 * limit)

    def _multiplies(self, size: Int) -> bool:
        """Whether a size is a product of dimensions, also of parts of them."""
        return any(len(_factors(monomial) - self._batches) > 1 for monomial, _ in size.terms) or any(
            isinstance(inner, Int) and self._multiplies(inner) for atom in size.atoms() for inner in atom.args
        )

    def _plain_names(self) -> set[str]:
        return {str(d.atom.args[0]) for d in self.lengths if d.atom is not None and d.atom.kind == "size"}

    def _find_longest(self, sizes: Mapping[str, int]) -> int:
        """The length of the longest scores."""
        lengths = (evaluate_or_none(size, sizes) for size in self.lengths)
        return max((n for n in lengths if n is not None), default=0)

    def _agree(self, sizes: dict[str, int], case: Case, solved: set[str]) -> None:
        """Makes sizes agree that must be equal in a valid run: the mask's length and that of past and new keys, say.

        What is solved stays.
        """
        for pair in self._solved.rest:
            for alone, other in (pair, pair[::-1]):
                if alone.constant is not None:
                    solved |= self._fix(other, alone.constant, sizes, solved, case)
                atom = alone.atom
                name = "" if atom is None or atom.kind != "size" else str(atom.args[0])
                used = {str(a.args[0]) for a in other.atoms() if a.kind == "size"}
                if name not in sizes or name in solved | used or not used <= set(sizes):
                    continue
                if name in self._batches and not used <= self._batches:
                    continue
                lengths = sorted(used - self._batches - solved)
                if len(lengths) > 1:  # different ones, lest a past as long as the queries hide which is which
                    sizes[lengths[0]] = case.length // 2 + 1
                try:
                    size = evaluate(other, sizes)
                except UnsupportedError:
                    continue
                if size < 1:
                    continue
                sizes[name] = size
                solved |= {name, *used}
                break
            else:
                solved |= self._balance(*pair, sizes, solved)

    def _balance(self, one: Int, other: Int, sizes: dict[str, int], solved: set[str]) -> set[str]:
        """Makes two sums equal by the lengths in them that are free: those of past and new keys where a mask's is stated."""
        difference = one - other
        names = size_names(difference)
        if not names <= set(sizes) or evaluate_or_none(difference, sizes) in (None, 0):
            return set()
        factors = {str(m[0].args[0]): c for m, c in difference.terms if len(m) == 1 and m[0].kind == "size"}
        bound = {n for a in difference.atoms() if a.kind != "size" for n in size_names(Int((((a,), 1),)))}
        bound |= {n for m, _ in difference.terms if len(m) > 1 for n in _factors(m)}
        free = [n for n, c in factors.items() if abs(c) == 1 and n not in solved | self._batches | bound]
        if len(free) > 1 and factors[free[0]] == factors[free[1]]:
            # Two lengths share what is left: about half of it is the first one's.
            whole = -factors[free[0]] * evaluate(difference, {**sizes, free[0]: 0, free[1]: 0})
            sizes[free[0]] = max(1, min(sizes[free[0]], whole // 2 + 1, whole - 1))
            free = free[1:]
        for name in free:
            rest = evaluate(difference, {**sizes, name: 0})
            if -factors[name] * rest >= (0 if len(free) == 1 else 1):
                sizes[name] = -factors[name] * rest
                return names
        return set()

    def _enlarge_tables(self, sizes: dict[str, int], stated: Collection[str]) -> None:
        """Gives tables whose rows are a dimension of their own as many rows as are looked up."""
        tied = {n for pair in self._solved.rest for size in pair for n in size_names(size)}
        for needed, rows in self._tables:
            least, most = evaluate_or_none(needed, sizes), evaluate_or_none(rows, sizes)
            if least is None or most is None or least <= most:
                continue
            for name in size_names(rows) & set(sizes) - tied - set(stated) - self._batches - size_names(needed):
                sizes[name] = max(sizes[name], find_least(rows, {name}, 1, least, sizes))

    def _settle(self, sizes: dict[str, int]) -> None:
        """Makes lengths larger until all sizes agree and scores are not empty: an image of whole windows, say."""
        wrong = self._find_disagreeing(sizes)
        names = set().union(*(size_names(size) for size in wrong)) & set(sizes)
        names = {n for n in names - self._batches if not n.isdigit()}
        least = max((sizes[n] for n in names), default=0)
        for length in range(least, least + _SIDES) if names else []:
            tried = {**sizes, **dict.fromkeys(names, length)}
            if not self._find_disagreeing(tried):
                sizes |= tried
                return
        if wrong:
            self._whole = []  # no sizes make them agree: they are not looked for again

    def _find_disagreeing(self, sizes: dict[str, int]) -> list[Int]:
        """Sizes that are equal in a valid run and are not, and sizes of scores that are nothing."""
        unequal: list[Int] = []
        for one, other in self._whole:
            with contextlib.suppress(UnsupportedError, ZeroDivisionError):
                if evaluate(one, sizes) != evaluate(other, sizes):
                    unequal += [one, other]
        for size in self._divided:
            with contextlib.suppress(UnsupportedError, ZeroDivisionError):
                if evaluate(size, sizes) < 1:
                    unequal.append(size)
        return unequal

    def _fix(self, size: Int, wanted: int, sizes: dict[str, int], solved: set[str], case: Case) -> set[str]:
        """Gives dimensions the value with which a size is a constant: patches of an image, one for each stored position."""
        names = size_names(size) - self._batches
        if not names or names & solved or not names <= set(sizes):
            return set()
        # All of them alike; or one of another size, as an image that is not square.
        first, *_ = sorted(names)
        for assumed in [{}, *({first: n} for n in range(1, _SIDES))] if len(names) > 1 else [{}]:
            rest = names - set(assumed)
            values = {**assumed, **dict.fromkeys(rest, find_least(size, rest, case.batch, wanted, assumed))}
            try:
                reached = evaluate(size, {**dict.fromkeys(size_names(size), case.batch), **values})
            except UnsupportedError:
                return set()
            if reached == wanted:
                sizes |= values
                return names
        return set()


def _divides(size: Int) -> bool:
    return any(a.kind in ("div", "mod") for a in size.atoms())


def _factors(monomial: Sequence[object]) -> set[str]:
    """The dimensions of which a product has multiples or parts."""
    return {name for atom in monomial for name in size_names(Int((((atom,), 1),)))}  # type: ignore[arg-type]


def find_least(
    size: Int, names: Collection[str], batch: int, wanted: int, other_sizes: Mapping[str, int] | None = None
) -> int:
    """The least value of dimensions with which a size that grows with them is as large as wanted, others as ``other_sizes``."""

    def reaches(n: int) -> bool:
        others = {**dict.fromkeys(size_names(size), batch), **(other_sizes or {})}
        return evaluate(size, {**others, **dict.fromkeys(names, n)}) >= wanted

    try:
        high = 1
        while not reaches(high):
            high *= 2
            if high > LONGEST:
                return 1
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if reaches(middle) else (middle, high)
    except (UnsupportedError, ZeroDivisionError):
        return 1
    return high
