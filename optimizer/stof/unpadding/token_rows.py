# SPDX-License-Identifier: Apache-2.0
"""Which rows of a padded batch are tokens: tensors of the graph, computed from its key padding mask.

All nodes are standard operators that ONNX Runtime's CUDA provider has. Sizes enter as shapes and as limits of ranges alone,
which kernels read on the host: so no number is copied to the device, which a CUDA graph cannot capture.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from onnx import TensorProto

from stof.graph.node_builder import Builder
from stof.unpadding.find_keys import add_has_keys
from stof.unpadding.region import UnpaddedRegion

_END = 2**63 - 1  # of a slice to the end


@dataclass(frozen=True)
class BatchTensors:
    """What the rows of tokens are found by.

    Attributes:
        batch: a tensor with the size B.
        length: a tensor with the size S.
        mask: the key padding mask; [B, S], or of any shape with S as its last axis and as many rows as B, or one.
        dtype: its element type.
        is_expanded: ``mask`` is [B, S].
    """

    batch: str
    length: str
    mask: str
    dtype: int
    is_expanded: bool


class TokenRows:
    """The tokens of each sequence: from its first real one to its last; all rows, where it has none or others are read.

    Args:
        builder: gets the nodes.
        region: says what is padding, and which rows others read.
        tensors: of the graph.

    Attributes:
        kept: [B, S] bool, the rows that are tokens.
        cumulative: [B + 1] int32, where the tokens of each sequence begin, and the number of all.
        first_position: [B] int32, the position of the first token of each sequence.
        token_numbers: [B, S], the number of each token from 1 on; 0: none.
    """

    def __init__(self, builder: Builder, region: UnpaddedRegion, tensors: BatchTensors) -> None:
        b = self._builder = builder
        self._region = region
        self._tensors = tensors
        self._zero, self._one = b.constant(0), b.constant(1)
        self._row = b.add("Range", [self._zero, tensors.length, self._one])
        self._real = real = self._find_real()
        if region.guards:
            # A sequence that may have no key to attend to keeps all rows, as one without a real token does.
            real = b.add("And", [real, add_has_keys(b, region, real, (tensors.batch, tensors.length))])
        # By sums: ONNX Runtime's symbolic shape inference knows no shape of ReduceMin with axes as an input.
        number = b.add("Cast", [real], to=TensorProto.INT64)
        is_before = b.add("Equal", [b.add("CumSum", [number, self._one]), self._zero])
        is_not_behind = b.add("Greater", [b.add("CumSum", [number, self._one], reverse=1), self._zero])
        first, count = (
            b.add("ReduceSum", [b.add("Cast", [n], to=TensorProto.INT64), b.constant([1])], keepdims=1)
            for n in (is_before, is_not_behind)
        )
        last = b.add("Sub", [count, self._one])
        before, behind = b.add("Less", [self._row, first]), b.add("Greater", [self._row, last])
        inside = b.add("Not", [b.add("Or", [before, behind])])
        is_whole = b.add("Less", [last, self._zero])  # [B, 1]: no row of the sequence is real
        for position in sorted({r.position for r in region.reads}):
            is_whole = b.add(
                "Or", [is_whole, self._is_missing(real if region.has_averaged_padding else inside, position)]
            )
        self.kept = b.add("Or", [inside, is_whole])
        if region.index_reads:
            # Rare, as a text that is padded on the other side than its pooling expects: all rows stay.
            are_all = self._are_read_outside(self._counting if region.has_averaged_padding else self.kept)
            is_whole, self.kept = b.add("Or", [is_whole, are_all]), b.add("Or", [self.kept, are_all])
        first = b.add("Where", [is_whole, self._zero, first])
        number = b.add("Cast", [self.kept], to=TensorProto.INT64)
        length = b.add("ReduceSum", [number, b.constant([1])], keepdims=1)
        ends = b.add("CumSum", [length, self._zero])
        offset = b.add("Sub", [b.add("Sub", [ends, length]), b.add("Sub", [first, self._one])])
        self.token_numbers = b.add("Mul", [b.add("Add", [self._row, offset]), number])
        starts = b.add("Concat", [b.constant([0]), self._flat(ends)], axis=0)
        self._starts = starts
        self.cumulative = b.add("Cast", [starts], to=TensorProto.INT32)
        self.first_position = b.add("Cast", [self._flat(first)], to=TensorProto.INT32)

    @cached_property
    def rows(self) -> str:
        """The row of each token, of batch times positions: [L], or [C] at a capacity, where further ones repeat the first."""
        b = self._builder
        if not self._region.capacity:
            return b.add("Squeeze", [b.add("NonZero", [self._flat(self.kept)]), b.constant([0])])
        # Each row goes to the place of its token. Others go behind, so that no two have the same one.
        capacity = b.constant(self._region.capacity)
        count = b.add("Mul", [self._tensors.batch, self._tensors.length])
        number = b.add("Range", [self._zero, count, self._one])
        number_of_row = self._flat(self.token_numbers)
        has_place = b.add("Less", [number_of_row, b.constant(self._region.capacity + 1)])
        has_place = b.add("And", [self._flat(self.kept), has_place])
        place = b.add("Where", [has_place, b.add("Sub", [number_of_row, self._one]), b.add("Add", [number, capacity])])
        places = b.add("ConstantOfShape", [b.unsqueeze(b.add("Add", [count, capacity]), [0])], value=_int64_zero())
        places = b.add("ScatterElements", [places, place, number])
        found = b.add("Slice", [places, b.constant([0]), b.constant([self._region.capacity])])
        return b.add("Where", [self._is_token, found, b.add("Gather", [found, b.constant([0])])])

    @cached_property
    def tokens_then_first(self) -> str:
        """[C]: the numbers of the tokens from 0 on, then 0: what makes rows behind the last token copies of the first one."""
        return self._builder.add("Where", [self._is_token, self._place, self._zero])

    @cached_property
    def positions(self) -> str:
        """The position of each token in its sequence."""
        return self._of_rows(self._row)

    @cached_property
    def sequences(self) -> str:
        """The sequence of each token."""
        b = self._builder
        return self._of_rows(b.unsqueeze(b.add("Range", [self._zero, self._tensors.batch, self._one]), [1]))

    @cached_property
    def real_numbers(self) -> str:
        """``token_numbers`` without padding between tokens, but for sequences without a real one."""
        b = self._builder
        return b.add("Mul", [self.token_numbers, b.add("Cast", [self._counting], to=TensorProto.INT64)])

    @cached_property
    def count(self) -> str:
        """[1], the number of tokens."""
        return self._builder.add("Gather", [self._starts, self._builder.constant([-1])])

    @cached_property
    def _counting(self) -> str:
        """[B, S]: the real tokens, and all rows of a sequence without one."""
        b = self._builder
        count = b.add("ReduceSum", [b.add("Cast", [self._real], to=TensorProto.INT64), b.constant([1])], keepdims=1)
        return b.add("Or", [self._real, b.add("Equal", [count, self._zero])])

    @cached_property
    def _place(self) -> str:
        return self._builder.add("Range", [self._zero, self._builder.constant(self._region.capacity), self._one])

    @cached_property
    def _is_token(self) -> str:
        return self._builder.add("Less", [self._place, self.count])

    def _flat(self, tensor: str) -> str:
        return self._builder.add("Reshape", [tensor, self._builder.constant([-1])])

    def _sizes(self) -> str:
        b, tensors = self._builder, self._tensors
        return b.add("Concat", [b.unsqueeze(n, [0]) for n in (tensors.batch, tensors.length)], axis=0)

    def _of_rows(self, numbers: str) -> str:
        """What tokens have of numbers that broadcast to [B, S]."""
        b = self._builder
        return b.add("Gather", [self._flat(b.add("Expand", [numbers, self._sizes()])), self.rows])

    def _find_real(self) -> str:
        """[B, S]: which rows are no padding."""
        b, tensors = self._builder, self._tensors
        mask = tensors.mask
        if not tensors.is_expanded:
            by_length = b.add("Concat", [b.constant([-1]), b.unsqueeze(tensors.length, [0])], axis=0)
            mask = b.add("Expand", [b.add("Reshape", [mask, by_length]), self._sizes()])
        return self._region.mask.add_real(b, mask, tensors.dtype)

    def _is_missing(self, inside: str, position: int) -> str:
        """[B, 1]: whether no token of a sequence has a position; negative ones count from the end."""
        b = self._builder
        end = _END if position == -1 else position + 1
        at = b.add("Slice", [inside, b.constant([position]), b.constant([end]), b.constant([1])])
        count = b.add("ReduceSum", [b.add("Cast", [at], to=TensorProto.INT64), b.constant([1])], keepdims=1)
        return b.add("Less", [count, self._one])

    def _are_read_outside(self, inside: str) -> str:
        """Whether nodes read rows by indices that are not among those of ``inside`` [B, S]."""
        b, reads = self._builder, dict.fromkeys((r.indices, r.kind) for r in self._region.index_reads)
        found = ""
        for indices, kind in reads:
            if kind == "rows":
                row = b.add("Gather", [self._flat(inside), indices])
            elif kind == "elements":
                row = b.add("GatherElements", [inside, b.add("Flatten", [indices], axis=1)], axis=1)
            else:
                row = b.add("GatherND", [inside, indices], batch_dims=int(kind == "positions"))
            count = b.add("ReduceSum", [b.add("Cast", [b.add("Not", [row])], to=TensorProto.INT64)], keepdims=0)
            is_outside = b.add("Greater", [count, self._zero])
            found = b.add("Or", [found, is_outside]) if found else is_outside
        return found


def _int64_zero() -> TensorProto:
    return TensorProto(dims=[1], data_type=TensorProto.INT64, int64_data=[0])
