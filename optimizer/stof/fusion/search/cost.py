# SPDX-License-Identifier: Apache-2.0
"""An analytical cost of segments of memory-bound operators: launches, bytes where they lie, operations.

It ranks schemes where nothing can be measured, and tells a measuring search where to begin. Its unit is the second, but
only its order counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx
from onnx import TensorProto

from stof.execution.inputs import evaluate
from stof.fusion.element_ops import FREE, NORMS, TYPES, kind_of_node
from stof.fusion.regions import Graph, Left, chain_of
from stof.fusion.search.space import Scheme, Segment, Setting, Space
from stof.fusion.translate import Chain

_BYTES = {int(TensorProto.FLOAT): 4, int(TensorProto.FLOAT16): 2, int(TensorProto.BFLOAT16): 2}
# Elements of these cost more than one operation.
_HEAVY = {
    "Exp": 8,
    "Erf": 12,
    "Gelu": 14,
    "Tanh": 12,
    "Sigmoid": 10,
    "Softmax": 14,
    "Cos": 14,
    "Sin": 14,
    "Pow": 4,
    "Log": 10,
}

# Of the rate that a chain reaches: on an H100, 1.2 to 1.7 TB/s for Add, Mul, Split, Gelu and LayerNormalization (profiles in
# docs/results/h100/models-cuda.json), where a copy reaches 2.6 and chains are taken to reach 0.9 of that.
_RUNTIME = 0.67
_NEGLIGIBLE = 1e-9  # of two schemes that cost the same, the one of fewer operators
# Of the runtime's products that a template's reach, its epilogue included: of means of 23, 7 and 8 products on an H100 in two
# runs (0.95; 0.94 and 0.96; 0.86 and 0.87; docs/design/gemm.md, stof beside cuBLASLt alone) the lower, rounded down.
SHARE_USUAL, _SHARE_PAIR, _SHARE_OWN = 0.94, 0.94, 0.86
_OWN = ("gelu(", "silu(", "sigmoid(")  # cuBLASLt has GELU by tanh alone
# A product of 128 rows takes this much longer for each 64 of its inner dimension (4.1 us at 768, 6.8 at 3072).
_STEP, _STEP_SECONDS = 64, 0.1e-6

# A product with a bias is two kernels of the runtime: the bias is written to all rows, then added by the product. On an H100 that
# moves 1.03 TB/s: 14 us at 4096 x 768 in halves, 50 at 4096 x 3072 (profiles of BERT, Gemm beside MatMul).
_BIAS_SHARE = 0.44


@dataclass(frozen=True)
class Machine:
    """What a device does in a second; a launch is what a runtime spends on each operator."""

    launch: float = 3e-6
    memory: float = 12e9  # bytes
    cache: float = 50e9
    cached: float = 1 << 20  # bytes that stay near
    operations: float = 8e9
    products: float = 5e10  # operations of matrix products
    runtime: float = 1.0  # share of these rates of memory that the runtime's own memory-bound kernels reach

    @staticmethod
    def cuda(memory: float, products: float = 220e12) -> Machine:
        """A GPU that copies ``memory`` bytes in a second; operators are kernels of a captured graph at 9/10 of that."""
        own = 0.9 * memory
        return Machine(
            2e-6, own, cache=2 * own, cached=24 << 20, operations=8 * memory, products=products, runtime=_RUNTIME
        )

    def seconds(self, touched: float, work: float = 0.0) -> float:
        """One operator that touches so many bytes, of which some stay near, and computes so much."""
        return self.launch + max(self.moving_seconds(touched), work / self.operations)

    def moving_seconds(self, touched: float) -> float:
        """So many bytes alone."""
        near = min(touched, self.cached)
        return near / self.cache + (touched - near) / self.memory

    def runtime_seconds(self, touched: float, work: float = 0.0) -> float:
        """The same by one of the runtime's own kernels; on a GPU they are no faster where bytes are near."""
        if self.runtime == 1.0:
            return self.seconds(touched, work)
        return self.launch + max(touched / (self.runtime * self.memory), work / self.operations)

    def product_seconds(self, multiplications: float, inner: int) -> float:
        """A product without its launch; on a GPU one tile's steps follow each other, however few tiles there are."""
        seconds = multiplications / self.products
        return seconds if self.runtime == 1.0 else max(seconds, inner / _STEP * _STEP_SECONDS)

    def bias_seconds(self, written: float) -> float:
        """What the third operand of the runtime's product costs that writes so many bytes, on a GPU."""
        return 0.0 if self.runtime == 1.0 else self.launch + 2 * written / (_BIAS_SHARE * self.memory)


def is_biased(node: onnx.NodeProto) -> bool:
    """Whether a product adds a third operand."""
    return node.op_type == "Gemm" and len(node.input) > 2 and bool(node.input[2])


