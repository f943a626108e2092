# SPDX-License-Identifier: Apache-2.0
"""Sites that are one fused node of the graph already: they stay, unless no kernel runs the node."""

from __future__ import annotations

from stof.attention.expand.flex_attention import PREVIEW
from stof.attention.expand.working_copy import WorkingCopy
from stof.attention.standard.runtime import AttentionRuntime
from stof.graph.index import describe, domain_of
from stof.mask.site import AttentionSite

_WINDOWS = frozenset({"left_window_size", "right_window_size"})


def reason_to_leave_fused(working: WorkingCopy, site: AttentionSite, runtime: AttentionRuntime) -> str:
    """Why the fused node that computes a site stays; empty where it has none, or the runtime has no kernel of it."""
    fused = working.fused_nodes()
    index = next((fused[name] for name in site.nodes if name in fused), None)
    if index is None:
        return ""
    node = working.base.graph.node[index]
    if domain_of(node) == PREVIEW:
        return ""
    if not domain_of(node):
        has_window = any(a.name in _WINDOWS and a.i >= 0 for a in node.attribute)
        return "" if has_window and not runtime.has_windows else f"{describe(node)} is Attention of ONNX already"
    return f"{describe(node)} is one node already, of which ONNX Runtime has a kernel of its own"
