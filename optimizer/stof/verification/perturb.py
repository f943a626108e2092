# SPDX-License-Identifier: Apache-2.0
"""What rounding alone does to a model: a quantized one makes steps of differences in the last place, a deep one large ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

# Four units in the last place of fp32, about what the operator and the nodes that it replaces differ by.
_OFF = 2.0**-21


@dataclass(frozen=True)
class Noisy:
    """A tensor: its element type, the size of its axis of channels, and about how large its numbers get.

    With a ``largest`` of 0 every number is off in its own last places, whatever its size.
    """

    dtype: int
    channels: int
    largest: float
    axes_behind: int = 0  # how many axes follow that of the channels


def perturb(model: onnx.ModelProto, tensors: Mapping[str, Noisy], seed: int) -> onnx.ModelProto:
    """A copy in which tensors are off by some units in the last place of their largest numbers, some channels up, some down."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    nodes = list(result.graph.node)
    del result.graph.node[:]
    rng = np.random.default_rng(seed)
    for node in nodes:
        changed = [o for o in node.output if o in tensors]
        for i, name in enumerate(node.output):
            if name in changed:
                node.output[i] = f"{name}/stof_exact"
        result.graph.node.append(node)
        result.graph.node.extend(_make_noise_nodes(changed, tensors, rng))
    return result


def _make_noise_nodes(
    names: Iterable[str], tensors: Mapping[str, Noisy], rng: np.random.Generator
) -> list[onnx.NodeProto]:
    nodes = []
    for name in names:
        noisy = tensors[name]
        # Added, not multiplied: what is rounded to a scale of its own does not change when all of it is scaled.
        noise = _OFF * rng.uniform(-1, 1, noisy.channels)
        numbers, op = (noise * noisy.largest, "Add") if noisy.largest else (1 + noise, "Mul")
        numbers = numbers.reshape(-1, *([1] * noisy.axes_behind))
        value = numpy_helper.from_array(numbers.astype(helper.tensor_dtype_to_np_dtype(noisy.dtype)))
        constant = f"{name}/stof_noise"
        nodes.append(helper.make_node("Constant", [], [constant], value=value))
        nodes.append(helper.make_node(op, [f"{name}/stof_exact", constant], [name]))
    return nodes
