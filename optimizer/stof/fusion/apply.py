# SPDX-License-Identifier: Apache-2.0
"""What becomes of each chain of a model: found, checked, judged, emitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import onnx

from stof.errors import StofError, UnsupportedError
from stof.fusion.check import check_chain
from stof.fusion.decide.selection import Decided, Selection
from stof.fusion.emit import Key, emit_chains, grouped, of_common_types, signature
from stof.fusion.gemm import Forms
from stof.fusion.merge_matmuls import Merges, merged
from stof.fusion.packed_qkv import packed
from stof.fusion.plan_entry import ChainPlan
from stof.fusion.regions import Graph, Left, chain_of, find_chains, settled
from stof.fusion.split_gemm_bias import joined, separated
from stof.fusion.translate import Chain
from stof.graph.index import all_nodes, opset_of
from stof.graph.names import FreshNames
from stof.symbolic import Symbolic


@dataclass(frozen=True)
class ChainReport:
    """One chain, or operators that are none. ``gain`` is the replaced operators' time over the chain's, ``measured`` or
    predicted.
    """

    chain: str
    operators: str
    replaced: bool
    reason: str
    description: str = ""
    gain: float | None = None
    measured: bool = False


@dataclass(frozen=True)
class Verdict:
    """What becomes of a region: the parts of it that become chains, as ranges of its nodes; none with a reason."""

    segments: tuple[tuple[int, int], ...]
    reason: str = ""
    gain: float | None = None
    measured: bool = False


# The number is how many different regions are left to judge, this one among them.
Judge = Callable[[Graph, Chain, Key, int], Verdict]


@dataclass(frozen=True)
class Chained:
    """A model with its chains replaced, and what became of each."""

    model: onnx.ModelProto
    reports: tuple[ChainReport, ...]
    plans: tuple[ChainPlan, ...] = ()

    @property
    def replaced(self) -> int:
        """How many chains were replaced."""
        return sum(r.replaced for r in self.reports)

    def without(self, model: onnx.ModelProto, reason: str) -> Chained:
        """The same with every chain left as it was."""
        kept = (replace(r, replaced=False, reason=reason) if r.replaced else r for r in self.reports)
        plans = (ChainPlan(p.chain, p.operators, (), "outputs differed") if p.replace else p for p in self.plans)
        return Chained(model, tuple(kept), tuple(plans))


def apply_chains(
    model: onnx.ModelProto,
    judge: Judge,
    selection: Selection | None = None,
    forms: Forms | None = None,
    tensorrt: bool = False,
    separate: bool = False,
    merges: Merges | None = None,
    packs: bool = False,
    on_cpu: bool = False,
) -> Chained:
    """A copy of a model in which the chains that a judge is for are StofChain nodes.

    Args:
        model: with attention replaced already.
        judge: decides about each different region.
        selection: what the user says of regions, which goes first.
        forms: of epilogues, where products become parts of templates.
        tensorrt: chains become plugins of TensorRT.
        separate: biases of products are looked at by themselves.
        merges: which products of one tensor are to become one, where a chain takes them apart.
        packs: attention reads its heads where they are, rather than what Split makes of them.
        on_cpu: products are those that the CPU's kernels are for.

    Raises:
        ArgumentError: when the selection names chains that the model does not have.
    """
    selection = selection or Selection()
    try:
        symbolic = Symbolic(model)
    except StofError:
        raise
    except Exception as error:  # what is not found costs speed; attention that was found stays
        return _nothing(model, _cannot(error))
    # Where no chain takes three products apart, those that nothing has to take apart may still be one.
    for three in (True, False):
        if merges is None:
            break
        together, splits = merged(model, symbolic, merges, three, packs)
        if together is model:
            break
        found = apply_chains(together, judge, selection, forms, tensorrt, separate, packs=packs, on_cpu=on_cpu)
        # What attention reads where it is needs no chain.
        if (found.replaced or not splits) and not splits & {n.name for n in found.model.graph.node}:
            return found
        if not splits:
            break
    if packs:
        model, symbolic = _packed(model, symbolic)
    whole, gemms = separated(model, symbolic) if separate else (model, {})
    symbolic = symbolic if whole is model else Symbolic(whole)
    reason = ""
    for light in (True, False):  # light: shapes that chains are taken not to need
        try:
            found = _applied(Graph(whole, symbolic, light, forms, tensorrt, on_cpu), judge, selection)
            return replace(found, model=joined(found.model, gemms))
        except UnsupportedError as error:
            reason = str(error)
        except StofError:
            raise
        except Exception as error:  # what is not found costs speed; attention that was found stays
            reason = _cannot(error)
            break
    return _nothing(model, reason)


def _packed(model: onnx.ModelProto, symbolic: Symbolic) -> tuple[onnx.ModelProto, Symbolic]:
    try:
        joint = packed(model, symbolic)
        return (model, symbolic) if joint is model else (joint, Symbolic(joint))
    except StofError:
        raise
    except Exception:  # copies stay; attention that was found does, too
        return model, symbolic


def _cannot(error: Exception) -> str:
    return f"chains cannot be looked for ({type(error).__name__}: {error}); please report this model"


def _nothing(model: onnx.ModelProto, reason: str) -> Chained:
    return Chained(model, (ChainReport("-", "all operators", False, reason),))


def _applied(graph: Graph, judge: Judge, selection: Selection) -> Chained:
    model = graph.model
    names = _Names()
    if any(n.op_type == "StofChain" for n in all_nodes(model.graph.node)):
        return Chained(model, (ChainReport("-", "", False, "the model holds StofChain already"),))
    chains, left = find_chains(graph)
    if graph.light:
        chains = settled(graph, chains)
    labels = [names.of(graph, c.region.places) for c in chains]
    places = [graph.site(c.region.places) for c in chains]
    words = [operators(graph, p) for p in places]
    selection.check(labels, words)
    reports = [replace(_none(graph, x), chain=names.of(graph, x.places)) for x in left]
    verdicts = _verdicts(graph, chains, labels, words, (judge, selection))
    wanted: list[tuple[Chain, int, tuple[int, int]]] = []
    for i, (chain, verdict) in enumerate(zip(chains, verdicts, strict=True)):
        parts = [(chain_of(graph, places[i][start:end]), (start, end)) for start, end in verdict.segments]
        good = [(p, i, segment) for p, segment in parts if isinstance(p, Chain)]
        wanted += good
        if not good:
            text = chain.description.text
            reports.append(
                ChainReport(labels[i], words[i], False, verdict.reason, text, verdict.gain, verdict.measured)
            )
    fitting = [c for own in grouped([c for c, _, _ in wanted]).values() for c in of_common_types(own)[0]]
    if len(fitting) < len(chains) and graph.light:
        fitting = settled(graph, fitting)
    taken = {c.region.places: c for c in fitting}
    segments: dict[int, list[tuple[int, int]]] = {}
    for chain, i, segment in wanted:
        own = chain.region.places
        text = taken.get(own, chain).description.text
        reason = "replaced" if own in taken else _OTHER_TYPES
        name = labels[i] if own == chains[i].region.places else names.of(graph, own)
        gain, measured = verdicts[i].gain, verdicts[i].measured
        reports.append(ChainReport(name, operators(graph, own), own in taken, reason, text, gain, measured))
        if own in taken:
            segments.setdefault(i, []).append(segment)
    shapes = {t: other for c in fitting for t, other in graph.substitutes(c.region.places).items()}
    plans = [
        ChainPlan(label, text, tuple(segments.get(i, ())))
        for i, (label, text) in enumerate(zip(labels, words, strict=True))
    ]
    emitted = emit_chains(model, graph.symbolic, fitting, shapes, graph.tensorrt)
    return Chained(emitted, tuple(reports), tuple(plans))


def _verdicts(
    graph: Graph,
    chains: Sequence[Chain],
    labels: Sequence[str],
    words: Sequence[str],
    deciding: tuple[Judge, Selection],
) -> list[Verdict]:
    """What becomes of each region: equal ones are judged once, those that the user speaks of are not."""
    judge, selection = deciding
    said = [selection.of_chain(i, name) for i, name in enumerate(labels)]
    keys = [
        (signature(c, graph.symbolic), (w, *graph.factors(graph.site(c.region.places))))
        for c, w in zip(chains, words, strict=True)
    ]
    kinds = {k for k, own in zip(keys, said, strict=True) if own is None}
    known: dict[tuple[object, Decided | None], Verdict] = {}
    found = []
    for chain, key, own in zip(chains, keys, said, strict=True):
        case = (key, own)
        if case not in known:
            if own is None:
                left = len(kinds) - sum(word is None for _, word in known)
                known[case] = _verdict(chain, key[0], graph, judge, left)
            else:
                known[case] = _checked(chain, graph, Verdict(own.segments, own.reason))
        found.append(known[case])
    return found


_OTHER_TYPES = "its outputs are of other types than those of most chains; all calls of one function share them"


def _verdict(chain: Chain, key: Key, graph: Graph, judge: Judge, left: int) -> Verdict:
    try:
        check_chain(chain, graph.nodes, graph.symbolic, opset_of(graph.model))
    except UnsupportedError as error:
        return Verdict((), str(error))
    verdict = judge(graph, chain, key, left)
    site = graph.site(chain.region.places)
    whole = verdict.segments == ((len(site) - len(chain.region.places), len(site)),)
    return verdict if whole else _checked(chain, graph, verdict)


def _checked(chain: Chain, graph: Graph, verdict: Verdict) -> Verdict:
    """A verdict whose parts compute what they replace; none of them where one does not."""
    try:
        for start, end in verdict.segments:
            part = chain_of(graph, graph.site(chain.region.places)[start:end])
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
        self._names = FreshNames(numbered=lambda name, number: f"{name} ({number})")

    def of(self, graph: Graph, places: Sequence[int]) -> str:
        node = graph.nodes[places[-1]]
        return self._names.make(node.name or f"{node.op_type} of {node.output[0]}")
