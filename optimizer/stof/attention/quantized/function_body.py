# SPDX-License-Identifier: Apache-2.0
"""The function body of StofQuantizedAttention in standard ONNX: the roundings are those of the graph that it replaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

from stof.attention.function_body import AttentionFrame, Variant, VariantWeights, read_attributes, select_variant
from stof.graph.index import DOMAIN
from stof.graph.node_builder import Builder
from stof.mask.to_onnx import ScoreSizes

QUANTIZED_OP = "StofQuantizedAttention"


def make_quantized_function(variants: Sequence[Variant], opset: int) -> onnx.FunctionProto:
    """The local function ``stof::StofQuantizedAttention`` for the variants of a model; attribute ``mask_id`` selects one.

    Args:
        variants: distinct; ``mask_id`` is the index. They have the same layouts, and scales of query, key and value.
        opset: of the standard domain.
    """
    slots = len(variants[0].roles)
    inputs = ["query", "key", "value", *[f"operand{i}" for i in range(slots)]]
    frame = _CodedFrame(variants[0], opset)
    products = frame.products()
    scale = frame.attribute("scale")
    weights = [_RoundedWeights(v, Builder(opset, f"v{i}_"), scale) for i, v in enumerate(variants)]
    mask_id = frame.attribute("mask_id") if len(variants) > 1 else ""
    frame.builder.nodes += select_variant(weights, 0, (products, None), mask_id, ["out"])
    frame.finish("variant0_out", "")
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_function(
        DOMAIN, QUANTIZED_OP, inputs, ["output"], frame.builder.nodes, opsets, read_attributes(len(variants))
    )


def _operands_of(roles: Sequence[str]) -> Mapping[str, str]:
    return {r: f"operand{i}" for i, r in enumerate(roles) if r != "unused"}


class _CodedFrame(AttentionFrame):
    """From codes of query and key to their products, and from weights and value to the output."""

    def __init__(self, variant: Variant, opset: int) -> None:
        super().__init__(variant.layouts, variant.grouped, int(TensorProto.FLOAT), opset, output_type="")
        self._operands = _operands_of(variant.roles)

    def products(self) -> str:
        """Nodes for query @ key^T [B, H, S, T]; returns their name."""
        numbers = {
            role: self.builder.add(
                "DequantizeLinear",
                [role, self._operands[f"{role}_scale"], self._operands[f"{role}_zero_point"]],
            )
            for role in ("query", "key", "value")
        }
        query, key = self.lay_out_heads(numbers["query"], numbers["key"], numbers["value"])
        return self.builder.add("MatMul", [query, self.builder.add("Transpose", [key], perm=[0, 1, 3, 2])])


class _RoundedWeights(VariantWeights):
    """From products to weights, with roundings between."""

    def __init__(self, variant: Variant, builder: Builder, scale: str) -> None:
        super().__init__(variant, builder)
        self._scale = scale

    def build(self, scores: str, vectors: object, result_names: Sequence[str]) -> list[str]:
        v, b = self.variant, self.builder
        shape = b.add("Shape", [scores])
        B, H, S, T = (b.add("Gather", [shape, b.constant(i)]) for i in range(4))
        sizes = ScoreSizes(B, H, S, T, b.add("Sub", [T, S]) if v.query_offset else b.constant(0))
        operands = dict(_operands_of(v.roles))
        scores = self._round(scores, "score", operands)
        scores = self._round(b.add("Mul", [scores, self._scale]), "scaled_score", operands)
        if "bias" in operands:
            scores = b.add("Add", [scores, operands["bias"]])
        scores = self._round(scores, "biased_score", operands)
        minus, masked = b.constant(-np.inf, np.float32), scores
        if not v.expression.allows_all:
            masked = b.add("Where", [v.expression.to_onnx(b, sizes, operands), scores, minus])
        weights = self.weights(scores, masked, sizes, operands, minus)
        if "weight_scale" in operands:
            return [self._round(weights, "weight", operands)]
        quantizer = [b.name() for _ in range(3)]
        b.nodes.append(helper.make_node("DynamicQuantizeLinear", [weights], quantizer, name=quantizer[0]))
        return [b.add("DequantizeLinear", quantizer)]

    def _round(self, tensor: str, role: str, operands: Mapping[str, str]) -> str:
        """A tensor rounded to the numbers of codes, where the role has a scale."""
        if f"{role}_scale" not in operands:
            return tensor
        quantizer = [operands[f"{role}_scale"], operands[f"{role}_zero_point"]]
        codes = self.builder.add("QuantizeLinear", [tensor, *quantizer])
        return self.builder.add("DequantizeLinear", [codes, *quantizer])
