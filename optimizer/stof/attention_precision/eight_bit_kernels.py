# SPDX-License-Identifier: Apache-2.0
"""Which attentions the CUDA kernels with 8-bit operands take, but for the device (eight_bits.py).

These are nodes of StofAttention, and prompts of StofCachedAttention. It mirrors ``Int8PrecisionOf`` of
cuda/attention/int8/precision.cc, which decides in a run. Change both together. Not mirrored, and run in full precision: padding
with ``empty_rows`` "all" on devices other than 9.0, and first prompts over a cache whose key columns are gathered.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto

from stof.cached_attention.site import INPUT_INDEX, QUANTIZED
from stof.cached_attention.site import OP as CACHED
from stof.graph.node_fields import PlainValue, input_of, plain_attributes_of
from stof.mask.site import Layout
from stof.runtime.limits import takes_attribute
from stof.symbolic import Symbolic

CAPABILITY = 90  # whose kernels have fp8 as well, and whose times are known
LEAST_CAPABILITY = 80  # scores in int8
HEAD_SIZES = (64, 128)
MOST_DECODED = 16  # queries, which decode kernels compute
_ATTRIBUTE = "precision"
_TYPES: dict[int, str] = {TensorProto.FLOAT: "fp32", TensorProto.DOUBLE: "fp64"}
_THRESHOLDS = {"skip_threshold": "it skips by score", "block_threshold": "it chooses key blocks"}


def why_not_in_8_bits(node: onnx.NodeProto, facts: Symbolic) -> str:
    """Why no kernel computes an attention with 8-bit operands; empty where one does, but for runs of few queries.

    Args:
        node: one of stof's operators.
        facts: of its model.
    """
    if not takes_attribute(node.op_type, _ATTRIBUTE):
        return f"no kernel of {node.op_type} has 8-bit operands"
    dtype = facts.dtype(node.input[0])
    if dtype not in (0, TensorProto.FLOAT16, TensorProto.BFLOAT16):
        return f"its inputs are {_TYPES.get(dtype) or TensorProto.DataType.Name(dtype)}, expected fp16 or bf16"
    attributes = plain_attributes_of(node)
    if reason := _why_not_its_cache(node, facts):
        return reason
    sizes = [_size_of_operand(facts, node, attributes, i) for i in (0, 2)]
    if node.op_type == CACHED:
        sizes = [_size_of_cached_head(facts, node, attributes)] * 2
    if sizes[0] not in HEAD_SIZES or sizes[0] != sizes[1]:
        shown = " / ".join(str(size or "?") for size in sizes)
        return f"its head size is {shown}, expected 64 or 128, the same of queries and values"
    queries = _count_queries(facts, node, attributes)
    if queries is not None and queries <= MOST_DECODED:
        return f"it has {queries} queries, which decode kernels compute, expected more than {MOST_DECODED}"
    if node.op_type == CACHED and not attributes.get("scale"):  # 0 is 1/sqrt(D) here, and refused as a scale below
        attributes.pop("scale", None)
    return _why_not_its_scores(attributes)


def _why_not_its_cache(node: onnx.NodeProto, facts: Symbolic) -> str:
    """Why the kernels cannot read the cache of a node, or its scores have a bias; empty where it has no cache."""
    if node.op_type != CACHED:
        return ""
    past = input_of(node, INPUT_INDEX["past_key"])
    if past and (stored := QUANTIZED.get(facts.dtype(past))):
        return f"its cache is quantized ({stored}), expected one of the type of its inputs"
    if input_of(node, INPUT_INDEX["attention_bias"]):
        return "its scores have terms besides products of queries and keys (attention_bias)"
    return ""


def _why_not_its_scores(attributes: dict[str, PlainValue]) -> str:
    """Why the kernels cannot compute the scores; empty where they can."""
    roles = str(attributes.get("operands", "")).split()
    if added := sorted(role for role in roles if role == "bias" or role.startswith("relative_")):
        return f"its scores have terms besides products of queries and keys ({added[0]})"
    if softcap := attributes.get("softcap", 0.0):
        return f"its scores have a softcap ({softcap:g})"
    scale = attributes.get("scale", 1.0)
    if isinstance(scale, int | float) and scale <= 0:
        return f"its scores have the scale {scale:g}, expected a positive one"
    return next((words for name, words in _THRESHOLDS.items() if attributes.get(name, 0.0)), "")


def _layout_of(attributes: dict[str, PlainValue], operand: int) -> str:
    layouts = str(attributes.get("layout", Layout.BHSD.value)).split()
    return layouts[operand if len(layouts) > 1 else 0]


def _size_of_operand(facts: Symbolic, node: onnx.NodeProto, attributes: dict[str, PlainValue], operand: int) -> int:
    """The head size of the query (0) or the value (2); 0: not known."""
    shape = facts.shape(node.input[operand])
    width = shape[-1].constant if shape else None
    if not width:
        return 0
    if _layout_of(attributes, operand) != Layout.BSN.value:
        return int(width)
    packed = attributes.get("packed")
    heads = attributes.get("num_heads" if operand == 0 else "kv_num_heads", attributes.get("num_heads", 0))
    if isinstance(packed, list):  # the tensor has heads of others as well
        heads = packed[2 * operand + 1]
    return int(width) // heads if isinstance(heads, int) and heads > 0 else 0


def _size_of_cached_head(facts: Symbolic, node: onnx.NodeProto, attributes: dict[str, PlainValue]) -> int:
    """The head size of a StofCachedAttention, by its cache or else by its query; 0: not known."""
    past, query = (input_of(node, INPUT_INDEX[name]) for name in ("past_key", "query"))
    shape = facts.shape(past) if past else None
    if shape and (size := shape[-1].constant):
        return int(size)
    shape = facts.shape(query)
    width = shape[-1].constant if shape else None
    heads, kv_heads = (attributes.get(name, 0) for name in ("num_heads", "kv_num_heads"))
    if not width or not isinstance(heads, int) or not isinstance(kv_heads, int):
        return 0
    return int(width) // max(1, heads if input_of(node, INPUT_INDEX["key"]) else heads + 2 * kv_heads)


def _count_queries(facts: Symbolic, node: onnx.NodeProto, attributes: dict[str, PlainValue]) -> int | None:
    """The number of queries of a sequence; None where runs decide it."""
    shape = facts.shape(node.input[0])
    axis = 2 if node.op_type != CACHED and _layout_of(attributes, 0) == Layout.BHSD.value else 1
    count = shape[axis].constant if shape and len(shape) > axis else None
    return None if count is None else int(count)
