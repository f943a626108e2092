# SPDX-License-Identifier: Apache-2.0
"""Writes StofCachedAttention nodes and their function: the only step that changes a graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from stof.cached_attention.function_body import CacheVariant, make_cache_function
from stof.cached_attention.site import INPUT_INDEX, MICROSOFT, OP, OUTPUTS, CacheSite
from stof.graph.dead_code import remove_dead_code
from stof.graph.index import DOMAIN, all_nodes, node_tensors, opset_of
from stof.graph.local_functions import add_functions, check_absent
from stof.graph.names import FreshNames
from stof.graph.protobuf import copy_model


def emit_caches(model: onnx.ModelProto, sites: Sequence[CacheSite]) -> onnx.ModelProto:
    """A copy of the model in which the node of every site is a StofCachedAttention, at the same index.

    Raises:
        UnsupportedError: when the model holds the operator already.
    """
    check_absent(model, OP)
    found = copy_model(model)
    if not sites:
        return found
    graph = found.graph
    by_output = {s.node.output[0]: s for s in sites}
    names = FreshNames(n.name for n in all_nodes(graph.node))
    tensors = FreshNames({t for n in graph.node for t in node_tensors(n)} | {t.name for t in graph.initializer})
    tensors.reserve(i.name for i in graph.input)
    variants: dict[CacheVariant, int] = {}
    sinks: dict[tuple[int, int], str] = {}
    most = 0
    for node in graph.node:
        site = by_output.get(node.output[0]) if node.output else None
        if site is None:
            continue
        number = variants.setdefault(CacheVariant.of(site), len(variants))
        inputs = site.read_inputs
        if site.has_zero_sink:
            inputs[INPUT_INDEX["head_sink"]] = _zero_sink(graph, site, tensors, sinks)
        if tables := site.table_inputs:
            inputs += ["", *tables]  # query_seqlens is reserved
        while not inputs[-1]:
            inputs.pop()
        most = max(most, len(inputs))
        _rewrite_node(node, site, names, inputs, number)
    contrib = next((int(e.version) for e in found.opset_import if e.domain == MICROSOFT), 1)
    if any(s.declared is not None for s in sites):
        remove_dead_code(graph, model.graph)  # biases of declared patterns
    add_functions(found, [make_cache_function(list(variants), most, opset_of(model), contrib)])
    return found


def _rewrite_node(
    node: onnx.NodeProto, site: CacheSite, names: FreshNames, inputs: Sequence[str], mask_id: int
) -> None:
    """Turns a node into the operator in place; documentation and metadata stay."""
    attributes = {
        "num_heads": site.num_heads,
        "kv_num_heads": site.kv_num_heads,
        "mask": site.mask,
        "mask_id": mask_id,
        "scale": site.scale,
        "softcap": site.softcap,
        "do_rotary": int(site.does_rotary),
        "rotary_interleaved": int(bool(site.attributes.get("rotary_interleaved", 0))),
        "qk_norm_epsilon": site.norm_epsilon,
        "sliding_window_cache": site.window if site.sliding else 0,
    }
    node.op_type, node.domain = OP, DOMAIN
    node.name = names.make(f"{site.name.rpartition('/')[0] or site.name}/{OP}")
    outputs = list(node.output[: len(OUTPUTS)])
    for field, values in ((node.input, inputs), (node.output, outputs)):
        del field[:]
        field.extend(values)
    del node.attribute[:]
    node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())


def _zero_sink(graph: onnx.GraphProto, site: CacheSite, tensors: FreshNames, sinks: dict[tuple[int, int], str]) -> str:
    """A sink of zeros [H], which adds one to each denominator; sites share it."""
    key = site.num_heads, site.dtype
    if key not in sinks:
        sinks[key] = tensors.make("stof_sink")
        zeros = np.zeros(site.num_heads, helper.tensor_dtype_to_np_dtype(site.dtype))
        graph.initializer.append(numpy_helper.from_array(zeros, sinks[key]))
    return sinks[key]