@dataclass
class Site:
    """Operators of a region in the order of the graph, and the segments that a chain can be made of."""

    graph: Graph
    places: tuple[int, ...]
    _chains: dict[Segment, Chain | Left] = field(default_factory=dict)

    def chain(self, segment: Segment) -> Chain | Left:
        """The chain of a segment, or why there is none."""
        if segment not in self._chains:
            places = self.places[segment[0] : segment[1]]
            chain = chain_of(self.graph, places)
            if isinstance(chain, Chain) and not self.graph.convex(places):
                chain = Left(chain.region.places, "a path leaves it and comes back")
            self._chains[segment] = chain
        return self._chains[segment]

    def space(self) -> Space:
        """Its schemes."""
        kinds = "".join("M" if kind_of_node(self.graph.nodes[p]) else "C" for p in self.places)
        return Space(kinds, lambda segment: isinstance(self.chain(segment), Chain))

    @property
    def region(self) -> Segment:
        """What follows the products that come first."""
        products = sum(not kind_of_node(self.graph.nodes[p]) for p in self.places)
        return products, len(self.places)

    def products(self) -> tuple[Segment, ...]:
        """The products by themselves that a template computes, too."""
        if not self.graph.on_cpu:
            return ()
        alone = ((i, i + 1) for i in range(self.region[0]))
        return tuple(s for s in alone if isinstance(self.chain(s), Chain))

    def norms(self) -> tuple[Segment, ...]:
        """The norms, which a chain may compute by themselves: the runtime's kernels reach half of its rate."""
        alone = ((i, i + 1) for i in range(self.region[0], len(self.places)))
        kinds = {s: self.graph.nodes[self.places[s[0]]].op_type for s in alone}
        return tuple(s for s, kind in kinds.items() if kind in NORMS and isinstance(self.chain(s), Chain))

    @property
    def whole(self) -> Scheme:
        """The scheme with one chain, and products by themselves."""
        first = self.region[0]
        return (*((i, i + 1) for i in range(first)), self.region)


@dataclass
class Analytical:
    """The cost of a site's segments at given sizes; ``alone`` are operators that are chains by themselves."""

    site: Site
    sizes: Mapping[str, int]
    machine: Machine = field(default_factory=Machine)
    alone: frozenset[Segment] = frozenset()

    def __call__(self, segment: Segment, setting: Setting = ()) -> float:
        """Seconds, about."""
        graph = self.site.graph
        places = self.site.places[segment[0] : segment[1]]
        if len(places) == 1 and graph.nodes[places[0]].op_type in FREE:
            return _NEGLIGIBLE
        touched = sum(self.bytes_of(n) for n in {*graph.inputs(places), *graph.outputs(places)})
        products = [p for p in places if not kind_of_node(graph.nodes[p])]
        if products:
            seconds = self._product_seconds(
                products, touched, 1.0 if len(places) == 1 else _share(self.site.chain(segment))
            )
            if self.machine.runtime != 1.0:
                seconds += self.machine.moving_seconds(self._added(places, products))
            written = self.bytes_of(graph.nodes[places[0]].output[0])
            biased = len(places) == 1 and is_biased(graph.nodes[places[0]])
            return seconds + (self.machine.bias_seconds(written) if biased else 0.0)
        chained = len(places) > 1 or segment in self.alone
        kernel = self.machine.seconds if chained else self.machine.runtime_seconds
        return kernel(touched, sum(self._work(p) for p in places))

    def products(self) -> float:
        """Seconds of the site's products by themselves, what they add left out."""
        found = 0.0
        for place in self.site.places[: self.site.region[0]]:
            node = self.site.graph.nodes[place]
            found += self._product_seconds(
                [place], sum(self.bytes_of(n) for n in (*node.input[:2], node.output[0])), 1.0
            )
        return found

    def _product_seconds(self, places: Sequence[int], touched: float, share: float) -> float:
        multiplications = sum(self._multiplications(p) for p in places)
        seconds = self.machine.product_seconds(multiplications, max(self._inner(p) for p in places)) / share
        return max(self.machine.seconds(touched), self.machine.launch + seconds)

    def _added(self, places: Sequence[int], products: Sequence[int]) -> int:
        """Bytes of what an epilogue reads for each element: nothing covers them (docs/design/gemm.md, residuals)."""
        graph = self.site.graph
        behind = {n for p in places if p not in products for n in graph.nodes[p].input}
        elements = self.elements(graph.nodes[products[0]].output[0])
        return sum(self.bytes_of(n) for n in behind & set(graph.inputs(places)) if self.elements(n) == elements)

    def _multiplications(self, place: int) -> float:
        return 2.0 * self.elements(self.site.graph.nodes[place].output[0]) * self._inner(place)

    def _inner(self, place: int) -> int:
        shape = self.site.graph.symbolic.shape(self.site.graph.nodes[place].input[0])
        return evaluate(shape[-1], self.sizes) if shape else 1

    def elements(self, name: str) -> int:
        """How many elements a tensor has; 1 where that is not known."""
        shape = self.site.graph.symbolic.shape(name)
        return 1 if shape is None else math.prod(max(1, evaluate(d, self.sizes)) for d in shape)

    def bytes_of(self, name: str) -> int:
        """How many bytes a tensor has; 1 for each element of a type that chains do not have."""
        return self.elements(name) * _BYTES.get(self.site.graph.symbolic.dtype(name), 1)

    def _work(self, place: int) -> float:
        node = self.site.graph.nodes[place]
        if kind_of_node(node) == "moving":
            return 0.0
        read = next((n for n in node.input if self.site.graph.symbolic.dtype(n) in TYPES), node.output[0])
        return max(self.elements(node.output[0]), self.elements(read)) * _HEAVY.get(node.op_type, 1)


def _share(chain: Chain | Left) -> float:
    """The share of the rate of the runtime's products that a template reaches."""
    if getattr(chain, "pair", 0):
        return _SHARE_PAIR
    text = chain.description.text if isinstance(chain, Chain) else ""
    return _SHARE_OWN if any(word in text for word in _OWN) else SHARE_USUAL


def frequent_start(space: Space, words: Sequence[str], counts: Mapping[tuple[str, ...], int]) -> list[Segment]:
    """A scheme to begin with: from the left, the longest available segment, one that is frequent before longer ones.

    ``words`` are the operators; ``counts`` says how often a sequence of operators occurs in the model.
    """
    found: list[Segment] = []
    start = 0
    while start < len(words):
        ends = [e for e in range(start + 1, len(words) + 1) if space.valid((start, e))]
        end = max(ends, key=lambda e: (counts.get(tuple(words[start:e]), 1) if e - start > 1 else 0, e))
        found.append((start, end))
        start = end
    return found
