# SPDX-License-Identifier: Apache-2.0
"""From a softmax forwards to the MatMul with the values, and on to the tensor that the op can write.

``ON_WEIGHTS`` lists the spellings that are understood on the way to the MatMul: guards, masks of weights, dropped sinks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import onnx

from stof.attention.edit.shape_sources import ShapeSources
from stof.attention.einsum import Order, einsum_matmuls
from stof.attention.layouts import check_axes, output_layout
from stof.attention.masked_weights import zeroes_masked_weights
from stof.attention.move_paths import (
    MovePath,
    is_float_cast,
    is_identity,
    is_move,
    keeps_last_two_axes,
    swapped_order,
    trace_axes,
)
from stof.attention.nan_to_num import find_identity_region
from stof.attention.quantized.parameters import describe_rounding, is_quantize, match_rounding, match_rounding_by_range
from stof.attention.quantized.score_roundings import RoundingError
from stof.errors import UnsupportedError
from stof.graph.index import GraphIndex, describe, is_standard
from stof.mask.roundings import Quantizer
from stof.mask.site import AddedValues, Layout, MaskTerm, TermKind
from stof.symbolic import Symbolic, integer
from stof.symbolic.tensor import Shape

_MAX_DEPTH = 32
_MOST_TENSORS = 256  # between weights and what is added to the result


@dataclass(frozen=True)
class WeightPath:
    """What the walk has found from the softmax to a tensor behind it; at the end, the MatMul with the values."""

    tensor: str  # the weights so far; at the end the MatMul's result
    nodes: tuple[str, ...]  # first outputs of the nodes
    nan_guard: bool = False  # NaN is replaced by 0
    row_guard: str | None = None  # condition that makes whole rows 0
    pair_guard: MaskTerm | None = None  # keeps weights, makes others 0
    zeroed: bool = False  # masked weights are made 0 once more
    sink_shape: Shape | None = None  # shape of the weights without the sink's column, until that is dropped
    value: str = ""
    value_order: Order = ()  # order of axes in which the value is [.., T, Dv]; () where it is so itself
    result_order: Order = ()  # the same for the result, [.., S, Dv]
    added: AddedValues | None = None  # what the weights give besides, by rows of another tensor
    rounding: tuple[str, Quantizer] | None = None  # of the weights: the tensor that is rounded, and by what

    def to(self, node: onnx.NodeProto) -> WeightPath:
        """The same one node further."""
        return replace(self, tensor=node.output[0], nodes=(*self.nodes, node.output[0]))


@dataclass(frozen=True)
class ScoreFacts:
    """What is known of the scores when the weights are followed."""

    kept: Sequence[str] = ()  # tensors that the rewrite keeps: sizes can be taken from them
    bias: str = ""  # what is added to the scores, where nothing else masks them
    sink_first: bool = False  # the sink's column is the first, not the last
    terms: Sequence[MaskTerm] = ()


@dataclass(frozen=True)
class OutputCandidate:
    """A tensor that the op can write in place of the result of the MatMul."""

    tensor: str
    layout: Layout
    dtype: int
    row_guard: str | None
    nodes: tuple[str, ...]
    perm: tuple[int, ...] = ()  # the tensor is the layout, transposed by this
    flat: bool = False  # and its first two axes merged


class WeightWalk:
    """Walks forwards from a softmax."""

    def __init__(self, index: GraphIndex, symbolic: Symbolic, sources: ShapeSources) -> None:
        self.index = index
        self.symbolic = symbolic
        self.sources = sources

    def _users(self, tensor: str, kept: Sequence[str]) -> list[onnx.NodeProto]:
        """The nodes that need a tensor's elements, or a size of it that no kept tensor has."""
        users = self.index.consumers(tensor)
        return [n for n in users if n.op_type != "Shape" or self.sources.find(n.output[0], kept) is None]

    def walk(self, softmax: onnx.NodeProto, scores: ScoreFacts, sink_shape: Shape | None = None) -> WeightPath:
        """The path from a softmax to the MatMul with the values.

        Args:
            softmax: where the walk begins.
            scores: what is known of the scores.
            sink_shape: shape of the weights without the column of a sink, where the softmax has one.

        Raises:
            UnsupportedError: naming the node that is in the way.
        """
        path = WeightPath(softmax.output[0], (softmax.output[0],), sink_shape=sink_shape)
        for _ in range(_MAX_DEPTH):
            if path.tensor in self.index.outputs or path.tensor in self.index.captured:
                raise UnsupportedError(
                    f"the attention weights {path.tensor!r} are a graph output or read by a subgraph"
                )
            path = self._step(path, self._users(path.tensor, scores.kept), scores)
            if path.value:
                return path
        raise UnsupportedError("no MatMul with the values was found after the softmax")

    def _step(self, path: WeightPath, users: list[onnx.NodeProto], scores: ScoreFacts) -> WeightPath:
        for rule in ON_WEIGHTS:
            next_path = rule(self, path, users, scores)
            if next_path is not None:
                return next_path
        if len(users) != 1:
            words = ", ".join(describe(n) for n in users) or "nothing"
            raise UnsupportedError(
                f"the attention weights {path.tensor!r} go to {words}, expected one MatMul with the values"
            )
        raise UnsupportedError(f"the attention weights go to {describe(users[0])}, expected MatMul with the values")

    def round(self, path: WeightPath, users: list[onnx.NodeProto], scores: ScoreFacts) -> WeightPath | None:
        """QuantizeLinear and DequantizeLinear with one scale."""
        if len(users) != 1 or path.sink_shape is not None:
            return None
        if (by_range := match_rounding_by_range(self.index, users[0])) is not None and path.rounding is None:
            dequantize, quantizer = by_range
            return replace(path.to(users[0]).to(dequantize), rounding=(path.tensor, quantizer))
        if not is_quantize(users[0]):
            return None
        readers = self.index.consumers(users[0].output[0])
        found = match_rounding(self.index, readers[0]) if len(readers) == 1 else None
        if found is None or users[0].output[0] in self.index.outputs or users[0].output[0] in self.index.captured:
            return None
        if path.rounding is not None and path.rounding[1] != found[1]:
            raise RoundingError(
                f"{describe_rounding(users[0])} rounds attention weights that are rounded before, by another scale"
            )
        if path.pair_guard is not None or path.row_guard is not None or path.zeroed:
            raise RoundingError(f"{describe_rounding(users[0])} rounds attention weights that are masked before")
        return replace(path.to(users[0]).to(readers[0]), rounding=(path.tensor, found[1]))

    def nan_guard(self, path: WeightPath, users: list[onnx.NodeProto], scores: ScoreFacts) -> WeightPath | None:
        """Where(IsNaN(weights), 0, weights)."""
        if len(users) != 2 or {n.op_type for n in users} != {"IsNaN", "Where"}:
            return None
        test = next(n for n in users if n.op_type == "IsNaN")
        where = next(n for n in users if n.op_type == "Where")
        is_guard = where.input[0] == test.output[0] and where.input[2] == path.tensor
        alone = self.index.consumers(test.output[0]) == [where] and test.output[0] not in self.index.outputs
        if not is_guard or not alone or self.symbolic.uniform(where.input[1]) != 0.0:
            raise UnsupportedError(f"{describe(where)} after the softmax is no NaN guard")
        nodes = (*path.nodes, *(n.output[0] for n in users))
        return replace(path, tensor=where.output[0], nodes=nodes, nan_guard=True)

    def identity_region(self, path: WeightPath, users: list[onnx.NodeProto], scores: ScoreFacts) -> WeightPath | None:
        """Elementwise nodes that keep all weights, as ``nan_to_num`` does."""
        region = find_identity_region(self.index, self.symbolic, path.tensor)
        if region is None:
            return None
        nodes = (*path.nodes, *region.nodes)
        return replace(path, tensor=region.tensor, nodes=nodes, nan_guard=path.nan_guard or region.clears_nan)

    def row_guard(self, path: WeightPath, users: list[onnx.NodeProto], scores: ScoreFacts) -> WeightPath | None:
        """A Where that makes whole rows of the weights [B, H, S, T] zero; its zero may be cast like them."""
        where = next((n for n in users if n.op_type == "Where" and n.input[2] == path.tensor), None)
        if path.row_guard is not None or where is None:
            return None
        likes = [n for n in users if n is not where]
        if any(n.op_type != "CastLike" or n.input[0] == path.tensor for n in likes):
            return None
        if any(self.index.consumers(n.output[0]) != [where] for n in likes):
            return None
        condition = self._match_row_guard(where, path.tensor, Layout.BHSD)
        if condition is None:
            return None
        if self._is_empty_row_test(condition, scores.bias):
            return replace(path.to(where), nan_guard=True)
        return replace(path.to(where), row_guard=condition)

    def zero_masked(self, path: WeightPath, users: list[onnx.NodeProto], scores: ScoreFacts) -> WeightPath | None:
        """A Where that makes weights zero again where the scores are masked."""
        if len(users) != 1 or path.sink_shape is not None:
            return None
        if not zeroes_masked_weights(self.index, self.symbolic, users[0], path.tensor, scores.terms):
            return None
        return replace(path.to(users[0]), zeroed=True)

    def pair_guard(self, path: WeightPath, users: list[onnx.NodeProto], scores: ScoreFacts) -> WeightPath | None:
        """A Where or Mul by a mask that makes single weights zero."""
        # With the sink's column first, the mask would be shifted by a column against the keys.
        if path.pair_guard is not None or (scores.sink_first and path.sink_shape is not None):
            return None
        guard = self._match_pair_guard(path.tensor, users)
        return None if guard is None else replace(path.to(users[0]), pair_guard=guard)

    def drop_sink(self, path: WeightPath, users: list[onnx.NodeProto], scores: ScoreFacts) -> WeightPath | None:
        """The Slice that drops the column of a sink."""
        if len(users) != 1 or path.sink_shape is None:
            return None
        if not self._drops_sink(users[0], path.tensor, path.sink_shape, scores.sink_first):
            return None
        return replace(path.to(users[0]), sink_shape=None)

    def matmul(self, path: WeightPath, users: list[onnx.NodeProto], scores: ScoreFacts) -> WeightPath | None:
        """The MatMul with the values, which ends the walk."""
        if len(users) != 1:
            return None
        transposed = self._match_transposed(users[0], path.tensor) if path.sink_shape is None else None
        if transposed is not None:
            matmul, value, order = transposed
            return replace(path.to(users[0]).to(matmul), value=value, value_order=order, result_order=order)
        match = self._match_matmul(users[0], path.tensor)
        if match is None:
            return None
        if path.sink_shape is not None:
            raise UnsupportedError(f"the weight of the sink is not dropped before {describe(users[0])}")
        value, (value_order, result_order) = match
        return replace(path.to(users[0]), value=value, value_order=value_order, result_order=result_order)

    def relative_values(self, path: WeightPath, users: list[onnx.NodeProto], scores: ScoreFacts) -> WeightPath | None:
        """The MatMul with the values where more is added to its result that is made of the weights."""
        if len(users) < 2 or path.sink_shape is not None:
            return None
        for product in users:
            match = self._match_matmul(product, path.tensor)
            if match is None or match[1][1] or product.output[0] in self.index.outputs:
                continue
            adds = self.index.consumers(product.output[0])
            if len(adds) != 1 or adds[0].op_type != "Add" or not is_standard(adds[0]):
                continue
            other = next((n for n in adds[0].input if n != product.output[0]), "")
            others = [n for n in users if n is not product]
            if self.symbolic.shape(other) == self.symbolic.shape(product.output[0]) and self._lead_to(others, other):
                value, (order, _) = match
                added = AddedValues(other, path.tensor)
                return replace(path.to(product).to(adds[0]), value=value, value_order=order, added=added)
        return None

    def _lead_to(self, nodes: Sequence[onnx.NodeProto], tensor: str) -> bool:
        """Whether all that nodes give is read for a tensor alone, which one node reads."""
        pending, seen = [o for n in nodes for o in n.output if o], set[str]()
        while pending:
            name = pending.pop()
            if name in seen:
                continue
            seen.add(name)
            if name in self.index.outputs or name in self.index.captured or len(seen) > _MOST_TENSORS:
                return False
            if name != tensor:
                pending += [o for n in self.index.consumers(name) for o in n.output if o]
        return tensor in seen and len(self.index.consumers(tensor)) == 1

    def skip_neutral(self, path: WeightPath, users: list[onnx.NodeProto], scores: ScoreFacts) -> WeightPath | None:
        """Identity, float casts, and moves of the leading axes."""
        if len(users) != 1 or not self._is_neutral(users[0]):
            return None
        if any(o and (o in self.index.outputs or self.index.consumers(o)) for o in users[0].output[1:]):
            raise UnsupportedError(f"{describe(users[0])} gives more than the attention weights")
        return path.to(users[0])

    def _match_transposed(self, node: onnx.NodeProto, tensor: str) -> tuple[onnx.NodeProto, str, Order] | None:
        """The MatMul of values [.., Dv, T] by weights transposed to [.., T, S]; the values; the order of axes of both."""
        if node.op_type != "Transpose" or node.input[0] != tensor or node.output[0] in self.index.outputs:
            return None
        shape = self.symbolic.shape(tensor)
        users = self.index.consumers(node.output[0])
        if shape is None or len(users) != 1 or node.output[0] in self.index.captured:
            return None
        rank, user = len(shape), users[0]
        order = (*range(rank - 2), rank - 1, rank - 2)
        perm = next((tuple(a.ints) for a in node.attribute if a.name == "perm"), tuple(reversed(range(rank))))
        if perm != order or user.op_type != "MatMul" or user.input[1] != node.output[0]:
            return None
        result = self.symbolic.shape(user.output[0])
        return None if result is None or len(result) != rank else (user, str(user.input[0]), order)

    def _match_pair_guard(self, tensor: str, users: Sequence[onnx.NodeProto]) -> MaskTerm | None:
        """The mask by which the only user of the weights makes some of them 0."""
        if len(users) != 1 or not is_standard(users[0]):
            return None
        node = users[0]
        if self.symbolic.shape(node.output[0]) != self.symbolic.shape(tensor):
            return None
        guard: MaskTerm | None = None
        if node.op_type == "Where":
            for kind, kept, filled in ((TermKind.KEEP, 1, 2), (TermKind.DROP, 2, 1)):
                if node.input[kept] == tensor and self.symbolic.uniform(node.input[filled]) == 0.0:
                    guard = MaskTerm(kind, node.input[0], 0.0)
        elif node.op_type == "Mul":
            other = node.input[1 if node.input[0] == tensor else 0]
            if self.symbolic.value(other) is not None and other != tensor and self.symbolic.uniform(other) is None:
                guard = MaskTerm(TermKind.KEEP, other)  # no fill: 0 * NaN stays NaN
        shape = None if guard is None else self.symbolic.shape(guard.tensor)
        # A mask of weights [B*H, S, T] that differs between rows would have to be split by heads.
        fits = shape is not None and (len(shape) == 4 or all(d.constant == 1 for d in shape[:-2]))
        return guard if fits else None

    def _drops_sink(self, node: onnx.NodeProto, tensor: str, shape: Shape, first: bool) -> bool:
        """Whether a node is a Slice of all but the last (or ``first``) column of the weights."""
        if node.op_type != "Slice" or node.input[0] != tensor or self.symbolic.shape(node.output[0]) != shape:
            return False
        kept = self.symbolic.value(node.input[1])
        steps = self.symbolic.value(node.input[4]) if len(node.input) > 4 and node.input[4] else None
        starts = kept.elements() if kept is not None else None
        ones = steps.elements() if steps is not None else [integer(1)]
        if first:  # by the output's shape it is the last axis that is sliced
            return starts == [integer(1)] and ones == [integer(1)]
        # The output has one column less and starts at 0 in each axis.
        return starts == [integer(0)] * len(starts or [0]) and ones == [integer(1)] * len(ones or [0])

    def _is_neutral(self, node: onnx.NodeProto) -> bool:
        if not is_standard(node):
            return False
        if is_identity(self.symbolic, node) or is_float_cast(self.symbolic, node):
            return True
        return is_move(self.symbolic, node) and keeps_last_two_axes(self.symbolic, node)

    def _match_matmul(self, node: onnx.NodeProto, tensor: str) -> tuple[str, tuple[Order, Order]] | None:
        """The values by which a node multiplies the weights, and the orders of axes of values and result."""
        if self._is_matmul(node, tensor):
            check_axes(self.symbolic, node, "value")
            is_transposed = any(a.name == "transB" and a.i for a in node.attribute)
            order = swapped_order(self.symbolic, node.input[1]) if is_transposed else ()
            return str(node.input[1]), (order, ())
        for matmul in einsum_matmuls(self.symbolic, node):
            # The sum runs over T, the last axis of both operands.
            if matmul.left == tensor != matmul.right and matmul.left_order == tuple(range(len(matmul.left_order))):
                *batch, columns, summed = matmul.right_order
                return matmul.right, ((*batch, summed, columns), matmul.result_order)
        return None

    def _is_matmul(self, node: onnx.NodeProto, tensor: str) -> bool:
        if node.input[0] != tensor:
            return False
        if node.op_type == "MatMul" and is_standard(node):
            return True
        if node.op_type != "FusedMatMul" or node.domain != "com.microsoft":
            return False
        numbers = {a.name: a.f if a.name == "alpha" else a.i for a in node.attribute}
        numbers.pop("transB", 0)
        return numbers.pop("alpha", 1.0) == 1.0 and not any(numbers.values())

    def _is_empty_row_test(self, condition: str, bias: str) -> bool:
        """Whether a condition is ReduceMax(bias) == -inf along the last axis: a row without an allowed key."""
        equal = self.index.producer(condition)
        if not bias or equal is None or equal.op_type != "Equal":
            return False
        for i in (0, 1):
            most = self.index.producer(equal.input[i])
            if most is not None and most.op_type == "ReduceMax" and most.input[0] == bias:
                shape, max_shape = self.symbolic.shape(bias), self.symbolic.shape(most.output[0])
                last = shape is not None and max_shape == (*shape[:-1], integer(1))
                return last and self.symbolic.uniform(equal.input[1 - i]) == -math.inf
        return False

    def output_candidates(
        self, path: WeightPath, heads: int, kept: Sequence[str], has_split_heads: bool = False
    ) -> list[OutputCandidate]:
        """The tensors that the op can write, best first: the farther from the MatMul the better, flattened ones last.

        Args:
            path: from the softmax to the MatMul.
            heads: H.
            kept: tensors that the rewrite keeps.
            has_split_heads: a result of five axes has its heads in two of them, otherwise its batch.
        """
        shape = self.symbolic.shape(path.tensor)
        if shape is None:
            return []
        candidates: list[OutputCandidate] = []
        moves: tuple[onnx.NodeProto, ...] = ()
        nodes = path.nodes
        fused_node = self.index.fused_nodes.get(path.tensor)
        guard = path.row_guard
        current = path.tensor
        for _ in range(_MAX_DEPTH):
            axes = trace_axes(self.symbolic, MovePath(path.tensor, moves))
            view = None if axes is None else output_layout(shape, axes, heads, path.result_order, has_split_heads)
            layout, perm, flat = view if view is not None else (None, (), False)
            if layout is not None:
                output = OutputCandidate(current, layout, self.symbolic.dtype(current), guard, nodes, perm, flat)
                candidates.insert(0 if flat else len(candidates), output)
            users = self._users(current, kept)
            if len(users) != 1 or current in self.index.outputs or current in self.index.captured:
                break
            user = users[0]
            if self.index.fused_nodes.get(user.output[0], fused_node) != fused_node:
                break  # part of another fused node, which may not be replaced
            if user.op_type == "Where" and guard is None and layout is not None:
                guard = self._match_row_guard(user, current, layout)
                if guard is None:
                    break
            elif is_move(self.symbolic, user) and user.input[0] == current:
                moves = (*moves, user)
            elif not is_float_cast(self.symbolic, user):
                break
            current = user.output[0]
            nodes = (*nodes, current)
        return candidates[::-1]

    def _match_row_guard(self, where: onnx.NodeProto, tensor: str, layout: Layout) -> str | None:
        """The condition of a Where that makes whole rows [b, h, s, :] of a BHSD result zero."""
        if layout is not Layout.BHSD or where.input[2] != tensor or self.symbolic.uniform(where.input[1]) != 0.0:
            return None
        shape, output_shape = self.symbolic.shape(where.input[0]), self.symbolic.shape(where.output[0])
        before = self.symbolic.shape(tensor)
        if shape is None or not shape or shape[-1].constant != 1 or output_shape != before:
            return None
        return str(where.input[0])


Rule = Callable[[WeightWalk, WeightPath, list[onnx.NodeProto], ScoreFacts], WeightPath | None]
# The first rule that matches the users of the weights continues the walk; a rule that does not match returns None.
ON_WEIGHTS: tuple[Rule, ...] = (
    WeightWalk.round,
    WeightWalk.nan_guard,
    WeightWalk.identity_region,
    WeightWalk.row_guard,
    WeightWalk.zero_masked,
    WeightWalk.pair_guard,
    WeightWalk.drop_sink,
    WeightWalk.matmul,
    WeightWalk.relative_values,
    WeightWalk.skip_neutral,
)
