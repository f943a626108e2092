# SPDX-License-Identifier: Apache-2.0
"""What kernels that run over padded copies of packed sequences do not compute (plugins/core/ops/attention_padded_copies.cc)."""

from __future__ import annotations

import onnx

from stof.graph.node_fields import plain_attributes_of
from stof.unpadding.region import UnpaddedRegion

_PAD_ALONE = ("", "pad[b, k]")  # masks that allow all keys that are not padding


def find_uncopied(graph: onnx.GraphProto, region: UnpaddedRegion) -> str:
    """Why an attention of a region cannot run over padded copies; empty where all of them can.

    Rows without an allowed key attend all keys under ``empty_rows`` ``all``. Those that exist in the copies alone must
    not be among them. Where the key padding mask is the whole mask, such a row's sequence has no real key, and all of
    its keys exist. Else they get a bias, in the place of which there must be none.
    """
    for i in sorted(region.sites | region.cross_sites):
        node = graph.node[i]
        attributes = plain_attributes_of(node)
        has_bias = "bias" in str(attributes.get("operands", "")).split()
        if attributes.get("empty_rows") == "all" and has_bias and attributes.get("mask") not in _PAD_ALONE:
            return (
                f"attention {node.name or node.output[0]!r} has a bias, rows that attend all keys (empty_rows is 'all'), and "
                "a mask of more than padding"
            )
    return ""
