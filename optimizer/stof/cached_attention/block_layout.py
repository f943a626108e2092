# SPDX-License-Identifier: Apache-2.0
"""The block layouts of a SparseAttention: read from CSR arrays, and written as a mask expression.

Layout h % L says which key blocks the query blocks of head h attend. Local blocks beside a vertical stride become a short
expression, proven equal for every block; any other layout becomes a table that the expression indexes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stof.errors import UnsupportedError
from stof.mask.expression import CAUSAL, MaskExpression

BLOCK_SIZES = (16, 32, 64, 128)  # those of the operator's schema
_MOST_BLOCKS = 1 << 28  # pairs of blocks in all layouts, a byte each
_MOST_CHECKED = 1 << 33  # pairs of blocks of all heads that an expression is evaluated at, for a minute at most


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """Layouts, and the mask that says the same.

    Attributes:
        allowed: bool [L, blocks, blocks]; none of them above the diagonal.
        block_size: positions of a block.
        mask: the expression in absolute positions, with ``k <= q``.
        table: what the expression reads as table0, or None.
    """

    allowed: np.ndarray
    block_size: int
    mask: MaskExpression
    table: np.ndarray | None

    @property
    def blocks(self) -> int:
        """The blocks of a layout's row."""
        return int(self.allowed.shape[1])

    @property
    def length(self) -> int:
        """The positions that the layouts describe; SparseAttention refuses longer sequences."""
        return self.blocks * self.block_size

    @property
    def first_sparse_length(self) -> int:
        """The positions up to the first query block that leaves out a key block; 0: none does."""
        counts = self.allowed.sum(2) < 1 + np.arange(self.blocks)
        rows = np.flatnonzero(counts.any(0))
        return (int(rows[0]) + 1) * self.block_size if rows.size else 0

    def has_mixed_groups(self, heads: int, groups: int) -> bool:
        """Whether query heads that share a key head have different layouts."""
        numbers = np.arange(heads).reshape(groups, -1) % len(self.allowed)
        return any((self.allowed[row] != self.allowed[row[:1]]).any() for row in np.unique(numbers, axis=0))

    def count_read_keys(self, length: int, heads: int, groups: int) -> float:
        """The keys of a key head that the last of ``length`` positions reads: the union of its query heads, on average."""
        row = (length - 1) // self.block_size
        return self._count_keys(length, np.asarray(self._rows_of_groups(row, heads, groups).any(1)))

    def count_attended_keys(self, length: int, heads: int) -> float:
        """The keys that the last of ``length`` positions attends, on average over query heads."""
        row = (length - 1) // self.block_size
        return self._count_keys(length, self._rows_of_groups(row, heads, heads)[:, 0])

    @property
    def varies_by_head(self) -> bool:
        """Whether heads have different layouts, so that the mask reads h."""
        return bool((self.allowed != self.allowed[:1]).any())

    def _rows_of_groups(self, row: int, heads: int, groups: int) -> np.ndarray:
        """The key blocks [groups, heads of a group, blocks] of a query block."""
        return np.asarray(self.allowed[np.arange(heads).reshape(groups, -1) % len(self.allowed), row])

    def _count_keys(self, length: int, read: np.ndarray) -> float:
        """The keys before a length in blocks that are read [n, blocks], on average."""
        row = (length - 1) // self.block_size
        beyond = (row + 1) * self.block_size - length
        return float((read.sum(1) * self.block_size - read[:, row] * beyond).mean())

    def describe(self, heads: int, groups: int) -> tuple[str, ...]:
        """Facts for people."""
        count, blocks = len(self.allowed), self.blocks
        share = 100 * self.allowed.sum(dtype=np.int64) / (count * blocks * (blocks + 1) / 2)
        layouts = f"{count} layout{'' if count == 1 else 's'} of {blocks} blocks of {self.block_size}"
        facts = [f"{layouts}, {share:.3g} % of the causal blocks"]
        if self.has_mixed_groups(heads, groups):
            facts.append("query heads of a key head differ")
        return tuple(facts)


