# SPDX-License-Identifier: Apache-2.0
"""Finding chains: memory-bound operators are merged along edges into regions as large as one kernel can compute.

A region is convex: no path leaves it and comes back, so that it can become one node.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx
from onnx import TensorProto

from stof.errors import UnsupportedError
from stof.fusion.description import MOST_INPUTS, MOST_OUTPUTS, MOST_REDUCTIONS
from stof.fusion.element_ops import FREE, NORMS, TYPES, as_number, data_inputs, kind_of_node
from stof.fusion.function_body import make_branch
from stof.fusion.gemm import Forms, is_product, product_of
from stof.fusion.tensorrt_plugin import check_plugin
from stof.fusion.translate import Chain, Region, translate
from stof.graph.index import GraphIndex, node_tensors, opset_of, producer_indices
from stof.symbolic import Int, Symbolic, integer
from stof.symbolic.algebra.int_bounds import bound
from stof.symbolic.rules.dropout import may_drop
from stof.symbolic.rules.movement_helpers import element_count
from stof.symbolic.tensor import Shape

_MOST_NODES = 96  # of a region


@dataclass(frozen=True)
class Left:
    """Operators that could not become a chain, and why."""

    places: tuple[int, ...]
    reason: str


@dataclass
class Graph:
    """What the search for regions asks of a graph.

    Bounds, axes and shapes that operators are given are known when a chain is made of them: it does not read them.
    ``light``: they are taken for unread by every memory-bound operator, as if all of them became parts of chains.
    """

    model: onnx.ModelProto
    symbolic: Symbolic
    light: bool = True
    forms: Forms | None = None  # of epilogues, where products become parts of templates
    tensorrt: bool = False  # chains become plugins of TensorRT
    on_cpu: bool = False  # products are in fp32 by constants, and also templates where nothing follows them
    nodes: Sequence[onnx.NodeProto] = field(init=False)
    place: dict[str, int] = field(init=False)  # of the node that writes a tensor
    readers: dict[str, list[int]] = field(init=False)
    kept: set[str] = field(init=False)  # tensors that are read outside of nodes: outputs, and what subgraphs capture
    constant: set[str] = field(init=False)
    doubtful: set[str] = field(init=False)  # tensors whose stated size a slice may fall short of, and what they decide
    memory_bound: list[int] = field(init=False)
    _counts: dict[str, Int] = field(default_factory=dict)
    known: dict[Region, Chain | Left] = field(default_factory=dict)
    _data: set[str] | None = None

    def __post_init__(self) -> None:
        graph = self.model.graph
        index = GraphIndex(graph)
        self.nodes = list(graph.node)
        self.place = producer_indices(self.nodes)
        self.readers = {}
        for i, node in enumerate(self.nodes):
            for name in dict.fromkeys(node.input):
                if name:
                    self.readers.setdefault(name, []).append(i)
        self.kept = index.outputs | index.captured
        self.constant = {t.name for t in graph.initializer} - index.inputs
        for node in self.nodes:
            if all(n in self.constant for n in node.input if n) and not _has_graph(node):
                self.constant.update(o for o in node.output if o)
        self.doubtful = self._doubtful()
        self.memory_bound = [i for i, n in enumerate(self.nodes) if self._is_memory_bound(n)]
        if self.tensorrt:
            scores = self._of_attention(set(self.memory_bound))
            self.memory_bound = [p for p in self.memory_bound if p not in scores]
        self.readers = self._data_readers(self.memory_bound if self.light else [])

    def _of_attention(self, places: set[int]) -> set[int]:
        """What stands between the two products of attention that is left to TensorRT, which fuses all of it."""
        found: set[int] = set()
        for softmax in places:
            if self.nodes[softmax].op_type != "Softmax":
                continue
            after = _reached([softmax], places, self.after)
            if all(q in places for p in after for q in self.after(p)):
                continue  # no product reads it
            found |= after | _reached([softmax], places, self.before)
        return found

    def _doubtful(self) -> set[str]:
        """Slices by numbers that may be beyond an axis whose size is not known: there is less than was asked for then.

        Sizes that are numbers are written into chains; those that are a tensor's are asked for at every run.
        """
        found: set[str] = set()
        for node in self.nodes:
            if any(n in found for n in node_tensors(node)) or (node.op_type == "Slice" and self._may_fall_short(node)):
                found.update(o for o in node.output if o)
        return found

    def _may_fall_short(self, node: onnx.NodeProto) -> bool:
        shape = self.symbolic.shape(node.input[0])
        bounds = [self.symbolic.constant(n) for n in node.input[1:3]]
        axes = self.symbolic.constant(node.input[3]) if len(node.input) > 3 and node.input[3] else None
        if shape is None:
            return False
        places = range(len(shape)) if axes is None else [int(a) % len(shape) for a in axes.reshape(-1)]
        for given in bounds:
            for axis, value in zip(places, [] if given is None else given.reshape(-1), strict=False):
                if shape[axis].constant is None and abs(int(value)) < (1 << 31) - 1:
                    rest = shape[axis] - integer(abs(int(value)))
                    if bound(rest, upper=False, smallest=1.0) < 0:
                        return True
        return False

    def settle(self, places: Iterable[int]) -> None:
        """States which nodes will be parts of chains; all others read what they are given."""
        self.readers = self._data_readers(places)

    def _data_readers(self, places: Iterable[int]) -> dict[str, list[int]]:
        """The nodes that read each tensor, of those that are still needed when these are parts of chains."""
        inside = set(places)
        read = [
            dict.fromkeys([n.input[k] for k in data_inputs(n)] if i in inside else _read(n))
            for i, n in enumerate(self.nodes)
        ]
        pending = [self.place[n] for n in self.kept if n in self.place]
        live: set[int] = set()
        while pending:
            place = pending.pop()
            if place not in live:
                live.add(place)
                pending.extend(self.place[n] for n in read[place] if n in self.place)
        found: dict[str, list[int]] = {}
        for i in sorted(live):
            for name in read[i]:
                found.setdefault(name, []).append(i)
        return found

    def substitutes(self, places: Collection[int]) -> dict[str, str]:
        """What to take the shape of instead of tensors of which others read nothing else: one that stays, of equal shape."""
        own = set(places)
        rest = {o for p in own for o in self.nodes[p].output if self._read_outside(o, own)}
        sized = {o for o in rest if o not in self.kept and self._only_sized(o, own)}
        stay = [*sorted(self.inputs(own)), *sorted(rest - sized)]
        found = {}
        for name in sized:
            shape = self.symbolic.shape(name)
            same = next((n for n in stay if self.symbolic.shape(n) == shape), None)
            if same is not None:
                found[name] = same
        return found

    def _read_outside(self, name: str, own: set[int]) -> bool:
        return bool(name) and (name in self.kept or any(r not in own for r in self.readers.get(name, ())))

    def _only_sized(self, name: str, own: set[int]) -> bool:
        return all(self.nodes[r].op_type == "Shape" for r in self.readers.get(name, ()) if r not in own)

    def _is_memory_bound(self, node: onnx.NodeProto) -> bool:
        kind = kind_of_node(node)
        if not kind or any(o in self.constant for o in node.output):
            return False
        written = [o for o in node.output if o and (o in self.readers or o in self.kept)]
        for name in [*written, *(node.input[i] for i in data_inputs(node))]:
            shape = self.symbolic.shape(name)
            if self.symbolic.dtype(name) not in {*TYPES, TensorProto.BOOL} and not self._is_number(name):
                return False
            if shape is None:
                return False
        if all(element_count(self.symbolic.shape(o) or ()).constant == 1 for o in written):
            return False
        if node.op_type == "Dropout" and may_drop(node, self.symbolic.constant):
            return False
        if node.op_type == "Gather" and self._number(node.input[1]) is None:
            return False
        return kind == "moving" or self.symbolic.dtype(node.output[0]) in {*TYPES, TensorProto.BOOL}

    def _number(self, name: str) -> float | None:
        return as_number(self.symbolic.constant(name))

    def _is_number(self, name: str) -> bool:
        return self._number(name) is not None

    def outputs(self, places: Collection[int]) -> tuple[str, ...]:
        """What others read of what these nodes write."""
        own = set(places)
        instead = self.substitutes(own)
        return tuple(
            o for p in sorted(own) for o in self.nodes[p].output if o not in instead and self._read_outside(o, own)
        )

    def inputs(self, places: Collection[int]) -> set[str]:
        """The data that these nodes read of others, numbers left out."""
        own = set(places)
        read = {self.nodes[p].input[i] for p in own for i in data_inputs(self.nodes[p])}
        return {n for n in read if self.place.get(n) not in own and not self._is_number(n)}

    def of_data(self, places: Collection[int]) -> bool:
        """Whether nodes compute with what the model is given, rather than with its sizes and constants."""
        if self._data is None:
            index = GraphIndex(self.model.graph)
            found = set(index.inputs)
            for node in self.nodes:
                if node.op_type not in ("Shape", "Size") and not found.isdisjoint(_read(node)):
                    found.update(node.output)
            self._data = found
        return any(o in self._data for p in places for o in self.nodes[p].output)

    def site(self, places: Sequence[int]) -> tuple[int, ...]:
        """A region with the products that it reads, which come first, where templates take them."""
        if self.forms is None:
            return tuple(places)
        before = {q for p in places for q in self.before(p) if is_product(self.nodes[q], self.symbolic)}
        return (*sorted(before - set(places)), *places)

    def factors(self, places: Collection[int]) -> tuple[str, ...]:
        """The shapes of what products on the CPU multiply by, which what follows them does not say."""
        if not self.on_cpu:
            return ()
        shapes = (
            self.symbolic.shape(self.nodes[p].input[1]) for p in places if is_product(self.nodes[p], self.symbolic)
        )
        return tuple(" x ".join(map(str, s or ())) for s in shapes)

    def count(self, name: str) -> Int:
        """How many elements a tensor has."""
        if name not in self._counts:
            self._counts[name] = element_count(self.symbolic.shape(name) or ())
        return self._counts[name]

    def repeats(self, places: Collection[int]) -> bool:
        """Whether nodes would compute elements again that broadcasting repeats, row statistics apart."""
        computed: set[str] = set()
        for p in sorted(places):
            node = self.nodes[p]
            kind = kind_of_node(node)
            given = [node.input[i] for i in data_inputs(node)]
            if kind in ("elementwise", "rowwise") or node.op_type == "Expand":
                whole = self.symbolic.shape(node.output[0]) or ()
                if any(n in computed and self._repeated(n, whole) for n in given):
                    return True
            if kind != "moving" or any(n in computed for n in given):
                computed.update(node.output)
        return False

    def _repeated(self, name: str, whole: Shape) -> bool:
        shape = self.symbolic.shape(name) or ()
        own = (integer(1),) * (len(whole) - len(shape)) + shape
        return own[:-1] != whole[:-1]

    def convex(self, places: Collection[int]) -> bool:
        """Whether no path leaves these nodes and comes back; all others count by themselves."""
        own = set(places)
        last = max(own)
        pending = {q for p in own for q in self.after(p) if q not in own}
        seen: set[int] = set()
        while pending:
            place = pending.pop()
            if place > last or place in seen:  # nodes are in topological order
                continue
            seen.add(place)
            after = set(self.after(place))
            if after & own:
                return False
            pending |= after
        return True

    def before(self, place: int) -> Iterator[int]:
        """The places of the nodes that a node reads from."""
        node = self.nodes[place]
        return (self.place[n] for n in (node.input[i] for i in data_inputs(node)) if n in self.place)

    def after(self, place: int) -> Iterator[int]:
        """The places of the nodes that read from a node."""
        return (r for o in self.nodes[place].output for r in self.readers.get(o, ()))


def _reached(start: Iterable[int], within: Collection[int], step: Callable[[int], Iterable[int]]) -> set[int]:
    """The places that steps lead to, of those that count, with the first ones."""
    pending = list(start)
    found: set[int] = set()
    while pending:
        place = pending.pop()
        if place in within and place not in found:
            found.add(place)
            pending.extend(step(place))
    return found


def _read(node: onnx.NodeProto) -> list[str]:
    """What a node reads, in its subgraphs, too."""
    return [n for n in node.input if n] + (sorted(node_tensors(node) - set(node.output)) if _has_graph(node) else [])


def _has_graph(node: onnx.NodeProto) -> bool:
    return any(a.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for a in node.attribute)


class _Merging:
    """Groups of nodes that grow along edges while they stay convex and their outputs have one space."""

    def __init__(self, graph: Graph, places: Iterable[int], strict: bool) -> None:
        self.graph = graph
        self.strict = strict  # every group has to translate
        self.group = {p: p for p in places}
        self.members: dict[int, frozenset[int]] = {p: frozenset([p]) for p in self.group}
        self.refused: set[frozenset[int]] = set()
        # Of each node, or the first one of a group: which nodes it reaches, as bits; a group is reached and left as a whole.
        self.reach: dict[int, int] = {}
        for p in reversed(range(len(graph.nodes))):
            self.reach[p] = 1 << p
            for q in graph.after(p):
                self.reach[p] |= self.reach[q]

    def run(self) -> list[frozenset[int]]:
        """The groups that nothing can be added to."""
        changed = True
        while changed:
            changed = False
            for place in sorted(self.group):
                while self._grow(place):
                    changed = True
        return sorted(self.members.values(), key=min)

    def _grow(self, place: int) -> bool:
        """Merges a node's group with those that it reads from: all at once, or one of them."""
        own = self.group[place]
        before = [self.group[p] for p in self.graph.before(place) if p in self.group and self.group[p] != own]
        distinct = list(dict.fromkeys(before))
        for some in [distinct, *([d] for d in distinct)] if len(distinct) > 1 else [distinct]:
            if some and self._merge([own, *some]):
                return True
        return False

    def _merge(self, groups: Sequence[int]) -> bool:
        union = frozenset().union(*(self.members[g] for g in groups))
        if union in self.refused:
            return False
        if not (self._fits(union) and self._convex(union)) or (self.strict and not self._translates(union)):
            self.refused.add(union)
            return False
        first = min(groups)
        for g in groups:
            del self.members[g]
        self.members[first] = union
        for p in union:
            self.group[p] = first
        inside = sum(1 << p for p in union)
        reached = 0
        for g in groups:
            reached |= self.reach.pop(g)
        self.reach[first] = reached
        for unit, bits in self.reach.items():
            if bits & inside:
                self.reach[unit] = bits | reached
        return True

    def _translates(self, union: Collection[int]) -> bool:
        try:
            _translated(self.graph, Region(tuple(sorted(union)), self.graph.outputs(union)))
        except UnsupportedError:
            return False
        return True

    def _fits(self, union: Collection[int]) -> bool:
        graph = self.graph
        outputs = graph.outputs(union)
        nodes = [graph.nodes[p] for p in union]
        reductions = sum(kind_of_node(n) in ("reducing", "rowwise") for n in nodes)
        if not 0 < len(outputs) <= MOST_OUTPUTS or len(graph.inputs(union)) > MOST_INPUTS:
            return False
        if len(nodes) > _MOST_NODES or 2 * reductions > MOST_REDUCTIONS or not self._one_space(outputs):
            return False
        return not graph.repeats(union)

    def _one_space(self, outputs: Sequence[str]) -> bool:
        """Whether outputs have as many elements, or one for each row of others."""
        counts = [self.graph.count(o) for o in outputs]
        largest = next((c for c in counts if all(c == d or c.divide(d) is not None for d in counts)), None)
        if largest is None:
            return False
        rows: set[Int] = set()
        for count in counts:
            part = largest.divide(count)
            if count != largest and part is not None:
                rows.add(part)
        return len(rows) <= 1

    def _convex(self, union: frozenset[int]) -> bool:
        """Whether no path leaves the union and comes back; other groups count as one node."""
        inside = sum(1 << p for p in union)
        after = {q for p in union for q in self.graph.after(p) if q not in union}
        return not any(self.reach[self.group.get(q, q)] & inside for q in after)


