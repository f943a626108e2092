# SPDX-License-Identifier: Apache-2.0
"""The function body of StofAttention in standard ONNX, which runs (slowly) where the library is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from stof.attention.relative_terms.body import RelativeProduct, ScoreVectors, emit_product, emit_values
from stof.errors import UnsupportedError
from stof.graph.index import DOMAIN
from stof.graph.node_builder import CAST_LIKE_OPSET, Builder
from stof.mask.expression import MaskExpression
from stof.mask.relative_roles import RELATIVE_BIAS, RELATIVE_BIAS_FACTOR, RELATIVE_VALUE
from stof.mask.site import EmptyRows, Layout
from stof.mask.to_onnx import ScoreSizes

OP = "StofAttention"


@dataclass(frozen=True)
class Variant:
    """What the body of a call depends on, except ``scale`` and head counts, which it reads as attributes."""

    expression: MaskExpression
    layouts: tuple[Layout, Layout, Layout, Layout]
    grouped: bool  # key heads may be fewer than query heads
    empty_rows: EmptyRows
    query_offset: int
    softcap: float
    roles: tuple[str, ...]  # of the operand slots; "unused": this variant does not read the slot
    dtype: int
    products: tuple[RelativeProduct, ...] = ()  # with rows by relative position


def make_attention_function(variants: Sequence[Variant], opset: int, lse: bool = False) -> onnx.FunctionProto:
    """The local function ``stof::StofAttention`` for the variants of a model; attribute ``mask_id`` selects one.

    A runtime that inlines the function infers types and shapes of every branch for every call. So slots are read with a
    cast, head counts and sizes are computed at run time, and all variants have the same layouts. Branches hold only the
    nodes from scores to weights: TensorRT's parser silently takes attribute references inside an ``If`` for 0.

    Args:
        variants: distinct; ``mask_id`` is the index.
        opset: of the standard domain.
        lse: whether the function has the second output ``lse``, for calls whose attribute ``results`` asks for it.

    Raises:
        UnsupportedError: for variants of different element types below opset 15, which has no CastLike.
        ValueError: for variants whose layouts or grouping differ.
    """
    if len({(v.layouts, v.grouped) for v in variants}) > 1:
        raise ValueError("variants of one function body need the same layouts and the same grouping")
    slots = len(variants[0].roles)
    inputs = ["query", "key", "value", *[f"operand{i}" for i in range(slots)]]
    dtypes = {v.dtype for v in variants}
    if len(dtypes) > 1 and opset < CAST_LIKE_OPSET:
        raise UnsupportedError(f"sites of different element types need opset 15 for their function body, found {opset}")
    frame = AttentionFrame(variants[0].layouts, variants[0].grouped, dtypes.pop() if len(dtypes) == 1 else None, opset)
    scores = frame.scores()
    vectors = frame.vectors() if any(v.products for v in variants) else None
    has_values = any(RELATIVE_VALUE in v.roles for v in variants)
    result_names = ["out", *(["added"] if has_values else []), *(["lse"] if lse else [])]
    weights = [VariantWeights(v, Builder(opset, f"v{i}_")) for i, v in enumerate(variants)]
    mask_id = frame.attribute("mask_id") if len(variants) > 1 else ""
    chosen = select_variant(weights, 0, (scores, vectors), mask_id, result_names)
    frame.builder.nodes += chosen
    frame.finish("variant0_out", "variant0_added" if has_values else "")
    if lse:
        frame.builder.nodes.append(helper.make_node("Identity", ["variant0_lse"], ["lse"], name="lse"))
    opsets = [helper.make_opsetid("", opset)]
    outputs = ["output", "lse"] if lse else ["output"]
    return helper.make_function(
        DOMAIN, OP, inputs, outputs, frame.builder.nodes, opsets, read_attributes(len(variants))
    )


def add_packed_inputs(
    function: onnx.FunctionProto, layouts: Sequence[str], before: Sequence[str]
) -> onnx.FunctionProto:
    """The function for calls with attribute ``packed``, whose query, key and value may lie in one packed tensor.

    Every call must have the attribute. The slices are nodes of the function itself, as all nodes that read attributes.

    Args:
        function: as ``make_attention_function`` gives it.
        layouts: of query, key and value at the calls.
        before: layouts that the function expects.
    """
    opset = next(e.version for e in function.opset_import if not e.domain)
    b = Builder(opset, "p_")
    numbers = b.name()
    b.nodes.append(attribute_constant(numbers, "value_ints", "packed", onnx.AttributeProto.INTS))
    sliced: dict[str, str] = {}
    for i, tensor in enumerate(("query", "key", "value")):
        if layouts[i] != Layout.BSN.value:
            continue  # not packed
        heads = b.name()
        target = "num_heads" if i == 0 else "kv_num_heads"
        b.nodes.append(attribute_constant(heads, "value_int", target, onnx.AttributeProto.INT))
        first, total = (b.add("Gather", [numbers, b.constant(2 * i + j)]) for j in range(2))
        size = b.add("Div", [_size(b, tensor, 2), total])
        start = b.add("Mul", [first, size])
        end = b.add("Mul", [b.add("Add", [first, heads]), size])
        limits = [b.unsqueeze(limit, [0]) for limit in (start, end)]
        sliced[tensor] = b.add("Slice", [tensor, *limits, b.constant([2])])
        if before[i] != Layout.BSN.value:
            sliced[tensor] = _split_last(b, sliced[tensor], heads, size)
        if before[i] == Layout.BHSD.value:
            sliced[tensor] = b.add("Transpose", [sliced[tensor]], perm=[0, 2, 1, 3])
    result = onnx.FunctionProto()
    result.CopyFrom(function)
    for node in result.node:
        for i, name in enumerate(node.input):
            node.input[i] = sliced.get(name, name)
    nodes = [*b.nodes, *(onnx.NodeProto.FromString(n.SerializeToString()) for n in result.node)]
    del result.node[:]
    result.node.extend(nodes)
    result.attribute.append("packed")
    return result


def attribute_constant(name: str, kind: str, target: str, type_: int) -> onnx.NodeProto:
    """A Constant whose value is an attribute of the call."""
    node = helper.make_node("Constant", [], [name], name=name)
    reference = node.attribute.add()
    reference.name, reference.ref_attr_name, reference.type = kind, target, type_
    return node


# The attributes that the body reads; every call gives them.
_READ = ("mask_id", "scale", "num_heads", "kv_num_heads")


def read_attributes(variants: int) -> list[str]:
    """The attributes that a body of so many variants reads."""
    return [a for a in _READ if a != "mask_id" or variants > 1]


def select_variant(
    weights: Sequence[VariantWeights],
    i: int,
    scores: tuple[str, ScoreVectors | None],
    mask_id: str,
    result_names: Sequence[str],
) -> list[onnx.NodeProto]:
    """Nodes that write the weights ``variant<i>_out``: those of variant i if mask_id is i, else those of a later one.

    With "lse" among ``result_names`` they also write ``variant<i>_lse``, and with "added" what weights make of rows.
    """
    body = weights[i]
    results = body.build(*scores, result_names)
    outs = [f"variant{i}_{word}" for word in result_names]
    if i + 1 == len(weights):
        written = [helper.make_node("Identity", [r], [o], name=o) for r, o in zip(results, outs, strict=True)]
        return [*body.builder.nodes, *written]
    number = helper.make_node("Constant", [], [f"s{i}_i"], name=f"s{i}_i", value_int=i)
    same = helper.make_node("Equal", [mask_id, f"s{i}_i"], [f"s{i}_same"], name=f"s{i}_same")
    then = make_branch(body.builder.nodes, results, f"then{i}")
    rest = select_variant(weights, i + 1, scores, mask_id, result_names)
    other = make_branch(rest, [f"variant{i + 1}_{word}" for word in result_names], f"else{i}")
    choose = helper.make_node("If", [f"s{i}_same"], outs, name=outs[0], then_branch=then, else_branch=other)
    return [number, same, choose]


def make_branch(nodes: Sequence[onnx.NodeProto], results: Sequence[str], name: str) -> onnx.GraphProto:
    """A branch of an If: nodes, and the tensors that it gives."""
    # Some runtimes refuse a branch output that no node of the branch writes.
    outs = [f"{name}_result{i}" for i in range(len(results))]
    last = [helper.make_node("Identity", [r], [o], name=o) for r, o in zip(results, outs, strict=True)]
    values = [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in outs]
    return helper.make_graph([*nodes, *last], name, [], values)


class AttentionFrame:
    """The nodes that all variants share: from query and key to scores, and from weights and value to the output."""

    def __init__(
        self, layouts: tuple[Layout, ...], grouped: bool, dtype: int | None, opset: int, output_type: str = "query"
    ) -> None:
        self.layouts = layouts
        self.grouped = grouped
        self.dtype = dtype  # None: as the query's
        self.output_type = output_type  # the tensor whose type the output has; empty: ``dtype``
        self.builder = Builder(opset, "f_")
        self.heads = self.attribute("num_heads")
        self.value = self.query = self.key = self.scale = ""

    def attribute(self, target: str) -> str:
        """An attribute of the call as a scalar."""
        name = self.builder.name()
        real = target == "scale"
        type_ = onnx.AttributeProto.FLOAT if real else onnx.AttributeProto.INT
        self.builder.nodes.append(attribute_constant(name, "value_float" if real else "value_int", target, type_))
        return name

    def scores(self) -> str:
        """Nodes for query @ key^T times the scale, [B, H, S, T] in fp32; returns their name."""
        b = self.builder
        query, key = self.lay_out_heads("query", "key", "value")
        self.key, self.scale = key, self.attribute("scale")
        self.query = b.add("Mul", [query, self.scale])
        return b.add("MatMul", [self.query, b.add("Transpose", [key], perm=[0, 1, 3, 2])])

    def lay_out_heads(self, query: str, key: str, value: str) -> tuple[str, str]:
        """Query and key as [B, H, .., D] in fp32, and likewise ``value`` for :meth:`finish`."""
        b = self.builder
        groups = self.attribute("kv_num_heads")
        query = self._bhsd(query, self.layouts[0], self.heads)
        key, self.value = (self._bhsd(n, self.layouts[i], groups) for n, i in ((key, 1), (value, 2)))
        if self.grouped:
            count = b.add("Div", [self.heads, groups])
            key, self.value = (self._repeat(t, self.heads, count) for t in (key, self.value))
        return query, key

    def vectors(self) -> ScoreVectors:
        """What products with rows read, behind :meth:`scores`."""
        return ScoreVectors(self.query, self.builder.add("Mul", [self.key, self.scale]), self.scale)

    def finish(self, weights: str, added: str) -> None:
        """Nodes that write ``output`` from weights [B, H, S, T], with what is ``added`` to it [B, H, S, Dv], if anything is."""
        b = self.builder
        tensor = b.add("MatMul", [weights, self.value])
        tensor = b.add("Add", [tensor, added]) if added else tensor
        if self.output_type and (
            self.dtype is None or b.opset >= CAST_LIKE_OPSET
        ):  # a converter to fp16 changes types around a call
            tensor = b.add("CastLike", [tensor, self.output_type])
        elif self.dtype != TensorProto.FLOAT:
            tensor = b.add("Cast", [tensor], to=self.dtype)
        layout = self.layouts[3]
        if layout is not Layout.BHSD:
            tensor = b.add("Transpose", [tensor], perm=[0, 2, 1, 3])
        if layout is Layout.BSN:
            width = b.add("Mul", [self.heads, _size(b, self.value, 3)])
            tensor = _split_last(b, tensor, width)
        b.nodes.append(helper.make_node("Identity", [tensor], ["output"], name="output"))

    def _bhsd(self, tensor: str, layout: Layout, heads: str) -> str:
        b = self.builder
        if layout is Layout.BSN:
            size = b.add("Div", [_size(b, tensor, 2), heads])
            tensor = _split_last(b, tensor, heads, size)
        if layout is not Layout.BHSD:
            tensor = b.add("Transpose", [tensor], perm=[0, 2, 1, 3])
        return b.add("Cast", [tensor], to=TensorProto.FLOAT)

    def _repeat(self, tensor: str, heads: str, count: str) -> str:
        """[B, G, T, D] with every head ``count`` times. By Gather: a size of 0 has another meaning for Reshape."""
        b = self.builder
        numbers = b.add("Range", [b.constant(0), heads, b.constant(1)])
        return b.add("Gather", [tensor, b.add("Div", [numbers, count])], axis=1)


def _size(b: Builder, tensor: str, axis: int) -> str:
    return b.add("Gather", [b.add("Shape", [tensor]), b.constant(axis)])


def _split_last(b: Builder, tensor: str, *sizes: str) -> str:
    """[B, S, ...] as [B, S, *sizes].

    The target shape is a sum of unit vectors times sizes. Not Concat: ONNX Runtime's ReshapeFusion would turn one of its
    sizes into -1, which is undefined beside a length of 0.
    """
    addends = []
    for i, size in enumerate(sizes):
        unit = [0] * (2 + len(sizes))  # 0 keeps the tensor's size
        unit[2 + i] = 1
        addends.append(b.add("Mul", [b.constant(unit), size]))
    target = addends[0]
    for addend in addends[1:]:
        target = b.add("Add", [target, addend])
    return b.add("Reshape", [tensor, target])


def _shape(b: Builder, *sizes: str | list[int]) -> str:
    """A shape of scalars and numbers."""
    dims = [b.constant(p) if isinstance(p, list) else b.unsqueeze(p, [0]) for p in sizes]
    return b.add("Concat", dims, axis=0)


class VariantWeights:
    """The nodes of one variant, from scores to weights."""

    def __init__(self, variant: Variant, builder: Builder) -> None:
        self.variant = variant
        self.builder = builder

    def build(self, scores: str, vectors: ScoreVectors | None, result_names: Sequence[str]) -> list[str]:
        """Appends nodes for results in fp32, and returns their names in the order of ``result_names``.

        "out" are the weights [B, H, S, T], "lse" the LSE [B, H, S], "added" what weights make of rows by relative position.
        """
        v, b = self.variant, self.builder
        shape = b.add("Shape", [scores])
        B, H, S, T = (b.add("Gather", [shape, b.constant(i)]) for i in range(4))
        sizes = ScoreSizes(B, H, S, T, b.add("Sub", [T, S]) if v.query_offset else b.constant(0))
        operands = {r: f"operand{i}" for i, r in enumerate(v.roles) if r != "unused"}
        for product in (p for p in v.products if not p.is_of_weights):
            assert vectors is not None
            scores = b.add("Add", [scores, emit_product(b, product, vectors, sizes, operands)])
        if v.softcap > 0:
            cap = b.constant(v.softcap, np.float32)
            scores = b.add("Mul", [b.add("Tanh", [b.add("Div", [scores, cap])]), cap])
        minus = b.constant(-np.inf, np.float32)
        scores, masked = self._apply_mask(scores, sizes, operands, minus)
        results = {"out": self.weights(scores, masked, sizes, operands, minus)}
        if "added" in result_names:
            products = [p for p in v.products if p.is_of_weights]
            zero = np.zeros((1, 1, 1, 1), np.float32)
            results["added"] = (
                emit_values(b, products[0], results["out"], sizes, operands)
                if products
                else b.constant(zero, np.float32)
            )
        if "lse" in result_names:
            results["lse"] = self._lse(masked, sizes, operands, minus)
        return [results[name] for name in result_names]

    def _apply_mask(self, scores: str, sizes: ScoreSizes, operands: dict[str, str], minus: str) -> tuple[str, str]:
        """The scores with their biases, and -inf where the mask forbids."""
        v, b = self.variant, self.builder
        if "bias" in operands:
            scores = b.add("Add", [scores, b.add("Cast", [operands["bias"]], to=TensorProto.FLOAT)])
        if RELATIVE_BIAS in operands:
            added = self._relative(operands[RELATIVE_BIAS], sizes)
            if RELATIVE_BIAS_FACTOR in operands:
                factor = b.add("Cast", [operands[RELATIVE_BIAS_FACTOR]], to=TensorProto.FLOAT)
                added = b.add("Mul", [added, b.unsqueeze(factor, [3])])
            scores = b.add("Add", [scores, added])
        if v.expression.allows_all:
            return scores, scores
        return scores, b.add("Where", [v.expression.to_onnx(b, sizes, operands), scores, minus])

    def weights(self, scores: str, masked: str, sizes: ScoreSizes, operands: dict[str, str], minus: str) -> str:
        """The weights of scores, which are -inf in ``masked`` where the mask forbids."""
        v, b = self.variant, self.builder
        if "sink" in operands:
            return self._beside_sink(masked, operands["sink"], sizes)
        weights = b.add("Softmax", [masked], axis=-1)
        biased = "bias" in operands or RELATIVE_BIAS in operands
        if (v.expression.allows_all and not biased) or v.empty_rows is EmptyRows.NAN:
            return weights
        empty = b.add("Equal", [b.reduce_max(masked, -1), minus])
        if v.empty_rows is EmptyRows.ZERO:
            fill = b.constant(0, np.float32)
        elif v.empty_rows is EmptyRows.MEAN:
            fill = b.add("Reciprocal", [b.add("Cast", [sizes.T], to=TensorProto.FLOAT)])
        else:
            fill = b.add("Softmax", [scores], axis=-1)
        return b.add("Where", [empty, fill, weights])

    def _relative(self, table: str, sizes: ScoreSizes) -> str:
        """[H or 1, S, T] from a table [H or 1, L] by the distance of key and query."""
        b = self.builder
        table = b.add("Cast", [table], to=TensorProto.FLOAT)
        radius = b.add("Div", [_size(b, table, 1), b.constant(2)])
        zero, one = b.constant(0), b.constant(1)
        keys = b.unsqueeze(b.add("Range", [zero, sizes.T, one]), [0])
        queries = b.add("Add", [b.add("Range", [zero, sizes.S, one]), sizes.P])
        distance = b.add("Sub", [keys, b.unsqueeze(queries, [1])])
        low = b.add("Neg", [radius])
        entry = b.add("Add", [b.add("Min", [b.add("Max", [distance, low]), radius]), radius])
        return b.add("Gather", [table, entry], axis=1)

    def _beside_sink(self, scores: str, sink: str, sizes: ScoreSizes) -> str:
        """The weights of a softmax over a row's scores and its head's sink, without the sink's weight."""
        b = self.builder
        weights = b.add("Softmax", [self._with_column(scores, self._logits(sink), sizes)], axis=-1)
        return b.add("Slice", [weights, b.constant([0]), b.unsqueeze(sizes.T, [0]), b.constant([-1])])

    def _logits(self, sink: str) -> str:
        """The sinks as [1, H, 1, 1]."""
        b = self.builder
        return b.unsqueeze(b.add("Cast", [sink], to=TensorProto.FLOAT), [0, 2, 3])

    def _with_column(self, scores: str, column: str, sizes: ScoreSizes) -> str:
        b = self.builder
        column = b.add("Expand", [column, _shape(b, sizes.B, sizes.H, sizes.S, [1])])
        return b.add("Concat", [scores, column], axis=-1)

    def _lse(self, masked: str, sizes: ScoreSizes, operands: dict[str, str], minus: str) -> str:
        """The LSE of each row [B, H, S], over its scores and its sink; -inf for a fully masked row without a sink.

        Without a sink, a column of -inf is used: some runtimes refuse a maximum over zero keys.
        """
        b = self.builder
        column = self._logits(operands["sink"]) if "sink" in operands else minus
        scores = self._with_column(masked, column, sizes)
        lowest = b.constant(np.finfo(np.float32).min, np.float32)
        top = b.add("Max", [b.reduce_max(scores, -1), lowest])
        total = b.reduce("ReduceLogSum", b.add("Exp", [b.add("Sub", [scores, top])]), -1)
        return b.add("Gather", [b.add("Add", [total, top]), b.constant(0)], axis=3)
