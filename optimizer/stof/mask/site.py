# SPDX-License-Identifier: Apache-2.0
"""What the matcher finds and the lifter recovers: plain values, shared by every step.

Shapes use one alphabet: B batch, H query heads, G key/value heads, S query length, T key length,
D head size, Dv value head size.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from stof.mask.expression import EVERY_PAIR, MaskExpression
from stof.mask.roundings import SiteRoundings
from stof.mask.score_view import ScoreView
from stof.symbolic.algebra.terms import Int

# A mask value up to this forbids: beside an allowed score its exponential is 0. Exporters write -10000 (it fits fp16) or less;
# position biases and scores stay far above it.
FORBIDDING_VALUE = -1e4


class Layout(enum.StrEnum):
    """Memory order of a 4-D (or packed 3-D) query, key, value or output tensor."""

    BHSD = "BHSD"
    BSHD = "BSHD"
    BSN = "BSN"


class EmptyRows(enum.StrEnum):
    """What a query without an allowed key gives (docs/reference/operators.md)."""

    ZERO = "zero"
    NAN = "nan"
    MEAN = "mean"
    ALL = "all"


class OperandView(enum.StrEnum):
    """How a tensor of the graph becomes a run-time operand."""

    SAME = "same"
    ROW = "row"  # [L], and axes of size 1: one row for all batches
    ROWS = "rows"  # [B, L], and axes of size 1 after the first
    FLAT = "flat"  # one number, or [B, 1, ..]
    TURNED = "turned"  # [L, B]


class TermKind(enum.StrEnum):
    """How a tensor of the graph changes the scores [B, H, S, T] before the softmax."""

    ADD = "add"  # scores + tensor
    KEEP = "keep"  # Where(tensor, scores, fill)
    DROP = "drop"  # Where(tensor, fill, scores)


@dataclass(frozen=True)
class Operand:
    """One of query, key, value: a tensor of the graph and how it lies in memory.

    ``perm`` is the transposition that gives the layout, where the tensor itself has none that the op knows. ``joined``: its
    first two axes are the batch, in two parts. ``grouped``: it has the heads in two axes, groups and the heads of each.
    """

    tensor: str
    layout: Layout
    perm: tuple[int, ...] = ()
    joined: bool = False
    grouped: bool = False

    def lay_out(self, array: np.ndarray) -> np.ndarray:
        """The tensor's value in its layout."""
        array = heads_in_one(array, self.layout) if self.grouped else array
        array = array.reshape(-1, *array.shape[2:]) if self.joined else array
        return np.transpose(array, self.perm) if self.perm else array


def heads_in_one(array: np.ndarray, layout: Layout) -> np.ndarray:
    """A tensor of a layout BHSD or BSHD that has its heads in two axes, with them in one."""
    axis = 1 if layout is Layout.BHSD else 2
    shape = array.shape
    return array.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


