# SPDX-License-Identifier: Apache-2.0
"""What kernels take besides inputs and outputs, and which write to the place of an input: each operator runs alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from run_node import measure_node

from stof.memory.run_estimate import MemoryEstimate
from stof.symbolic import Symbolic

_OFF = 3 << 20  # bytes: code that is loaded in the first run, small blocks
_RNG = np.random.default_rng(0)


def _floats(*shape: int) -> np.ndarray:
    return _RNG.standard_normal(shape).astype(np.float32)


def _model(
    nodes: list[onnx.NodeProto], feed: dict[str, np.ndarray], outputs: list[str], **stored: Any
) -> onnx.ModelProto:
    """A model with declared shapes, so that results may take the place of inputs."""
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feed.items()
    ]
    results = [onnx.ValueInfoProto(name=name) for name in outputs]
    weights = [numpy_helper.from_array(np.asarray(a), n) for n, a in stored.items()]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(
        helper.make_graph(nodes, "g", inputs, results, weights), opset_imports=opsets, ir_version=9
    )


def _compare(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> None:
    estimated = MemoryEstimate(model, Symbolic(model), is_strict=True).run({}).peak
    measured = measure_node(model, feed)
    assert estimated >= 8 << 20  # else noise decides
    assert abs(estimated - measured) <= max(_OFF, 0.06 * measured), (estimated, measured)


_IMAGE = (1, 32, 131072)
_CASES: dict[str, tuple[str, list[np.ndarray], dict[str, Any]]] = {
    "where": ("Where", [_floats(8, 512, 512) > 0, _floats(8, 512, 512), _floats(8, 512, 512)], {}),
    "where-scalar": ("Where", [_floats(8, 512, 512) > 0, _floats(8, 512, 512), _floats(1)], {}),
    "where-small-mask": ("Where", [_floats(512, 512) > 0, _floats(16, 512, 512), _floats(1)], {}),
    "softmax-inner": ("Softmax", [_floats(8, 512, 512)], {"axis": 1}),
    "softmax-last": ("Softmax", [_floats(8, 512, 512)], {"axis": 2}),
    "log-softmax-inner": ("LogSoftmax", [_floats(8, 512, 512)], {"axis": 0}),
    "sum-of-two": ("Sum", [_floats(8, 512, 512)] * 2, {}),
    "sum-of-three": ("Sum", [_floats(8, 512, 512)] * 3, {}),
    "max-of-three": ("Max", [_floats(8, 512, 512)] * 3, {}),
    "conv": ("Conv", [_floats(*_IMAGE), _floats(32, 32, 3)], {"pads": [1, 1]}),
    "conv-transpose": ("ConvTranspose", [_floats(*_IMAGE), _floats(32, 32, 4)], {"strides": [2]}),
    "scatter-elements": (
        "ScatterElements",
        [_floats(1024, 2048), _RNG.integers(0, 1024, (1024, 2048)), _floats(1024, 2048)],
        {},
    ),
    "gather-elements": ("GatherElements", [_floats(1024, 4096), _RNG.integers(0, 4096, (1024, 4096))], {"axis": 1}),
    "non-zero": ("NonZero", [np.ones((1024, 1024), bool)], {}),
    "hard-swish": ("HardSwish", [_floats(8, 512, 512)], {}),
    "matmul": ("MatMul", [_floats(8, 512, 512), _floats(8, 512, 512)], {}),
    "transpose": ("Transpose", [_floats(8, 512, 512)], {"perm": [0, 2, 1]}),
    "layer-norm": ("LayerNormalization", [_floats(8, 1024, 512), _floats(512), _floats(512)], {}),
    "einsum-heads": ("Einsum", [_floats(2, 1024, 4, 16), _floats(2, 1024, 4, 16)], {"equation": "bihd,bjhd->bhij"}),
    "einsum-shaw": ("Einsum", [_floats(1, 4, 512, 16), _floats(512, 512, 16)], {"equation": "bhld,lrd->bhlr"}),
    "einsum-xlnet": ("Einsum", [_floats(1024, 1, 4, 16), _floats(2048, 1, 4, 16)], {"equation": "ibnd,jbnd->bnij"}),
    "einsum-weights": ("Einsum", [_floats(1, 8, 1024, 1024), _floats(1, 1024, 8, 16)], {"equation": "bhij,bjhd->bihd"}),
    "einsum-grid": ("Einsum", [_floats(32, 64, 64, 32), _floats(64, 32, 32)], {"equation": "bhwc,hkc->bhwk"}),
    "einsum-project": ("Einsum", [_floats(1024, 32, 64), _floats(64, 128)], {"equation": "ibh,hn->ibn"}),
    "einsum-ellipsis": ("Einsum", [_floats(2, 512, 64), _floats(2, 4096, 64)], {"equation": "...ij,...kj->...ik"}),
    "einsum-one": ("Einsum", [_floats(16, 512, 512)], {"equation": "bij->bji"}),
}


@pytest.mark.parametrize("case", _CASES)
def test_working_memory_of_a_node(case: str) -> None:
    op, arrays, attributes = _CASES[case]
    feed = {f"x{i}": a for i, a in enumerate(arrays)}
    _compare(_model([helper.make_node(op, list(feed), ["y"], **attributes)], feed, ["y"]), feed)


_HEADS = [_floats(1, 8, 640, 32)] * 3
_ROWS = [_floats(2, 512, 128)] * 3
_ATTENTIONS: dict[str, tuple[dict[str, np.ndarray], dict[str, Any]]] = {
    "plain": (dict(zip("qkv", _HEADS, strict=True)), {}),
    "causal": (dict(zip("qkv", _HEADS, strict=True)), {"is_causal": 1}),
    "boolean mask": (dict(zip("qkv", _HEADS, strict=True)) | {"m": _floats(1, 8, 640, 640) > 0}, {}),
    "float mask": (dict(zip("qkv", _HEADS, strict=True)) | {"m": _floats(1, 8, 640, 640)}, {}),
    "rank 3": (dict(zip("qkv", _ROWS, strict=True)) | {"m": _floats(2, 1, 512, 512) > 0}, {"heads": 8}),
    "lengths": (dict(zip("qkv", _HEADS, strict=True)) | {"n": np.array([300])}, {}),
}


@pytest.mark.parametrize("case", _ATTENTIONS)
def test_attention(case: str) -> None:
    """ONNX's Attention writes all scores."""
    feed, attributes = _ATTENTIONS[case]
    heads = attributes.get("heads", 0)
    given = {"q_num_heads": heads, "kv_num_heads": heads} if heads else attributes
    names = ["q", "k", "v", *(n if n in feed else "" for n in ("m", "", "", "n"))]
    while not names[-1]:
        names.pop()
    model = _model([helper.make_node("Attention", names, ["y"], **given)], feed, ["y"])
    model.opset_import[0].version, model.ir_version = 24, 11
    _compare(model, feed)


