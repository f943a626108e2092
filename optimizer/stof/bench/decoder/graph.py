# SPDX-License-Identifier: Apache-2.0
"""A decoder's graph in the form of ONNX Runtime GenAI's builder, whose weights lie in a file beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from stof.bench.decoder.mlp_form import GAIN, MlpForm, add_mlp, quantized_matmul

WEIGHTS = "weights.bin"  # the file's name
MICROSOFT = "com.microsoft"
_ALIGNMENT = 4096  # bytes, of a weight in the file
_OPSET = 21
_EPSILON = 1e-5
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
            return quantized_matmul(self, name, given, rows, columns)
        return self.add("MatMul", name, [given, self.weight(f"{name}.weight", (rows, columns), "matrix")])[0]

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


def build_decoder(shape: DecoderShape, window: int = 0) -> Decoder:
    """The graph: GroupQueryAttention over caches, packed projections, rotary embedding in it, RMS norms, an MLP.

    Inputs are input_ids [B, S], attention_mask [B, T] and the caches [B, G, C, D]. Outputs are the last token's logits
    [B, 1, V] and the caches.

    Args:
        shape: the sizes.
        window: keys that a query attends at most, in every layer; 0 is dense.
    """
    graph = DecoderGraph(shape)
    N, D = shape.hidden, shape.head_size
    lengths, total = _lengths(graph)
    tables = [graph.weight(f"{kind}_cache", (shape.positions, D // 2), kind) for kind in ("cos", "sin")]
    embedding = graph.weight("model.embed_tokens.weight", (shape.vocabulary, N), "embedding")
    hidden = graph.add("Gather", "/model/embed_tokens/Gather", [embedding, "input_ids"])[0]
    norm = graph.weight("model.layers.0.input_layernorm.weight", (N,), "norm")
    normed = graph.add(
        "SimplifiedLayerNormalization", "/model/layers.0/input_layernorm/LayerNorm", [hidden, norm],
        axis=-1, epsilon=_EPSILON, stash_type=1,
    )[0]  # fmt: skip
    inputs = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch_size", "sequence_length"]),
        helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch_size", "total_sequence_length"]),
    ]
    outputs = [helper.make_tensor_value_info("logits", ELEMENT[shape.dtype], ["batch_size", 1, shape.vocabulary])]
    for layer in range(shape.layers):
        path = f"/model/layers.{layer}"
        caches = [f"past_key_values.{layer}.{x}" for x in ("key", "value")]
        presents = [f"present.{layer}.{x}" for x in ("key", "value")]
        for name, length, values in (
            (caches, "past_sequence_length", inputs),
            (presents, "total_sequence_length", outputs),
        ):
            dims: list[int | str] = ["batch_size", shape.kv_heads, length, D]
            values += [helper.make_tensor_value_info(n, ELEMENT[shape.dtype], dims) for n in name]
        packed = graph.matmul(f"{path}/attn/qkv_proj/MatMul", normed, N, (shape.heads + 2 * shape.kv_heads) * D)
        attended = f"{path}/attn/GroupQueryAttention/output_0"
        graph.nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                [packed, "", "", *caches, lengths, total, *tables],
                [attended, *presents],
                name=f"{path}/attn/GroupQueryAttention",
                domain=MICROSOFT,
                num_heads=shape.heads,
                kv_num_heads=shape.kv_heads,
                scale=D**-0.5,
                do_rotary=1,
                rotary_interleaved=0,
                local_window_size=window or -1,
                softcap=0.0,
            )
        )
        added = graph.matmul(f"{path}/attn/o_proj/MatMul", attended, shape.heads * D, N)
        normed, hidden = _skip_norm(graph, f"{path}/post_attention_layernorm", hidden, added)
        added = add_mlp(graph, f"{path}/mlp", normed)
        after = f"/model/layers.{layer + 1}/input_layernorm"
        is_last = layer + 1 == shape.layers
        normed, hidden = _skip_norm(graph, "/model/final_norm" if is_last else after, hidden, added, is_last)
    last = graph.add("Gather", "/lm_head/Gather", [normed, graph.constant("last_token", [-1])], axis=1)[0]
    graph.matmul("/lm_head/MatMul", last, N, shape.vocabulary)
    graph.nodes[-1].output[0] = "logits"
    made = helper.make_graph(graph.nodes, "decoder", inputs, outputs, graph.initializers)
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(made, opset_imports=opsets, ir_version=10)
    return Decoder(shape, model, graph.weights, graph.size)


def _lengths(graph: DecoderGraph) -> tuple[str, str]:
    """Nodes that count keys in the attention mask: seqlens_k [B] on the device, total_sequence_length on the host."""
    path = "/model/attn_mask_reformat"
    one = graph.constant("one", [1])
    count = graph.add("ReduceSum", f"{path}/ReduceSum", ["attention_mask", one], keepdims=0)[0]
    last = graph.add("Sub", f"{path}/Sub", [count, one])[0]
    lengths = graph.add("Cast", f"{path}/Sub/Cast", [last], to=TensorProto.INT32)[0]
    shape = graph.add("Shape", f"{path}/Shape", ["attention_mask"])[0]
    length = graph.add("Gather", f"{path}/Gather", [shape, graph.constant("index_of_length", 1)], axis=0)[0]
    total = graph.add("Cast", f"{path}/Gather/Cast", [length], to=TensorProto.INT32)[0]
    return lengths, total


def _skip_norm(graph: DecoderGraph, path: str, hidden: str, added: str, is_last: bool = False) -> tuple[str, str]:
    """The normed sum of hidden states and what a block adds, and the sum, which the last norm does not give."""
    weight = graph.weight(f"{path}.weight", (graph.shape.hidden,), "norm")
    normed, total = f"{path}/SkipLayerNorm/output_0", f"{path}/SkipLayerNorm/output_3"
    graph.nodes.append(
        helper.make_node(
            "SkipSimplifiedLayerNormalization",
            [hidden, added, weight],
            [normed] if is_last else [normed, "", "", total],
            name=f"{path}/SkipLayerNorm",
            domain=MICROSOFT,
            epsilon=_EPSILON,
        )
    )
    return normed, total
