# SPDX-License-Identifier: Apache-2.0
"""The function body of StofCachedAttention: the node that was replaced, which runs without the library.

The body of one variant is the node itself, so that a runtime can still give past and present one buffer. Several variants
are branches of an If on ``mask_id``, and an attribute selects one for each call. Where a pattern was declared, the body adds it
as attention_bias, which a runtime either applies or refuses: none computes the dense attention.

A runtime that inlines the function checks the types of every branch for every call. So every call has all tables that some
branch reads, and branches read them with a cast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import onnx
from onnx import TensorProto, helper

from stof.cached_attention.node_site import MICROSOFT
from stof.cached_attention.site import (
    INPUT_INDEX,
    INPUTS,
    OP,
    OP_INPUTS,
    OUTPUTS,
    SPARSE,
    SPARSE_COLUMNS,
    SPARSE_INDEX,
    SPARSE_ROWS,
    CacheSite,
)
from stof.graph.index import DOMAIN
from stof.graph.node_builder import Builder
from stof.graph.node_fields import input_of
from stof.mask.expression import MaskExpression
from stof.sparsify.bias_nodes import StepTensors, emit_pattern_bias

_MASK_ID = "mask_id"


@dataclass(frozen=True)
class CacheVariant:
    """What the body of a call depends on: the node's type and attributes, serialized in order, and which inputs it has.

    ``pattern`` is the mask that --sparsify declared, None where none was. ``tables`` are the element types of the tables that
    the body reads, from table0 on; 0: it does not read that one.
    """

    op_type: str
    attributes: tuple[bytes, ...]
    inputs_present: tuple[bool, ...]
    dtype: int
    cache_dtype: int
    num_heads: int = 0
    pattern: MaskExpression | None = None
    tables: tuple[int, ...] = ()

    @classmethod
    def of(cls, site: CacheSite) -> CacheVariant:
        """The variant of a site."""
        attributes = sorted(site.node.attribute, key=lambda a: str(a.name))
        inputs_present = tuple(bool(name) for name in site.read_inputs)
        serialized = tuple(a.SerializeToString(deterministic=True) for a in attributes)
        variant = cls(site.node.op_type, serialized, inputs_present, site.dtype, site.cache_dtype)
        if site.layout is not None:
            return replace(variant, tables=(0, TensorProto.INT32, TensorProto.INT32))
        if site.declared is None:
            return variant
        types = tuple(helper.np_dtype_to_tensor_dtype(a.dtype) for _, a in sorted(site.mask_tables.items()))
        return replace(variant, num_heads=site.num_heads, pattern=site.mask, tables=types)

    def nodes(self, name: str, opset: int, outputs: Sequence[str], *, is_branch: bool = False) -> list[onnx.NodeProto]:
        """The node, with the function's own names as inputs, behind what computes its lengths and the pattern's bias.

        Args:
            name: prefix of the nodes' names.
            opset: of the standard domain.
            outputs: names of output, present_key and present_value.
            is_branch: calls of other variants get these nodes, too, with tables of other types.
        """
        inputs = [name if present else "" for name, present in zip(OP_INPUTS, self.inputs_present, strict=True)]
        builder = Builder(opset, f"{name}_")
        tables = {f"table{i}": f"table{i}" for i, dtype in enumerate(self.tables) if dtype}
        if is_branch:
            tables = {n: builder.add("Cast", [n], to=self.tables[int(n[-1])]) for n in tables}
        if self.op_type == SPARSE:
            inputs = self._sparse_inputs(builder, inputs, tables)
        elif self.pattern is not None:
            index = INPUT_INDEX["attention_bias"]
            inputs[index] = self._bias(builder, self.pattern, inputs[index], tables, is_branch=is_branch)
            inputs = inputs[: len(INPUTS)]
        before = builder.nodes
        while not inputs[-1]:
            inputs.pop()
        node = helper.make_node(self.op_type, inputs, list(outputs), name=name, domain=MICROSOFT)
        node.attribute.extend(onnx.AttributeProto.FromString(a) for a in self.attributes)
        return [*before, node]

    def _sparse_inputs(self, builder: Builder, tensors: Sequence[str], tables: Mapping[str, str]) -> list[str]:
        """The inputs of a SparseAttention, and the nodes that compute its numbers of keys."""
        inputs = [""] * (max(SPARSE_INDEX.values()) + 1)
        for input_name, index in SPARSE_INDEX.items():
            inputs[index] = tensors[INPUT_INDEX[input_name]]
        inputs[SPARSE_INDEX["seqlens_k"]] = builder.add("Add", ["seqlens_k", builder.constant([1], np.int32)])
        inputs[SPARSE_ROWS], inputs[SPARSE_COLUMNS] = tables["table1"], tables["table2"]
        return inputs

    def _bias(
        self, builder: Builder, pattern: MaskExpression, node_bias: str, tables: Mapping[str, str], *, is_branch: bool
    ) -> str:
        """The pattern as attention_bias, added to the node's own one."""
        tensors = StepTensors("query", "seqlens_k", "total_sequence_length")
        bias = emit_pattern_bias(builder, pattern, tensors, tables, self.num_heads, self.dtype)
        # Calls of other variants may have no attention_bias: Sum, unlike Add, is legal without one of its inputs.
        return builder.add("Sum" if is_branch else "Add", [bias, node_bias]) if node_bias else bias


