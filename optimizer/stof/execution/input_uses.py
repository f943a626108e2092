# SPDX-License-Identifier: Apache-2.0
"""What integer inputs mean, by the nodes that read them: indices of tables, slots, lengths, sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from weakref import WeakKeyDictionary, proxy

import numpy as np
import onnx

from stof.errors import UnsupportedError
from stof.execution.value_steps import ValueStep, pull_back
from stof.graph.index import GraphIndex, all_nodes, domain_of, subgraphs
from stof.symbolic import Symbolic
from stof.symbolic.algebra.sizes import evaluate
from stof.symbolic.algebra.terms import Int, integer

_LONGEST_CHAIN = 16
_MOST_TENSORS = 2000  # that are looked at from one input
_MOVES = frozenset({"Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Expand", "Flatten", "Transpose"})
# Their elements are some of those of the first operand, or of any operand.
_KEEPS_FIRST = _MOVES | {"Slice", "Gather", "GatherElements", "GatherND", "Tile", "Split", "ReduceMax", "ReduceMin"}
_KEEPS_FIRST |= {"Floor", "Ceil", "Round", "Pad", "Compress", "Trilu"}
_COMPARES = frozenset({"Less", "LessOrEqual", "Greater", "GreaterOrEqual"})
_GENERATES = frozenset({"GreedySearch", "BeamSearch", "Sampling"})


class InputUse(Enum):
    """What is read, those first that decide where an input is read in several ways."""

    SLOT = "slots that are written"
    INDEX = "indices of a table"
    MASK = "a padding mask"
    LENGTH = "lengths"
    SIZE = "a size"
    SHAPE = "a shape"
    VALUE = "a number"


@dataclass(frozen=True)
class Bound:
    """The range that a node requires of a tensor.

    Attributes:
        use: what the tensor is to the node.
        low: its least value, None where any is allowed.
        high: its largest value.
        steps: how the tensor is computed from the input.
        is_hard: whether ONNX Runtime refuses other values.
    """

    use: InputUse
    low: Int | None
    high: Int | None
    steps: tuple[ValueStep, ...] = ()
    is_hard: bool = True

    def range(self, sizes: Mapping[str, int]) -> tuple[int | None, int | None]:
        """What the input may hold at these sizes, both ends included."""
        return pull_back(self.steps, _at(self.low, sizes), _at(self.high, sizes), sizes)


class InputUses:
    """Bounds of the integer inputs of one graph.

    Args:
        index: of the graph.
        symbolic: its shapes and constants.
    """

    def __init__(self, index: GraphIndex, symbolic: Symbolic) -> None:
        self.symbolic = symbolic
        self._index: GraphIndex = proxy(index)  # which holds these uses, by way of input_uses
        self._bounds: dict[str, tuple[Bound, ...]] = {}
        nested = [n for n in index.graph.node if n.attribute and subgraphs(n)]
        self._inner: dict[str, list[onnx.NodeProto]] = {}
        self._inner_shapes: dict[str, tuple[Int, ...]] = {}
        for node in nested:
            for part in all_nodes([node]):
                for graph in subgraphs(part):
                    for tensor in graph.initializer:
                        self._inner_shapes[tensor.name] = tuple(integer(d) for d in tensor.dims)
                if part is not node:
                    for name in dict.fromkeys(part.input):
                        self._inner.setdefault(name, []).append(part)

    def bounds(self, name: str) -> tuple[Bound, ...]:
        """What the nodes require that read a tensor or what is computed from it."""
        if name not in self._bounds:
            self._bounds[name] = tuple(self._walk(name))
        return self._bounds[name]

    def rows(self, name: str) -> int | None:
        """The rows of the smallest table of fixed size that an input indexes, None if it indexes none."""
        ends = [b.range({})[1] for b in self.bounds(name) if b.use in (InputUse.INDEX, InputUse.SLOT) and b.is_hard]
        return min((end + 1 for end in ends if end is not None), default=None)

    def _readers(self, tensor: str) -> list[onnx.NodeProto]:
        return [*self._index.consumers(tensor), *self._inner.get(tensor, ())]

    def _walk(self, name: str) -> Iterator[Bound]:
        pending: list[tuple[str, tuple[ValueStep, ...]]] = [(name, ())]
        seen = {name}
        while pending:
            tensor, steps = pending.pop()
            for node in self._readers(tensor):
                for input_index in (p for p, operand in enumerate(node.input) if operand == tensor):
                    for use, low, high, is_hard in self._find_required(node, input_index):
                        yield Bound(use, low, high, steps, is_hard)
                    for output, step in self._continue(node, input_index):
                        if output and output not in seen and len(seen) < _MOST_TENSORS:
                            seen.add(output)
                            pending.append((output, steps if step is None else (*steps, step)))

    def shape(self, tensor: str) -> tuple[Int, ...] | None:
        """A tensor's shape, also of constants of subgraphs."""
        shape = self.symbolic.shape(tensor)
        return self._inner_shapes.get(tensor) if shape is None else tuple(shape)

    def _size(self, node: onnx.NodeProto, input_index: int, axis: int) -> Int | None:
        """The size of an operand along an axis."""
        shape = self.shape(node.input[input_index]) if input_index < len(node.input) else None
        return shape[axis] if shape is not None and -len(shape) <= axis < len(shape) else None

    def _find_required(
        self, node: onnx.NodeProto, input_index: int
    ) -> Iterator[tuple[InputUse, Int | None, Int | None, bool]]:
        """What a node requires of an operand.

        Longer than 60 lines: a table with one entry for each operand of an operator.
        """
        op, domain = node.op_type, domain_of(node)
        attributes = {a.name: a for a in node.attribute}

        def number(name: str, default: int = 0) -> int:
            return attributes[name].i if name in attributes else default

        def indices(use: InputUse, table: int, axis: int) -> Iterator[tuple[InputUse, Int | None, Int | None, bool]]:
            size = self._size(node, table, axis)
            yield use, integer(0), None if size is None else size - integer(1), size is not None

        match domain, op, input_index:
            case "", ("Gather" | "GatherElements"), 1:
                yield from indices(InputUse.INDEX, 0, number("axis"))
            case "", ("ScatterElements" | "Scatter"), 1:
                yield from indices(InputUse.SLOT, 0, number("axis"))
            case "", ("GatherND" | "ScatterND"), 1:
                shape = self.shape(node.input[1])
                count = shape[-1].constant if shape else None
                for axis in range(count or 1):
                    use = InputUse.SLOT if op == "ScatterND" else InputUse.INDEX
                    yield from indices(use, 0, number("batch_dims") + axis)
            case "", "TensorScatter", 2:
                axis = number("axis", -2)
                past, update = self._size(node, 0, axis), self._size(node, 1, axis)
                if "mode" in attributes and attributes["mode"].s == b"circular":  # positions wrap
                    yield InputUse.INDEX, integer(0), None if past is None else past + past, True
                else:
                    yield InputUse.INDEX, integer(0), None if past is None or update is None else past - update, True
            case "", "OneHot", 0:
                depth = self.symbolic.constant(node.input[1])
                if depth is not None:
                    yield InputUse.INDEX, integer(0), integer(int(depth.reshape(-1)[0]) - 1), False
            case "", ("RNN" | "GRU" | "LSTM"), 4:
                yield InputUse.LENGTH, integer(1), self._size(node, 0, number("layout")), True
            case "", "ReverseSequence", 1:
                yield InputUse.LENGTH, integer(1), self._size(node, 0, number("time_axis")), True
            case "", "TopK", 1:
                yield InputUse.SIZE, integer(1), self._size(node, 0, number("axis", -1)), True
            case "", ("Div" | "Mod"), 1:
                yield InputUse.VALUE, integer(1), None, True
            case "", "Loop", 0:
                yield InputUse.VALUE, integer(2), None, False
            case "", "Range", 0:
                yield InputUse.VALUE, integer(0), integer(0), False
            case "", "Range", 1:
                yield InputUse.LENGTH, integer(1), None, False
            case "", "Range", 2:
                yield InputUse.VALUE, integer(1), integer(1), True
            case ("", ("Reshape" | "Expand" | "Tile"), 1) | ("", "ConstantOfShape", 0):
                yield InputUse.SHAPE, integer(1), None, False
            case "", "Slice", 1:
                yield InputUse.VALUE, integer(0), integer(0), False
            case "", "Slice", 2:
                yield InputUse.LENGTH, integer(1), self._size(node, 0, self._slice_axis(node)), False
            case "", ("CumSum" | "Squeeze" | "Unsqueeze" | "Pad" | "Trilu"), 1:
                yield InputUse.VALUE, integer(0), integer(0), False
            case "", _, (0 | 1) if op in _COMPARES:
                size = self._size(node, 1 - input_index, -1)
                if size is None or size.constant != 1:
                    yield InputUse.LENGTH, integer(1), size, False
            case "", "RotaryEmbedding", 3:
                yield from indices(InputUse.INDEX, 1, 0)
            case "com.microsoft", "RotaryEmbedding", 1:
                rows, length = self._size(node, 2, 0), self._size(node, 0, -2)
                shape = self.shape(node.input[1])
                is_offset = shape is not None and len(shape) == 1
                least = integer(1) if not is_offset or length is None else length
                yield InputUse.INDEX, integer(0), None if rows is None else rows - least, True
            case "com.microsoft", ("EmbedLayerNormalization" | "QEmbedLayerNormalization"), (0 | 1):
                yield from indices(InputUse.INDEX, (2, 4)[input_index], 0)
            case "com.microsoft", "EmbedLayerNormalization", 8:
                yield from indices(InputUse.INDEX, 3, 0)
            case "com.microsoft", "EmbedLayerNormalization", 7:
                yield InputUse.MASK, integer(0), integer(1), False
            case "com.microsoft", "GatherBlockQuantized", 1:
                yield from indices(InputUse.INDEX, 0, number("gather_axis"))
            case "com.microsoft", "GroupQueryAttention", 6:
                past, new = self._size(node, 3, 2), self._size(node, 1, 1)
                total = None if new is None else new if past is None else past + new
                yield InputUse.LENGTH, integer(1), total, False
            case "com.microsoft", "GroupQueryAttention", 9:
                yield from indices(InputUse.INDEX, 7, 0)
            case "com.microsoft", _, _ if op in _GENERATES:
                yield from self._find_required_by_generation(node, input_index)

    def _find_required_by_generation(
        self, node: onnx.NodeProto, input_index: int
    ) -> Iterator[tuple[InputUse, Int | None, Int | None, bool]]:
        """The operands of nodes that generate tokens: a prompt, the lengths of the result, numbers of beams, masks."""
        is_beam = node.op_type == "BeamSearch"
        if input_index == 1:
            length = self._size(node, 0, 1)
            few = None if length is None else length + integer(4)
            yield InputUse.VALUE, few, few, True
        elif input_index == 2 or input_index == (4 if is_beam else -1):
            yield InputUse.VALUE, integer(1), integer(1), True
        elif input_index == 3 and is_beam:
            yield InputUse.VALUE, integer(2), integer(2), True
        elif input_index in ((7, 8) if is_beam else (4, 5)):  # words that are allowed
            yield InputUse.VALUE, integer(1), integer(1), False
        elif input_index == (9 if is_beam else 6):
            yield InputUse.MASK, integer(0), integer(1), False

    def _slice_axis(self, node: onnx.NodeProto) -> int:
        axes = self.symbolic.constant(node.input[3]) if len(node.input) > 3 and node.input[3] else None
        return 0 if axes is None or axes.size != 1 else int(axes.reshape(-1)[0])

    def _continue(self, node: onnx.NodeProto, input_index: int) -> Iterator[tuple[str, ValueStep | None]]:
        """Tensors whose elements are those of an operand, or are computed from them one by one."""
        op = node.op_type
        if node.attribute and (inner := self._inner_input(node, input_index)):
            yield inner, None
        if domain_of(node) or not node.output:
            return
        if (op in _KEEPS_FIRST and input_index == 0) or op == "Concat" or (op == "Where" and input_index > 0):
            yield from ((name, None) for name in node.output)
        elif op == "ScatterND" and input_index == 2:
            yield node.output[0], None
        elif op == "Neg":
            yield node.output[0], ValueStep("from", integer(0))
        elif op == "Range" and input_index < 2:
            yield node.output[0], ValueStep("add", integer(-input_index))
        elif op == "Clip" and input_index == 0:
            yield node.output[0], None if (step := self._clip_step(node)) is None else step
        elif op in ("Add", "Sub", "Mul", "Div", "Mod", "Min", "Max") and len(node.input) == 2:
            yield node.output[0], self._arithmetic_step(node, input_index)

    def _arithmetic_step(self, node: onnx.NodeProto, input_index: int) -> ValueStep | None:
        other = node.input[1 - input_index]
        constant = self.symbolic.constant(other)
        value = constant.reshape(-1) if constant is not None and constant.size else None
        if value is None or value.dtype.kind not in "iuf" or not np.isfinite(value.astype(np.float64)).all():
            shape = self.shape(other)
            # Most likely positions beside an offset.
            return ValueStep("spread", shape[-1]) if node.op_type == "Add" and shape else None
        least, most = int(np.floor(value.min())), int(np.ceil(value.max()))
        match node.op_type, input_index:
            case "Add", _:
                return ValueStep("add", integer(most))
            case "Sub", 0:
                return ValueStep("add", integer(-least))
            case "Sub", 1:
                return ValueStep("from", integer(least))
            case "Mul", _:
                return ValueStep("times", integer(most))
            case "Div", 0:
                return ValueStep("over", integer(least))
            case "Mod", 0:
                return ValueStep("modulo", integer(least))
            case "Max", _:
                return ValueStep("least", integer(most))
            case "Min", _:
                return ValueStep("most", integer(least))
        return None

    def _clip_step(self, node: onnx.NodeProto) -> ValueStep | None:
        ends: list[Int | None] = []
        for index, name in ((1, "min"), (2, "max")):
            constant = (
                self.symbolic.constant(node.input[index]) if len(node.input) > index and node.input[index] else None
            )
            attribute = next((a.f for a in node.attribute if a.name == name), None)
            end = attribute if constant is None or not constant.size else float(constant.reshape(-1)[0])
            ends.append(integer(int(end)) if end is not None and abs(end) < 1 << 62 else None)
        return ValueStep("clip", ends[0], ends[1])

    def _inner_input(self, node: onnx.NodeProto, input_index: int) -> str:
        """The subgraph's tensor that stands for an operand of its node."""
        graphs = {a.name: a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH}
        if node.op_type in _GENERATES and input_index == 0:
            graph = graphs.get("encoder") or graphs.get("decoder")
            return graph.input[0].name if graph is not None and graph.input else ""
        if node.op_type in ("Loop", "Scan") and "body" in graphs and input_index < len(graphs["body"].input):
            return graphs["body"].input[input_index].name if node.op_type == "Scan" or input_index > 1 else ""
        return ""


