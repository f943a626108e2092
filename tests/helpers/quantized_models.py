# SPDX-License-Identifier: Apache-2.0
"""Models quantized by ONNX Runtime's own tools, attention matmuls included, and quantized attention as ONNX text."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

import build

FORMATS = {"qdq": QuantFormat.QDQ, "operator": QuantFormat.QOperator}
TYPES = {"uint8": QuantType.QUInt8, "int8": QuantType.QInt8}
LENGTH = 24


@dataclass(frozen=True)
class Form:
    """How a model is quantized.

    Attributes:
        format: "qdq" or "operator".
        codes: "uint8" or "int8", of activations.
        ops: the operators; None: all that the tools know.
        per_channel: weights have a scale for each channel.
    """

    format: str
    codes: str
    ops: tuple[str, ...] | None = None
    per_channel: bool = False

    def __str__(self) -> str:
        words = [self.format, self.codes, "all" if self.ops is None else "-".join(self.ops)]
        return " ".join([*words, *(["per-channel"] if self.per_channel else [])])


def draw(model: onnx.ModelProto, count: int, length: int = LENGTH, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Sets of inputs: token ids, masks with padding on the right in every second set, pixels."""
    rng = np.random.default_rng(seed)
    sets = []
    for number in range(count):
        feed = {}
        for value in model.graph.input:
            dims = value.type.tensor_type.shape.dim
            shape = [d.dim_value or (2 if i == 0 else length) for i, d in enumerate(dims)]
            if value.type.tensor_type.elem_type != onnx.TensorProto.INT64:
                feed[value.name] = rng.standard_normal(shape).astype(np.float32)
            elif "mask" in value.name:
                feed[value.name] = np.ones(shape, np.int64)
                feed[value.name][1, length // 2 :] = 1 - number % 2
            else:
                feed[value.name] = rng.integers(3, 90, shape)
        sets.append(feed)
    return sets


class _Samples(CalibrationDataReader):
    def __init__(self, feeds: Sequence[dict[str, np.ndarray]]) -> None:
        self._feeds: Iterator[dict[str, np.ndarray]] = iter(feeds)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._feeds, None)


def quantized(name: str, form: Form, folder: Path, float_matmuls: int = 0) -> tuple[Path, Path]:
    """The float model of a stored graph with random weights, and that model prepared and quantized by ONNX Runtime's tools.

    The first ``float_matmuls`` matmuls of two computed tensors stay float.
    """
    source, prepared, target = (folder / f"{word}.onnx" for word in ("float", "prepared", "quantized"))
    build.write(name, source)
    logging.disable(logging.CRITICAL)
    try:
        quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
        graph = onnx.load(prepared).graph
        constants = {t.name for t in graph.initializer}
        matmuls = [n.name for n in graph.node if n.op_type == "MatMul" and not constants.intersection(n.input)]
        quantize_static(
            str(prepared),
            str(target),
            _Samples(draw(onnx.load(source), 3)),
            quant_format=FORMATS[form.format],
            activation_type=TYPES[form.codes],
            weight_type=QuantType.QInt8,
            op_types_to_quantize=None if form.ops is None else list(form.ops),
            per_channel=form.per_channel,
            nodes_to_exclude=matmuls[:float_matmuls],
        )
    finally:
        logging.disable(logging.NOTSET)
    return source, target


def quantized_by_range(name: str, folder: Path) -> tuple[Path, Path]:
    """The same with MatMulInteger everywhere: each matmul's operands are rounded by their own range."""
    source, target = folder / "float.onnx", folder / "quantized.onnx"
    build.write(name, source)
    logging.disable(logging.CRITICAL)
    try:
        quantize_dynamic(str(source), str(target), extra_options={"MatMulConstBOnly": False})
    finally:
        logging.disable(logging.NOTSET)
    return source, target