def find_chains(graph: Graph) -> tuple[list[Chain], list[Left]]:
    """The chains of a graph and the regions that are none, both in the order of the graph."""
    found: list[Chain] = []
    left: list[Left] = []
    for places in _Merging(graph, graph.memory_bound, strict=False).run():
        chain = chain_of(graph, places)
        if isinstance(chain, Chain):
            found.append(chain)
            continue
        if _worth(graph, places) < 2:
            # One operator, which a product before it may take in.
            alone = chain_of(graph, graph.site(sorted(places))) if graph.forms is not None else chain
            found += [alone] if isinstance(alone, Chain) else []
            continue
        parts = _Merging(graph, places, strict=True).run()
        smaller = [c for p in parts if isinstance(c := chain_of(graph, p), Chain)]
        found += smaller
        if not smaller and all(graph.symbolic.dtype(o) in TYPES for o in graph.outputs(places)):
            left.append(chain)
    return found, left


def settled(graph: Graph, chains: Sequence[Chain]) -> list[Chain]:
    """The chains again with what is read of them when no other operator becomes a part of one; fewer where that fails."""
    while True:
        graph.settle(p for c in chains for p in c.region.places)
        again = [chain_of(graph, c.region.places) for c in chains]
        kept = [c for c in again if isinstance(c, Chain)]
        if len(kept) == len(chains):
            return kept
        chains = kept