@dataclass(frozen=True)
class MaskTerm:
    """One mask or bias tensor of a site, in the order of application (first applied first)."""

    kind: TermKind
    tensor: str
    fill: float | None = None  # KEEP and DROP
    scale: float = 1.0  # the tensor's contribution is multiplied by this (a scale applied after the Add)
    view: ScoreView | None = None  # the axes in which it meets the scores, where these are not [B, H, S, T]

    @property
    def zeroes(self) -> bool:
        """Whether it makes scores zero, which another term then has to forbid: a mask that was multiplied."""
        return self.kind is not TermKind.ADD and self.fill == 0

    def spread(self, array: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
        """The tensor's value as it broadcasts to scores [B, H, S, T] of these sizes.

        Raises:
            ValueError: when it does not.
        """
        return array if self.view is None else self.view.spread(array, sizes)

    def apply(self, scores: np.ndarray, value: np.ndarray) -> np.ndarray:
        """Scores [B, H, S, T] with the term's value, spread, in the arithmetic of their type."""
        number = scores.dtype.type
        if self.kind is TermKind.ADD:
            return np.asarray(scores + value.astype(scores.dtype) * number(self.scale))
        keep = value.astype(bool) if self.kind is TermKind.KEEP else ~value.astype(bool)
        return np.where(keep, scores, number(-np.inf if self.fill is None else self.fill))


@dataclass(frozen=True)
class AddedValues:
    """A tensor that is added to weights times values: the weights again, times rows by relative position.

    Attributes:
        tensor: what is added, of the shape of the result.
        weights: the tensor of the weights that it is made of.
    """

    tensor: str
    weights: str


@dataclass(frozen=True)
class AttentionSite:
    """An attention core in the graph.

    ``output`` is the tensor that the new op replaces; it is written in ``output_layout``, and transposed by ``output_perm``
    where that is given, and flattened to two axes with ``output_flat``.
    ``nodes`` are the first outputs (names of tensors are unique) of the nodes between the first MatMul and the output;
    they disappear with it. ``dims`` are the symbolic sizes of the scores, B, H, S, T.
    """

    name: str  # stable label for the user: the softmax node's name, or ``attention_<i>``
    index: int
    softmax: str  # name of the softmax (or fused) node
    query: Operand
    key: Operand
    value: Operand
    output: str
    output_layout: Layout
    num_heads: int
    kv_num_heads: int
    head_size: int
    value_head_size: int
    scale: float
    dtype: int  # onnx.TensorProto data type of query
    terms: tuple[MaskTerm, ...] = ()
    softcap: float = 0.0
    floored: bool = False  # Max with the lowest finite number before the softmax: no -inf enters it
    nan_guard: bool = False  # Softmax -> IsNaN -> Where(0): empty rows give zero
    # Weights made 0 after the softmax, by a mask that is proven to be the scores' own; without a fill by a product, which
    # leaves NaN.
    pair_guard: MaskTerm | None = None
    zeroed: bool = (
        False  # the same by the very condition that masks the scores, which may be data: empty rows give zero
    )
    query_factor: tuple[str, str] | None = (
        None  # "Mul" or "Div" and a tensor [.., S or 1, 1]: a scale of each head or row
    )
    sink: str | None = None  # tensor of H logits, one more in every row's softmax of that head
    sink_values: tuple[
        float, ...
    ] = ()  # the logits themselves, where they are constants of no tensor: ``sink`` is empty
    row_guard: str | None = None  # bool tensor that zeroes rows after PV (transformers 5)
    added_values: AddedValues | None = None  # part of the output
    roundings: SiteRoundings | None = None  # to 8 bits: query, key and value are numbers of codes
    unguarded: AttentionSite | None = None  # the same, ended before the row guard, which then stays in the graph
    query_offset: int = 0  # 1: the queries are the last S of T positions
    scores_shape: tuple[str, str, str, str] = ("B", "H", "S", "T")  # for people
    dims: tuple[Int, ...] = ()  # B, H, S, T
    nodes: tuple[str, ...] = ()
    output_perm: tuple[int, ...] = ()
    output_flat: bool = False  # the first two axes of the (transposed) output are one: [B*S, N]
    output_joined: bool = False  # the output has the batch in two axes, as the queries have
    output_grouped: tuple[int, ...] = ()  # G, R, where the output has its heads in these two axes
    form: str = ""  # words for the report: "sdpa, split scale, Where mask"


@dataclass(frozen=True)
class RuntimeOperand:
    """A run-time vector that the expression reads, taken from a tensor of the graph.

    ``at``: the element of each row that is read, where a vector of positions gives one number: a cache's first new position.
    """

    role: str  # "pad", "segment_q", ...
    tensor: str
    view: OperandView = OperandView.SAME
    at: int | None = None

    def prepare(self, array: np.ndarray) -> np.ndarray:
        """The tensor's value as the op takes it: [B or 1, L], or [B or 1] of lengths."""
        whole = self._rows(array)
        return whole if self.at is None else whole[:, self.at]

    def _rows(self, array: np.ndarray) -> np.ndarray:
        match self.view:
            case OperandView.ROW:
                return array.reshape(1, -1)
            case OperandView.ROWS:
                return array.reshape(len(array), math.prod(array.shape[1:]))  # rows may be none
            case OperandView.FLAT:
                return array.reshape(-1)
            case OperandView.TURNED:
                return np.transpose(array)
            case OperandView.SAME:
                return array


@dataclass(frozen=True)
class RelativeBias:
    """Additive terms that are a function of the head and of key minus query: a table fp32 [heads, size], size odd.

    ``heads`` is H or 1; distances beyond the table have the value at its end (docs/reference/operators.md).
    """

    terms: tuple[MaskTerm, ...]
    heads: int
    size: int
    data: bytes


@dataclass(frozen=True)
class RowRange:
    """The rows of a table that the pairs of a static window read, around the row that a query and the key at its position read.

    Attributes:
        of_queries: times S, ``of_keys`` times T and ``offset`` are the number of that row.
        before: rows in front of it.
        after: rows behind it; pairs are never more than S or T apart.
    """

    of_queries: int
    of_keys: int
    offset: int
    before: int
    after: int

    def limits(self, queries: int, keys: int) -> tuple[int, int]:
        """The first row, and the one behind the last, for S queries and T keys."""
        middle = self.of_queries * queries + self.of_keys * keys + self.offset
        return max(middle - self.before, 0), max(middle + 1 + min(self.after, max(queries, keys)), 1)


@dataclass(frozen=True)
class RelativeTable:
    """A tensor of rows by relative position, and how it becomes an operand [H or 1, L, D or D + 1].

    Attributes:
        tensor: of the graph.
        head_axis: of heads; None: all heads share the rows.
        row_axis: of rows. Axes that are neither of these nor columns are read at 0.
        column_axis: of the D columns.
        factor: by which the rows are multiplied.
        shift: fp32 [H or 1, D] that the graph adds to queries (or keys) before they meet the rows, beyond what the site adds;
            its product with the rows is column D + 1. Empty: there is none.
        shift_heads: H or 1.
        data: the rows themselves, fp32 [L, D], where the graph holds them for pairs alone; ``tensor`` is no part then.
        rows: those that the operand has; None: all.
        is_padded: the operand has a row of zeros more at either end.
    """

    tensor: str
    head_axis: int | None
    row_axis: int
    column_axis: int
    factor: float = 1.0
    shift: bytes = b""
    shift_heads: int = 1
    data: bytes = b""
    rows: RowRange | None = None
    is_padded: bool = False

    def rows_array(self, columns: int) -> np.ndarray | None:
        """The rows as an array [L, ``columns``], where they are data."""
        return np.frombuffer(self.data, np.float32).reshape(-1, columns) if self.data else None

    def shift_array(self) -> np.ndarray | None:
        """The shift as an array [H or 1, D]."""
        return np.frombuffer(self.shift, np.float32).reshape(self.shift_heads, -1) if self.shift else None


@dataclass(frozen=True)
class RelativeTerm:
    """A part of the scores: queries, or keys, times the row of a relative table that an expression of q and k names.

    With the role relative_value it is a part of the result: weights times rows.

    Attributes:
        role: of the operand: relative_key, relative_key1, relative_query or relative_value.
        table: the rows.
        index: an integer expression; the operator clamps it into the table.
        heads: H, or 1 where heads share the table.
        term: the additive term that it is a part of; of values what is added to the result.
    """

    role: str
    table: RelativeTable
    index: MaskExpression
    heads: int
    term: MaskTerm


@dataclass(frozen=True)
class BiasFactor:
    """A number of each query that multiplies a table by distance: a tensor [B, H, S, 1], or [B * H, S, 1] where it is merged.

    ``term`` is the additive term that both together are.
    """

    tensor: str
    is_merged: bool
    term: MaskTerm

    def lay_out(self, array: np.ndarray, heads: int) -> np.ndarray:
        """The tensor's value as the operator takes it: [B, H, S]."""
        return array.reshape(-1, heads, array.shape[-2]) if self.is_merged else array[..., 0]


class NoteReason(enum.Enum):
    """Why a mask has a note."""

    STAYS_BIAS = enum.auto()  # a tensor stays an additive bias
    BIAS_MAY_FORBID = enum.auto()  # a bias may leave a row without a key
    DIFFERENT_STRENGTHS = enum.auto()  # masks that are added forbid with different numbers
    WEAKER_MASKS = enum.auto()  # which keys a fully masked row attends instead
    BIAS_TABLE = enum.auto()  # biases become a table by distance
    RELATIVE_TERM = enum.auto()  # biases become products with rows by relative position, or why they do not
    LONGEST_IS_ALL = enum.auto()  # the largest number of keys is taken to be all of them


@dataclass(frozen=True)
class WeakerMasks:
    """What fully masked rows attend, where several masks forbid with finite numbers.

    A row attends the keys of the first expression that leaves it one. ``keeps_scores``: by their scores; else with equal
    weights, because every score of such a row became the same number.
    """

    expressions: tuple[MaskExpression, ...]
    keeps_scores: bool


@dataclass(frozen=True)
class MaskNote:
    """A line about a mask for the report."""

    reason: NoteReason
    text: str
    tensor: str = ""  # the one that it is about

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class LiftedMask:
    """The mask of one site as an expression, with what it reads at run time.

    ``tables`` maps table names to constants (stored as (name, dtype, shape, bytes) so that the value is hashable). ``bias``
    lists the terms that stay an additive bias, ``relative`` those that became a table by distance, which
    ``relative_factor`` multiplies, ``relative_terms`` those that
    became products with tables. With ``weaker``, ``empty_rows`` is about the rows that no mask of it leaves a key.
    """

    expression: MaskExpression = EVERY_PAIR
    operands: tuple[RuntimeOperand, ...] = ()
    tables: tuple[tuple[str, str, tuple[int, ...], bytes], ...] = ()
    bias: tuple[MaskTerm, ...] = ()
    by_data: tuple[MaskTerm, ...] = ()  # those of ``bias`` that forbid by data of which no expression can be made
    relative: RelativeBias | None = None
    relative_factor: BiasFactor | None = None
    relative_terms: tuple[RelativeTerm, ...] = ()
    weaker: WeakerMasks | None = None
    empty_rows: EmptyRows = EmptyRows.ZERO
    family: str = ""  # "window(64, 64)", "causal", ...
    density: float | None = None
    notes: tuple[MaskNote, ...] = ()


def tables_of(mask: LiftedMask) -> dict[str, np.ndarray]:
    """The tables of a lifted mask as arrays."""
    return arrays_of(mask.tables)


def arrays_of(tables: Iterable[tuple[str, str, tuple[int, ...], bytes]]) -> dict[str, np.ndarray]:
    """Tables as a mask stores them, as arrays by their names."""
    return {n: np.frombuffer(data, np.dtype(t)).reshape(shape) for n, t, shape, data in tables}


@dataclass(frozen=True)
class Finding:
    """What became of a site (or of a softmax that is none): a row of the report."""

    site: str
    replaced: bool
    reason: str
    details: dict[str, object] = field(default_factory=dict, compare=False)
