# SPDX-License-Identifier: Apache-2.0
"""Writes StofPagedAttention nodes and their function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx
from onnx import helper

from stof.cached_attention.function_body import make_variant_function
from stof.cached_attention.node_site import MICROSOFT
from stof.cached_attention.paged.site import INPUTS, OP, OP_INPUTS, OUTPUTS, PAGED, PagedSite
from stof.cached_attention.rewrite_node import rewrite_node
from stof.graph.index import all_nodes, opset_of
from stof.graph.local_functions import add_functions, check_absent
from stof.graph.names import FreshNames
from stof.graph.protobuf import copy_model


@dataclass(frozen=True)
class PagedVariant:
    """What the function body of a call depends on: the node's attributes, serialized in order, and which inputs it has."""

    attributes: tuple[bytes, ...]
    given: tuple[bool, ...]
    dtype: int

    @property
    def cache_dtype(self) -> int:
        """The element type of the caches."""
        return self.dtype

    @classmethod
    def of(cls, site: PagedSite) -> PagedVariant:
        """The variant of a site."""
        attributes = sorted(site.node.attribute, key=lambda a: str(a.name))
        serialized = tuple(a.SerializeToString(deterministic=True) for a in attributes)
        return cls(serialized, tuple(bool(site.input(name)) for name in INPUTS), site.dtype)

    def nodes(self, name: str, opset: int, outputs: Sequence[str], *, is_branch: bool = False) -> list[onnx.NodeProto]:
        """The node, with the function's own names as inputs; the same where it is a branch."""
        inputs = [name if given else "" for name, given in zip(INPUTS, self.given, strict=True)]
        while not inputs[-1]:
            inputs.pop()
        node = helper.make_node(PAGED, inputs, list(outputs), name=name, domain=MICROSOFT)
        node.attribute.extend(onnx.AttributeProto.FromString(a) for a in self.attributes)
        return [node]


def emit_pages(model: onnx.ModelProto, sites: Sequence[PagedSite]) -> onnx.ModelProto:
    """A copy of the model in which the node of every site is a StofPagedAttention.

    Raises:
        UnsupportedError: when the model holds the operator already.
    """
    check_absent(model, OP)
    found = copy_model(model)
    if not sites:
        return found
    by_output = {s.node.output[0]: s for s in sites}
    names = FreshNames(n.name for n in all_nodes(found.graph.node))
    variants: dict[PagedVariant, int] = {}
    most = 0
    for node in found.graph.node:
        site = by_output.get(node.output[0]) if node.output else None
        if site is not None:
            number = variants.setdefault(PagedVariant.of(site), len(variants))
            rewrite_node(node, site, OP, site.read_inputs, len(OUTPUTS), number, names)
            most = max(most, len(node.input))
    contrib = next((int(e.version) for e in found.opset_import if e.domain == MICROSOFT), 1)
    function = make_variant_function(OP, OP_INPUTS[:most], OUTPUTS, list(variants), opset_of(model), contrib)
    add_functions(found, [function])
    return found
