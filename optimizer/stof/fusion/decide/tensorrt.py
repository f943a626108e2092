# SPDX-License-Identifier: Apache-2.0
"""Which regions become plugins of TensorRT: those beside StofAttention that its own compiler cuts into several kernels.

TensorRT makes a kernel of almost every region by itself, and a plugin is a wall for what it fuses around it: products that
read the same take one wide kernel, of whose result a plugin gets copies; biases and activations go to products. What it
makes of a region is modelled after the engines that TensorRT for RTX 1.7 builds (docs/guide/tensorrt.md).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from stof.attention.function_body import OP as ATTENTION
from stof.errors import UnsupportedError
from stof.fusion.apply import Verdict
from stof.fusion.decide.predicted import LEAST_PREDICTED, sizes_in_use
from stof.fusion.element_ops import FREE, kind_of_node
from stof.fusion.emit import Key
from stof.fusion.regions import Graph
from stof.fusion.search.cost import Analytical, Machine, Site
from stof.fusion.translate import Chain
from stof.options import Options

_PRODUCTS = frozenset({"MatMul", "Gemm"})


@dataclass
class BesideTensorRt:
    """Decides by an analytical model in which TensorRT's kernels are as fast as chains and only their number differs.

    A region is taken whole or not at all: a part of it would be a wall inside of what TensorRT fuses.
    """

    options: Options
    machine: Machine
    sizes: list[dict[str, int]] = field(default_factory=list)

    def __call__(self, graph: Graph, chain: Chain, key: Key, left: int) -> Verdict:
        """The whole region where it gains at every size in use."""
        places = chain.region.places
        if not beside_attention(graph, places):
            return Verdict((), f"TensorRT fuses it with what is around it, and no {ATTENTION} is")
        site = Site(graph, places)
        try:
            self.sizes = self.sizes or sizes_in_use(graph, self.options)
            costs = [Analytical(site, s, self.machine) for s in self.sizes]
            gains = [tensorrt_seconds(graph, places, c) / chain_seconds(graph, places, c) for c in costs]
        except (KeyError, UnsupportedError, ValueError) as error:
            return Verdict((), f"nothing can be predicted: {error}")
        gain = math.prod(gains) ** (1 / len(gains))
        if min(gains) < LEAST_PREDICTED:
            return Verdict((), f"predicted {min(gains):.2f}x of TensorRT's own kernels' speed", gain)
        return Verdict(((0, len(places)),), "", gain)


def beside_attention(graph: Graph, places: Collection[int]) -> bool:
    """Whether a region writes what a StofAttention reads, or reads what it writes."""
    around = {q for p in places for q in (*graph.before(p), *graph.after(p))}
    return any(graph.nodes[q].op_type == ATTENTION for q in around)


def tensorrt_seconds(graph: Graph, places: Sequence[int], cost: Analytical) -> float:
    """What TensorRT's kernels of a region take.

    One kernel writes all outputs, but for those that are only moved, by a transposition, which have one each. Where elements
    are moved as well, sums over rows have a kernel before it, which reads the row a second time.
    """
    machine = cost.machine
    computed: dict[str, set[int]] = {}
    total = 0.0
    summed = 0
    for name in graph.outputs(places):
        cone = _cone(graph, name, set(places))
        kinds = {kind_of_node(graph.nodes[p]) for p in cone}
        if kinds == {"moving"} and any(graph.nodes[p].op_type == "Transpose" for p in cone):
            total += machine.seconds(2 * cost.bytes_of(name))
            continue
        computed[name] = cone
        if kinds & {"reducing", "rowwise"} and any(_is_moved(graph, p) for p in cone):
            summed += cost.bytes_of(name)
    if summed:
        total += machine.seconds(summed)
    if computed:
        own = set().union(*computed.values())
        read = {n for p in own for n in graph.nodes[p].input if n in graph.inputs(places)}
        # Of a packed tensor, as much as is written.
        written = sum(cost.bytes_of(n) for n in computed)
        total += machine.seconds(written + sum(min(cost.bytes_of(n), written) for n in read))
    return total


def chain_seconds(graph: Graph, places: Sequence[int], cost: Analytical) -> float:
    """What a plugin takes, with the copies that TensorRT makes for it of parts of tensors."""
    copied = sum(cost.machine.seconds(2 * cost.bytes_of(n)) for n in graph.inputs(places) if _is_part(graph, n))
    return cost((0, len(places))) + copied


def _cone(graph: Graph, name: str, own: set[int]) -> set[int]:
    """The nodes of a region that an output needs."""
    found: set[int] = set()
    pending = [graph.place[name]]
    while pending:
        place = pending.pop()
        if place in own and place not in found:
            found.add(place)
            pending.extend(graph.before(place))
    return found


def _is_moved(graph: Graph, place: int) -> bool:
    node = graph.nodes[place]
    return kind_of_node(node) == "moving" and node.op_type not in FREE


def _is_part(graph: Graph, name: str) -> bool:
    """Whether a tensor is a piece of another, or one of several products of the same left side, which TensorRT makes one of."""
    place = graph.place.get(name)
    if place is None:
        return False
    if graph.nodes[place].op_type in FREE:
        return _is_part(graph, graph.nodes[place].input[0])
    if _is_moved(graph, place):
        return True
    if not _multiplies(graph, place):
        return False
    others = graph.readers.get(graph.nodes[place].input[0], ())
    return any(q != place and _multiplies(graph, q) for q in others)


def _multiplies(graph: Graph, place: int) -> bool:
    node = graph.nodes[place]
    return node.op_type in _PRODUCTS and node.input[1] in graph.constant