def read_layout(rows: np.ndarray, columns: np.ndarray, block_size: int, heads: int) -> BlockLayout:
    """The layouts of CSR arrays.

    Args:
        rows: int32 [L, blocks + 1], where each row of blocks begins in ``columns``.
        columns: int32 [L, most], the key blocks of the rows, then padding.
        block_size: positions of a block.
        heads: query heads, which use the layouts cyclically.

    Raises:
        UnsupportedError: naming the input and the value that is wrong.
    """
    for name, array in (("block_row_indices", rows), ("block_col_indices", columns)):
        if array.dtype != np.int32 or array.ndim != 2:
            raise UnsupportedError(f"{name} is {array.dtype} {list(array.shape)}, expected int32 with 2 axes")
    count, blocks = rows.shape[0], rows.shape[1] - 1
    if not count or blocks < 1 or heads % count:
        raise UnsupportedError(
            f"block_row_indices has shape {list(rows.shape)}, expected a divisor of {heads} heads and at least 2 columns"
        )
    if columns.shape[0] != count:
        raise UnsupportedError(f"block_col_indices has {columns.shape[0]} layouts, block_row_indices {count}")
    if count * blocks * blocks > _MOST_BLOCKS:
        raise UnsupportedError(f"block_row_indices has {count} layouts of {blocks} blocks, whose table exceeds 256 MiB")
    allowed = np.zeros((count, blocks, blocks), bool)
    for i in range(count):
        _read_rows(i, rows[i].astype(np.int64), columns[i].astype(np.int64), allowed[i])
    mask, table = _express(allowed, block_size, heads)
    return BlockLayout(allowed, block_size, mask, table)


def _read_rows(layout: int, starts: np.ndarray, columns: np.ndarray, allowed: np.ndarray) -> None:
    """Sets the blocks of one layout."""
    where = f"block_row_indices[{layout}]"
    if starts[0] != 0:
        raise UnsupportedError(f"{where} begins with {starts[0]}, expected 0")
    counts = np.diff(starts)
    if (counts < 0).any():
        i = int(np.argmax(counts < 0)) + 1
        raise UnsupportedError(f"{where} has {starts[i]} at {i}, behind {starts[i - 1]}: its entries must not descend")
    if starts[-1] > len(columns):
        raise UnsupportedError(f"{where} ends with {starts[-1]}, and block_col_indices has {len(columns)} columns")
    if (counts == 0).any():
        row = int(np.argmax(counts == 0))
        raise UnsupportedError(f"{where} names no block in row {row}: its queries attend no key")
    row_of = np.repeat(np.arange(len(counts)), counts)
    listed = columns[: starts[-1]]
    outside = (listed < 0) | (listed > row_of)
    if outside.any():
        i = int(np.argmax(outside))
        raise UnsupportedError(
            f"block_col_indices[{layout}] has {listed[i]} in row {row_of[i]}, expected 0 to {row_of[i]}, the diagonal"
        )
    unordered = (np.diff(listed) <= 0) & (np.diff(row_of) == 0)
    if unordered.any():
        i = int(np.argmax(unordered))
        raise UnsupportedError(
            f"block_col_indices[{layout}] has {listed[i + 1]} behind {listed[i]} in row {row_of[i]}: blocks must ascend"
        )
    allowed[row_of, listed] = True


