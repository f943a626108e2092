# SPDX-License-Identifier: Apache-2.0
"""A half-precision model in fp32: the same graph, for comparing results where rounding would hide or feign differences.

ONNX Runtime's CPU provider has few bfloat16 kernels, and runs fp16 ones by casts of its own; the widened model runs anywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, external_data_helper, helper, numpy_helper

from stof.graph import subgraphs

HALF = frozenset({int(TensorProto.FLOAT16), int(TensorProto.BFLOAT16)})
_TYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype"})
# What masks add in fp16, and what takes its place: both make a weight 0, but fp32 rounds a score beside 65504 to 0.004 and
# one beside 1024 to 0.00006, which is what rows in which everything is forbidden differ by.
_FP16_FORBIDS, _FORBIDS = -60000.0, -1024.0
LARGEST = 1_900_000_000  # bytes of weights; a protobuf message ends at 2 GiB


def half_bytes(model: onnx.ModelProto) -> int:
    """Bytes of the widened model's weights; 0 when none is in half precision."""
    weights = model.graph.initializer
    if not any(t.data_type in HALF for t in weights):
        return 0
    sizes = (4 if t.data_type in HALF else _size(t.data_type) for t in weights)
    return sum(size * int(np.prod(t.dims)) for size, t in zip(sizes, weights, strict=True))


def _size(dtype: int) -> int:
    try:
        return int(np.dtype(helper.tensor_dtype_to_np_dtype(dtype)).itemsize)
    except (KeyError, TypeError):
        return 8


def widen(model: onnx.ModelProto, folder: Path | None = None, kinds: Collection[int] = HALF) -> onnx.ModelProto:
    """A copy in which every tensor of the given types is fp32; ``folder`` is where external data lies."""
    found = onnx.ModelProto()
    found.CopyFrom(model)
    if folder is not None:
        external_data_helper.load_external_data_for_model(found, str(folder))
    widening = _Widening(kinds)
    widening.graph(found.graph)
    for function in found.functions:
        widening.nodes(function.node)
        widening.infos(function.value_info)
    return found


class _Widening:
    def __init__(self, kinds: Collection[int]) -> None:
        self.kinds = kinds

    def graph(self, graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            self.tensor(tensor)
        self.nodes(graph.node)
        for infos in (graph.input, graph.output, graph.value_info):
            self.infos(infos)

    def nodes(self, nodes: Iterable[onnx.NodeProto]) -> None:
        for node in nodes:
            for attribute in node.attribute:
                if attribute.name in _TYPE_ATTRIBUTES and attribute.i in self.kinds:
                    attribute.i = TensorProto.FLOAT
                if attribute.type == onnx.AttributeProto.TENSOR:
                    self.tensor(attribute.t)
            for graph in subgraphs(node):
                self.graph(graph)

    def infos(self, infos: Iterable[onnx.ValueInfoProto]) -> None:
        for info in infos:
            kind = info.type.tensor_type
            if kind.elem_type in self.kinds:
                kind.elem_type = TensorProto.FLOAT

    def tensor(self, tensor: onnx.TensorProto) -> None:
        if tensor.data_type not in self.kinds:
            return
        array = numpy_helper.to_array(tensor).astype(np.float32)
        if tensor.data_type == TensorProto.FLOAT16:
            array = np.where(np.isfinite(array) & (array <= _FP16_FORBIDS), np.float32(_FORBIDS), array)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
