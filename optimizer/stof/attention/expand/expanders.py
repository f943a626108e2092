# SPDX-License-Identifier: Apache-2.0
"""The working copy of a model in which sites are looked for: functions with attention are inlined, fused nodes expanded."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import onnx

from stof.attention.expand.contrib import (
    expand_contrib_attention,
    expand_multi_head,
    expand_quantized_attention,
    refuse_decoder_masked,
)
from stof.attention.expand.flex_attention import PREVIEW, expand_flex_attention
from stof.attention.expand.gqa import expand_group_query
from stof.attention.expand.onnx_attention import expand_onnx_attention
from stof.attention.expand.softmax_wrappers import unwrap_softmaxes
from stof.attention.expand.working_copy import Expander, WorkingCopy, expand_nodes
from stof.attention.quantized.core_form import with_cores
from stof.attention.quantized.rounded_cores import find_rounded_forms
from stof.graph.index import domain_of
from stof.graph.inline import inline, inline_all
from stof.symbolic import Symbolic

_MICROSOFT = "com.microsoft"


_EXPANDERS: dict[tuple[str, str], Expander] = {
    ("", "Attention"): expand_onnx_attention,
    (PREVIEW, "FlexAttention"): expand_flex_attention,
    (_MICROSOFT, "Attention"): expand_contrib_attention,
    (_MICROSOFT, "DecoderMaskedMultiHeadAttention"): refuse_decoder_masked,
    (_MICROSOFT, "GroupQueryAttention"): expand_group_query,
    (_MICROSOFT, "MultiHeadAttention"): expand_multi_head,
    (_MICROSOFT, "QAttention"): expand_quantized_attention,
}


def make_working_copy(original: onnx.ModelProto) -> WorkingCopy:
    """Makes the working copy of a model."""
    base = unwrap_softmaxes(inline(original, {("", "Softmax"), *_EXPANDERS}))
    inlined = inline_all(base)
    expanded = expand_nodes(original, base, _EXPANDERS, None if inlined is base else Symbolic(inlined))
    forms = find_rounded_forms(base)
    model = with_cores(expanded.model, forms.cores) if forms.cores else expanded.model
    return replace(expanded, model=model, rounded=forms)


def make_subgraph_copy(
    model: onnx.ModelProto, inlined: Symbolic | None, own: Collection[str], prefix: str
) -> WorkingCopy:
    """Makes the working copy of a subgraph that was turned into a model.

    Args:
        model: the subgraph, with the outer nodes that it depends on.
        inlined: shapes of the whole model with all functions inlined, where some are left.
        own: tensors that the subgraph's own nodes write.
        prefix: of new tensors, which no other graph of the model has.
    """
    expanded = expand_nodes(model, unwrap_softmaxes(model), _EXPANDERS, inlined)
    forms = find_rounded_forms(expanded.base, prefix).within(own)
    return (
        replace(expanded, model=with_cores(expanded.model, forms.cores), rounded=forms)
        if forms.cores
        else replace(expanded, rounded=forms)
    )


def is_fused(node: onnx.NodeProto) -> bool:
    """Whether a node is a fused attention operator, whether it can be expanded or not."""
    return (domain_of(node), node.op_type) in _EXPANDERS
