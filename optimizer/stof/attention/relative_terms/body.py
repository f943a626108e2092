# SPDX-License-Identifier: Apache-2.0
"""Products with rows by relative position in the function body of StofAttention: standard ONNX from opset 13 on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onnx import TensorProto

from stof.graph.node_builder import Builder
from stof.mask.expression import MaskExpression
from stof.mask.relative_roles import RELATIVE_QUERY, RELATIVE_VALUE
from stof.mask.to_onnx import ScoreSizes


@dataclass(frozen=True)
class RelativeProduct:
    """The role of a relative table, the integer expression that names its rows, and whether they have a row bias."""

    role: str
    index: MaskExpression
    has_row_bias: bool

    @property
    def is_of_keys(self) -> bool:
        """Whether keys meet the rows, not queries."""
        return self.role == RELATIVE_QUERY

    @property
    def is_of_weights(self) -> bool:
        """Whether weights meet the rows, behind the softmax."""
        return self.role == RELATIVE_VALUE


@dataclass(frozen=True)
class ScoreVectors:
    """Names of tensors: queries and keys [B, H, length, D] in fp32, both times the scale, and the scale."""

    query: str
    key: str
    scale: str


def emit_product(
    b: Builder, product: RelativeProduct, vectors: ScoreVectors, sizes: ScoreSizes, operands: Mapping[str, str]
) -> str:
    """Nodes for the scaled product of queries, or keys, with the rows that pairs name: [B, H, S, T] in fp32.

    All rows are multiplied, and those that pairs name are gathered.
    """
    table = b.add("Cast", [operands[product.role]], to=TensorProto.FLOAT)
    shape = b.add("Shape", [table])
    count, columns = (b.add("Gather", [shape, b.constant(axis)]) for axis in (1, 2))
    last = b.add("Sub", [count, b.constant(1)])
    pairs = _rows(b, product, sizes, operands, last)
    query = vectors.key if product.is_of_keys else vectors.query
    row_bias = ""
    if product.has_row_bias:
        split = b.add("Sub", [columns, b.constant(1)])
        row_bias = b.add("Gather", [table, split], axis=2)
        table = b.add("Slice", [table, b.constant([0]), b.unsqueeze(split, [0]), b.constant([2])])
    one = b.constant([1, 1, 1])
    batches = b.add("Concat", [b.unsqueeze(sizes.B, [0]), one], axis=0)  # a MatMul does not broadcast a batch of 0
    full = b.add("MatMul", [query, b.add("Expand", [b.add("Transpose", [table], perm=[0, 2, 1]), batches])])
    if row_bias:
        full = b.add("Add", [full, b.unsqueeze(b.add("Mul", [row_bias, vectors.scale]), [1])])
    lengths = (sizes.T, sizes.S) if product.is_of_keys else (sizes.S, sizes.T)
    pairs = b.add("Transpose", [pairs], perm=[1, 0]) if product.is_of_keys else pairs
    index = b.add("Expand", [pairs, _vector(b, sizes.B, sizes.H, *lengths)])
    term = b.add("GatherElements", [full, index], axis=3)
    return b.add("Transpose", [term], perm=[0, 1, 3, 2]) if product.is_of_keys else term


def emit_values(
    b: Builder, product: RelativeProduct, weights: str, sizes: ScoreSizes, operands: Mapping[str, str]
) -> str:
    """Nodes for the sum of rows that a query's pairs name, times weights [B, H, S, T]: [B, H, S, Dv] in fp32."""
    table = b.add("Cast", [operands[product.role]], to=TensorProto.FLOAT)
    count = b.add("Gather", [b.add("Shape", [table]), b.constant(1)])
    pairs = _rows(b, product, sizes, operands, b.add("Sub", [count, b.constant(1)]))
    rows = b.add("Gather", [table, pairs], axis=1)  # [H or 1, S, T, Dv]
    sums = b.add("MatMul", [b.unsqueeze(weights, [3]), rows])
    return b.add("Squeeze", [sums, b.constant([3])])


def _rows(b: Builder, product: RelativeProduct, sizes: ScoreSizes, operands: Mapping[str, str], last: str) -> str:
    """The row of each pair [S, T], clamped into the table."""
    rows = product.index.rows_to_onnx(b, sizes, operands)
    rows = b.add("Min", [b.add("Max", [rows, b.constant(0)]), last])
    return b.add("Expand", [rows, _vector(b, sizes.S, sizes.T)])  # an expression may be of one side alone


def _vector(b: Builder, *sizes: str) -> str:
    return b.add("Concat", [b.unsqueeze(size, [0]) for size in sizes], axis=0)
