# SPDX-License-Identifier: Apache-2.0
"""Runs a term with the numbers of rows in the place of its table, which shows for each pair the row that it reads.

Vectors of queries and keys are 1, rows hold their number in column 0 and 0 elsewhere. So products are row numbers, exactly: fp32
holds them up to 2^24.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from onnx import TensorProto, helper

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

MIN_LENGTHS = 3
_TOLERANCE = 0.01  # of a row number, which factors round
# The largest relative difference of a factor of a half-precision graph and the one that its nodes give in fp32.
_ROUNDING: Mapping[int, float] = {TensorProto.FLOAT16: 2.0**-9, TensorProto.BFLOAT16: 2.0**-6}
_SHORT = (1, 3, 5, 13)
_LONGER = 8  # times a length: inputs that are subsampled have runs of more positions there
_LONG = 300  # beyond, one batch is compared, and rows alone, after the first size
_MOST_BYTES = 1 << 30  # of scores of more than one batch


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
    allowed = np.asarray(run.allowed.all(axis=(0, 1)))
    rows = run.rows(one, allowed)
    is_shorter = rows.shape[-1] < length
    if is_shorter and checker.runner.lengths(site, Case(1, _LONGER * length, Padding.NONE)) != rows.shape:
        raise UnsupportedError("the graph has no run of that length, but longer ones than those that were made")
    return RowsRun(rows, allowed, run.past, is_longest=is_shorter)


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
    cases = [*cases_of_lengths(site, mask, chosen, ()), *(Case(2, n, Padding.RIGHT) for n in _SHORT)]
    cases += [*cases_of_cross_attention(site, middle), *cases_without_past(site, middle)]
    compared: set[tuple[int, ...]] = set()
    settled: set[tuple[tuple[str, int], ...]] = set()  # sizes that give the same rows again
    refused: DoesNotRunError | None = None
    cut = {n for p in products for n in (p.vectors, p.table.tensor)}
    is_static = not checker.runner.inputs_behind(products[0].term.tensor, cut)
    for seed, case in enumerate(cases):
        try:
            shape = score_sizes(site, checker.runner.sizes(case))
            if max(shape[2:]) > _LONG and (compared or 4 * math.prod(shape) > _MOST_BYTES):
                case = replace(case, batch=1)
            sizes = tuple(sorted(checker.runner.sizes(case).items()))
            if sizes in settled:
                continue
            run = _Run(checker, site, mask, products, case, seed)
            # Other sizes showed the heads.
            with_heads = not compared or max(run.shape[2:]) <= _LONG
            fits = [run.compare(product, indices, with_heads=with_heads) for product in products]
            if is_static and (all(fits) or not mask.operands):
                settled.add(sizes)
            compared.add(run.shape[2:])
        except DoesNotRunError as error:
            refused = error
    require_lengths(site, compared, refused)
    checker.row_runs[key] = True


def require_lengths(site: AttentionSite, compared: set[tuple[int, ...]], refused: DoesNotRunError | None) -> None:
    """Refuses rows that ran at too few lengths: one does where the site has no other.

    Args:
        site: the attention.
        compared: numbers of queries and keys at which rows were compared.
        refused: why another length did not run.

    Raises:
        UnsupportedError: naming ``refused``, if there is one.
    """
    is_fixed = all(d.constant is not None for d in site.dims[2:])
    if len(compared) < (1 if is_fixed else MIN_LENGTHS):
        raise refused or UnsupportedError("its rows could not be compared at enough lengths")


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
        B, H, S, T = self.shape  # 1 of texts and heads that share the mask
        by_text, by_head = bool(mask.operands) or "b" in mask.expression.reads, "h" in mask.expression.reads
        shape = B if by_text else min(B, 1), H if by_head else min(H, 1), S, T
        self.allowed, self.past = evaluate_mask(site, mask, inputs, shape)

    def rows(self, one: Product, allowed: np.ndarray) -> np.ndarray:
        """The rows [S, T] that pairs read for a product alone, as floats.

        Raises:
            UnsupportedError: when batches and heads read different ones where that is allowed.
        """
        values = self._values(one, self._row_numbers(one))
        factor = one.factor * self._rounding(one)
        slices = (np.rint(values[at].astype(np.float64) / factor) for at in np.ndindex(values.shape[:2]))
        first = next(slices, np.zeros(self.shape[2:]))
        if not all((other == first)[allowed].all() for other in slices):
            raise UnsupportedError("its rows differ by batch or head")
        return np.asarray(first)

    def compare(self, one: Product, indices: Sequence[MaskExpression], *, with_heads: bool) -> bool:
        """Compares rows with expressions, and the heads whose rows are read; whether forbidden pairs agree, too.

        Raises:
            UnsupportedError: where they differ.
        """
        wanted = np.zeros(self.shape[2:])
        products = np.zeros(self.shape[2:])
        by_head = np.zeros(self.shape[2:])  # more, times the number of the head
        for product, index in zip(self.products, indices, strict=True):
            if product.vectors == one.vectors and product.table.tensor == one.table.tensor:
                rows, is_row = self._evaluate(index, product)
                wanted += product.factor * rows
                products += product.factor * is_row
                if product.table.head_axis is not None:
                    by_head += product.factor * is_row
        rounding = self._rounding(one)
        wanted, products, by_head = (rounding * x for x in (wanted, products, by_head))
        fits = self._compare(one, self._row_numbers(one), wanted, None, "row")
        if with_heads:
            step = by_head if by_head.any() else None
            fits &= self._compare(one, self._head_numbers(one), products, step, "head")
        return fits

    def _compare(self, one: Product, table: np.ndarray, wanted: np.ndarray, step: np.ndarray | None, what: str) -> bool:
        """Compares the term for a table with ``wanted`` [S, T] and a ``step`` for each head; whether forbidden pairs agree.

        One text and head at a time: scores of long inputs take gigabytes. Those that share rows and mask are compared once.
        """
        values = self._values(one, table)
        by_head = (1, 1 if step is None else self.shape[1])
        fits = True
        for b, h in np.ndindex(np.broadcast_shapes(values.shape[:2], by_head, self.allowed.shape[:2])):
            expected = wanted if step is None else wanted + h * step
            found = _slice_of(values, b, h)
            is_equal = np.abs(found - expected) <= _TOLERANCE * abs(one.factor)
            if is_equal.all():
                continue
            fits = False
            wrong = _slice_of(self.allowed, b, h) & ~is_equal
            if wrong.any():
                q, k = (int(i) for i in np.argwhere(wrong)[0])
                raise UnsupportedError(
                    f"{one.table.tensor}: the {what} that is read at (b, h, q, k) = {(b, h, q, k)} is "
                    f"{found[q, k] / one.factor:g} at {self.case}, not {expected[q, k] / one.factor:g}"
                )
        return fits

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
        """The term for a table of one product, all others being 0: [B, H, S, T], B and H being 1 where the graph shares it."""
        replaced: dict[str, np.ndarray] = {}
        for product in self.products:
            shape = [evaluate(d, self.sizes) for d in self.checker.symbolic.shape(product.vectors) or ()]
            is_used = product.vectors == one.vectors
            replaced[product.vectors] = np.full(shape, is_used, self._dtype(product.vectors))
            replaced[product.table.tensor] = np.zeros(self._table_shape(product), self._dtype(product.table.tensor))
        replaced[one.table.tensor] = table.astype(self._dtype(one.table.tensor))
        (value,) = self.checker.runner.values(self.site, [one.term], self.feeds, self.sizes, replaced)
        try:
            np.broadcast_to(value, self.shape)  # raises
            four = value.reshape((1,) * (4 - value.ndim) + value.shape)
            return np.broadcast_to(four, (*four.shape[:2], *self.shape[2:]))
        except ValueError as error:
            raise DoesNotRunError(f"a term does not broadcast to the scores: {error}") from error

    def _rounding(self, one: Product) -> float:
        """The factor that the nodes give in fp32 over that of a product; 1 unless the graph computes in half precision."""
        dtype = self.checker.symbolic.dtype(one.table.tensor)
        if dtype not in _ROUNDING:
            return 1.0
        limit = _ROUNDING[dtype]
        values = np.abs(self._values(one, self._numbers(one, None, 1)).astype(np.float64))
        ratio = float(np.median(values[values > 0])) / abs(one.factor) if values.any() else 1.0
        return (
            ratio if abs(ratio - 1) <= limit else 1.0
        )  # several products with one table: their factors are compared as they are

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


def _slice_of(array: np.ndarray, text: int, head: int) -> np.ndarray:
    """What a text and a head have of an array [B or 1, H or 1, S, T]."""
    B, H = array.shape[:2]
    return np.asarray(array[text if B > 1 else 0, head if H > 1 else 0])
