# SPDX-License-Identifier: Apache-2.0
"""Sites in the subgraphs of If, Loop and Scan: each is searched as a flat model, with what it depends on in front of it.

A subgraph sees the tensors of the graphs around it by name. With the outer nodes that it needs, and the inputs of Loop and
Scan bodies as inputs, it is a model of its own, which all steps treat as any other; only what is written goes back into it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import onnx

from stof.attention.emit import Rewrite, SharedFunction, emit, replace_sites
from stof.attention.expand.prepare import is_fused, prepare_subgraph
from stof.attention.expand.working_copy import WorkingCopy, with_expanded
from stof.attention.find import find_sites, is_softmax
from stof.graph.index import all_nodes, describe, node_tensors, subgraphs
from stof.graph.names import FreshNames
from stof.site import AttentionSite, Finding
from stof.symbolic import Symbolic

GraphPath = tuple[tuple[str, str, int], ...]  # first output of a node, its attribute, which of the attribute's graphs


@dataclass(frozen=True)
class Scope:
    """A graph with its sites. ``outer`` of the nodes of ``prepared.base`` belong to the graphs around it."""

    path: GraphPath
    words: str
    prepared: WorkingCopy
    outer: int
    symbolic: Symbolic
    sites: tuple[AttentionSite, ...]
    findings: tuple[Finding, ...]

    def rewrites(self, rewrites: Sequence[Rewrite]) -> list[Rewrite]:
        """Those that are of this scope."""
        own = {s.name for s in self.sites}
        return [r for r in rewrites if r.site.name in own]


@dataclass(frozen=True)
class _OuterGraphs:
    """What a subgraph sees: nodes in order, inputs, constants and known types of all graphs around it."""

    nodes: tuple[onnx.NodeProto, ...]
    inputs: tuple[onnx.ValueInfoProto, ...]
    initializers: tuple[onnx.TensorProto, ...]
    infos: tuple[onnx.ValueInfoProto, ...]


def find_scopes(prepared: WorkingCopy) -> list[Scope]:
    """The main graph and every subgraph that holds attention, with their sites."""
    symbolic = prepared.symbolic()
    names = FreshNames()
    sites, findings = find_sites(prepared.model, symbolic, prepared.fixed, prepared.written(), names=names)
    main = Scope((), "", prepared, 0, symbolic, tuple(sites), (*prepared.findings, *findings))
    found = [main]
    graph = prepared.base.graph
    around = _OuterGraphs((), tuple(graph.input), tuple(graph.initializer), tuple(graph.value_info))
    for path, words, outside, inner in _attention_subgraphs(graph, around, ()):
        found.append(_search_subgraph(prepared, path, words, outside, inner, names, sum(len(s.sites) for s in found)))
    return found


def _attention_subgraphs(
    graph: onnx.GraphProto, around: _OuterGraphs, path: GraphPath
) -> Iterator[tuple[GraphPath, str, _OuterGraphs, onnx.GraphProto]]:
    """Every subgraph in which there is attention, innermost ones after those around them."""
    for place, node in enumerate(graph.node):
        if not any(is_softmax(n) or is_fused(n) for g in subgraphs(node) for n in all_nodes(g.node)):
            continue
        before = replace(around, nodes=(*around.nodes, *graph.node[:place]))
        for attribute in node.attribute:
            graphs = [attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else list(attribute.graphs)
            for i, inner in enumerate(graphs):
                own = (*path, (node.output[0], attribute.name, i))
                if any(is_softmax(n) or is_fused(n) for n in inner.node):
                    yield own, f"{attribute.name} of {describe(node)}", before, inner
                inside = _OuterGraphs(
                    before.nodes,
                    (*before.inputs, *inner.input),
                    (*before.initializers, *inner.initializer),
                    (*before.infos, *inner.value_info),
                )
                yield from _attention_subgraphs(inner, inside, own)


def _search_subgraph(
    main: WorkingCopy,
    path: GraphPath,
    words: str,
    around: _OuterGraphs,
    graph: onnx.GraphProto,
    names: FreshNames,
    first_index: int,
) -> Scope:
    flat, outer = _flatten(main.base, around, graph)
    prepared = prepare_subgraph(flat, main.known)
    symbolic = prepared.symbolic()
    written = {o for n in flat.graph.node[:outer] for o in n.output}
    shift = _first_inner_node(prepared, outer)
    sites, findings = find_sites(
        prepared.model,
        symbolic,
        frozenset(prepared.fixed | written),
        prepared.written(),
        names=names,
        first_index=first_index,
        softmaxes=frozenset(n.output[0] for n in prepared.model.graph.node[shift:] if is_softmax(n)),
    )
    own = {o for n in graph.node for o in n.output}
    left = [f for f in prepared.findings if f.details.get("output") in own]
    return Scope(path, words, prepared, outer, symbolic, tuple(sites), (*left, *findings))


def _first_inner_node(prepared: WorkingCopy, outer: int) -> int:
    """Where the subgraph's own nodes begin, after outer ones were expanded."""
    return outer + sum(len(g.nodes) - 1 for g in prepared.groups if g.place < outer)


