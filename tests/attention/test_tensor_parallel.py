# SPDX-License-Identifier: Apache-2.0
"""Graphs of one rank of a tensor-parallel model: H / ranks heads, and results that the ranks add up."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import stof
from stof.options import Options

H, G, D, WIDTH, RANKS = 8, 2, 16, 24, 2
RNG = np.random.default_rng(0)
WEIGHTS = {
    name: RNG.standard_normal(shape).astype(np.float32) / 4
    for name, shape in {"q": (WIDTH, H * D), "k": (WIDTH, G * D), "v": (WIDTH, G * D), "o": (H * D, WIDTH)}.items()
}


def weights(rank: int | None) -> list[onnx.TensorProto]:
    """The projections of one rank, columns of q, k and v and rows of o; None: of the whole model."""
    found = {}
    for name, array in WEIGHTS.items():
        axis = 0 if name == "o" else 1
        found[name] = array if rank is None else np.split(array, RANKS, axis)[rank]
    return [numpy_helper.from_array(np.ascontiguousarray(a), f"w{n}") for n, a in found.items()]


def make_model(
    rank: int | None, nodes: list[onnx.NodeProto], inputs: dict[str, tuple[int, list[object]]]
) -> onnx.ModelProto:
    project = [helper.make_node("MatMul", ["x", f"w{n}"], [n]) for n in "qkv"]
    last = helper.make_node("MatMul", ["rows", "wo"], ["y"])
    infos = [helper.make_tensor_value_info(n, t, s) for n, (t, s) in inputs.items()]
    results = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", "S", WIDTH])]
    if any("present_k" in node.output for node in nodes):
        kv = G if rank is None else G // RANKS
        results += [
            helper.make_tensor_value_info(n, TensorProto.FLOAT, ["B", kv, "T", D]) for n in ("present_k", "present_v")
        ]
    graph = helper.make_graph([*project, *nodes, last], "rank", infos, results, weights(rank))
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def encoder(rank: int | None) -> onnx.ModelProto:
    """Bidirectional attention with padding, and a window of 5 to both sides."""
    heads, kv = (H, G) if rank is None else (H // RANKS, G // RANKS)
    make = helper.make_node

    def constant(name: str, value: object, dtype: type = np.int64) -> onnx.NodeProto:
        return make("Constant", [], [name], value=numpy_helper.from_array(np.asarray(value, dtype)))

    nodes = [
        constant("q4", [0, 0, heads, D]),
        constant("k4", [0, 0, kv, D]),
        constant("spread", [1, 1, heads // kv, 1, 1]),
        constant("flat", [0, heads, -1, D]),
        constant("merged", [0, 0, heads * D]),
        constant("axis2", [2]),
        constant("last", [-1]),
        constant("axes12", [1, 2]),
        constant("zero", 0),
        constant("one", 1),
        constant("width", 5),
        constant("scale", D**-0.5, np.float32),
        constant("minus", -np.inf, np.float32),
        constant("nothing", 0, np.float32),
        make("Reshape", ["q", "q4"], ["q_"]),
        make("Transpose", ["q_"], ["qh"], perm=[0, 2, 1, 3]),
    ]
    for name in "kv":
        nodes += [
            make("Reshape", [name, "k4"], [f"{name}_"]),
            make("Transpose", [f"{name}_"], [f"{name}t"], perm=[0, 2, 1, 3]),
            make("Unsqueeze", [f"{name}t", "axis2"], [f"{name}u"]),
            make("Expand", [f"{name}u", "spread"], [f"{name}e"]),
            make("Reshape", [f"{name}e", "flat"], [f"{name}h"]),
        ]
    nodes += [
        make("Transpose", ["kh"], ["kT"], perm=[0, 1, 3, 2]),
        make("MatMul", ["qh", "kT"], ["s0"]),
        make("Mul", ["s0", "scale"], ["s1"]),
        make("Shape", ["x"], ["S1"], start=1, end=2),
        make("Squeeze", ["S1"], ["S"]),
        make("Range", ["zero", "S", "one"], ["columns"]),
        make("Unsqueeze", ["columns", "last"], ["lines"]),
        make("Sub", ["lines", "columns"], ["d"]),
        make("Abs", ["d"], ["a"]),
        make("LessOrEqual", ["a", "width"], ["near"]),
        make("Unsqueeze", ["real", "axes12"], ["pad"]),
        make("And", ["near", "pad"], ["m"]),
        make("Where", ["m", "s1", "minus"], ["s2"]),
        make("Softmax", ["s2"], ["p0"], axis=-1),
        make("IsNaN", ["p0"], ["bad"]),
        make("Where", ["bad", "nothing", "p0"], ["p"]),
        make("MatMul", ["p", "vh"], ["oh"]),
        make("Transpose", ["oh"], ["ot"], perm=[0, 2, 1, 3]),
        make("Reshape", ["ot", "merged"], ["rows"]),
    ]
    inputs = {"x": (TensorProto.FLOAT, ["B", "S", WIDTH]), "real": (TensorProto.BOOL, ["B", "S"])}
    return make_model(rank, nodes, inputs)


def decoder(rank: int | None) -> onnx.ModelProto:
    """GroupQueryAttention over a KV cache that each rank has for its own heads."""
    heads, kv = (H, G) if rank is None else (H // RANKS, G // RANKS)
    node = helper.make_node(
        "GroupQueryAttention",
        ["q", "k", "v", "past_k", "past_v", "lengths", "total"],
        ["rows", "present_k", "present_v"],
        domain="com.microsoft",
        num_heads=heads,
        kv_num_heads=kv,
    )
    cache = (TensorProto.FLOAT, ["B", kv, "P", D])
    inputs = {
        "x": (TensorProto.FLOAT, ["B", "S", WIDTH]),
        "past_k": cache,
        "past_v": cache,
        "lengths": (TensorProto.INT32, ["B"]),
        "total": (TensorProto.INT32, []),
    }
    return make_model(rank, [node], inputs)


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    stof.register(options)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found: list[np.ndarray] = session.run(None, feeds)
    return found


def feeds_of(kind: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    if kind == "encoder":
        real = rng.random((3, 37)) < 0.8
        return {"x": rng.standard_normal((3, 37, WIDTH)).astype(np.float32), "real": real}
    past = {f"past_{n}": rng.standard_normal((2, G, 19, D)).astype(np.float32) for n in "kv"}
    x = rng.standard_normal((2, 1, WIDTH)).astype(np.float32)
    return {"x": x, **past, "lengths": np.full(2, 19, np.int32), "total": np.array(20, np.int32)}


@pytest.mark.parametrize(("kind", "op"), [("encoder", "StofAttention"), ("decoder", "StofCachedAttention")])
def test_ranks_optimize_like_the_whole_and_add_up_to_it(kind: str, op: str) -> None:
    make = {"encoder": encoder, "decoder": decoder}[kind]
    feeds = feeds_of(kind)
    wanted = run(make(None), feeds)
    parts = []
    for rank in (None, *range(RANKS)):
        optimized = stof.optimize(make(rank), options=Options())
        calls = [node for node in optimized.graph.node if node.op_type == op]
        assert len(calls) == 1, f"rank {rank}"
        own = feeds
        if rank is not None:
            own = {n: np.split(a, RANKS, 1)[rank] if n.startswith("past") else a for n, a in feeds.items()}
        found = run(optimized, own)
        if rank is None:
            np.testing.assert_allclose(found[0], wanted[0], atol=1e-5, rtol=0)
        else:
            parts.append(found)
    np.testing.assert_allclose(sum(part[0] for part in parts), wanted[0], atol=1e-5, rtol=0)
    for i in range(1, len(wanted)):  # caches lie side by side
        np.testing.assert_allclose(np.concatenate([part[i] for part in parts], 1), wanted[i], atol=1e-6, rtol=0)
