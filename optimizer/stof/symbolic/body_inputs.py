# SPDX-License-Identifier: Apache-2.0
"""Types and shapes of what the bodies of Loop and Scan are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
from onnx import TensorProto

from stof.symbolic.facts import Fact
from stof.symbolic.tensor import Shape


def find_body_inputs(node: onnx.NodeProto, facts: Mapping[str, Fact], outputs: Sequence[Fact]) -> list[Fact]:
    """The facts of a body's inputs in their order, without values.

    Args:
        node: a Loop or Scan.
        facts: of outer tensors.
        outputs: of the node's outputs. What a Loop carries along has the sizes there that its body does not change.
    """
    inputs = [facts.get(name, Fact()) for name in node.input]
    if node.op_type == "Loop":
        states = [Fact(f.dtype, f.shape) for f in outputs[: len(inputs[2:])]]
        return [Fact(TensorProto.INT64, ()), Fact(TensorProto.BOOL, ()), *states]
    attributes = {a.name: a for a in node.attribute}
    count = attributes["num_scan_inputs"].i if "num_scan_inputs" in attributes else 0
    axes = list(attributes["scan_input_axes"].ints) if "scan_input_axes" in attributes else [0] * count
    first = max(0, len(inputs) - count)
    initial_states = [Fact(f.dtype, f.shape) for f in inputs[:first]]
    return initial_states + [
        Fact(f.dtype, _without_axis(f.shape, axis)) for f, axis in zip(inputs[first:], axes, strict=False)
    ]


def _without_axis(shape: Shape | None, axis: int) -> Shape | None:
    """A shape without the axis along which a Scan goes."""
    if shape is None or not -len(shape) <= axis < len(shape):
        return None
    return tuple(d for i, d in enumerate(shape) if i != axis % len(shape))
