# SPDX-License-Identifier: Apache-2.0
"""Narrow models in fp16 with masks of many kinds: what the tests optimize for TensorRT, and build."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnxruntime.transformers.float16 import convert_float_to_float16

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "models"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runtimes"))
import prepare

import build
from stof.mask.to_onnx import Builder, Sizes, mask_nodes

LENGTH = 128  # of the model whose mask is a table
BLOCK = 16
LONGFORMER = "abs(q - k) <= 8 or k < 4 or q < 4"
BIGBIRD = f"table0[q // {BLOCK}, k // {BLOCK}]"


def half(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model in fp16, as ONNX Runtime's own tool converts it."""
    converted: onnx.ModelProto = convert_float_to_float16(model, disable_shape_infer=True)
    return converted


def masked(
    model: onnx.ModelProto,
    expression: str,
    tables: Mapping[str, np.ndarray] | None = None,
    every: int = 1,
    first: int = 0,
) -> onnx.ModelProto:
    """A copy in which a mask, made by the nodes of an expression, is added to the scores of every n-th softmax, from one on."""
    tables = tables or {}
    softmaxes = [n.output[0] for n in model.graph.node if n.op_type == "Softmax"][first::every]
    edited = onnx.ModelProto()
    edited.CopyFrom(model)
    graph = edited.graph
    opset = next(o.version for o in edited.opset_import if o.domain in ("", "ai.onnx"))
    builder = Builder(opset, f"structure{first}_")
    ids = graph.input[0].name
    shape = builder.add("Shape", [ids])
    batch, length = (builder.add("Gather", [shape, builder.constant(i)]) for i in (0, 1))
    sizes = Sizes(batch, builder.constant(4), length, length, builder.constant(0))
    allowed = mask_nodes(builder, expression, sizes, {n: n for n in tables})
    zero, minus = (builder.constant(x, np.float32) for x in (0.0, -np.inf))
    added = builder.unsqueeze(builder.add("Where", [allowed, zero, minus]), [0, 1])
    graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in tables.items())
    nodes = list(builder.nodes)
    for node in graph.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        if node.output[0] in softmaxes:
            scores = f"{node.output[0]}_structured"
            nodes.append(helper.make_node("Add", [node.input[0], added], [scores], name=scores))
            copy.input[0] = scores
        nodes.append(copy)
    del graph.node[:]
    graph.node.extend(nodes)
    onnx.checker.check_model(edited)
    return edited


def fixed(model: onnx.ModelProto, length: int) -> onnx.ModelProto:
    """A copy whose inputs are [1, length]."""
    edited = onnx.ModelProto()
    edited.CopyFrom(model)
    for value in edited.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, (1, length), strict=True):
            dim.Clear()
            dim.dim_value = size
    del edited.graph.value_info[:]
    return edited


def bigbird_blocks(blocks: int) -> np.ndarray:
    """Blocks that may attend to each other: a band, the first ones, and random ones. Booleans [blocks, blocks]."""
    rng = np.random.default_rng(5)
    at = np.arange(blocks)
    allowed = np.abs(at[:, None] - at[None, :]) <= 1
    allowed[0, :] = allowed[:, 0] = True
    allowed[at, rng.integers(0, blocks, blocks)] = True
    return allowed


def bert() -> onnx.ModelProto:
    """A narrow BERT in fp32."""
    return build.fill(build.load_graph("narrow/bert.torchscript.eager"), seed=2)


def modernbert(exporter: str = "dynamo.sdpa") -> onnx.ModelProto:
    """A narrow ModernBERT in fp32."""
    return build.fill(build.load_graph(f"narrow/modernbert.{exporter}"), seed=3)


def three_masks() -> onnx.ModelProto:
    """ModernBERT with two windows, and with Longformer's mask in its global layers (every third one)."""
    return masked(prepare.with_third_mask(modernbert()), LONGFORMER, every=3)


def models() -> dict[str, onnx.ModelProto]:
    """The originals by name."""
    mistral = build.fill(build.load_graph("narrow/mistral.torchscript.sdpa"), seed=4)
    table = {"table0": bigbird_blocks(LENGTH // BLOCK)}
    return {
        "modernbert": half(modernbert()),
        "mistral": half(mistral),
        "longformer": half(masked(bert(), LONGFORMER)),
        "bigbird": half(masked(fixed(bert(), LENGTH), BIGBIRD, table)),
        "mixed": half(masked(masked(fixed(bert(), LENGTH), BIGBIRD, table, 2), "abs(q - k) <= 8", None, 2, 1)),
        "three-masks": half(three_masks()),
    }


def feeds(model: onnx.ModelProto, batch: int, length: int) -> dict[str, np.ndarray]:
    """Random ids, and a mask with padding left of the first row and right of the second."""
    found = {}
    made = prepare.feeds(model, batch, length, length // 5, length // 3)
    for value in model.graph.input:
        kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        found[value.name] = (made[value.name] % 2 if "type" in value.name else made[value.name]).astype(kind)
    return found