@dataclass(frozen=True)
class _Distinct:
    """Layouts without the repetitions of equal ones.

    Attributes:
        allowed: [count, blocks, blocks].
        index: the expression of a head's layout.
        number: the same plus a multiple of the count, without a cycle over heads.
    """

    allowed: np.ndarray
    index: str
    number: str

    @classmethod
    def of(cls, allowed: np.ndarray, heads: int) -> _Distinct:
        """Finds the shortest cycle, and in it the longest run of equal layouts, as for the query heads of a key head."""
        id_of: dict[bytes, int] = {}
        ids = [id_of.setdefault(np.packbits(x).tobytes(), len(id_of)) for x in allowed]
        cycle = next(p for p in _divisors(len(ids)) if ids == ids[:p] * (len(ids) // p))
        if cycle == 1:
            return cls(allowed[:1], "0", "0")
        run = next(r for r in reversed(_divisors(cycle)) if all(ids[i] == ids[i // r * r] for i in range(cycle)))
        share = "" if run == 1 else f" // {run}"
        return cls(allowed[:cycle:run], ("h" if cycle == heads else f"h % {cycle}") + share, f"h{share}")


def _divisors(number: int) -> list[int]:
    return [i for i in range(1, number + 1) if number % i == 0]


def _express(allowed: np.ndarray, block_size: int, heads: int) -> tuple[MaskExpression, np.ndarray | None]:
    """The mask expression of layouts, and its table."""
    if (allowed == np.tri(allowed.shape[1], dtype=bool)).all():
        return CAUSAL, None
    distinct = _Distinct.of(allowed, heads)
    for condition, table in _short_conditions(distinct, block_size):
        mask = _make_causal(condition, table)
        if _is_equal(mask, table, allowed, block_size, heads):
            return mask, table
    table = distinct.allowed
    return _make_causal(f"table0[{distinct.index}, q // {block_size}, k // {block_size}]", table), table


def _make_causal(condition: str, table: np.ndarray | None) -> MaskExpression:
    return MaskExpression.parse(condition, {} if table is None else {"table0": table}) & CAUSAL


def _short_conditions(distinct: _Distinct, block_size: int) -> list[tuple[str, np.ndarray | None]]:
    """Conditions of local blocks and a vertical stride that may be what layouts say."""
    allowed = distinct.allowed
    count, blocks = allowed.shape[:2]
    # Some block is left out.
    local = next(d for d in range(blocks) if not allowed[:, np.arange(d, blocks), np.arange(blocks - d)].all())
    near = f"q // {block_size} - k // {block_size} < {local}"
    columns = [np.flatnonzero(layout[-1, : max(blocks - local, 0)]) for layout in allowed]
    if not any(c.size for c in columns):
        return [(near, None)]
    gaps = {int(g) for c in columns for g in np.diff(c)}
    if len(gaps) > 1 or not local:
        return []
    firsts = {i: int(c[0]) for i, c in enumerate(columns) if c.size}
    reach = blocks - local  # columns that some row tells from local blocks
    if gaps:
        strides = list(gaps)
    else:  # each layout shows one column at most: the stride reaches beyond
        usual = [count << n for n in range((2 * blocks).bit_length()) if count << n <= 2 * blocks]
        strides = [s for s in (*usual, blocks) if s >= reach]
    periodic = [
        (f"{near} or {word}", None)
        for s in strides
        for word in _describe_moved_columns(distinct, firsts, s, block_size)
    ]
    return [*periodic, *_describe_listed_columns(distinct, near, firsts, strides[-1], reach, block_size)]


def _describe_moved_columns(distinct: _Distinct, firsts: dict[int, int], stride: int, block_size: int) -> list[str]:
    """Conditions of columns that move by a step from layout to layout, as those layouts do that show a column."""
    residues = {i: c % stride for i, c in firsts.items()}
    first, start = next(iter(residues.items()))
    conditions = []
    for step in range(stride):
        base = (start + first * step) % stride
        if all((base - i * step) % stride == r for i, r in residues.items()):
            head = distinct.number if len(distinct.allowed) * step % stride == 0 else distinct.index
            conditions.append(f"{_shift(f'k // {block_size}', head, step, stride)} % {stride} == {base}")
    return conditions


def _describe_listed_columns(
    distinct: _Distinct, near: str, firsts: dict[int, int], stride: int, reach: int, block_size: int
) -> list[tuple[str, np.ndarray | None]]:
    """The condition of columns that a table lists for each layout."""
    count = len(distinct.allowed)
    if len(firsts) < count and reach >= stride:  # no residue stands for a layout without columns
        return []
    table = np.array([firsts[i] % stride if i in firsts else reach for i in range(count)], np.int64)
    return [(f"{near} or k // {block_size} % {stride} == table0[{distinct.index}]", table)]


def _shift(block: str, head: str, step: int, stride: int) -> str:
    """The block moved by a step for each head, in the direction with the smaller number."""
    if step == 0:
        return block
    sign, number = ("+", step) if 2 * step <= stride else ("-", stride - step)
    return f"({block} {sign} {head if number == 1 else f'{head} * {number}'})"


def _is_equal(mask: MaskExpression, table: np.ndarray | None, allowed: np.ndarray, block_size: int, heads: int) -> bool:
    """Whether a mask, which positions enter by their blocks alone, says what the layouts say, in every block."""
    blocks = allowed.shape[1]
    k = np.arange(blocks)[None] * block_size
    rows = max(1, (1 << 22) // blocks)
    numbers = range(heads if "h" in mask.reads else len(allowed))
    if len(numbers) * blocks * blocks > _MOST_CHECKED:
        return False
    for h in numbers:
        for i in range(0, blocks, rows):
            wanted = allowed[h % len(allowed), i : i + rows]
            q = np.arange(i, min(i + rows, blocks))[:, None] * block_size
            values = {"h": h, "q": q, "k": k, "table0": table}
            if not np.array_equal(np.broadcast_to(mask.evaluate(values), wanted.shape), wanted):
                return False
    return True
