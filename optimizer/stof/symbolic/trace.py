# SPDX-License-Identifier: Apache-2.0
"""Values of computed tensors as formulas over elements of what matmuls and other compute nodes give.

The interpreter knows no value behind a compute node. Here such a node's result is an opaque tensor: its element at an index is
``Real("element", (tensor, index))``. So moves and arithmetic behind it become formulas of these elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx

from stof.errors import UnsupportedError
from stof.graph.index import GraphIndex
from stof.symbolic.algebra.domain import Domain
from stof.symbolic.algebra.overflow import strip_guards
from stof.symbolic.algebra.terms import FALSE, TRUE, Atom, Cond, Int, Real, integer, of_atom, real, subterms, to_real
from stof.symbolic.facts import Fact, dtype_kind
from stof.symbolic.interpreter import Symbolic
from stof.symbolic.tensor import Index, SymTensor

# They have rules for shapes alone, or rules whose values are of no use here.
_OPAQUE = frozenset({"MatMul", "Einsum", "Gemm", "FusedMatMul", "LayerNormalization"})
_MOST_PARTS = 1 << 16  # of a float, each object counted once


def element_of(tensor: str, index: Index) -> Real:
    """The element of an opaque tensor."""
    return Real("element", (tensor, index))


@dataclass
class Trace:
    """Formulas for elements of one graph's tensors.

    Attributes:
        symbolic: of the graph.
        index: of its nodes.
        domain: limits of index variables. With them, indices that are divided by sizes may depend on conditions, as where a Pad
            and two Reshapes shift rows.
        leaves: tensors that count as opaque, whatever makes them.
    """

    symbolic: Symbolic
    index: GraphIndex
    domain: Domain | None = None
    leaves: frozenset[str] = frozenset()
    _facts: dict[str, Fact] = field(default_factory=dict)

    def element(self, tensor: str, index: Index) -> Real | None:
        """The element of a float tensor at an index; None where nothing is known of its shape or type."""
        value = self._fact(tensor).value
        return None if value is None or value.kind != "f" or value.rank != len(index) else to_real(value.at(index))

    def step(self, tensor: str, index: Index, pads: bool = False) -> tuple[str, Index] | None:
        """The element of its producer's first input that an element is, where the producer only moves elements.

        With ``pads`` it may also be 0 where the producer puts zeros.
        """
        node = self.index.producer(tensor)
        if node is None or not node.input or len(node.output) != 1:
            return None
        source = self.symbolic.shape(node.input[0])
        same_type = self.symbolic.dtype(node.input[0]) == self.symbolic.dtype(tensor)
        if source is None or not same_type or node.op_type in _OPAQUE:
            return None
        opaque = _opaque_fact(node.input[0], Fact(self.symbolic.dtype(node.input[0]), source))
        value = self._apply(node, {node.input[0]: opaque}, tensor)
        moved = None if value is None else to_real(value.at(index))
        if pads and moved is not None and moved.kind == "select" and moved.args[2] == real(0.0):
            moved = moved.args[1] if isinstance(moved.args[1], Real) else None
        if moved is None or moved.kind != "element":
            return None
        name, at = moved.args
        assert isinstance(name, str)
        assert isinstance(at, tuple)
        return name, at

    def _fact(self, tensor: str) -> Fact:
        pending = [tensor]  # a graph may be deeper than Python's stack
        while pending:
            name = pending[-1]
            node = self.index.producer(name)
            if name in self._facts or self._is_known(name) or node is None or node.op_type in _OPAQUE:
                inputs = []
            else:
                inputs = [i for i in node.input if i and i not in self._facts]
            if inputs and name not in self._facts:
                pending += inputs
                continue
            if name not in self._facts:
                self._facts[name] = self._derive(name, node)
            pending.pop()
        return self._facts[tensor]

    def _is_known(self, name: str) -> bool:
        return self.symbolic.value(name) is not None or self.symbolic.shape(name) is None

    def _derive(self, name: str, node: onnx.NodeProto | None) -> Fact:
        base = Fact(self.symbolic.dtype(name), self.symbolic.shape(name), self.symbolic.value(name))
        if name in self.leaves:
            return _opaque_fact(name, base)
        if base.value is not None or base.shape is None:
            return base
        if node is not None and node.op_type not in _OPAQUE:
            value = self._apply(node, {i: self._facts[i] for i in node.input if i}, name)
            if value is not None:
                return Fact(base.dtype, base.shape, value)
        return _opaque_fact(name, base)

    def _apply(self, node: onnx.NodeProto, facts: dict[str, Fact], output: str) -> SymTensor | None:
        """The value of an output by the node's rule; None where the rule gives none, or another shape than the graph has."""
        if node.op_type == "Gather" and len(self.symbolic.shape(node.input[0]) or ()) == 1:
            facts = {**facts, node.input[1]: self._flat_indices(facts[node.input[1]])}
        try:
            results = self.symbolic.apply_rule(node, facts, domain=self.domain)
        except (ValueError, IndexError, TypeError, KeyError, ArithmeticError, AssertionError):
            return None  # rules raise where they cannot tell
        place = list(node.output).index(output)
        if results is None or place >= len(results):
            return None
        value = results[place].value
        return None if value is None or value.rank != len(self.symbolic.shape(output) or ()) else value

    def _flat_indices(self, fact: Fact) -> Fact:
        """Indices into a flattened tensor as plain arithmetic: no guards against overflow, no stored lines of integers."""
        value = fact.value
        if value is None or value.kind != "i":
            return fact

        def at(index: Index) -> Int:
            element = value.at(index)
            assert isinstance(element, Int)
            plain = strip_guards(element)
            tables = {a for a in subterms(plain) if isinstance(a, Atom) and a.kind == "table"}
            return replace_atoms(plain, {a: line for a in tables if (line := self._line(a)) is not None})

        return replace(fact, value=SymTensor(value.shape, "i", at))

    def _line(self, atom: Atom) -> Int | None:
        """An element of a stored vector of integers in equal steps as a formula of its index; None for another one's."""
        name, indices = atom.args[:2]
        array = self.symbolic.constant(name) if isinstance(name, str) else None
        if array is None or array.ndim != 1 or array.size < 2 or not isinstance(indices, tuple):
            return None
        first, step = int(array[0]), int(array[1]) - int(array[0])
        if not np.array_equal(array, first + step * np.arange(array.size)):
            return None
        (place,) = indices
        assert isinstance(place, Int)
        return integer(first) + integer(step) * place


