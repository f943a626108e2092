# SPDX-License-Identifier: Apache-2.0
"""The weights of MLPs in the layouts that a new model reads: cut from packed ones, by neuron, in another order of neurons."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from stof.graph.external_data import (
    ITEM_SIZES,
    DataLocation,
    is_external,
    location_of,
    map_array,
    set_location,
    tensor_bytes,
)
from stof.graph.index import all_nodes, node_tensors
from stof.graph.names import FreshNames
from stof.graph.weight_layout import WeightLayout
from stof.sparse_mlp.dequantize_linear import read_values
from stof.sparse_mlp.quantized import QuantizedArrays, regroup_by_neuron, to_rows
from stof.sparse_mlp.site import MlpWeight, NeuronOrder

_Order = NeuronOrder | None
_SMALL = 1 << 16  # bytes of an external bias that becomes part of the model in another layout


@dataclass(frozen=True)
class _Kept:
    """What is kept of a stored tensor, as a key."""

    tensor: str
    axis: int
    first: int
    count: int
    order: NeuronOrder | None
    is_transposed: bool
    dims: tuple[int, ...]
    is_marked: bool = False


class WeightLayouts:
    """Gives the weights of a model in other layouts. Sites that share a weight share what is made of it.

    Weights in the model become initializers. Of external data, parts of rows are views of the same bytes; others are nodes, which
    runtimes compute once, and which :mod:`stof.graph.derived_data` writes into a file. Regrouped weights become initializers.

    Args:
        model: changed in place.
        folder: of its external data.
    """

    def __init__(self, model: onnx.ModelProto, folder: Path) -> None:
        graph = model.graph
        self.names = FreshNames(n.name for n in all_nodes(graph.node))
        self._tensors = FreshNames(
            {t for n in graph.node for t in node_tensors(n)} | {t.name for t in graph.initializer}
        )
        self._tensors.reserve(i.name for i in graph.input)
        self._graph = graph
        self._stored = {t.name: t for t in graph.initializer}
        self._folder = folder
        self._kept: dict[_Kept, str] = {}
        self._quantized: dict[tuple[MlpWeight, bool, _Order], list[str]] = {}
        self._nodes: list[onnx.NodeProto] = []

    def by_neuron(self, weight: MlpWeight, order: _Order = None) -> str:
        """The tensor whose rows are neurons."""
        axis = 0 if weight.is_by_neuron else 1
        return self._arrange(weight, axis, order, not weight.is_by_neuron)

    def as_stored(self, weight: MlpWeight, order: _Order = None) -> str:
        """The neurons of a weight that are meant, on the axis where the stored weight has them, for a standard matmul."""
        return self._arrange(weight, 0 if weight.is_by_neuron else 1, order, False, is_marked=True)

    def bias(self, weight: MlpWeight, order: _Order = None) -> str:
        """The bias of a matmul that gives neurons; empty where it has none."""
        if not weight.bias:
            return ""
        dims = (weight.whole or weight.outer,)
        return self._keep(_Kept(weight.bias, 0, weight.first, weight.outer, order, False, dims, is_marked=True))

    def add(self, wanted: str, array: np.ndarray) -> str:
        """A new initializer; returns its name."""
        name = self._tensors.make(wanted)
        self._graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def new_tensor(self, name: str) -> str:
        """A name that no tensor has."""
        return self._tensors.make(name)

    def in_rows(self, weight: MlpWeight, order: _Order = None, *, is_marked: bool = False) -> list[str]:
        """A quantized weight that gives neurons, its scales and zero points, with the operator's shapes.

        Args:
            weight: the weight.
            order: of neurons.
            is_marked: a standard matmul reads them.
        """
        q = weight.quantization
        assert q is not None
        blocks, whole = weight.inner // q.block_size, weight.whole or weight.outer
        shapes = [
            (weight.tensor, (whole, blocks, q.block_size * q.bits // 8)),
            (q.scales, (whole, blocks)),
            (q.zero_points, (whole, -(-blocks * q.bits // 8))),
        ]
        if q.dequantize_linear is None:
            kept = [_Kept(t, 0, weight.first, weight.outer, order, False, dims, is_marked) for t, dims in shapes]
            return [self._keep(k) if k.tensor else "" for k in kept]
        key = (weight, False, order)
        if key not in self._quantized:
            values, scales, zeros = self._read_quantized(weight)
            arrays = to_rows(weight, values, scales, zeros)
            if order is not None:
                rows = order.indices
                zeros = None if arrays.zero_points is None else arrays.zero_points[rows]
                arrays = QuantizedArrays(arrays.values[rows], arrays.scales[rows], zeros)
            self._quantized[key] = self._store(weight, arrays)
        return self._quantized[key]

    def regroup(self, weight: MlpWeight, order: _Order = None) -> list[str]:
        """A quantized weight that sums over neurons, in their order, its scales and zero points."""
        key = (weight, True, order)
        if key not in self._quantized:
            values, scales, zeros = self._read_quantized(weight)
            indices = None if order is None else order.indices
            self._quantized[key] = self._store(weight, regroup_by_neuron(weight, values, scales, zeros, indices))
        return self._quantized[key]

    def take_nodes(self) -> list[onnx.NodeProto]:
        """The nodes that were made since the last call."""
        nodes, self._nodes = self._nodes, []
        return nodes

    def _read_quantized(self, weight: MlpWeight) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        q = weight.quantization
        assert q is not None
        arrays = [
            read_values(self._stored[n], self._folder) if n else None for n in (weight.tensor, q.scales, q.zero_points)
        ]
        values, scales, zeros = arrays
        assert values is not None
        assert scales is not None
        return values, scales, zeros

    def _store(self, weight: MlpWeight, arrays: QuantizedArrays) -> list[str]:
        q = weight.quantization
        assert q is not None
        parts = (
            (weight.tensor, arrays.values),
            (q.scales, arrays.scales),
            (q.zero_points or f"{weight.tensor}/zero_points", arrays.zero_points),
        )
        made = []
        for name, array in parts:
            made.append("" if array is None else self._tensors.make(f"{name}/by_neuron"))
            if array is not None:
                self._graph.initializer.append(numpy_helper.from_array(array, made[-1]))
        return made

    def _arrange(
        self, weight: MlpWeight, axis: int, order: _Order, is_transposed: bool, *, is_marked: bool = False
    ) -> str:
        dims = tuple(int(d) for d in self._stored[weight.tensor].dims)
        # What is cut is what the matmul gives. Where that is not the neurons, nothing is.
        count = weight.outer if weight.whole else dims[axis]
        return self._keep(_Kept(weight.tensor, axis, weight.first, count, order, is_transposed, dims, is_marked))

    def _keep(self, kept: _Kept) -> str:
        """The tensor that holds what is kept."""
        stored = self._stored[kept.tensor]
        is_whole = kept.count == kept.dims[kept.axis] and kept.order is None and not kept.is_transposed
        if is_whole and tuple(stored.dims) == kept.dims:
            return kept.tensor
        if kept not in self._kept:
            name = self._kept[kept] = self._tensors.make(f"{kept.tensor}/by_neuron")
            if is_external(stored) and (len(kept.dims) > 1 or (tensor_bytes(stored) or 0) > _SMALL):
                self._keep_external(kept, stored, name)
            else:
                array = map_array(stored, self._folder).reshape(kept.dims)
                self._graph.initializer.append(numpy_helper.from_array(self._layout(kept).apply(array), name))
        return self._kept[kept]

    def _layout(self, kept: _Kept) -> WeightLayout:
        order = None if kept.order is None else kept.order.indices
        return WeightLayout(kept.axis, kept.first, kept.first + kept.count, order, kept.is_transposed)

    def _keep_external(self, kept: _Kept, stored: onnx.TensorProto, name: str) -> None:
        rest = kept
        source = kept.tensor
        if kept.axis == 0 and (kept.count != kept.dims[0] or tuple(stored.dims) != kept.dims):
            # Rows lie together: a view of the same bytes.
            is_last = kept.order is None and not kept.is_transposed
            source = name if is_last else self._tensors.make(f"{kept.tensor}/rows")
            view = onnx.TensorProto(name=source, data_type=stored.data_type, dims=[kept.count, *kept.dims[1:]])
            row = int(np.prod(kept.dims[1:], dtype=np.int64)) * ITEM_SIZES[stored.data_type]
            where = location_of(stored)
            set_location(view, DataLocation(where.location, where.offset + kept.first * row, kept.count * row))
            self._graph.initializer.append(view)
            if is_last:
                return
            rest = replace(kept, tensor=source, first=0, dims=(kept.count, *kept.dims[1:]))
        layout = self._layout(rest)
        nodes, constants = layout.make_nodes(source, rest.dims, name, self.names.make(name), is_marked=kept.is_marked)
        self._nodes += nodes
        self._graph.initializer.extend(constants)
