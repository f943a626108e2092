# SPDX-License-Identifier: Apache-2.0
"""Voice models: a text encoder, durations that rounding decides, and a decoder that makes audio of that length."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

VOCABULARY = 60
HOP = 12  # samples of audio a frame


@dataclass(frozen=True)
class VoiceForm:
    """How large a voice model is.

    Attributes:
        size: features of a token.
        heads: of the text encoder's attention.
        layers: of the text encoder, which share their weights.
        channels: of the decoder.
        bins: how many sigmoids add up to the duration of a token.
        has_lstm: whether durations come through an LSTM.
        gain: of the weights of the duration: a larger one makes durations react more to their inputs.
    """

    size: int = 64
    heads: int = 4
    layers: int = 3
    channels: int = 24
    bins: int = 20
    has_lstm: bool = True
    gain: float = 4.0


def make_voice_model(form: VoiceForm, seed: int = 0) -> onnx.ModelProto:
    """A model tokens [1, S], style [1, d], speed [1] -> audio [1, samples], durations [1, S]."""
    return _Maker(form, seed).make()


def quantize_dynamically(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with matmuls, convolutions and LSTMs in integers, as ONNX Runtime's own tool writes it."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "float.onnx"), Path(folder, "quantized.onnx")
        onnx.save(model, source)
        quantize_dynamic(source, target, weight_type=QuantType.QUInt8)
        return onnx.load(target)


class _Maker:
    def __init__(self, form: VoiceForm, seed: int) -> None:
        self.form = form
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.names: dict[bytes, str] = {}

    def add(self, op: str, *inputs: str, outputs: int = 1, **attributes: object) -> str:
        """Adds a node, and gives the name of its first output."""
        number = len(self.nodes)
        names = [f"{op}_{number}" + (f"_{i}" if i else "") for i in range(outputs)]
        self.nodes.append(helper.make_node(op, list(inputs), names, name=f"node_{op}_{number}", **attributes))
        return names[0]

    def constant(self, value: object, dtype: str = "float32") -> str:
        """The name of an initializer."""
        array = np.asarray(value, dtype)
        key = array.tobytes() + str((array.dtype, array.shape)).encode()
        if key not in self.names:
            self.names[key] = f"weight_{len(self.names)}"
            self.weights.append(numpy_helper.from_array(array, self.names[key]))
        return self.names[key]

    def random(self, *shape: int, scale: float = 1.0) -> str:
        """The name of random weights."""
        return self.constant(scale * self.rng.standard_normal(shape))

    def linear(self, rows: int, columns: int, gain: float = 1.0) -> tuple[str, str]:
        """Weights and bias of a matmul."""
        return self.random(rows, columns, scale=gain / rows**0.5), self.random(columns, scale=0.1)

    def apply(self, x: str, linear: tuple[str, str]) -> str:
        """A matmul with its bias."""
        return self.add("Add", self.add("MatMul", x, linear[0]), linear[1])

    def normalize(self, x: str, size: int) -> str:
        """A layer normalization of trained scale and shift."""
        scale = self.constant(1 + 0.2 * self.rng.standard_normal(size))
        return self.add("LayerNormalization", x, scale, self.random(size, scale=0.1), axis=-1, epsilon=1e-5)

    def gelu(self, x: str) -> str:
        """The tanh form, in primitives, as exporters write it."""
        cube = self.add("Mul", self.add("Pow", x, self.constant(3.0)), self.constant(0.044715))
        inner = self.add("Mul", self.add("Add", x, cube), self.constant((2 / np.pi) ** 0.5))
        outer = self.add("Add", self.add("Tanh", inner), self.constant(1.0))
        return self.add("Mul", self.add("Mul", x, self.constant(0.5)), outer)

    def encode(self) -> str:
        """The text encoder: [1, S, size]."""
        form = self.form
        size, heads = form.size, form.heads
        x = self.add("Gather", self.random(VOCABULARY, size), "tokens")
        positions = self.add("Gather", self.random(512, size), self.steps())
        x = self.normalize(self.add("Add", x, positions), size)
        query, key, value, out = (self.linear(size, size, 1.5) for _ in range(4))
        up, down = self.linear(size, 4 * size, 1.5), self.linear(4 * size, size, 1.5)
        split = self.constant([0, 0, heads, size // heads], "int64")
        merged = self.constant([0, 0, size], "int64")
        for _ in range(form.layers):
            q, k, v = (
                self.add("Transpose", self.add("Reshape", self.apply(x, w), split), perm=[0, 2, 1, 3])
                for w in (query, key, value)
            )
            scores = self.add("MatMul", q, self.add("Transpose", k, perm=[0, 1, 3, 2]))
            scores = self.add("Mul", scores, self.constant((size // heads) ** -0.5))
            mixed = self.add("MatMul", self.add("Softmax", scores, axis=-1), v)
            mixed = self.add("Reshape", self.add("Transpose", mixed, perm=[0, 2, 1, 3]), merged)
            x = self.normalize(self.add("Add", self.apply(mixed, out), x), size)
            x = self.normalize(self.add("Add", self.apply(self.gelu(self.apply(x, up)), down), x), size)
        return x

    def steps(self) -> str:
        """0 to S - 1."""
        length = self.add("Gather", self.add("Shape", "tokens"), self.constant(1, "int64"), axis=0)
        return self.add("Range", self.constant(0, "int64"), length, self.constant(1, "int64"))

    def lstm(self, x: str, size: int) -> str:
        """A bidirectional LSTM on [1, S, size], of as many features."""
        half = size // 2
        weights = self.random(2, 4 * half, size, scale=size**-0.5), self.random(2, 4 * half, half, scale=half**-0.5)
        x = self.add("Transpose", x, perm=[1, 0, 2])
        y = self.add(
            "LSTM", x, *weights, self.random(2, 8 * half, scale=0.1), hidden_size=half, direction="bidirectional"
        )
        y = self.add("Transpose", y, perm=[2, 0, 1, 3])
        return self.add("Reshape", y, self.constant([0, 0, size], "int64"))

    def durations(self, x: str) -> str:
        """Frames of each token: [1, S], whole numbers from 1 on."""
        form = self.form
        style = self.apply("style", self.linear(form.size, 2 * form.size))
        style = self.add("Unsqueeze", style, self.constant([1], "int64"))
        ends = [self.constant([i * form.size], "int64") for i in range(3)]
        scale, shift = (self.add("Slice", style, *pair, self.constant([2], "int64")) for pair in pairwise(ends))
        for _ in range(2 if form.has_lstm else 0):
            x = self.normalize(self.lstm(x, form.size), form.size)
            x = self.add("Add", self.add("Mul", x, self.add("Add", scale, self.constant(1.0))), shift)
        bins = self.apply(x, self.linear(form.size, form.bins, form.gain))
        total = self.add("ReduceSum", self.add("Sigmoid", bins), self.constant([-1], "int64"), keepdims=0)
        self.nodes[-1].name = "node_duration"
        rounded = self.add("Round", self.add("Div", total, "speed"))
        self.nodes[-1].name = "round_durations"
        return self.add("Cast", self.add("Clip", rounded, self.constant(1.0)), to=TensorProto.INT64)

    def align(self, x: str, durations: str) -> str:
        """Tokens repeated as often as they last: [1, size, frames]."""
        ends = self.add("CumSum", durations, self.constant(1, "int64"))
        total = self.add("ReduceMax", ends, keepdims=0)
        frames = self.add("Range", self.constant(0, "int64"), total, self.constant(1, "int64"))
        starts = self.add("Unsqueeze", self.add("Sub", ends, durations), self.constant([2], "int64"))
        ends = self.add("Unsqueeze", ends, self.constant([2], "int64"))
        begun = self.add("Not", self.add("Less", frames, starts))
        alignment = self.add("Cast", self.add("And", begun, self.add("Less", frames, ends)), to=TensorProto.FLOAT)
        return self.add("MatMul", self.add("Transpose", x, perm=[0, 2, 1]), alignment)

    def decode(self, x: str) -> str:
        """Audio [1, samples] of [1, size, frames]."""
        channels = self.form.channels
        x = self.convolve(x, self.form.size, channels, 3)
        for width, factor in ((channels, 3), (channels // 2, 4)):
            weights = self.random(channels, width, 2 * factor, scale=0.2)
            pads = [factor // 2, factor - factor // 2]
            x = self.add("ConvTranspose", x, weights, strides=[factor], pads=pads)
            x = self.add("InstanceNormalization", x, self.constant(np.ones(width)), self.constant(np.zeros(width)))
            # Snake: x + sin(a x)^2 / a
            a = self.constant(0.5 + self.rng.random((1, width, 1)))
            square = self.add("Pow", self.add("Sin", self.add("Mul", x, a)), self.constant(2.0))
            x = self.add("Add", x, self.add("Mul", square, self.add("Reciprocal", a)))
            x = self.convolve(x, width, width, 3)
        audio = self.add("Tanh", self.convolve(x, channels // 2, 1, 5))
        return self.add("Squeeze", audio, self.constant([1], "int64"))

    def convolve(self, x: str, read: int, written: int, width: int) -> str:
        """A convolution that keeps the length."""
        weights = self.random(written, read, width, scale=(read * width) ** -0.5)
        return self.add("Conv", x, weights, self.random(written, scale=0.1), pads=[width // 2] * 2)

    def make(self) -> onnx.ModelProto:
        """The whole model."""
        encoded = self.encode()
        durations = self.durations(encoded)
        audio = self.decode(self.align(encoded, durations))
        self.nodes.append(helper.make_node("Identity", [audio], ["audio"], name="node_audio"))
        self.nodes.append(helper.make_node("Identity", [durations], ["durations"], name="node_durations"))
        graph = helper.make_graph(
            self.nodes,
            "voice",
            [
                helper.make_tensor_value_info("tokens", TensorProto.INT64, [1, "S"]),
                helper.make_tensor_value_info("style", TensorProto.FLOAT, [1, self.form.size]),
                helper.make_tensor_value_info("speed", TensorProto.FLOAT, [1]),
            ],
            [
                helper.make_tensor_value_info("audio", TensorProto.FLOAT, [1, "samples"]),
                helper.make_tensor_value_info("durations", TensorProto.INT64, [1, "S"]),
            ],
            self.weights,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], producer_name="voice")
        model.ir_version = 9
        onnx.checker.check_model(model)
        return model
