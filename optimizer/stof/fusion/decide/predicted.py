# SPDX-License-Identifier: Apache-2.0
"""Which regions become chains where nothing was measured: by launches and bytes, beside what the runtime would fuse."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx

from stof.errors import UnsupportedError
from stof.execution.inputs import Case, InputMaker, Padding, evaluate
from stof.execution.upcast import HALF
from stof.fusion.apply import Verdict
from stof.fusion.emit import Key
from stof.fusion.merge_matmuls import Products, computed_with
from stof.fusion.regions import Graph
from stof.fusion.search.cost import SHARE_USUAL, Analytical, Machine, Site
from stof.fusion.search.engine import Limits, search
from stof.fusion.search.ort_baseline import rival_seconds
from stof.fusion.search.space import Scheme, replaced
from stof.fusion.translate import Chain
from stof.options import Options
from stof.runtime.library import has_gemm
from stof.symbolic import Symbolic

LEAST_PREDICTED = 1.15  # of the runtime's time over the chain's, at every size: the model is not better than that
_CASES = ((1, 128), (8, 512))  # batch and length where --shape says nothing
LEAST_WITH_PRODUCTS = 1.05  # where products are part of both
_MERGED = 0.97  # of what three products and what follows take, that one and a chain may
_RANKED = Limits(schemes=256)


@dataclass(frozen=True)
class _Model:
    """What every question about products of one model needs."""

    symbolic: Symbolic
    sizes: list[dict[str, int]]
    readers: dict[str, list[onnx.NodeProto]]
    computed: frozenset[str]  # tensors that memory-bound operators compute with


@dataclass
class Predicted:
    """Decides by the analytical model of a machine."""

    options: Options
    machine: Machine
    sizes: list[dict[str, int]] = field(default_factory=list)
    known: _Model | None = None  # the last one that was asked about

    def __call__(self, graph: Graph, chain: Chain, key: Key, left: int) -> Verdict:
        """The whole region where it gains at every size; else the scheme that is predicted to be best, where that does."""
        site = Site(graph, graph.site(chain.region.places))
        whole = site.whole
        try:
            self.sizes = self.sizes or sizes_in_use(graph, self.options)
            halves = any(graph.symbolic.dtype(o) in HALF for p in site.places for o in graph.nodes[p].output)
            if len(self.sizes) == 1 and not halves and not graph.of_data(site.places):
                return Verdict((), "sizes decide all of it, and they are fixed: a runtime computes it once")
            norms = frozenset(site.norms())
            costs = [Analytical(site, s, self.machine, norms) for s in self.sizes]
            rival = [rival_seconds(graph, site.places, s, self.machine) for s in self.sizes]
            if min(rival) <= 0.0:
                return Verdict((), "ONNX Runtime computes it with the product before it")
            # What products take is the same for both, and nothing's gain.
            products = [c.products() for c in costs]
            rivals = list(zip(rival, products, costs, strict=True))
            scheme, (gains, least) = whole, _gains(rivals, whole)
            if min(gains) < least or site.region[0]:
                scheme = search(site.space(), costs[-1], [whole], _RANKED).scheme
                gains, least = _gains(rivals, scheme)
        except (KeyError, UnsupportedError, ValueError) as error:
            return Verdict((), f"nothing can be predicted: {error}")
        gain = math.prod(gains) ** (1 / len(gains))
        if min(gains) < least:
            return Verdict((), f"predicted {min(gains):.2f}x of ONNX Runtime's speed", gain)
        return Verdict(replaced(scheme, norms), "", gain)

    def merges(self, model: onnx.ModelProto, symbolic: Symbolic, products: Products, apart: bool = True) -> bool:
        """Whether products of one tensor gain as one, with a chain behind it that takes them ``apart``, at every size."""
        try:
            known = self._known(model, symbolic)
            return all(self._merge_gains(known, products, s, apart) for s in known.sizes)
        except (KeyError, UnsupportedError, ValueError):
            return False

    def _known(self, model: onnx.ModelProto, symbolic: Symbolic) -> _Model:
        if self.known is None or self.known.symbolic is not symbolic:
            readers: dict[str, list[onnx.NodeProto]] = {}
            for node in model.graph.node:
                for name in dict.fromkeys(node.input):
                    readers.setdefault(name, []).append(node)
            sizes = self.sizes or sizes_of(model, symbolic, self.options)
            self.known = _Model(symbolic, sizes, readers, computed_with(model))
        return self.known

    def _merge_gains(self, known: _Model, products: Products, sizes: Mapping[str, int], parted: bool) -> bool:
        symbolic = known.symbolic

        def elements(name: str) -> int:
            return math.prod(evaluate(d, sizes) for d in symbolic.shape(name) or ())

        shape = symbolic.shape(products[0].input[0]) or ()
        inner = evaluate(shape[-1], sizes)
        apart = 0.0
        for node in products:
            count = elements(node.output[0])
            read = known.readers.get(node.output[0], [])
            chained = node.output[0] in known.computed
            share = SHARE_USUAL if chained and self.options.products and has_gemm() else 1.0
            apart += self.machine.launch + self.machine.product_seconds(2.0 * count * inner, inner) / share
            if chained and share == 1.0:
                alone = not any(o in known.computed for n in read for o in n.output)  # an operator, which is no chain
                apart += (self.machine.runtime_seconds if alone else self.machine.seconds)(4 * count)
        count = sum(elements(n.output[0]) for n in products)
        product = self.machine.launch + self.machine.product_seconds(2.0 * count * inner, inner)
        return product + (self.machine.seconds(4 * count) if parted else 0.0) < _MERGED * apart


def _gains(rivals: Sequence[tuple[float, float, Analytical]], scheme: Scheme) -> tuple[list[float], float]:
    """How many times longer the runtime takes at each size, and what that has to be at least.

    Products that no template takes in are the same for both, and left out; with the others, little is much.
    """
    taken = any(s[1] - s[0] > 1 and s[0] < rivals[0][2].site.region[0] for s in scheme)
    found = []
    for other, alone, cost in rivals:
        same = 0.0 if taken else alone
        found.append((other + alone - same) / max(1e-12, sum(cost(s) for s in scheme) - same))
    return found, LEAST_WITH_PRODUCTS if taken else LEAST_PREDICTED


def sizes_in_use(graph: Graph, options: Options) -> list[dict[str, int]]:
    """The sizes that decide: both ends of what ``--shape`` says, else a short and a long input."""
    return sizes_of(graph.model, graph.symbolic, options)


def sizes_of(model: onnx.ModelProto, symbolic: Symbolic, options: Options) -> list[dict[str, int]]:
    """The same of a model."""
    maker = InputMaker(model, symbolic, frozenset())
    found = []
    for i, (batch, length) in enumerate(_CASES):
        sizes = maker.sizes(Case(batch, length, Padding.NONE))
        sizes.update({n: ends[i] for n, ends in options.shapes.items()})
        found.append(sizes)
    return found if found[0] != found[-1] else found[:1]
