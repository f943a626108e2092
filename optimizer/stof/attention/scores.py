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
from stof.attention.move_paths import (
    MovePath,
    is_float_cast,
    is_identity,
    is_move,
    keeps_last_two_axes,
    scalar_factor,
    subtracts_row_max,
    swapped_order,
    trace_axes,
    trace_views,
)
from stof.attention.quantized.parameters import describe_rounding, match_rounding
from stof.attention.quantized.score_roundings import RoundingError, ScoreRounding
from stof.errors import UnsupportedError
from stof.graph.index import GraphIndex, describe, is_standard
from stof.mask.score_view import ScoreView
from stof.mask.site import FORBIDDING_VALUE, MaskTerm, TermKind
from stof.symbolic import Real, Symbolic, var
from stof.symbolic.algebra.conditions import all_of
from stof.symbolic.algebra.piecewise import split_cases
from stof.symbolic.algebra.terms import FALSE, to_real
from stof.symbolic.axis_atoms import ends_with_whole_axes, size_of
from stof.symbolic.rules.broadcasting import broadcast, project
from stof.symbolic.rules.cast import overflow_to_inf

_MAX_DEPTH = 32
_LOWEST = -1e30  # fp32 and wider types count a lower bound of at most this as their lowest number


@dataclass(frozen=True)
class Scores:
    """What the walk has found between the softmax and a tensor before it. Terms, words and nodes run backwards.

    At the end of the walk it also holds the operands of the MatMul, and ``view`` of terms is by axes of its result.
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
    has_merged_heads: bool = False  # a mask is [B*H, .., ..]
    terms: tuple[MaskTerm, ...] = ()
    met: tuple[
        int | None, ...
    ] = ()  # how many of ``moves`` follow each term; None: it broadcasts to [B, H, S, T] itself
    moves: tuple[onnx.NodeProto, ...] = ()  # that regroup or permute axes
    roundings: tuple[ScoreRounding, ...] = ()
    words: tuple[str, ...] = ()  # of the report, one for each spelling that was met
    nodes: tuple[str, ...] = ()  # first outputs of the nodes

    def with_node(self, node: onnx.NodeProto, word: str = "") -> Scores:
        """The same with one more node."""
        words = (*self.words, word) if word else self.words
        return replace(self, words=words, nodes=(*self.nodes, node.output[0]))

    def with_term(self, term: MaskTerm, *, is_laid_out: bool = False) -> Scores:
        """The same with one more mask or bias; ``is_laid_out``: it broadcasts to [B, H, S, T], whatever the scores are."""
        met = None if is_laid_out else len(self.moves)
        return replace(self, terms=(*self.terms, term), met=(*self.met, met))


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
            operands = self._with_views(operands)
            self.check_operands(operands)
            return operands
        for rule in ON_SCORES if is_standard(node) else ():
            matched_scores = rule(self, node, scores, depth)
            if matched_scores is not None:
                return matched_scores
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
        if any(attributes[n].i for n in ("transBatchA", "transBatchB") if n in attributes):
            raise UnsupportedError(f"{describe(node)} transposes its batch")
        alpha = attributes["alpha"].f if "alpha" in attributes else 1.0
        check_axes(self.symbolic, node, "key")
        transposes_query, transposes_key = (n in attributes and bool(attributes[n].i) for n in ("transA", "transB"))
        return replace(
            scores.with_node(node),
            query=node.input[0],
            key=node.input[1],
            key_transposed=not transposes_key,
            query_order=swapped_order(self.symbolic, node.input[0]) if transposes_query else (),
            factor=scores.factor * alpha,
        )

    def _with_views(self, scores: Scores) -> Scores:
        """The scores behind a MatMul, with the axes in which each term meets them.

        Raises:
            UnsupportedError: where queries and keys are not the last two axes of the softmax again.
        """
        result = scores.nodes[-1]
        views = trace_views(self.symbolic, result, scores.moves[::-1])
        rank = len(self.symbolic.shape(result) or ())
        if scores.moves and (len(views) <= len(scores.moves) or not ends_with_whole_axes(views[-1], rank)):
            odd = [n for n in scores.moves if not keeps_last_two_axes(self.symbolic, n)] or [*scores.moves]
            raise UnsupportedError(
                f"no MatMul of a query and a key was found before the softmax; the walk met {describe(odd[0])}"
            )
        terms: list[MaskTerm] = []
        heads, has_merged_heads = 0, False
        for term, met in zip(scores.terms, scores.met, strict=True):
            shape = self.symbolic.shape(term.tensor)
            if met is not None and shape is not None and views:
                view = ScoreView(views[len(scores.moves) - met]).of_tensor(shape)
                has_merged_heads |= rank == 3 and view.varies_along(0) and not view.splits(0)
                heads = _heads_of(view, rank) or heads
                if not _is_plain(view, rank) and not _broadcasts_anyway(view, rank, len(shape)):
                    _check_sizes_known(term, view)
                    term = replace(term, view=view)
            terms.append(term)
        return replace(scores, terms=tuple(terms), heads=heads, has_merged_heads=has_merged_heads)

    def skip_neutral(self, node: onnx.NodeProto, scores: Scores, depth: int) -> Scores | None:
        """Identity, casts, moves of axes, and x - max(x), which does not change a softmax.

        Between the softmax and a mask, axes may be split and merged; at the MatMul, they have to be queries and keys again.
        """
        passed = scores.with_node(node)
        if is_identity(self.symbolic, node) or is_float_cast(self.symbolic, node):
            return self.walk(node.input[0], passed, depth + 1)
        if is_move(self.symbolic, node):
            return self.walk(node.input[0], replace(passed, moves=(*scores.moves, node)), depth + 1)
        if subtracts_row_max(self.index, self.symbolic, node):
            if scores.roundings:
                raise RoundingError(
                    f"scores are rounded behind {describe(node)}, which moves each row by a number of its own"
                )
            return self.walk(node.input[0], passed, depth + 1)
        return None

    def round(self, node: onnx.NodeProto, scores: Scores, depth: int) -> Scores | None:
        """QuantizeLinear and DequantizeLinear with one scale."""
        if (found := match_rounding(self.index, node)) is None:
            return None
        quantize, quantizer = found
        if scores.softcap or scores.floored or scores.spread_factor is not None:
            what = describe_rounding(quantize)
            raise RoundingError(f"{what} rounds scores that are bounded later, or scaled by head or row")
        rounding = ScoreRounding(quantizer, quantize.input[0], scores.factor, len(scores.terms))
        rounded = scores.with_node(node, "rounded scores").with_node(quantize)
        return self.walk(quantize.input[0], replace(rounded, roundings=(*scores.roundings, rounding)), depth + 1)

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
        inner_factor = None if inner is None else scalar_factor(self.symbolic, inner)
        source, scale = (tanh.input[0], 1.0) if inner_factor is None else inner_factor
        capped = replace(
            scores.with_node(node, "softcap").with_node(tanh), softcap=abs(factor[1]), factor=scale * factor[1]
        )
        if inner is not None and inner_factor is not None:
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
                by_product = self._mask_by_product(node, node.input[i], node.input[1 - i], 1.0, scores, depth)
                if by_product is not None:
                    return by_product
                masked = scores.with_node(node, "additive mask")
                masked = self._add_term(masked, TermKind.ADD, node, node.input[1 - i], None, scores.factor)
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
        by_product = self._mask_by_product(node, node.input[0], node.input[1], -1.0, scores, depth)
        if by_product is not None:
            return by_product
        masked = scores.with_node(node, "subtracted mask")
        masked = self._add_term(masked, TermKind.ADD, node, node.input[1], None, -scores.factor)
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
            masked = scores.with_node(node, "mask by a product").with_node(mul)
            masked = self._add_term(masked, TermKind.KEEP, node, mask, self._scale_fill(fill, scores.factor, node))
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
            masked = self._add_term(scores.with_node(node, "Where mask"), kind, node, node.input[0], fill)
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
                masked = scores.with_node(node, "multiplied mask")
                masked = self._add_term(masked, TermKind.KEEP, node, node.input[1 - i], 0.0)
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
            inner_scores = self.walk(node.input[i], scaled, depth + 1)
            before = (len(scores.terms), scores.softcap, scores.floored)
            if (len(inner_scores.terms), inner_scores.softcap, inner_scores.floored) != before:
                raise UnsupportedError(
                    f"scores are masked or bounded before {describe(node)} scales them by head or row"
                )
            return inner_scores
        return None

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

    def _add_term(
        self,
        scores: Scores,
        kind: TermKind,
        node: onnx.NodeProto,
        tensor: str,
        fill: float | None,
        scale: float = 1.0,
    ) -> Scores:
        """The scores with the term for a mask that broadcasts to the output of ``node``."""
        shape, mask_shape = self.symbolic.shape(node.output[0]), self.symbolic.shape(tensor)
        if shape is None or mask_shape is None:
            raise UnsupportedError(f"the shape of mask {tensor!r} of {describe(node)} is unknown")
        if len(mask_shape) > len(shape):
            raise UnsupportedError(
                f"mask {tensor!r} of {describe(node)} has {len(mask_shape)} axes, the scores have {len(shape)}"
            )
        source, moves = tensor, list[onnx.NodeProto]()
        while len(shape) == len(mask_shape) == 3 and len(moves) < 4:  # scores [B*H, S, T], a mask made of [B, H, S, T]
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
                return scores.with_term(MaskTerm(kind, source, fill, scale), is_laid_out=True)
        return scores.with_term(MaskTerm(kind, tensor, fill, scale))


def _heads_of(view: ScoreView, rank: int) -> int:
    """H, where a mask meets the scores as [B, H, S, T]; 0 where it is not known."""
    if len(view.axes) != 4:
        return 0
    if rank == 4:
        return size_of(view.axes[1]).constant or 0 if _is_plain(view, rank) else 0
    is_split = rank == 3 and [a.axis for a in view.axes[1]] == [0] and not any(map(view.splits, (1, 2)))
    return size_of(view.axes[1]).constant or 0 if is_split else 0


def _is_plain(view: ScoreView, rank: int) -> bool:
    """Whether a view's axes are those of the MatMul's result."""
    return len(view.axes) == rank == 4 and all(
        [(a.axis, a.part) for a in group] in ([], [(i, 0)]) for i, group in enumerate(view.axes)
    )


def _broadcasts_anyway(view: ScoreView, rank: int, axes: int) -> bool:
    """Whether a tensor of so many axes differs between queries and keys alone, which are its last two."""
    return axes < 5 and not any(view.varies[:-2]) and ends_with_whole_axes(view.axes, rank)


def _check_sizes_known(term: MaskTerm, view: ScoreView) -> None:
    sources = view.sources()
    if any(a not in sources for a in view.needed_parts()):
        raise UnsupportedError(
            f"mask {term.tensor!r} meets the scores in parts of their axes whose sizes are not known: expected all parts "
            "but one to be numbers, or sizes of the mask"
        )


Rule = Callable[[ScoreWalk, onnx.NodeProto, Scores, int], Scores | None]
# The first rule that matches a standard node continues the walk before it; a rule that does not match returns None.
ON_SCORES: tuple[Rule, ...] = (
    ScoreWalk.add_mask,
    ScoreWalk.where_mask,
    ScoreWalk.skip_neutral,
    ScoreWalk.round,
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
    values = np.unique(fills[keep == 0])
    return float(values[0]) * sign if values.size == 1 else None
