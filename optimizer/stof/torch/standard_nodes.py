# SPDX-License-Identifier: Apache-2.0
"""Masked attention as nodes of standard ONNX, spelled as ``stof-optimize`` finds attention and as any runtime runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto, helper

from stof.graph.node_builder import Builder
from stof.mask.expression import MaskExpression
from stof.mask.to_onnx import ScoreSizes
from stof.torch.arguments import AttentionSettings

# The lowest finite numbers.
_LOWEST: dict[int, float] = {
    TensorProto.FLOAT: float(np.finfo(np.float32).min),
    TensorProto.FLOAT16: float(np.finfo(np.float16).min),
    TensorProto.BFLOAT16: -float.fromhex("0x1.fep127"),
}


@dataclass(frozen=True)
class ExportedAttention:
    """A call of ``stof::attention`` in a graph that is exported.

    Attributes:
        settings: of the call.
        heads: H of the query.
        kv_heads: G of key and value.
        head_sizes: D of the key and Dv of the value.
        dtype: ONNX element type of query, key and value.
        operands: tensors of the operands by role.
    """

    settings: AttentionSettings
    heads: int
    kv_heads: int
    head_sizes: tuple[int, int]
    dtype: int
    operands: Mapping[str, str]

    def add_nodes(self, b: Builder, query: str, key: str, value: str) -> tuple[str, str]:
        """Appends the nodes; returns the names of output [B, H, S, Dv] and LSE [B, H, S]."""
        sizes = self._sizes(b, query, key)
        if self.heads != self.kv_heads:
            key, value = (self._repeat(b, t, size) for t, size in zip((key, value), self.head_sizes, strict=True))
        scores = b.add("MatMul", [query, b.add("Transpose", [key], perm=[0, 1, 3, 2])])
        scores = b.add("Mul", [scores, self._number(b, self.settings.scale)])
        if self.settings.softcap > 0:
            cap = self._number(b, self.settings.softcap)
            scores = b.add("Mul", [b.add("Tanh", [b.add("Div", [scores, cap])]), cap])
        expression = MaskExpression.parse(self.settings.mask)
        if expression.allows_all:
            return b.add("MatMul", [b.add("Softmax", [scores], axis=-1), value]), self._lse(b, scores)
        allowed = expression.to_onnx(b, sizes, self.operands, tables_have_rank=True)
        minus = self._number(b, -np.inf)
        masked = b.add("Where", [allowed, scores, minus])
        weights = self._weights(b, scores, masked, allowed, minus)
        return b.add("MatMul", [weights, value]), self._lse(b, masked)

    def _weights(self, b: Builder, scores: str, masked: str, allowed: str, minus: str) -> str:
        match self.settings.empty_rows:
            case "zero":
                weights = b.add("Softmax", [masked], axis=-1)
                return b.add("Where", [b.add("IsNaN", [weights]), self._number(b, 0), weights])
            case "mean":  # the lowest finite number: a row of it has equal weights
                lowest = self._number(b, _LOWEST.get(self.dtype, _LOWEST[TensorProto.FLOAT]))
                return b.add("Softmax", [b.add("Where", [allowed, scores, lowest])], axis=-1)
            case "all":
                is_empty = b.add("Equal", [b.reduce_max(masked, -1), minus])
                return b.add("Softmax", [b.add("Where", [is_empty, scores, masked])], axis=-1)
        return b.add("Softmax", [masked], axis=-1)

    def _lse(self, b: Builder, masked: str) -> str:
        """The LSE in fp32: -inf where no key is allowed, without the NaN of -inf - -inf."""
        masked = b.add("Cast", [masked], to=TensorProto.FLOAT)
        lowest = b.constant(np.finfo(np.float32).min, np.float32)
        top = b.add("Max", [b.reduce_max(masked, -1), lowest])
        total = b.reduce("ReduceLogSum", b.add("Exp", [b.add("Sub", [masked, top])]), -1)
        return b.add("Squeeze", [b.add("Add", [total, top]), b.constant([-1])])

    def _sizes(self, b: Builder, query: str, key: str) -> ScoreSizes:
        query_shape, key_shape = b.add("Shape", [query]), b.add("Shape", [key])
        B, H, S = (b.add("Gather", [query_shape, b.constant(axis)]) for axis in range(3))
        T = b.add("Gather", [key_shape, b.constant(2)])
        return ScoreSizes(B, H, S, T, b.add("Sub", [T, S]) if self.settings.query_offset else b.constant(0))

    def _repeat(self, b: Builder, tensor: str, size: int) -> str:
        """[B, G, T, D] with each head H / G times."""
        times = b.constant([1, 1, self.heads // self.kv_heads, 1, 1])
        spread = b.add("Expand", [b.unsqueeze(tensor, [2]), times])
        return b.add("Reshape", [spread, b.constant([0, self.heads, -1, size])])

    def _number(self, b: Builder, value: float) -> str:
        """A scalar of the type of the scores."""
        name = b.name()
        tensor = helper.make_tensor(name, self.dtype, [], [value])
        b.nodes.append(helper.make_node("Constant", [], [name], name=name, value=tensor))
        return name
