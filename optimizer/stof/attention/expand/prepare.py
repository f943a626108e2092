# SPDX-License-Identifier: Apache-2.0
"""What is done to a model before sites are searched: functions with attention are inlined, fused forms are expanded."""

from __future__ import annotations

import onnx

from stof.attention.expand.contrib import lower_multi_head, lower_projecting
from stof.attention.expand.expand import Lowered, Lowerer, Request, lower
from stof.attention.expand.gqa import lower_grouped
from stof.attention.expand.onnx_attention import lower_attention
from stof.errors import UnsupportedError
from stof.graph.index import domain_of
from stof.graph.inline import inline, inline_all
from stof.symbolic import Symbolic

_MICROSOFT = "com.microsoft"


def _quantized(_: Request) -> None:
    raise UnsupportedError(
        "its scores are computed from quantized projections inside of it; leave it, or use a float model"
    )


_LOWERERS: dict[tuple[str, str], Lowerer] = {
    ("", "Attention"): lower_attention,
    (_MICROSOFT, "Attention"): lower_projecting,
    (_MICROSOFT, "GroupQueryAttention"): lower_grouped,
    (_MICROSOFT, "MultiHeadAttention"): lower_multi_head,
    (_MICROSOFT, "QAttention"): _quantized,
}


def prepare(model: onnx.ModelProto) -> Lowered:
    """The working copy of a model in which sites are searched."""
    base = inline(model, {("", "Softmax"), *_LOWERERS})
    whole = inline_all(base)
    return lower(model, base, _LOWERERS, None if whole is base else Symbolic(whole))


def expand_fused(model: onnx.ModelProto, known: Symbolic | None) -> Lowered:
    """The same for a subgraph that was made a model; ``known`` is of the model that it is part of."""
    return lower(model, model, _LOWERERS, known)


def is_fused(node: onnx.NodeProto) -> bool:
    """Whether a node is fused attention, expandable or not."""
    return (domain_of(node), node.op_type) in _LOWERERS
