# SPDX-License-Identifier: Apache-2.0
"""From the softmax backwards to the MatMul of query and key: what is done to the scores on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import onnx

from stof.attention.einsum import Order, einsum_matmuls
from stof.attention.layouts import (
    CASTS,
    MovePath,
    check_axes,
    is_float_cast,
    is_identity,
    is_move,
    scalar_factor,
    trace_axes,
)
from stof.errors import UnsupportedError
from stof.graph.index import GraphIndex, describe, is_standard
from stof.site import FORBIDDING_VALUE, MaskTerm, TermKind
from stof.symbolic import Real, Symbolic, var
from stof.symbolic.algebra.conditions import all_of
from stof.symbolic.algebra.piecewise import split_cases
from stof.symbolic.algebra.terms import FALSE, to_real
from stof.symbolic.rules.broadcasting import broadcast, project
from stof.symbolic.rules.cast import overflow_to_inf

_DEEPEST = 32
MERGED_HEADS_UNKNOWN = -1  # a mask [B*H, .., ..] while H is not known yet


@dataclass(frozen=True)
class Scores:
    """What lies between the first MatMul and the softmax. Terms and words run from the softmax backwards."""

    query: str = ""
    key: str = ""
    key_transposed: bool = True  # the operand is [.., D, T]
    query_order: Order = ()  # of axes in which an operand is [.., S, D] or [.., T, D], where it is not its own
    key_order: Order = ()
    factor: float = 1.0
    softcap: float = 0.0
    spread_factor: tuple[str, str] | None = None  # "Mul" or "Div" and a tensor [.., 1]
    floored: bool = False  # the scores that enter the softmax are at least the lowest finite number
    heads: int = 0  # H, where a mask meets the scores as [B, H, S, T]
    terms: tuple[MaskTerm, ...] = ()
    words: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()  # first outputs of the nodes passed

    def passed(self, node: onnx.NodeProto, word: str = "") -> Scores:
        """With a node more."""
        words = (*self.words, word) if word else self.words
        return replace(self, words=words, nodes=(*self.nodes, node.output[0]))


class ScoreWalk:
    """One walk. ``accept`` raises UnsupportedError for a MatMul that is none of a query and a key."""

    def __init__(self, index: GraphIndex, symbolic: Symbolic, accept: Callable[[Scores], object]) -> None:
        self.index = index
        self.symbolic = symbolic
        self.accept = accept

    def walk(self, tensor: str, scores: Scores | None = None, depth: int = 0) -> Scores:
        """The scores from a tensor backwards.

        Raises:
            UnsupportedError: naming the first node that is in the way.
        """
        scores = scores or Scores()
        node = self.index.producer(tensor)
        if node is None or depth > _DEEPEST:
            raise UnsupportedError(f"no MatMul of a query and a key was found before the softmax; met {tensor!r}")
        found = self._matmul(node, scores)
        if found is not None:
            self.accept(found)
            return found
        if not is_standard(node):
            raise self._obstacle(node)
        if node.op_type == "Add":
            return self._add(node, scores, depth)
        if node.op_type == "Where":
            return self._where(node, scores, depth)
        passed = self._same(node)
        if passed is not None:
            return self.walk(passed, scores.passed(node), depth + 1)
        passed = self._floored(node, scores)
        if passed is not None:
            return self.walk(passed, replace(scores.passed(node), floored=True), depth + 1)
        if node.op_type == "Sub":
            return self._sub(node, scores, depth)
        factor = scalar_factor(self.symbolic, node)
        if factor is None:
            return self._multiplied(node, scores, depth)
        capped = self._softcap(node, factor, scores, depth)
        if capped is not None:
            return capped
        scaled = replace(scores.passed(node, "scale on scores"), factor=scores.factor * factor[1])
        return self.walk(factor[0], scaled, depth + 1)

    def _obstacle(self, node: onnx.NodeProto) -> UnsupportedError:
        return UnsupportedError(
            f"no MatMul of a query and a key was found before the softmax; the walk met {describe(node)}"
        )

    def _matmul(self, node: onnx.NodeProto, scores: Scores) -> Scores | None:
        if node.op_type == "MatMul" and is_standard(node):
            check_axes(self.symbolic, node, "key")
            return replace(scores.passed(node), query=node.input[0], key=node.input[1])
        for product in einsum_matmuls(self.symbolic, node):
            if product.result == tuple(range(len(product.result))):
                return replace(
                    scores.passed(node),
                    query=product.left,
                    key=product.right,
                    key_transposed=False,
                    query_order=product.left_order,
                    key_order=product.right_order,
                )
        if node.op_type != "FusedMatMul" or node.domain != "com.microsoft":
            return None
        attributes = {a.name: a for a in node.attribute}
        if any(attributes[n].i for n in ("transA", "transBatchA", "transBatchB") if n in attributes):
            raise UnsupportedError(f"{describe(node)} transposes its query or its batch")
        alpha = attributes["alpha"].f if "alpha" in attributes else 1.0
        check_axes(self.symbolic, node, "key")
        transposes = "transB" in attributes and bool(attributes["transB"].i)
        return replace(
            scores.passed(node),
            query=node.input[0],
            key=node.input[1],
            key_transposed=not transposes,
            factor=scores.factor * alpha,
        )

    def _same(self, node: onnx.NodeProto) -> str | None:
        """The input of a node after which every score means what it did before."""
        if is_identity(self.symbolic, node) or is_float_cast(self.symbolic, node):
            return str(node.input[0])
        if is_move(self.symbolic, node):
            return str(node.input[0]) if keeps_last_two_axes(self.symbolic, node) else None
        # A softmax does not change when a row is shifted.
        return str(node.input[0]) if subtracts_row_max(self.index, self.symbolic, node) else None

    def _floored(self, node: onnx.NodeProto, scores: Scores) -> str | None:
        """The scores of Max(scores, lowest): only masked ones are below, and they stay masked."""
        if node.op_type != "Max" or len(node.input) != 2:
            return None
        for i in (0, 1):
            least = self.symbolic.uniform(node.input[i])
            if least is not None and least <= -1e30:
                if scores.terms:
                    raise UnsupportedError(f"{describe(node)} bounds scores that are masked again after it")
                return str(node.input[1 - i])
        return None

    def _softcap(self, node: onnx.NodeProto, factor: tuple[str, float], scores: Scores, depth: int) -> Scores | None:
        """Of ``cap * tanh(x * s)`` the scores x get scale s * cap and softcap cap."""
        tanh = self.index.producer(factor[0])
        if tanh is None or tanh.op_type != "Tanh":
            return None
        if scores.factor != 1.0 or scores.softcap or factor[1] == 0:
            raise UnsupportedError(f"{describe(node)} scales scores after their tanh more than once")
        inner = self.index.producer(tanh.input[0])
        found = None if inner is None else scalar_factor(self.symbolic, inner)
        source, scale = (tanh.input[0], 1.0) if found is None else found
        capped = replace(scores.passed(node, "softcap").passed(tanh), softcap=abs(factor[1]), factor=scale * factor[1])
        if inner is not None and found is not None:
            capped = capped.passed(inner)
        result = self.walk(source, capped, depth + 1)
        if len(result.terms) != len(scores.terms):
            # A mask below the tanh would be squashed with the scores: not what the op does.
            raise UnsupportedError(f"a mask is applied below {describe(tanh)}")
        return result

    def _heads(self, node: onnx.NodeProto) -> int:
        shape = self.symbolic.shape(node.output[0])
        return (shape[1].constant or 0) if shape is not None and len(shape) == 4 else 0

    def _add(self, node: onnx.NodeProto, scores: Scores, depth: int) -> Scores:
        # The side that can be computed from shapes and inputs is the mask; two opaque sides are tried in turn.
        failure: UnsupportedError | None = None
        for i in (0, 1):
            if self.symbolic.value(node.input[i]) is not None:
                continue
            try:
                blended = self._blended(node, node.input[i], node.input[1 - i], 1.0, scores, depth)
                if blended is not None:
                    return blended
                term = self._term(TermKind.ADD, node, node.input[1 - i], None, scores.factor)
                passed = replace(scores.passed(node, "additive mask"), heads=self._heads(node) or scores.heads)
                return self.walk(node.input[i], replace(passed, terms=(*passed.terms, term)), depth + 1)
            except UnsupportedError as error:
                failure = failure or error
        raise failure or self._obstacle(node)

    def _blended(
        self, node: onnx.NodeProto, product: str, added: str, sign: float, scores: Scores, depth: int
    ) -> Scores | None:
        """Of ``scores * m + (1 - m) * fill`` with m 0 or 1: a Where by m, as GPT and TensorFlow's models spell it."""
        mul = self.index.producer(product)
        if mul is None or mul.op_type != "Mul" or not is_standard(mul):
            return None
        for i in (0, 1):
            mask = mul.input[1 - i]
            if self.symbolic.value(mul.input[i]) is not None or self.symbolic.value(mask) is None:
                continue
            fill = _find_fill(self.symbolic, mask, added, sign)
            if fill is None or fill * scores.factor > FORBIDDING_VALUE:
                continue
            term = self._term(TermKind.KEEP, node, mask, self._scaled(fill, scores.factor, node))
            passed = scores.passed(node, "mask by a product").passed(mul)
            passed = replace(passed, heads=self._heads(node) or scores.heads)
            return self.walk(mul.input[i], replace(passed, terms=(*passed.terms, term)), depth + 1)
        return None

    def _sub(self, node: onnx.NodeProto, scores: Scores, depth: int) -> Scores:
        blended = self._blended(node, node.input[0], node.input[1], -1.0, scores, depth)
        if blended is not None:
            return blended
        term = self._term(TermKind.ADD, node, node.input[1], None, -scores.factor)
        passed = replace(scores.passed(node, "subtracted mask"), heads=self._heads(node) or scores.heads)
        return self.walk(node.input[0], replace(passed, terms=(*passed.terms, term)), depth + 1)

    def _where(self, node: onnx.NodeProto, scores: Scores, depth: int) -> Scores:
        for kind, kept, filled in ((TermKind.KEEP, 1, 2), (TermKind.DROP, 2, 1)):
            fill = self.symbolic.uniform(node.input[filled])
            if fill is None:
                continue
            number = self._scaled(fill, scores.factor, node)
            if number > FORBIDDING_VALUE:
                raise UnsupportedError(
                    f"{describe(node)} fills masked scores with {number}, more than {FORBIDDING_VALUE:g}"
                )
            term = self._term(kind, node, node.input[0], number)
            passed = replace(scores.passed(node, "Where mask"), heads=self._heads(node) or scores.heads)
            return self.walk(node.input[kept], replace(passed, terms=(*passed.terms, term)), depth + 1)
        raise self._obstacle(node)

    def _scaled(self, fill: float, factor: float, node: onnx.NodeProto) -> float:
        """What masked scores are after they are multiplied: the lowest number times 2 is -inf."""
        return overflow_to_inf(fill * factor, self.symbolic.dtype(node.output[0]))

    def _multiplied(self, node: onnx.NodeProto, scores: Scores, depth: int) -> Scores:
        """Scores that a mask of ones and zeros makes zero, to which another adds what forbids them."""
        for i in (0, 1) if node.op_type == "Mul" and any(t.kind is TermKind.ADD for t in scores.terms) else ():
            if self._is_switch(node.input[1 - i]):
                term = self._term(TermKind.KEEP, node, node.input[1 - i], 0.0)
                passed = scores.passed(node, "multiplied mask")
                return self.walk(node.input[i], replace(passed, terms=(*passed.terms, term)), depth + 1)
        return self._scaled_by_row(node, scores, depth)

    def _scaled_by_row(self, node: onnx.NodeProto, scores: Scores, depth: int) -> Scores:
        """Scores times a tensor that is the same for all keys: the query may be multiplied instead."""
        for i in {"Mul": (0, 1), "Div": (0,)}.get(node.op_type, ()):
            shape, own = (self.symbolic.shape(node.input[j]) for j in (i, 1 - i))
            if shape is None or own is None or len(own) > 4 or shape != self.symbolic.shape(node.output[0]):
                continue
            number = all(d.constant == 1 for d in own)  # the same for all: scores and queries may have any axes
            if not number and (len(shape) != 4 or own[-1].constant != 1):
                continue
            if scores.spread_factor is not None:
                raise UnsupportedError(f"{describe(node)} scales scores by head or row a second time")
            passed = replace(scores.passed(node, "scale by head"), spread_factor=(node.op_type, node.input[1 - i]))
            found = self.walk(node.input[i], passed, depth + 1)
            if (
                len(found.terms) != len(scores.terms)
                or found.softcap != scores.softcap
                or found.floored != scores.floored
            ):
                raise UnsupportedError(
                    f"scores are masked or bounded before {describe(node)} scales them by head or row"
                )
            return found
        raise self._obstacle(node)

    def _is_switch(self, tensor: str) -> bool:
        """Whether a tensor is a float mask of ones and zeros."""
        array, value = self.symbolic.constant(tensor), self.symbolic.value(tensor)
        shape = self.symbolic.shape(tensor)
        if not shape or shape[-1].constant == 1:  # the same for all keys
            return False
        if array is not None:
            return bool(np.isin(array, (0, 1)).all())
        if value is None or value.kind != "f":
            return False
        element = value.at(tuple(var(f"place{a}") for a in range(value.rank)))
        if isinstance(element, Real) and element.kind == "table":
            array = self.symbolic.constant(str(element.args[0]))
            return array is not None and bool(np.isin(array, (0, 1)).all())
        return isinstance(element, Real) and all(x in (0.0, 1.0) for _, x in split_cases(element))

    def _term(
        self, kind: TermKind, node: onnx.NodeProto, tensor: str, fill: float | None, scale: float = 1.0
    ) -> MaskTerm:
        """A mask that broadcasts to [B, H, S, T], from one that broadcasts to the node's output."""
        shape, own = self.symbolic.shape(node.output[0]), self.symbolic.shape(tensor)
        if shape is None or own is None:
            raise UnsupportedError(f"the shape of mask {tensor!r} of {describe(node)} is unknown")
        if len(shape) == 4 or (len(own) < 5 and all(d.constant == 1 for d in own[:-2])):
            return MaskTerm(kind, tensor, fill, scale)
        source, moves = tensor, list[onnx.NodeProto]()
        while len(shape) == 3 and len(moves) < 4:  # [B*H, S, T] from a tensor [B, H, S, T]
            mover = self.index.producer(source)
            if mover is None or not is_move(self.symbolic, mover):
                break
            source = mover.input[0]
            moves.insert(0, mover)
            axes = trace_axes(self.symbolic, MovePath(source, tuple(moves)))
            before = self.symbolic.shape(source)
            if axes is None or before is None:
                break
            order = [a for group in axes for a in group]
            if len(before) == 4 and [(a.axis, a.part) for a in order] == [(i, 0) for i in range(4)]:
                return MaskTerm(kind, source, fill, scale)
        if len(shape) == len(own) == 3 and own[0] == shape[0]:
            return MaskTerm(kind, tensor, fill, scale, MERGED_HEADS_UNKNOWN)
        if len(shape) == 5:  # Swin's windows: [images, windows of each, H, S, T]
            return MaskTerm(kind, tensor, fill, scale, windows=shape[:3])
        raise UnsupportedError(f"mask {tensor!r} of {describe(node)} has rank {len(own)}, the scores have {len(shape)}")


