# SPDX-License-Identifier: Apache-2.0
"""The function body of StofCachedAttention: the GroupQueryAttention that was replaced, which runs without the library.

The body of one variant is the node itself, so that a runtime can still give past and present one buffer. Several variants
are branches of an If on ``mask_id``, and an attribute selects one for each call. Where a pattern was declared, the body adds it
as attention_bias, which a runtime either applies or refuses: none computes the dense attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx
from onnx import helper

from stof.cached_attention.site import GROUP_QUERY, INPUT_INDEX, INPUTS, MICROSOFT, OP, OUTPUTS, OWN_INPUTS, CacheSite
from stof.graph.index import DOMAIN
from stof.graph.node_builder import Builder
from stof.mask.expression import MaskExpression
from stof.sparsify.bias_nodes import StepTensors, emit_pattern_bias

_MASK_ID = "mask_id"


@dataclass(frozen=True)
class CacheVariant:
    """What the body of a call depends on: the node's attributes, serialized in order, and which inputs it has.

    ``pattern`` is the mask that --sparsify declared, empty where none was; ``tables`` is how many constants it looks up.
    """

    attributes: tuple[bytes, ...]
    given: tuple[bool, ...]
    dtype: int
    num_heads: int = 0
    pattern: str = ""
    tables: int = 0

    @classmethod
    def of(cls, site: CacheSite) -> CacheVariant:
        """The variant of a site."""
        attributes = sorted(site.node.attribute, key=lambda a: str(a.name))
        given = tuple(bool(name) for name in site.read_inputs)
        serialized = tuple(a.SerializeToString(deterministic=True) for a in attributes)
        if site.declared is None:
            return cls(serialized, given, site.dtype)
        return cls(serialized, given, site.dtype, site.num_heads, site.mask, len(site.table_inputs))

    def nodes(self, name: str, opset: int, outputs: Sequence[str]) -> list[onnx.NodeProto]:
        """The node, with the function's own names as inputs, behind those that compute the pattern's bias."""
        inputs = [name if given else "" for name, given in zip(INPUTS, self.given, strict=True)]
        builder = Builder(opset, f"{name}_")
        if self.pattern:
            inputs[INPUT_INDEX["attention_bias"]] = self._bias(builder, inputs[INPUT_INDEX["attention_bias"]])
        while not inputs[-1]:
            inputs.pop()
        node = helper.make_node(GROUP_QUERY, inputs, list(outputs), name=name, domain=MICROSOFT)
        node.attribute.extend(onnx.AttributeProto.FromString(a) for a in self.attributes)
        return [*builder.nodes, node]

    def _bias(self, builder: Builder, own: str) -> str:
        tables = {n: n for n in OWN_INPUTS if n.startswith("table")}
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
    return helper.make_function(DOMAIN, OP, list(OWN_INPUTS[:inputs]), list(OUTPUTS), nodes, opsets, read)


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
        infos = [helper.make_tensor_value_info(name, variants[i].dtype, None) for name in own]
        graphs.append(helper.make_graph(inner, f"{word}{i}", [], infos))
    return [
        helper.make_node("Constant", [], [index], name=index, value_int=i),
        helper.make_node("Equal", [_MASK_ID, index], [same], name=same),
        helper.make_node(
            "If", [same], list(outputs), name=f"s{i}_choice", then_branch=graphs[0], else_branch=graphs[1]
        ),
    ]
