# SPDX-License-Identifier: Apache-2.0
"""Sizes of a model's dimensions, chosen by the lengths that result at its attention."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence

from stof.errors import UnsupportedError
from stof.execution.case import Case
from stof.symbolic import Symbolic
from stof.symbolic.algebra.sizes import evaluate, size_names
from stof.symbolic.algebra.terms import Int

_LARGEST_INPUT = 1 << 22
_SIDES = 257  # sizes of a side of an image that are tried
_ONE_TOKEN = 10  # below this length a step of a static cache is one token
_EXCESS, _SHORT = 4, 512  # scores may be so many times as long as the case, and so long anyway


class InputSizes:
    """Chooses the sizes of dimensions.

    Args:
        symbolic: shapes, and sizes that are equal in a valid run.
        shapes: of the model's inputs.
        scores: the shapes of scores, with queries and keys last.
        row_lengths: shapes of inputs that hold the lengths of rows, each with the size that bounds them.
        caches: the capacity of each static cache, and how many positions a step writes to it.

    Attributes:
        lengths: the numbers of queries and keys of all scores.
        batch_names: dimensions that count rows of a batch.
    """

    def __init__(
        self,
        symbolic: Symbolic,
        shapes: Sequence[Sequence[Int]],
        scores: Sequence[Sequence[Int]],
        row_lengths: Sequence[tuple[Sequence[Int], Int]] = (),
        caches: Sequence[tuple[Int, Int]] = (),
    ) -> None:
        self._symbolic = symbolic
        self._shapes = shapes
        self._caches = list(dict.fromkeys(caches))
        self._divided = list(dict.fromkeys(d for shape in scores for d in shape if _divides(d)))
        # Sizes that strides and windows make; others are made to agree one by one.
        self._whole = [p for p in symbolic.equalities if _divides(p[0]) or _divides(p[1])]
        self.batch_names = self._find_batch_names()
        for shape, most in row_lengths:
            self.batch_names -= size_names(most)
            self.batch_names |= size_names(shape[0]) if len(shape) == 1 else set()
        # Words of a classifier are no length, nor is what counts rows of a batch.
        dims = dict.fromkeys(d for shape in scores for d in shape[-2:])
        self.lengths = [d for d in dims if (names := size_names(d)) and not names & self.batch_names]
        self.scores = scores
        self.fixed: dict[str, int] = {}  # what failed runs have shown that dimensions must be
        self.most: dict[str, int] = {}  # likewise, may be at most

    def _find_batch_names(self) -> set[str]:
        """Dimensions that lead: of a vector, unless others have it behind their batch, or it is equal to such lengths."""
        shapes = [s for s in self._shapes if s]
        found, alone = (
            {str(s[0].atom.args[0]) for s in shapes if (len(s) > 1) == several and s[0].atom is not None}
            for several in (True, False)
        )
        behind = {n for s in shapes for d in s[1:] for n in size_names(d)}
        pairs = [p for pair in self._symbolic.equalities for p in (pair, pair[::-1])]
        equal = {n for one, other in pairs if size_names(other) & behind for n in size_names(one)}
        return found | (alone - behind - equal)

    @property
    def changed_names(self) -> set[str]:
        """Dimensions whose sizes failed runs have changed."""
        return {*self.fixed, *self.most}

    def choose(self, case: Case) -> dict[str, int]:
        """Every dimension name at a case: leading ones are batches, all others lengths."""
        found: dict[str, int] = {}
        for shape in self._shapes:
            for dim in shape:
                for atom in dim.atoms():
                    name = str(atom.args[0])
                    found[name] = case.batch if name in self.batch_names else case.length
                    if name.isdigit():  # what some exporters call a size that they took for dynamic and found fixed
                        found[name] = int(name)
        stated = {**self.fixed, **dict(case.other)}
        stated = {name: size for name, size in stated.items() if name in found}
        found |= stated
        self._fit_scores(found, case, stated)
        self._leave_room(found, case, stated)
        self._agree(found, case, set(stated))
        self._settle(found)
        found |= {name: min(found[name], most) for name, most in self.most.items() if name in found}
        return found | stated

    def _fit_scores(self, sizes: dict[str, int], case: Case, stated: Mapping[str, int]) -> None:
        """Chooses dimensions for scores of the case's length: frames of so many samples, patches of an image.

        Where scores of several lengths depend on a dimension, all are at least that long, unless others become far longer.
        """
        wanted: dict[str, list[int]] = {}
        for size in self.lengths:
            names = size_names(size) - self.batch_names - set(stated)
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
        if self._longest(sizes) > max(_EXCESS * case.length, _SHORT):
            sizes |= {name: min(options) for name, options in wanted.items()}

    def _leave_room(self, sizes: dict[str, int], case: Case, stated: Mapping[str, int]) -> None:
        """Makes steps shorter than the caches that they write to, which then have keys before them. Short cases are one token."""
        free = set(sizes) - set(stated) - self.batch_names
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
        return any(len(_factors(monomial) - self.batch_names) > 1 for monomial, _ in size.terms) or any(
            isinstance(inner, Int) and self._multiplies(inner) for atom in size.atoms() for inner in atom.args
        )

    def _plain_names(self) -> set[str]:
        return {str(d.atom.args[0]) for d in self.lengths if d.atom is not None and d.atom.kind == "size"}

    def _longest(self, sizes: Mapping[str, int]) -> int:
        """The length of the longest scores."""
        found = 0
        for size in self.lengths:
            with contextlib.suppress(UnsupportedError, ZeroDivisionError):
                found = max(found, evaluate(size, sizes))
        return found

    def _agree(self, sizes: dict[str, int], case: Case, solved: set[str]) -> None:
        """Makes sizes agree that must be equal in a valid run: the mask's length and that of past and new keys, say.

        What is solved stays.
        """
        for pair in self._symbolic.equalities:
            for alone, other in (pair, pair[::-1]):
                if alone.constant is not None:
                    solved |= self._fix(other, alone.constant, sizes, solved, case)
                atom = alone.atom
                name = "" if atom is None or atom.kind != "size" else str(atom.args[0])
                used = {str(a.args[0]) for a in other.atoms() if a.kind == "size"}
                if name not in sizes or name in solved | used or not used <= set(sizes) or name in self.batch_names:
                    continue
                lengths = sorted(used - self.batch_names - solved)
                if len(lengths) > 1:  # different ones, lest a past as long as the queries hide which is which
                    sizes[lengths[0]] = case.length // 2 + 1
                try:
                    found = evaluate(other, sizes)
                except UnsupportedError:
                    continue
                if found < 1:
                    continue
                sizes[name] = found
                solved |= {name, *used}
                break

    def _settle(self, sizes: dict[str, int]) -> None:
        """Makes lengths larger until all sizes agree and scores are not empty: an image of whole windows, say."""
        wrong = self._disagreeing(sizes)
        names = set().union(*(size_names(size) for size in wrong)) & set(sizes)
        names = {n for n in names - self.batch_names if not n.isdigit()}
        least = max((sizes[n] for n in names), default=0)
        for length in range(least, least + _SIDES) if names else []:
            tried = {**sizes, **dict.fromkeys(names, length)}
            if not self._disagreeing(tried):
                sizes |= tried
                return
        if wrong:
            self._whole = []  # no sizes make them agree: they are not looked for again

    def _disagreeing(self, sizes: dict[str, int]) -> list[Int]:
        """Sizes that are equal in a valid run and are not, and sizes of scores that are nothing."""
        found: list[Int] = []
        for one, other in self._whole:
            with contextlib.suppress(UnsupportedError, ZeroDivisionError):
                if evaluate(one, sizes) != evaluate(other, sizes):
                    found += [one, other]
        for size in self._divided:
            with contextlib.suppress(UnsupportedError, ZeroDivisionError):
                if evaluate(size, sizes) < 1:
                    found.append(size)
        return found

    def _fix(self, size: Int, wanted: int, sizes: dict[str, int], solved: set[str], case: Case) -> set[str]:
        """Gives dimensions the value with which a size is a constant: patches of an image, one for each stored position."""
        names = size_names(size) - self.batch_names
        if not names or names & solved or not names <= set(sizes):
            return set()
        # All of them alike; or one of another size, as an image that is not square.
        first, *_ = sorted(names)
        for given in [{}, *({first: n} for n in range(1, _SIDES))] if len(names) > 1 else [{}]:
            rest = names - set(given)
            found = {**given, **dict.fromkeys(rest, find_least(size, rest, case.batch, wanted, given))}
            try:
                reached = evaluate(size, {**dict.fromkeys(size_names(size), case.batch), **found})
            except UnsupportedError:
                return set()
            if reached == wanted:
                sizes |= found
                return names
        return set()


def _divides(size: Int) -> bool:
    return any(a.kind in ("div", "mod") for a in size.atoms())


def _factors(monomial: Sequence[object]) -> set[str]:
    """The dimensions of which a product has multiples or parts."""
    return {name for atom in monomial for name in size_names(Int((((atom,), 1),)))}  # type: ignore[arg-type]


def find_least(
    size: Int, names: Collection[str], batch: int, wanted: int, given: Mapping[str, int] | None = None
) -> int:
    """The least value of dimensions with which a size that grows with them is as large as wanted, others as ``given``."""

    def reaches(n: int) -> bool:
        others = {**dict.fromkeys(size_names(size), batch), **(given or {})}
        return evaluate(size, {**others, **dict.fromkeys(names, n)}) >= wanted

    try:
        high = 1
        while not reaches(high):
            high *= 2
            if high > _LARGEST_INPUT:
                return 1
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if reaches(middle) else (middle, high)
    except (UnsupportedError, ZeroDivisionError):
        return 1
    return high
