# SPDX-License-Identifier: Apache-2.0
"""From the softmax forwards: guards, the MatMul with the values, and how far its result can be followed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import onnx

from stof.attention.einsum import Order, einsum_matmuls
from stof.attention.layouts import (
    MovePath,
    check_axes,
    is_float_cast,
    is_identity,
    is_move,
    output_layout,
    trace_axes,
)
from stof.attention.masked_weights import zeroes_masked_weights
from stof.attention.nan_to_num import find_identity_region
from stof.attention.scores import keeps_last_two_axes
from stof.attention.shape_sources import ShapeSources
from stof.errors import UnsupportedError
from stof.graph.index import GraphIndex, describe, is_standard
from stof.site import Layout, MaskTerm, TermKind
from stof.symbolic import Symbolic, integer
from stof.symbolic.tensor import Shape

_DEEPEST = 32


@dataclass(frozen=True)
class WeightPath:
    """The way from the softmax to the product with the values."""

    value: str
    product: str
    nan_guard: bool
    nodes: tuple[str, ...]
    row_guard: str | None = None
    pair_guard: MaskTerm | None = None  # keeps weights, makes others 0
    value_order: Order = ()  # of axes in which the value is [.., T, Dv], and the product [.., S, Dv], where it is not its own
    product_order: Order = ()
    zeroed: bool = False  # what is masked is made zero once more


@dataclass(frozen=True)
class OutputCandidate:
    """A tensor that the op can write in place of the product."""

    tensor: str
    layout: Layout
    dtype: int
    row_guard: str | None
    nodes: tuple[str, ...]
    perm: tuple[int, ...] = ()
    flat: bool = False


class WeightWalk:
    """Walks forwards from one softmax."""

    def __init__(self, index: GraphIndex, symbolic: Symbolic, teller: ShapeSources) -> None:
        self.index = index
        self.symbolic = symbolic
        self.teller = teller

    def _users(self, tensor: str, staying: Sequence[str]) -> list[onnx.NodeProto]:
        """The nodes that need a tensor's elements, or a size that nothing that stays tells."""
        users = self.index.consumers(tensor)
        return [n for n in users if n.op_type != "Shape" or self.teller.elements(n.output[0], staying) is None]

    def weights(
        self,
        softmax: onnx.NodeProto,
        staying: Sequence[str],
        bias: str = "",
        shape: Shape | None = None,
        first: bool = False,
        terms: Sequence[MaskTerm] = (),
    ) -> WeightPath:
        """Up to the MatMul with the values.

        Args:
            softmax: where the walk begins.
            staying: tensors that stay, which tell sizes.
            bias: what is added to the scores, where nothing else masks them.
            shape: that of the weights that are kept, where the softmax has a column more for a sink.
            first: whether that column is the first.
            terms: what is done to the scores.

        Raises:
            UnsupportedError: naming the node that is in the way.
        """
        tensor = softmax.output[0]
        guard = False
        row_guard: str | None = None
        pair_guard: MaskTerm | None = None
        zeroed = False
        nodes = [tensor]
        for _ in range(_DEEPEST):
            if tensor in self.index.outputs or tensor in self.index.captured:
                raise UnsupportedError(f"the attention weights {tensor!r} are a graph output or read by a subgraph")
            users = self._users(tensor, staying)
            if len(users) == 2 and {n.op_type for n in users} == {"IsNaN", "Where"}:
                tensor = self._nan_guard(tensor, users)
                guard = True
                nodes += [n.output[0] for n in users]
                continue
            region = find_identity_region(self.index, self.symbolic, tensor)
            if region is not None:
                tensor = region.tensor
                guard = guard or region.clears_nan
                nodes += region.nodes
                continue
            where = self._zeroing(tensor, users)
            if where is not None and row_guard is None:
                if self._tells_empty(where.input[0], bias):
                    guard = True
                else:
                    row_guard = where.input[0]
                tensor = where.output[0]
                nodes.append(tensor)
                continue
            if (
                len(users) == 1
                and shape is None
                and zeroes_masked_weights(self.index, self.symbolic, users[0], tensor, terms)
            ):
                zeroed = True
                tensor = users[0].output[0]
                nodes.append(tensor)
                continue
            # Where the first column is the sink's, a mask of the weights lies one column beside the keys.
            pairs = None if first and shape is not None else self._pair_guard(tensor, users)
            if pairs is not None and pair_guard is None:
                pair_guard = pairs
                tensor = users[0].output[0]
                nodes.append(tensor)
                continue
            if len(users) != 1:
                words = ", ".join(describe(n) for n in users) or "nothing"
                raise UnsupportedError(
                    f"the attention weights {tensor!r} go to {words}, expected one MatMul with the values"
                )
            user = users[0]
            if shape is not None and self._drops_sink(user, tensor, shape, first):
                shape = None
                tensor = user.output[0]
                nodes.append(tensor)
                continue
            turned = self._turned(user, tensor)
            if turned is not None and shape is None:
                product_node, value, order = turned
                passed = (*nodes, user.output[0], product_node.output[0])
                return WeightPath(
                    value, product_node.output[0], guard, passed, row_guard, pair_guard, order, order, zeroed
                )
            product = self._product(user, tensor)
            if product is not None:
                if shape is not None:
                    raise UnsupportedError(f"the weight of the sink is not dropped before {describe(user)}")
                value, orders = product
                passed = (*nodes, user.output[0])
                return WeightPath(value, user.output[0], guard, passed, row_guard, pair_guard, *orders, zeroed=zeroed)
            if not self._passes(user):
                raise UnsupportedError(f"the attention weights go to {describe(user)}, expected MatMul with the values")
            if any(o and (o in self.index.outputs or self.index.consumers(o)) for o in user.output[1:]):
                raise UnsupportedError(f"{describe(user)} gives more than the attention weights")
            tensor = user.output[0]
            nodes.append(tensor)
        raise UnsupportedError("no MatMul with the values was found after the softmax")

    def _turned(self, node: onnx.NodeProto, tensor: str) -> tuple[onnx.NodeProto, str, Order] | None:
        """The MatMul of values [.., Dv, T] and weights transposed to [.., T, S], the values, and the order of axes of both."""
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

    def _pair_guard(self, tensor: str, users: Sequence[onnx.NodeProto]) -> MaskTerm | None:
        """The mask by which one node makes weights 0 that its softmax should have made 0 already."""
        if len(users) != 1 or not is_standard(users[0]):
            return None
        node = users[0]
        if self.symbolic.shape(node.output[0]) != self.symbolic.shape(tensor):
            return None
        found: MaskTerm | None = None
        if node.op_type == "Where":
            for kind, kept, filled in ((TermKind.KEEP, 1, 2), (TermKind.DROP, 2, 1)):
                if node.input[kept] == tensor and self.symbolic.uniform(node.input[filled]) == 0.0:
                    found = MaskTerm(kind, node.input[0], 0.0)
        elif node.op_type == "Mul":
            other = node.input[1 if node.input[0] == tensor else 0]
            if self.symbolic.value(other) is not None and other != tensor and self.symbolic.uniform(other) is None:
                found = MaskTerm(TermKind.KEEP, other)  # 0 * NaN stays NaN
        shape = None if found is None else self.symbolic.shape(found.tensor)
        # One of [B*H, S, T] weights would have to be told apart by heads.
        fits = shape is not None and (len(shape) == 4 or all(d.constant == 1 for d in shape[:-2]))
        return found if fits else None

    def _drops_sink(self, node: onnx.NodeProto, tensor: str, shape: Shape, first: bool) -> bool:
        """Whether a node keeps all but the last (or ``first``) column of the weights, in their order."""
        if node.op_type != "Slice" or node.input[0] != tensor or self.symbolic.shape(node.output[0]) != shape:
            return False
        kept = self.symbolic.value(node.input[1])
        steps = self.symbolic.value(node.input[4]) if len(node.input) > 4 and node.input[4] else None
        starts = kept.elements() if kept is not None else None
        ones = steps.elements() if steps is not None else [integer(1)]
        if first:  # one axis is cut, and it is the last one that is shorter
            return starts == [integer(1)] and ones == [integer(1)]
        # A column less, from column 0 on: the other axes are whole.
        return starts == [integer(0)] * len(starts or [0]) and ones == [integer(1)] * len(ones or [0])

    def _passes(self, node: onnx.NodeProto) -> bool:
        if not is_standard(node):
            return False
        if is_identity(self.symbolic, node) or is_float_cast(self.symbolic, node):
            return True
        return is_move(self.symbolic, node) and keeps_last_two_axes(self.symbolic, node)

    def _product(self, node: onnx.NodeProto, tensor: str) -> tuple[str, tuple[Order, Order]] | None:
        """The value that a node multiplies the weights with, and the orders of axes of value and product."""
        if self._is_product(node, tensor):
            check_axes(self.symbolic, node, "value")
            return str(node.input[1]), ((), ())
        for found in einsum_matmuls(self.symbolic, node):
            # The weights [.., S, T] are summed over T, which comes last in both operands.
            if found.left == tensor != found.right and found.left_order == tuple(range(len(found.left_order))):
                *batch, columns, summed = found.right_order
                return found.right, ((*batch, summed, columns), found.result)
        return None

    def _is_product(self, node: onnx.NodeProto, tensor: str) -> bool:
        if node.input[0] != tensor:
            return False
        if node.op_type == "MatMul" and is_standard(node):
            return True
        if node.op_type != "FusedMatMul" or node.domain != "com.microsoft":
            return False
        numbers = {a.name: a.f if a.name == "alpha" else a.i for a in node.attribute}
        return numbers.pop("alpha", 1.0) == 1.0 and not any(numbers.values())

    def _zeroing(self, tensor: str, users: Sequence[onnx.NodeProto]) -> onnx.NodeProto | None:
        """The Where that makes whole rows of the weights [B, H, S, T] zero; its zero may be cast like them."""
        where = next((n for n in users if n.op_type == "Where" and n.input[2] == tensor), None)
        if where is None or any(n is not where and n.op_type != "CastLike" for n in users):
            return None
        likes = [n for n in users if n is not where]
        if any(n.input[0] == tensor or self.index.consumers(n.output[0]) != [where] for n in likes):
            return None
        return where if self._row_guard(where, tensor, Layout.BHSD) is not None else None

    def _tells_empty(self, condition: str, bias: str) -> bool:
        """Whether a condition is that the largest entry of the bias in a row is -inf."""
        equal = self.index.producer(condition)
        if not bias or equal is None or equal.op_type != "Equal":
            return False
        for i in (0, 1):
            most = self.index.producer(equal.input[i])
            if most is not None and most.op_type == "ReduceMax" and most.input[0] == bias:
                shape, own = self.symbolic.shape(bias), self.symbolic.shape(most.output[0])
                last = shape is not None and own == (*shape[:-1], integer(1))
                return last and self.symbolic.uniform(equal.input[1 - i]) == -math.inf
        return False

    def _nan_guard(self, tensor: str, users: list[onnx.NodeProto]) -> str:
        test = next(n for n in users if n.op_type == "IsNaN")
        where = next(n for n in users if n.op_type == "Where")
        good = where.input[0] == test.output[0] and where.input[2] == tensor
        alone = self.index.consumers(test.output[0]) == [where] and test.output[0] not in self.index.outputs
        if not good or not alone or self.symbolic.uniform(where.input[1]) != 0.0:
            raise UnsupportedError(f"{describe(where)} after the softmax is no NaN guard")
        return str(where.output[0])

    def outputs(
        self, weighted: WeightPath, heads: int, staying: Sequence[str], grouped: bool = False
    ) -> list[OutputCandidate]:
        """The tensors that the op can write, the best first: the farther the better, flattened ones last.

        ``grouped``: a product of five axes has its heads in two of them, else its batch.
        """
        start = weighted.product
        shape = self.symbolic.shape(start)
        if shape is None:
            return []
        found: list[OutputCandidate] = []
        moves: tuple[onnx.NodeProto, ...] = ()
        passed = weighted.nodes
        own = self.index.fused_nodes.get(start)
        guard = weighted.row_guard
        current = start
        for _ in range(_DEEPEST):
            axes = trace_axes(self.symbolic, MovePath(start, moves))
            view = None if axes is None else output_layout(shape, axes, heads, weighted.product_order, grouped)
            layout, perm, flat = view if view is not None else (None, (), False)
            if layout is not None:
                output = OutputCandidate(current, layout, self.symbolic.dtype(current), guard, passed, perm, flat)
                found.insert(0 if flat else len(found), output)
            users = self._users(current, staying)
            if len(users) != 1 or current in self.index.outputs or current in self.index.captured:
                break
            user = users[0]
            if self.index.fused_nodes.get(user.output[0], own) != own:
                break  # a part of another fused node, which may stay as it is
            if user.op_type == "Where" and guard is None and layout is not None:
                guard = self._row_guard(user, current, layout)
                if guard is None:
                    break
            elif is_move(self.symbolic, user) and user.input[0] == current:
                moves = (*moves, user)
            elif not is_float_cast(self.symbolic, user):
                break
            current = user.output[0]
            passed = (*passed, current)
        return found[::-1]

    def _row_guard(self, where: onnx.NodeProto, tensor: str, layout: Layout) -> str | None:
        """The condition of a Where that makes whole rows [b, h, s, :] of a BHSD result zero."""
        if layout is not Layout.BHSD or where.input[2] != tensor or self.symbolic.uniform(where.input[1]) != 0.0:
            return None
        shape, own = self.symbolic.shape(where.input[0]), self.symbolic.shape(where.output[0])
        before = self.symbolic.shape(tensor)
        if shape is None or not shape or shape[-1].constant != 1 or own != before:
            return None
        return str(where.input[0])
