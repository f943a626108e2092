# SPDX-License-Identifier: Apache-2.0
"""Elements of a region's tensors as terms over its inputs: movement changes the index, arithmetic makes terms.

Nothing is taken for granted of an index: it has to be proven to be within the tensor that it reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx
from onnx import TensorProto

from stof.attention.move_paths import may_broadcast
from stof.errors import UnsupportedError
from stof.fusion.description import Pool
from stof.fusion.element_ops import (
    ELEMENTWISE,
    REDUCING,
    ROWWISE,
    SKIPPING,
    STEPPED,
    TYPES,
    Element,
    as_number,
    data_inputs,
    kind_of_node,
    skip_sum,
)
from stof.graph.index import describe, domain_of
from stof.symbolic import Cond, Int, Real, Symbolic, integer, var
from stof.symbolic.algebra.int_bounds import bound
from stof.symbolic.algebra.terms import Atom
from stof.symbolic.facts import Fact
from stof.symbolic.tensor import Index, Shape, input_tensor

_ZERO, _ONE = integer(0), integer(1)
_FLOAT = int(TensorProto.FLOAT)


@dataclass(frozen=True)
class Limits:
    """The least and the largest value of each axis where a term is computed."""

    of: tuple[tuple[str, Int, Int], ...]

    def get(self, name: str) -> tuple[Int, Int]:
        """Of one axis."""
        return next((low, high) for axis, low, high in self.of if axis == name)

    def narrowed(self, name: str, low: Int | None = None, high: Int | None = None) -> Limits:
        """With another end of one axis."""
        ends = tuple((a, low or x if a == name else x, high or y if a == name else y) for a, x, y in self.of)
        return Limits(ends)


@dataclass
class Puller:
    """Terms of a region's elements.

    Args:
        symbolic: of the model.
        producers: the region's nodes by what they write.
        row: the axis along which there are reductions, and its size.
        whole: all of every axis.
    """

    symbolic: Symbolic
    producers: Mapping[str, onnx.NodeProto]
    row: tuple[str, Int]
    whole: Limits
    pool: Pool = field(default_factory=Pool)
    inputs: dict[str, int] = field(default_factory=dict)
    _memo: dict[tuple[str, Index, Limits, bool], int] = field(default_factory=dict)
    _moves: dict[str, list[Fact]] = field(default_factory=dict)
    _proven: dict[tuple[Int, Int, Limits], bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool.halves = any(self.symbolic.dtype(t) == TensorProto.FLOAT16 for t in self.producers)

    def at(self, tensor: str, index: Index, limits: Limits, exact: bool = False) -> int:
        """The term of a tensor's element; ``exact``: rounded at every step to the types that the graph has.

        Raises:
            UnsupportedError: for what the format cannot say.
        """
        index = tuple(simplified(i, limits) for i in index)
        key = (tensor, index, limits, exact)
        if key not in self._memo:
            inside = tensor in self.producers and as_number(self.symbolic.constant(tensor)) is None
            if inside:
                self._memo[key] = self._computed(tensor, index, limits, exact)
            else:
                self._memo[key] = self._read(tensor, index, limits)
        return self._memo[key]

    def _read(self, tensor: str, index: Index, limits: Limits) -> int:
        """The term of an element of an input, or of a number."""
        number = as_number(self.symbolic.constant(tensor))
        if number is not None:
            return self.pool.number(number)
        shape = self.shape(tensor)
        if self.symbolic.dtype(tensor) not in TYPES:
            raise UnsupportedError(
                f"{tensor!r} is of element type {self.symbolic.dtype(tensor)}, expected a float type"
            )
        for place, size in zip(index, shape, strict=True):
            if not self._within(place, size, limits):
                raise UnsupportedError(f"index {place} of {tensor!r} is not proven to be within 0 and {size}")
        term = self.pool.make("read", self.inputs.setdefault(tensor, len(self.inputs)), index)
        if limits != self.whole and not all(self._within(*x, self.whole) for x in zip(index, shape, strict=True)):
            self.pool.partial.add(term)
        return term

    def _within(self, place: Int, size: Int, limits: Limits) -> bool:
        """Whether an index is proven to be in range."""
        key = (place, size, limits)
        if key not in self._proven:
            low, high = ends(place, limits)
            known = low is not None and high is not None
            self._proven[key] = known and _at_least(low or _ZERO, _ZERO) and _at_least(size - _ONE, high or _ZERO)
        return self._proven[key]

    def shape(self, tensor: str) -> Shape:
        """A tensor's sizes.

        Raises:
            UnsupportedError: where they are not known.
        """
        found = self.symbolic.shape(tensor)
        if found is None:
            raise UnsupportedError(f"the shape of {tensor!r} is not known")
        return found

    def _computed(self, tensor: str, index: Index, limits: Limits, exact: bool) -> int:
        node = self.producers[tensor]
        kind = kind_of_node(node)
        if kind == "moving":
            return self._moved(node, tensor, index, limits, exact)
        if kind == "elementwise":
            places = data_inputs(node)
            steps = exact or node.op_type in STEPPED or self._to_bool(node)
            own = [self._broadcast(node, i, tensor, index, limits, steps) for i in places]
            if self._to_bool(node):
                return self.pool.make("ne", own[0], self.pool.number(0.0))
            term = ELEMENTWISE[domain_of(node), node.op_type](self._element(node, places, own))
            exact = exact or node.op_type in ("Cast", "CastLike")  # one that narrows is there in order to round
        elif kind == "reducing":
            term = self._reduced(node, index, limits)
        else:
            term = self._rowwise(node, tensor, index, limits)
        return self._rounded(tensor, node, term) if exact else term

    def _rounded(self, tensor: str, node: onnx.NodeProto, term: int) -> int:
        """A term in the type of its tensor, where that is narrower than fp32 and the term may not be in it already."""
        into = self.symbolic.dtype(tensor)
        cast = node.op_type in ("Cast", "CastLike")
        if into not in TYPES or into == _FLOAT or (cast and self.symbolic.dtype(node.input[0]) == into):
            return term
        return term if self.pool.terms[term][0] == TYPES[into] else self.pool.make(TYPES[into], term)

    def _to_bool(self, node: onnx.NodeProto) -> bool:
        """Whether a node turns numbers into 1 or 0."""
        into = self.symbolic.dtype(node.output[0])
        return (
            node.op_type in ("Cast", "CastLike")
            and into == TensorProto.BOOL
            and self.symbolic.dtype(node.input[0]) != into
        )

    def _element(self, node: onnx.NodeProto, places: Sequence[int], terms: Sequence[int]) -> Element:
        inputs: list[int | None] = [None] * len(node.input)
        for place, term in zip(places, terms, strict=True):
            inputs[place] = term
        constants = [as_number(self.symbolic.constant(n)) if n else None for n in node.input]
        return Element(self.pool, node, inputs, constants, self.symbolic.dtype(node.output[0]))

    def _broadcast(self, node: onnx.NodeProto, i: int, output: str, index: Index, limits: Limits, exact: bool) -> int:
        """The term of an operand that broadcasts to the output's shape."""
        name = node.input[i]
        shape, whole = self.shape(name), self.shape(output)
        own = index[len(index) - len(shape) :]
        for size, wanted in zip(shape, whole[len(whole) - len(shape) :], strict=True):
            if size not in (_ONE, wanted):
                # One of the two may be 1 in a run.
                raise UnsupportedError(
                    f"{describe(node)} broadcasts {size} to {wanted}, which are not known to be equal"
                )
        return self.at(name, tuple(_ZERO if d == _ONE else x for d, x in zip(shape, own, strict=True)), limits, exact)

    def _moved(self, node: onnx.NodeProto, tensor: str, index: Index, limits: Limits, exact: bool) -> int:
        place = list(node.output).index(tensor)
        if node.op_type == "Dropout" and place:
            raise UnsupportedError(f"the mask of {describe(node)} is used")
        if node.op_type == "Expand" and may_broadcast(self.symbolic, node):
            raise UnsupportedError(
                f"{describe(node)} has sizes that are not known to be equal; one of two may be 1 in a run"
            )
        if node.output[0] not in self._moves:
            given = {}
            for i in data_inputs(node):
                name = node.input[i]
                shape = self.shape(name)
                given[name] = Fact(_FLOAT, shape, input_tensor(name, shape, "f"))
            self._moves[node.output[0]] = self.symbolic.apply_rule(node, given) or []
        facts = self._moves[node.output[0]]
        value = facts[place].value if place < len(facts) else None
        if value is None:
            raise UnsupportedError(f"where the elements of {describe(node)} come from is not known")
        return self._chosen(node, value.at(index), limits, exact)

    def _chosen(self, node: onnx.NodeProto, value: object, limits: Limits, exact: bool) -> int:
        """The term of what a movement operator takes: an element, or one of two by the place on an axis."""
        if isinstance(value, Real) and value.kind == "read":
            name, index = value.args
            assert isinstance(index, tuple)
            return self.at(str(name), index, limits, exact)
        if isinstance(value, Real) and value.kind == "select":
            cond, yes, no = value.args
            axis, limit, below = _split(cond, limits)
            low, high = limits.get(axis)
            inside, outside = (yes, no) if below else (no, yes)
            if _at_least(integer(limit - 1), high):
                return self._chosen(node, inside, limits, exact)
            if _at_least(low, integer(limit)):
                return self._chosen(node, outside, limits, exact)
            first = self._chosen(node, inside, limits.narrowed(axis, high=integer(limit - 1)), exact)
            second = self._chosen(node, outside, limits.narrowed(axis, low=integer(limit)), exact)
            term = self.pool.make("below", axis, limit, first, second)
            if limits != self.whole:
                self.pool.partial.add(term)
            return term
        raise UnsupportedError(f"where the elements of {describe(node)} come from is not known")

    def _reduced(self, node: onnx.NodeProto, index: Index, limits: Limits) -> int:
        shape = self.shape(node.input[0])
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        axes = attributes.get("axes")
        if axes is None and len(node.input) > 1 and node.input[1]:
            constant = self.symbolic.constant(node.input[1])
            axes = None if constant is None else [int(a) for a in constant.reshape(-1)]
        if axes is None or [a % len(shape) for a in axes] != [len(shape) - 1]:
            raise UnsupportedError(f"{describe(node)} reduces axes {axes} of {len(shape)}, expected the last one alone")
        outer = index[:-1] if attributes.get("keepdims", 1) else index
        term = self._along(node, 0, outer, limits)
        return REDUCING[node.op_type](self._element(node, [0], [term]))

    def _along(self, node: onnx.NodeProto, i: int, outer: Index, limits: Limits) -> int:
        """The term of an operand at the row's own place, for a reduction over its last axis."""
        name, size = self.row
        shape = self.shape(node.input[i])
        if shape[-1] != size or any(_uses(x, name) for x in outer):
            raise UnsupportedError(f"{describe(node)} reduces {shape[-1]} elements that are not the chain's row")
        whole = limits.narrowed(name, _ZERO, size - _ONE)  # whichever part of the row asks for it
        return self.at(node.input[i], (*outer, var(name)), whole)

    def _rowwise(self, node: onnx.NodeProto, tensor: str, index: Index, limits: Limits) -> int:
        place = list(node.output).index(tensor)
        shape = self.shape(node.input[0])
        axis = next((int(a.i) for a in node.attribute if a.name == "axis"), -1) % len(shape)
        if axis != len(shape) - 1:
            raise UnsupportedError(f"{describe(node)} normalizes more than the last axis")
        places = data_inputs(node)
        here, rows = [], []
        for i in places:
            own = self.shape(node.input[i])
            if any(d not in (_ONE, s) for d, s in zip(own, shape[len(shape) - len(own) :], strict=True)):
                raise UnsupportedError(f"{describe(node)} broadcasts {node.input[i]!r} in a way that is not known")
            moved = tuple(_ZERO if d == _ONE else x for d, x in zip(own, index[len(shape) - len(own) :], strict=True))
            here.append(self.at(node.input[i], moved, limits))
            rows.append(self._along(node, i, moved[:-1], limits))
        element = replace(self._element(node, places, here), rows=self._element(node, places, rows))
        if place == 0:
            return ROWWISE[domain_of(node), node.op_type](element)
        if place == 3 and node.op_type in SKIPPING:
            return skip_sum(element, node.op_type == "SkipLayerNormalization")
        raise UnsupportedError(f"output {place} of {describe(node)} is used")


