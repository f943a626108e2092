# SPDX-License-Identifier: Apache-2.0
"""Runs what a site adds to its result on chosen weights and rows, which shows the row that each weight is multiplied by.

A row of the table holds the digits of its number, a digit in each column, and keys that are compared in one run have the powers
of the base as their weights. So each column of a result holds a digit of every key's row. Of many keys a sample is compared so,
and all of them by sums: weights are small random numbers, and a wrong row makes another sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from stof.errors import UnsupportedError
from stof.execution.case import Case, Padding
from stof.mask.check.checker import MaskChecker
from stof.mask.check.run_masks import DoesNotRunError, score_sizes
from stof.mask.expression import MaskExpression
from stof.mask.relative_terms.check import MIN_LENGTHS, require_lengths
from stof.mask.relative_terms.table import FoundTable
from stof.mask.site import AttentionSite, LiftedMask, arrays_of
from stof.symbolic.algebra.sizes import evaluate

MOST_RUNS = 8  # at a size
MOST_BYTES = 1 << 30  # of the weights that a run is given
_LENGTHS = (1, 2, 3, 5, 8, 13, 24, 41)
_LARGEST_SUM = 1 << 14  # factors round it by less than the tolerance
_TOLERANCE = 0.01  # of the smallest weight, 1
_LARGEST_TOTAL = 1 << 18  # of all keys: what factors round is below the tolerance of sums
_TOLERANCE_OF_SUMS = 0.25


def check_values(
    checker: MaskChecker, site: AttentionSite, mask: LiftedMask, found: FoundTable, index: MaskExpression, factor: float
) -> None:
    """Compares the rows that weights meet with an index, and the heads whose rows they are, at several lengths.

    Layers share the comparison.

    Args:
        checker: of the model.
        site: whose result something is added to.
        mask: with the tables that the index reads.
        found: the table of rows.
        index: of the row of a pair.
        factor: of the product.

    Raises:
        UnsupportedError: where they differ, too few lengths run, or the weights are too large to be run.
    """
    key = _key(checker, site, mask, found, index, factor)
    if key in checker.row_runs:
        return
    added = site.added_values
    assert added is not None
    reads_inputs = checker.runner.inputs_behind(added.tensor, (added.weights, found.tensor))
    most = MIN_LENGTHS if reads_inputs else 1  # without inputs, equal sizes give the same rows again
    times: Counter[tuple[tuple[str, int], ...]] = Counter()
    compared: set[tuple[int, ...]] = set()
    refused: DoesNotRunError | None = None
    for length in _LENGTHS:
        case = _choose_batch(checker, site, length)
        sizes = tuple(sorted(checker.runner.sizes(case).items()))
        times[sizes] += 1
        if times[sizes] > most:
            continue
        try:
            run = _Run(checker, site, mask, found, case)
            run.compare(index, factor)
            compared.add(run.shape[2:])
        except DoesNotRunError as error:
            refused = error
    require_lengths(site, compared, refused)
    checker.row_runs[key] = True


def _key(
    checker: MaskChecker, site: AttentionSite, mask: LiftedMask, found: FoundTable, index: MaskExpression, factor: float
) -> tuple[object, ...]:
    """Equal for what equal nodes make of their weights and tables, of equal shapes."""
    added = site.added_values
    assert added is not None
    cut = {n: (i, checker.symbolic.shape(n)) for i, n in enumerate((added.weights, found.tensor))}
    operands = tuple((o.role, o.view, o.at, checker.hashes.of(o.tensor)) for o in mask.operands)
    drawn = mask.expression, mask.tables, operands  # inputs are drawn for them
    own = replace(found, tensor=""), index, factor, site.dims, site.query_offset, site.value_head_size
    return ("values", checker.hashes.of_cut(added.tensor, cut), *own, *drawn)


def _choose_batch(checker: MaskChecker, site: AttentionSite, length: int) -> Case:
    """Two texts of a length, or one where the weights of two are too large.

    Raises:
        UnsupportedError: where those of one are, too.
    """
    size = 0
    for batch in (2, 1):
        case = Case(batch, length, Padding.NONE)
        size = 4
        for dimension in site.dims:
            size *= max(0, evaluate(dimension, checker.runner.sizes(case)))
        if size <= MOST_BYTES:
            return case
    raise UnsupportedError(f"its rows cannot be compared: the weights take {size} bytes, more than {MOST_BYTES}")


class _Run:
    """What is added at one size."""

    def __init__(
        self, checker: MaskChecker, site: AttentionSite, mask: LiftedMask, found: FoundTable, case: Case
    ) -> None:
        self.checker, self.site, self.mask, self.found, self.case = checker, site, mask, found, case
        self.feeds, self.sizes = checker.runner.draw(site, mask, case, case.length)
        self.shape = score_sizes(site, self.sizes)
        self.rows = evaluate(found.rows, self.sizes)
        self.table_shape = tuple(evaluate(d, self.sizes) for d in checker.symbolic.shape(found.tensor) or ())
        columns = self.table_shape[found.column_axis]
        numbers = self.rows * (1 if found.head_axis is None else self.shape[1])
        self.digits = max(1, min(columns - 1, numbers.bit_length()))
        self.has_ones = columns > 1  # in the column behind the digits
        self.base = 2
        while self.base**self.digits < numbers:
            self.base += 1
        self.keys_of_run = 1
        while self.base ** (self.keys_of_run + 1) <= _LARGEST_SUM:
            self.keys_of_run += 1

    def compare(self, index: MaskExpression, factor: float) -> None:
        """Compares the rows that weights meet with an index.

        Raises:
            UnsupportedError: where they differ.
        """
        batch, heads, queries, keys = self.shape
        past = keys - queries if self.site.query_offset else 0
        q = np.arange(queries)[:, None]
        names = {"q": q + past, "k": np.arange(keys)[None, :], "S": queries, "T": keys, "P": past}
        clipped = np.clip(index.evaluate({**names, **arrays_of(self.mask.tables)}), 0, self.rows - 1)
        rows = np.broadcast_to(clipped, (queries, keys))
        head = np.arange(heads)[None, :, None, None] if self.found.head_axis is not None else 0
        table = self._spread_digits(self._number_rows())
        for chosen in self._choose_keys(past):
            powers = self.base ** np.arange(chosen.shape[-1])
            weights = np.zeros((batch, heads, queries, keys), np.float32)
            np.put_along_axis(weights, chosen, powers.astype(np.float32), axis=-1)
            result = self._run(weights, table)
            read = rows[q, chosen]
            wanted = self._digits_of(read + head * self.rows, self._is_row(read), powers)
            if not (np.abs(result - factor * wanted) <= _TOLERANCE * abs(factor)).all():
                self._refuse(result / factor - wanted, chosen, index)

        if keys > MOST_RUNS * self.keys_of_run:
            self._compare_sums(rows, table, index, factor)

    def _run(self, weights: np.ndarray, table: np.ndarray) -> np.ndarray:
        """What is added for weights [B, H, S, T] and a table: [B, H, S, columns]."""
        added = self.site.added_values
        assert added is not None
        shape = [evaluate(d, self.sizes) for d in self.checker.symbolic.shape(added.weights) or ()]
        replaced = {added.weights: weights.reshape(shape), self.found.tensor: table}
        (value,) = self.checker.runner.run([added.tensor], self.feeds, self.sizes, replaced)
        return np.asarray(value.reshape(*self.shape[:3], -1)[..., : self.digits + self.has_ones])

    def _is_row(self, rows: np.ndarray) -> np.ndarray:
        """Which rows are none of zeros that the table is padded with."""
        return (rows > 0) & (rows < self.rows - 1) if self.found.is_padded else np.ones_like(rows, bool)

    def _compare_sums(self, rows: np.ndarray, table: np.ndarray, index: MaskExpression, factor: float) -> None:
        """Compares the sums of all keys: one wrong row of a query always shows, more of them but for a chance.

        One text and head at a time: the scores of long inputs take gigabytes.

        Raises:
            UnsupportedError: where they differ, or the sums are too large to be exact.
        """
        batch, heads, _, keys = self.shape
        if keys * (self.base - 1) > _LARGEST_TOTAL:
            raise UnsupportedError(f"its rows have too few columns to compare those of {keys} keys")
        most = max(1, _LARGEST_SUM // (keys * (self.base - 1)))
        weights = np.random.default_rng(keys).integers(1, most, self.shape, np.int16, endpoint=True).astype(np.float32)
        result = self._run(weights, table)
        is_row, by_head = self._is_row(rows), self.found.head_axis is not None
        for h, digit in np.ndindex(heads if by_head else 1, self.digits + self.has_ones):
            digits = (rows + h * self.rows) // self.base**digit % self.base if digit < self.digits else 1
            column = np.where(is_row, digits, 0).astype(np.float32)
            for b, head in np.ndindex(batch, 1 if by_head else heads):
                wanted = np.einsum("qk,qk->q", weights[b, h + head], column)  # whole numbers, exact in fp32
                away = np.abs(result[b, h + head, :, digit] - factor * wanted)
                if not (away <= _TOLERANCE_OF_SUMS * abs(factor)).all():
                    where = (b, h + head, int(away.argmax()))
                    raise UnsupportedError(
                        f"a row that is read at (b, h, q) = {where} of {self.case} is another one than {index}"
                    )

    def _refuse(self, away: np.ndarray, chosen: np.ndarray, index: MaskExpression) -> None:
        b, h, q, _ = (int(i) for i in np.argwhere(~(np.abs(away) <= _TOLERANCE))[0])
        keys = ", ".join(str(k) for k in sorted(chosen[b, h, q]))
        raise UnsupportedError(
            f"a row that is read at (b, h, q) = {(b, h, q)} and keys {keys} of {self.case} is another one than {index}"
        )

    def _choose_keys(self, past: int) -> Iterator[np.ndarray]:
        """The keys [B, H, S, n] that each run compares: all of them, or those near the query and others all over.

        Where they are not all, the last run is left to the sums.
        """
        batch, heads, queries, keys = self.shape
        text = np.arange(batch * heads).reshape(batch, heads, 1, 1)
        position = np.arange(queries)[None, None, :, None] + past
        near, far = np.arange(keys), np.arange(0)
        if keys > MOST_RUNS * self.keys_of_run:
            most, half = (MOST_RUNS - 1) * self.keys_of_run, MOST_RUNS // 2 * self.keys_of_run
            near = np.arange(half) - half // 2
            far = np.linspace(0, keys, most - half, endpoint=False).astype(np.int64)
        for offsets, moved in ((near, 0 * text), (far, text)):  # texts and heads have other far keys
            for first in range(0, len(offsets), self.keys_of_run):
                yield (position + moved + offsets[first : first + self.keys_of_run]) % keys

    def _number_rows(self) -> np.ndarray:
        """The numbers of rows and heads along the axes of the table but its columns."""
        shape = [n for axis, n in enumerate(self.table_shape) if axis != self.found.column_axis]
        numbers = np.full(shape, int(self.found.is_padded))
        for axis, step in ((self.found.row_axis, 1), (self.found.head_axis, self.rows)):
            if axis is not None:
                place = axis - (axis > self.found.column_axis)
                along = [-1 if a == place else 1 for a in range(len(shape))]
                numbers = numbers + step * np.arange(shape[place]).reshape(along)
        return numbers

    def _spread_digits(self, numbers: np.ndarray) -> np.ndarray:
        table = np.zeros(self.table_shape, np.float32)
        digits = self._digits_of(numbers[..., None], np.ones((*numbers.shape, 1), bool), np.ones(1, np.int64))
        np.moveaxis(table, self.found.column_axis, -1)[..., : digits.shape[-1]] = digits
        return table

    def _digits_of(self, numbers: np.ndarray, is_row: np.ndarray, powers: np.ndarray) -> np.ndarray:
        """The sums over the last axis of digits times powers, [.., columns]; then the sum of powers of rows."""
        sums = [
            (np.where(is_row, numbers // self.base**digit % self.base, 0) * powers).sum(-1)
            for digit in range(self.digits)
        ]
        return np.stack([*sums, *([(is_row * powers).sum(-1)] if self.has_ones else [])], axis=-1)
