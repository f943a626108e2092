# SPDX-License-Identifier: Apache-2.0
"""StofQuantizedAttention in ONNX Runtime: against fp64, against the runtime's own quantized nodes, and every refusal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from cpu_isas import CPU_ISAS
from onnx import TensorProto, helper, numpy_helper
from quantized_nodes import Array, Codes, Node, codes_for, compute, draw

from stof.runtime.library import op_limits

MASK = {"mask": "abs(q - k) <= 9 and pad[b, k]"}


def assert_near(found: Array, node: Node, allowed: Array | bool = True, rows: float = 0.03) -> None:
    """Outputs are those of fp64; few rows may have a weight that is rounded the other way, by one step."""
    expected, weights = compute(node, allowed)
    value = node.codes["value"]
    step = weights[weights > 0].min(initial=1.0) * value.scale * 255
    wrong = np.abs(found - expected) > 1e-5 * np.abs(expected) + 1e-5 * step
    assert wrong.any(-1).mean() <= rows
    assert np.abs(found - expected).max() <= 1.01 * step


def allowed_pairs(S: int, T: int, pad: Array) -> Array:
    q, k = np.arange(S)[:, None], np.arange(T)[None]
    pairs: Array = (np.abs(q - k) <= 9)[None, None] & pad[:, None, None]
    return pairs


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("types", ["uint8 int8 int8", "int8 int8 uint8", "uint8 uint8 uint8", "int8 uint8 int8"])
def test_roundings_and_masks(seed: int, types: str) -> None:
    rng = np.random.default_rng(seed)
    tensors = draw(seed, types=types)
    further = (
        {"score": Codes(0.23, -7, "int8")},
        {"scaled_score": Codes(0.031, 127)},
        {"score": Codes(0.31, 128), "scaled_score": Codes(0.05273, 0, "int8")},
        {},
        {"score": Codes(0.31, 128), "biased_score": Codes(0.0713, 0, "int8")},
        {"score": Codes(0.31, 128), "weight": Codes(1 / 255, -128, "int8")},
    )[seed]
    pad = rng.random((2, 70)) < 0.8
    node = Node(tensors, codes_for(tensors, **further), {"pad": pad}, dict(MASK))
    if seed >= 4:
        node.operands["bias"] = rng.standard_normal((2, 1, 21, 70)).astype(np.float32)
    found = node.run()
    assert_near(found, node, allowed_pairs(21, 70, pad))
    np.testing.assert_array_equal(found, node.run(constants=False))


@pytest.mark.parametrize("layout", ["BSHD", "BSN"])
def test_layouts(layout: str) -> None:
    tensors = draw(3)
    node = Node(tensors, codes_for(tensors, score=Codes(0.3, 128)))
    expected = node.run()
    moved = {n: a.transpose(0, 2, 1, 3).copy() for n, a in tensors.items()}
    if layout == "BSN":
        moved = {n: a.reshape(*a.shape[:2], -1) for n, a in moved.items()}
    other = Node(moved, node.codes, {}, {"layout": layout, "num_heads": 2, "kv_num_heads": 1})
    found = other.run()
    assert found.ndim == (3 if layout == "BSN" else 4)
    np.testing.assert_array_equal(found.reshape(2, 21, 2, 24).transpose(0, 2, 1, 3), expected)


def test_heads_of_one_packed_tensor() -> None:
    """Query, key and value of one matmul: heads 0 and 1, head 2, and head 3 of four."""
    tensors = draw(4, T=21, Dv=16, types="int8 int8 int8")
    codes = {n: Codes(0.01, 5, "int8") for n in tensors} | {"weight": Codes(1 / 255), "score": Codes(0.2, 128)}
    expected = Node(tensors, codes).run()
    together = np.concatenate([a.transpose(0, 2, 1, 3).reshape(2, 21, -1) for a in tensors.values()], 2)
    packed = {"layout": "BSN", "num_heads": 2, "kv_num_heads": 1, "packed": [0, 4, 2, 4, 3, 4]}
    found = Node(dict.fromkeys(tensors, together), codes, {}, packed).run()
    np.testing.assert_array_equal(found.reshape(2, 21, 2, 16).transpose(0, 2, 1, 3), expected)


def test_weights_with_the_range_of_the_run() -> None:
    """As DynamicQuantizeLinear has it: the largest weight of the whole tensor gives the scale."""
    tensors = draw(5)
    codes = codes_for(tensors)
    del codes["weight"]
    pad = np.ones((2, 70), bool)
    pad[1, 30:] = False
    node = Node(tensors, codes, {"pad": pad}, {"mask": "pad[b, k]", "weight_range": "dynamic"})
    allowed = pad[:, None, None] & np.ones((1, 1, 21, 1), bool)
    assert_near(node.run(), node, allowed)


def quantized_graph(node: Node, *, scale: float) -> onnx.ModelProto:
    """The graph that the node replaces, as ONNX Runtime's static quantization writes it."""
    inits: list[onnx.TensorProto] = [numpy_helper.from_array(np.float32(scale), "factor")]
    for name, codes in node.codes.items():
        inits += [numpy_helper.from_array(a, f"{name}_{end}") for a, end in zip(codes.arrays, "sz", strict=True)]
    nodes = [helper.make_node("Transpose", ["key"], ["turned"], perm=[0, 1, 3, 2])]

    def convert(op: str, name: str, source: str, target: str) -> None:
        nodes.append(helper.make_node(op, [source, f"{name}_s", f"{name}_z"], [target]))

    for name, source in (("query", "query"), ("key", "turned"), ("value", "value")):
        convert("DequantizeLinear", name, source, f"{name}_number")
    nodes.append(helper.make_node("MatMul", ["query_number", "key_number"], ["products"]))
    convert("QuantizeLinear", "score", "products", "score_codes")
    convert("DequantizeLinear", "score", "score_codes", "scores")
    nodes.append(helper.make_node("Mul", ["scores", "factor"], ["scaled"]))
    nodes.append(helper.make_node("Softmax", ["scaled"], ["weights"], axis=-1))
    convert("QuantizeLinear", "weight", "weights", "weight_codes")
    convert("DequantizeLinear", "weight", "weight_codes", "rounded")
    nodes.append(helper.make_node("MatMul", ["rounded", "value_number"], ["out"]))
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in node.tensors.items()
    ]
    graph = helper.make_graph(
        nodes, "g", inputs, [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)], inits
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.mark.parametrize("types", ["int8 int8 int8", "uint8 uint8 uint8"])
@pytest.mark.parametrize("optimized", [True, False])
def test_the_runtimes_own_quantized_graph(types: str, optimized: bool) -> None:
    """Optimized, it runs QLinearMatMul; else MatMul of dequantized tensors, in fp32. Rows with a step more or less are few."""
    tensors = draw(6, H=2, G=2, S=96, T=96, D=32, Dv=32, types=types)
    node = Node(
        tensors,
        codes_for(tensors, score=Codes(0.3, 100 if "u" in types else -20, types.split()[0])),
        {},
        {"scale": 0.2},
    )
    options = ort.SessionOptions()
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    graph = quantized_graph(node, scale=0.2)
    session = ort.InferenceSession(graph.SerializeToString(), options, ["CPUExecutionProvider"])
    expected, found = session.run(None, tensors)[0], node.run()
    step = node.codes["weight"].scale * node.codes["value"].scale
    steps = np.abs(found - expected) / step
    # One code of one weight changes an output by that value's code: at most 255 steps.
    assert (steps.max(-1) > 0.5).mean() < 0.05
    assert steps.max() <= 256


