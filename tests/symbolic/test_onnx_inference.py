# SPDX-License-Identifier: Apache-2.0
"""Operators without a rule have the shapes that ONNX infers, and a runtime gives them."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from stof.symbolic import Symbolic
from stof.symbolic.algebra.sizes import evaluate, size_names

SIZES = {"B": 3, "S": 20, "H": 9, "W": 11, "P": 5, "Q": 7}
RECURRENT = {
    "w": (1, 48, 32),
    "r": (1, 48, 16),
    "w4": (2, 64, 32),
    "r4": (2, 64, 16),
    "w1": (1, 16, 32),
    "r1": (1, 16, 16),
}
# Nodes, and how many sizes of y nobody can know before a run.
GRAPHS = {
    "GRU": ("t = Transpose<perm=[1,0,2]>(x) y = GRU<hidden_size=16>(t, w, r)", 0),
    "LSTM of two directions": (
        't = Transpose<perm=[1,0,2]>(x) y = LSTM<hidden_size=16, direction="bidirectional">(t, w4, r4)',
        0,
    ),
    "RNN, the last state": ("t = Transpose<perm=[1,0,2]>(x) rest, y = RNN<hidden_size=16>(t, w1, r1)", 0),
    "ConvInteger": ("q, s, z = DynamicQuantizeLinear(image) y = ConvInteger<pads=[1,1,1,1]>(q, kernel, z)", 0),
    "QLinearConv": (
        "q, s, z = DynamicQuantizeLinear(image) a = Constant<value_float=0.5>() p = QuantizeLinear(a, a)"
        " c = QLinearConv<pads=[1,1,1,1]>(q, s, z, kernel, a, p, s, z) y = Cast<to=6>(c)",
        0,
    ),
    "STFT": (
        "flat = Reshape(x, flatten) step = Constant<value_int=8>() length = Constant<value_int=16>()"
        " y = STFT<onesided=1>(flat, step, , length)",
        0,
    ),
    "GridSample": ("y = GridSample(image, grid)", 0),
    "an element of a sequence": ("all = SplitToSequence<axis=1>(x) i = Constant<value_int=0>() y = SequenceAt(all, i)", 0),
    "what a loop carries": (
        "n = Constant<value_int=3>() yes = Constant<value=bool {1}>() go = Squeeze(yes)"
        " y = Loop(n, go, x) <body = body (int64 i, bool c, float[B,S,32] v) => (bool d, float[B,S,32] o)"
        " { d = Identity(c) o = Add(v, x) }>",
        0,
    ),
    "what grows in a loop": (
        "n = Constant<value_int=3>() yes = Constant<value=bool {1}>() go = Squeeze(yes)"
        " y = Loop(n, go, x) <body = body (int64 i, bool c, float[a,b,e] v) => (bool d, float[a,bb,e] o)"
        " { d = Identity(c) o = Concat<axis=1>(v, x) }>",
        1,
    ),
    "Scan": (
        "t = Transpose<perm=[1,0,2]>(x) zero = ReduceSum<keepdims=0>(x, one)"
        " rest, y = Scan<num_scan_inputs=1, body = body (float[B,32] s, float[B,32] v) => (float[B,32] o, float[B,32] all)"
        " { o = Add(s, v) all = Relu(o) }>(zero, t)",
        0,
    ),
}  # fmt: skip


def model(nodes: str) -> onnx.ModelProto:
    """A model of the inputs and weights above."""
    made = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 18]> g (float[B,S,32] x, float[B,2,H,W] image, float[B,P,Q,2] grid) => (float y)'
        f" {{ {nodes} }}"
    )
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {n: rng.standard_normal(s).astype(np.float32) for n, s in RECURRENT.items()}
    arrays["kernel"] = rng.integers(0, 9, (4, 2, 3, 3)).astype(np.uint8)
    arrays["one"] = np.array([1])
    arrays["flatten"] = np.array([0, -1, 1])
    used = {n for node in made.graph.node for n in node.input}
    made.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in arrays.items() if n in used)
    (output,) = made.graph.output
    output.type.tensor_type.ClearField("shape")
    unused = [i for i in made.graph.input if i.name not in used]
    for value in unused:
        made.graph.input.remove(value)
    if any(n.op_type in ("ConvInteger", "QLinearConv") for n in made.graph.node):
        output.type.tensor_type.elem_type = onnx.TensorProto.INT32
    return made


@pytest.mark.parametrize("name", GRAPHS)
def test_shapes_are_those_of_a_run(name: str) -> None:
    nodes, unknown = GRAPHS[name]
    made = model(nodes)
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(1)
    feeds = {
        i.name: rng.standard_normal([SIZES.get(d, d) for d in i.shape]).astype(np.float32) for i in session.get_inputs()
    }
    (y,) = session.run(["y"], feeds)
    symbolic = Symbolic(made)
    shape = symbolic.shape("y")
    assert shape is not None
    assert symbolic.dtype("y") == onnx.helper.np_dtype_to_tensor_dtype(y.dtype)
    assert len(shape) == y.ndim
    known = [(evaluate(d, SIZES), n) for d, n in zip(shape, y.shape, strict=True) if size_names(d) <= set(SIZES)]
    assert all(size == n for size, n in known)
    assert len(known) == y.ndim - unknown


def test_declared_sizes_fill_what_is_unknown() -> None:
    made = model(GRAPHS["what grows in a loop"][0])
    dims = made.graph.output[0].type.tensor_type.shape.dim
    for size in ("other", "long", "N"):
        dims.add().dim_param = size
    shape = Symbolic(made).shape("y")
    assert shape is not None
    assert [size_names(d) for d in shape] == [{"B"}, {"long"}, set()]


def test_a_graph_that_onnx_refuses_has_no_shapes() -> None:
    made = model("y = GridSample(x, x)")
    assert Symbolic(made).shape("y") is None