class BodyVariant(Protocol):
    """One variant of a function body: the nodes of one kind of call."""

    @property
    def dtype(self) -> int:
        """The element type of the first output."""

    @property
    def cache_dtype(self) -> int:
        """The element type of the other outputs."""

    @property
    def tables(self) -> tuple[int, ...]:
        """The element types of the tables that the body reads, from table0 on; 0: it does not read that one."""

    def nodes(self, name: str, opset: int, outputs: Sequence[str], *, is_branch: bool = False) -> list[onnx.NodeProto]:
        """Nodes that write the outputs from the function's inputs.

        Args:
            name: prefix of the nodes' names.
            opset: of the standard domain.
            outputs: names of the outputs.
            is_branch: calls of other variants get these nodes, too.
        """


def fill_tables(calls: Sequence[onnx.NodeProto], variants: Sequence[BodyVariant], inputs: Sequence[str]) -> None:
    """Gives each call the tables that a branch of the function body reads; the operator ignores those of other masks.

    Args:
        calls: the operator's nodes.
        variants: of the function body.
        inputs: names of the operator's inputs.
    """
    for number in range(max(len(v.tables) for v in variants) if len(variants) > 1 else 0):
        if not any(v.tables[number : number + 1] not in ((), (0,)) for v in variants):
            continue
        index = inputs.index(f"table{number}")
        some = next(name for node in calls if (name := input_of(node, index)))
        for node in calls:
            if not input_of(node, index):
                node.input.extend([""] * (index + 1 - len(node.input)))
                node.input[index] = some


def make_cache_function(
    variants: Sequence[CacheVariant], inputs: int, opset: int, contrib_version: int
) -> onnx.FunctionProto:
    """The local function ``stof::StofCachedAttention`` for the variants of a model.

    Args:
        variants: distinct; ``mask_id`` is the index.
        inputs: the number of inputs that calls have at most.
        opset: of the standard domain.
        contrib_version: of domain com.microsoft.
    """
    return make_variant_function(OP, OP_INPUTS[:inputs], OUTPUTS, variants, opset, contrib_version)


def make_variant_function(
    op: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    variants: Sequence[BodyVariant],
    opset: int,
    contrib_version: int,
) -> onnx.FunctionProto:
    """The local function of an operator; where there are several variants, ``mask_id`` selects one for each call.

    Args:
        op: the operator, of domain ``stof``.
        inputs: names of the inputs that calls have at most.
        outputs: names of the outputs.
        variants: distinct; ``mask_id`` is the index.
        opset: of the standard domain.
        contrib_version: of domain com.microsoft.
    """
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, contrib_version)]
    read: list[str] = []
    if len(variants) == 1:
        nodes = variants[0].nodes("variant0", opset, outputs)
    else:
        number = helper.make_node("Constant", [], [_MASK_ID], name=_MASK_ID)
        reference = number.attribute.add()
        reference.name, reference.ref_attr_name, reference.type = "value_int", _MASK_ID, onnx.AttributeProto.INT
        nodes = [number, *_select(variants, 0, opset, outputs)]
        read = [_MASK_ID]
    return helper.make_function(DOMAIN, op, list(inputs), list(outputs), nodes, opsets, read)


def _select(variants: Sequence[BodyVariant], i: int, opset: int, outputs: Sequence[str]) -> list[onnx.NodeProto]:
    """Nodes that write the outputs: by variant i if ``mask_id`` is i, else by a later one."""
    if i + 1 == len(variants):
        return variants[i].nodes(f"variant{i}", opset, outputs, is_branch=True)
    index, same = f"s{i}_i", f"s{i}_same"
    graphs = []
    for word in ("then", "else"):
        branch_outputs = [f"{word}{i}_{name}" for name in outputs]
        if word == "then":
            inner = variants[i].nodes(f"variant{i}", opset, branch_outputs, is_branch=True)
        else:
            inner = _select(variants, i + 1, opset, branch_outputs)
        types = (variants[i].dtype, *[variants[i].cache_dtype] * (len(branch_outputs) - 1))
        infos = [helper.make_tensor_value_info(n, t, None) for n, t in zip(branch_outputs, types, strict=True)]
        graphs.append(helper.make_graph(inner, f"{word}{i}", [], infos))
    return [
        helper.make_node("Constant", [], [index], name=index, value_int=i),
        helper.make_node("Equal", [_MASK_ID, index], [same], name=same),
        helper.make_node(
            "If", [same], list(outputs), name=f"s{i}_choice", then_branch=graphs[0], else_branch=graphs[1]
        ),
    ]