def _uses(index: Int, axis: str) -> bool:
    """Whether an index depends on an axis."""
    pending = list(index.atoms())
    while pending:
        atom = pending.pop()
        if atom.kind == "var" and atom.args[0] == axis:
            return True
        pending += [a for x in atom.args if isinstance(x, Int) for a in x.atoms()]
    return False


def _split(cond: object, limits: Limits) -> tuple[str, int, bool]:
    """A condition as ``axis < limit``, or its opposite."""
    if isinstance(cond, Cond) and cond.kind == "le":
        (value,) = cond.args
        assert isinstance(value, Int)
        value = simplified(value, limits)
        rest = [(m, c) for m, c in value.terms if m]
        if len(rest) == 1 and len(rest[0][0]) == 1 and rest[0][0][0].kind == "var":
            (atom,), c = rest[0]
            name, offset = str(atom.args[0]), value.offset
            if c > 0:  # c * axis + offset <= 0
                return name, -offset // c + 1, True
            return name, -(-offset // -c), False  # axis >= offset / -c
    raise UnsupportedError(f"elements are chosen by {cond}, expected one axis beside a number")


def ends(value: Int, limits: Limits) -> tuple[Int | None, Int | None]:
    """The least and the largest value of an index; None where they are not known."""
    low, high = _ZERO, _ZERO
    for monomial, c in value.terms:
        least, most = integer(1), integer(1)
        for atom in monomial:
            found = _atom_ends(atom, limits)
            if found is None:
                return None, None
            least, most = least * found[0], most * found[1]
        least, most = (least, most) if c > 0 else (most, least)
        low, high = low + least * integer(c), high + most * integer(c)
    return low, high


def _atom_ends(atom: Atom, limits: Limits) -> tuple[Int, Int] | None:
    """Of an atom that is nowhere below 0."""
    if atom.kind == "var":
        return limits.get(str(atom.args[0]))
    if atom.kind == "size":
        return Int((((atom,), 1),)), Int((((atom,), 1),))
    if atom.kind in ("div", "mod"):
        inner, by = atom.args
        if not isinstance(inner, Int) or not isinstance(by, int) or by <= 0:
            return None
        low, high = ends(inner, limits)
        if low is None or high is None or not _at_least(low, _ZERO):
            return None
        if atom.kind == "mod":
            return _ZERO, integer(by - 1)
        most = high.constant
        if most is not None:
            return _ZERO, integer(most // by)
        whole = (high + _ONE).divide(integer(by))  # (n * by - 1) // by = n - 1
        return None if whole is None else (_ZERO, whole - _ONE)
    return None


def _at_least(one: Int, other: Int) -> bool:
    return bound(one - other, upper=False, smallest=1.0) >= 0


def simplified(value: Int, limits: Limits) -> Int:
    """An index without quotients and remainders that the axes' sizes decide."""
    if all(a.kind in ("var", "size") for m, _ in value.terms for a in m):
        return value
    total = _ZERO
    for monomial, c in value.terms:
        product = integer(c)
        for atom in monomial:
            product = product * _simplified(atom, limits)
        total = total + product
    return total


def _simplified(atom: Atom, limits: Limits) -> Int:
    inner, by = atom.args if len(atom.args) == 2 else (None, None)
    if atom.kind not in ("div", "mod") or not isinstance(inner, Int) or not isinstance(by, int) or by <= 0:
        return Int((((atom,), 1),))
    inner = simplified(inner, limits)
    whole = Int(tuple((m, c // by) for m, c in inner.terms if c % by == 0))
    rest = Int(tuple((m, c) for m, c in inner.terms if c % by))
    low, high = ends(rest, limits)
    if low is not None and high is not None and _at_least(low, _ZERO) and _at_least(integer(by - 1), high):
        return whole if atom.kind == "div" else rest
    return Int((((Atom(atom.kind, (inner, by)),), 1),))
