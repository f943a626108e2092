# SPDX-License-Identifier: Apache-2.0
"""Narrow models with masks of many kinds: what the tests optimize for TensorRT, and build."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper, parser
from onnxruntime.transformers.float16 import convert_float_to_float16

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "models"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runtimes"))
import prepare

import build
from stof.graph.node_builder import Builder
from stof.mask.expression import MaskExpression
from stof.mask.to_onnx import ScoreSizes

LENGTH = 128  # of the model whose mask is a table
BLOCK = 16
LONGFORMER = "abs(q - k) <= 8 or k < 4 or q < 4"
BIGBIRD = f"table0[q // {BLOCK}, k // {BLOCK}]"
DOCUMENTS = "segment_q[b, q] == segment_k[b, k]"


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
    vectors: Mapping[str, str] | None = None,
) -> onnx.ModelProto:
    """A copy in which a mask, made by the nodes of an expression, is added to the scores of every n-th softmax, from one on.

    ``vectors`` are inputs of the model by what the expression calls them.
    """
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
    sizes = ScoreSizes(batch, builder.constant(4), length, length, builder.constant(0))
    operands = {**{n: n for n in tables}, **(vectors or {})}
    allowed = MaskExpression.parse(expression, tables).to_onnx(builder, sizes, operands)
    zero, minus = (builder.constant(x, np.float32) for x in (0.0, -np.inf))
    added = builder.add("Where", [allowed, zero, minus])
    if not vectors:  # else it has an axis of batches
        added = builder.unsqueeze(added, [0, 1])
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


def with_documents(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with an input that says which document of the row a token belongs to; documents do not see each other."""
    edited = onnx.ModelProto()
    edited.CopyFrom(model)
    dims = [d.dim_param for d in model.graph.input[0].type.tensor_type.shape.dim]
    edited.graph.input.append(helper.make_tensor_value_info("segment_ids", onnx.TensorProto.INT64, dims))
    return masked(edited, DOCUMENTS, vectors={"segment_q": "segment_ids", "segment_k": "segment_ids"})


def bert() -> onnx.ModelProto:
    """A narrow BERT in fp32."""
    return build.fill(build.load_graph("narrow/bert.torchscript.eager"), seed=2)


def modernbert(exporter: str = "dynamo.sdpa") -> onnx.ModelProto:
    """A narrow ModernBERT in fp32."""
    return build.fill(build.load_graph(f"narrow/modernbert.{exporter}"), seed=3)


def three_masks() -> onnx.ModelProto:
    """ModernBERT with two windows, and with Longformer's mask in its global layers (every third one)."""
    return masked(prepare.with_third_mask(modernbert()), LONGFORMER, every=3)


def head_norms(heads: int = 4, groups: int = 4, size: int = 16, width: int = 64) -> onnx.ModelProto:
    """Windowed attention in fp16 whose queries and keys, of one packed product, have norms and a rotary embedding."""
    q, k = heads * size, groups * size

    def prepared(x: str, own: str, count: str) -> str:
        return f"""
          {own}split = Reshape (x{x}, {count})
          {own}raw = Transpose <perm: ints = [0, 2, 1, 3]> ({own}split)
          {own}square = Mul ({own}raw, {own}raw)
          {own}mean = ReduceMean <keepdims: int = 1> ({own}square, last)
          {own}shifted = Add ({own}mean, epsilon)
          {own}root = Sqrt ({own}shifted)
          {own}unit = Div ({own}raw, {own}root)
          {own}n = Mul ({own}unit, {own}weight)
          {own}a, {own}b = Split <axis: int = -1> ({own}n, halves)
          {own}minus = Neg ({own}b)
          {own}turned = Concat <axis: int = -1> ({own}minus, {own}a)
          {own}cos = Mul ({own}n, cos)
          {own}sin = Mul ({own}turned, sin)
          {own} = Add ({own}cos, {own}sin)"""

    text = f"""<ir_version: 8, opset_import: ["" : 18]>
      g (float16[B, S, {width}] input_ids, float16[S, {size}] cos, float16[S, {size}] sin) => (float16[B, S, {width}] y) {{
          packed = MatMul (input_ids, w)
          xq, xk, xv = Split <axis: int = -1> (packed, parts)
          {prepared("q", "q", "q_shape")}
          {prepared("k", "k", "k_shape")}
          vsplit = Reshape (xv, k_shape)
          v = Transpose <perm: ints = [0, 2, 1, 3]> (vsplit)
          shape = Shape (input_ids)
          length = Gather (shape, one)
          at = Range (zero, length, one)
          column = Unsqueeze (at, first)
          row = Unsqueeze (at, second)
          apart = Sub (column, row)
          far = Abs (apart)
          near = LessOrEqual (far, limit)
          bias = Where (near, nothing, lowest)
          k5 = Unsqueeze (k, third)
          kwide = Expand (k5, repeat)
          kall = Reshape (kwide, heads)
          v5 = Unsqueeze (v, third)
          vwide = Expand (v5, repeat)
          vall = Reshape (vwide, heads)
          kt = Transpose <perm: ints = [0, 1, 3, 2]> (kall)
          scores = MatMul (q, kt)
          masked = Add (scores, bias)
          weights = Softmax <axis: int = -1> (masked)
          o = MatMul (weights, vall)
          ot = Transpose <perm: ints = [0, 2, 1, 3]> (o)
          flat = Reshape (ot, flat_shape)
          y = MatMul (flat, wo)
      }}"""
    model = parser.parse_model(text)
    rng = np.random.default_rng(6)

    def weight(name: str, *shape: int) -> None:
        model.graph.initializer.append(numpy_helper.from_array(rng.normal(0, 0.1, shape).astype(np.float16), name))

    weight("w", width, q + 2 * k)
    weight("wo", q, width)
    weight("qweight", size)
    weight("kweight", size)
    numbers = {
        "parts": [q, k, k],
        "q_shape": [0, 0, heads, size],
        "k_shape": [0, 0, groups, size],
        "halves": [size // 2] * 2,
        "repeat": [1, 1, heads // groups, 1, 1],
        "heads": [0, heads, -1, size],
        "flat_shape": [0, 0, q],
        "last": [-1],
        "first": [0],
        "second": [1],
        "third": [2],
        "zero": 0,
        "one": 1,
        "limit": 16,
    }
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(v, np.int64), n) for n, v in numbers.items())
    for name, value in (("epsilon", 1e-5), ("lowest", -10000.0), ("nothing", 0.0)):
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value, np.float16), name))
    return model


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
        "documents": half(with_documents(bert())),
        "fp32": masked(bert(), LONGFORMER),
    }


def feeds(model: onnx.ModelProto, batch: int, length: int) -> dict[str, np.ndarray]:
    """Random ids, and a mask with padding left of the first row and right of the second."""
    found = {}
    made = prepare.feeds(model, batch, length, length // 5, length // 3)
    for value in model.graph.input:
        kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        kinds = 2 if "type" in value.name else 3 if "segment" in value.name else 1 << 30
        found[value.name] = (made[value.name] % kinds).astype(kind)
    return found
