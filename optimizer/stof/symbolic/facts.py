# SPDX-License-Identifier: Apache-2.0
"""Facts about tensors, and the context of a rule, which derives the facts of a node's outputs from those of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import onnx
from onnx import TensorProto, helper

from stof.symbolic.algebra.domain import Domain
from stof.symbolic.algebra.equations import reduce_equation
from stof.symbolic.algebra.terms import Atom, Int, dim, integer
from stof.symbolic.tensor import Shape, SymTensor


def dtype_kind(dtype: int) -> str | None:
    """The scalar kind of an ONNX element type; None for strings, complex and sub-byte floats."""
    if dtype == TensorProto.BOOL:
        return "b"
    if dtype in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16):
        return "f"
    try:
        return "i" if helper.tensor_dtype_to_np_dtype(dtype).kind in "iu" else None
    except (KeyError, TypeError):
        return None


@dataclass(frozen=True)
class Fact:
    """What is known about one tensor."""

    dtype: int = 0
    shape: Shape | None = None
    value: SymTensor | None = None
    reason: str = ""  # why ``value`` is None


class RuleContext:
    """What a rule may use: the node, its attributes, and the facts of its inputs.

    Args:
        facts: of the tensors so far.
        node: the node.
        opset: of the standard domain.
        equalities: of sizes; a rule adds to them.
        is_exact: sizes hold in every run; else as :class:`stof.symbolic.Symbolic` says.
        domain: the limits of index variables, by which a Reshape tells that a division by a size may give a neighbouring row.
    """

    def __init__(
        self,
        facts: dict[str, Fact],
        node: onnx.NodeProto,
        opset: int,
        equalities: dict[tuple[Int, Int], bool],
        *,
        is_exact: bool = False,
        domain: Domain | None = None,
    ) -> None:
        self.is_exact = is_exact
        self.domain = domain
        self.facts = facts
        self.equalities = equalities
        self.node = node
        self.opset = opset
        self.attributes = {a.name: a for a in node.attribute}

    def unknown_size(self, axis: int) -> Int:
        """The size of an axis of the first output, of which nothing is known."""
        return dim(f"{self.node.output[0]}#{axis}")

    def has(self, i: int) -> bool:
        """Whether input ``i`` is given."""
        return i < len(self.node.input) and bool(self.node.input[i])

    def equate(self, one: Int, other: Int, is_forced: bool = True) -> None:
        """Records that two sizes, neither of them 1, are equal in every valid run.

        Args:
            one: a size.
            other: another one.
            is_forced: the node fails else. Sizes of two names that one of 1 may be broadcast against are taken for equal only.
        """
        pair = reduce_equation(one, other) if one != other else (one, other)
        if self.is_exact and not is_forced:  # one of the two may be 1
            return
        if one == other or (self.canonicalize(one) == self.canonicalize(other) and self.equalities.get(pair, True)):
            return
        self.equalities[pair] = is_forced or self.equalities.get(pair, False)

    def equate_shapes(self, one: Iterable[Int], other: Iterable[Int]) -> None:
        """Records that the axes of two shapes, from the first one on, are equal in every valid run."""
        for a, b in zip(one, other, strict=False):
            self.equate(a, b)

    def canonicalize(self, size: Int) -> Int:
        """One expression for all sizes that are equal, or have equal factors: numbers where there are any."""
        for one, other in self.equalities:
            plain, value = (one, other) if other.constant is not None else (other, one)
            if size == plain:
                size = value
            elif plain.atom is not None and plain.atom in size.atoms():
                size = _substitute(size, plain.atom, value)
        return size

    def fact(self, i: int) -> Fact:
        """The fact of input ``i``; an empty one when it is not given."""
        return self.facts.get(self.node.input[i], Fact()) if self.has(i) else Fact()

    def shape(self, i: int) -> Shape | None:
        """The symbolic shape of input ``i``."""
        return self.fact(i).shape

    def value(self, i: int) -> SymTensor | None:
        """Input ``i`` as a function of its indices."""
        return self.fact(i).value

    def attribute(self, name: str, default: object = None) -> object:
        """An attribute's value."""
        attribute = self.attributes.get(name)
        if attribute is None:
            return default
        value = helper.get_attribute_value(attribute)
        return value.decode(errors="replace") if isinstance(value, bytes) else value

    def number(self, name: str, default: int) -> int:
        """An integer attribute."""
        value = self.attribute(name, default)
        assert isinstance(value, int)
        return value

    def ints(self, i: int) -> list[Int] | None:
        """The elements of a small integer input, symbolic ones included."""
        value = self.value(i)
        elements = value.elements() if value is not None and value.kind == "i" else None
        return None if elements is None else [e for e in elements if isinstance(e, Int)]

    def fixed_ints(self, i: int) -> list[int] | None:
        """The elements of a small integer input that are all known numbers."""
        elements = self.ints(i)
        constants = None if elements is None else [e.constant for e in elements]
        if constants is None or any(c is None for c in constants):
            return None
        return [c for c in constants if c is not None]


def _substitute(size: Int, atom: Atom, value: Int) -> Int:
    total = integer(0)
    for monomial, coefficient in size.terms:
        product = integer(coefficient)
        for factor in monomial:
            product = product * (value if factor == atom else Int((((factor,), 1),)))
        total = total + product
    return total


Rule = Callable[[RuleContext], list[Fact] | None]