def test_bias_gelu() -> None:
    feed = {"x": _floats(8192, 512), "b": _floats(512)}
    _compare(_model([helper.make_node("BiasGelu", ["x", "b"], ["y"], domain="com.microsoft")], feed, ["y"]), feed)


_UNARY = [
    *(
        "Cast",
        "Clip",
        "Elu",
        "HardSigmoid",
        "LeakyRelu",
        "LogSoftmax",
        "Relu",
        "Selu",
        "Sigmoid",
        "Softmax",
        "Softplus",
    ),
    *("Softsign", "Tanh", "ThresholdedRelu", "Trilu", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten"),
    *("Abs", "Erf", "Exp", "Neg", "Sqrt", "Add", "Mul", "Div", "Sub", "Pow", "Dropout", "Transpose", "Expand"),
]


@pytest.mark.parametrize("op", _UNARY)
def test_results_in_the_place_of_inputs(op: str) -> None:
    """Between two nodes that never are in place: the peak is one tensor where the operator writes to its input, else two."""
    feed = {"x": _floats(1, 16, 512, 512)}
    stored: dict[str, Any] = {"from": np.array([0]), "to": np.array([1]), "axis": np.array([2])}
    more: list[str] = []
    attributes: dict[str, Any] = {"to": TensorProto.INT32} if op == "Cast" else {}
    if op in ("Add", "Mul", "Div", "Sub", "Pow"):
        more, stored["one"] = ["one"], np.array(0.5, np.float32)
    if op in ("Reshape", "Expand"):
        more, stored["shape"] = ["shape"], np.array([1, 16, 512, 512] if op == "Expand" else [16, 512, 512])
    if op in ("Squeeze", "Unsqueeze"):
        more, stored["first"] = ["first"], np.array([0])
    nodes = [
        helper.make_node("Transpose", ["x"], ["a"], perm=[0, 1, 3, 2]),
        helper.make_node(op, ["a", *more], ["b"], **attributes),
        helper.make_node("Slice", ["b", "from", "to", "from"], ["c"]),
        helper.make_node("Shape", ["c"], ["y"]),
    ]
    _compare(_model(nodes, feed, ["y"], **{n: a for n, a in stored.items() if n != "axis"}), feed)
