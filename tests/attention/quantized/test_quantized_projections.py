# SPDX-License-Identifier: Apache-2.0
"""com.microsoft::QAttention: its projections are of integers, and its core is float attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from quantized_models import run

import stof
from stof.options import Options

HEADS, WIDTH = 4, 32


def quantized_node(
    *, padded: bool = True, channels: bool = False, zero_points: bool = True, **attributes: Any
) -> onnx.ModelProto:
    """Tokens [B, S, 32] that are quantized by their range, and a QAttention of them."""
    rng = np.random.default_rng(2)
    count = 3 * WIDTH if channels else 1
    constants = {
        "weight": rng.integers(-127, 128, (WIDTH, 3 * WIDTH)).astype(np.int8),
        "bias": rng.standard_normal(3 * WIDTH).astype(np.float32),
        "scale": (0.001 + 0.002 * rng.random(count)).astype(np.float32).reshape((count,) if channels else ()),
        "point": np.zeros((count,) if channels else (), np.int8),
    }
    inputs = ["codes", "weight", "bias", "codes_scale", "scale", "pad" if padded else ""]
    inputs += ["codes_point", "point"] if zero_points else ["codes_point"]
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["codes", "codes_scale", "codes_point"]),
        helper.make_node(
            "QAttention", inputs, ["out"], "attention", domain="com.microsoft", num_heads=HEADS, **attributes
        ),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", "S", WIDTH]),
            *([helper.make_tensor_value_info("pad", TensorProto.INT32, ["B", "S"])] if padded else []),
        ],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["B", "S", WIDTH])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


@pytest.mark.parametrize(
    ("settings", "mask"),
    [
        ({}, "pad[b, k]"),
        ({"padded": False}, ""),
        ({"padded": False, "unidirectional": 1}, "k <= q"),
        ({"channels": True}, "pad[b, k]"),
        ({"zero_points": False}, "pad[b, k]"),
        ({"scale": 0.3}, "pad[b, k]"),
    ],
)
def test_its_core_is_replaced(settings: dict[str, Any], mask: str, tmp_path: Path) -> None:
    model = quantized_node(**settings)
    source, written = tmp_path / "model.onnx", tmp_path / "written.onnx"
    onnx.save(model, source)
    report = stof.optimize(source, written, Options(verify_budget=5, chains="off"))
    (site,) = report.sites
    assert (site.replaced, site.mask) == (True, mask), site.reason
    operators = [n.op_type for n in onnx.load(written).graph.node]
    assert "QAttention" not in operators
    assert {"MatMulInteger", "StofAttention"} <= set(operators)
    rng = np.random.default_rng(4)
    for batch, length in ((1, 3), (2, 40)):
        feed = {"x": rng.standard_normal((batch, length, WIDTH)).astype(np.float32)}
        if settings.get("padded", True):
            feed["pad"] = np.ones((batch, length), np.int32)
            feed["pad"][-1, length // 2 + 1 :] = 0
        wanted, mine, body = run(source, feed)[0], run(written, feed, library=True)[0], run(written, feed)[0]
        assert np.allclose(mine, wanted, atol=2e-5)
        assert np.allclose(body, wanted, atol=2e-5)


def test_layers_behind_each_other(tmp_path: Path) -> None:
    """The result of one is quantized for the next, whose sizes are known by it."""
    model = quantized_node(padded=False)
    second = quantized_node(padded=False).graph
    for node in second.node:
        node.name = f"second_{node.name}"
        node.input[:] = ["middle" if n == "x" else f"second_{n}" if n.startswith("codes") else n for n in node.input]
        node.output[:] = [n if n == "out" else f"second_{n}" for n in node.output]
    model.graph.node[1].output[0] = "middle"
    model.graph.node.extend(second.node)
    source, written = tmp_path / "model.onnx", tmp_path / "written.onnx"
    onnx.save(model, source)
    report = stof.optimize(source, written, Options(verify_budget=5, chains="off"))
    assert [s.replaced for s in report.sites] == [True, True], [s.reason for s in report.sites]
    feed = {"x": np.random.default_rng(6).standard_normal((2, 30, WIDTH)).astype(np.float32)}
    wanted, mine = run(source, feed)[0], run(written, feed, library=True)[0]
    assert np.abs(wanted - mine).max() <= 0.02 * np.abs(wanted).max()  # a step of what is quantized between them


def test_a_rotary_node_stays(tmp_path: Path) -> None:
    source = tmp_path / "model.onnx"
    onnx.save(quantized_node(do_rotary=1), source)
    report = stof.optimize(source, tmp_path / "written.onnx", Options(dry_run=True))
    (site,) = report.sites
    assert "it rotates query and key" in site.reason
