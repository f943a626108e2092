# SPDX-License-Identifier: Apache-2.0
"""The function body of StofCachedAttention: the node that was replaced, which runs without the library.

The body of one variant is the node itself, so that a runtime can still give past and present one buffer. Several variants
are branches of an If on ``mask_id``, and an attribute selects one for each call. Where a pattern was declared, the body adds it
as attention_bias, which a runtime either applies or refuses: none computes the dense attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import helper

from stof.cached_attention.site import (
    INPUT_INDEX,
    INPUTS,
    MICROSOFT,
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
from stof.mask.expression import MaskExpression
from stof.sparsify.bias_nodes import StepTensors, emit_pattern_bias

_MASK_ID = "mask_id"


@dataclass(frozen=True)
class CacheVariant:
    """What the body of a call depends on: the node's type and attributes, serialized in order, and which inputs it has.

    ``pattern`` is the mask that --sparsify declared, empty where none was.
    """

    op_type: str
    attributes: tuple[bytes, ...]
    given: tuple[bool, ...]
    dtype: int
    cache_dtype: int
    num_heads: int = 0
    pattern: str = ""

    @classmethod
    def of(cls, site: CacheSite) -> CacheVariant:
        """The variant of a site."""
        attributes = sorted(site.node.attribute, key=lambda a: str(a.name))
        given = tuple(bool(name) for name in site.read_inputs)
        serialized = tuple(a.SerializeToString(deterministic=True) for a in attributes)
        variant = cls(site.node.op_type, serialized, given, site.dtype, site.cache_dtype)
        return variant if site.declared is None else replace(variant, num_heads=site.num_heads, pattern=site.mask)

    def nodes(self, name: str, opset: int, outputs: Sequence[str]) -> list[onnx.NodeProto]:
        """The node, with the function's own names as inputs, behind what computes its lengths and the pattern's bias."""
        inputs = [name if given else "" for name, given in zip(OP_INPUTS, self.given, strict=True)]
        before: list[onnx.NodeProto] = []
        if self.op_type == SPARSE:
            before, inputs = self._sparse_inputs(name, inputs)
        elif self.pattern:
            builder = Builder(opset, f"{name}_")
            inputs[INPUT_INDEX["attention_bias"]] = self._bias(builder, inputs[INPUT_INDEX["attention_bias"]])
            before, inputs = builder.nodes, inputs[: len(INPUTS)]
        while not inputs[-1]:
            inputs.pop()
        node = helper.make_node(self.op_type, inputs, list(outputs), name=name, domain=MICROSOFT)
        node.attribute.extend(onnx.AttributeProto.FromString(a) for a in self.attributes)
        return [*before, node]

    def _sparse_inputs(self, name: str, given: Sequence[str]) -> tuple[list[onnx.NodeProto], list[str]]:
        """The inputs of a SparseAttention, and the nodes that compute its numbers of keys."""
        one, lengths = f"{name}_one", f"{name}_lengths"
        stored = onnx.numpy_helper.from_array(np.array([1], np.int32), one)
        nodes = [
            helper.make_node("Constant", [], [one], name=one, value=stored),
            helper.make_node("Add", ["seqlens_k", one], [lengths], name=lengths),
        ]
        inputs = [""] * (max(SPARSE_INDEX.values()) + 1)
        for own, index in SPARSE_INDEX.items():
            inputs[index] = given[INPUT_INDEX[own]]
        inputs[SPARSE_INDEX["seqlens_k"]] = lengths
        inputs[SPARSE_ROWS], inputs[SPARSE_COLUMNS] = "table1", "table2"
        return nodes, inputs

    def _bias(self, builder: Builder, own: str) -> str:
        """The pattern as attention_bias, added to the node's own one."""
        tables = {name: name for name in OP_INPUTS if name.startswith("table")}
        tensors = StepTensors("query", "seqlens_k", "total_sequence_length")
        mask = MaskExpression.parse(self.pattern)
        bias = emit_pattern_bias(builder, mask, tensors, tables, self.num_heads, self.dtype)
        return builder.add("Add", [own, bias]) if own else bias


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
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, contrib_version)]
    read: list[str] = []
    if len(variants) == 1:
        nodes = variants[0].nodes("variant0", opset, OUTPUTS)
    else:
        number = helper.make_node("Constant", [], [_MASK_ID], name=_MASK_ID)
        reference = number.attribute.add()
        reference.name, reference.ref_attr_name, reference.type = "value_int", _MASK_ID, onnx.AttributeProto.INT
        nodes = [number, *_select(variants, 0, opset, OUTPUTS)]
        read = [_MASK_ID]
    return helper.make_function(DOMAIN, OP, list(OP_INPUTS[:inputs]), list(OUTPUTS), nodes, opsets, read)


def _select(variants: Sequence[CacheVariant], i: int, opset: int, outputs: Sequence[str]) -> list[onnx.NodeProto]:
    """Nodes that write the outputs: by variant i if ``mask_id`` is i, else by a later one."""
    if i + 1 == len(variants):
        return variants[i].nodes(f"variant{i}", opset, outputs)
    index, same = f"s{i}_i", f"s{i}_same"
    graphs = []
    for word in ("then", "else"):
        own = [f"{word}{i}_{name}" for name in OUTPUTS]
        if word == "then":
            inner = variants[i].nodes(f"variant{i}", opset, own)
        else:
            inner = _select(variants, i + 1, opset, own)
        types = (variants[i].dtype, variants[i].cache_dtype, variants[i].cache_dtype)
        infos = [helper.make_tensor_value_info(n, t, None) for n, t in zip(own, types, strict=True)]
        graphs.append(helper.make_graph(inner, f"{word}{i}", [], infos))
    return [
        helper.make_node("Constant", [], [index], name=index, value_int=i),
        helper.make_node("Equal", [_MASK_ID, index], [same], name=same),
        helper.make_node(
            "If", [same], list(outputs), name=f"s{i}_choice", then_branch=graphs[0], else_branch=graphs[1]
        ),
    ]
