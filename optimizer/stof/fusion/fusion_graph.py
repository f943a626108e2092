# SPDX-License-Identifier: Apache-2.0
"""The graph as the search for chains sees it: nodes by index, their producers and consumers, and which are memory-bound."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import onnx
from onnx import TensorProto

from stof.fusion.element_ops import TYPES, as_number, data_inputs, kind_of_node
from stof.fusion.gemm import is_fusable_matmul
from stof.fusion.policy import ChainPolicy, ShapeReads
from stof.fusion.translate import FusedChain, RefusedRegion, Region
from stof.graph.index import GraphIndex, node_tensors
from stof.symbolic import Int, Symbolic, integer
from stof.symbolic.algebra.int_bounds import bound
from stof.symbolic.rules.dropout import may_drop
from stof.symbolic.rules.movement_helpers import element_count
from stof.symbolic.tensor import Shape


@dataclass
class FusionGraph:
    """A model's graph with what the search for chains asks of it. Sets of nodes are given as node indices.

    Args:
        model: the model.
        symbolic: its shapes and constants.
        policy: what the target allows.
        shape_reads: how reads of shapes count before the chains are known; :meth:`set_fused_nodes` states them later.
    """

    model: onnx.ModelProto
    symbolic: Symbolic
    policy: ChainPolicy = field(default_factory=ChainPolicy)
    shape_reads: ShapeReads = ShapeReads.ASSUME_FUSED
    nodes: Sequence[onnx.NodeProto] = field(init=False)
    kinds: Sequence[str] = field(init=False)  # of each node, see ``kind_of_node``
    data: Sequence[tuple[str, ...]] = field(init=False)  # the tensors whose data a node reads
    writer: dict[str, int] = field(init=False)  # index of the node that writes a tensor
    readers: dict[str, list[int]] = field(init=False)  # indices of the nodes that read a tensor
    data_readers: dict[str, list[int]] = field(init=False)  # indices of the nodes that read a tensor's data
    kept_tensors: set[str] = field(init=False)  # graph outputs, and what subgraphs capture
    constants: set[str] = field(init=False)  # initializers, and what is computed from them alone
    uncertain_shapes: set[str] = field(init=False)  # tensors that a Slice may make shorter than their stated shape
    memory_bound: list[int] = field(init=False)  # indices of the nodes that may become parts of chains
    chains: dict[Region, FusedChain | RefusedRegion] = field(default_factory=dict)  # every region translated so far
    _element_counts: dict[str, Int] = field(default_factory=dict)
    _data: set[str] | None = None
    _numbers: dict[str, bool] = field(default_factory=dict)
    _reads: dict[int, list[str]] = field(default_factory=dict)  # the tensors that nodes of ``readers`` read

    def __post_init__(self) -> None:
        graph = self.model.graph
        index = GraphIndex(graph)
        self.nodes = list(graph.node)
        self.kinds = [kind_of_node(n) for n in self.nodes]
        self.data = [tuple(n.input[k] for k in data_inputs(n)) for n in self.nodes]
        self.writer = {o: i for i, n in enumerate(self.nodes) for o in n.output if o}
        self.readers = {}
        for i, node in enumerate(self.nodes):
            for name in dict.fromkeys(node.input):
                if name:
                    self.readers.setdefault(name, []).append(i)
        self.data_readers = {}
        for i, names in enumerate(self.data):
            for name in dict.fromkeys(names):
                self.data_readers.setdefault(name, []).append(i)
        self.kept_tensors = index.outputs | index.captured
        self.constants = {t.name for t in graph.initializer} - index.inputs
        for node in self.nodes:
            if all(n in self.constants for n in node.input if n) and not _has_subgraph(node):
                self.constants.update(o for o in node.output if o)
        self.uncertain_shapes = self._find_uncertain_shapes()
        self.memory_bound = [i for i in range(len(self.nodes)) if self._is_memory_bound(i)]
        if self.policy.uses_tensorrt_plugins:
            attention = self._find_unfused_attention(set(self.memory_bound))
            self.memory_bound = [i for i in self.memory_bound if i not in attention]
        fused = self.memory_bound if self.shape_reads is ShapeReads.ASSUME_FUSED else []
        self.readers = self._find_readers(fused)

    def _find_unfused_attention(self, memory_bound: set[int]) -> set[int]:
        """The nodes between the two matmuls of attention that is left to TensorRT, which fuses all of it."""
        attention: set[int] = set()
        for softmax in memory_bound:
            if self.nodes[softmax].op_type != "Softmax":
                continue
            behind = _find_reachable([softmax], memory_bound, self.consumers)
            if all(q in memory_bound for p in behind for q in self.consumers(p)):
                continue  # no matmul reads it
            attention |= behind | _find_reachable([softmax], memory_bound, self.producers)
        return attention

    def _find_uncertain_shapes(self) -> set[str]:
        """Outputs of a Slice whose constant bounds may lie beyond an axis of symbolic size, and all that depends on them.

        Their stated sizes would be written into chains as numbers, although a run may have fewer elements.
        """
        uncertain: set[str] = set()
        for node in self.nodes:
            if any(n in uncertain for n in node_tensors(node)) or (
                node.op_type == "Slice" and self._may_fall_short(node)
            ):
                uncertain.update(o for o in node.output if o)
        return uncertain

    def _may_fall_short(self, node: onnx.NodeProto) -> bool:
        shape = self.symbolic.shape(node.input[0])
        bounds = [self.symbolic.constant(n) for n in node.input[1:3]]
        given_axes = self.symbolic.constant(node.input[3]) if len(node.input) > 3 and node.input[3] else None
        if shape is None:
            return False
        axes = range(len(shape)) if given_axes is None else [int(a) % len(shape) for a in given_axes.reshape(-1)]
        for values in bounds:
            for axis, value in zip(axes, [] if values is None else values.reshape(-1), strict=False):
                if shape[axis].constant is None and abs(int(value)) < (1 << 31) - 1:
                    rest = shape[axis] - integer(abs(int(value)))
                    if bound(rest, upper=False, smallest=1.0) < 0:
                        return True
        return False

    def set_fused_nodes(self, node_indices: Iterable[int]) -> None:
        """States which nodes become parts of chains: these read data alone, all others read all their inputs."""
        self.readers = self._find_readers(node_indices)

    def _find_readers(self, fused: Iterable[int]) -> dict[str, list[int]]:
        """The nodes that read each tensor, of those still needed once the ``fused`` ones are parts of chains."""
        inside = set(fused)
        read = [dict.fromkeys(self.data[i] if i in inside else _tensors_read(n)) for i, n in enumerate(self.nodes)]
        pending = [self.writer[n] for n in self.kept_tensors if n in self.writer]
        live: set[int] = set()
        while pending:
            index = pending.pop()
            if index not in live:
                live.add(index)
                pending.extend(self.writer[n] for n in read[index] if n in self.writer)
        readers: dict[str, list[int]] = {}
        for i in sorted(live):
            for name in read[i]:
                readers.setdefault(name, []).append(i)
        self._reads = {i: list(read[i]) for i in live}
        return readers

    def shape_substitutes(self, node_indices: Collection[int]) -> dict[str, str]:
        """For tensors that other nodes read only by Shape: a tensor of equal shape that stays when these nodes are fused."""
        members = set(node_indices)
        written = {o for p in members for o in self.nodes[p].output if self.is_read_outside(o, members)}
        return self.find_shape_substitutes(members, written, lambda: self.inputs(members))

    def find_shape_substitutes(
        self, members: Collection[int], written: Collection[str], inputs: Callable[[], set[str]]
    ) -> dict[str, str]:
        """The same for nodes of which it is known what others read of them, and what they read."""
        shape_only = {o for o in written if o not in self.kept_tensors and self._is_read_by_shape_only(o, members)}
        substitutes: dict[str, str] = {}
        if not shape_only:
            return substitutes
        staying = [*sorted(inputs()), *sorted(o for o in written if o not in shape_only)]
        for name in shape_only:
            shape = self.symbolic.shape(name)
            same = next((n for n in staying if self.symbolic.shape(n) == shape), None)
            if same is not None:
                substitutes[name] = same
        return substitutes

    def is_read_outside(self, name: str, members: Collection[int]) -> bool:
        """Whether a tensor is an output of the graph, or read by nodes that are not among ``members``, a set."""
        return bool(name) and (name in self.kept_tensors or any(r not in members for r in self.readers.get(name, ())))

    def _is_read_by_shape_only(self, name: str, members: Collection[int]) -> bool:
        return all(self.nodes[r].op_type == "Shape" for r in self.readers.get(name, ()) if r not in members)

    def _is_memory_bound(self, index: int) -> bool:
        node, kind = self.nodes[index], self.kinds[index]
        if not kind or any(o in self.constants for o in node.output):
            return False
        written = [o for o in node.output if o and (o in self.readers or o in self.kept_tensors)]
        for name in [*written, *self.data[index]]:
            shape = self.symbolic.shape(name)
            if self.symbolic.dtype(name) not in {*TYPES, TensorProto.BOOL} and not self.is_number(name):
                return False
            if shape is None:
                return False
        if all(element_count(self.symbolic.shape(o) or ()).constant == 1 for o in written):
            return False
        if node.op_type == "Dropout" and may_drop(node, self.symbolic.constant):
            return False
        if node.op_type == "Gather" and not self.is_number(node.input[1]):
            return False
        return kind == "moving" or self.symbolic.dtype(node.output[0]) in {*TYPES, TensorProto.BOOL}

    def is_number(self, name: str) -> bool:
        """Whether a tensor is a constant of one element."""
        is_number = self._numbers.get(name)
        if is_number is None:
            is_number = self._numbers[name] = as_number(self.symbolic.constant(name)) is not None
        return is_number

    def outputs(self, node_indices: Collection[int]) -> tuple[str, ...]:
        """The tensors that these nodes write and other nodes, or the graph's outputs, read."""
        members = set(node_indices)
        substitutes = self.shape_substitutes(members)
        return tuple(
            o
            for p in sorted(members)
            for o in self.nodes[p].output
            if o not in substitutes and self.is_read_outside(o, members)
        )

    def inputs(self, node_indices: Collection[int]) -> set[str]:
        """The data tensors that these nodes read and do not write, constants of one element left out."""
        members = set(node_indices)
        read = {n for p in members for n in self.data[p]}
        return {n for n in read if self.writer.get(n) not in members and not self.is_number(n)}

    def depends_on_data(self, node_indices: Collection[int]) -> bool:
        """Whether these nodes compute with the values of the model's inputs, rather than with shapes and constants."""
        if self._data is None:
            index = GraphIndex(self.model.graph)
            dependent = set(index.inputs)
            for node in self.nodes:
                if node.op_type not in ("Shape", "Size") and not dependent.isdisjoint(_tensors_read(node)):
                    dependent.update(node.output)
            self._data = dependent
        return any(o in self._data for p in node_indices for o in self.nodes[p].output)

    def with_leading_matmuls(self, node_indices: Sequence[int]) -> tuple[int, ...]:
        """The nodes with the matmuls that they read, which come first, where the policy fuses matmuls."""
        if self.policy.epilogue_forms is None:
            return tuple(node_indices)
        read = {q for p in node_indices for q in self.producers(p)}
        matmuls = {q for q in read if is_fusable_matmul(self.nodes[q], self.symbolic)}
        return (*sorted(matmuls - set(node_indices)), *node_indices)

    def weight_shapes(self, node_indices: Collection[int]) -> tuple[str, ...]:
        """The weights' shapes of these nodes' matmuls for the CPU: a measurement depends on them, an epilogue's text not."""
        if not self.policy.has_cpu_gemm:
            return ()
        matmuls = [self.nodes[p] for p in node_indices if is_fusable_matmul(self.nodes[p], self.symbolic)]
        return tuple(" x ".join(map(str, self.symbolic.shape(n.input[1]) or ())) for n in matmuls)

    def operator_names(self, node_indices: Sequence[int]) -> str:
        """The operators of some nodes, separated by spaces."""
        return " ".join(self.nodes[p].op_type for p in node_indices)

    def element_count(self, name: str) -> Int:
        """How many elements a tensor has."""
        if name not in self._element_counts:
            self._element_counts[name] = element_count(self.symbolic.shape(name) or ())
        return self._element_counts[name]

    def data_readers_among(self, name: str, node_indices: Collection[int]) -> list[int]:
        """Those of some nodes, a set, that read a tensor's data."""
        readers = self.data_readers.get(name, ())
        if len(readers) > len(node_indices):
            return [p for p in node_indices if name in self.data[p]]
        return [p for p in readers if p in node_indices]

    def is_broadcast(self, name: str, whole: Shape) -> bool:
        """Whether a tensor is broadcast to a shape, its last axis left out."""
        shape = self.symbolic.shape(name) or ()
        aligned = (integer(1),) * (len(whole) - len(shape)) + shape
        return aligned[:-1] != whole[:-1]

    def is_convex(self, node_indices: Collection[int]) -> bool:
        """Whether no path leaves these nodes and comes back."""
        members = set(node_indices)
        last = max(members)
        pending = {q for p in members for q in self.consumers(p) if q not in members}
        seen: set[int] = set()
        while pending:
            index = pending.pop()
            if index > last or index in seen:  # nodes are in topological order
                continue
            seen.add(index)
            behind = set(self.consumers(index))
            if behind & members:
                return False
            pending |= behind
        return True

    def producers(self, index: int) -> Iterator[int]:
        """The indices of the nodes whose data a node reads."""
        return (self.writer[n] for n in self.data[index] if n in self.writer)

    def read_nodes(self, index: int) -> Iterator[int]:
        """The indices of the nodes of which this one is a consumer."""
        return (self.writer[n] for n in self._reads.get(index, ()) if n in self.writer)

    def consumers(self, index: int) -> Iterator[int]:
        """The indices of the nodes that read a node's outputs."""
        return (r for o in self.nodes[index].output for r in self.readers.get(o, ()))


def _find_reachable(start: Iterable[int], within: Collection[int], step: Callable[[int], Iterable[int]]) -> set[int]:
    """The nodes of ``within`` that steps from ``start`` lead to, those of ``start`` among them."""
    pending = list(start)
    reached: set[int] = set()
    while pending:
        index = pending.pop()
        if index in within and index not in reached:
            reached.add(index)
            pending.extend(step(index))
    return reached


def _tensors_read(node: onnx.NodeProto) -> list[str]:
    """What a node reads, its subgraphs included."""
    captured = sorted(node_tensors(node) - set(node.output)) if _has_subgraph(node) else []
    return [n for n in node.input if n] + captured


def _has_subgraph(node: onnx.NodeProto) -> bool:
    return any(a.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for a in node.attribute)
