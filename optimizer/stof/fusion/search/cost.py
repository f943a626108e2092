# SPDX-License-Identifier: Apache-2.0
"""An analytical cost model of segments: kernel launches, bytes moved, operations.

It ranks schemes where nothing can be measured, and gives a measuring search its start. Costs are seconds, but only their
order counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx
from onnx import TensorProto

from stof.fusion.element_ops import FREE, NORMS, TYPES, kind_of_node
from stof.fusion.fusion_graph import FusionGraph
from stof.fusion.regions import build_chain
from stof.fusion.search.space import FusionScheme, SchemeSpace, Segment, Setting
from stof.fusion.translate import FusedChain, RefusedRegion
from stof.symbolic.algebra.sizes import evaluate

_BYTES = {int(TensorProto.FLOAT): 4, int(TensorProto.FLOAT16): 2, int(TensorProto.BFLOAT16): 2}
# Operations an element, for operators of more than one.
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

# Bandwidth of the runtime's memory-bound kernels over a chain's. On an H100, Add, Mul, Split, Gelu and LayerNormalization reach
# 1.2 to 1.7 TB/s (profiles in docs/results/h100/models-cuda.json), a copy 2.6, and chains 0.9 of a copy.
_RUNTIME_SHARE = 0.67
_NEGLIGIBLE = 1e-9  # seconds of an operator without a kernel: decides between schemes of equal cost
# Throughput of StofGemm, epilogue included, over the runtime's matmul (H100, docs/design/gemm.md, stof beside cuBLASLt alone).
# Lower of two runs, rounded down; means of 23 usual GEMMs, 7 pairs and 8 with activations that cuBLASLt lacks.
SHARE_USUAL, _SHARE_PAIR, _SHARE_ACTIVATION = 0.94, 0.94, 0.86
_ACTIVATIONS = frozenset({"gelu", "silu", "sigmoid"})  # cuBLASLt has GELU by tanh alone
# A matmul of 128 rows takes this much longer for each 64 of its inner dimension (4.1 us at 768, 6.8 at 3072).
_INNER_STEP, _STEP_SECONDS = 64, 0.1e-6

# The runtime computes a matmul with a bias by two kernels: one writes the bias to all rows, the matmul adds to it. On an H100
# that moves 1.03 TB/s: 14 us at 4096 x 768 in fp16, 50 at 4096 x 3072 (profiles of BERT, Gemm beside MatMul).
_BIAS_SHARE = 0.44


@dataclass(frozen=True)
class MachineModel:
    """A device's throughput: bytes and operations a second, and seconds a kernel launch."""

    launch: float = 3e-6
    memory: float = 12e9  # bytes a second
    cache: float = 50e9
    cached: float = 1 << 20  # bytes that stay in the cache
    operations: float = 8e9
    matmuls: float = 5e10  # operations a second of matmuls
    runtime: float = 1.0  # share of this bandwidth that the runtime's memory-bound kernels reach

    @staticmethod
    def cuda(memory: float, matmuls: float = 220e12) -> MachineModel:
        """A GPU that copies ``memory`` bytes a second; chains are kernels of a captured graph at 9/10 of that bandwidth."""
        bandwidth = 0.9 * memory
        return MachineModel(
            2e-6,
            bandwidth,
            cache=2 * bandwidth,
            cached=24 << 20,
            operations=8 * memory,
            matmuls=matmuls,
            runtime=_RUNTIME_SHARE,
        )

    def seconds(self, touched: float, work: float = 0.0) -> float:
        """Seconds of a kernel that touches so many bytes and computes so many operations."""
        return self.launch + max(self.moving_seconds(touched), work / self.operations)

    def moving_seconds(self, touched: float) -> float:
        """Seconds of moving so many bytes, of which some stay in the cache."""
        in_cache = min(touched, self.cached)
        return in_cache / self.cache + (touched - in_cache) / self.memory

    def runtime_seconds(self, touched: float, work: float = 0.0) -> float:
        """Seconds of the runtime's own kernel; on a GPU the cache makes it no faster."""
        if self.runtime == 1.0:
            return self.seconds(touched, work)
        return self.launch + max(touched / (self.runtime * self.memory), work / self.operations)

    def matmul_seconds(self, multiplications: float, inner: int) -> float:
        """Seconds of a matmul without its launch; on a GPU at least those of one tile's steps, which follow each other."""
        seconds = multiplications / self.matmuls
        return seconds if self.runtime == 1.0 else max(seconds, inner / _INNER_STEP * _STEP_SECONDS)

    def bias_seconds(self, written: float) -> float:
        """Seconds that a bias adds to the runtime's matmul with an output of so many bytes, on a GPU."""
        return 0.0 if self.runtime == 1.0 else self.launch + 2 * written / (_BIAS_SHARE * self.memory)


