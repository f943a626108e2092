# SPDX-License-Identifier: Apache-2.0
"""The matmuls by constant weights of an optimized model, each with the epilogue that StofGemm takes in."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from stof.attention.limits import type_names
from stof.errors import StofError, UnsupportedError
from stof.fusion.check import check_chain
from stof.fusion.emit import GEMM, ChainSignature, chain_signature, select_common_types
from stof.fusion.fusion_graph import FusionGraph
from stof.fusion.gemm import MATMUL_OPS, PLAIN_GEMM_ATTRIBUTES, FusedGemm, is_fusable_matmul, is_plain_matmul
from stof.fusion.policy import ChainPolicy, ShapeReads
from stof.fusion.regions import build_chain
from stof.gemm_precision.plain_gemms import PlainGemms, find_plain_gemms
from stof.gemm_precision.subgraphs import find_subgraph_matmuls
from stof.graph.index import all_nodes, describe, domain_of, opset_of
from stof.graph.names import FreshNames
from stof.graph.node_fields import attributes_of
from stof.runtime.library import cpu_gemm_form
from stof.symbolic import Int, Symbolic, integer
from stof.symbolic.rules.movement_helpers import element_count

_LEAST_WEIGHTS = 1 << 14  # elements of a weight: rounding the other factor takes as long as a smaller one's matmul
_MOST_OPERATORS = 24  # of an epilogue
_HAS_GEMMS = "the model has StofGemm already, which was chosen in fp32 with all other matmuls"
_IN_EPILOGUES = frozenset({"elementwise", "moving"})


@dataclass(frozen=True, eq=False)
class GemmSite:
    """A matmul by a constant weight, or two of the same left operand.

    Attributes:
        name: of the first matmul.
        operators: those that become StofGemm.
        weights: the shape of the weight.
        chain: the operator; None where there is none.
        reason: why there is none.
    """

    name: str
    operators: str
    weights: str
    chain: FusedGemm | None = None
    reason: str = ""


@dataclass(frozen=True, eq=False)
class FoundGemms:
    """The GEMMs of a model.

    Attributes:
        model: as the ops have written it.
        plain: the plain forms of its Gemm nodes.
        graph: the model with these forms, in which the GEMMs were found.
        sites: in the order of the graph.
    """

    model: onnx.ModelProto
    plain: PlainGemms
    graph: FusionGraph
    sites: tuple[GemmSite, ...]

    def checked(self) -> FoundGemms:
        """The same; sites whose description does not compute what its operators compute have a reason."""
        reasons: dict[ChainSignature, str] = {}
        sites = []
        for site in self.sites:
            if site.chain is None:
                sites.append(site)
                continue
            key = chain_signature(site.chain, self.graph.symbolic)
            if key not in reasons:
                reasons[key] = self._why_wrong(site.chain)
            sites.append(replace(site, chain=None, reason=reasons[key]) if reasons[key] else site)
        return replace(self, sites=tuple(sites))

    def _why_wrong(self, chain: FusedGemm) -> str:
        try:
            check_chain(chain, self.graph.nodes, self.graph.symbolic, opset_of(self.graph.model))
        except UnsupportedError as error:
            return str(error)
        return ""


def find_gemms(model: onnx.ModelProto, facts: Symbolic, folder: Path) -> FoundGemms:
    """The matmuls of a model by constant weights; those of subgraphs have a reason why they stay.

    Args:
        model: as the ops have written it.
        facts: of it.
        folder: of its external data.
    """
    # A plan's choice was measured in fp32, of all matmuls together.
    has_gemms = any(n.op_type == GEMM for n in all_nodes(model.graph.node))
    plain = PlainGemms({}, {}) if has_gemms else find_plain_gemms(model, _LEAST_WEIGHTS, folder)
    prepared = plain.put(model, plain.forms)
    facts = facts if prepared is model else Symbolic(prepared)
    policy = ChainPolicy(epilogue_forms=cpu_gemm_form, has_cpu_gemm=True, has_16_bit_cpu_gemm=True)
    graph = FusionGraph(prepared, facts, policy, ShapeReads.AS_IN_GRAPH)
    names, taken, sites = FreshNames(), set[int](), list[GemmSite]()
    outputs = {v.name for v in model.graph.output}
    for index, node in enumerate(graph.nodes):
        is_by_constant = (
            len(node.input) > 1 and node.input[1] in graph.constants and node.input[0] not in graph.constants
        )
        if domain_of(node) or node.op_type not in MATMUL_OPS or not is_by_constant or index in taken:
            continue
        if not [*graph.consumers(index), *outputs.intersection(node.output)]:  # nobody reads it
            continue
        shape = facts.shape(node.input[1]) or ()
        weights = " x ".join(map(str, shape))
        name = names.make(node.name or node.output[0])
        reason = _HAS_GEMMS if has_gemms else _why_small(shape) or plain.reasons.get(index, "")
        chain = reason or _choose_epilogue(graph, index, taken)
        if isinstance(chain, str):
            sites.append(GemmSite(name, node.op_type, weights, reason=chain))
            continue
        taken.update(chain.region.node_indices)
        sites.append(GemmSite(name, graph.operator_names(chain.region.node_indices), weights, chain))
    return FoundGemms(model, plain, graph, (*_with_common_type(sites), *_sites_of_subgraphs(model.graph, names)))


def _sites_of_subgraphs(graph: onnx.GraphProto, names: FreshNames) -> list[GemmSite]:
    """The matmuls of subgraphs, none of which is replaced: a run gives no tensors from which their errors could be measured."""
    sites = []
    for found in find_subgraph_matmuls(graph):
        shape = [integer(d) for d in found.weight.dims]
        reason = _why_small(shape) or f"it lies in {found.subgraph}, where errors of GEMMs cannot be measured"
        name = names.make(found.node.name or found.node.output[0])
        sites.append(GemmSite(name, found.node.op_type, " x ".join(map(str, shape)), reason=reason))
    return sites


def _with_common_type(sites: Sequence[GemmSite]) -> tuple[GemmSite, ...]:
    """The same; those of another type than most have a reason: all StofGemm share a function, whose result has one type."""
    chains = [site.chain for site in sites if site.chain is not None]
    fitting, types = select_common_types(chains)
    kept = {chain.region for chain in fitting}

    def reason(chain: FusedGemm) -> str:
        kind, most = (type_names(each, "and") for each in (chain.dtypes, types))
        return (
            f"it is {kind}, expected {most} as most matmuls by constant weights: all StofGemm of a model share one type"
        )

    return tuple(
        site
        if site.chain is None or site.chain.region in kept
        else replace(site, chain=None, reason=reason(site.chain))
        for site in sites
    )


def _why_small(shape: Sequence[Int]) -> str:
    size = element_count(tuple(shape)).constant
    if size is not None and size < _LEAST_WEIGHTS:
        return f"a weight of {size} elements, expected {_LEAST_WEIGHTS}: nothing to gain"
    return ""


def _choose_epilogue(graph: FusionGraph, matmul: int, taken: Collection[int]) -> FusedGemm | str:
    """The matmul with as many operators behind it as one kernel computes; the reason where there is no kernel."""
    if not is_fusable_matmul(graph.nodes[matmul], graph.symbolic):
        return _why_not_plain(graph, graph.nodes[matmul])
    members = {matmul}
    first = _build(graph, members)
    best: FusedGemm | str = first
    for _ in range(_MOST_OPERATORS):
        # In the order of the graph: what the next one reads is among the members, or does not depend on them.
        index = min({r for m in members for r in graph.consumers(m)} - members, default=-1)
        if index < 0 or graph.kinds[index] not in _IN_EPILOGUES or index in taken:
            break
        members.add(index)
        chain = _build(graph, members)
        # A tensor of two roles (x + x · w) has a description that draws it twice, and cannot be checked.
        if isinstance(chain, FusedGemm) and graph.is_convex(members) and len(set(chain.inputs)) == len(chain.inputs):
            best = chain
    return best


def _why_not_plain(graph: FusionGraph, node: onnx.NodeProto) -> str:
    """Why StofGemm does not compute a matmul by a constant weight: how it reads its factors, or their shapes."""
    left, weight = node.input[:2]
    if not is_plain_matmul(node):
        attributes = attributes_of(node)
        words = ", ".join(f"{name}={attributes[name]:g}" for name in PLAIN_GEMM_ATTRIBUTES if name in attributes)
        writer = graph.writer.get(weight)
        if writer is not None and graph.nodes[writer].op_type != "Constant":
            return (
                f"it has {words}, and its weight {weight!r} is no stored tensor but computed by "
                f"{describe(graph.nodes[writer])}: fold constants first"
            )
        kind, shape = type_names([graph.symbolic.dtype(weight)], "or"), graph.symbolic.shape(weight) or ()
        return (
            f"it has {words}, and its weight {weight!r} is {' x '.join(map(str, shape))} {kind}, "
            "expected a stored matrix of fp32, fp16 or bf16"
        )
    shapes = [(name, graph.symbolic.shape(name)) for name in (left, weight)]
    unknown = [repr(name) for name, shape in shapes if shape is None]
    if unknown:
        return f"the shape of {' and '.join(unknown)} is not known"
    (_, rows), (_, matrix) = shapes
    if len(matrix or ()) != 2:
        return f"its weight {weight!r} has {len(matrix or ())} axes, expected a matrix"
    if len(rows or ()) < 2:
        return f"its left operand {left!r} has {len(rows or ())} axes, expected two at least"
    return f"the number of columns of its weight {weight!r} is not known"


def _build(graph: FusionGraph, members: Collection[int]) -> FusedGemm | str:
    try:
        chain = build_chain(graph, members)
    except StofError as error:
        return str(error)
    if isinstance(chain, FusedGemm):
        return chain
    return str(getattr(chain, "reason", "it has no description"))
