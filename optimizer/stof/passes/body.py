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
    """Everything of a call that its body depends on, except ``scale`` and head counts, which it reads as attributes."""

    expression: str
    layouts: tuple[Layout, Layout, Layout, Layout]
    grouped: bool  # key heads may be fewer than query heads
    empty_rows: EmptyRows
    query_offset: int
    softcap: float
    roles: tuple[str, ...]  # of the operand slots; "unused" where this variant does not read one
    dtype: int


def make_function(variants: Sequence[Variant], opset: int) -> onnx.FunctionProto:
    """The local function ``stof::StofAttention`` over a model's distinct variants; ``mask_id`` selects one.

    A runtime that inlines the function infers types and shapes of every branch for every call, also of those that it
    never takes. So slots are read with a cast, head counts and sizes are found at run time, and the layouts of all
    variants must be the same.

    Raises:
        UnsupportedError: for variants of different element types below opset 15, which has no CastLike.
        ValueError: for variants whose layouts or grouping differ.
    """
    if len({(v.layouts, v.grouped) for v in variants}) > 1:
        raise ValueError("variants of one function body need the same layouts and the same grouping")
    slots = len(variants[0].roles)
    inputs = ["query", "key", "value", *[f"operand{i}" for i in range(slots)]]
    one_type = len({v.dtype for v in variants}) == 1
    if not one_type and opset < 15:
        raise UnsupportedError(f"sites of different element types need opset 15 for their function body, found {opset}")
    nodes = _select(variants, 0, _Style(opset, one_type))
    nodes.append(helper.make_node("Identity", ["variant0_out"], ["output"], name="output"))
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_function(DOMAIN, OP, inputs, ["output"], nodes, opsets, list(_READ))


# The attributes that the body reads; every call gives them.
_READ = ("mask_id", "scale", "num_heads", "kv_num_heads")


