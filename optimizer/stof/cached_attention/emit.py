# SPDX-License-Identifier: Apache-2.0
"""Writes StofCachedAttention nodes and their function: the only step that changes a graph."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from stof.cached_attention.block_layout import BlockLayout
from stof.cached_attention.function_body import CacheVariant, fill_tables, make_cache_function
from stof.cached_attention.rewrite_node import rewrite_node
from stof.cached_attention.site import INPUT_INDEX, OP, OP_INPUTS, OUTPUTS, CacheSite
from stof.graph.dead_code import remove_dead_code
from stof.graph.index import all_nodes, contrib_version_of, node_tensors, opset_of
from stof.graph.local_functions import add_functions, check_absent
from stof.graph.names import FreshNames
from stof.graph.protobuf import copy_model


def emit_caches(model: onnx.ModelProto, sites: Sequence[CacheSite]) -> onnx.ModelProto:
    """A copy of the model in which the node of every site is a StofCachedAttention; nodes before it give it lengths.

    Raises:
        UnsupportedError: when the model holds the operator already.
    """
    check_absent(model, OP)
    emitted = copy_model(model)
    if not sites:
        return emitted
    graph = emitted.graph
    by_output = {s.node.output[0]: s for s in sites}
    names = FreshNames(n.name for n in all_nodes(graph.node))
    tensors = FreshNames({t for n in graph.node for t in node_tensors(n)} | {t.name for t in graph.initializer})
    tensors.reserve(i.name for i in graph.input)
    variants: dict[CacheVariant, int] = {}
    sinks: dict[tuple[int, int], str] = {}
    blocks = _BlockInputs(graph, names, tensors)
    calls: list[onnx.NodeProto] = []
    for node in graph.node:
        site = by_output.get(node.output[0]) if node.output else None
        if site is None:
            continue
        number = variants.setdefault(CacheVariant.of(site), len(variants))
        inputs = site.read_inputs
        if site.has_zero_sink:
            inputs[INPUT_INDEX["head_sink"]] = _zero_sink(graph, site, tensors, sinks)
        if site.layout is not None:
            inputs[INPUT_INDEX["seqlens_k"]] = blocks.last_keys(inputs[INPUT_INDEX["seqlens_k"]], node)
            inputs[OP_INPUTS.index("table0")] = blocks.table(site.layout)
        for i, table in enumerate(site.table_inputs):
            inputs[OP_INPUTS.index(f"table{i}")] = table
        rewrite_node(node, site, OP, inputs, len(OUTPUTS), number, names)
        calls.append(node)
    fill_tables(calls, list(variants), OP_INPUTS)
    most = max(len(node.input) for node in calls)
    blocks.insert_nodes()
    if any(s.declared is not None for s in sites):
        remove_dead_code(graph, model.graph)  # biases of declared patterns
    add_functions(emitted, [make_cache_function(list(variants), most, opset_of(model), contrib_version_of(model))])
    return emitted


def _zero_sink(graph: onnx.GraphProto, site: CacheSite, tensors: FreshNames, sinks: dict[tuple[int, int], str]) -> str:
    """A sink of zeros [H], which adds one to each denominator; sites share it."""
    key = site.num_heads, site.dtype
    if key not in sinks:
        sinks[key] = tensors.make("stof_sink")
        zeros = np.zeros(site.num_heads, helper.tensor_dtype_to_np_dtype(site.dtype))
        graph.initializer.append(numpy_helper.from_array(zeros, sinks[key]))
    return sinks[key]


class _BlockInputs:
    """What nodes in place of SparseAttention read besides its tensors; nodes with equal lengths or layouts share it."""

    def __init__(self, graph: onnx.GraphProto, names: FreshNames, tensors: FreshNames) -> None:
        self._graph, self._names, self._tensors = graph, names, tensors
        self._tables: dict[tuple[tuple[int, ...], str, bytes], str] = {}
        self._last_keys: dict[str, str] = {}
        self._one = ""
        self._nodes: list[tuple[str, onnx.NodeProto]] = []  # each with the output of the node that it stands before

    def last_keys(self, lengths: str, reader: onnx.NodeProto) -> str:
        """The indices of the last keys [B], from the numbers of keys."""
        if not self._one:
            self._one = self._tensors.make("stof_one")
            self._graph.initializer.append(numpy_helper.from_array(np.array([1], np.int32), self._one))
        if lengths not in self._last_keys:
            tensor = self._last_keys[lengths] = self._tensors.make("stof_seqlens_k")
            node = helper.make_node("Sub", [lengths, self._one], [tensor], name=self._names.make(tensor))
            self._nodes.append((reader.output[0], node))
        return self._last_keys[lengths]

    def table(self, layout: BlockLayout) -> str:
        """The table of a mask; empty where it reads none."""
        if layout.table is None:
            return ""
        key = layout.table.shape, str(layout.table.dtype), hashlib.sha256(layout.table.tobytes()).digest()
        if key not in self._tables:
            self._tables[key] = self._tensors.make("stof_block_table")
            self._graph.initializer.append(numpy_helper.from_array(layout.table, self._tables[key]))
        return self._tables[key]

    def insert_nodes(self) -> None:
        """Puts the nodes before their first readers."""
        if not self._nodes:
            return
        before = dict(self._nodes)
        nodes = [n for node in self._graph.node for n in (before.get(node.output[0] if node.output else ""), node) if n]
        del self._graph.node[:]
        self._graph.node.extend(nodes)