def _find_fill(symbolic: Symbolic, mask: str, added: str, sign: float) -> float | None:
    """The one number that is added, times ``sign``, where a mask of 0 and 1 is 0, while 0 is where it is 1."""
    stored = symbolic.constant(mask), symbolic.constant(added)
    if stored[0] is not None and stored[1] is not None:
        return _find_constant_fill(*stored, sign)
    factors, terms = symbolic.value(mask), symbolic.value(added)
    if factors is None or terms is None or "f" not in (factors.kind, terms.kind):
        return None
    shape = broadcast([factors.shape, terms.shape])
    probe = tuple(var(name) for name in "bghqk")[-len(shape) :] if len(shape) <= 5 else ()
    if not probe:
        return None
    one, other = (split_cases(to_real(t.at(project(probe, t.shape)))) for t in (factors, terms))
    fills: set[float] = set()
    for c1, m in one:
        for c2, x in other:
            if all_of([c1, c2]) == FALSE:
                continue
            if not isinstance(m, float) or not isinstance(x, float) or m not in (0.0, 1.0) or (m == 1.0 and x != 0.0):
                return None
            if m == 0.0:
                fills.add(x * sign)
    return fills.pop() if len(fills) == 1 else None


def _find_constant_fill(mask: np.ndarray | None, added: np.ndarray | None, sign: float) -> float | None:
    assert mask is not None
    assert added is not None
    keep, fills = np.broadcast_arrays(mask, added)
    if not np.isin(keep, (0, 1)).all() or np.any(fills[keep == 1]):
        return None
    found = np.unique(fills[keep == 0])
    return float(found[0]) * sign if found.size == 1 else None


def keeps_last_two_axes(symbolic: Symbolic, node: onnx.NodeProto) -> bool:
    """Whether a movement only regroups the axes in front of the last two."""
    before, after = symbolic.shape(node.input[0]), symbolic.shape(node.output[0])
    if before is None or after is None or len(before) < 2 or len(after) < 2 or node.op_type in ("Transpose", "Expand"):
        return node.op_type == "Identity" or node.op_type in CASTS
    return before[-2:] == after[-2:]


def subtracts_row_max(index: GraphIndex, symbolic: Symbolic, node: onnx.NodeProto) -> bool:
    """Whether a node subtracts from each row its largest number."""
    if node.op_type != "Sub":
        return False
    maximum = index.producer(node.input[1])
    while maximum is not None and maximum.op_type == "Identity":  # where a gradient was stopped
        maximum = index.producer(maximum.input[0])
    if maximum is None or maximum.op_type != "ReduceMax" or maximum.input[0] != node.input[0]:
        return False
    shape, own = symbolic.shape(node.input[0]), symbolic.shape(node.input[1])
    return shape is not None and own is not None and own[:-1] == shape[:-1] and own[-1].constant == 1