def has_bias(node: onnx.NodeProto) -> bool:
    """Whether a node is Gemm with a bias."""
    return node.op_type == "Gemm" and len(node.input) > 2 and bool(node.input[2])


@dataclass
class SegmentedRegion:
    """Nodes of a region in the order of the graph, matmuls first, cut into segments that may become chains."""

    graph: FusionGraph
    node_indices: tuple[int, ...]
    _chains: dict[Segment, FusedChain | RefusedRegion] = field(default_factory=dict)

    @staticmethod
    def of_chain(graph: FusionGraph, chain: FusedChain) -> SegmentedRegion:
        """A chain's region with the matmuls that it reads, where the policy fuses matmuls."""
        return SegmentedRegion(graph, graph.with_leading_matmuls(chain.region.node_indices))

    def chain(self, segment: Segment) -> FusedChain | RefusedRegion:
        """The chain of a segment, or why there is none."""
        if segment not in self._chains:
            node_indices = self.node_indices[segment[0] : segment[1]]
            chain = build_chain(self.graph, node_indices)
            if isinstance(chain, FusedChain) and not self.graph.is_convex(node_indices):
                chain = RefusedRegion(chain.region.node_indices, "a path leaves it and comes back")
            self._chains[segment] = chain
        return self._chains[segment]

    def space(self) -> SchemeSpace:
        """The fusion schemes of the region."""
        kinds = "".join("M" if kind_of_node(self.graph.nodes[p]) else "C" for p in self.node_indices)
        return SchemeSpace(kinds, lambda segment: isinstance(self.chain(segment), FusedChain))

    @property
    def epilogue(self) -> Segment:
        """The segment of everything behind the matmuls."""
        matmuls = sum(not kind_of_node(self.graph.nodes[p]) for p in self.node_indices)
        return matmuls, len(self.node_indices)

    def matmuls(self) -> tuple[Segment, ...]:
        """The matmuls that StofGemm may compute without an epilogue."""
        if not self.graph.policy.has_cpu_gemm:
            return ()
        alone = ((i, i + 1) for i in range(self.epilogue[0]))
        return tuple(s for s in alone if isinstance(self.chain(s), FusedChain))

    def norms(self) -> tuple[Segment, ...]:
        """The norms that a chain of one operator may compute: the runtime's kernels reach half of its bandwidth."""
        alone = ((i, i + 1) for i in range(self.epilogue[0], len(self.node_indices)))
        kinds = {s: self.graph.nodes[self.node_indices[s[0]]].op_type for s in alone}
        return tuple(s for s, kind in kinds.items() if kind in NORMS and isinstance(self.chain(s), FusedChain))

    @property
    def whole_scheme(self) -> FusionScheme:
        """The scheme with one chain for the epilogue, and matmuls alone."""
        first = self.epilogue[0]
        return (*((i, i + 1) for i in range(first)), self.epilogue)


