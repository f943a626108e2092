# SPDX-License-Identifier: Apache-2.0
"""What becomes of each chain of a model: found, checked, judged, emitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import onnx

from stof.chains.check import check_chain
from stof.chains.emit import Key, emit_chains, of_common_types, signature
from stof.chains.find import Graph, Left, find_chains, settled
from stof.chains.region import Chain
from stof.errors import UnsupportedError
from stof.graph import all_nodes, opset_of
from stof.symbolic import Symbolic


@dataclass(frozen=True)
class ChainReport:
    """One chain, or operators that are none. ``gain`` is measured: the replaced operators' time over the chain's."""

    chain: str
    operators: str
    replaced: bool
    reason: str
    description: str = ""
    gain: float | None = None


Judge = Callable[[Chain, Key], tuple[str, float | None]]  # why a chain is kept as it was ("": it is replaced), its gain


@dataclass(frozen=True)
class Chained:
    """A model with its chains replaced, and what became of each."""

    model: onnx.ModelProto
    reports: tuple[ChainReport, ...]

    @property
    def replaced(self) -> int:
        """How many chains were replaced."""
        return sum(r.replaced for r in self.reports)

    def without(self, model: onnx.ModelProto, reason: str) -> Chained:
        """The same with every chain left as it was."""
        kept = (replace(r, replaced=False, reason=reason) if r.replaced else r for r in self.reports)
        return Chained(model, tuple(kept))


def apply_chains(model: onnx.ModelProto, judge: Judge) -> Chained:
    """A copy of a model in which the chains that a judge is for are StofChain nodes."""
    symbolic = Symbolic(model)
    try:
        return _applied(Graph(model, symbolic), judge)
    except UnsupportedError:
        # Shapes that chains were taken not to need are read after all, by way of operators that stay.
        return _applied(Graph(model, symbolic, light=False), judge)


def _applied(graph: Graph, judge: Judge) -> Chained:
    model = graph.model
    names = _Names()
    if any(n.op_type == "StofChain" for n in all_nodes(model.graph.node)):
        return Chained(model, (ChainReport("-", "", False, "the model holds StofChain already"),))
    chains, left = find_chains(graph)
    if graph.light:
        chains = settled(graph, chains)
    reports = {names.of(graph, x.places): _none(graph, x) for x in left}
    verdicts: dict[Key, tuple[str, float | None]] = {}
    good: list[Chain] = []
    for chain in chains:
        key = signature(chain, graph.symbolic)
        if key not in verdicts:
            verdicts[key] = _verdict(chain, key, graph, judge)
        if not verdicts[key][0]:
            good.append(chain)
    fitting, _ = of_common_types(good)
    taken = {c.region.places for c in fitting}
    for chain in chains:
        reason, gain = verdicts[signature(chain, graph.symbolic)]
        if not reason and chain.region.places not in taken:
            reason = "its outputs are of other types than those of most chains; all calls of one function share them"
        name = names.of(graph, chain.region.places)
        words = operators(graph, chain.region.places)
        reports[name] = ChainReport(name, words, not reason, reason or "replaced", chain.description.text, gain)
    ordered = [replace(r, chain=name) for name, r in reports.items()]
    if len(fitting) < len(chains) and graph.light:
        fitting = settled(graph, fitting)
    shapes = {t: other for c in fitting for t, other in graph.substitutes(c.region.places).items()}
    return Chained(emit_chains(model, graph.symbolic, fitting, shapes), tuple(ordered))


def _verdict(chain: Chain, key: Key, graph: Graph, judge: Judge) -> tuple[str, float | None]:
    try:
        check_chain(chain, graph.nodes, graph.symbolic, opset_of(graph.model))
    except UnsupportedError as error:
        return str(error), None
    return judge(chain, key)


def _none(graph: Graph, left: Left) -> ChainReport:
    return ChainReport("", operators(graph, left.places), False, left.reason)


def operators(graph: Graph, places: Sequence[int]) -> str:
    """The operators of a region in words."""
    return " ".join(graph.nodes[p].op_type for p in places)


class _Names:
    """Labels for people: the last node's name, or the tensor that it writes."""

    def __init__(self) -> None:
        self.taken: set[str] = set()

    def of(self, graph: Graph, places: Sequence[int]) -> str:
        node = graph.nodes[places[-1]]
        name = node.name or f"{node.op_type} of {node.output[0]}"
        found, i = name, 1
        while found in self.taken:
            i += 1
            found = f"{name} ({i})"
        self.taken.add(found)
        return found
