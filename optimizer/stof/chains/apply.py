# SPDX-License-Identifier: Apache-2.0
"""What becomes of each chain of a model: found, checked, judged, emitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import onnx

from stof.chains.check import check_chain
from stof.chains.emit import Key, emit_chains, of_common_types, signature
from stof.chains.find import Graph, Left, chain_of, find_chains, settled
from stof.chains.region import Chain
from stof.errors import StofError, UnsupportedError
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


@dataclass(frozen=True)
class Verdict:
    """What becomes of a region: the parts of it that become chains, as ranges of its nodes; none with a reason."""

    segments: tuple[tuple[int, int], ...]
    reason: str = ""
    gain: float | None = None


# The number is how many different regions are left to judge, this one among them.
Judge = Callable[[Graph, Chain, Key, int], Verdict]


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
    reason = ""
    for light in (True, False):  # light: shapes that chains are taken not to need
        try:
            return _applied(Graph(model, Symbolic(model), light=light), judge)
        except UnsupportedError as error:
            reason = str(error)
        except StofError:
            raise
        except Exception as error:  # what is not found costs speed; attention that was found stays
            reason = f"chains cannot be looked for ({type(error).__name__}: {error}); please report this model"
            break
    return Chained(model, (ChainReport("-", "all operators", False, reason),))


def _applied(graph: Graph, judge: Judge) -> Chained:
    model = graph.model
    names = _Names()
    if any(n.op_type == "StofChain" for n in all_nodes(model.graph.node)):
        return Chained(model, (ChainReport("-", "", False, "the model holds StofChain already"),))
    chains, left = find_chains(graph)
    if graph.light:
        chains = settled(graph, chains)
    reports = [replace(_none(graph, x), chain=names.of(graph, x.places)) for x in left]
    verdicts: dict[tuple[Key, str], Verdict] = {}
    wanted: list[tuple[Chain, Verdict]] = []
    kinds = {(signature(c, graph.symbolic), operators(graph, c.region.places)) for c in chains}
    for chain in chains:
        words = operators(graph, chain.region.places)
        key = signature(chain, graph.symbolic)
        if (key, words) not in verdicts:
            verdicts[key, words] = _verdict(chain, key, graph, judge, len(kinds) - len(verdicts))
        verdict = verdicts[key, words]
        parts = [chain_of(graph, chain.region.places[i:j]) for i, j in verdict.segments]
        good = [p for p in parts if isinstance(p, Chain)]
        wanted += [(p, verdict) for p in good]
        if not good:
            name = names.of(graph, chain.region.places)
            text = chain.description.text
            reports.append(ChainReport(name, words, False, verdict.reason, text, verdict.gain))
    fitting, _ = of_common_types([c for c, _ in wanted])
    if len(fitting) < len(chains) and graph.light:
        fitting = settled(graph, fitting)
    taken = {c.region.places: c for c in fitting}
    for chain, verdict in wanted:
        places = chain.region.places
        text = taken.get(places, chain).description.text
        reason = "replaced" if places in taken else _OTHER_TYPES
        name = names.of(graph, places)
        reports.append(ChainReport(name, operators(graph, places), places in taken, reason, text, verdict.gain))
    shapes = {t: other for c in fitting for t, other in graph.substitutes(c.region.places).items()}
    return Chained(emit_chains(model, graph.symbolic, fitting, shapes), tuple(reports))


_OTHER_TYPES = "its outputs are of other types than those of most chains; all calls of one function share them"


def _verdict(chain: Chain, key: Key, graph: Graph, judge: Judge, left: int) -> Verdict:
    try:
        check_chain(chain, graph.nodes, graph.symbolic, opset_of(graph.model))
    except UnsupportedError as error:
        return Verdict((), str(error))
    verdict = judge(graph, chain, key, left)
    if verdict.segments == ((0, len(chain.region.places)),):
        return verdict
    try:
        for start, end in verdict.segments:
            part = chain_of(graph, chain.region.places[start:end])
            if isinstance(part, Chain):
                check_chain(part, graph.nodes, graph.symbolic, opset_of(graph.model))
    except UnsupportedError as error:
        return Verdict((), str(error))
    return verdict


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
