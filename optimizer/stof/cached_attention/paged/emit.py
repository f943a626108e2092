# SPDX-License-Identifier: Apache-2.0
"""Writes StofPagedAttention nodes and their function.

The body of a call is the PagedAttention that it replaced. Where a pattern was declared, which that node has no input for, the
body is standard nodes that compute the pattern: no runtime computes the dense attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx
from onnx import helper

from stof.cached_attention.function_body import fill_tables, make_variant_function
from stof.cached_attention.node_site import MICROSOFT
from stof.cached_attention.paged.expand import add_tables, expand_node
from stof.cached_attention.paged.site import INPUTS, OP, OP_INPUTS, OUTPUTS, PAGED, PagedNode, PagedSite
from stof.cached_attention.rewrite_node import rewrite_node
from stof.graph.index import all_nodes, contrib_version_of, opset_of
from stof.graph.local_functions import add_functions, check_absent
from stof.graph.names import FreshNames
from stof.graph.node_builder import Builder
from stof.graph.protobuf import copy_model
from stof.mask.expression import MaskExpression


@dataclass(frozen=True)
class PagedVariant:
    """What the function body of a call depends on: the node's attributes, serialized in order, and which inputs it has.

    ``pattern`` is the mask that --sparsify declared, None where none was. The other numbers are given with it: ``heads`` are
    H, G, D and R, and ``tables`` the element types of the pattern's tables, from table0 on.
    """

    attributes: tuple[bytes, ...]
    inputs_present: tuple[bool, ...]
    dtype: int
    pattern: MaskExpression | None = None
    heads: tuple[int, int, int, int] = (0, 0, 0, 0)
    tables: tuple[int, ...] = ()

    @property
    def cache_dtype(self) -> int:
        """The element type of the caches."""
        return self.dtype

    @classmethod
    def of(cls, site: PagedSite) -> PagedVariant:
        """The variant of a site."""
        attributes = sorted(site.node.attribute, key=lambda a: str(a.name))
        serialized = tuple(a.SerializeToString(deterministic=True) for a in attributes)
        variant = cls(serialized, tuple(bool(site.input(name)) for name in INPUTS), site.dtype)
        if site.declared is None:
            return variant
        types = tuple(helper.np_dtype_to_tensor_dtype(a.dtype) for _, a in sorted(site.mask_tables.items()))
        heads = (site.num_heads, site.kv_num_heads, site.head_size, site.rotary_size)
        return replace(variant, pattern=site.mask, heads=heads, tables=types)

    def nodes(self, name: str, opset: int, outputs: Sequence[str], *, is_branch: bool = False) -> list[onnx.NodeProto]:
        """The node, with the function's own names as inputs, or standard nodes with a pattern; the same in a branch."""
        inputs = [name if present else "" for name, present in zip(INPUTS, self.inputs_present, strict=True)]
        while not inputs[-1]:
            inputs.pop()
        node = helper.make_node(PAGED, inputs, list(outputs), name=name, domain=MICROSOFT)
        node.attribute.extend(onnx.AttributeProto.FromString(a) for a in self.attributes)
        if self.pattern is None:
            return [node]
        builder = Builder(opset, f"{name}_")
        num_heads, groups, size, rotary = self.heads
        paged = PagedNode(
            name=name,
            node=node,
            num_heads=num_heads,
            kv_num_heads=groups,
            head_size=size,
            dtype=self.dtype,
            window=0,
            rotary_size=rotary,
        )
        tables = {f"table{i}": f"table{i}" for i in range(len(self.tables))}
        expand_node(builder, paged, outputs, self.pattern, tables)
        return builder.nodes


def emit_pages(model: onnx.ModelProto, sites: Sequence[PagedSite]) -> onnx.ModelProto:
    """A copy of the model in which the node of every site is a StofPagedAttention.

    Raises:
        UnsupportedError: when the model holds the operator already.
    """
    check_absent(model, OP)
    emitted = copy_model(model)
    if not sites:
        return emitted
    by_output = {s.node.output[0]: s for s in sites}
    names = FreshNames(n.name for n in all_nodes(emitted.graph.node))
    variants: dict[PagedVariant, int] = {}
    calls: list[onnx.NodeProto] = []
    for node in emitted.graph.node:
        site = by_output.get(node.output[0]) if node.output else None
        if site is not None:
            number = variants.setdefault(PagedVariant.of(site), len(variants))
            rewrite_node(node, site, OP, site.read_inputs, len(OUTPUTS), number, names)
            calls.append(node)
    add_tables(emitted.graph, sites)
    fill_tables(calls, list(variants), OP_INPUTS)
    most = max(len(node.input) for node in calls)
    function = make_variant_function(
        OP, OP_INPUTS[:most], OUTPUTS, list(variants), opset_of(model), contrib_version_of(model)
    )
    add_functions(emitted, [function])
    return emitted
