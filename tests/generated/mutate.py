# SPDX-License-Identifier: Apache-2.0
"""Small changes to exported graphs: what a matcher that knows the graph's kind, but does not read it, would overlook."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

_COMPUTE = frozenset({"MatMul", "Gemm", "Softmax", "LayerNormalization", "Tanh", "Erf", "Gelu"})
_COMPARE = frozenset({"Less", "LessOrEqual", "Greater", "GreaterOrEqual"})
_STRICT = {
    "Less": "LessOrEqual",
    "LessOrEqual": "Less",
    "Greater": "GreaterOrEqual",
    "GreaterOrEqual": "Greater",
}


class Graph:
    """A model that is being changed, with its nodes sorted into masks and scores by what they depend on."""

    def __init__(self, model: onnx.ModelProto, rng: random.Random) -> None:
        self.model = model
        self.rng = rng
        self.graph = model.graph
        self.producer = {o: n for n in self.graph.node for o in n.output}
        self.initializers = {t.name: t for t in self.graph.initializer}
        self.computed = self._computed()
        self.mask = [n for n in self._behind_softmax() if n.output[0] not in self.computed]
        self.scores = list(self._between())
        self.count = 0

    def _computed(self) -> set[str]:
        """Tensors that depend on matmuls or norms."""
        found: set[str] = set()
        for node in self.graph.node:
            if node.op_type in _COMPUTE or (node.op_type != "Shape" and any(i in found for i in node.input)):
                found.update(node.output)
        return found

    def _behind_softmax(self) -> Iterator[NodeProto]:
        seen: set[str] = set()
        pending = [n.input[0] for n in self.graph.node if n.op_type == "Softmax"]
        while pending:
            node = self.producer.get(pending.pop())
            if node is not None and node.output[0] not in seen:
                seen.add(node.output[0])
                if node.op_type != "Shape":
                    yield node
                    pending.extend(node.input)

    def _between(self) -> Iterator[NodeProto]:
        """The nodes between a product of query and key and its softmax."""
        for softmax in (n for n in self.graph.node if n.op_type == "Softmax"):
            tensor = softmax.input[0]
            for _ in range(12):
                node = self.producer.get(tensor)
                if node is None or node.op_type in ("MatMul", "Attention"):
                    break
                yield node
                data = [i for i in node.input if i in self.computed]
                if not data:
                    break
                tensor = data[0]

    def constant(self, name: str) -> np.ndarray | None:
        """The value of a constant."""
        node = self.producer.get(name)
        if node is not None and node.op_type == "Constant":
            values = {a.name: a for a in node.attribute}
            if "value" in values:
                return numpy_helper.to_array(values["value"].t)
            return np.asarray(helper.get_attribute_value(node.attribute[0]))
        tensor = self.initializers.get(name)
        if tensor is None or tensor.data_location == TensorProto.EXTERNAL:
            return None
        return numpy_helper.to_array(tensor)

    def put(self, node: NodeProto, place: int, array: np.ndarray) -> None:
        """A new constant as one input of one node."""
        self.count += 1
        name = f"changed{self.count}"
        self.graph.initializer.append(numpy_helper.from_array(array, name))
        node.input[place] = name

    def insert(self, node: NodeProto, op: str, *more: str, **attributes: object) -> None:
        """A node behind another one's first output."""
        self.count += 1
        inner = f"inner{self.count}"
        outer = node.output[0]
        node.output[0] = inner
        new = helper.make_node(op, [inner, *more], [outer], name=f"inserted{self.count}", **attributes)
        self.graph.node.insert(list(self.graph.node).index(node) + 1, new)

    def new(self, array: np.ndarray) -> str:
        """A new constant."""
        self.count += 1
        self.graph.initializer.append(numpy_helper.from_array(array, f"changed{self.count}"))
        return f"changed{self.count}"

    def pick(self, nodes: list[NodeProto]) -> NodeProto | None:
        """One of the nodes, or none."""
        return self.rng.choice(nodes) if nodes else None

    def numbers(self, nodes: list[NodeProto], kinds: str) -> list[tuple[NodeProto, int, np.ndarray]]:
        """Scalar constants that nodes read."""
        found = []
        for node in nodes:
            for place, name in enumerate(node.input):
                array = self.constant(name)
                if array is not None and array.size == 1 and array.dtype.kind in kinds:
                    found.append((node, place, array))
        return found


def off_by_one(g: Graph) -> str:
    """A number that positions are compared with, or that is added to them."""
    nodes = [n for n in g.mask if n.op_type in _COMPARE | {"Add", "Sub"}]
    found = [x for x in g.numbers(nodes, "iu") if abs(int(x[2].reshape(-1)[0])) < 10_000]
    if not found:
        return ""
    node, place, array = g.rng.choice(found)
    g.put(node, place, (array + g.rng.choice([-1, 1])).astype(array.dtype))
    return f"{node.op_type} {array} by one"


def swapped(g: Graph) -> str:
    """The operands of a comparison or a difference."""
    node = g.pick([n for n in g.mask if n.op_type in _COMPARE | {"Sub"}])
    if node is None:
        return ""
    node.input[0], node.input[1] = node.input[1], node.input[0]
    return f"{node.op_type} swapped"