def _flatten(base: onnx.ModelProto, around: _OuterGraphs, graph: onnx.GraphProto) -> tuple[onnx.ModelProto, int]:
    """The subgraph as a model of its own, and how many nodes in front are of the graphs around it."""
    read = {n for node in graph.node for n in node_tensors(node)} | {o.name for o in graph.output}
    outer: list[onnx.NodeProto] = []
    for node in reversed(around.nodes):
        if read & set(node.output):
            outer.insert(0, node)
            read |= node_tensors(node)
    result = onnx.ModelProto(ir_version=base.ir_version)
    result.opset_import.extend(base.opset_import)
    result.functions.extend(base.functions)
    result.graph.name = graph.name or "subgraph"
    result.graph.node.extend([*outer, *graph.node])
    result.graph.input.extend([*around.inputs, *graph.input])
    result.graph.initializer.extend(t for t in (*around.initializers, *graph.initializer) if t.name in read)
    result.graph.value_info.extend([*around.infos, *graph.value_info])
    result.graph.output.extend(graph.output)
    return result, len(outer)


def emit_scopes(scopes: Sequence[Scope], rewrites: Sequence[Rewrite]) -> onnx.ModelProto:
    """A copy of the model in which every rewrite's site, in whatever graph, is one StofAttention node."""
    main, *others = scopes
    own = main.rewrites(rewrites)
    inner = [(s, r) for s in others if (r := s.rewrites(rewrites))]
    if not inner:
        return emit(main.prepared.partly(r.site for r in own), main.symbolic, own)
    calls = SharedFunction(rewrites)
    result = onnx.ModelProto()
    result.CopyFrom(main.prepared.partly(r.site for r in own))
    before = _live_nodes(result.graph)
    for scope, some in reversed(inner):  # innermost first
        _replace_in_subgraph(result, scope, some, calls)
    if own:
        result = replace_sites(result, main.symbolic, own, calls)
    _remove_dead_nodes(result.graph, before)
    return calls.finish(result)


def graph_at(model: onnx.ModelProto, path: GraphPath) -> onnx.GraphProto:
    """The graph at a path."""
    graph = model.graph
    for output, name, i in path:
        node = next(n for n in graph.node if n.output[0] == output)
        attribute = next(a for a in node.attribute if a.name == name)
        graph = attribute.g if attribute.type == onnx.AttributeProto.GRAPH else attribute.graphs[i]
    return graph


def _replace_in_subgraph(
    model: onnx.ModelProto, scope: Scope, rewrites: Sequence[Rewrite], calls: SharedFunction
) -> None:
    graph = graph_at(model, scope.path)
    wanted = {r.site.softmax for r in rewrites}
    groups = [replace(g, place=g.place - scope.outer) for g in scope.prepared.groups if g.softmax in wanted]
    small = onnx.ModelProto(ir_version=model.ir_version)
    small.opset_import.extend(model.opset_import)
    small.graph.name = graph.name
    small.graph.node.extend(with_expanded(graph.node, groups))
    small.graph.initializer.extend(graph.initializer)
    small.graph.value_info.extend(graph.value_info)
    small.graph.output.extend(graph.output)
    known = {t.name for t in graph.initializer}
    for name in dict.fromkeys(_outer_tensors(scope)):
        if name not in known:
            small.graph.input.append(onnx.ValueInfoProto(name=name))
    edited = replace_sites(small, scope.symbolic, rewrites, calls).graph
    for field in ("node", "initializer", "value_info"):
        del getattr(graph, field)[:]
        getattr(graph, field).extend(getattr(edited, field))


def _outer_tensors(scope: Scope) -> Iterator[str]:
    """The tensors that nodes of a subgraph may read and do not write: what is around it, and its own inputs."""
    flat = scope.prepared.base.graph
    yield from (i.name for i in flat.input)
    yield from (t.name for t in flat.initializer)
    for node in flat.node[: scope.outer]:
        yield from (o for o in node.output if o)


def _live_nodes(graph: onnx.GraphProto) -> set[str]:
    """First outputs of the nodes that the outputs need."""
    producer = {o: n for n in graph.node for o in n.output if o}
    pending = [o.name for o in graph.output]
    found: set[str] = set()
    while pending:
        node = producer.get(pending.pop())
        if node is None or node.output[0] in found:
            continue
        found.add(node.output[0])
        pending.extend(node_tensors(node) - set(node.output))
    return found


def _remove_dead_nodes(graph: onnx.GraphProto, before: set[str]) -> None:
    """Outer nodes that were needed, by a subgraph's mask for instance, and are not any more."""
    gone = before - _live_nodes(graph)
    for i in reversed(range(len(graph.node))):
        if graph.node[i].output[0] in gone:
            del graph.node[i]
    for i in reversed(range(len(graph.value_info))):
        if graph.value_info[i].name in gone:
            del graph.value_info[i]