@dataclass(frozen=True)
class _Style:
    opset: int
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
        heads, groups = (
            self._attribute(n, "value_int", onnx.AttributeProto.INT) for n in ("num_heads", "kv_num_heads")
        )
        query = self._bhsd("query", v.layouts[0], heads)
        key, value = (self._bhsd(n, v.layouts[i], groups) for n, i in (("key", 1), ("value", 2)))
        if v.grouped:
            count = b.add("Div", [heads, groups])
            key, value = (self._repeat(t, heads, count) for t in (key, value))
        scale = self._attribute("scale", "value_float", onnx.AttributeProto.FLOAT)
        scores = b.add("MatMul", [b.add("Mul", [query, scale]), b.add("Transpose", [key], perm=[0, 1, 3, 2])])
        if v.softcap > 0:
            cap = b.constant(v.softcap, np.float32)
            scores = b.add("Mul", [b.add("Tanh", [b.add("Div", [scores, cap])]), cap])
        sizes = self._sizes(query, key)
        operands = {r: f"operand{i}" for i, r in enumerate(v.roles) if r != "unused"}
        weights = self._weights(scores, sizes, operands)
        self.result = self._output(b.add("MatMul", [weights, value]), heads, value)
        return self

    def _attribute(self, target: str, field: str, kind: int) -> str:
        """An attribute of the call as a scalar."""
        name = self.builder.name()
        node = helper.make_node("Constant", [], [name], name=name)
        node.attribute.append(_reference(field, target, kind))
        self.builder.nodes.append(node)
        return name

    def _vector(self, *parts: str | list[int]) -> str:
        """A shape from scalars and numbers."""
        b = self.builder
        given = [b.constant(p) if isinstance(p, list) else b.unsqueeze(p, [0]) for p in parts]
        return b.add("Concat", given, axis=0)

    def _size(self, tensor: str, axis: int) -> str:
        b = self.builder
        return b.add("Gather", [b.add("Shape", [tensor]), b.constant(axis)])

    def _bhsd(self, tensor: str, layout: Layout, heads: str) -> str:
        b = self.builder
        if layout is Layout.BSN:
            # No -1: it is undefined beside a length of 0.
            size = b.add("Div", [self._size(tensor, 2), heads])
            tensor = b.add("Reshape", [tensor, self._vector([0, 0], heads, size)])
        if layout is not Layout.BHSD:
            tensor = b.add("Transpose", [tensor], perm=[0, 2, 1, 3])
        return b.add("Cast", [tensor], to=TensorProto.FLOAT)

    def _repeat(self, tensor: str, heads: str, count: str) -> str:
        """[B, G, T, D] with every head ``count`` times. By Gather, since sizes of 0 mean others to Reshape."""
        b = self.builder
        numbers = b.add("Range", [b.constant(0), heads, b.constant(1)])
        return b.add("Gather", [tensor, b.add("Div", [numbers, count])], axis=1)

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
        if "relative_bias" in operands:
            scores = b.add("Add", [scores, self._relative(operands["relative_bias"], sizes)])
        masked = scores
        if v.expression:
            masked = b.add("Where", [mask_nodes(b, v.expression, sizes, operands), scores, minus])
        if "sink" in operands:
            return self._beside_sink(masked, operands["sink"], sizes)
        weights = b.add("Softmax", [masked], axis=-1)
        biased = "bias" in operands or "relative_bias" in operands
        if (not v.expression and not biased) or v.empty_rows is EmptyRows.NAN:
            return weights
        empty = b.add("Equal", [b.reduce_max(masked, -1), minus])
        if v.empty_rows is EmptyRows.ZERO:
            fill = b.constant(0, np.float32)
        elif v.empty_rows is EmptyRows.MEAN:
            fill = b.add("Reciprocal", [b.add("Cast", [sizes.T], to=TensorProto.FLOAT)])
        else:
            fill = b.add("Softmax", [scores], axis=-1)
        return b.add("Where", [empty, fill, weights])

    def _relative(self, table: str, sizes: Sizes) -> str:
        """[H or 1, S, T] from a table [H or 1, L] by the distance of key and query."""
        b = self.builder
        table = b.add("Cast", [table], to=TensorProto.FLOAT)
        radius = b.add("Div", [self._size(table, 1), b.constant(2)])
        zero, one = b.constant(0), b.constant(1)
        keys = b.unsqueeze(b.add("Range", [zero, sizes.T, one]), [0])
        queries = b.add("Add", [b.add("Range", [zero, sizes.S, one]), sizes.P])
        distance = b.add("Sub", [keys, b.unsqueeze(queries, [1])])
        low = b.add("Neg", [radius])
        entry = b.add("Add", [b.add("Min", [b.add("Max", [distance, low]), radius]), radius])
        return b.add("Gather", [table, entry], axis=1)

    def _beside_sink(self, scores: str, sink: str, sizes: Sizes) -> str:
        """The softmax over a row's scores and its head's sink, without the sink's weight."""
        b = self.builder
        column = b.unsqueeze(b.add("Cast", [sink], to=TensorProto.FLOAT), [0, 2, 3])
        column = b.add("Expand", [column, self._vector(sizes.B, sizes.H, sizes.S, [1])])
        weights = b.add("Softmax", [b.add("Concat", [scores, column], axis=-1)], axis=-1)
        return b.add("Slice", [weights, b.constant([0]), b.unsqueeze(sizes.T, [0]), b.constant([-1])])

    def _output(self, tensor: str, heads: str, value: str) -> str:
        v, b = self.variant, self.builder
        if not self.style.one_type:
            tensor = b.add("CastLike", [tensor, "query"])
        elif v.dtype != TensorProto.FLOAT:
            tensor = b.add("Cast", [tensor], to=v.dtype)
        layout = v.layouts[3]
        if layout is not Layout.BHSD:
            tensor = b.add("Transpose", [tensor], perm=[0, 2, 1, 3])
        if layout is Layout.BSN:
            tensor = b.add("Reshape", [tensor, self._vector([0, 0], b.add("Mul", [heads, self._size(value, 3)]))])
        return tensor
