# SPDX-License-Identifier: Apache-2.0
"""A half-precision model in fp32: the same graph, for comparing results where rounding would hide or feign differences.

ONNX Runtime's CPU provider has few bfloat16 kernels, and runs fp16 ones by casts of its own; the widened model runs anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, external_data_helper, helper, numpy_helper

from stof.graph.external_data import is_external, location_of, tensor_bytes
from stof.graph.index import subgraphs

HALF = frozenset({int(TensorProto.FLOAT16), int(TensorProto.BFLOAT16)})
BF16 = frozenset({int(TensorProto.BFLOAT16)})
# Attributes that are texts with element types in them, by operator and name: each has a function that makes the text of a
# widened model from that of the original, and from the types that are widened.
TypedAttributes = Mapping[tuple[str, str], Callable[[str, Collection[int]], str]]
_TYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype"})
# What masks add in fp16, and what takes its place: both make a weight 0, but fp32 rounds a score beside 65504 to 0.004 and
# one beside 1024 to 0.00006, which is what rows in which everything is forbidden differ by.
FP16_FORBIDS, FORBIDS = -60000.0, -1024.0
_SMALL = 1024  # elements of a constant that stays in the model
_CHUNK = 1 << 22  # elements converted at a time
_ALIGNMENT = 4096  # runtimes map weights of external data where they begin at a page


def holds(model: onnx.ModelProto, kinds: Collection[int]) -> bool:
    """Whether a model has tensors of one of the given types."""
    return any(_holds(g, kinds) for g in (model.graph, *model.functions))


def _holds(graph: onnx.GraphProto | onnx.FunctionProto, kinds: Collection[int]) -> bool:
    if isinstance(graph, onnx.GraphProto):
        infos = (*graph.input, *graph.output, *graph.value_info)
        if any(i.type.tensor_type.elem_type in kinds for i in infos) or any(
            t.data_type in kinds for t in (*graph.initializer, *(s.values for s in graph.sparse_initializer))
        ):
            return True
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name in _TYPE_ATTRIBUTES and attribute.i in kinds:
                return True
            if attribute.HasField("t") and attribute.t.data_type in kinds:
                return True
            if attribute.HasField("sparse_tensor") and attribute.sparse_tensor.values.data_type in kinds:
                return True
        if any(_holds(inner, kinds) for inner in subgraphs(node)):
            return True
    return False


def widen_feeds(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Inputs of a half-precision model in the types of its copy in fp32."""
    return {n: x.astype(np.float32) if x.dtype.name in ("float16", "bfloat16") else x for n, x in feeds.items()}


def widen(model: onnx.ModelProto, folder: Path | None = None, kinds: Collection[int] = HALF) -> onnx.ModelProto:
    """A copy in which every tensor of the given types is fp32; it must not hold operators of stof with typed attributes.

    ``folder`` is where external data lies.
    """
    widened = onnx.ModelProto()
    widened.CopyFrom(model)
    if folder is not None:
        external_data_helper.load_external_data_for_model(widened, str(folder))
    _Widening(kinds, None, {}).model(widened)
    return widened