@pytest.mark.parametrize("S", [5, 70])
@pytest.mark.parametrize("further", [{"score": Codes(0.3, 128)}, {}])
def test_masks_of_the_run(S: int, further: dict[str, Codes]) -> None:
    """Segments, key counts, and padding inside an or: conjuncts that a kernel asks for tile by tile."""
    rng = np.random.default_rng(S)
    tensors = draw(11, S=S, T=150)
    operands = {
        "pad": rng.random((2, 150)) < 0.5,
        "segment_q": np.sort(rng.integers(0, 4, (2, S))),
        "segment_k": np.sort(rng.integers(0, 4, (2, 150))).astype(np.int32),
        "lengths": np.array([150, 77]),
    }
    mask = "(pad[b, k] or k <= q) and segment_q[b, q] == segment_k[b, k] and k < lengths[b]"
    node = Node(tensors, codes_for(tensors, **further), operands, {"mask": mask})
    q, k = np.arange(S)[:, None], np.arange(150)[None]
    allowed = operands["pad"][:, None] | (k <= q)
    allowed = allowed & (operands["segment_q"][:, :, None] == operands["segment_k"][:, None])
    allowed = allowed & (k < operands["lengths"][:, None, None])
    assert_near(node.run(), node, allowed[:, None])


def test_tables_of_a_mask() -> None:
    """Constant ones make a block mask; those that are inputs are read in each run."""
    rng = np.random.default_rng(12)
    tensors = draw(12, S=70, T=150)
    table = rng.integers(0, 3, 150)
    node = Node(tensors, codes_for(tensors, score=Codes(0.3, 128)), {"table0": table}, {"mask": "table0[k] == q % 3"})
    allowed = table[None] == np.arange(70)[:, None] % 3
    assert_near(node.run(), node, allowed[None, None])


