# SPDX-License-Identifier: Apache-2.0
"""Unpadding with ``--emit standard``: everything but ONNX's Attention runs on real tokens; that node reads padded copies."""

from __future__ import annotations

from collections.abc import Iterable

import onnx
from onnx import helper

from stof.attention.rewrite import AttentionDecisions
from stof.attention.standard.decide import StandardRewrite
from stof.graph.index import DOMAIN, is_standard, producer_indices
from stof.graph.protobuf import copy_model
from stof.mask.site import Layout
from stof.op_rewrite import Job
from stof.unpadding.emit import emit_regions
from stof.unpadding.pad_masks import ATTENTION
from stof.unpadding.region import UnpaddedRegion
from stof.unpadding.rewrite import PaddedBatches, UnpadRewrite

_LAYOUTS = {3: Layout.BSN, 4: Layout.BHSD}  # by the rank of an Attention node's tensors


class StandardUnpadRewrite(UnpadRewrite):
    """Finds what can run on real tokens as stof's own attention does, and writes it around ONNX's Attention."""

    def describe_attentions(self, job: Job, model: onnx.ModelProto) -> onnx.ModelProto:
        rewrites = [
            choice.rewrite
            for decided in job.earlier
            if isinstance(decided, AttentionDecisions)
            for choice in decided.choices
            if isinstance(choice.rewrite, StandardRewrite)
        ]
        return with_stated_masks(model, rewrites)

    def computed_region(self, graph: onnx.GraphProto, region: UnpaddedRegion) -> UnpaddedRegion:
        return region.with_packed(())

    def write(self, batches: PaddedBatches, regions: Iterable[UnpaddedRegion]) -> onnx.ModelProto:
        assert batches.written is not None
        assert batches.symbolic is not None
        return emit_regions(
            batches.written, batches.symbolic, [self.computed_region(batches.written.graph, r) for r in regions]
        )


def with_stated_masks(model: onnx.ModelProto, rewrites: Iterable[StandardRewrite]) -> onnx.ModelProto:
    """A copy of a model for analysis, in which Attention nodes are StofAttention nodes that state their masks; node indices stay.

    Args:
        model: as ``emit_standard`` wrote it.
        rewrites: of its sites.
    """
    stated = copy_model(model)
    nodes = stated.graph.node
    writers = producer_indices(nodes)
    for rewrite in rewrites:
        i = writers.get(rewrite.site.output)
        while i is not None and is_standard(nodes[i]) and nodes[i].op_type in ("Reshape", "Transpose"):
            i = writers.get(nodes[i].input[0])
        if i is not None and is_standard(nodes[i]) and nodes[i].op_type == "Attention":
            nodes[i].CopyFrom(_state_mask(nodes[i], rewrite))
    return stated


def _state_mask(node: onnx.NodeProto, rewrite: StandardRewrite) -> onnx.NodeProto:
    """The StofAttention node of an Attention node. What the node reads besides is an operand, too: by all its rows."""
    mask, form = rewrite.mask, rewrite.form
    operands = {o.role: o.tensor for o in mask.operands if o.at is None}
    roles, inputs = [*operands], [*operands.values()]
    for j, name in enumerate(node.input[3:]):
        if name:
            roles.append("bias" if j == 0 and form.has_float_mask else "unused")
            inputs.append(name)
    return helper.make_node(
        ATTENTION,
        [*node.input[:3], *inputs],
        node.output,
        node.name,
        domain=DOMAIN,
        mask=mask.expression.text,
        operands=" ".join(roles),
        layout=_LAYOUTS[form.rank].value,
        empty_rows=mask.empty_rows.value,
        num_heads=rewrite.site.num_heads,
        kv_num_heads=rewrite.site.kv_num_heads,
    )


STANDARD_UNPADDING = StandardUnpadRewrite()
