# SPDX-License-Identifier: Apache-2.0
"""Constants of a model as arrays: the weights and biases of its MLPs, by neuron."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

from stof.graph.external_data import map_array
from stof.graph.weight_layout import LayoutReader
from stof.sparse_mlp.dequantize_linear import read_values
from stof.sparse_mlp.quantized import dequantize
from stof.sparse_mlp.site import MlpWeight


class Constants:
    """The constants of a graph, those in another layout among them."""

    def __init__(self, graph: onnx.GraphProto, folder: Path) -> None:
        self._layouts = LayoutReader(graph)
        self._folder = folder

    def read(self, name: str) -> np.ndarray:
        """A constant by its name."""
        if name in self._layouts.stored:
            return read_values(self._layouts.stored[name], self._folder)
        placement = self._layouts.read(name)
        assert placement is not None
        return placement.layout.apply(map_array(placement.source, self._folder))


def read_rows(weight: MlpWeight, constants: Constants, is_down: bool = False) -> np.ndarray:
    """A weight by neuron, [F, other]; in fp64 where it is quantized, else in its own type.

    Args:
        weight: of a site.
        constants: of the model that the site was found in.
        is_down: whether the matmul sums over neurons.
    """
    values = constants.read(weight.tensor)
    if (q := weight.quantization) is None:
        values = values if weight.is_by_neuron else values.T
        return values if is_down else values[weight.first : weight.first + weight.outer]
    zeros = constants.read(q.zero_points) if q.zero_points else None
    dense = dequantize(weight, values, constants.read(q.scales), zeros)
    return dense if is_down else dense.T


def read_bias(weight: MlpWeight, constants: Constants) -> np.ndarray | None:
    """The bias behind a weight's matmul; None: there is none."""
    if not weight.bias:
        return None
    return constants.read(weight.bias).reshape(-1)[weight.first : weight.first + weight.outer]
