# SPDX-License-Identifier: Apache-2.0
"""Writes an element of a region's tensor as a term over the region's inputs.

Movement operators change the index, arithmetic operators make terms. Every index is proven to be inside of the tensor that
it reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx
from onnx import TensorProto

from stof.attention.move_paths import may_broadcast
from stof.errors import UnsupportedError
from stof.execution.upcast import FP16_FORBIDS
from stof.fusion.element_ops import (
    DISCONTINUOUS,
    ELEMENTWISE,
    REDUCTION,
    ROWWISE,
    SKIP_NORMS,
    TYPES,
    Element,
    as_number,
    data_inputs,
    kind_of_node,
    skip_sum,
)
from stof.fusion.terms import TermPool
from stof.graph.index import describe, domain_of
from stof.graph.node_fields import attributes_of
from stof.symbolic import Cond, Int, Real, Symbolic, integer, var
from stof.symbolic.algebra.int_bounds import bound
from stof.symbolic.algebra.terms import Atom
from stof.symbolic.facts import Fact
from stof.symbolic.tensor import Index, Shape, input_tensor

_ZERO, _ONE = integer(0), integer(1)
_FLOAT = int(TensorProto.FLOAT)


@dataclass(frozen=True)
class AxisRanges:
    """The positions for which a term is computed: least and largest value of each axis."""

    axes: tuple[tuple[str, Int, Int], ...]

    def get(self, name: str) -> tuple[Int, Int]:
        """Least and largest value of one axis."""
        return next((low, high) for axis, low, high in self.axes if axis == name)

    def narrow(self, name: str, low: Int | None = None, high: Int | None = None) -> AxisRanges:
        """The same with another bound of one axis."""
        return AxisRanges(tuple((a, low or x, high or y) if a == name else (a, x, y) for a, x, y in self.axes))


@dataclass
class TermBuilder:
    """Builds the terms of a region's elements.

    Args:
        symbolic: shapes and constants of the model.
        producers: the region's nodes by the tensors that they write.
        row: the axis that reductions run along, and its size.
        whole: the full range of every axis.

    Attributes:
        pool: the terms built so far.
        inputs: the region's inputs that they read, with their numbers.
    """

    symbolic: Symbolic
    producers: Mapping[str, onnx.NodeProto]
    row: tuple[str, Int]
    whole: AxisRanges
    pool: TermPool = field(default_factory=TermPool)
    inputs: dict[str, int] = field(default_factory=dict)
    _memo: dict[tuple[str, Index, AxisRanges, bool], int] = field(default_factory=dict)
    _movement_facts: dict[str, list[Fact]] = field(default_factory=dict)
    _proven: dict[tuple[Int, Int, AxisRanges], bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool.has_fp16 = any(self.symbolic.dtype(t) == TensorProto.FLOAT16 for t in self.producers)

    def term_at(self, tensor: str, index: Index, ranges: AxisRanges, exact: bool = False) -> int:
        """The term of a tensor's element, for positions in ``ranges``.

        Args:
            tensor: the tensor's name.
            index: the element, as integers over the axes.
            ranges: the positions for which the term is needed.
            exact: whether every step is rounded to the graph's type, as in front of a discontinuous function.

        Raises:
            UnsupportedError: when the format cannot express it.
        """
        index = tuple(simplify_index(i, ranges) for i in index)
        key = (tensor, index, ranges, exact)
        if key not in self._memo:
            inside = tensor in self.producers and as_number(self.symbolic.constant(tensor)) is None
            if inside:
                self._memo[key] = self._node_term(tensor, index, ranges, exact)
            else:
                self._memo[key] = self._input_term(tensor, index, ranges)
        return self._memo[key]

    def _input_term(self, tensor: str, index: Index, ranges: AxisRanges) -> int:
        """The term of an element of an input or of a constant."""
        number = as_number(self.symbolic.constant(tensor))
        if number is not None:
            return self._number_term(tensor, number)
        shape = self.shape(tensor)
        if self.symbolic.dtype(tensor) not in TYPES:
            raise UnsupportedError(
                f"{tensor!r} is of element type {self.symbolic.dtype(tensor)}, expected a float type"
            )
        for position, size in zip(index, shape, strict=True):
            if not self._is_in_range(position, size, ranges):
                raise UnsupportedError(f"index {position} of {tensor!r} is not proven to be within 0 and {size}")
        term = self.pool.make("read", self.inputs.setdefault(tensor, len(self.inputs)), index)
        if ranges != self.whole and not all(self._is_in_range(*x, self.whole) for x in zip(index, shape, strict=True)):
            self.pool.partial.add(term)
        return term

    def _number_term(self, tensor: str, number: float) -> int:
        """The term of a constant. A number that forbids in fp16 is marked as one: a widened model has another in its place."""
        term = self.pool.number(number)
        is_marked = self.symbolic.dtype(tensor) == TensorProto.FLOAT16 and -math.inf < number <= FP16_FORBIDS
        return self.pool.make("f16", term) if is_marked else term

    def _is_in_range(self, position: Int, size: Int, ranges: AxisRanges) -> bool:
        """Whether an index is proven to be in range."""
        key = (position, size, ranges)
        if key not in self._proven:
            low, high = index_range(position, ranges)
            is_bounded = low is not None and high is not None
            self._proven[key] = (
                is_bounded and _is_at_least(low or _ZERO, _ZERO) and _is_at_least(size - _ONE, high or _ZERO)
            )
        return self._proven[key]

    def shape(self, tensor: str) -> Shape:
        """A tensor's sizes.

        Raises:
            UnsupportedError: where they are not known.
        """
        shape = self.symbolic.shape(tensor)
        if shape is None:
            raise UnsupportedError(f"the shape of {tensor!r} is not known")
        return shape

    def _node_term(self, tensor: str, index: Index, ranges: AxisRanges, exact: bool) -> int:
        node = self.producers[tensor]
        kind = kind_of_node(node)
        if kind == "moving":
            return self._movement_term(node, tensor, index, ranges, exact)
        if kind == "elementwise":
            numbers = data_inputs(node)
            rounds_inputs = exact or node.op_type in DISCONTINUOUS or self._is_cast_to_bool(node)
            operands = [self._broadcast_term(node, i, tensor, index, ranges, rounds_inputs) for i in numbers]
            if self._is_cast_to_bool(node):
                return self.pool.make("ne", operands[0], self.pool.number(0.0))
            term = ELEMENTWISE[domain_of(node), node.op_type](self._element(node, numbers, operands))
            exact = exact or node.op_type in ("Cast", "CastLike")  # a narrowing Cast is there in order to round
        elif kind == "reducing":
            term = self._reduction_term(node, index, ranges)
        else:
            term = self._rowwise_term(node, tensor, index, ranges)
        return self._round_to_type(tensor, node, term) if exact else term

    def _round_to_type(self, tensor: str, node: onnx.NodeProto, term: int) -> int:
        """A term rounded to its tensor's type, where that is narrower than fp32 and the term is not rounded already."""
        into = self.symbolic.dtype(tensor)
        cast = node.op_type in ("Cast", "CastLike")
        if into not in TYPES or into == _FLOAT or (cast and self.symbolic.dtype(node.input[0]) == into):
            return term
        return term if self.pool.terms[term][0] == TYPES[into] else self.pool.make(TYPES[into], term)

    def _is_cast_to_bool(self, node: onnx.NodeProto) -> bool:
        """Whether a node casts numbers to booleans."""
        into = self.symbolic.dtype(node.output[0])
        return (
            node.op_type in ("Cast", "CastLike")
            and into == TensorProto.BOOL
            and self.symbolic.dtype(node.input[0]) != into
        )

    def _element(self, node: onnx.NodeProto, numbers: Sequence[int], terms: Sequence[int]) -> Element:
        inputs: list[int | None] = [None] * len(node.input)
        for number, term in zip(numbers, terms, strict=True):
            inputs[number] = term
        constants = [as_number(self.symbolic.constant(n)) if n else None for n in node.input]
        return Element(self.pool, node, inputs, constants, self.symbolic.dtype(node.output[0]))

    def _broadcast_term(
        self, node: onnx.NodeProto, i: int, output: str, index: Index, ranges: AxisRanges, exact: bool
    ) -> int:
        """The term of an operand that is broadcast to the output's shape."""
        name = node.input[i]
        shape, whole = self.shape(name), self.shape(output)
        aligned = index[len(index) - len(shape) :]
        for size, wanted in zip(shape, whole[len(whole) - len(shape) :], strict=True):
            if size not in (_ONE, wanted):
                # One of the two may be 1 in a run.
                raise UnsupportedError(
                    f"{describe(node)} broadcasts {size} to {wanted}, which are not known to be equal"
                )
        return self.term_at(
            name, tuple(_ZERO if d == _ONE else x for d, x in zip(shape, aligned, strict=True)), ranges, exact
        )

    def _movement_term(self, node: onnx.NodeProto, tensor: str, index: Index, ranges: AxisRanges, exact: bool) -> int:
        number = list(node.output).index(tensor)
        if node.op_type == "Dropout" and number:
            raise UnsupportedError(f"the mask of {describe(node)} is used")
        if node.op_type == "Expand" and may_broadcast(self.symbolic, node):
            raise UnsupportedError(
                f"{describe(node)} has sizes that are not known to be equal; one of two may be 1 in a run"
            )
        if node.output[0] not in self._movement_facts:
            operands = {}
            for i in data_inputs(node):
                name = node.input[i]
                shape = self.shape(name)
                operands[name] = Fact(_FLOAT, shape, input_tensor(name, shape, "f"))
            self._movement_facts[node.output[0]] = self.symbolic.apply_rule(node, operands) or []
        facts = self._movement_facts[node.output[0]]
        value = facts[number].value if number < len(facts) else None
        if value is None:
            raise UnsupportedError(f"where the elements of {describe(node)} come from is not known")
        return self._select_term(node, value.at(index), ranges, exact)

    def _select_term(self, node: onnx.NodeProto, value: object, ranges: AxisRanges, exact: bool) -> int:
        """The term that a movement operator reads: an element, or one of two by the position on an axis."""
        if isinstance(value, Real) and value.kind == "read":
            name, index = value.args
            assert isinstance(index, tuple)
            return self.term_at(str(name), index, ranges, exact)
        if isinstance(value, Real) and value.kind == "select":
            cond, yes, no = value.args
            axis, limit, below = _split_condition(cond, ranges)
            low, high = ranges.get(axis)
            inside, outside = (yes, no) if below else (no, yes)
            if _is_at_least(integer(limit - 1), high):
                return self._select_term(node, inside, ranges, exact)
            if _is_at_least(low, integer(limit)):
                return self._select_term(node, outside, ranges, exact)
            first = self._select_term(node, inside, ranges.narrow(axis, high=integer(limit - 1)), exact)
            second = self._select_term(node, outside, ranges.narrow(axis, low=integer(limit)), exact)
            term = self.pool.make("below", axis, limit, first, second)
            if ranges != self.whole:
                self.pool.partial.add(term)
            return term
        raise UnsupportedError(f"where the elements of {describe(node)} come from is not known")

    def _reduction_term(self, node: onnx.NodeProto, index: Index, ranges: AxisRanges) -> int:
        shape = self.shape(node.input[0])
        attributes = attributes_of(node)
        axes = attributes.get("axes")
        if axes is None and len(node.input) > 1 and node.input[1]:
            constant = self.symbolic.constant(node.input[1])
            axes = None if constant is None else [int(a) for a in constant.reshape(-1)]
        if axes is None or [a % len(shape) for a in axes] != [len(shape) - 1]:
            raise UnsupportedError(f"{describe(node)} reduces axes {axes} of {len(shape)}, expected the last one alone")
        outer = index[:-1] if attributes.get("keepdims", 1) else index
        term = self._row_term(node, 0, outer, ranges)
        return REDUCTION[node.op_type](self._element(node, [0], [term]))

    def _row_term(self, node: onnx.NodeProto, i: int, outer: Index, ranges: AxisRanges) -> int:
        """The term of an operand at the row's own position, for a reduction over its last axis."""
        name, size = self.row
        shape = self.shape(node.input[i])
        if shape[-1] != size or any(_depends_on(x, name) for x in outer):
            raise UnsupportedError(f"{describe(node)} reduces {shape[-1]} elements that are not the chain's row")
        whole = ranges.narrow(
            name, _ZERO, size - _ONE
        )  # a reduction needs the whole row, whichever part of it reads the result
        return self.term_at(node.input[i], (*outer, var(name)), whole)

    def _rowwise_term(self, node: onnx.NodeProto, tensor: str, index: Index, ranges: AxisRanges) -> int:
        number = list(node.output).index(tensor)
        shape = self.shape(node.input[0])
        axis = next((int(a.i) for a in node.attribute if a.name == "axis"), -1) % len(shape)
        if axis != len(shape) - 1:
            raise UnsupportedError(f"{describe(node)} normalizes more than the last axis")
        numbers = data_inputs(node)
        here, rows = [], []
        for i in numbers:
            operand_shape = self.shape(node.input[i])
            if any(
                d not in (_ONE, s) for d, s in zip(operand_shape, shape[len(shape) - len(operand_shape) :], strict=True)
            ):
                raise UnsupportedError(f"{describe(node)} broadcasts {node.input[i]!r} in a way that is not known")
            moved = tuple(
                _ZERO if d == _ONE else x
                for d, x in zip(operand_shape, index[len(shape) - len(operand_shape) :], strict=True)
            )
            here.append(self.term_at(node.input[i], moved, ranges))
            rows.append(self._row_term(node, i, moved[:-1], ranges))
        element = replace(self._element(node, numbers, here), rows=self._element(node, numbers, rows))
        if number == 0:
            return ROWWISE[domain_of(node), node.op_type](element)
        if number == 3 and node.op_type in SKIP_NORMS:
            return skip_sum(element, node.op_type == "SkipLayerNormalization")
        raise UnsupportedError(f"output {number} of {describe(node)} is used")


