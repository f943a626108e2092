# SPDX-License-Identifier: Apache-2.0
"""The function body of StofAttention in standard ONNX: what runs, slowly, where the library is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from stof.errors import UnsupportedError
from stof.graph import DOMAIN
from stof.mask.to_onnx import Builder, Sizes, mask_nodes
from stof.site import EmptyRows, Layout

OP = "StofAttention"


@dataclass(frozen=True)
class Variant:
    """Everything of a call that its body depends on, except ``scale``, which it reads as an attribute."""

    expression: str
    layouts: tuple[Layout, Layout, Layout, Layout]
    num_heads: int
    kv_num_heads: int
    head_size: int
    value_head_size: int
    empty_rows: EmptyRows
    query_offset: int
    softcap: float
    roles: tuple[str, ...]  # of the operand slots; "unused" where this variant does not read one
    dtype: int

    @property
    def shape(self) -> tuple[object, ...]:
        """What the shapes of a call's tensors follow from."""
        return (self.layouts, self.num_heads, self.kv_num_heads, self.head_size, self.value_head_size)


def make_function(variants: Sequence[Variant], opset: int) -> onnx.FunctionProto:
    """The local function ``stof::StofAttention`` over a model's distinct variants; ``mask_id`` selects one.

    A runtime that inlines the function infers types and shapes of every branch for every call, also of those that it
    never takes. So slots are read with a cast, and where variants differ in shape the inputs' ranks are hidden.

    Raises:
        UnsupportedError: for variants of different element types below opset 15, which has no CastLike.
    """
    slots = len(variants[0].roles)
    inputs = ["query", "key", "value", *[f"operand{i}" for i in range(slots)]]
    one_type = len({v.dtype for v in variants}) == 1
    if not one_type and opset < 15:
        raise UnsupportedError(f"sites of different element types need opset 15 for their function body, found {opset}")
    style = _Style(opset, len({v.shape for v in variants}) > 1, one_type)
    nodes = _select(variants, 0, style)
    nodes.append(helper.make_node("Identity", ["variant0_out"], ["output"], name="output"))
    return helper.make_function(
        DOMAIN, OP, inputs, ["output"], nodes, [helper.make_opsetid("", opset)], ["mask_id", "scale"]
    )


@dataclass(frozen=True)
class _Style:
    opset: int
    hidden: bool  # ranks of the inputs are kept from shape inference
    one_type: bool


def _select(variants: Sequence[Variant], i: int, style: _Style) -> list[onnx.NodeProto]:
    """Nodes that write ``variant<i>_out``: variant i if mask_id is i, else the next ones."""
    body = _Body(variants[i], Builder(style.opset, f"v{i}_"), style).build()
    out = f"variant{i}_out"
    if i + 1 == len(variants):
        return [*body.nodes, helper.make_node("Identity", [body.result], [out], name=out)]
    wanted = helper.make_node("Constant", [], [f"s{i}_id"], name=f"s{i}_id")
    wanted.attribute.append(_reference("value_int", "mask_id", onnx.AttributeProto.INT))
    number = helper.make_node("Constant", [], [f"s{i}_i"], name=f"s{i}_i", value_int=i)
    same = helper.make_node("Equal", [f"s{i}_id", f"s{i}_i"], [f"s{i}_same"], name=f"s{i}_same")
    dtype = variants[i].dtype if style.one_type else None
    then = _branch(body.nodes, body.result, f"then{i}", dtype)
    other = _branch(_select(variants, i + 1, style), f"variant{i + 1}_out", f"else{i}", dtype)
    choose = helper.make_node("If", [f"s{i}_same"], [out], name=out, then_branch=then, else_branch=other)
    return [wanted, number, same, choose]


def _branch(nodes: Sequence[onnx.NodeProto], result: str, name: str, dtype: int | None) -> onnx.GraphProto:
    # An output that is not the direct product of a node of the branch is refused by some runtimes.
    out = f"{name}_result"
    last = helper.make_node("Identity", [result], [out], name=out)
    value = onnx.ValueInfoProto(name=out) if dtype is None else helper.make_tensor_value_info(out, dtype, None)
    return helper.make_graph([*nodes, last], name, [], [value])


def _reference(name: str, target: str, kind: int) -> onnx.AttributeProto:
    attribute = onnx.AttributeProto()
    attribute.name = name
    attribute.ref_attr_name = target
    attribute.type = kind  # type: ignore[assignment]
    return attribute


