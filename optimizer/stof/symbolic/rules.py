# SPDX-License-Identifier: Apache-2.0
"""What each operator does to shapes and values. A rule returns one Fact per output, or None."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from onnx import TensorProto, numpy_helper

from stof.symbolic import bits, compute, counting, divisions, floats, movement, ranges, widths
from stof.symbolic.casework import reads_number, times
from stof.symbolic.facts import Context, Fact, Rule, dtype_kind
from stof.symbolic.tensor import Index, Shape, SymTensor, constant_tensor
from stof.symbolic.terms import (
    Cond,
    Int,
    Real,
    Scalar,
    all_of,
    any_of,
    bound,
    cases,
    equal,
    integer,
    less_equal,
    negate,
    of_atom,
    parts,
    real,
    select,
    to_cond,
    to_int,
    to_real,
    var,
)

_MOST_SIZES = 8  # that are told apart
BOOL, INT64, FLOAT = TensorProto.BOOL, TensorProto.INT64, TensorProto.FLOAT


def broadcast(shapes: list[Shape], context: Context | None = None) -> Shape:
    """The broadcast shape; symbolic sizes that differ are taken for equal, as the graph must be valid."""
    rank = max(len(s) for s in shapes)
    one = integer(1)
    result = []
    for axis in range(rank):
        found = one
        for s in shapes:
            place = axis - rank + len(s)
            d = s[place] if place >= 0 else one
            if one not in (d, found) and context is not None:
                context.equate(found, d)
            if d != one and (found == one or (found.constant is None and d.constant is not None)):
                found = d
        result.append(found)
    return tuple(result)


def project(index: Index, shape: Shape) -> Index:
    """The index of a broadcast operand of ``shape``."""
    own = index[len(index) - len(shape) :]
    return tuple(integer(0) if d == integer(1) else i for i, d in zip(own, shape, strict=True))


def elementwise(
    context: Context, function: Callable[..., Scalar], dtype: int | None, count: int | None = None
) -> list[Fact] | None:
    """The facts of an operator that works on each element of its broadcast inputs."""
    inputs = [context.fact(i) for i in range(count or len(context.node.input))]
    shapes = [f.shape for f in inputs]
    if any(s is None for s in shapes):
        return None
    known = [s for s in shapes if s is not None]
    shape = broadcast(known, context)
    out = dtype if dtype is not None else inputs[-1].dtype or inputs[0].dtype
    kind = dtype_kind(out)
    values = [f.value for f in inputs]
    if kind is None or any(v is None for v in values):
        return [Fact(out, shape)]
    tensors = [v for v in values if v is not None]

    def at(index: Index) -> Scalar:
        return function(*(t.at(project(index, s)) for t, s in zip(tensors, known, strict=True)))

    return [Fact(out, shape, SymTensor(shape, kind, at))]


def fold_real(kind: str, x: Scalar, y: Scalar) -> Scalar:
    """A float operation, computed where its operands are known."""
    left, right = to_real(x), to_real(y)
    if kind != "div" and "int" in (left.kind, right.kind) and (whole := floats.whole(kind, left, right)) is not None:
        return whole
    if left.kind == "const" and right.kind == "const":
        a, b = left.args[0], right.args[0]
        assert isinstance(a, float)
        assert isinstance(b, float)
        with np.errstate(all="ignore"):
            match kind:
                case "add":
                    return real(a + b)
                case "mul":
                    return real(a * b)
                case "div":
                    return real(float(np.float64(a) / np.float64(b)))
                case "min":
                    return real(min(a, b))
                case "max":
                    return real(max(a, b))
    return neutral(kind, left, right) or _shifted(kind, left, right) or Real(kind, (left, right))


def _shifted(kind: str, left: Real, right: Real) -> Real | None:
    """A rounded integer and a whole number: the rounded sum, as order and the sums of small numbers are kept."""
    if kind == "add" and right.kind == "rounded":
        left, right = right, left
    if kind != "add" or left.kind != "rounded" or right.kind != "const":
        return None
    (inner, largest), number = left.args, right.args[0]
    assert isinstance(inner, Int)
    assert isinstance(largest, int)
    assert isinstance(number, float)
    if not number.is_integer() or 2 * abs(number) > largest:
        return None
    return Real("rounded", (inner + integer(int(number)), largest - abs(int(number))))


def neutral(kind: str, left: Real, right: Real) -> Real | None:
    """The other operand of a neutral one. Not 0 * x: x may be infinite."""
    zero, one = real(0.0), real(1.0)
    if kind == "add":
        return right if left == zero else left if right == zero else None
    if kind == "mul" and left == one:
        return right
    return left if kind in ("mul", "div") and right == one else None


def negative(x: Scalar) -> Scalar:
    """-x."""
    if isinstance(x, Int):
        return -x
    value = to_real(x)
    if value.kind == "const":
        number = value.args[0]
        assert isinstance(number, float)
        return real(-number)
    if value.kind == "int":
        inner = value.args[0]
        assert isinstance(inner, Int)
        return to_real(-inner)
    return Real("neg", (value,))


def add(x: Scalar, y: Scalar) -> Scalar:
    """X + y."""
    return x + y if isinstance(x, Int) and isinstance(y, Int) else fold_real("add", x, y)


def sub(x: Scalar, y: Scalar) -> Scalar:
    """X - y."""
    return x - y if isinstance(x, Int) and isinstance(y, Int) else fold_real("add", x, negative(y))


def mul(x: Scalar, y: Scalar) -> Scalar:
    """X * y."""
    return times(x, y) if isinstance(x, Int) and isinstance(y, Int) else fold_real("mul", x, y)


def div(x: Scalar, y: Scalar) -> Scalar:
    """X / y; integers truncate in ONNX, which equals the floor where nothing is negative."""
    if isinstance(x, Int) and isinstance(y, Int):
        if x.constant is not None and y.constant:
            return integer(int(x.constant / y.constant))
        exact = x.divide(y)
        if exact is not None:
            return exact
        if y.constant and y.constant > 0:
            if bound(x, upper=True) <= 0:
                return -divisions.floor_div(-x, y.constant)
            floor = divisions.floor_div(x, y.constant)
            # Sizes of a valid graph are not negative, nor what is computed of them alone.
            if bound(x, upper=False) >= 0 or not any(word in str(x) for word in ("var(", "read(", "table(")):
                return floor
            rest = divisions.floor_mod(x, y.constant)
            return floor + to_int(all_of([less_equal(x, integer(-1)), negate(equal(rest, integer(0)))]))
        return of_atom("opaque", "division", x, y)
    return fold_real("div", x, y)


def _modulo(fmod: bool) -> Callable[[Scalar, Scalar], Scalar]:
    def modulo(x: Scalar, y: Scalar) -> Scalar:
        if isinstance(x, Int) and isinstance(y, Int) and y.constant:
            if x.constant is not None:
                return integer(int(math.fmod(x.constant, y.constant)) if fmod else x.constant % y.constant)
            if not fmod or (bound(x, upper=False) >= 0 and y.constant > 0):
                return divisions.floor_mod(x, y.constant) if y.constant > 0 else of_atom("mod", x, y.constant)
            return _truncated_rest(x, abs(y.constant))
        if isinstance(x, Int) and isinstance(y, Int):
            if not fmod and (found := _by_size(x, y)) is not None:
                return found
            if x.divide(y) is not None:
                return integer(0)
            return of_atom("opaque", "remainder" if fmod else "modulo", x, y)
        return Real("opaque", ("Mod", to_real(x), to_real(y)))

    return modulo


def _by_size(x: Int, size: Int) -> Int | None:
    """A small number modulo a dimension: itself, or so much less than the dimension, but for the smallest of these."""
    number, atom = x.constant, size.atom
    if number is None or abs(number) > _MOST_SIZES or atom is None or atom.kind != "size":
        return None
    found = x if number >= 0 else size + x
    for n in range(1, abs(number) + (number >= 0)):
        chosen = select(equal(size, integer(n)), integer(number % n), found)
        assert isinstance(chosen, Int)
        found = chosen
    return found


def _truncated_rest(x: Int, y: int) -> Int:
    """The remainder with the sign of x, for y > 0."""
    rest = divisions.floor_mod(x, y)
    below = all_of([less_equal(x, integer(-1)), negate(equal(rest, integer(0)))])
    return rest - to_int(below) * integer(y)


def _extreme(kind: str) -> Callable[..., Scalar]:
    def fold(*values: Scalar) -> Scalar:
        result = values[0]
        for value in values[1:]:
            if isinstance(result, Int) and isinstance(value, Int):
                low, high = (value, result) if kind == "max" else (result, value)
                if bound(low - high, upper=True) <= 0:
                    result = result if kind == "min" or low == value else value
                    result = high if kind == "max" else low
                elif bound(high - low, upper=True) <= 0:
                    result = low if kind == "max" else high
                else:
                    result = of_atom(kind, result, value)
            else:
                result = fold_real(kind, result, value)
        return result

    return fold


def _absolute(x: Scalar) -> Scalar:
    if isinstance(x, Int):
        if bound(x, upper=False) >= 0:
            return x
        if bound(x, upper=True) <= 0:
            return -x
        first = next((c for m, c in x.terms if m != ()), 1)
        return of_atom("abs", x if first > 0 else -x)
    value = to_real(x)
    if value.kind == "int":
        inner = value.args[0]
        assert isinstance(inner, Int)
        return to_real(_absolute(inner))
    if value.kind == "const":
        number = value.args[0]
        assert isinstance(number, float)
        return real(abs(number))
    parts = _quotient(value)
    if parts is not None:
        return Real("div", (to_real(_absolute(parts[0])), real(parts[1])))
    return Real("opaque", ("Abs", value))


def _quotient(value: Real) -> tuple[Int, float] | None:
    """(x, c) of an integer divided by a positive number."""
    if value.kind != "div":
        return None
    left, right = value.args
    assert isinstance(left, Real)
    assert isinstance(right, Real)
    number = right.args[0] if right.kind == "const" else None
    if left.kind != "int" or not isinstance(number, float) or not 0 < number < math.inf:
        return None
    return to_int(left), number


def _sign(x: Scalar) -> Scalar:
    if not isinstance(x, Int):
        value = to_real(x)
        if value.kind == "const" and isinstance(value.args[0], float):
            return real(float(np.sign(value.args[0])))
        if value.kind == "int":
            return to_real(_sign(to_int(value)))
        parts = _quotient(value)
        return Real("opaque", ("Sign", value)) if parts is None else to_real(_sign(parts[0]))
    if divisions.of_sizes(x) and bound(x, upper=False, smallest=1.0) >= 1:
        # A size's, in the floor divisions of exporters. Where it may be 0, a past's, the mask is compared without one.
        return integer(1)
    positive, negative = less_equal(integer(1), x), less_equal(x, integer(-1))
    return select(positive, integer(1), select(negative, integer(-1), integer(0)))


def compare(kind: str) -> Callable[[Scalar, Scalar], Scalar]:
    """A comparison of two integers, of two conditions, or of floats that stand for integers."""

    def apply(x: Scalar, y: Scalar) -> Scalar:
        left, right = _as_int(x), _as_int(y)
        if left is None or right is None:
            return _compare_real(kind, to_real(x), to_real(y))
        match kind:
            case "lt":
                return less_equal(left + integer(1), right)
            case "le":
                return less_equal(left, right)
            case "gt":
                return less_equal(right + integer(1), left)
            case "ge":
                return less_equal(right, left)
        if isinstance(x, Cond) and isinstance(y, Cond):
            return any_of([all_of([x, y]), all_of([negate(x), negate(y)])])
        return equal(left, right)

    return apply


def _as_int(x: Scalar) -> Int | None:
    if isinstance(x, Real):
        if x.kind == "int":
            return to_int(x)
        if x.kind == "const":
            number = x.args[0]
            assert isinstance(number, float)
            return integer(int(number)) if number.is_integer() else None
        return None
    return to_int(x)


_SWAPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq"}
_TESTS: dict[str, Callable[[float, float], bool]] = {
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
}


def to_real_case(value: float | Real) -> Real:
    """The value of a case."""
    return real(value) if isinstance(value, float) else value


def _below(value: Real, largest: int) -> bool:
    """Whether a number is smaller than that whatever the run."""
    if value.kind == "int" and isinstance(value.args[0], Int):
        return widths.fits(value.args[0], largest - 1)
    return value.kind == "const" and isinstance(value.args[0], float) and abs(value.args[0]) < largest


def _is_position(value: Real) -> bool:
    """Whether a float is an index of the tensor, and something more."""
    inner = value.args[0] if value.kind in ("int", "rounded") else None
    return isinstance(inner, Int) and any(a.kind == "var" for a in inner.atoms())


def _compare_real(kind: str, x: Real, y: Real) -> Scalar:
    from stof.symbolic.terms import FALSE, TRUE

    if kind == "eq" and (found_read := floats.equals_zero(x, y)) is not None:
        return found_read
    if y.kind == "rounded" != x.kind and kind in _SWAPPED:
        return _compare_real(_SWAPPED[kind], y, x)
    if x.kind == "rounded":
        inner, largest = x.args
        assert isinstance(inner, Int)
        assert isinstance(largest, int)
        if _below(y, largest):  # rounding keeps the order, and small numbers
            return compare(kind)(to_real(inner), y)
        return Cond("opaque", (kind, x, y))
    if x.kind == "int" and y.kind == "const":  # an integer against a fraction
        inner, limit = to_int(x), y.args[0]
        assert isinstance(limit, float)
        if math.isfinite(limit):
            down = math.floor(limit)
            match kind:
                case "lt" | "le":
                    return less_equal(inner, integer(down))
                case "gt" | "ge":
                    return less_equal(integer(down + 1), inner)
            return FALSE
    first, second = reads_number(x), reads_number(y)
    if (first and (second or _is_position(y))) or (second and _is_position(x)):
        return Cond("opaque", (kind, x, y))  # of documents or lengths, say: that a mask is 0 or 1 tells nothing
    found = []
    for c1, a in cases(x):
        for c2, b in cases(y):
            if isinstance(a, float) and isinstance(b, float):
                holds = TRUE if _TESTS[kind](a, b) else FALSE
            elif (left := _as_int(to_real_case(a))) is not None and (right := _as_int(to_real_case(b))) is not None:
                holds = to_cond(compare(kind)(left, right))
            elif (known := ranges.compared(kind, to_real_case(a), to_real_case(b))) is not None:
                holds = TRUE if known else FALSE
            else:
                holds = Cond("opaque", (kind, x, y))
            found.append(all_of([c1, c2, holds]))
    return any_of(found)


def _real_function(name: str, function: Callable[[float], float]) -> Callable[[Scalar], Scalar]:
    def apply(x: Scalar) -> Scalar:
        value = to_real(x)
        if name == "Floor" and (floor := floats.floor(value)) is not None:
            return floor
        if value.kind == "const":
            number = value.args[0]
            assert isinstance(number, float)
            if name == "Log" and number == 0:
                return real(-math.inf)
            try:
                return real(function(number))
            except (ValueError, ZeroDivisionError, OverflowError):
                return real(math.nan)
        found = cases(value)
        if len(found) <= 8 and all(isinstance(x, float) for _, x in found):  # of a mask
            result: Scalar = real(math.nan)
            for number, (cond, case) in enumerate(found):
                assert isinstance(case, float)
                own = apply(real(case))
                result = select(cond, own, result) if number else own
            return result
        return Real("opaque", (name, value))

    return apply


def _power(x: Scalar, y: Scalar) -> Scalar:
    a, b = to_real(x), to_real(y)
    if a.kind == "const" and b.kind == "const":
        with np.errstate(all="ignore"):
            return real(float(np.float64(str(a.args[0])) ** np.float64(str(b.args[0]))))
    power = _as_int(b)
    if a.kind == "int" and power is not None and power.constant in (1, 2, 3):
        result: Scalar = a
        for _ in range(power.constant - 1):
            result = mul(result, a)
        return to_int(x) if isinstance(x, Int) and power.constant == 1 else result
    return Real("opaque", ("Pow", a, b))


def _cast(context: Context) -> list[Fact] | None:
    to = context.number("to", FLOAT) if context.node.op_type == "Cast" else context.fact(1).dtype
    kind = dtype_kind(to)
    table: dict[str, Callable[[Scalar], Scalar]] = {"i": to_int, "b": to_cond, "f": to_real}
    convert = table.get(kind or "")
    source, shape = context.value(0), context.shape(0)
    if kind == "f" and source is not None and shape is not None:
        elements = floats.narrowed(widths.rounding(source, widths.EXACT[to]), context.fact(0).dtype, to)
        return [Fact(to, shape, SymTensor(shape, "f", elements))]
    if convert is None:
        return [Fact(to, context.shape(0))]
    if to in _NARROW:
        return elementwise(context, lambda x: _narrow(to_int(x), *_NARROW[to]), to, 1)
    return elementwise(context, convert, to, 1)


# Lengths and what inputs hold may be too large for these; for 32 bits lengths are not.
_NARROW = {
    int(TensorProto.INT8): (-128, 127),
    int(TensorProto.UINT8): (0, 255),
    int(TensorProto.INT16): (-32768, 32767),
    int(TensorProto.UINT16): (0, 65535),
}


def _narrow(value: Int, low: int, high: int) -> Scalar:
    """A cast that wraps where the value does not fit."""
    if value.constant is not None:
        return integer((value.constant - low) % (high - low + 1) + low)
    if bound(value, upper=False) >= low and bound(value, upper=True) <= high:
        return value
    return of_atom("opaque", "a cast to 8 or 16 bits", value)


def _where(context: Context) -> list[Fact] | None:
    def choose(cond: Scalar, yes: Scalar, no: Scalar) -> Scalar:
        return select(to_cond(cond), yes, no)

    return elementwise(context, choose, context.fact(1).dtype or context.fact(2).dtype)


def _is_nan(x: Scalar) -> Scalar:
    from stof.symbolic.terms import split_cond

    return split_cond(to_real(x), math.isnan)


def _is_infinite(context: Context) -> list[Fact] | None:
    from stof.symbolic.terms import split_cond

    signs = [s for s, name in ((1.0, "detect_positive"), (-1.0, "detect_negative")) if context.number(name, 1)]
    return elementwise(context, lambda x: split_cond(to_real(x), lambda v: v in [s * math.inf for s in signs]), BOOL)


def _clip(context: Context) -> list[Fact] | None:
    low, high = _extreme("max"), _extreme("min")
    has_low, has_high = context.has(1), context.has(2)
    if any(not has and _holds(context, limit) for has, limit in ((has_low, -math.inf), (has_high, math.inf))):
        # A bound that is not given is the lowest or largest finite number, which masks otherwise than an infinity.
        return [Fact(context.fact(0).dtype, context.shape(0))]
    if has_low and has_high:
        return elementwise(context, lambda x, a, b: high(low(x, a), b), context.fact(0).dtype)
    if has_low:
        return elementwise(context, low, context.fact(0).dtype, 2)
    if has_high:
        shape, most = context.shape(0), context.value(2)
        value = context.value(0)
        if shape is None or most is None or value is None:
            return [Fact(context.fact(0).dtype, shape)]
        limit = most.at((integer(0),) * most.rank)
        return [Fact(context.fact(0).dtype, shape, SymTensor(shape, value.kind, lambda i: high(value.at(i), limit)))]
    return [Fact(context.fact(0).dtype, context.shape(0))]


def _holds(context: Context, number: float) -> bool:
    """Whether elements of the first input may be a constant, as far as it is written in what is known of them."""
    value = context.value(0)
    if value is None or value.kind != "f":
        return False
    if value.constant is not None:
        return bool(np.any(value.constant == number))
    element = value.at(tuple(integer(0) if d.constant == 1 else var(f"any{i}") for i, d in enumerate(value.shape)))
    return any(p.kind == "const" and p.args[0] == number for p in parts(element))


def _constant(context: Context) -> list[Fact]:
    for name, convert in (
        ("value_int", np.int64),
        ("value_float", np.float32),
        ("value_ints", np.int64),
        ("value_floats", np.float32),
    ):
        if name in context.attributes:
            array = np.array(context.attribute(name), dtype=convert)
            dtype = INT64 if convert is np.int64 else FLOAT
            break
    else:
        proto = context.attributes["value"].t
        array, dtype = numpy_helper.to_array(proto), proto.data_type
        if dtype_kind(dtype) is None:
            return [Fact(dtype, tuple(integer(n) for n in array.shape))]
    tensor = constant_tensor(context.node.output[0], array)
    return [Fact(dtype, tensor.shape, tensor)]


def _same_shape(context: Context) -> list[Fact]:
    return [Fact(context.fact(0).dtype, context.shape(0))]


def _norm(context: Context) -> list[Fact]:
    return [Fact(context.fact(0).dtype, context.shape(0)), Fact(), Fact()]


def _matmul(context: Context) -> list[Fact] | None:
    a, b = context.shape(0), context.shape(1)
    dtype = context.fact(0).dtype
    if a is None or b is None or len(a) < 1 or len(b) < 1:
        return None
    if len(a) == 1 or len(b) == 1:
        return [Fact(dtype, (*a[:-1],) if len(b) == 1 else (*b[:-2], b[-1]))]
    context.equate(a[-1], b[-2])
    return [Fact(dtype, (*broadcast([a[:-2], b[:-2]], context), a[-2], b[-1]))]


def _gemm(context: Context) -> list[Fact] | None:
    a, b = context.shape(0), context.shape(1)
    if a is None or b is None:
        return None
    rows = a[1] if context.number("transA", 0) else a[0]
    columns = b[0] if context.number("transB", 0) else b[1]
    return [Fact(context.fact(0).dtype, (rows, columns))]


def _reduce(context: Context) -> list[Fact] | None:
    shape = context.shape(0)
    if shape is None:
        return None
    axes: object = context.attribute("axes")
    if axes is None and context.has(1):
        axes = context.fixed_ints(1)
        if axes is None:
            return None
    keep = context.number("keepdims", 1)
    wanted = [] if axes is None else [int(a) for a in axes]  # type: ignore[attr-defined]
    chosen = [a % len(shape) for a in wanted] or list(range(len(shape)))
    result = [integer(1) if a in chosen else d for a, d in enumerate(shape) if keep or a not in chosen]
    return [Fact(context.fact(0).dtype, tuple(result))]


def _not(x: Scalar) -> Scalar:
    return negate(to_cond(x))


def _logic(kind: str) -> Callable[[Scalar, Scalar], Scalar]:
    def apply(x: Scalar, y: Scalar) -> Scalar:
        a, b = to_cond(x), to_cond(y)
        if kind == "and":
            return all_of([a, b])
        if kind == "or":
            return any_of([a, b])
        return any_of([all_of([a, negate(b)]), all_of([negate(a), b])])

    return apply


def _pointwise(function: Callable[..., Scalar], dtype: int | None = None) -> Rule:
    return lambda context: elementwise(context, function, dtype)


RULES: dict[str, Rule] = {
    "Add": _pointwise(add),
    "Sub": _pointwise(sub),
    "Mul": _pointwise(mul),
    "Div": _pointwise(div),
    "Mod": lambda c: elementwise(c, _modulo(bool(c.number("fmod", 0))), None),
    "Neg": _pointwise(negative),
    "Abs": _pointwise(_absolute),
    "Sign": _pointwise(_sign),
    "Min": _pointwise(_extreme("min")),
    "Max": _pointwise(_extreme("max")),
    "Clip": _clip,
    "Pow": lambda c: elementwise(c, _power, c.fact(0).dtype),
    "Less": _pointwise(compare("lt"), BOOL),
    "LessOrEqual": _pointwise(compare("le"), BOOL),
    "Greater": _pointwise(compare("gt"), BOOL),
    "GreaterOrEqual": _pointwise(compare("ge"), BOOL),
    "Equal": _pointwise(compare("eq"), BOOL),
    "And": _pointwise(_logic("and"), BOOL),
    "Or": _pointwise(_logic("or"), BOOL),
    "Xor": _pointwise(_logic("xor"), BOOL),
    "Not": _pointwise(_not, BOOL),
    "IsInf": _is_infinite,
    "IsNaN": _pointwise(_is_nan, BOOL),
    "Where": _where,
    "Cast": _cast,
    "CastLike": _cast,
    "Constant": _constant,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Softmax": _same_shape,
    "LogSoftmax": _same_shape,
    "LayerNormalization": _norm,
    "RMSNormalization": _norm,
    "BatchNormalization": _norm,
}
_REAL: dict[str, Callable[[float], float]] = {
    "Sqrt": math.sqrt,
    "Reciprocal": lambda x: 1.0 / x,
    "Exp": math.exp,
    "Log": math.log,
    "Sin": math.sin,
    "Cos": math.cos,
    "Tanh": math.tanh,
    "Floor": math.floor,
    "Ceil": math.ceil,
    "Round": round,
    "Sigmoid": lambda x: 1.0 / (1.0 + math.exp(-x)),
    "Erf": math.erf,
}
for _name, _function in _REAL.items():
    RULES[_name] = _pointwise(_real_function(_name, _function))
for _name in [
    "Relu",
    "LeakyRelu",
    "Gelu",
    "Softplus",
    "HardSwish",
    "HardSigmoid",
    "Mish",
    "Elu",
    "Selu",
    "PRelu",
    "Swish",
    "QuickGelu",
    "Softsign",
]:
    RULES[_name] = _same_shape
for _name in ["Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSum", "LogSumExp"]:
    RULES[f"Reduce{_name}"] = _reduce
RULES.update(movement.RULES)
RULES.update(compute.RULES)
RULES.update(counting.RULES)
RULES.update(bits.RULES)