def _depends_on(index: Int, axis: str) -> bool:
    """Whether an index depends on an axis."""
    pending = list(index.atoms())
    while pending:
        atom = pending.pop()
        if atom.kind == "var" and atom.args[0] == axis:
            return True
        pending += [a for x in atom.args if isinstance(x, Int) for a in x.atoms()]
    return False


def _split_condition(cond: object, ranges: AxisRanges) -> tuple[str, int, bool]:
    """A condition as (axis, limit, True) for ``axis < limit``, or (axis, limit, False) for ``axis >= limit``."""
    if isinstance(cond, Cond) and cond.kind == "le":
        (value,) = cond.args
        assert isinstance(value, Int)
        value = simplify_index(value, ranges)
        rest = [(m, c) for m, c in value.terms if m]
        if len(rest) == 1 and len(rest[0][0]) == 1 and rest[0][0][0].kind == "var":
            (atom,), c = rest[0]
            name, offset = str(atom.args[0]), value.offset
            if c > 0:  # c * axis + offset <= 0
                return name, -offset // c + 1, True
            return name, -(-offset // -c), False  # axis >= offset / -c
    raise UnsupportedError(f"elements are chosen by {cond}, expected one axis beside a number")


def index_range(value: Int, ranges: AxisRanges) -> tuple[Int | None, Int | None]:
    """The least and the largest value of an index; None where they are not known."""
    low, high = _ZERO, _ZERO
    for monomial, c in value.terms:
        least, most = integer(1), integer(1)
        for atom in monomial:
            bounds = _atom_range(atom, ranges)
            if bounds is None:
                return None, None
            least, most = least * bounds[0], most * bounds[1]
        least, most = (least, most) if c > 0 else (most, least)
        low, high = low + least * integer(c), high + most * integer(c)
    return low, high


def _atom_range(atom: Atom, ranges: AxisRanges) -> tuple[Int, Int] | None:
    """The same of an atom, none of which is below 0."""
    if atom.kind == "var":
        return ranges.get(str(atom.args[0]))
    if atom.kind == "size":
        return Int((((atom,), 1),)), Int((((atom,), 1),))
    if atom.kind in ("div", "mod"):
        inner, by = atom.args
        if not isinstance(inner, Int) or not isinstance(by, int) or by <= 0:
            return None
        low, high = index_range(inner, ranges)
        if low is None or high is None or not _is_at_least(low, _ZERO):
            return None
        if atom.kind == "mod":
            return _ZERO, integer(by - 1)
        most = high.constant
        if most is not None:
            return _ZERO, integer(most // by)
        whole = (high + _ONE).divide(integer(by))  # (n * by - 1) // by = n - 1
        return None if whole is None else (_ZERO, whole - _ONE)
    return None


def _is_at_least(one: Int, other: Int) -> bool:
    return bound(one - other, upper=False, smallest=1.0) >= 0


def simplify_index(value: Int, ranges: AxisRanges) -> Int:
    """An index without the quotients and remainders that the axes' ranges decide."""
    if all(a.kind in ("var", "size") for m, _ in value.terms for a in m):
        return value
    total = _ZERO
    for monomial, c in value.terms:
        product = integer(c)
        for atom in monomial:
            product = product * _simplify_atom(atom, ranges)
        total = total + product
    return total


def _simplify_atom(atom: Atom, ranges: AxisRanges) -> Int:
    inner, by = atom.args if len(atom.args) == 2 else (None, None)
    if atom.kind not in ("div", "mod") or not isinstance(inner, Int) or not isinstance(by, int) or by <= 0:
        return Int((((atom,), 1),))
    inner = simplify_index(inner, ranges)
    whole = Int(tuple((m, c // by) for m, c in inner.terms if c % by == 0))
    rest = Int(tuple((m, c) for m, c in inner.terms if c % by))
    low, high = index_range(rest, ranges)
    if low is not None and high is not None and _is_at_least(low, _ZERO) and _is_at_least(integer(by - 1), high):
        return whole if atom.kind == "div" else rest
    return Int((((Atom(atom.kind, (inner, by)),), 1),))