def strictness(g: Graph) -> str:
    node = g.pick([n for n in g.mask if n.op_type in _STRICT])
    if node is None:
        return ""
    node.op_type = _STRICT[node.op_type]
    return f"now {node.op_type}"


def fill(g: Graph) -> str:
    """The value of forbidden pairs."""
    nodes = [n for n in (*g.mask, *g.scores) if n.op_type in ("Where", "Mul", "ConstantOfShape", "Expand")]
    found = [x for x in g.numbers(nodes, "f") if float(x[2].reshape(-1)[0]) < -100]
    stored = [n for n in nodes if n.op_type == "ConstantOfShape" and n.attribute and n.attribute[0].t.data_type == 1]
    value = g.rng.choice([-np.inf, -3.4028234663852886e38, -1e9, -1e4, -50.0, -1.5, 0.0, 2.0])
    if stored and (not found or g.rng.random() < 0.3):
        node = g.rng.choice(stored)
        node.attribute[0].t.CopyFrom(numpy_helper.from_array(np.full(1, value, np.float32)))
        return f"ConstantOfShape fills {value}"
    if not found:
        return ""
    node, place, array = g.rng.choice(found)
    g.put(node, place, np.full(array.shape, value, array.dtype))
    return f"{node.op_type} fills {value}"


def junction(g: Graph) -> str:
    node = g.pick([n for n in g.mask if n.op_type in ("And", "Or")])
    if node is None:
        return ""
    node.op_type = {"And": "Or", "Or": "And"}[node.op_type]
    return f"now {node.op_type}"


def scale(g: Graph) -> str:
    """A factor of the scores, or of query or key."""
    nodes = [n for n in g._behind_softmax() if n.op_type in ("Mul", "Div") and n.output[0] in g.computed]
    found = [x for x in g.numbers(nodes, "f") if 1e-3 < abs(float(x[2].reshape(-1)[0])) < 100]
    if not found:
        return ""
    node, place, array = g.rng.choice(found)
    g.put(node, place, (array * g.rng.choice([0.5, 1.01, -1.0, 3.0])).astype(array.dtype))
    return f"{node.op_type} by {array} changed"


def branches(g: Graph) -> str:
    node = g.pick([n for n in g.mask if n.op_type == "Where"])
    if node is None:
        return ""
    node.input[1], node.input[2] = node.input[2], node.input[1]
    return "Where branches swapped"


def shifted(g: Graph) -> str:
    node = g.pick([n for n in g.mask if n.op_type == "Range"])
    if node is None:
        return ""
    g.insert(node, "Add", g.new(np.array(g.rng.choice([-1, 1, 2]), np.int64)))
    return "Range shifted"


def another_mask(g: Graph) -> str:
    """The mask of one layer in place of another's."""
    nodes = [n for n in g.scores if n.op_type in ("Add", "Where")]
    found = []
    for node in nodes:
        place = next((i for i, x in enumerate(node.input) if x not in g.computed and g.constant(x) is None), None)
        if place is not None:
            found.append((node, place))
    if len(found) < 2:
        return ""
    (one, i), (other, j) = g.rng.sample(found, 2)
    if one.op_type != other.op_type or one.input[i] == other.input[j]:
        return ""
    order = {o: k for k, n in enumerate(g.graph.node) for o in n.output}
    if order.get(other.input[j], -1) > order[one.output[0]]:
        one, i, other, j = other, j, one, i
    one.input[i] = other.input[j]
    return "mask of another layer"


def negated(g: Graph) -> str:
    """One more Not, or one less."""
    nots = [n for n in g.mask if n.op_type == "Not"]
    if nots and g.rng.random() < 0.5:
        g.rng.choice(nots).op_type = "Identity"
        return "Not removed"
    node = g.pick([n for n in g.mask if n.op_type in _COMPARE | {"And", "Or", "Equal"}])
    if node is None:
        return ""
    g.insert(node, "Not")
    return f"Not after {node.op_type}"


def triangle(g: Graph) -> str:
    node = g.pick([n for n in g.mask if n.op_type == "Trilu"])
    if node is None:
        return ""
    upper = next((a for a in node.attribute if a.name == "upper"), None)
    if g.rng.random() < 0.5 and upper is not None:
        upper.i = 1 - upper.i
        return "Trilu turned"
    offset = np.array(g.rng.choice([-2, -1, 1, 2, 3]), np.int64)
    if len(node.input) == 1:
        node.input.append("")
    known = g.constant(node.input[1]) if node.input[1] else np.array(0)
    if known is None:
        return ""
    g.put(node, 1, np.asarray(known + offset, np.int64).reshape(np.shape(known)))
    return f"Trilu by {offset}"


MUTATIONS: list[Callable[[Graph], str]] = [
    off_by_one,
    swapped,
    strictness,
    fill,
    junction,
    scale,
    branches,
    shifted,
    another_mask,
    negated,
    triangle,
]


def mutate(model: onnx.ModelProto, rng: random.Random, first: int) -> str:
    """Changes a model in place in one way, the ``first`` if it applies; says how, empty if there is none."""
    for i in range(len(MUTATIONS)):
        mutation = MUTATIONS[(first + i) % len(MUTATIONS)]
        if words := mutation(Graph(model, rng)):
            return f"{mutation.__name__}: {words}"
    return ""
