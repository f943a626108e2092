# SPDX-License-Identifier: Apache-2.0
"""The function body of StofCachedAttention: the GroupQueryAttention that was replaced, which runs without the library.

The body of one variant is the node itself, so that a runtime can still give past and present one buffer. Several variants
are branches of an If on ``mask_id``, and an attribute selects one for each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx
from onnx import helper

from stof.cached_attention.site import GROUP_QUERY, INPUTS, MICROSOFT, OP, OUTPUTS, CacheSite
from stof.graph.index import DOMAIN

_MASK_ID = "mask_id"


@dataclass(frozen=True)
class CacheVariant:
    """What the body of a call depends on: the node's attributes, serialized in order, and which inputs it has."""

    attributes: tuple[bytes, ...]
    given: tuple[bool, ...]
    dtype: int

    @classmethod
    def of(cls, site: CacheSite) -> CacheVariant:
        """The variant of a site."""
        attributes = sorted(site.node.attribute, key=lambda a: str(a.name))
        given = tuple(bool(name) for name in site.read_inputs)
        return cls(tuple(a.SerializeToString(deterministic=True) for a in attributes), given, site.dtype)

    def node(self, name: str, outputs: Sequence[str]) -> onnx.NodeProto:
        """The node, with the function's own names as inputs."""
        inputs = [name if given else "" for name, given in zip(INPUTS, self.given, strict=True)]
        while not inputs[-1]:
            inputs.pop()
        node = helper.make_node(GROUP_QUERY, inputs, list(outputs), name=name, domain=MICROSOFT)
        node.attribute.extend(onnx.AttributeProto.FromString(a) for a in self.attributes)
        return node


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
        nodes = [variants[0].node("variant0", OUTPUTS)]
    else:
        number = helper.make_node("Constant", [], [_MASK_ID], name=_MASK_ID)
        reference = number.attribute.add()
        reference.name, reference.ref_attr_name, reference.type = "value_int", _MASK_ID, onnx.AttributeProto.INT
        nodes = [number, *_select(variants, 0, OUTPUTS)]
        read = [_MASK_ID]
    return helper.make_function(DOMAIN, OP, list(INPUTS[:inputs]), list(OUTPUTS), nodes, opsets, read)


def _select(variants: Sequence[CacheVariant], i: int, outputs: Sequence[str]) -> list[onnx.NodeProto]:
    """Nodes that write the outputs: by variant i if ``mask_id`` is i, else by a later one."""
    if i + 1 == len(variants):
        return [variants[i].node(f"variant{i}", outputs)]
    index, same = f"s{i}_i", f"s{i}_same"
    graphs = []
    for word in ("then", "else"):
        own = [f"{word}{i}_{name}" for name in OUTPUTS]
        inner = [variants[i].node(f"variant{i}", own)] if word == "then" else _select(variants, i + 1, own)
        infos = [helper.make_tensor_value_info(name, variants[i].dtype, None) for name in own]
        graphs.append(helper.make_graph(inner, f"{word}{i}", [], infos))
    return [
        helper.make_node("Constant", [], [index], name=index, value_int=i),
        helper.make_node("Equal", [_MASK_ID, index], [same], name=same),
        helper.make_node(
            "If", [same], list(outputs), name=f"s{i}_choice", then_branch=graphs[0], else_branch=graphs[1]
        ),
    ]
