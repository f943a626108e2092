# SPDX-License-Identifier: Apache-2.0
"""What kernels of ONNX Runtime's CPU provider take besides inputs and outputs, by the shapes of a node.

Each rule is measured by tests/memory, which runs the node alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest

from stof.graph.einsum import read_equation
from stof.graph.index import DOMAIN, domain_of
from stof.graph.node_fields import attributes_of
from stof.memory.einsum_copies import einsum_copies
from stof.memory.operator_workspace import operator_workspace
from stof.memory.session_node import SessionNode
from stof.memory.tensor_sizes import TensorSizes

Rule = Callable[[SessionNode, TensorSizes], list[int]]


@dataclass(frozen=True)
class WorkingMemory:
    """Bytes of blocks that a node takes while it runs.

    Attributes:
        before: those that it takes before its results.
        after: the others.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """All together."""
        return sum(self.before) + sum(self.after)


def working_memory(node: SessionNode, sizes: TensorSizes) -> WorkingMemory:
    """The blocks that a node takes while it runs."""
    key = domain_of(node.proto), node.op
    if key[0] == DOMAIN:
        return WorkingMemory(after=tuple(operator_workspace(node, sizes)))
    if rule := _BEFORE.get(key):
        return WorkingMemory(before=tuple(rule(node, sizes)))
    if rule := _AFTER.get(key):
        return WorkingMemory(after=tuple(rule(node, sizes)))
    return WorkingMemory()


def _where(node: SessionNode, sizes: TensorSizes) -> list[int]:
    """Each side is chosen into a tensor of its own, then both are merged."""
    condition, item = sizes.shape(node.inputs[0]), sizes.item_bytes(node.outputs[0])
    sides = (broadcast(condition, sizes.shape(name)) for name in node.inputs[1:3])
    return [math.prod(shape) * item for shape in sides]


def broadcast(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of two tensors together."""
    pairs = zip_longest(reversed(one), reversed(other), fillvalue=1)
    return tuple(b if a == 1 else a for a, b in pairs)[::-1]


def _einsum(node: SessionNode, sizes: TensorSizes) -> list[int]:
    """Operands and products in other orders of axes."""
    equation = read_equation(node.proto)
    item = sizes.item_bytes(node.outputs[0])
    copies = einsum_copies(equation, [sizes.shape(n) for n in node.inputs], sizes.shape(node.outputs[0]))
    return [count * item for count in copies]


def _softmax(node: SessionNode, sizes: TensorSizes) -> list[int]:
    """Input and result with the axis last, where it is another one."""
    axis = int(attributes_of(node.proto).get("axis", -1))
    is_last = axis in (-1, len(sizes.shape(node.inputs[0])) - 1)
    return [] if is_last else [sizes.bytes(node.outputs[0])] * 2


def _variadic(node: SessionNode, sizes: TensorSizes) -> list[int]:
    """Of three inputs or more, the result so far."""
    return [sizes.bytes(node.outputs[0])] if len(node.inputs) > 2 else []


def _conv_transpose(node: SessionNode, sizes: TensorSizes) -> list[int]:
    """The product of weights and input, before it is added up: one image and group at a time."""
    image, weight = sizes.shape(node.inputs[0]), sizes.shape(node.inputs[1])
    return [math.prod(weight[1:]) * math.prod(image[2:]) * sizes.item_bytes(node.outputs[0])]


def _scatter_elements(node: SessionNode, sizes: TensorSizes) -> list[int]:
    """Indices from 0 on."""
    return [math.prod(sizes.shape(node.inputs[1])) * 8]


def _dropout(node: SessionNode, sizes: TensorSizes) -> list[int]:
    """Which elements it keeps, where the graph has no output for that."""
    return [math.prod(sizes.shape(node.inputs[0]))] if len(node.outputs) == 1 else []


def _result(node: SessionNode, sizes: TensorSizes) -> list[int]:
    """Once more what the node gives."""
    return [sizes.bytes(node.outputs[0])]


def _attention(node: SessionNode, sizes: TensorSizes) -> list[int]:
    """All scores, and a float mask that is gone before the result: a copy of a boolean one, or one of is_causal."""
    attributes, inputs = attributes_of(node.proto), [*node.inputs, *[""] * 7]
    query, key = sizes.shape(inputs[0]), sizes.shape(inputs[1])
    axis = 2 if len(query) == 4 else 1
    heads = query[1] if axis == 2 else int(attributes["q_num_heads"])
    rows, keys = query[axis], key[axis] + (sizes.shape(inputs[4])[2] if inputs[4] else 0)
    scores = query[0] * heads * rows * keys * 4
    copied = 0
    if inputs[3]:
        shape = sizes.shape(inputs[3])
        is_float = sizes.item_bytes(inputs[3]) > 1 and not attributes.get("is_causal", 0)
        copied = 0 if is_float else math.prod(shape)
    elif attributes.get("is_causal", 0) and not inputs[6]:
        copied = rows * keys
    return [scores, max(copied * 4 - sizes.bytes(node.outputs[0]), 0)]


_BEFORE: Mapping[tuple[str, str], Rule] = {
    ("", "Einsum"): _einsum,
    ("", "HardSwish"): _result,
    ("", "NonZero"): _result,
    ("", "Where"): _where,
    **{("", op): _variadic for op in ("Max", "Mean", "Min", "Sum")},
}
_AFTER: Mapping[tuple[str, str], Rule] = {
    ("", "Attention"): _attention,
    ("", "ConvTranspose"): _conv_transpose,
    ("", "Dropout"): _dropout,
    ("", "LogSoftmax"): _softmax,
    ("", "ScatterElements"): _scatter_elements,
    ("", "Softmax"): _softmax,
    ("com.microsoft", "BiasGelu"): _result,
}