class Twins:
    """Widened models of any size: their weights lie, once for all that share them, in a file beside the models.

    Args:
        weights: the folder of the original's external data, which is read piece by piece.
        scratch: the folder that the widened models will lie in.
        constants: half-precision tensors that nodes compute, whatever the inputs are: scales, for instance. Computed in fp32
            they would be other numbers, to which no rounding of the half-precision model corresponds.
        typed_attributes: of the operators that stof writes.
    """

    def __init__(
        self,
        weights: Path,
        scratch: Path,
        constants: Mapping[str, np.ndarray] | None = None,
        typed_attributes: TypedAttributes | None = None,
    ) -> None:
        self.weights = weights
        self.typed_attributes = typed_attributes or {}
        self.constants = constants or {}
        self.file = scratch / "widened.data"
        self._places: dict[tuple[object, ...], tuple[int, int]] = {}

    def of(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """The model in fp32, to be written into the scratch folder."""
        twin = onnx.ModelProto()
        twin.CopyFrom(model)
        for node in twin.graph.node:
            array = self.constants.get(node.output[0]) if len(node.output) == 1 else None
            if array is not None and node.op_type != "Constant":
                kind = TensorProto.FLOAT16 if array.dtype == np.float16 else TensorProto.BFLOAT16
                value = numpy_helper.from_array(_replace_forbidden(array.astype(np.float32), kind))
                node.CopyFrom(helper.make_node("Constant", [], list(node.output), name=node.name, value=value))
        _Widening(HALF, self, self.typed_attributes).model(twin)
        return twin

    def keep(self, tensor: onnx.TensorProto) -> None:
        """Moves a tensor's values into the file, half-precision ones as fp32."""
        entries = {e.key: e.value for e in tensor.external_data}
        key: tuple[object, ...] = (tensor.data_type, *tensor.dims, *sorted(entries.items()))
        if not entries:
            key = (tensor.data_type, *tensor.dims, tensor.name, hash(tensor.raw_data))
        if key not in self._places:
            self._places[key] = self._append(_pieces(tensor, self.weights))
        offset, length = self._places[key]
        kind = int(TensorProto.FLOAT) if tensor.data_type in HALF else tensor.data_type
        kept = onnx.TensorProto(name=tensor.name, dims=tensor.dims, data_type=kind)
        kept.data_location = TensorProto.EXTERNAL
        for name, value in (("location", self.file.name), ("offset", offset), ("length", length)):
            kept.external_data.append(onnx.StringStringEntryProto(key=name, value=str(value)))
        tensor.CopyFrom(kept)

    def _append(self, pieces: Iterable[np.ndarray]) -> tuple[int, int]:
        with self.file.open("ab") as file:
            file.write(bytes(-file.tell() % _ALIGNMENT))
            offset = file.tell()
            for piece in pieces:
                file.write(np.ascontiguousarray(piece).tobytes())
            return offset, file.tell() - offset


def _pieces(tensor: onnx.TensorProto, folder: Path) -> Iterator[np.ndarray]:
    """A tensor's values, or bytes of other types than half ones, in order."""
    if is_external(tensor):
        location = location_of(tensor)
        file = folder / location.location
        length = tensor_bytes(tensor)
        if length is None:
            length = location.length or file.stat().st_size - location.offset
        raw: np.ndarray = (
            np.memmap(file, np.uint8, "r", location.offset, (length,)) if length else np.empty(0, np.uint8)
        )
    elif tensor.HasField("raw_data"):
        raw = np.frombuffer(tensor.raw_data, np.uint8)
    else:
        array = numpy_helper.to_array(tensor)
        yield _replace_forbidden(array.astype(np.float32), tensor.data_type) if tensor.data_type in HALF else array
        return
    step = 2 * _CHUNK
    for start in range(0, raw.size, step):
        piece = raw[start : start + step]
        yield _widen_piece(piece, tensor.data_type) if tensor.data_type in HALF else piece


def _widen_piece(raw: np.ndarray, data_type: int) -> np.ndarray:
    if data_type == TensorProto.BFLOAT16:  # the upper half of an fp32 number
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return _replace_forbidden(raw.view("<f2").astype(np.float32), data_type)


def _replace_forbidden(array: np.ndarray, data_type: int) -> np.ndarray:
    if data_type != TensorProto.FLOAT16:
        return array
    return np.where(np.isfinite(array) & (array <= FP16_FORBIDS), np.float32(FORBIDS), array)


class _Widening:
    def __init__(self, kinds: Collection[int], twins: Twins | None, typed_attributes: TypedAttributes) -> None:
        self.kinds = kinds
        self.twins = twins
        self.typed_attributes = typed_attributes

    def model(self, model: onnx.ModelProto) -> None:
        self.graph(model.graph)
        for function in model.functions:
            self.nodes(function.node)
            self.infos(function.value_info)

    def graph(self, graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            self.tensor(tensor, movable=True)
        for sparse in graph.sparse_initializer:
            self.sparse(sparse)
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
                if attribute.type == onnx.AttributeProto.SPARSE_TENSOR:
                    self.sparse(attribute.sparse_tensor)
                if (node.op_type, attribute.name) in self.typed_attributes:
                    widen_text = self.typed_attributes[node.op_type, attribute.name]
                    attribute.s = widen_text(attribute.s.decode(), self.kinds).encode()
            for graph in subgraphs(node):
                self.graph(graph)

    def infos(self, infos: Iterable[onnx.ValueInfoProto]) -> None:
        for info in infos:
            kind = info.type.tensor_type
            if kind.elem_type in self.kinds:
                kind.elem_type = TensorProto.FLOAT

    def sparse(self, sparse: onnx.SparseTensorProto) -> None:
        self.tensor(sparse.values)
        self.tensor(sparse.indices)

    def tensor(self, tensor: onnx.TensorProto, movable: bool = False) -> None:
        external = tensor.data_location == TensorProto.EXTERNAL
        large = movable and int(np.prod(tensor.dims, dtype=np.int64)) > _SMALL
        if self.twins is not None and (external or (large and tensor.data_type in self.kinds)):
            self.twins.keep(tensor)
        elif tensor.data_type in self.kinds:
            array = _replace_forbidden(numpy_helper.to_array(tensor).astype(np.float32), tensor.data_type)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
