# SPDX-License-Identifier: Apache-2.0
"""A pattern as the attention_bias of a GroupQueryAttention: standard ONNX nodes, a large negative number for what it forbids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from stof.graph.node_builder import Builder
from stof.mask.expression import MaskExpression
from stof.mask.expression_nodes import B, Binary, Lookup, Q
from stof.mask.to_onnx import ScoreSizes, emit_mask

# Finite, so that a row of padding, which nobody reads, does not become NaN.
_FORBIDDING = {int(TensorProto.FLOAT16): -65504.0}
_OTHERS = -1e30
_BEFORE = Lookup("lengths", (B,))  # the keys of each sequence before this step


@dataclass(frozen=True)
class StepTensors:
    """Tensors of a GroupQueryAttention that say where its queries are: its inputs of these names."""

    query: str
    seqlens_k: str
    total: str


def emit_pattern_bias(
    builder: Builder, mask: MaskExpression, tensors: StepTensors, tables: Mapping[str, str], num_heads: int, dtype: int
) -> str:
    """Nodes that compute the bias [B, H or 1, S, total] of a mask over absolute positions; returns the tensor's name.

    Args:
        builder: gets the nodes.
        mask: reads h, q, k, S, P and tables; P is of each sequence.
        tensors: of the step.
        tables: the tensor of each table.
        num_heads: H.
        dtype: ONNX element type of the bias.
    """
    b = builder
    start = len(b.nodes)
    queries = b.add("Gather", [b.add("Shape", [tensors.query]), b.constant(1)], axis=0)
    batch = b.add("Gather", [b.add("Shape", [tensors.seqlens_k]), b.constant(0)], axis=0)
    scalar = b.constant(np.zeros(0, np.int64))
    total = b.add("Reshape", [b.add("Cast", [tensors.total], to=TensorProto.INT64), scalar])
    keys = b.add("Add", [b.add("Cast", [tensors.seqlens_k], to=TensorProto.INT64), b.constant(1)])
    behind = b.add("Sub", [keys, queries])
    first = b.add("Equal", [total, queries])  # a first prompt: no sequence has a past
    before = b.add("Where", [first, b.constant(0), behind])
    absolute = mask.substitute({"q": Binary("+", _BEFORE, Q), "P": _BEFORE})
    sizes = ScoreSizes(B=batch, H=b.constant(num_heads), S=queries, T=total, P=b.constant(0))
    allowed = emit_mask(b, absolute.root, sizes, {"lengths": before, **tables})
    bias = emit_bias(b, allowed, dtype)
    b.nodes[start:] = live_nodes(b.nodes[start:], bias)
    return bias


def live_nodes(nodes: Sequence[onnx.NodeProto], output: str) -> list[onnx.NodeProto]:
    """The nodes that an output depends on; runtimes warn of sizes that the mask does not read."""
    live = {output}
    kept = []
    for node in reversed(nodes):
        if live.intersection(node.output):
            live.update(node.input)
            kept.append(node)
    return kept[::-1]


def emit_bias(builder: Builder, allowed: str, dtype: int) -> str:
    """Nodes that give 0 where a condition holds, else a large negative number; ``dtype`` is their ONNX element type."""
    selected = TensorProto.FLOAT if dtype == TensorProto.BFLOAT16 else dtype  # few runtimes have Where for bf16
    numpy_type = helper.tensor_dtype_to_np_dtype(selected)
    low = builder.constant(_FORBIDDING.get(dtype, _OTHERS), numpy_type)
    bias = builder.add("Where", [allowed, builder.constant(0, numpy_type), low])
    return bias if selected == dtype else builder.add("Cast", [bias], to=dtype)
