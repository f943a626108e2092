# SPDX-License-Identifier: Apache-2.0
"""The local function of StofAttention for calls with packed sequences (docs/reference/operators.md)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum

import onnx
from onnx import TensorProto, helper

from stof.attention.function_body import attribute_constant, make_branch
from stof.execution.run_failure import FEWER_ROWS
from stof.graph.node_builder import Builder
from stof.unpadding.capacity import refuse_excess
from stof.unpadding.rules import layout_axes

CUMULATIVE, CUMULATIVE_KEYS, FIRST = "cumulative_sequence_length", "cumulative_key_length", "first_position"  # roles
SEQUENCES = "sequences"  # the attribute by which the function knows what is packed; kernels go by the roles


class Sequences(Enum):
    """Which tensors of a call are packed sequences."""

    NONE = 0
    ALL = 1
    KEYS = 2


def add_sequences(
    function: onnx.FunctionProto, layouts: Sequence[str], length_slots: Sequence[int], kinds: Collection[Sequences]
) -> onnx.FunctionProto:
    """The function for calls with two more operands: packed tensors are padded before the body, and the output packed behind it.

    Every call must have the attribute ``sequences`` and both operands, of role ``unused`` where nothing is packed.

    Args:
        function: the function of calls without.
        layouts: of query, key, value and output at the calls.
        length_slots: operands of which the last axis is as long as padded sequences; its size is 1 at calls without.
        kinds: those that calls have.
    """
    return _Body(function, layouts, length_slots, kinds).write()


class _Body:
    def __init__(
        self,
        function: onnx.FunctionProto,
        layouts: Sequence[str],
        length_slots: Sequence[int],
        kinds: Collection[Sequences],
    ) -> None:
        self.function = function
        self.layouts = layouts
        self.kinds = kinds
        self.opset = next(e.version for e in function.opset_import if not e.domain)
        operands = [n for n in function.input if n.startswith("operand")]
        self.keyed = [f"operand{slot}" for slot in length_slots]
        self.cumulative, self.first = (f"operand{len(operands) + i}" for i in range(2))
        self.builder = Builder(self.opset, "q_")

    def write(self) -> onnx.FunctionProto:
        """The function."""
        b = self.builder
        kind = b.name()
        b.nodes.append(attribute_constant(kind, "value_int", SEQUENCES, onnx.AttributeProto.INT))
        names = {}
        for i, tensor in enumerate(("query", "key", "value")):
            packed = {Sequences.ALL} if i == 0 else {Sequences.ALL, Sequences.KEYS}
            names[tensor] = self._choose(tensor, packed, kind, self.layouts[i], is_output=False)
        result = onnx.FunctionProto()
        result.CopyFrom(self.function)
        nodes = [onnx.NodeProto.FromString(n.SerializeToString()) for n in result.node]
        for node in nodes:
            for j, name in enumerate(node.input):
                node.input[j] = names.get(name, name)
            for j, name in enumerate(node.output):
                if name == "output":
                    node.output[j] = "padded_output"
        before = list(b.nodes)
        b.nodes.clear()
        last = self._choose("padded_output", {Sequences.ALL}, kind, self.layouts[3], is_output=True)
        b.nodes.append(helper.make_node("Identity", [last], ["output"], name="packed_output"))
        del result.node[:]
        result.node.extend([*before, *nodes, *b.nodes])
        result.input.extend([self.cumulative, self.first])
        result.attribute.append(SEQUENCES)
        return result

    def _choose(self, tensor: str, packed: set[Sequences], kind: str, layout: str, *, is_output: bool) -> str:
        """The tensor as the body takes or the call gives it: converted for calls whose kind is one of ``packed``."""
        b = self.builder
        work = self._pack if is_output else self._pad
        if not packed.intersection(self.kinds):
            return tensor
        if packed.issuperset(self.kinds):
            return work(b, tensor, layout)
        inner = Builder(self.opset, f"q_{tensor}_")
        converted = work(inner, tensor, layout)
        then = make_branch(inner.nodes, [converted], f"{tensor}_packed")
        other = make_branch([], [tensor], f"{tensor}_as_it_is")
        conditions = [b.add("Equal", [kind, b.constant(p.value)]) for p in sorted(packed, key=lambda p: p.value)]
        condition = conditions[0] if len(conditions) == 1 else b.add("Or", conditions)
        return b.add("If", [condition], then_branch=then, else_branch=other)

    def _cumulative(self, b: Builder) -> str:
        return self._list(b, self.cumulative)

    def _list(self, b: Builder, operand: str) -> str:
        """An operand [n] as int64. Calls that do not use it have some other tensor, whose shape must infer, too."""
        return b.add("Reshape", [b.add("Cast", [operand], to=TensorProto.INT64), b.constant([-1])])

    def _index(self, b: Builder, count: str) -> str:
        """[rows, 2]: sequence and position of each row; rows behind the last sequence have the position behind all others."""
        row = b.add("Range", [b.constant(0), count, b.constant(1)])
        cumulative = self._cumulative(b)
        limits = [b.constant([1]), b.constant([2**31 - 1]), b.constant([0])]
        ends = b.unsqueeze(b.add("Slice", [cumulative, *limits]), [0])
        is_behind = b.add("Not", [b.add("Less", [b.unsqueeze(row, [1]), ends])])
        sequence = b.add("ReduceSum", [b.add("Cast", [is_behind], to=TensorProto.INT64), b.constant([1])], keepdims=0)
        last = b.add("Sub", [b.add("Gather", [b.add("Shape", [ends]), b.constant(1)]), b.constant(1)])
        own = b.add("Max", [b.add("Min", [sequence, last]), b.constant(0)])
        first = b.add("Gather", [self._list(b, self.first), own])
        position = b.add("Add", [b.add("Sub", [row, b.add("Gather", [cumulative, own])]), first])
        position = b.add("Where", [b.add("Greater", [sequence, last]), self._length(b), position])
        return b.add("Concat", [b.unsqueeze(own, [1]), b.unsqueeze(position, [1])], axis=1)

    def _length(self, b: Builder) -> str:
        """The positions of a padded sequence."""
        lengths = [b.add("Gather", [b.add("Shape", [operand]), b.constant(-1)]) for operand in self.keyed]
        return lengths[0] if len(lengths) == 1 else b.add("Max", lengths)

    def _pad(self, b: Builder, tensor: str, layout: str) -> str:
        """[1, L, ...] as [B, T, ...] in the tensor's layout; rows of padding are 0.

        As keys they are forbidden, but their weight of 0 times NaN, of a text without a key for instance, is NaN.
        """
        is_bhsd = layout_axes(layout).position == 2
        rows = b.add("Transpose", [tensor], perm=[0, 2, 1, 3]) if is_bhsd else tensor
        rows = b.add("Gather", [rows, b.constant(0)])  # whatever the size of the batch of calls that do not come here
        rank = 2 if layout == "BSN" else 3
        number = b.add("Gather", [self._cumulative(b), b.constant([-1])])
        rows = refuse_excess(b, rows, number, rank, f"{tensor}_{FEWER_ROWS}")
        count = b.add("Gather", [b.add("Shape", [rows]), b.constant(0)])
        rows = b.add("Pad", [rows, b.constant([0] * rank + [1] + [0] * (rank - 1))])
        length, cumulative = self._length(b), self._cumulative(b)
        starts = b.unsqueeze(b.add("Slice", [cumulative, b.constant([0]), b.constant([-1]), b.constant([0])]), [1])
        limits = [b.constant([1]), b.constant([2**31 - 1]), b.constant([0])]
        ends = b.unsqueeze(b.add("Slice", [cumulative, *limits]), [1])
        position = b.unsqueeze(b.add("Range", [b.constant(0), length, b.constant(1)]), [0])
        row = b.add("Add", [b.add("Sub", [starts, b.unsqueeze(self._list(b, self.first), [1])]), position])
        is_outside = b.add("Or", [b.add("Less", [row, starts]), b.add("Not", [b.add("Less", [row, ends])])])
        padded = b.add("Gather", [rows, b.add("Where", [is_outside, count, row])])
        return b.add("Transpose", [padded], perm=[0, 2, 1, 3]) if is_bhsd else padded

    def _pack(self, b: Builder, tensor: str, layout: str) -> str:
        """[B, S, ...] as the rows of the query, in the tensor's layout; 0 behind the last sequence."""
        is_bhsd = layout_axes(layout).position == 2
        rows = b.add("Transpose", [tensor], perm=[0, 2, 1, 3]) if is_bhsd else tensor
        behind = [0, 1] + [0] * (1 if layout == "BSN" else 2)  # one more position
        rows = b.add("Pad", [rows, b.constant([0] * len(behind) + behind)])
        count = b.add("Gather", [b.add("Shape", ["query"]), b.constant(layout_axes(self.layouts[0]).position)])
        packed = b.unsqueeze(b.add("GatherND", [rows, self._index(b, count)]), [0])
        return b.add("Transpose", [packed], perm=[0, 2, 1, 3]) if is_bhsd else packed