_uses_by_graph: WeakKeyDictionary[GraphIndex, InputUses] = WeakKeyDictionary()


def input_uses(index: GraphIndex, symbolic: Symbolic) -> InputUses:
    """The uses of a graph's inputs, which are looked for once."""
    cached = _uses_by_graph.get(index)
    if cached is None or cached.symbolic is not symbolic:
        cached = _uses_by_graph[index] = InputUses(index, symbolic)
    return cached


def _at(size: Int | None, sizes: Mapping[str, int]) -> int | None:
    if size is None:
        return None
    try:
        return evaluate(size, sizes)
    except (UnsupportedError, ZeroDivisionError):
        return None


def find_source(index: GraphIndex, tensor: str) -> str:
    """The tensor from whose elements a tensor is moved together."""
    for _ in range(_LONGEST_CHAIN):
        node = index.producer(tensor)
        if node is None or node.op_type not in _MOVES:
            break
        tensor = node.input[0]
    return tensor


def find_inputs_behind(index: GraphIndex, tensors: frozenset[str], inputs: set[str]) -> frozenset[str]:
    """The model inputs on whose data tensors depend."""
    behind: set[str] = set()
    seen: set[str] = set()
    pending = list(tensors)
    while pending:
        name = pending.pop()
        if name in seen or not name:
            continue
        seen.add(name)
        node = index.producer(name)
        if name in inputs:
            behind.add(name)
        elif node is not None and node.op_type != "Shape":
            pending.extend(node.input)
    return frozenset(behind)


def find_constant_steps(
    index: GraphIndex, tensor: str, constant: Callable[[str], np.ndarray | None]
) -> tuple[str, list[tuple[np.ufunc, np.float64 | None, np.float64 | None]]]:
    """The tensor that another one is computed from element by element with constants, and the steps, the last one first."""
    operate_by_op: dict[str, np.ufunc] = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide}
    steps: list[tuple[np.ufunc, np.float64 | None, np.float64 | None]] = []
    for _ in range(_LONGEST_CHAIN):
        node = index.producer(tensor)
        if node is None:
            break
        operate = operate_by_op.get(node.op_type)
        if operate is not None and not domain_of(node):
            constants = [constant(name) for name in node.input]
            open_indices = [i for i, value in enumerate(constants) if value is None]
            if len(open_indices) != 1 or any(g is not None and (g.size == 0 or np.ptp(g) != 0) for g in constants):
                break
            left, right = (g if g is None else np.float64(g.reshape(-1)[0]) for g in constants)
            steps.append((operate, left, right))
            tensor = node.input[open_indices[0]]
        elif node.op_type in _MOVES:
            tensor = node.input[0]
        else:
            break
    return tensor, steps
