# SPDX-License-Identifier: Apache-2.0
"""Puts declared patterns on attention over a KV cache whose mask is ``k <= q``.

GroupQueryAttention gets its pattern as attention_bias. The model with these biases is what an optimized one is compared with.
It is right in every runtime, and computes every pair. PagedAttention has no input for a pattern: its node stays as it is, and
what an optimized model is compared with is standard nodes that compute the pattern.
"""

from __future__ import annotations

from dataclasses import replace

import onnx
from onnx import numpy_helper

from stof.cached_attention.find import CacheCandidate, find_candidates, reads_cache
from stof.cached_attention.node_site import MICROSOFT
from stof.cached_attention.paged.site import PAGED, PagedSite
from stof.cached_attention.site import GROUP_QUERY, INPUT_INDEX, SPARSE, CacheSite
from stof.graph.index import all_nodes, node_tensors, opset_of
from stof.graph.inline import inline, inline_all
from stof.graph.node_builder import Builder
from stof.graph.protobuf import copy_node, copy_with_nodes
from stof.op_rewrite import Job
from stof.selection import NamedCandidate
from stof.sparsify.bias_nodes import StepTensors, emit_pattern_bias
from stof.sparsify.patterns import HeadCounts, Pattern
from stof.sparsify.sparsity import DeclaredPattern
from stof.symbolic import Symbolic

_PREFIX = "stof_pattern_"


def declare_patterns(job: Job, key: str) -> Job:
    """The job with a model in which the sites that --sparsify names have their pattern.

    Args:
        job: the optimization; its ``sparsity`` gets rows and patterns.
        key: of the op, for its selection.

    Raises:
        ArgumentError: when a pattern is one of other layers or heads.
    """
    sparsity, before = job.sparsity, job.model
    nodes = [*all_nodes(before.graph.node), *(n for f in before.functions for n in all_nodes(f.node))]
    if sparsity is None or not any(reads_cache(n) for n in nodes):
        return job
    base = inline(before, {(MICROSOFT, GROUP_QUERY), (MICROSOFT, SPARSE), (MICROSOFT, PAGED)})
    inlined = inline_all(base)
    symbolic = Symbolic(base, None if inlined is base else Symbolic(inlined))
    candidates = find_candidates(base, symbolic, job.options.target)
    patterns = _Patterns(base)
    for layer, candidate in enumerate(candidates):
        reason = job.selections[key].reason_left_out(NamedCandidate(candidate.name, layer)) or _reason_dense(candidate)
        site = candidate.site
        heads = None if site is None else HeadCounts(site.num_heads, site.kv_num_heads)
        declaration = None if heads is None else sparsity.pattern_of(layer, len(candidates), heads)
        if reason or site is None or declaration is None:
            sparsity.keep_dense(candidate.name, layer, reason or "--sparsify leaves it dense")
            continue
        pattern, facts = declaration
        if misfit := _reason_misfit(site, pattern):
            sparsity.keep_dense(candidate.name, layer, misfit)
            continue
        if isinstance(site, PagedSite):
            declared = DeclaredPattern(pattern, facts, patterns.name_tables(pattern))
            sparsity.put(candidate.name, layer, site.node.output[0], declared, needs_operator=True)
            continue
        declared = DeclaredPattern(pattern, facts, patterns.add_tables(pattern), site.input("attention_bias"))
        patterns.put(site, declared)
        sparsity.put(candidate.name, layer, site.node.output[0], declared)
    return replace(job, model=patterns.model())


def _reason_dense(candidate: CacheCandidate) -> str:
    """Why an attention takes no pattern; empty where it does."""
    if candidate.site is None:
        return candidate.reason
    site = candidate.site
    if isinstance(site, CacheSite) and site.layout is not None:
        return "it has block layouts already (SparseAttention)"
    if isinstance(site, CacheSite) and site.sliding:
        return "its cache holds the last positions only (sliding_window_cache)"
    if site.window:
        return f"its mask is no plain causal one: it has a window of {site.window} keys"
    if isinstance(site, PagedSite) and site.does_rotary and not site.rotary_size:
        return "the columns of its cos_cache are not known before the run; standard nodes with the pattern need them"
    return ""


def _reason_misfit(site: CacheSite | PagedSite, pattern: Pattern) -> str:
    """Why an attention cannot have this pattern; empty where it can."""
    if not pattern.is_causal:
        return f"its mask is causal: {pattern.label!r} is a pattern of bidirectional attention"
    if isinstance(site, PagedSite) and pattern.reads_run_length:
        return (
            f"over pages each sequence of a step has its own length, and a mask reads none: {pattern.label!r} needs it"
        )
    return ""


class _Patterns:
    """Biases and tables that are added to a model; attentions with the same pattern and lengths share them."""

    def __init__(self, base: onnx.ModelProto) -> None:
        self.base = base
        taken = {t for n in all_nodes(base.graph.node) for t in node_tensors(n)}
        taken |= {t.name for t in base.graph.initializer} | {i.name for i in base.graph.input}
        prefix = _PREFIX
        while any(t.startswith(prefix) for t in taken):
            prefix += "_"
        self._builder = Builder(opset_of(base), prefix)
        self._tables: dict[tuple[object, ...], str] = {}
        self._initializers: list[onnx.TensorProto] = []
        self._biases: dict[tuple[object, ...], str] = {}
        self._nodes: dict[str, list[onnx.NodeProto]] = {}  # what stands in the place of a node, by its first output

    def name_tables(self, pattern: Pattern) -> dict[str, str]:
        """The tensors of a pattern's tables; equal tables share one."""
        tensors = {}
        for name, array in pattern.tables.items():
            key = (array.dtype.str, array.shape, array.tobytes())
            tensors[name] = self._tables.setdefault(key, f"{self._builder.prefix}table{len(self._tables)}")
        return tensors

    def add_tables(self, pattern: Pattern) -> dict[str, str]:
        """The initializers of a pattern's tables."""
        tensors = self.name_tables(pattern)
        stored = {t.name for t in self._initializers}
        for name, tensor in tensors.items():
            if tensor not in stored:
                stored.add(tensor)
                self._initializers.append(numpy_helper.from_array(pattern.tables[name], tensor))
        return tensors

    def put(self, site: CacheSite, declared: DeclaredPattern) -> None:
        """Gives a node the bias of its pattern."""
        tensors = StepTensors(site.input("query"), site.input("seqlens_k"), site.input("total_sequence_length"))
        b, pattern = self._builder, declared.pattern
        key = (pattern.key, tensors.seqlens_k, tensors.total, str(site.queries), str(site.batch), site.dtype)
        start = len(b.nodes)
        if key not in self._biases:
            mask = pattern.mask
            self._biases[key] = emit_pattern_bias(b, mask, tensors, declared.tables, site.num_heads, site.dtype)
        bias = self._biases[key]
        if declared.own_bias:
            bias = b.add("Add", [declared.own_bias, bias])
        node = copy_node(site.node)
        index = INPUT_INDEX["attention_bias"]
        node.input.extend([""] * (index + 1 - len(node.input)))
        node.input[index] = bias
        self._nodes[site.node.output[0]] = [*b.nodes[start:], node]

    def model(self) -> onnx.ModelProto:
        """A copy of the model with all of it; the model itself where nothing was put."""
        if not self._nodes:
            return self.base
        nodes: list[onnx.NodeProto] = []
        for node in self.base.graph.node:
            nodes += self._nodes.get(node.output[0] if node.output else "", [node])
        declared = copy_with_nodes(self.base, nodes)
        declared.graph.initializer.extend(self._initializers)
        return declared
