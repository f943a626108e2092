# SPDX-License-Identifier: Apache-2.0
"""Finds and replaces attention in the main graph and in the subgraphs of If, Loop and Scan.

A subgraph reads tensors of outer graphs by name. To search it, it becomes a model of its own: the outer nodes that it
depends on come first, and the inputs of Loop and Scan bodies are inputs. The new nodes are then written into the subgraph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import onnx

from stof.attention.emit import Rewrite, SharedFunctions, emit, replace_sites
from stof.attention.expand.expanders import is_fused, make_subgraph_copy
from stof.attention.expand.working_copy import WorkingCopy, with_expanded
from stof.attention.find import find_sites, is_coded_softmax, is_softmax
from stof.attention.quantized.core_form import with_cores
from stof.graph.index import all_nodes, describe, node_tensors, producers, subgraphs
from stof.graph.names import FreshNames
from stof.graph.protobuf import copy_model, remove_named
from stof.mask.site import AttentionSite, Finding
from stof.symbolic import Symbolic

# From the main graph inwards: first output of the node, its attribute, and the index among the attribute's graphs.
GraphPath = tuple[tuple[str, str, int], ...]


@dataclass(frozen=True)
class Scope:
    """The main graph or a subgraph, with its sites."""

    path: GraphPath
    description: str  # "then_branch of If node 'x'"; empty for the main graph
    working: WorkingCopy
    outer_count: int  # the first nodes of ``working.base``, which belong to outer graphs
    symbolic: Symbolic
    sites: tuple[AttentionSite, ...]
    findings: tuple[Finding, ...]

    def rewrites(self, rewrites: Sequence[Rewrite]) -> list[Rewrite]:
        """The rewrites of this scope's sites."""
        names = {s.name for s in self.sites}
        return [r for r in rewrites if r.site.name in names]


@dataclass(frozen=True)
class _OuterGraphs:
    """What a subgraph can read: nodes in order, inputs, constants and declared types of all graphs around it."""

    nodes: tuple[onnx.NodeProto, ...]
    inputs: tuple[onnx.ValueInfoProto, ...]
    initializers: tuple[onnx.TensorProto, ...]
    infos: tuple[onnx.ValueInfoProto, ...]


def find_scopes(working: WorkingCopy) -> list[Scope]:
    """The main graph and every subgraph that contains attention, with their sites."""
    symbolic = working.symbolic()
    names = FreshNames()
    sites, findings = find_sites(
        working.model,
        symbolic,
        working.materialized,
        working.fused_nodes(),
        names=names,
        rounded=working.rounded,
    )
    main = Scope((), "", working, 0, symbolic, tuple(sites), (*working.findings, *findings))
    scopes = [main]
    graph = working.base.graph
    around = _OuterGraphs((), tuple(graph.input), tuple(graph.initializer), tuple(graph.value_info))
    for path, description, outside, inner in _attention_subgraphs(graph, around, ()):
        first_site_index = sum(len(s.sites) for s in scopes)
        scopes.append(
            _search_subgraph(working, path, description, outside, inner, names, first_site_index, len(scopes))
        )
    return scopes


