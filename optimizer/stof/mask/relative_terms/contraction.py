# SPDX-License-Identifier: Apache-2.0
"""Elements of MatMul and Einsum as sums of products over one index."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import onnx

from stof.graph.einsum import read_equation, split_equation
from stof.graph.index import is_standard
from stof.symbolic import Int, Symbolic, var
from stof.symbolic.algebra.terms import Atom, Cond, Real, subterms
from stof.symbolic.rules.broadcasting import project
from stof.symbolic.tensor import Index
from stof.symbolic.trace import Trace, variables_of

_DEEPEST = 32  # steps back in which a dependence is looked for
_MOST_PARTS = 4096  # floats that are looked at


@dataclass(frozen=True)
class TensorElement:
    """An element of a tensor."""

    tensor: str
    index: Index


@dataclass(frozen=True)
class Contraction:
    """The sum over an index variable, from 0 to ``size``, of products of two elements."""

    left: TensorElement
    right: TensorElement
    size: Int

    @property
    def orders(self) -> tuple[tuple[TensorElement, TensorElement], tuple[TensorElement, TensorElement]]:
        """The two elements in both orders."""
        return (self.left, self.right), (self.right, self.left)


def read_contraction(trace: Trace, leaf: Real, name: str) -> Contraction | None:
    """An element of a MatMul or Einsum as a sum over the index variable ``name``; None where it is none, or over several."""
    tensor, index = leaf.args
    assert isinstance(tensor, str)
    assert isinstance(index, tuple)
    node = trace.index.producer(tensor)
    if node is None or not is_standard(node) or len(node.input) != 2:
        return None
    if node.op_type == "MatMul":
        return _of_matmul(trace.symbolic, node, index, var(name))
    return _of_einsum(trace.symbolic, node, index, var(name)) if node.op_type == "Einsum" else None


def _of_matmul(symbolic: Symbolic, node: onnx.NodeProto, index: Index, inner: Int) -> Contraction | None:
    shapes = [symbolic.shape(n) for n in node.input]
    left, right = shapes
    if left is None or right is None or min(len(left), len(right)) < 2 or max(len(left), len(right)) != len(index):
        return None
    *batch, row, column = index
    sides = [(left, (row, inner)), (right, (inner, column))]
    elements = [
        TensorElement(n, (*project(tuple(batch), shape[:-2]), *last))
        for n, (shape, last) in zip(node.input, sides, strict=True)
    ]
    return Contraction(elements[0], elements[1], left[-1])


def _of_einsum(symbolic: Symbolic, node: onnx.NodeProto, index: Index, inner: Int) -> Contraction | None:
    equation = read_equation(node)
    letters, result = split_equation(equation)
    if result is None or "." in equation or len(letters) != 2 or len(result) != len(index) or len(node.input) != 2:
        return None
    if any(len(set(text)) < len(text) for text in (*letters, result)):
        return None
    summed = set("".join(letters)) - set(result)
    shapes = [symbolic.shape(n) for n in node.input]
    if len(summed) != 1 or any(s is None or len(s) != len(text) for s, text in zip(shapes, letters, strict=True)):
        return None
    (letter,) = summed
    if not all(letter in text for text in letters):
        return None
    at = {**dict(zip(result, index, strict=True)), letter: inner}
    elements = [
        TensorElement(n, project(tuple(at[c] for c in text), shape or ()))
        for n, text, shape in zip(node.input, letters, shapes, strict=True)
    ]
    return Contraction(elements[0], elements[1], (shapes[0] or ())[letters[0].index(letter)])


# Each element of the result is made of the input's element at the same index.
_ELEMENTWISE = frozenset(
    {"Sin", "Cos", "Exp", "Log", "Sqrt", "Reciprocal", "Cast", "Identity", "Relu", "Tanh", "Sigmoid"}
)


def depends_on(trace: Trace, value: Real, name: str) -> bool:
    """Whether a float may change with an index variable; True where that is not known, or takes too long to tell."""
    pending: deque[tuple[Real, int]] = deque([(value, 0)])
    seen: dict[int, Real] = {}  # by id, which no other object takes as long as they are held
    while pending:
        one, depth = pending.popleft()
        if id(one) in seen:
            continue
        if depth > _DEEPEST or len(seen) == _MOST_PARTS:
            return True
        seen[id(one)] = one
        if one.kind != "element":
            if any(name in _variables(a) for a in one.args if isinstance(a, Int | Cond | tuple)):
                return True
            pending += [(a, depth + 1) for a in one.args if isinstance(a, Real)]
            continue
        index = one.args[1]
        assert isinstance(index, tuple)
        if name not in variables_of(index):
            continue
        sources = list(_sources(trace, one, name, depth))
        if not sources or None in sources:
            return True
        pending += [(source, depth + 1) for source in sources if source is not None]
    return False


def _variables(value: Int | Cond | tuple[object, ...]) -> frozenset[str]:
    return frozenset(str(t.args[0]) for t in subterms(value) if isinstance(t, Atom) and t.kind == "var")


def _sources(trace: Trace, leaf: Real, name: str, depth: int) -> Iterator[Real | None]:
    """What an element of a compute node is made of; nothing where that is not known, None for what is not."""
    tensor, index = leaf.args
    assert isinstance(tensor, str)
    assert isinstance(index, tuple)
    node = trace.index.producer(tensor)
    contraction = read_contraction(trace, leaf, f"inner{depth}")
    if contraction is not None:
        for element in (contraction.left, contraction.right):
            yield trace.element(element.tensor, element.index)
    elif node is not None and node.op_type in _ELEMENTWISE:
        yield trace.element(node.input[0], index)
    elif node is not None and node.op_type == "LayerNormalization":
        axis = next((a.i for a in node.attribute if a.name == "axis"), -1) % len(index)
        inner = tuple(var(f"norm{depth}.{a}") for a in range(axis, len(index)))
        yield trace.element(node.input[0], (*index[:axis], *inner)) if name not in variables_of(index[axis:]) else None