class _Body:
    """The nodes of one variant."""

    def __init__(self, variant: Variant, builder: Builder, style: _Style) -> None:
        self.variant = variant
        self.builder = builder
        self.style = style
        self.result = ""

    @property
    def nodes(self) -> list[onnx.NodeProto]:
        return self.builder.nodes

    def build(self) -> _Body:
        v, b = self.variant, self.builder
        query = self._bhsd("query", v.layouts[0], v.num_heads, v.head_size)
        key = self._repeat(self._bhsd("key", v.layouts[1], v.kv_num_heads, v.head_size), v.head_size)
        value = self._repeat(self._bhsd("value", v.layouts[2], v.kv_num_heads, v.value_head_size), v.value_head_size)
        scale = b.name()
        constant = helper.make_node("Constant", [], [scale], name=scale)
        constant.attribute.append(_reference("value_float", "scale", onnx.AttributeProto.FLOAT))
        b.nodes.append(constant)
        scores = b.add("MatMul", [b.add("Mul", [query, scale]), b.add("Transpose", [key], perm=[0, 1, 3, 2])])
        if v.softcap > 0:
            cap = b.constant(v.softcap, np.float32)
            scores = b.add("Mul", [b.add("Tanh", [b.add("Div", [scores, cap])]), cap])
        sizes = self._sizes(query, key)
        operands = {r: f"operand{i}" for i, r in enumerate(v.roles) if r != "unused"}
        weights = self._weights(scores, sizes, operands)
        self.result = self._output(b.add("MatMul", [weights, value]))
        return self

    def _bhsd(self, tensor: str, layout: Layout, heads: int, size: int) -> str:
        b = self.builder
        if self.style.hidden:
            tensor = self._hide(tensor)
        if layout is Layout.BSN:
            tensor = b.add("Reshape", [tensor, b.constant([0, 0, heads, size])])
        if layout is not Layout.BHSD:
            tensor = b.add("Transpose", [tensor], perm=[0, 2, 1, 3])
        return b.add("Cast", [tensor], to=TensorProto.FLOAT)

    def _hide(self, tensor: str) -> str:
        """The tensor through an If of which the other branch has another rank: shape inference learns nothing."""
        b = self.builder
        out = b.name()
        same = helper.make_node("Identity", [tensor], [f"{out}_same"], name=f"{out}_same")
        flat = helper.make_node("Constant", [], [f"{out}_one"], name=f"{out}_one", value_ints=[-1])
        other = helper.make_node("Reshape", [tensor, f"{out}_one"], [f"{out}_flat"], name=f"{out}_flat")
        dtype = self.variant.dtype if self.style.one_type else None
        then = _branch([same], f"{out}_same", f"{out}_then", dtype)
        otherwise = _branch([flat, other], f"{out}_flat", f"{out}_else", dtype)
        always = b.constant(True, np.bool_)
        b.nodes.append(helper.make_node("If", [always], [out], name=out, then_branch=then, else_branch=otherwise))
        return out

    def _repeat(self, tensor: str, size: int) -> str:
        v, b = self.variant, self.builder
        count = v.num_heads // v.kv_num_heads
        if count == 1:
            return tensor
        wide = b.add("Expand", [b.unsqueeze(tensor, [2]), b.constant([1, 1, count, 1, 1])])
        return b.add("Reshape", [wide, b.constant([0, v.num_heads, -1, size])])

    def _sizes(self, query: str, key: str) -> Sizes:
        b = self.builder
        q, k = b.add("Shape", [query]), b.add("Shape", [key])
        batch, heads, rows = (b.add("Gather", [q, b.constant(i)]) for i in (0, 1, 2))
        keys = b.add("Gather", [k, b.constant(2)])
        past = b.add("Sub", [keys, rows]) if self.variant.query_offset else b.constant(0)
        return Sizes(batch, heads, rows, keys, past)

    def _weights(self, scores: str, sizes: Sizes, operands: dict[str, str]) -> str:
        v, b = self.variant, self.builder
        minus = b.constant(-np.inf, np.float32)
        if "bias" in operands:
            scores = b.add("Add", [scores, b.add("Cast", [operands["bias"]], to=TensorProto.FLOAT)])
        masked = scores
        if v.expression:
            masked = b.add("Where", [mask_nodes(b, v.expression, sizes, operands), scores, minus])
        weights = b.add("Softmax", [masked], axis=-1)
        if (not v.expression and "bias" not in operands) or v.empty_rows is EmptyRows.NAN:
            return weights
        empty = b.add("Equal", [b.reduce_max(masked, -1), minus])
        if v.empty_rows is EmptyRows.ZERO:
            fill = b.constant(0, np.float32)
        elif v.empty_rows is EmptyRows.MEAN:
            fill = b.add("Reciprocal", [b.add("Cast", [sizes.T], to=TensorProto.FLOAT)])
        else:
            fill = b.add("Softmax", [scores], axis=-1)
        return b.add("Where", [empty, fill, weights])

    def _output(self, tensor: str) -> str:
        v, b = self.variant, self.builder
        if not self.style.one_type:
            tensor = b.add("CastLike", [tensor, "query"])
        elif v.dtype != TensorProto.FLOAT:
            tensor = b.add("Cast", [tensor], to=v.dtype)
        layout = v.layouts[3]
        if layout is not Layout.BHSD:
            tensor = b.add("Transpose", [tensor], perm=[0, 2, 1, 3])
        if layout is Layout.BSN:
            tensor = b.add("Reshape", [tensor, b.constant([0, 0, v.num_heads * v.value_head_size])])
        return tensor
