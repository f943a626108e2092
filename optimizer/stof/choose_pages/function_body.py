# SPDX-License-Identifier: Apache-2.0
"""The bounds of pages in the function body of StofCachedAttention: standard nodes, behind those that attend every page."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from stof.cached_attention.site import OP, OP_INPUTS, OP_OUTPUTS, PRESENT_BOUNDS
from stof.graph.index import DOMAIN
from stof.graph.node_builder import Builder

PAGE_ROWS = "page_rows"
_LARGEST = 3.0e38


def add_bounds(model: onnx.ModelProto, dtype: int) -> None:
    """Gives the operator's function input ``past_page_bounds`` and output ``present_page_bounds``, in place.

    All bounds are computed from the keys of the cache. Every call of the function has to have attribute ``page_rows``.

    Args:
        model: has the function.
        dtype: the element type of bounds, which is that of the caches. CastLike would need opset 15.
    """
    function = next(f for f in model.functions if (f.domain, f.name) == (DOMAIN, OP))
    opset = next(o.version for o in function.opset_import if o.domain in ("", "ai.onnx"))
    del function.input[:]
    function.input.extend(OP_INPUTS)
    del function.output[:]
    function.output.extend(OP_OUTPUTS)
    function.attribute.append(PAGE_ROWS)
    function.node.extend(_bounds_nodes(opset, dtype))


def _bounds_nodes(opset: int, dtype: int) -> list[onnx.NodeProto]:
    """Nodes that write the bounds [B, G, pages, 2, D] of the function's ``present_key`` [B, G, C, D]."""
    b = Builder(opset, "page_bounds_")
    scalar = b.constant(np.zeros(0, np.int64))
    rows = helper.make_node("Constant", [], [PAGE_ROWS], name=PAGE_ROWS)
    reference = rows.attribute.add()
    reference.name, reference.ref_attr_name, reference.type = "value_int", PAGE_ROWS, onnx.AttributeProto.INT
    # Few runtimes have the minimum of fp16 and bf16.
    keys = b.add("Cast", ["present_key"], to=TensorProto.FLOAT)
    shape = b.add("Shape", ["present_key"])
    capacity = b.add("Reshape", [b.add("Slice", [shape, b.constant([2]), b.constant([3])]), scalar])
    last = b.add("Sub", [b.add("Add", [capacity, PAGE_ROWS]), b.constant(1)])
    pages = b.add("Div", [last, PAGE_ROWS])
    padded = b.add("Mul", [pages, PAGE_ROWS])
    missing = b.add("Reshape", [b.add("Sub", [padded, capacity]), b.constant([1])])
    zeros = b.constant([0] * 6)
    pads = b.add("Concat", [zeros, missing, b.constant([0])], axis=0)
    keys = b.add("Pad", [keys, pads])
    # Rows behind the keys of a sequence may hold anything.
    count = b.add("Add", [b.add("Cast", ["seqlens_k"], to=TensorProto.INT64), b.constant(1)])
    positions = b.add("Range", [b.constant(0), padded, b.constant(1)])
    is_key = b.add("Less", [positions, b.unsqueeze(count, [1])])  # [B, C]
    is_key = b.unsqueeze(is_key, [1, 3])
    before = b.add("Slice", [shape, b.constant([0]), b.constant([2])])
    by_page = [b.unsqueeze(x, [0]) for x in (pages, PAGE_ROWS)]
    sizes = b.add("Concat", [before, *by_page, b.add("Slice", [shape, b.constant([3]), b.constant([4])])], axis=0)
    bounds = []
    for op, neutral in (("ReduceMin", _LARGEST), ("ReduceMax", -_LARGEST)):
        own = b.add("Where", [is_key, keys, b.constant(neutral, np.float32)])
        bounds.append(b.reduce(op, b.add("Reshape", [own, sizes]), 3))  # [B, G, pages, 1, D]
    both = b.add("Concat", bounds, axis=3)
    cast = helper.make_node("Cast", [both], [PRESENT_BOUNDS], name=PRESENT_BOUNDS, to=dtype)
    return [rows, *b.nodes, cast]
