# SPDX-License-Identifier: Apache-2.0
"""What is done to a model before sites are searched: functions with attention are inlined, fused forms are expanded."""

from __future__ import annotations

import onnx

from stof.attention.expand.contrib import expand_contrib_attention, expand_multi_head
from stof.attention.expand.gqa import expand_group_query
from stof.attention.expand.onnx_attention import expand_onnx_attention
from stof.attention.expand.working_copy import Expander, FusedNode, WorkingCopy, expand_nodes
from stof.errors import UnsupportedError
from stof.graph.index import domain_of
from stof.graph.inline import inline, inline_all
from stof.symbolic import Symbolic

_MICROSOFT = "com.microsoft"


def _refuse_quantized(_: FusedNode) -> None:
    raise UnsupportedError(
        "its scores are computed from quantized projections inside of it; leave it, or use a float model"
    )


_EXPANDERS: dict[tuple[str, str], Expander] = {
    ("", "Attention"): expand_onnx_attention,
    (_MICROSOFT, "Attention"): expand_contrib_attention,
    (_MICROSOFT, "GroupQueryAttention"): expand_group_query,
    (_MICROSOFT, "MultiHeadAttention"): expand_multi_head,
    (_MICROSOFT, "QAttention"): _refuse_quantized,
}


def prepare(model: onnx.ModelProto) -> WorkingCopy:
    """The working copy of a model in which sites are searched."""
    base = inline(model, {("", "Softmax"), *_EXPANDERS})
    whole = inline_all(base)
    return expand_nodes(model, base, _EXPANDERS, None if whole is base else Symbolic(whole))


def prepare_subgraph(model: onnx.ModelProto, known: Symbolic | None) -> WorkingCopy:
    """The same for a subgraph that was made a model; ``known`` is of the model that it is part of."""
    return expand_nodes(model, model, _EXPANDERS, known)


def is_fused(node: onnx.NodeProto) -> bool:
    """Whether a node is fused attention, expandable or not."""
    return (domain_of(node), node.op_type) in _EXPANDERS
