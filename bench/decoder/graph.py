# SPDX-License-Identifier: Apache-2.0
"""The sizes of a decoder, and its graph while it is built: nodes, and weights that lie in a file beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from bench.decoder.mlp_form import GAIN, MlpForm

WEIGHTS = "weights.bin"  # the file's name
MICROSOFT = "com.microsoft"
_ALIGNMENT = 4096  # bytes, of a weight in the file
_THETA = 10000.0
RANDOM = ("matrix", "embedding", "uint8")  # kinds of weights
ELEMENT = {"float16": TensorProto.FLOAT16, "float32": TensorProto.FLOAT}


@dataclass(frozen=True)
class DecoderShape:
    """The sizes of a decoder.

    Attributes:
        hidden: N, the width of the hidden states.
        heads: H, of queries.
        kv_heads: G, of keys and values.
        head_size: D.
        inner: the width of the MLP: its neurons.
        vocabulary: tokens.
        layers: how many.
        positions: rows of the rotary tables: the longest sequence.
        dtype: float16 or float32, of weights, caches and activations.
        mlp: the form of the MLP.
        block_size: values of 4 bits that share a scale, of all matrices; 0: matrices are of ``dtype``.
        accuracy_level: of MatMulNBits.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocabulary: int
    layers: int
    positions: int
    dtype: str
    mlp: MlpForm = field(default_factory=MlpForm)
    block_size: int = 0
    accuracy_level: int = 0

    @property
    def item(self) -> int:
        """Bytes of a value."""
        return int(np.dtype(self.dtype).itemsize)

    def cache_shape(self, batch: int, capacity: int) -> tuple[int, int, int, int]:
        """[B, G, C, D] of a layer's keys or values."""
        return batch, self.kv_heads, capacity, self.head_size

    def cache_bytes(self, batch: int, capacity: int) -> int:
        """Bytes of the keys and values of all layers."""
        return 2 * self.layers * self.item * math.prod(self.cache_shape(batch, capacity))


@dataclass(frozen=True)
class Weight:
    """A weight in the file.

    Attributes:
        name: of the initializer.
        dims: its shape.
        offset: bytes from the start of the file.
        kind: "matrix" [in, out], "embedding" and "uint8" (two values of 4 bits) are random; "norm" is around 1; "cos" and
            "sin" are rotary tables; all values of "scales" are ``value``; "gate_bias" is that of the MLP's form.
        value: of "scales".
    """

    name: str
    dims: tuple[int, ...]
    offset: int
    kind: str
    value: float = 0.0

    @property
    def is_read_whole(self) -> bool:
        """Whether a token reads all of it: embeddings and rotary tables give a row each."""
        return self.kind in ("matrix", "norm", "uint8", "scales", "gate_bias")

    def bytes_of(self, shape: DecoderShape) -> int:
        """Its bytes in the file."""
        return math.prod(self.dims) * (1 if self.kind == "uint8" else shape.item)


@dataclass
class Decoder:
    """A model without weights, and where they lie in the file.

    Attributes:
        shape: its sizes.
        model: the graph; initializers name ranges of the file.
        weights: in the order of the file.
        size: bytes of the file.
    """

    shape: DecoderShape
    model: onnx.ModelProto
    weights: list[Weight]
    size: int

    @property
    def read_bytes(self) -> int:
        """Bytes of the weights that every token reads."""
        return sum(w.bytes_of(self.shape) for w in self.weights if w.is_read_whole)


def rotary_table(weight: Weight) -> np.ndarray:
    """The values of a rotary table, fp32 [positions, D / 2]."""
    rows, half = weight.dims
    angles = np.arange(rows)[:, None] * _THETA ** -(np.arange(half) / half)
    found: np.ndarray = (np.cos(angles) if weight.kind == "cos" else np.sin(angles)).astype(np.float32)
    return found


def matrix_gain(weight: Weight) -> float:
    """The standard deviation of a random weight, with which activations neither grow nor vanish."""
    return GAIN / math.sqrt(weight.dims[0]) if weight.kind == "matrix" else 1.0


@dataclass
class DecoderGraph:
    """Collects the nodes of a decoder and the places of its weights."""

    shape: DecoderShape
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)
    size: int = 0

    def add(self, op: str, name: str, inputs: Sequence[str], outputs: int = 1, **attributes: Any) -> list[str]:
        """A node; the names of its outputs."""
        made = [f"{name}/output_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, list(inputs), made, name=name, **attributes))
        return made

    def matmul(self, name: str, given: str, rows: int, columns: int) -> str:
        """A matmul with a weight [rows, columns]."""
        if self.shape.block_size:
            return self._quantized_matmul(name, given, rows, columns)
        return self.add("MatMul", name, [given, self.weight(f"{name}.weight", (rows, columns), "matrix")])[0]

    def _quantized_matmul(self, name: str, given: str, rows: int, columns: int) -> str:
        """A MatMulNBits with random values of 4 bits, whose results have the variance of those of ``GAIN``."""
        block, bits = self.shape.block_size, 4
        blocks = -(-rows // block)
        spread = math.sqrt(((2**bits - 1) ** 2 - 1) / 12)  # of values drawn evenly from 1 .. 2^bits - 1
        values = self.weight(f"{name}.qweight", (columns, blocks, block * bits // 8), "uint8")
        scales = self.weight(f"{name}.scales", (columns * blocks,), "scales", GAIN / math.sqrt(rows) / spread)
        output = f"{name}/output_0"
        self.nodes.append(
            helper.make_node(
                "MatMulNBits", [given, values, scales], [output], name=name, domain="com.microsoft",
                K=rows, N=columns, bits=bits, block_size=block, accuracy_level=self.shape.accuracy_level,
            )
        )  # fmt: skip
        return output

    def weight(self, name: str, dims: tuple[int, ...], kind: str, value: float = 0.0) -> str:
        """A weight that lies in the file."""
        weight = Weight(name, dims, self.size, kind, value)
        length = weight.bytes_of(self.shape)
        element = TensorProto.UINT8 if kind == "uint8" else ELEMENT[self.shape.dtype]
        tensor = TensorProto(name=name, data_type=element, dims=dims)
        tensor.data_location = TensorProto.EXTERNAL
        for key, text in (("location", WEIGHTS), ("offset", str(self.size)), ("length", str(length))):
            tensor.external_data.add(key=key, value=text)
        self.initializers.append(tensor)
        self.weights.append(weight)
        self.size += -(-length // _ALIGNMENT) * _ALIGNMENT
        return name

    def constant(self, name: str, value: Any) -> str:
        """A small int64 constant."""
        self.initializers.append(numpy_helper.from_array(np.asarray(value, np.int64), name))
        return name

    def number(self, name: str, value: float) -> str:
        """A scalar of the decoder's type."""
        self.initializers.append(numpy_helper.from_array(np.asarray(value, self.shape.dtype), name))
        return name
