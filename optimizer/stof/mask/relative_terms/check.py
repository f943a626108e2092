# SPDX-License-Identifier: Apache-2.0
"""Runs a term with the numbers of rows in the place of its table, which shows for each pair the row that it reads.

Vectors of queries and keys are 1, rows hold their number in column 0 and 0 elsewhere. So products are row numbers, exactly: fp32
holds them up to 2^24.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from onnx import helper

from stof.errors import UnsupportedError
from stof.execution.case import Case, Padding
from stof.mask.check.checker import MaskChecker
from stof.mask.check.run_masks import DoesNotRunError, score_sizes
from stof.mask.check.sizes import cases_of_cross_attention, cases_of_lengths, cases_without_past, choose_lengths
from stof.mask.evaluate import evaluate_mask
from stof.mask.expression import MaskExpression
from stof.mask.relative_terms.index import RowsRun
from stof.mask.relative_terms.products import Product
from stof.mask.site import AttentionSite, LiftedMask, arrays_of
from stof.symbolic.algebra.sizes import evaluate

_MIN_LENGTHS = 3
_TOLERANCE = 0.01  # of a row number, which factors round
_SHORT = (1, 3, 5, 13)
_LONGER = 8  # times a length: inputs that are subsampled have runs of more positions there
_LONG = 300  # from here on one batch is compared, and rows alone


def run_rows(
    checker: MaskChecker, site: AttentionSite, mask: LiftedMask, products: Sequence[Product], one: Product, length: int
) -> RowsRun:
    """The rows of a product's table that pairs read, at a length. Layers share what a run shows.

    Raises:
        UnsupportedError: when the term does not run at that length, or batches and heads read different rows.
    """
    key = ("rows", length, products.index(one), *_key(checker, site, mask, products))
    if key not in checker.row_runs:
        checker.row_runs[key] = _run_rows(checker, site, mask, products, one, length)
    shown = checker.row_runs[key]
    assert isinstance(shown, RowsRun)
    return shown


def _run_rows(
    checker: MaskChecker, site: AttentionSite, mask: LiftedMask, products: Sequence[Product], one: Product, length: int
) -> RowsRun:
    run = _Run(checker, site, mask, products, Case(1, length, Padding.NONE), 0)
    rows, allowed = np.rint(run.rows(one)), np.asarray(run.allowed.all(axis=(0, 1)))
    if not (rows == rows[:1, :1])[..., allowed].all():
        raise UnsupportedError("its rows differ by batch or head")
    is_shorter = rows.shape[-1] < length
    if is_shorter and checker.runner.lengths(site, Case(1, _LONGER * length, Padding.NONE)) != rows.shape[2:]:
        raise UnsupportedError("the graph has no run of that length, but longer ones than those that were made")
    return RowsRun(rows[0, 0], allowed, run.past, is_longest=is_shorter)


def _key(
    checker: MaskChecker, site: AttentionSite, mask: LiftedMask, products: Sequence[Product]
) -> tuple[object, ...]:
    """Equal for terms that equal nodes make of their vectors and tables, of equal shapes, under equal masks."""
    names = [n for p in products for n in (p.vectors, p.table.tensor)]
    cut = {n: (i, checker.symbolic.shape(n)) for i, n in enumerate(dict.fromkeys(names))}
    return (
        checker.hashes.of_cut(products[0].term.tensor, cut),
        tuple((p.factor, names.index(p.vectors), names.index(p.table.tensor)) for p in products),
        tuple(replace(p.table, tensor="", data=b"") for p in products),
        products[0].term.view,
        site.dims,
        site.query_offset,
        mask.expression,
        mask.tables,
        tuple((o.role, o.view, o.at, checker.hashes.of(o.tensor)) for o in mask.operands),
    )


def check_rows(
    checker: MaskChecker,
    site: AttentionSite,
    mask: LiftedMask,
    products: Sequence[Product],
    indices: Sequence[MaskExpression],
) -> None:
    """Compares the rows that pairs read with expressions, one for each product of a term, at several sizes.

    Raises:
        UnsupportedError: naming the first case in which they differ, or when too few sizes run.
    """
    key = ("checked", tuple(indices), *_key(checker, site, mask, products))
    if key in checker.row_runs:
        return
    numbers = set().union(*(e.literals for e in indices), mask.expression.literals)
    *shorter, longest = choose_lengths(numbers)
    chosen = [*(n for n in shorter if n <= _LONG), longest]  # rows of long tables were read at one length already
    middle = chosen[len(chosen) // 2]
    cases = [replace(c, batch=1) if c.length > _LONG else c for c in cases_of_lengths(site, mask, chosen, ())]
    cases += [*(Case(2, n, Padding.RIGHT) for n in _SHORT)]
    cases += [*cases_of_cross_attention(site, middle), *cases_without_past(site, middle)]
    compared: set[tuple[int, int]] = set()
    refused: DoesNotRunError | None = None
    for seed, case in enumerate(cases):
        try:
            run = _Run(checker, site, mask, products, case, seed)
            for product in products:
                run.compare(product, indices)
            compared.add(run.allowed.shape[2:])
        except DoesNotRunError as error:
            refused = error
    is_fixed = all(d.constant is not None for d in site.dims[2:])
    if len(compared) < (1 if is_fixed else _MIN_LENGTHS):
        raise refused or UnsupportedError("its rows could not be compared at enough lengths")
    checker.row_runs[key] = True


class _Run:
    """A term's subgraph at one size, cut at the vectors and tables of its products."""

    def __init__(
        self,
        checker: MaskChecker,
        site: AttentionSite,
        mask: LiftedMask,
        products: Sequence[Product],
        case: Case,
        seed: int,
    ) -> None:
        self.checker, self.site, self.mask, self.products, self.case = checker, site, mask, products, case
        self.feeds, self.sizes = checker.runner.draw(site, mask, case, seed)
        self.shape = score_sizes(site, self.sizes)
        inputs = checker.runner.with_computed(mask, self.feeds, self.sizes)
        self.allowed, self.past = evaluate_mask(site, mask, inputs, self.shape)

    def rows(self, one: Product) -> np.ndarray:
        """The rows [B, H, S, T] that pairs read for a product alone, as floats."""
        return self._values(one, self._row_numbers(one)) / one.factor

    def compare(self, one: Product, indices: Sequence[MaskExpression]) -> None:
        """Compares rows with expressions, and the heads whose rows are read.

        Raises:
            UnsupportedError: where they differ.
        """
        wanted = np.zeros((1, 1, 1, 1))
        heads = np.zeros((1, 1, 1, 1))
        for product, index in zip(self.products, indices, strict=True):
            if product.vectors == one.vectors and product.table.tensor == one.table.tensor:
                rows, is_row = self._evaluate(index, product)
                wanted = wanted + product.factor * rows
                number = 0 if product.table.head_axis is None else np.arange(self.shape[1])[None, :, None, None]
                heads = heads + product.factor * is_row * (1 + number)
        checks = [(self._row_numbers(one), wanted, "row")]
        checks += [(self._head_numbers(one), heads, "head")] if self.case.length <= _LONG else []
        for values, expected, what in checks:
            found = self._values(one, values)
            away = np.abs(found - expected)
            if (away <= _TOLERANCE * abs(one.factor)).all():
                continue
            wrong = self.allowed & ~(away <= _TOLERANCE * abs(one.factor))
            if wrong.any():
                where = tuple(int(i) for i in np.argwhere(wrong)[0])
                right = np.broadcast_to(expected, self.shape)[where]
                raise UnsupportedError(
                    f"{one.table.tensor}: the {what} that is read at (b, h, q, k) = {where} is "
                    f"{found[where] / one.factor:g} at {self.case}, not {right / one.factor:g}"
                )

    def _evaluate(self, index: MaskExpression, product: Product) -> tuple[np.ndarray, np.ndarray]:
        """The rows [S, T] of an expression, and which of them are none of zeros that the operand has more."""
        _, _, S, T = self.shape
        names = {"S": S, "T": T, "P": self.past, **arrays_of(self.mask.tables)}
        q, k = (np.arange(S) + self.past)[:, None], np.arange(T)[None, :]
        last = evaluate(product.table.rows, self.sizes) - 1
        rows = np.broadcast_to(np.clip(index.evaluate({**names, "q": q, "k": k}), 0, last), (S, T))
        is_row = (rows > 0) & (rows < last) if product.table.is_padded else np.ones((S, T), bool)
        return np.where(is_row, rows, 0), is_row

    def _values(self, one: Product, table: np.ndarray) -> np.ndarray:
        """The term for a table of one product, all others being 0."""
        replaced: dict[str, np.ndarray] = {}
        for product in self.products:
            shape = [evaluate(d, self.sizes) for d in self.checker.symbolic.shape(product.vectors) or ()]
            is_used = product.vectors == one.vectors
            replaced[product.vectors] = np.full(shape, is_used, self._dtype(product.vectors))
            replaced[product.table.tensor] = np.zeros(self._table_shape(product), self._dtype(product.table.tensor))
        replaced[one.table.tensor] = table.astype(self._dtype(one.table.tensor))
        (value,) = self.checker.runner.values(self.site, [one.term], self.feeds, self.sizes, replaced)
        try:
            return np.broadcast_to(value.astype(np.float64), self.shape)
        except ValueError as error:
            raise DoesNotRunError(f"a term does not broadcast to the scores: {error}") from error

    def _row_numbers(self, one: Product) -> np.ndarray:
        numbers = self._numbers(one, one.table.row_axis, int(one.table.is_padded))
        if one.table.key_axis is None:
            return numbers
        last = self._table_shape(one)[one.table.key_axis] - 1
        column = self._numbers(one, None, 1)
        spread: np.ndarray = numbers - self._numbers(one, one.table.key_axis, 0) + last * column
        return spread

    def _head_numbers(self, one: Product) -> np.ndarray:
        return self._numbers(one, one.table.head_axis, 1)

    def _numbers(self, one: Product, axis: int | None, first: int) -> np.ndarray:
        """A table that holds in column 0 the position on an axis, counted from ``first``; without an axis ``first``."""
        shape = self._table_shape(one)
        table = np.zeros(shape, np.float32)
        column = np.moveaxis(table, one.table.column_axis, 0)[:1]
        numbers = np.arange(first, first + shape[axis]) if axis is not None else np.full(1, first)
        sizes = [1] * len(shape)
        if axis is not None:
            sizes[axis] = shape[axis]
        column[...] = np.moveaxis(numbers.reshape(sizes), one.table.column_axis, 0)
        return table

    def _table_shape(self, product: Product) -> tuple[int, ...]:
        return tuple(evaluate(d, self.sizes) for d in self.checker.symbolic.shape(product.table.tensor) or ())

    def _dtype(self, tensor: str) -> np.dtype:
        """Of the run, in which fp16 and bf16 are widened."""
        dtype = helper.tensor_dtype_to_np_dtype(self.checker.symbolic.dtype(tensor))
        return np.dtype(np.float64) if dtype == np.float64 else np.dtype(np.float32)
