# SPDX-License-Identifier: Apache-2.0
"""A run of planned graphs at sizes of tensors: what is alive at each node, and what the arena holds.

If, Loop and Scan run their graphs as ONNX Runtime's CPU provider does:

* An If runs one branch, whose outputs are its own.
* A Loop gives each iteration what the one before has left, keeps the slices of its scan outputs, and in the end copies both
  into its outputs.
* A Scan has its scan outputs from the start, and a body writes its slices there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stof.graph.node_fields import attributes_of
from stof.memory.arena import Arena, ArenaChunk
from stof.memory.graph_plan import GraphPlan
from stof.memory.session_node import SessionNode
from stof.memory.tensor_sizes import TensorSizes, UnknownSizeError
from stof.memory.working_memory import WorkingMemory, working_memory

_LOOP_STATE = 2  # of a Loop's body, the first input that an iteration leaves to the next one; of its outputs 1
_SIMULATED = 3  # iterations in the arena; each further one adds its slices alone


@dataclass(frozen=True)
class Moment:
    """What is alive while a node runs.

    Attributes:
        node: the node.
        buffers: bytes by the tensor that lies there.
        working: bytes that its kernel takes besides.
    """

    node: SessionNode
    buffers: Mapping[str, int]
    working: int

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(self.buffers.values()) + self.working


@dataclass(frozen=True)
class _BodyTensors:
    """The tensors of a Loop's or Scan's body that live longer than an iteration.

    Attributes:
        states: input and output of each value that an iteration leaves to the next one, without those that it does not change.
        slices: the output of the node, and that of the body, whose slices it is made of.
        trips: the number of iterations; None where it is not known.
    """

    states: tuple[tuple[str, str], ...] = ()
    slices: tuple[tuple[str, str], ...] = ()
    trips: int | None = None


class GraphRun:
    """A run at some sizes.

    Args:
        tensors: the sizes.
        is_strict: a tensor of the main graph without a known size is an error; else it counts as nothing, as those of bodies do.
    """

    def __init__(self, tensors: TensorSizes, *, is_strict: bool) -> None:
        self._tensors, self._is_strict = tensors, is_strict

    def moments(self, graph: GraphPlan) -> Iterator[Moment]:
        """What is alive at each node of a main graph and of its bodies.

        Raises:
            UnknownSizeError: of a strict run.
        """
        return self._moments(graph, {}, frozenset(), is_body=False)

    def allocate(self, graph: GraphPlan, arena: Arena) -> None:
        """Takes from an arena what the run of a main graph takes, in its order.

        Raises:
            UnknownSizeError: of a strict run.
        """
        self._allocate(graph, arena, frozenset(), is_body=False)

    def bytes(self, name: str, *, is_body: bool = False) -> int:
        """Bytes of a tensor."""
        try:
            return self._tensors.bytes(name) if name else 0
        except UnknownSizeError:
            if self._is_strict and not is_body:
                raise
            return 0

    def _working(self, node: SessionNode, *, is_body: bool) -> WorkingMemory:
        try:
            return working_memory(node, self._tensors)
        except UnknownSizeError:
            if self._is_strict and not is_body:
                raise
            return WorkingMemory()

    def _moments(
        self, graph: GraphPlan, outer: Mapping[str, int], elsewhere: frozenset[str], *, is_body: bool
    ) -> Iterator[Moment]:
        """``outer`` is alive around the graph; its tensors ``elsewhere`` are parts of these."""
        held: dict[str, int] = {}
        content: dict[str, str] = {}  # which tensor lies in a buffer
        for index, step in enumerate(graph.plan.steps):
            node = step.node
            bodies = graph.bodies.get(index, ())
            made = {b: self.bytes(b, is_body=is_body) for b in step.made if b not in elsewhere}
            if bodies:
                around = held | (made if node.op == "Scan" else {})
                alive = {content.get(b, b): size for b, size in around.items()}
                yield from self._body_moments(node, bodies, {**outer, **alive})
            held |= made
            content |= {graph.plan.buffer_of[o]: o for o in node.outputs}
            own = {content[b]: size for b, size in held.items()}
            hidden = sum(outer[n] for n in own.keys() & outer.keys())  # names of a body may be names outside, too
            working = self._working(node, is_body=is_body).bytes + self._left_by(node, bodies)
            yield Moment(node, {**outer, **own}, working + hidden)
            for buffer in step.ended:
                held.pop(buffer, None)

    def _body_moments(
        self, node: SessionNode, bodies: Sequence[GraphPlan], alive: Mapping[str, int]
    ) -> Iterator[Moment]:
        for body in bodies:
            inner = self._body_tensors(node, body)
            is_scan = node.op == "Scan"
            more = {} if inner.trips in (0, 1) else {i: self.bytes(i, is_body=True) for i, _ in inner.states}
            if not is_scan and inner.trips:
                more |= {o: self.bytes(o) // inner.trips * (inner.trips - 1) for o, _ in inner.slices}
            elsewhere = frozenset(o for _, o in inner.slices) if is_scan else frozenset()
            yield from self._moments(body, {**alive, **more}, elsewhere, is_body=True)

    def _left_by(self, node: SessionNode, bodies: Sequence[GraphPlan]) -> int:
        """Bytes that a Loop holds when it copies to its outputs: states of the last two iterations, and all slices."""
        if node.op != "Loop" or not bodies:
            return 0
        inner = self._body_tensors(node, bodies[0])
        copies = 1 if inner.trips in (0, 1) else 2
        states = sum(self.bytes(o, is_body=True) for _, o in inner.states)
        return copies * states + sum(self.bytes(o, is_body=True) for o, _ in inner.slices)

    def _body_tensors(self, node: SessionNode, body: GraphPlan) -> _BodyTensors:
        if node.op == "If":
            return _BodyTensors()
        if node.op == "Loop":
            inputs, outputs = body.inputs[_LOOP_STATE:], body.outputs[_LOOP_STATE - 1 :]
        else:
            count = int(attributes_of(node.proto).get("num_scan_inputs", 0))
            inputs, outputs = body.inputs[: len(body.inputs) - count], body.outputs
        written = {o for step in body.plan.steps for o in step.node.outputs}
        states = tuple((i, o) for i, o in zip(inputs, outputs, strict=False) if o in written)
        # Outputs that nobody reads have no name.
        outside = tuple(node.proto.output)[len(inputs) :]
        slices = tuple((o, s) for o, s in zip(outside, outputs[len(inputs) :], strict=False) if o)
        return _BodyTensors(states, slices, self._count_trips(node))

    def _count_trips(self, node: SessionNode) -> int | None:
        if node.op == "Loop":
            trips = self._tensors.integers(node.inputs[0]) if node.inputs[0] else None
            return None if trips is None or trips.size != 1 else max(0, int(trips.reshape(-1)[0]))
        attributes = attributes_of(node.proto)
        count = int(attributes.get("num_scan_inputs", 0))
        axis = int((attributes.get("scan_input_axes") or [0])[0])
        try:
            return self._tensors.shape(node.inputs[-count])[axis]
        except (UnknownSizeError, IndexError):
            return None

    def _allocate(
        self, graph: GraphPlan, arena: Arena, elsewhere: frozenset[str], *, is_body: bool
    ) -> dict[str, ArenaChunk | None]:
        """Gives the chunks that are left, by their buffers: those of the outputs."""
        chunks = dict[str, ArenaChunk | None]()
        for index, step in enumerate(graph.plan.steps):
            bodies = graph.bodies.get(index, ())
            working = self._working(step.node, is_body=is_body)
            taken = [arena.allocate(size) for size in working.before]
            made = [b for b in step.made if b not in elsewhere]
            if bodies and step.node.op != "Scan":
                taken += self._allocate_bodies(step.node, bodies, arena)
            chunks |= {b: arena.allocate(self.bytes(b, is_body=is_body)) for b in made}
            if bodies and step.node.op == "Scan":
                taken += self._allocate_bodies(step.node, bodies, arena)
            taken += [arena.allocate(size) for size in working.after]
            for chunk in taken:
                arena.free(chunk)
            for buffer in step.ended:
                arena.free(chunks.pop(buffer, None))
        return chunks

    def _allocate_bodies(self, node: SessionNode, bodies: Sequence[GraphPlan], arena: Arena) -> list[ArenaChunk | None]:
        """Runs the larger branch, or some iterations; gives what is left when the node writes its outputs."""
        if node.op == "If":
            body = max(
                bodies, key=lambda b: max((m.bytes for m in self._moments(b, {}, frozenset(), is_body=True)), default=0)
            )
            self._free(self._allocate(body, arena, frozenset(), is_body=True), arena)
            return []
        body = bodies[0]
        inner = self._body_tensors(node, body)
        own = {s for _, s in inner.slices}
        is_scan = node.op == "Scan"
        trips = _SIMULATED if inner.trips is None else inner.trips
        kept: list[ArenaChunk | None] = []
        states: list[dict[str, ArenaChunk | None]] = []
        for _ in range(min(trips, _SIMULATED)):
            left = self._allocate(body, arena, frozenset(own) if is_scan else frozenset(), is_body=True)
            kept += [left.pop(b) for b in list(left) if b in own]
            states.append(left)
            if len(states) > 2:  # an iteration has let go of what it was given
                self._free(states.pop(0), arena)
        if not is_scan and trips > _SIMULATED:
            kept += [arena.allocate(self.bytes(o) // trips * (trips - _SIMULATED)) for o, _ in inner.slices]
        return kept + [chunk for left in states for chunk in left.values()]

    @staticmethod
    def _free(chunks: Mapping[str, ArenaChunk | None], arena: Arena) -> None:
        for chunk in chunks.values():
            arena.free(chunk)