def run(
    model: Path | onnx.ModelProto, feed: dict[str, np.ndarray], *, library: bool = False, optimized: bool = False
) -> list[np.ndarray]:
    """The outputs in ONNX Runtime; without graph optimizations, which round otherwise, unless they are asked for."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimized else level.ORT_DISABLE_ALL
    if library:
        import stof

        stof.register(options)
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    outputs: list[np.ndarray] = ort.InferenceSession(source, options, ["CPUExecutionProvider"]).run(None, feed)
    return outputs


@dataclass(frozen=True)
class Numbers:
    """Scales and zero points of a graph of :func:`quantized_attention`: of a tensor (scale, zero point), by its role."""

    query: tuple[float, int] = (0.02, 3)
    key: tuple[float, int] = (0.03, -5)
    value: tuple[float, int] = (0.05, 7)
    score: tuple[float, int] | None = (0.07, 1)
    scaled_score: tuple[float, int] | None = None
    biased_score: tuple[float, int] | None = None
    weight: tuple[float, int] | None = (1 / 255, -128)


def quantized_attention(
    numbers: Numbers = Numbers(),
    *,
    opset: int = 18,
    codes: str = "int8",
    scale: float = 0.35,
    mask: str = "",
    bias: str = "",
) -> onnx.ModelProto:
    """Attention in QDQ form over codes [B, 4, S, 8]: q, k, v are inputs, the output is fp32.

    Args:
        numbers: scales and zero points; roles that are None are not rounded.
        opset: of the standard domain.
        codes: element type of all codes; zero points of uint8 are 128 more.
        scale: of the scores.
        mask: "pad": int64 [B, S] ``pad``, whose zeros are added as the lowest number; "rounded pad": rounded before, too.
        bias: "": none; "plain": float [4, S, S] ``bias`` is added; "rounded": rounded before.
    """
    shift = 128 if codes == "uint8" else 0
    lines, initializers = [], []

    def quantizer(role: str, given: tuple[float, int]) -> str:
        initializers.append(f"float {role}_s = {{{given[0]}}}, {codes} {role}_z = {{{given[1] + shift}}}")
        return f"{role}_s, {role}_z"

    def rounded(tensor: str, role: str, given: tuple[float, int] | None) -> str:
        if given is None:
            return tensor
        of = quantizer(role, given)
        lines.append(f"{role}_q = QuantizeLinear ({tensor}, {of})")
        lines.append(f"{role}_d = DequantizeLinear ({role}_q, {of})")
        return f"{role}_d"

    for role, tensor in (("query", "q"), ("key", "k"), ("value", "v")):
        lines.append(f"{role}_d = DequantizeLinear ({tensor}, {quantizer(role, getattr(numbers, role))})")
    lines.append("kt = Transpose <perm = [0, 1, 3, 2]> (key_d)")
    lines.append("product = MatMul (query_d, kt)")
    scores = rounded("product", "score", numbers.score)
    lines += [f"factor = Constant <value = float {{{scale}}}> ()", f"scaled = Mul ({scores}, factor)"]
    scores = rounded("scaled", "scaled_score", numbers.scaled_score)
    inputs = f"{codes}[B,4,S,8] q, {codes}[B,4,S,8] k, {codes}[B,4,S,8] v"
    if bias:
        inputs += ", float[4,S,S] bias"
        added = rounded("bias", "bias", (0.1, 0)) if bias == "rounded" else "bias"
        lines.append(f"biased = Add ({scores}, {added})")
        scores = "biased"
    if mask:
        inputs += ", int64[B,S] pad"
        lines += [
            "axes = Constant <value = int64[2] {1, 2}> ()",
            "real = Cast <to = 9> (pad)",
            "real4 = Unsqueeze (real, axes)",
            "zero = Constant <value = float {0.0}> ()",
            "lowest = Constant <value = float {-3.4028235e38}> ()",
            "added = Where (real4, zero, lowest)",
        ]
        added = rounded("added", "mask", (1.3344e36, 127)) if mask == "rounded pad" else "added"
        lines.append(f"masked = Add ({scores}, {added})")
        scores = "masked"
    scores = rounded(scores, "biased_score", numbers.biased_score)
    lines.append(f"weights = Softmax <axis = -1> ({scores})")
    lines.append(f"out = MatMul ({rounded('weights', 'weight', numbers.weight)}, value_d)")
    header = f'<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1]>\n'
    body = "\n".join(lines)
    return onnx.parser.parse_model(
        f"{header}g ({inputs}) => (float[a,b,c,d] out) <{', '.join(initializers)}> {{\n{body}\n}}"
    )


def draw_codes(model: onnx.ModelProto, batch: int, length: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Random codes of all values for a graph of :func:`quantized_attention`, and what else it reads."""
    rng = np.random.default_rng(seed)
    feed: dict[str, np.ndarray] = {}
    for value in model.graph.input:
        tensor = value.type.tensor_type
        sizes = {"B": batch, "S": length}
        shape = [d.dim_value or sizes[d.dim_param] for d in tensor.shape.dim]
        kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        if kind.kind in "iu" and kind.itemsize == 1:
            limits = np.iinfo(kind)
            feed[value.name] = rng.integers(limits.min, limits.max + 1, shape).astype(kind)
        elif kind.kind == "f":
            feed[value.name] = rng.standard_normal(shape).astype(kind)
        else:
            feed[value.name] = np.ones(shape, kind)
            for b in range(batch):
                feed[value.name][b, : length * b // (2 * batch)] = 0
    return feed