def test_fully_masked_rows() -> None:
    tensors = draw(7, B=1)
    codes = codes_for(tensors, score=Codes(0.3, 128), weight=Codes(1 / 1000))
    mask = {"mask": "q >= 3 and k < 40"}
    rows = np.arange(21)[:, None] >= 3
    allowed = rows & (np.arange(70)[None] < 40)

    def run(policy: str) -> Array:
        return Node(tensors, codes, {}, {**mask, "empty_rows": policy}).run()

    zero = run("zero")
    assert not zero[:, :, :3].any()
    assert zero[:, :, 3:].any()
    assert_near(zero, Node(tensors, codes), allowed[None, None])
    assert np.isnan(run("nan")[:, :, :3]).all()
    everything = Node(tensors, codes).run()
    np.testing.assert_array_equal(run("all")[:, :, :3], everything[:, :, :3])
    values = codes["value"].numbers(tensors["value"])
    mean = codes["weight"].round(np.array(1 / 70)) * values.sum(2)
    np.testing.assert_allclose(run("mean")[:, :, :3], np.broadcast_to(mean[:, :, None], (1, 2, 3, 24)), rtol=1e-6)
    for policy in ("nan", "all", "mean"):
        np.testing.assert_array_equal(run(policy)[:, :, 3:], zero[:, :, 3:])


def test_no_keys_and_no_queries() -> None:
    tensors = draw(8, T=0)
    assert not Node(tensors, codes_for(tensors)).run().any()
    tensors = draw(8, S=0)
    assert Node(tensors, codes_for(tensors)).run().shape == (2, 2, 0, 24)


def test_every_instruction_set(tmp_path: Path) -> None:
    """Each in a process of its own, as STOF_CPU_ISA is read once: the same bits, since sums are integers."""
    tensors = draw(9, S=65, T=129, D=36, Dv=40)
    codes = codes_for(tensors, score=Codes(0.3, 128), scaled_score=Codes(0.0713, 3, "int8"))
    node = Node(tensors, codes, {}, {"mask": "k <= q + 64"})
    onnx.save(node.model(), tmp_path / "node.onnx")
    np.savez(tmp_path / "inputs.npz", **tensors)  # type: ignore[arg-type]
    script = (
        "import sys, hashlib, numpy as np, onnxruntime as ort, stof\n"
        "o = ort.SessionOptions(); o.register_custom_ops_library(str(stof.library_path()))\n"
        "s = ort.InferenceSession(sys.argv[1] + '/node.onnx', o, ['CPUExecutionProvider'])\n"
        "y = s.run(None, dict(np.load(sys.argv[1] + '/inputs.npz')))[0]\n"
        "print(hashlib.sha256(y.tobytes()).hexdigest())\n"
    )
    found = set()
    for isa in CPU_ISAS:
        environment = {**os.environ, "STOF_CPU_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)], env=environment, capture_output=True, text=True, check=True
        )
        found.add(done.stdout.strip())
    assert len(found) == 1


def test_what_the_library_says() -> None:
    limits = op_limits()["StofQuantizedAttention"]
    assert limits["targets"]["cpu"]["types"]["1"]["most_quantized_operands"] == 28
    assert limits["targets"]["cuda"]["types"] == limits["targets"]["tensorrt"]["types"] == {}
    assert {"query_scale", "scaled_score_zero_point", "weight_zero_point", "pad"} <= set(limits["roles"])
    assert "sink" not in json.dumps(limits["roles"])
