# SPDX-License-Identifier: Apache-2.0
"""Rules of the operators that move elements, make index tensors or return shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from onnx import TensorProto, numpy_helper

from stof.graph.external_data import is_external
from stof.symbolic.algebra.conditions import all_of, equal, less_equal, select
from stof.symbolic.algebra.divisions import floor_div, floor_mod
from stof.symbolic.algebra.int_bounds import bound, rebuild
from stof.symbolic.algebra.piecewise import to_int
from stof.symbolic.algebra.terms import FALSE, Int, Real, Scalar, integer, of_atom, real, to_real, var
from stof.symbolic.facts import Fact, Rule, RuleContext, dtype_kind
from stof.symbolic.rules import reshape, scatter
from stof.symbolic.rules.broadcasting import broadcast, project
from stof.symbolic.rules.dropout import may_drop
from stof.symbolic.rules.movement_helpers import element_count, moved_fact, wrap_index
from stof.symbolic.tensor import Index, SymTensor, constant_tensor

INT64 = TensorProto.INT64
ZERO, ONE = integer(0), integer(1)


def _vector(elements: list[Int]) -> Fact:
    shape = (integer(len(elements)),)

    def at(index: Index) -> Scalar:
        i = index[0].constant
        return elements[i] if i is not None else of_atom("opaque", "element", tuple(elements), index[0])

    return Fact(INT64, shape, SymTensor(shape, "i", at))


def _shape_of(context: RuleContext) -> list[Fact] | None:
    shape = context.shape(0)
    if shape is None:
        return None
    start, end = context.number("start", 0), context.number("end", len(shape))
    return [_vector(list(shape)[slice(start, end)])]


def _size(context: RuleContext) -> list[Fact] | None:
    shape = context.shape(0)
    if shape is None:
        return None
    total = element_count(shape)
    return [Fact(INT64, (), SymTensor((), "i", lambda _: total))]


def _identity(context: RuleContext) -> list[Fact]:
    return [context.fact(0)]


def _dropout(context: RuleContext) -> list[Fact]:
    def constant(name: str) -> np.ndarray | None:
        value = context.facts.get(name, Fact()).value
        return None if value is None else value.constant

    fact = context.fact(0)
    kept = Fact(fact.dtype, fact.shape) if may_drop(context.node, constant) else fact
    return [kept, Fact(TensorProto.BOOL, fact.shape)]


def _gather(context: RuleContext) -> list[Fact] | None:
    data, indices = context.shape(0), context.shape(1)
    if data is None or indices is None:
        return None
    axis = context.number("axis", 0) % len(data)
    shape = (*data[:axis], *indices, *data[axis + 1 :])
    source, where = context.value(0), context.value(1)
    if source is None or where is None:
        return [Fact(context.fact(0).dtype, shape)]
    rank = len(indices)
    _equate_read(context, where, data[axis])

    def at(index: Index) -> Scalar:
        picked = wrap_index(to_int(where.at(index[axis : axis + rank])), data[axis])
        return source.at((*index[:axis], picked, *index[axis + rank :]))

    return [moved_fact(context, shape, at)]


def _equate_read(context: RuleContext, where: SymTensor, size: Int, part: int | None = None) -> None:
    """Equates the number of positions 0, 1, ... that are gathered from an axis with its size.

    That is how a mask's length is found to be the number of keys. The axis may be merged of two: then the size of the inner
    one is equated.
    """
    if size.constant is not None or all(d.constant is not None for d in where.shape):
        return
    rank = where.rank - (part is not None)
    probe = tuple(ZERO if where.shape[a] == ONE else var(f"any{a}") for a in range(rank))
    position = to_int(where.at(probe if part is None else (*probe, integer(part))))
    for variable, length in zip(probe, where.shape, strict=False):
        if variable == ZERO:
            continue
        if position == variable:
            context.equate(length, size, is_forced=False)
        row = position - variable
        for outer, count in zip(probe, where.shape, strict=False):
            width = row.divide(outer)
            if width is not None and width.constant is None and size == width * count:
                context.equate(length, width, is_forced=False)


def _gather_nd(context: RuleContext) -> list[Fact] | None:
    data, indices = context.shape(0), context.shape(1)
    if data is None or indices is None or context.number("batch_dims", 0):
        return None
    depth = indices[-1].constant
    if depth is None:
        return None
    shape = (*indices[:-1], *data[depth:])
    source, where = context.value(0), context.value(1)
    if source is None or where is None:
        return [Fact(context.fact(0).dtype, shape)]
    rank = len(indices) - 1
    for i in range(depth):
        _equate_read(context, where, data[i], i)

    def at(index: Index) -> Scalar:
        picked = tuple(wrap_index(to_int(where.at((*index[:rank], integer(i)))), data[i]) for i in range(depth))
        return source.at((*picked, *index[rank:]))

    return [moved_fact(context, shape, at)]


def _gather_elements(context: RuleContext) -> list[Fact] | None:
    data, indices = context.shape(0), context.shape(1)
    if data is None or indices is None:
        return None
    axis = context.number("axis", 0) % len(data)
    source, where = context.value(0), context.value(1)
    if source is None or where is None:
        return [Fact(context.fact(0).dtype, indices)]

    def at(index: Index) -> Scalar:
        picked = wrap_index(to_int(where.at(index)), data[axis])
        return source.at((*index[:axis], picked, *index[axis + 1 :]))

    return [moved_fact(context, indices, at)]


def _slice(context: RuleContext) -> list[Fact] | None:
    data = context.shape(0)
    starts, ends = context.ints(1), context.ints(2)
    if data is None or starts is None or ends is None:
        return None
    axes = context.fixed_ints(3) if context.has(3) else list(range(len(starts)))
    steps = context.fixed_ints(4) if context.has(4) else [1] * len(starts)
    if axes is None or steps is None:
        return None
    shape = list(data)
    plan: dict[int, tuple[Int, int]] = {}
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis %= len(data)
        n = data[axis]
        if step < 0:
            if n.constant is None:
                if step != -1:
                    return None
                first, length = _slice_backwards(start, end, n)
                plan[axis], shape[axis] = (first, step), length
                continue
            span = range(*slice(start.constant, end.constant, step).indices(n.constant))
            plan[axis] = (integer(span.start), step)
            shape[axis] = integer(len(span))
            continue
        first, last = _clamp(start, n), _clamp(end, n)
        length = last - first
        if step != 1:
            length = floor_div(length + integer(step - 1), step)
        plan[axis] = (first, step)
        shape[axis] = integer(max(0, length.constant)) if length.constant is not None else length
        if context.is_exact and not (_is_within(first, n) and _is_within(last, n)):
            shape[axis] = context.unknown_size(axis)

    def at(index: Index) -> Scalar:
        source_index = [plan[a][0] + i * integer(plan[a][1]) if a in plan else i for a, i in enumerate(index)]
        value = context.value(0)
        assert value is not None
        return value.at(tuple(source_index))

    return [moved_fact(context, tuple(shape), at)]


def _slice_backwards(start: Int, end: Int, n: Int) -> tuple[Int, Int]:
    """The first position and the length of a slice of step -1 along an axis of n."""
    first = _clamp(start, n)
    first = n - ONE if first == n else first
    c = end.constant
    last = integer(-1) if c is not None and c <= -(1 << 31) + 1 else _clamp(end, n)
    return first, first - last


def _clamp(position: Int, n: Int) -> Int:
    c = position.constant
    if c is not None and c < 0:
        position = n + position
        if n.constant is not None:
            return integer(max(0, position.constant or 0))
        return position
    if c is not None and n.constant is not None:
        return integer(min(c, n.constant))
    if c is not None and c >= (1 << 31) - 1:
        return n
    if bound(position - n, upper=False) >= 0:
        return n
    # A negative length counts from the end. With a length of 0, no element is read.
    if bound(position, upper=True, smallest=1.0) < 0:
        position = n + position
    return position  # within the axis in every valid run


def _is_within(position: Int, n: Int) -> bool:
    """Whether a position lies in an axis of n in every run, where sizes are at least 1. One in a table of fixed size does."""
    least = bound(position, upper=False, smallest=1.0)
    return least >= 0 and (n.constant is not None or bound(n - position, upper=False, smallest=1.0) >= 0)


def _concat(context: RuleContext) -> list[Fact] | None:
    count = len(context.node.input)
    shapes = [context.shape(i) for i in range(count)]
    if any(s is None for s in shapes):
        return None
    known_shapes = [s for s in shapes if s is not None]
    axis = context.number("axis", 0) % len(known_shapes[0])
    starts = [ZERO]
    for s in known_shapes:
        if len(s) != len(known_shapes[0]):
            return None
        starts.append(starts[-1] + s[axis])
        context.equate_shapes(known_shapes[0][:axis] + known_shapes[0][axis + 1 :], s[:axis] + s[axis + 1 :])
    shape = (*known_shapes[0][:axis], starts[-1], *known_shapes[0][axis + 1 :])
    values = [context.value(i) for i in range(count)]
    if any(v is None for v in values):
        return [Fact(context.fact(0).dtype, shape)]
    tensors = [v for v in values if v is not None]

    def at(index: Index) -> Scalar:
        position = index[axis]

        def element(i: int) -> Scalar:
            offset = position - starts[i]
            size = tensors[i].shape[axis].constant
            if tensors[i].is_constant and offset.constant is None and size is not None and count > 1:
                # Keeps look-ups within a stored part where another part is selected.
                offset = rebuild("max", (rebuild("min", (offset, integer(size - 1))), ZERO))
            return tensors[i].at((*index[:axis], offset, *index[axis + 1 :]))

        for i in range(count):
            inside = bound(position - starts[i + 1], upper=True) < 0
            if inside and bound(position - starts[i], upper=False) >= 0:
                return element(i)
        result = element(count - 1)
        for i in reversed(range(count - 1)):
            result = select(less_equal(position + ONE, starts[i + 1]), element(i), result)
        return result

    return [moved_fact(context, shape, at)]


def _expand(context: RuleContext) -> list[Fact] | None:
    data, wanted = context.shape(0), context.ints(1)
    if data is None or wanted is None:
        return None
    shape = broadcast([data, tuple(wanted)], context)
    value = context.value(0)
    return [moved_fact(context, shape, lambda index: value.at(project(index, data)) if value else ZERO)]


def _tile(context: RuleContext) -> list[Fact] | None:
    data, repeats = context.shape(0), context.ints(1)
    if data is None or repeats is None:
        return None
    shape = tuple(d * r for d, r in zip(data, repeats, strict=True))
    value = context.value(0)

    def at(index: Index) -> Scalar:
        assert value is not None
        source_index = []
        for i, d, r in zip(index, data, repeats, strict=True):
            if r == ONE:
                source_index.append(i)
            elif d == ONE:
                source_index.append(ZERO)
            elif d.constant is not None:
                source_index.append(floor_mod(i, d.constant))
            else:
                source_index.append(of_atom("opaque", "mod", i, d))
        return value.at(tuple(source_index))

    return [moved_fact(context, shape, at)]


def _transpose(context: RuleContext) -> list[Fact] | None:
    data = context.shape(0)
    if data is None:
        return None
    perm_attribute = context.attribute("perm")
    perm = list(perm_attribute) if perm_attribute is not None else list(reversed(range(len(data))))  # type: ignore[call-overload]
    shape = tuple(data[p] for p in perm)
    value = context.value(0)

    def at(index: Index) -> Scalar:
        assert value is not None
        source_index = [ZERO] * len(perm)
        for i, p in zip(index, perm, strict=True):
            source_index[p] = i
        return value.at(tuple(source_index))

    return [moved_fact(context, shape, at)]


def _range(context: RuleContext) -> list[Fact] | None:
    values = [context.value(i) for i in range(3)]
    dtype = context.fact(0).dtype
    kind = dtype_kind(dtype)
    if any(v is None for v in values) or kind not in ("i", "f"):
        return None
    scalars = [v.at(() if v.rank == 0 else (ZERO,)) for v in values if v is not None]
    if kind == "f" and any(isinstance(x, Real) and not _holds_integer(x) for x in scalars):
        return _fractional_range(dtype, scalars)
    start, limit, delta = (to_int(x) for x in scalars)
    if delta.constant is None or delta.constant == 0:
        return None
    span = limit - start if delta.constant > 0 else start - limit
    step = abs(delta.constant)
    if step != 1:
        if span.constant is None:
            return None
        span = integer(-(-span.constant // step))
    shape = (span if span.constant is None else integer(max(0, span.constant)),)
    return [Fact(dtype, shape, SymTensor(shape, kind, lambda index: start + index[0] * delta))]


def _fractional_range(dtype: int, scalars: Sequence[Scalar]) -> list[Fact] | None:
    """A range from a fraction in steps of 1: 0.5, 1.5, ... for centers of patches."""
    start, limit, delta = scalars
    if not isinstance(start, Real) or start.kind != "const" or not isinstance(start.args[0], float):
        return None
    if any(isinstance(x, Real) and not _holds_integer(x) for x in (limit, delta)) or to_int(delta) != ONE:
        return None
    count = to_int(limit) - integer(math.floor(start.args[0]))
    shape = (count if count.constant is None else integer(max(0, count.constant)),)
    return [Fact(dtype, shape, SymTensor(shape, "f", lambda index: Real("add", (to_real(index[0]), start))))]


def _holds_integer(value: Real) -> bool:
    return value.kind == "int" or (value.kind == "const" and float(str(value.args[0])).is_integer())


def _constant_of_shape(context: RuleContext) -> list[Fact] | None:
    wanted = context.ints(0)
    if wanted is None:
        return None
    proto = context.attributes.get("value")
    if proto is not None and is_external(proto.t):
        return None
    array = numpy_helper.to_array(proto.t) if proto is not None else np.zeros(1, np.float32)
    dtype = proto.t.data_type if proto is not None else TensorProto.FLOAT
    fill = constant_tensor("", array.reshape(1))
    shape = tuple(wanted)
    return [Fact(dtype, shape, SymTensor(shape, fill.kind, lambda _: fill.at((ZERO,))))]


def _zero(kind: str) -> Scalar:
    return FALSE if kind == "b" else ZERO if kind == "i" else real(0.0)


def _trilu(context: RuleContext) -> list[Fact] | None:
    data = context.shape(0)
    value = context.value(0)
    if data is None:
        return None
    k = ZERO
    if context.has(1):
        offset = context.value(1)
        if offset is None:
            return [Fact(context.fact(0).dtype, data)]
        k = to_int(offset.at(() if offset.rank == 0 else (ZERO,)))
    upper = context.number("upper", 1)

    def at(index: Index) -> Scalar:
        assert value is not None
        row, column = index[-2], index[-1]
        kept = less_equal(row + k, column) if upper else less_equal(column, row + k)
        return select(kept, value.at(index), _zero(value.kind))

    return [moved_fact(context, data, at)]


def _eye_like(context: RuleContext) -> list[Fact] | None:
    data = context.shape(0)
    if data is None:
        return None
    dtype = context.number("dtype", context.fact(0).dtype)
    kind = dtype_kind(dtype)
    k = integer(context.number("k", 0))
    if kind is None:
        return [Fact(dtype, data)]
    return [Fact(dtype, data, SymTensor(data, kind, lambda index: to_int(equal(index[0] + k, index[1]))))]


def _split(context: RuleContext) -> list[Fact] | None:
    data = context.shape(0)
    if data is None:
        return None
    axis = context.number("axis", 0) % len(data)
    count = len(context.node.output)
    lengths: list[Int] | None = None
    if context.has(1):
        lengths = context.ints(1)
    elif "split" in context.attributes:
        lengths = [integer(n) for n in context.attribute("split")]  # type: ignore[attr-defined]
    elif data[axis].constant is not None:
        n = data[axis].constant or 0
        each = -(-n // count)
        lengths = [integer(min(each, n - i * each)) for i in range(count)]
    else:
        each_symbolic = data[axis].divide(integer(count))
        lengths = None if each_symbolic is None else [each_symbolic] * count
    if lengths is None:
        return None
    facts = []
    start = ZERO
    for length in lengths:
        shape = (*data[:axis], length, *data[axis + 1 :])

        def at(index: Index, first: Int = start) -> Scalar:
            value = context.value(0)
            assert value is not None
            return value.at((*index[:axis], index[axis] + first, *index[axis + 1 :]))

        facts.append(moved_fact(context, shape, at))
        start = start + length
    return facts


def _pad(context: RuleContext) -> list[Fact] | None:
    data, amounts = context.shape(0), context.ints(1)
    if data is None or amounts is None:
        return None
    rank = len(data)
    axes = context.fixed_ints(3) if context.has(3) else list(range(rank))
    if axes is None or len(amounts) != 2 * len(axes):
        return None
    pads = [ZERO] * (2 * rank)
    for i, axis in enumerate(axes):
        pads[axis % rank], pads[axis % rank + rank] = amounts[i], amounts[i + len(axes)]
    shape = tuple(d + pads[a] + pads[a + rank] for a, d in enumerate(data))
    value, fill = context.value(0), context.value(2)
    if context.attribute("mode", "constant") != "constant" and any(p != ZERO for p in pads):
        return [Fact(context.fact(0).dtype, shape)]

    def at(index: Index) -> Scalar:
        assert value is not None
        source_index = tuple(i - pads[a] for a, i in enumerate(index))
        inside = all_of(
            c for i, d in zip(source_index, data, strict=True) for c in (less_equal(ZERO, i), less_equal(i + ONE, d))
        )
        outside = _zero(value.kind) if fill is None else fill.at(() if fill.rank == 0 else (ZERO,))
        return select(inside, value.at(source_index), outside)

    return [moved_fact(context, shape, at)]


RULES: dict[str, Rule] = {
    "Shape": _shape_of,
    "Size": _size,
    "Identity": _identity,
    "Dropout": _dropout,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Slice": _slice,
    "Concat": _concat,
    "Expand": _expand,
    "Tile": _tile,
    "Transpose": _transpose,
    "Range": _range,
    "ConstantOfShape": _constant_of_shape,
    "Trilu": _trilu,
    "EyeLike": _eye_like,
    "Split": _split,
    "Pad": _pad,
}
RULES |= reshape.RULES | scatter.RULES
