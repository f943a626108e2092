# SPDX-License-Identifier: Apache-2.0
"""Products with rows by relative position in the function body of StofAttention: standard ONNX from opset 13 on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onnx import TensorProto

from stof.graph.node_builder import Builder
from stof.mask.expression import MaskExpression
from stof.mask.to_onnx import ScoreSizes


@dataclass(frozen=True)
class RelativeProduct:
    """A role whose operand is a table of rows, the integer expression that names them, and whether they have a column more."""

    role: str
    index: MaskExpression
    has_column: bool

    @property
    def is_of_keys(self) -> bool:
        """Whether keys meet the rows, not queries."""
        return self.role == "relative_query"


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
    rows = product.index.rows_to_onnx(b, sizes, operands)
    rows = b.add("Min", [b.add("Max", [rows, b.constant(0)]), last])
    query = vectors.key if product.is_of_keys else vectors.query
    column = ""
    if product.has_column:
        split = b.add("Sub", [columns, b.constant(1)])
        column = b.add("Gather", [table, split], axis=2)
        table = b.add("Slice", [table, b.constant([0]), b.unsqueeze(split, [0]), b.constant([2])])
    full = b.add("MatMul", [query, b.add("Transpose", [table], perm=[0, 2, 1])])
    if column:
        full = b.add("Add", [full, b.unsqueeze(b.add("Mul", [column, vectors.scale]), [1])])
    lengths = (sizes.T, sizes.S) if product.is_of_keys else (sizes.S, sizes.T)
    pairs = b.add("Expand", [rows, _vector(b, sizes.S, sizes.T)])  # an expression may be of one side alone
    pairs = b.add("Transpose", [pairs], perm=[1, 0]) if product.is_of_keys else pairs
    index = b.add("Expand", [pairs, _vector(b, sizes.B, sizes.H, *lengths)])
    term = b.add("GatherElements", [full, index], axis=3)
    return b.add("Transpose", [term], perm=[0, 1, 3, 2]) if product.is_of_keys else term


def _vector(b: Builder, *sizes: str) -> str:
    return b.add("Concat", [b.unsqueeze(size, [0]) for size in sizes], axis=0)