@dataclass
class AnalyticalCost:
    """The cost of a region's segments at given sizes; ``alone`` are single operators that become chains."""

    region: SegmentedRegion
    sizes: Mapping[str, int]
    machine: MachineModel = field(default_factory=MachineModel)
    alone: frozenset[Segment] = frozenset()

    def __call__(self, segment: Segment, setting: Setting = ()) -> float:
        """Seconds of a segment, as one kernel."""
        graph = self.region.graph
        node_indices = self.region.node_indices[segment[0] : segment[1]]
        if len(node_indices) == 1 and graph.nodes[node_indices[0]].op_type in FREE:
            return _NEGLIGIBLE
        touched = sum(self.bytes_of(n) for n in {*graph.inputs(node_indices), *graph.outputs(node_indices)})
        matmuls = [p for p in node_indices if not kind_of_node(graph.nodes[p])]
        if matmuls:
            seconds = self._gemm_seconds(
                matmuls, touched, 1.0 if len(node_indices) == 1 else _gemm_share(self.region.chain(segment))
            )
            if self.machine.runtime != 1.0:
                seconds += self.machine.moving_seconds(self._residual_bytes(node_indices, matmuls))
            written = self.bytes_of(graph.nodes[node_indices[0]].output[0])
            biased = len(node_indices) == 1 and has_bias(graph.nodes[node_indices[0]])
            return seconds + (self.machine.bias_seconds(written) if biased else 0.0)
        is_chain = len(node_indices) > 1 or segment in self.alone
        kernel = self.machine.seconds if is_chain else self.machine.runtime_seconds
        return kernel(touched, sum(self._work(p) for p in node_indices))

    def matmul_seconds(self) -> float:
        """Seconds of the region's matmuls alone, without biases."""
        seconds = 0.0
        for index in self.region.node_indices[: self.region.epilogue[0]]:
            node = self.region.graph.nodes[index]
            seconds += self._gemm_seconds(
                [index], sum(self.bytes_of(n) for n in (*node.input[:2], node.output[0])), 1.0
            )
        return seconds

    def _gemm_seconds(self, node_indices: Sequence[int], touched: float, share: float) -> float:
        multiplications = sum(self._multiplications(p) for p in node_indices)
        seconds = self.machine.matmul_seconds(multiplications, max(self._inner(p) for p in node_indices)) / share
        return max(self.machine.seconds(touched), self.machine.launch + seconds)

    def _residual_bytes(self, node_indices: Sequence[int], matmuls: Sequence[int]) -> int:
        """Bytes that an epilogue reads for each output element: no matmul hides them (docs/design/gemm.md, residuals)."""
        graph = self.region.graph
        behind = {n for p in node_indices if p not in matmuls for n in graph.nodes[p].input}
        elements = self.elements(graph.nodes[matmuls[0]].output[0])
        return sum(self.bytes_of(n) for n in behind & set(graph.inputs(node_indices)) if self.elements(n) == elements)

    def _multiplications(self, index: int) -> float:
        return 2.0 * self.elements(self.region.graph.nodes[index].output[0]) * self._inner(index)

    def _inner(self, index: int) -> int:
        shape = self.region.graph.symbolic.shape(self.region.graph.nodes[index].input[0])
        return evaluate(shape[-1], self.sizes) if shape else 1

    def elements(self, name: str) -> int:
        """How many elements a tensor has; 1 where its shape is not known."""
        shape = self.region.graph.symbolic.shape(name)
        return 1 if shape is None else math.prod(max(1, evaluate(d, self.sizes)) for d in shape)

    def bytes_of(self, name: str) -> int:
        """How many bytes a tensor has; 1 for each element of a type that chains do not have."""
        return self.elements(name) * _BYTES.get(self.region.graph.symbolic.dtype(name), 1)

    def _work(self, index: int) -> float:
        node = self.region.graph.nodes[index]
        if kind_of_node(node) == "moving":
            return 0.0
        read = next((n for n in node.input if self.region.graph.symbolic.dtype(n) in TYPES), node.output[0])
        return max(self.elements(node.output[0]), self.elements(read)) * _HEAVY.get(node.op_type, 1)


def _gemm_share(chain: FusedChain | RefusedRegion) -> float:
    """Throughput of StofGemm over the runtime's matmul."""
    if getattr(chain, "pair", 0):
        return _SHARE_PAIR
    functions = chain.description.functions if isinstance(chain, FusedChain) else frozenset[str]()
    return _SHARE_ACTIVATION if functions & _ACTIVATIONS else SHARE_USUAL


def frequent_start(space: SchemeSpace, words: Sequence[str], counts: Mapping[tuple[str, ...], int]) -> list[Segment]:
    """A scheme to start from: from the left, the segment whose operators are most frequent in the model, then the longest.

    Args:
        space: the schemes.
        words: the operators in order.
        counts: how often each sequence of operators occurs in the model.
    """
    segments: list[Segment] = []
    start = 0
    while start < len(words):
        ends = [e for e in range(start + 1, len(words) + 1) if space.is_valid((start, e))]
        end = max(ends, key=lambda e: (counts.get(tuple(words[start:e]), 1) if e - start > 1 else 0, e))
        segments.append((start, end))
        start = end
    return segments
