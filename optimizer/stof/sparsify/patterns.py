# SPDX-License-Identifier: Apache-2.0
"""Sparse patterns as mask expressions: which keys each head attends besides what the causal mask forbids.

A pattern is written per KV head g = h // (H // G), so that the query heads of a group read the same keys. Positions are absolute:
they count from the first token of each sequence. Patterns are those of a whole model; the graph of one rank of a tensor-parallel
export has some of its heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from stof.errors import ArgumentError
from stof.mask.expression import CAUSAL, MaskExpression, rebuild
from stof.mask.expression_nodes import Binary, Call, Constant, H, K, Node, Q, fold
from stof.mask.expression_parser import MaskSyntaxError
from stof.sparsify.tables import Tables
from stof.symbolic import LONGEST

BLOCKS = (16, 32, 64, 128)
_MOST_MARKS = 1 << 28  # bytes of a table of columns or diagonals
_INDICES = {"h", "q", "k"}
_DISTANCES = (Binary("-", Q, K), Binary("-", K, Q))


@dataclass(frozen=True)
class HeadCounts:
    """The heads of an attention: H query heads on G KV heads.

    Attributes:
        first: the KV head of the whole model that is the graph's first one.
        whole: KV heads of the whole model; 0: G, the graph has all.
    """

    H: int
    G: int
    first: int = 0
    whole: int = 0

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.H // self.G

    @property
    def all_kv_heads(self) -> int:
        """KV heads of the whole model."""
        return self.whole or self.G

    @property
    def all_query_heads(self) -> int:
        """Query heads of the whole model."""
        return self.all_kv_heads * self.group

    @property
    def own_kv_head(self) -> str:
        """The graph's KV head of its query head h, as text of an expression."""
        return "h" if self.group == 1 else f"h // {self.group}"

    @property
    def kv_head(self) -> str:
        """The whole model's KV head of the graph's query head h."""
        return f"({self.own_kv_head} + {self.first})" if self.first else self.own_kv_head

    @property
    def query_head(self) -> str:
        """The whole model's query head of the graph's query head h."""
        return f"(h + {self.first * self.group})" if self.first else "h"

    def rows_of(self, count: int, source: str) -> tuple[slice, str]:
        """Which rows of a table with a row for each head of the whole model the graph needs, and the index into them.

        Args:
            count: rows: the KV heads, the query heads, or one for all.
            source: what has them, for messages.

        Raises:
            ArgumentError: for any other count.
        """
        if count == self.all_kv_heads:
            return slice(self.first, self.first + self.G), self.own_kv_head
        if count == self.all_query_heads:
            start = self.first * self.group
            return slice(start, start + self.H), "h"
        if count == 1:
            return slice(0, 1), "0"
        raise ArgumentError(
            f"{source} has {count} heads, expected 1, {self.all_kv_heads} (KV heads) or {self.all_query_heads} (query heads)"
        )


class HeadPattern(ABC):
    """A pattern before the heads of an attention are known.

    Attributes:
        label: for reports.
        reach: tokens that show the whole pattern: beyond them it repeats, or has no more entries.
        horizon: tokens that the pattern is stated for, 0: any number.
        is_causal: whether it is a pattern of causal attention; else it is one of attention without a mask.
    """

    label: str
    reach: int
    horizon: int = 0
    is_causal: bool = True

    @abstractmethod
    def condition(self, heads: HeadCounts, tables: Tables) -> str:
        """The condition on (h, q, k) as text, for k <= q where it is causal; it adds what it looks up to ``tables``.

        It may read S and P, the queries of a run and the tokens before them.

        Raises:
            ArgumentError: when the pattern is one of other heads.
        """

    def default_layers(self, count: int) -> range:
        """The layers, of so many, that it is for where no field says so."""
        return range(count)


