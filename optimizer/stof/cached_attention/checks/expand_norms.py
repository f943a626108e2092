# SPDX-License-Identifier: Apache-2.0
"""Takes RMS norms out of GroupQueryAttention nodes: ONNX Runtime's CPU provider refuses nodes with them."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import helper

from stof.cached_attention.expand_sites import add_rms_norm, expand_sites, split_packed
from stof.cached_attention.site import INPUT_INDEX, CacheSite
from stof.execution.runtime_faults import RuntimeFault
from stof.graph.node_builder import Builder
from stof.graph.protobuf import copy_node


def expand_norms(model: onnx.ModelProto, sites: Sequence[CacheSite]) -> onnx.ModelProto:
    """A copy in which standard nodes normalize the heads of queries and keys; the model itself where it runs as it is."""
    wanted = [s for s in sites if s.input("q_norm_weight")]
    wanted = wanted if wanted and RuntimeFault.HEAD_NORMS.is_present() else []
    return expand_sites(model, wanted, "stof_norm", _add_without_norms) if wanted else model


def _add_without_norms(b: Builder, site: CacheSite, node: onnx.NodeProto) -> None:
    """Adds nodes that normalize queries and keys, and the node that reads these."""
    counts = (site.num_heads, site.kv_num_heads)
    tensors = split_packed(b, site, 2)
    for i, weight in enumerate(("q_norm_weight", "k_norm_weight")):
        tensors[i] = _normalize(b, site, tensors[i], site.input(weight), counts[i])
    without_norms = copy_node(node)
    for i, tensor in enumerate(tensors):
        without_norms.input[i] = tensor
    for weight in ("q_norm_weight", "k_norm_weight"):
        without_norms.input[INPUT_INDEX[weight]] = ""
    while not without_norms.input[-1]:
        without_norms.input.pop()
    b.nodes.append(without_norms)


def _normalize(b: Builder, site: CacheSite, tensor: str, weight: str, heads: int) -> str:
    """The RMS norm of each head of [B, S, heads * D]."""
    x = b.add("Reshape", [tensor, b.constant([0, 0, heads, site.head_size])])
    epsilon = b.constant(site.norm_epsilon, helper.tensor_dtype_to_np_dtype(site.dtype))
    scaled = add_rms_norm(b, x, 3, weight, epsilon)
    return b.add("Reshape", [scaled, b.constant([0, 0, heads * site.head_size])])
