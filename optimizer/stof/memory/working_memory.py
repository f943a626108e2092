# SPDX-License-Identifier: Apache-2.0
"""What kernels of ONNX Runtime's CPU provider take besides inputs and outputs, by the shapes of a node.

Each rule is measured by tests/memory, which runs the node alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import zip_longest

from stof.graph.index import is_standard
from stof.memory.session_graph import SessionNode
from stof.memory.tensor_sizes import TensorSizes

Rule = Callable[[SessionNode, TensorSizes], list[int]]


def working_memory(node: SessionNode, sizes: TensorSizes) -> list[int]:
    """Bytes of each block that a node takes while it runs."""
    rule = _RULES.get(node.op) if is_standard(node.proto) else None
    return [] if rule is None else rule(node, sizes)


def _where(node: SessionNode, sizes: TensorSizes) -> list[int]:
    """Each side is chosen into a tensor of its own, then both are merged."""
    condition, item = sizes.shape(node.inputs[0]), sizes.item_bytes(node.outputs[0])
    sides = (broadcast(condition, sizes.shape(name)) for name in node.inputs[1:3])
    return [math.prod(shape) * item for shape in sides]


def broadcast(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of two tensors together."""
    pairs = zip_longest(reversed(one), reversed(other), fillvalue=1)
    return tuple(b if a == 1 else a for a, b in pairs)[::-1]


_RULES: Mapping[str, Rule] = {"Where": _where}