def _opaque_fact(name: str, base: Fact) -> Fact:
    if base.shape is None or dtype_kind(base.dtype) != "f":
        return base
    return Fact(base.dtype, base.shape, SymTensor(base.shape, "f", lambda index: element_of(name, index)))


def simplify_real(domain: Domain, value: Real) -> Real:
    """A float with its indices and conditions in simpler terms, for indices within their limits.

    Raises:
        UnsupportedError: where it has too many parts.
    """
    simplified: dict[int, Real] = {}  # by id: floats share parts many times over

    def visit(one: Real) -> Real:
        if id(one) not in simplified:
            simplified[id(one)] = simplify(one)
            _limit_parts(simplified)
        return simplified[id(one)]

    def simplify(one: Real) -> Real:
        if one.kind != "select":
            return Real(one.kind, tuple(argument(a) for a in one.args))
        condition, yes, no = one.args
        assert isinstance(condition, Cond)
        assert isinstance(yes, Real)
        assert isinstance(no, Real)
        condition = domain.simplify(condition)
        if condition in (TRUE, FALSE):
            return visit(yes if condition == TRUE else no)
        return Real("select", (condition, visit(yes), visit(no)))

    def argument(one: object) -> object:
        if isinstance(one, Real):
            return visit(one)
        if isinstance(one, Int):
            return domain.integer(one)
        if isinstance(one, Cond):
            return domain.simplify(one)
        return tuple(argument(v) for v in one) if isinstance(one, tuple) else one

    return visit(value)


def _limit_parts(found: Mapping[int, object]) -> None:
    """Bounds the work on a float.

    Raises:
        UnsupportedError: where it has more parts than are looked at.
    """
    if len(found) > _MOST_PARTS:
        raise UnsupportedError(f"its formula has more than {_MOST_PARTS} parts")


def replace_atoms(value: Int, replacements: Mapping[Atom, Int]) -> Int:
    """An integer with others in the place of atoms, at any depth."""
    if not replacements:
        return value
    total = integer(0)
    for monomial, coefficient in value.terms:
        product = integer(coefficient)
        for atom in monomial:
            product = product * _replace_atom(atom, replacements)
        total = total + product
    return total


def _replace_atom(atom: Atom, replacements: Mapping[Atom, Int]) -> Int:
    if atom in replacements:
        return replacements[atom]
    if atom.kind in ("var", "size"):
        return Int((((atom,), 1),))
    return of_atom(atom.kind, *(_replace_argument(a, replacements, {}) for a in atom.args))


def replace_atoms_of_real(value: Real, replacements: Mapping[Atom, Int]) -> Real:
    """A float with integers in the place of atoms, at any depth.

    Raises:
        UnsupportedError: where it has too many parts.
    """
    replaced = _replace_argument(value, replacements, {})
    assert isinstance(replaced, Real)
    return replaced


def _replace_argument(value: object, replacements: Mapping[Atom, Int], done: dict[int, object]) -> object:
    """An argument with the replacements; ``done`` holds those of floats and conditions by id, which share parts."""
    if isinstance(value, Int):
        return replace_atoms(value, replacements)
    if isinstance(value, Real | Cond):
        if id(value) not in done:
            arguments = tuple(_replace_argument(a, replacements, done) for a in value.args)
            done[id(value)] = type(value)(value.kind, arguments)
            _limit_parts(done)
        return done[id(value)]
    return tuple(_replace_argument(v, replacements, done) for v in value) if isinstance(value, tuple) else value


def variables_of(values: Sequence[Int] | Int) -> frozenset[str]:
    """The names of index variables in integers, at any depth."""
    terms = subterms(tuple(values) if isinstance(values, Sequence) else values)
    return frozenset(str(t.args[0]) for t in terms if isinstance(t, Atom) and t.kind == "var")
