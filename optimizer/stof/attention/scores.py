# SPDX-License-Identifier: Apache-2.0
"""From a softmax backwards to the MatMul of query and key.

``ON_SCORES`` lists the spellings of scales, softcaps, masks and biases that are understood on the way. To add one, write a
rule as a method of ``ScoreWalk`` and put it into the list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import onnx

from stof.attention.einsum import Order, einsum_matmuls
from stof.attention.layouts import check_axes
from stof.attention.move_paths import CASTS, MovePath, is_float_cast, is_identity, is_move, scalar_factor, trace_axes
from stof.errors import UnsupportedError
from stof.graph.index import GraphIndex, describe, is_standard
from stof.mask.site import FORBIDDING_VALUE, MaskTerm, TermKind
from stof.symbolic import Real, Symbolic, var
from stof.symbolic.algebra.conditions import all_of
from stof.symbolic.algebra.piecewise import split_cases
from stof.symbolic.algebra.terms import FALSE, to_real
from stof.symbolic.rules.broadcasting import broadcast, project
from stof.symbolic.rules.cast import overflow_to_inf

_MAX_DEPTH = 32
_LOWEST = -1e30  # fp32 and wider types count a lower bound of at most this as their lowest number
MERGED_HEADS_UNKNOWN = -1  # MaskTerm.merged of a mask [B*H, .., ..] until H is known


@dataclass(frozen=True)
class Scores:
    """What the walk has found between the softmax and a tensor before it. Terms, words and nodes run backwards.

    At the end of the walk it also holds the operands of the MatMul.
    """

    query: str = ""
    key: str = ""
    key_transposed: bool = True  # the operand is [.., D, T]
    query_order: Order = ()  # order of axes in which the operand is [.., S, D]; () where it is so itself
    key_order: Order = ()  # the same for [.., T, D]
    factor: float = 1.0
    softcap: float = 0.0
    spread_factor: tuple[str, str] | None = None  # "Mul" or "Div", and a tensor [.., 1]
    floored: bool = False  # the scores that enter the softmax are at least the lowest finite number
    heads: int = 0  # H, where a mask meets the scores as [B, H, S, T]
    terms: tuple[MaskTerm, ...] = ()
    words: tuple[str, ...] = ()  # of the report, one for each spelling that was met
    nodes: tuple[str, ...] = ()  # first outputs of the nodes

    def with_node(self, node: onnx.NodeProto, word: str = "") -> Scores:
        """The same with one more node."""
        words = (*self.words, word) if word else self.words
        return replace(self, words=words, nodes=(*self.nodes, node.output[0]))

    def with_term(self, term: MaskTerm, heads: int = 0) -> Scores:
        """The same with one more mask or bias; ``heads`` where the mask shows how many there are."""
        return replace(self, terms=(*self.terms, term), heads=heads or self.heads)


class ScoreWalk:
    """Walks from a softmax backwards to the MatMul of query and key; the spellings on the way are in ``ON_SCORES``.

    Args:
        index: of the graph.
        symbolic: shapes and values of its tensors.
        check_operands: called with the operands of a MatMul; raises UnsupportedError where they are no query and key.
    """

    def __init__(self, index: GraphIndex, symbolic: Symbolic, check_operands: Callable[[Scores], object]) -> None:
        self.index = index
        self.symbolic = symbolic
        self.check_operands = check_operands

    def walk(self, tensor: str, scores: Scores | None = None, depth: int = 0) -> Scores:
        """The scores from a tensor backwards.

        Raises:
            UnsupportedError: naming the first node that is in the way.
        """
        scores = scores or Scores()
        node = self.index.producer(tensor)
        if node is None or depth > _MAX_DEPTH:
            raise UnsupportedError(f"no MatMul of a query and a key was found before the softmax; met {tensor!r}")
        operands = self._match_matmul(node, scores)
        if operands is not None:
            self.check_operands(operands)
            return operands
        for rule in ON_SCORES if is_standard(node) else ():
            found = rule(self, node, scores, depth)
            if found is not None:
                return found
        raise UnsupportedError(
            f"no MatMul of a query and a key was found before the softmax; the walk met {describe(node)}"
        )

    def _match_matmul(self, node: onnx.NodeProto, scores: Scores) -> Scores | None:
        if node.op_type == "MatMul" and is_standard(node):
            check_axes(self.symbolic, node, "key")
            return replace(scores.with_node(node), query=node.input[0], key=node.input[1])
        for matmul in einsum_matmuls(self.symbolic, node):
            if matmul.result_order == tuple(range(len(matmul.result_order))):
                return replace(
                    scores.with_node(node),
                    query=matmul.left,
                    key=matmul.right,
                    key_transposed=False,
                    query_order=matmul.left_order,
                    key_order=matmul.right_order,
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
            scores.with_node(node),
            query=node.input[0],
            key=node.input[1],
            key_transposed=not transposes,
            factor=scores.factor * alpha,
        )

    def skip_neutral(self, node: onnx.NodeProto, scores: Scores, depth: int) -> Scores | None:
        """Identity, casts, moves of the leading axes, and x - max(x), which does not change a softmax."""
        if is_identity(self.symbolic, node) or is_float_cast(self.symbolic, node):
            is_neutral = True
        elif is_move(self.symbolic, node):
            is_neutral = keeps_last_two_axes(self.symbolic, node)
        else:
            is_neutral = subtracts_row_max(self.index, self.symbolic, node)
        return self.walk(node.input[0], scores.with_node(node), depth + 1) if is_neutral else None

    def floor(self, node: onnx.NodeProto, scores: Scores, depth: int) -> Scores | None:
        """Max(scores, lowest): only masked scores are lower, and they stay masked."""
        if node.op_type != "Max" or len(node.input) != 2:
            return None
        for i in (0, 1):
            least = self.symbolic.uniform(node.input[i])
            if least is not None and least <= _LOWEST:
                if scores.terms:
                    raise UnsupportedError(f"{describe(node)} bounds scores that are masked again after it")
                return self.walk(node.input[1 - i], replace(scores.with_node(node), floored=True), depth + 1)
        return None

    def scale(self, node: onnx.NodeProto, scores: Scores, depth: int) -> Scores | None:
        """Scores times or divided by one number."""
        factor = scalar_factor(self.symbolic, node)
        if factor is None:
            return None
        scaled = replace(scores.with_node(node, "scale on scores"), factor=scores.factor * factor[1])
        return self.walk(factor[0], scaled, depth + 1)

    def cap(self, node: onnx.NodeProto, scores: Scores, depth: int) -> Scores | None:
        """Softcap: ``cap * tanh(x * s)``; the scores x get scale s * cap and softcap cap."""
        factor = scalar_factor(self.symbolic, node)
        if factor is None:
            return None
        tanh = self.index.producer(factor[0])
        if tanh is None or tanh.op_type != "Tanh":
            return None
        if scores.factor != 1.0 or scores.softcap or factor[1] == 0:
            raise UnsupportedError(f"{describe(node)} scales scores after their tanh more than once")
        inner = self.index.producer(tanh.input[0])
        found = None if inner is None else scalar_factor(self.symbolic, inner)
        source, scale = (tanh.input[0], 1.0) if found is None else found
        capped = replace(
            scores.with_node(node, "softcap").with_node(tanh), softcap=abs(factor[1]), factor=scale * factor[1]
        )
        if inner is not None and found is not None:
            capped = capped.with_node(inner)
        result = self.walk(source, capped, depth + 1)
        if len(result.terms) != len(scores.terms):
            # The tanh would change the mask as well, which the op does not do.
            raise UnsupportedError(f"a mask is applied below {describe(tanh)}")
        return result

    def add_mask(self, node: onnx.NodeProto, scores: Scores, depth: int) -> Scores | None:
        """Scores plus a mask or bias, or a mask by a product (see ``_mask_by_product``)."""
        if node.op_type != "Add":
            return None
        # The side with a symbolic value, from shapes and inputs, is the mask. Without one, each side is tried.
        failure: UnsupportedError | None = None
        for i in (0, 1):
            if self.symbolic.value(node.input[i]) is not None:
                continue
            try:
                found = self._mask_by_product(node, node.input[i], node.input[1 - i], 1.0, scores, depth)
                if found is not None:
                    return found
                term = self._term(TermKind.ADD, node, node.input[1 - i], None, scores.factor)
                masked = scores.with_node(node, "additive mask").with_term(term, self._heads(node))
                return self.walk(node.input[i], masked, depth + 1)
            except UnsupportedError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return None

    def subtract_mask(self, node: onnx.NodeProto, scores: Scores, depth: int) -> Scores | None:
        """Scores minus a mask or bias, or a mask by a product."""
        if node.op_type != "Sub":
            return None
        found = self._mask_by_product(node, node.input[0], node.input[1], -1.0, scores, depth)
        if found is not None:
            return found
        term = self._term(TermKind.ADD, node, node.input[1], None, -scores.factor)
        masked = scores.with_node(node, "subtracted mask").with_term(term, self._heads(node))
        return self.walk(node.input[0], masked, depth + 1)

    def _mask_by_product(
        self, node: onnx.NodeProto, product: str, added: str, sign: float, scores: Scores, depth: int
    ) -> Scores | None:
        """Of ``scores * m + x`` with m 0 or 1 and x 0 where m is 1: a Where by m.

        GPT and TensorFlow models add ``(1 - m) * fill``, others ``log(m)``, whose fill is -inf.
        """
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
            term = self._term(TermKind.KEEP, node, mask, self._scale_fill(fill, scores.factor, node))
            masked = scores.with_node(node, "mask by a product").with_node(mul).with_term(term, self._heads(node))
            return self.walk(mul.input[i], masked, depth + 1)
        return None

    def where_mask(self, node: onnx.NodeProto, scores: Scores, depth: int) -> Scores | None:
        """Where with the scores on one side and a forbidding number on the other."""
        if node.op_type != "Where":
            return None
        for kind, kept, filled in ((TermKind.KEEP, 1, 2), (TermKind.DROP, 2, 1)):
            number = self.symbolic.uniform(node.input[filled])
            if number is None:
                continue
            fill = self._scale_fill(number, scores.factor, node)
            if fill > FORBIDDING_VALUE:
                raise UnsupportedError(
                    f"{describe(node)} fills masked scores with {fill}, more than {FORBIDDING_VALUE:g}"
                )
            term = self._term(kind, node, node.input[0], fill)
            masked = scores.with_node(node, "Where mask").with_term(term, self._heads(node))
            return self.walk(node.input[kept], masked, depth + 1)
        return None

    def _scale_fill(self, fill: float, factor: float, node: onnx.NodeProto) -> float:
        """What masked scores are after scaling: twice the lowest number is -inf."""
        return overflow_to_inf(fill * factor, self.symbolic.dtype(node.output[0]))

    def zero_by_mask(self, node: onnx.NodeProto, scores: Scores, depth: int) -> Scores | None:
        """Scores times a mask of ones and zeros, where a mask that is added later forbids what is zero here."""
        if node.op_type != "Mul" or not any(t.kind is TermKind.ADD for t in scores.terms):
            return None
        for i in (0, 1):
            if self._is_zero_one_mask(node.input[1 - i]):
                term = self._term(TermKind.KEEP, node, node.input[1 - i], 0.0)
                masked = scores.with_node(node, "multiplied mask").with_term(term)
                return self.walk(node.input[i], masked, depth + 1)
        return None

    def scale_by_head_or_row(self, node: onnx.NodeProto, scores: Scores, depth: int) -> Scores | None:
        """Scores times a tensor that is the same for all keys: the query can be multiplied instead."""
        for i in {"Mul": (0, 1), "Div": (0,)}.get(node.op_type, ()):
            shape, factor_shape = (self.symbolic.shape(node.input[j]) for j in (i, 1 - i))
            if shape is None or factor_shape is None or len(factor_shape) > 4:
                continue
            if shape != self.symbolic.shape(node.output[0]):
                continue
            is_number = all(d.constant == 1 for d in factor_shape)  # works for scores of any rank
            if not is_number and (len(shape) != 4 or factor_shape[-1].constant != 1):
                continue
            if scores.spread_factor is not None:
                raise UnsupportedError(f"{describe(node)} scales scores by head or row a second time")
            scaled = replace(scores.with_node(node, "scale by head"), spread_factor=(node.op_type, node.input[1 - i]))
            found = self.walk(node.input[i], scaled, depth + 1)
            before = (len(scores.terms), scores.softcap, scores.floored)
            if (len(found.terms), found.softcap, found.floored) != before:
                raise UnsupportedError(
                    f"scores are masked or bounded before {describe(node)} scales them by head or row"
                )
            return found
        return None

    def _heads(self, node: onnx.NodeProto) -> int:
        """H of a node that writes [B, H, S, T], 0 where it is not known."""
        shape = self.symbolic.shape(node.output[0])
        return (shape[1].constant or 0) if shape is not None and len(shape) == 4 else 0

    def _is_zero_one_mask(self, tensor: str) -> bool:
        """Whether a tensor is a float mask of ones and zeros that differs between keys."""
        array, value = self.symbolic.constant(tensor), self.symbolic.value(tensor)
        shape = self.symbolic.shape(tensor)
        if not shape or shape[-1].constant == 1:
            return False
        if array is not None:
            return bool(np.isin(array, (0, 1)).all())
        if value is None or value.kind != "f":
            return False
        element = value.at(tuple(var(f"any{a}") for a in range(value.rank)))
        if isinstance(element, Real) and element.kind == "table":
            array = self.symbolic.constant(str(element.args[0]))
            return array is not None and bool(np.isin(array, (0, 1)).all())
        return isinstance(element, Real) and all(x in (0.0, 1.0) for _, x in split_cases(element))

    def _term(
        self, kind: TermKind, node: onnx.NodeProto, tensor: str, fill: float | None, scale: float = 1.0
    ) -> MaskTerm:
        """The term for a mask that broadcasts to the output of ``node``."""
        shape, own = self.symbolic.shape(node.output[0]), self.symbolic.shape(tensor)
        if shape is None or own is None:
            raise UnsupportedError(f"the shape of mask {tensor!r} of {describe(node)} is unknown")
        if len(shape) == 4 or (len(own) < 5 and all(d.constant == 1 for d in own[:-2])):
            return MaskTerm(kind, tensor, fill, scale)
        source, moves = tensor, list[onnx.NodeProto]()
        while len(shape) == 3 and len(moves) < 4:  # scores [B*H, S, T], a mask made of [B, H, S, T]
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


Rule = Callable[[ScoreWalk, onnx.NodeProto, Scores, int], Scores | None]
# The first rule that matches a standard node continues the walk before it; a rule that does not match returns None.
ON_SCORES: tuple[Rule, ...] = (
    ScoreWalk.add_mask,
    ScoreWalk.where_mask,
    ScoreWalk.skip_neutral,
    ScoreWalk.floor,
    ScoreWalk.subtract_mask,
    ScoreWalk.cap,
    ScoreWalk.scale,
    ScoreWalk.zero_by_mask,
    ScoreWalk.scale_by_head_or_row,
)


def _find_fill(symbolic: Symbolic, mask: str, added: str, sign: float) -> float | None:
    """The number that is added (times ``sign``) where ``mask`` is 0.

    None unless ``mask`` is 0 or 1 and 0 is added wherever it is 1. ``log(mask)`` adds -inf.
    """
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
    masked, filled = ({c for c, _ in cases} for cases in (one, other))
    for c1, m in one:
        for c2, x in other:
            # The cases of a tensor exclude each other, so two conditions that are cases of one tensor never meet.
            if all_of([c1, c2]) == FALSE or (c1 != c2 and (c2 in masked or c1 in filled)):
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
    """Whether a movement leaves the last two axes as they are."""
    before, after = symbolic.shape(node.input[0]), symbolic.shape(node.output[0])
    if before is None or after is None or len(before) < 2 or len(after) < 2 or node.op_type in ("Transpose", "Expand"):
        return node.op_type == "Identity" or node.op_type in CASTS
    return before[-2:] == after[-2:]


def subtracts_row_max(index: GraphIndex, symbolic: Symbolic, node: onnx.NodeProto) -> bool:
    """Whether a node is x - ReduceMax(x) along the last axis."""
    if node.op_type != "Sub":
        return False
    maximum = index.producer(node.input[1])
    while maximum is not None and maximum.op_type == "Identity":  # as a stopped gradient is exported
        maximum = index.producer(maximum.input[0])
    if maximum is None or maximum.op_type != "ReduceMax" or maximum.input[0] != node.input[0]:
        return False
    shape, own = symbolic.shape(node.input[0]), symbolic.shape(node.input[1])
    return shape is not None and own is not None and own[:-1] == shape[:-1] and own[-1].constant == 1