@dataclass(frozen=True)
class StridedPattern(HeadPattern):
    """Local blocks and a vertical stride, as S2-Attention has them; all lengths but ``block`` count blocks.

    Attributes:
        local: key blocks before and with the query's own that are attended.
        stride: every so many key blocks one is attended. 1 is dense.
        block: tokens of a block.
        offset: moves the attended blocks of all heads.
        relative: the stride counts from the end of the local blocks, not from the first token.
        homogeneous: heads do not differ; else each is moved by max(1, stride // G) blocks.
        dense_heads: so many KV heads, the last ones, are dense.
        by_query_head: heads are query heads, so that the heads of a group differ.
    """

    local: int
    stride: int
    block: int = 64
    offset: int = 0
    relative: bool = False
    homogeneous: bool = False
    dense_heads: int = 0
    by_query_head: bool = False

    @property
    def label(self) -> str:  # type: ignore[override]
        """Local blocks, stride and block size."""
        kind = "relative" if self.relative else "vertical"
        return f"local {self.local} + {kind} stride {self.stride}, blocks of {self.block}"

    @property
    def reach(self) -> int:  # type: ignore[override]
        """Behind the local blocks, two strides."""
        return (self.local + 2 * self.stride) * self.block

    def condition(self, heads: HeadCounts, tables: Tables) -> str:
        head, count = heads.kv_head, heads.all_kv_heads
        if self.by_query_head:
            head, count = heads.query_head, heads.all_query_heads
        if self.dense_heads > count:
            raise ArgumentError(
                f"--sparsify: dense_heads={self.dense_heads}, expected up to {count}, the heads of the attention"
            )
        query, key = f"q // {self.block}", f"k // {self.block}"
        if self.relative:
            strided = f"max(0, {query} - {key} - {self.local - 1}) % {self.stride} == 0"
        else:
            step = max(1, self.stride // count)
            moved = "" if self.homogeneous else f" + ({head}) * {step}" if step > 1 else f" + {head}"
            start = f" + {self.offset}" if self.offset else ""
            strided = f"({key}{moved}{start}) % {self.stride} == 0"
        condition = f"{query} - {key} < {self.local} or {strided}"
        return f"{condition} or {head} >= {count - self.dense_heads}" if self.dense_heads else condition


@dataclass(frozen=True)
class WindowPattern(HeadPattern):
    """The last ``window`` keys, and the first ``sink`` ones (attention sinks)."""

    window: int
    sink: int = 0

    @property
    def label(self) -> str:  # type: ignore[override]
        """Window and sink."""
        return f"window {self.window}" + (f" + {self.sink} sinks" if self.sink else "")

    @property
    def reach(self) -> int:  # type: ignore[override]
        """Window and sink."""
        return self.window + self.sink

    def condition(self, heads: HeadCounts, tables: Tables) -> str:
        return f"q - k < {self.window}" + (f" or k < {self.sink}" if self.sink else "")


@dataclass(frozen=True)
class TextPattern(HeadPattern):
    """A mask expression on (h, q, k).

    Raises:
        ArgumentError: for a text that is none, or reads more.
    """

    text: str

    def __post_init__(self) -> None:
        try:
            expression = self.expression
        except MaskSyntaxError as error:
            raise ArgumentError(f'--sparsify: mask="{self.text}" is no mask expression: {error}') from None
        if expression.allows_all:
            raise ArgumentError('--sparsify: mask="" allows every pair; state a condition on h, q and k')
        if others := sorted(expression.reads - _INDICES):
            raise ArgumentError(f'--sparsify: mask="{self.text}" reads {others[0]!r}, expected h, q and k only')

    @cached_property
    def expression(self) -> MaskExpression:
        """The text, parsed."""
        return MaskExpression.parse(self.text)

    @property
    def label(self) -> str:  # type: ignore[override]
        """The text."""
        return self.text

    @property
    def reach(self) -> int:  # type: ignore[override]
        """By its largest constant."""
        return 2 * max(self.expression.literals, default=16)

    def condition(self, heads: HeadCounts, tables: Tables) -> str:
        if not heads.first:
            return self.text
        moved = Binary("+", H, Constant(heads.first * heads.group))
        return self.expression.substitute({"h": moved}).text


@dataclass(frozen=True)
class StreamingPattern(HeadPattern):
    """Some KV heads are dense, the others attend sinks and a window (DuoAttention).

    Attributes:
        dense: whether each KV head is dense.
        sink: first keys.
        window: last keys.
        source: what states it, for messages.
    """

    dense: tuple[bool, ...]
    sink: int
    window: int
    source: str = ""

    @property
    def label(self) -> str:  # type: ignore[override]
        """Window, sink and the number of dense heads."""
        return f"window {self.window} + {self.sink} sinks, {sum(self.dense)} of {len(self.dense)} KV heads dense"

    @property
    def reach(self) -> int:  # type: ignore[override]
        """Window and sink."""
        return self.window + self.sink

    def condition(self, heads: HeadCounts, tables: Tables) -> str:
        count = heads.all_kv_heads
        if len(self.dense) != count:
            raise ArgumentError(f"{self.source} has {len(self.dense)} heads, the attention has {count} KV heads")
        table = tables.add(np.array(self.dense[heads.first : heads.first + heads.G]))
        return f"q - k < {self.window} or k < {self.sink} or {table}[{heads.own_kv_head}]"


@dataclass(frozen=True, eq=False)
class BlockPattern(HeadPattern):
    """A table of blocks for each head; positions behind the table are dense.

    Attributes:
        blocks: bool [heads, query blocks, key blocks]; heads are G, H or 1.
        block: tokens of a block.
        source: what states it, for messages.
    """

    blocks: np.ndarray
    block: int = 64
    source: str = "the block table"

    @property
    def label(self) -> str:  # type: ignore[override]
        """Sizes of the table."""
        sizes = " x ".join(map(str, self.blocks.shape))
        return f"block table {sizes}, blocks of {self.block}; dense from token {self.horizon} on"

    @property
    def reach(self) -> int:  # type: ignore[override]
        """The tokens that the table has, and one block behind them."""
        return (int(self.blocks.shape[1]) + 1) * self.block

    @property
    def horizon(self) -> int:  # type: ignore[override]
        """The tokens that the table has."""
        return int(self.blocks.shape[1]) * self.block

    def condition(self, heads: HeadCounts, tables: Tables) -> str:
        count, rows, columns = self.blocks.shape
        head_rows, head = heads.rows_of(count, self.source)
        table = tables.add(np.ascontiguousarray(self.blocks[head_rows]))
        inside = f"min(q // {self.block}, {rows - 1}), min(k // {self.block}, {columns - 1})"
        behind = f"q >= {rows * self.block}" + (f" or k >= {columns * self.block}" if columns < rows else "")
        return f"{table}[{head}, {inside}] or {behind}"


@dataclass(frozen=True)
class VerticalSlashPattern(HeadPattern):
    """Single key columns and diagonals for each head (vertical-slash); the query's own key is always attended.

    Attributes:
        columns: for each head the keys that all later queries attend, in ascending order.
        diagonals: for each head the distances q - k that are attended, in ascending order.
        source: what states it, for messages.
    """

    columns: tuple[Sequence[int], ...]
    diagonals: tuple[Sequence[int], ...]
    source: str = "the pattern"

    @property
    def label(self) -> str:  # type: ignore[override]
        """The most columns and diagonals of a head."""
        most = [max(map(len, x), default=0) for x in (self.columns, self.diagonals)]
        return f"vertical-slash, up to {most[0]} columns and {most[1]} diagonals a head"

    @property
    def reach(self) -> int:  # type: ignore[override]
        """Behind the last column and diagonal."""
        return _end_of((*self.columns, *self.diagonals))

    def condition(self, heads: HeadCounts, tables: Tables) -> str:
        head_rows, head = heads.rows_of(len(self.columns), self.source)
        conditions = []
        diagonals = self.diagonals[head_rows]
        for lists, position in ((self.columns[head_rows], "k"), (diagonals, "q - k")):
            size = _end_of(lists)
            if len(lists) * size > _MOST_MARKS:
                raise ArgumentError(
                    f"{self.source} has {len(lists)} heads and {position} up to {size - 1}: their table exceeds 256 MiB"
                )
            marks = np.zeros((len(lists), size), bool)
            for row, some in zip(marks, lists, strict=True):
                row[np.asarray(some, np.int64)] = True
            if lists is diagonals:
                marks[:, 0] = True  # the query's own key
            if marks.any():
                table = tables.add(marks)
                conditions.append(f"{position} < {size} and {table}[{head}, max(0, min({position}, {size - 1}))]")
        return " or ".join(f"({x})" for x in conditions)


def _end_of(lists: Sequence[Sequence[int]]) -> int:
    """One behind the largest number of ascending lists."""
    return 1 + max((some[-1] for some in lists if some), default=0)


@dataclass(frozen=True, eq=False)
class Pattern:
    """The pattern of one attention.

    Attributes:
        condition: on (h, q, k), S and P, without ``k <= q``.
        heads: of the attention.
        label: for reports.
        reach: tokens that show the whole pattern.
        tables: the constants that it looks up.
        horizon: tokens that it is stated for, 0: any number.
        is_causal: whether ``k <= q`` belongs to it.
    """

    condition: MaskExpression
    heads: HeadCounts
    label: str
    reach: int
    tables: Mapping[str, np.ndarray] = field(default_factory=dict)
    horizon: int = 0
    is_causal: bool = True

    @property
    def mask(self) -> MaskExpression:
        """The whole mask, with ``k <= q`` where it is causal."""
        return self.mask_of(self.condition)

    def mask_of(self, condition: MaskExpression) -> MaskExpression:
        """The whole mask of the condition, or of one that counts positions in another way."""
        return causal_mask(condition) if self.is_causal else condition

    @property
    def reads_run_length(self) -> bool:
        """Whether it reads S or P, so that its pairs depend on which queries a run has."""
        return not self.condition.reads.isdisjoint({"S", "P"})

    @property
    def is_of_distances(self) -> bool:
        """Whether it reads positions as distances ``q - k`` alone, so that moving both by any number changes nothing."""

        def reads_position(node: Node, children: Sequence[bool]) -> bool:
            return node in (Q, K) or (any(children) and node not in _DISTANCES)

        return not fold(self.condition.root, reads_position)

    def count_from(self, first: Node) -> MaskExpression:
        """The condition where the first token of a sequence is at position ``first``; it is right for tokens behind it.

        Distances stay as they are. Positions before the first token count as 0, so that tables have an element for them.
        """
        moved: dict[Node, Node] = {i: Call("max", (Constant(0), Binary("-", i, first))) for i in (Q, K)}

        def combine(node: Node, children: Sequence[Node]) -> Node:
            return moved.get(node, node if is_unmoved(node) else rebuild(node, children))

        def is_unmoved(node: Node) -> bool:
            return node in _DISTANCES or node == CAUSAL.root

        return MaskExpression(fold(self.condition.root, combine, is_unmoved))

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for patterns that allow the same by the same text."""
        tables = tuple((n, a.dtype.str, a.shape, a.tobytes()) for n, a in self.tables.items())
        return (self.condition.text, self.heads, tables, *(() if self.is_causal else ("bidirectional",)))


def causal_mask(condition: MaskExpression) -> MaskExpression:
    """A condition with ``k <= q``, unless it states that."""
    return condition if CAUSAL.root in condition.conjuncts else CAUSAL & condition


def build_pattern(parts: Sequence[tuple[range | None, HeadPattern]], heads: HeadCounts) -> Pattern:
    """The pattern of an attention from those of some of its KV heads; other heads are dense.

    Args:
        parts: KV heads of the graph, None for all, each with their pattern. No head is in two of them.
        heads: of the attention.

    Raises:
        ArgumentError: when a pattern is one of other heads, when some are causal and some are not, or the text becomes too long.
    """
    if len({p.is_causal for _, p in parts}) > 1:
        raise ArgumentError(
            "--sparsify: heads of one attention have causal and bidirectional patterns, expected one kind"
        )
    tables = Tables()
    texts: list[str] = []
    others: list[str] = []
    for some, pattern in parts:
        text = pattern.condition(heads, tables)
        if some is None or len(some) == heads.G:
            texts.append(text)
            continue
        head = heads.own_kv_head
        texts.append(f"({text}) and {head} >= {some.start} and {head} < {some.stop}")
        others.append(f"({head} < {some.start} or {head} >= {some.stop})")
    if len(others) == len(parts):
        texts.append(" and ".join(others))
    whole = " or ".join(f"({t})" for t in texts)
    try:
        condition = MaskExpression.parse(whole, tables.arrays)
    except MaskSyntaxError as error:
        raise ArgumentError(f"--sparsify makes no legal mask: {error}") from None
    label = "; ".join(dict.fromkeys(p.label for _, p in parts))
    reach = min(LONGEST, max(p.reach for _, p in parts))
    horizon = min((p.horizon for _, p in parts if p.horizon), default=0)
    return Pattern(condition, heads, label, reach, tables.arrays, horizon, parts[0][1].is_causal)