def chain_of(graph: Graph, places: Collection[int]) -> Chain | Left:
    """The chain of some nodes, or why there is none."""
    region = Region(tuple(sorted(places)), graph.outputs(places))
    # Of readers, a region's outputs alone depend on who else is part of a chain: it is translated once.
    if region not in graph.known:
        graph.known[region] = _chain_of(graph, region)
    return graph.known[region]


def _chain_of(graph: Graph, region: Region) -> Chain | Left:
    places = region.places
    if graph.forms is None and any(is_product(graph.nodes[p], graph.symbolic) for p in places):
        return Left(region.places, "products stay by themselves")
    if _worth(graph, places) < 2 and not _is_worth_it_alone(graph, places):
        return Left(region.places, "one operator alone: nothing to fuse")
    try:
        return _translated(graph, region)
    except UnsupportedError as error:
        return Left(region.places, str(error))


def _is_worth_it_alone(graph: Graph, places: Sequence[int]) -> bool:
    """A product on the CPU, a norm on CUDA: there the library's kernel may be faster than the runtime's."""
    if graph.on_cpu:
        return is_product(graph.nodes[places[0]], graph.symbolic)
    return graph.forms is not None and any(graph.nodes[p].op_type in NORMS for p in places)


def _translated(graph: Graph, region: Region) -> Chain:
    for place in region.places:
        node = graph.nodes[place]
        name = next((n for n in (*node.input, *node.output) if n in graph.doubtful), "")
        if name:
            raise UnsupportedError(
                f"the size of {name!r} comes from a slice by numbers along an axis that may be shorter than they say"
            )
    if graph.forms is not None and any(is_product(graph.nodes[p], graph.symbolic) for p in region.places):
        chain: Chain = product_of(
            region, graph.nodes, graph.symbolic, graph.forms, graph.constant if graph.on_cpu else None
        )
    else:
        chain = translate(region, graph.nodes, graph.symbolic)
        if graph.tensorrt:
            check_plugin(chain)
    make_branch(chain, graph.nodes, graph.symbolic, opset_of(graph.model), "c")
    return chain


def _worth(graph: Graph, places: Collection[int]) -> int:
    """How many kernels a runtime needs for the nodes."""
    return sum(graph.nodes[p].op_type not in FREE for p in places)


def frequencies(chains: Sequence[Chain]) -> Mapping[str, int]:
    """How often each description occurs."""
    found: dict[str, int] = {}
    for chain in chains:
        found[chain.description.text] = found.get(chain.description.text, 0) + 1
    return found