def _attention_subgraphs(
    graph: onnx.GraphProto, around: _OuterGraphs, path: GraphPath
) -> Iterator[tuple[GraphPath, str, _OuterGraphs, onnx.GraphProto]]:
    """Every subgraph that contains attention, outer ones before inner ones."""
    for i, node in enumerate(graph.node):
        if not any(_holds_softmax(n) for g in subgraphs(node) for n in all_nodes(g.node)):
            continue
        before = replace(around, nodes=(*around.nodes, *graph.node[:i]))
        for attribute in node.attribute:
            graphs = [attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else list(attribute.graphs)
            for j, inner in enumerate(graphs):
                inner_path = (*path, (node.output[0], attribute.name, j))
                if any(map(_holds_softmax, inner.node)):
                    yield inner_path, f"{attribute.name} of {describe(node)}", before, inner
                names = _own_names(inner)
                inside = _OuterGraphs(
                    before.nodes,
                    (*(i for i in before.inputs if i.name not in names), *inner.input),
                    (*(t for t in before.initializers if t.name not in names), *inner.initializer),
                    (*(v for v in before.infos if v.name not in names), *inner.value_info),
                )
                yield from _attention_subgraphs(inner, inside, inner_path)


def _holds_softmax(node: onnx.NodeProto) -> bool:
    return is_softmax(node) or is_fused(node) or is_coded_softmax(node)


def _search_subgraph(
    main: WorkingCopy,
    path: GraphPath,
    description: str,
    around: _OuterGraphs,
    graph: onnx.GraphProto,
    names: FreshNames,
    first_site_index: int,
    scope_index: int,
) -> Scope:
    """The scope of a subgraph, whose first site and itself have these indices among all."""
    flat, outer_count = _flatten(main.base, around, graph)
    inner_outputs = {o for n in graph.node for o in n.output}
    working = make_subgraph_copy(flat, main.inlined, inner_outputs, f"stof_rounded_inner{scope_index}_")
    symbolic = working.symbolic()
    written = {o for n in flat.graph.node[:outer_count] for o in n.output}
    outer = {o for n in _expanded_outer_nodes(working, outer_count) for o in n.output}
    sites, findings = find_sites(
        working.model,
        symbolic,
        frozenset(working.materialized | written),
        working.fused_nodes(),
        names=names,
        first_index=first_site_index,
        softmaxes=frozenset(n.output[0] for n in working.model.graph.node if is_softmax(n) or is_coded_softmax(n))
        - outer,
        rounded=working.rounded,
    )
    kept_findings = [f for f in working.findings if f.details.get("output") in inner_outputs]
    hidden = sorted(_own_names(graph) & {name for n in flat.graph.node[:outer_count] for name in node_tensors(n)})
    if hidden:
        reason = f"{description} has a tensor {hidden[0]!r}, as a graph around it has, on which it depends, too"
        findings = [Finding(f.site, False, reason, f.details) for f in findings]
        findings += [Finding(s.name, False, reason, {"softmax": s.softmax}) for s in sites]
        sites = []
    return Scope(path, description, working, outer_count, symbolic, tuple(sites), (*kept_findings, *findings))


def _expanded_outer_nodes(working: WorkingCopy, outer_count: int) -> list[onnx.NodeProto]:
    """The nodes of outer graphs, with fused ones expanded."""
    return with_expanded(
        working.base.graph.node[:outer_count], [e for e in working.expanded if e.node_index < outer_count]
    )


def _flatten(base: onnx.ModelProto, around: _OuterGraphs, graph: onnx.GraphProto) -> tuple[onnx.ModelProto, int]:
    """The subgraph as a model of its own, and how many of its first nodes belong to outer graphs.

    Its own names hide outer ones: the decoder of a search has inputs that are called like those of the model.
    """
    inner_names = _own_names(graph)
    read = {n for node in graph.node for n in node_tensors(node)} | {o.name for o in graph.output}
    read -= inner_names
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
    result.graph.input.extend([*(i for i in around.inputs if i.name not in inner_names), *graph.input])
    result.graph.initializer.extend(t for t in around.initializers if t.name in read - inner_names)
    result.graph.initializer.extend(graph.initializer)
    result.graph.value_info.extend([*(v for v in around.infos if v.name not in inner_names), *graph.value_info])
    result.graph.output.extend(graph.output)
    return result, len(outer)


def _own_names(graph: onnx.GraphProto) -> set[str]:
    """The tensors that a graph itself gives a name."""
    named = {v.name for v in (*graph.input, *graph.initializer)}
    return named | {o for n in graph.node for o in n.output if o}


def emit_scopes(scopes: Sequence[Scope], rewrites: Sequence[Rewrite]) -> onnx.ModelProto:
    """A copy of the model in which the site of every rewrite, in the main graph or a subgraph, is one node."""
    main, *others = scopes
    main_rewrites = main.rewrites(rewrites)
    inner = [(s, r) for s in others if (r := s.rewrites(rewrites))]
    if not inner:
        return emit(main.working.expand_for(r.site for r in main_rewrites), main.symbolic, main_rewrites)
    functions = SharedFunctions(rewrites)
    result = copy_model(main.working.expand_for(r.site for r in main_rewrites))
    before = _live_nodes(result.graph)
    for scope, some in reversed(inner):  # innermost first
        _replace_in_subgraph(result, scope, some, functions)
    if main_rewrites:
        result = replace_sites(result, main.symbolic, main_rewrites, functions)
    _remove_dead_nodes(result.graph, before)
    return functions.finish(result)


def graph_at(model: onnx.ModelProto, path: GraphPath) -> onnx.GraphProto:
    """The graph at a path."""
    graph = model.graph
    for output, name, i in path:
        node = next(n for n in graph.node if n.output[0] == output)
        attribute = next(a for a in node.attribute if a.name == name)
        graph = attribute.g if attribute.type == onnx.AttributeProto.GRAPH else attribute.graphs[i]
    return graph


def _replace_in_subgraph(
    model: onnx.ModelProto, scope: Scope, rewrites: Sequence[Rewrite], functions: SharedFunctions
) -> None:
    graph = graph_at(model, scope.path)
    wanted = {r.site.softmax for r in rewrites}
    expanded = [e for e in scope.working.expanded if e.softmax in wanted]
    expanded = [replace(e, node_index=e.node_index - scope.outer_count) for e in expanded]
    small = onnx.ModelProto(ir_version=model.ir_version)
    small.opset_import.extend(model.opset_import)
    small.graph.name = graph.name
    small.graph.node.extend(with_expanded(graph.node, expanded))
    small.graph.initializer.extend(graph.initializer)
    small.graph.value_info.extend(graph.value_info)
    small.graph.output.extend(graph.output)
    initializers = {t.name for t in graph.initializer}
    for name in dict.fromkeys(_outer_tensors(scope)):
        if name not in initializers:
            small.graph.input.append(onnx.ValueInfoProto(name=name))
    if cores := [c for c in scope.working.rounded.cores if c.new_softmax in wanted]:
        small = with_cores(small, cores)
    edited = replace_sites(small, scope.symbolic, rewrites, functions).graph
    for field in ("node", "initializer", "value_info"):
        del getattr(graph, field)[:]
        getattr(graph, field).extend(getattr(edited, field))


def _outer_tensors(scope: Scope) -> Iterator[str]:
    """The tensors that a subgraph can read and does not write: those of outer graphs, and its own inputs."""
    flat = scope.working.base.graph
    yield from (i.name for i in flat.input)
    yield from (t.name for t in flat.initializer)
    for node in flat.node[: scope.outer_count]:
        yield from (o for o in node.output if o)


def _live_nodes(graph: onnx.GraphProto) -> set[str]:
    """First outputs of the nodes that the graph's outputs depend on."""
    producer = producers(graph.node)
    pending = [o.name for o in graph.output]
    live: set[str] = set()
    while pending:
        node = producer.get(pending.pop())
        if node is None or node.output[0] in live:
            continue
        live.add(node.output[0])
        pending.extend(node_tensors(node) - set(node.output))
    return live


def _remove_dead_nodes(graph: onnx.GraphProto, before: set[str]) -> None:
    """Removes outer nodes that were live before and are dead now: they computed a subgraph's mask, for example."""
    gone = before - _live_nodes(graph)
    for i in reversed(range(len(graph.node))):
        if graph.node[i].output[0] in gone:
            del graph.node[i]
    remove_named(graph.value_info, gone)
