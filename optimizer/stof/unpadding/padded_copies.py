# SPDX-License-Identifier: Apache-2.0
"""What kernels that run over padded copies of packed sequences do not compute (plugins/core/ops/attention_padded_copies.cc)."""

from __future__ import annotations

import onnx

from stof.graph.node_fields import plain_attributes_of
from stof.unpadding.region import UnpaddedRegion


def find_uncopied(graph: onnx.GraphProto, region: UnpaddedRegion) -> str:
    """Why an attention of a region cannot run over padded copies; empty where all of them can.

    Rows without an allowed key attend all keys under ``empty_rows`` ``all``. Those that exist in the copies alone must
    not be among them, and get a bias of -inf, in the place of which there must be no other.
    """
    for i in sorted(region.sites | region.cross_sites):
        node = graph.node[i]
        attributes = plain_attributes_of(node)
        has_bias = "bias" in str(attributes.get("operands", "")).split()
        if attributes.get("empty_rows") == "all" and has_bias:
            return f"attention {node.name or node.output[0]!r} has a bias, and rows that attend all keys (empty_rows is 'all')"
    return ""
