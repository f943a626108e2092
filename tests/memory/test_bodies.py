# SPDX-License-Identifier: Apache-2.0
"""Memory of graphs inside of If, Loop and Scan: small examples by hand, and larger ones measured in processes of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from run_node import measure_node
from run_peak import measure_run

from stof.memory.peak import estimate_peak
from stof.memory.run_estimate import MemoryEstimate
from stof.symbolic import Symbolic

_FLOAT = TensorProto.FLOAT
_OFF = 3 << 20  # bytes: code that is loaded in the first run, small blocks


def _value(name: str, *shape: int, dtype: int = _FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def _model(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    **stored: np.ndarray,
) -> onnx.ModelProto:
    weights = [numpy_helper.from_array(a, n) for n, a in stored.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def _wide(name: str, source: str, rows: int, columns: int) -> tuple[list[onnx.NodeProto], list[onnx.ValueInfoProto]]:
    """The sum over an axis that is four times as long: [rows, 4 · columns] in between."""
    nodes = [
        helper.make_node("Concat", [source] * 4, [f"{name}_wide"], axis=1),
        helper.make_node("Exp", [f"{name}_wide"], [f"{name}_exp"]),
        helper.make_node("MatMul", [f"{name}_exp", "weight"], [name]),
    ]
    values = [_value(f"{name}_wide", rows, 4 * columns), _value(f"{name}_exp", rows, 4 * columns)]
    return nodes, values


def _loop(rows: int, columns: int, trips: int) -> onnx.ModelProto:
    """A state, and a scan output with half of its rows."""
    nodes, values = _wide("next", "state", rows, columns)
    nodes += [
        helper.make_node("Identity", ["go"], ["goes"]),
        helper.make_node("Slice", ["next", "zero", "half"], ["slice"]),
    ]
    inputs = [
        _value("i", dtype=TensorProto.INT64),
        _value("go", dtype=TensorProto.BOOL),
        _value("state", rows, columns),
    ]
    outputs = [_value("goes", dtype=TensorProto.BOOL), _value("next", rows, columns)]
    outputs.append(_value("slice", rows // 2, columns))
    body = helper.make_graph(nodes, "body", inputs, outputs, value_info=values)
    node = helper.make_node("Loop", ["trips", "yes", "x"], ["y", "slices"], body=body)
    return _model(
        [node],
        [_value("x", rows, columns)],
        [_value("y", rows, columns), _value("slices", trips, rows // 2, columns)],
        trips=np.array(trips, np.int64),
        yes=np.array(True),
        zero=np.array([0], np.int64),
        half=np.array([rows // 2], np.int64),
        weight=np.full((4 * columns, columns), 1e-3, np.float32),
    )


def _scan(rows: int, columns: int, steps: int) -> onnx.ModelProto:
    """A state that is added to, and outputs as large as the inputs."""
    nodes, values = _wide("slice", "x_slice", rows, columns)
    nodes.append(helper.make_node("Add", ["state", "slice"], ["next"]))
    inputs = [_value("state", rows, columns), _value("x_slice", rows, columns)]
    outputs = [_value("next", rows, columns), _value("slice", rows, columns)]
    body = helper.make_graph(nodes, "body", inputs, outputs, value_info=values)
    node = helper.make_node("Scan", ["x0", "x"], ["last", "y"], body=body, num_scan_inputs=1)
    return _model(
        [node],
        [_value("x0", rows, columns), _value("x", steps, rows, columns)],
        [_value("last", rows, columns), _value("y", steps, rows, columns)],
        weight=np.full((4 * columns, columns), 1e-3, np.float32),
    )


def _branches(rows: int, columns: int) -> onnx.ModelProto:
    """A branch with large tensors, and one without."""
    nodes, values = _wide("y", "x", rows, columns)
    then = helper.make_graph(nodes, "then", [], [_value("y", rows, columns)], value_info=values)
    other = helper.make_graph([helper.make_node("Abs", ["x"], ["z"])], "else", [], [_value("z", rows, columns)])
    return _model(
        [
            helper.make_node("If", ["is_wide"], ["result"], then_branch=then, else_branch=other),
            helper.make_node("Abs", ["result"], ["out"]),
        ],
        [_value("is_wide", dtype=TensorProto.BOOL), _value("x", rows, columns)],
        [_value("out", rows, columns)],
        weight=np.full((4 * columns, columns), 1e-3, np.float32),
    )


def _estimate(model: onnx.ModelProto) -> MemoryEstimate:
    return MemoryEstimate(model, Symbolic(model), is_strict=True)


_UNIT = 8 * 16 * 4  # bytes of a state of 8 x 16


def test_a_loop_by_hand() -> None:
    # In its last iteration: the state before, both wide tensors, and the other slices. In the end: the states of two
    # iterations, the slices, and both outputs.
    trips = 5
    slices = trips * _UNIT // 2
    running = _UNIT + 8 * _UNIT + slices // trips * (trips - 1)
    copying = 2 * _UNIT + slices + _UNIT + slices
    assert _estimate(_loop(8, 16, trips)).run({}).peak == max(running, copying) == running
    trips = 200
    slices = trips * _UNIT // 2
    assert _estimate(_loop(8, 16, trips)).run({}).peak == 3 * _UNIT + 2 * slices


def test_a_scan_by_hand() -> None:
    # Both outputs are there; of an iteration the state before and both wide tensors.
    assert _estimate(_scan(8, 16, 6)).run({}).peak == 7 * _UNIT + _UNIT + 8 * _UNIT


def test_the_larger_branch_counts() -> None:
    assert _estimate(_branches(8, 16)).run({}).peak == 8 * _UNIT


def test_tensors_of_bodies_are_named() -> None:
    model = _loop(8, 16, 5)
    peak = estimate_peak(model, Symbolic(model), {})
    assert "next_exp" in [t.name for t in peak.tensors]
    assert "Exp" in peak.node


_MODELS = {
    "loop": (_loop(512, 1024, 6), {"x": (512, 1024)}),
    "loop-slices": (_loop(128, 1024, 96), {"x": (128, 1024)}),
    "scan": (_scan(1024, 512, 6), {"x0": (1024, 512), "x": (6, 1024, 512)}),
    "if": (_branches(1024, 1024), {"is_wide": (), "x": (1024, 1024)}),
}


@pytest.mark.parametrize("name", _MODELS)
def test_a_run_takes_what_is_estimated(name: str, tmp_path: Path) -> None:
    model, shapes = _MODELS[name]
    rng = np.random.default_rng(0)
    feed = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    if "is_wide" in feed:
        feed["is_wide"] = np.array(True)
    estimated, measured = _estimate(model).run({}).peak, measure_node(model, feed)
    assert estimated >= 8 << 20  # else noise decides
    assert abs(estimated - measured) <= max(_OFF, 0.06 * measured), (estimated, measured)
    onnx.save(model, tmp_path / "model.onnx")
    touched = estimate_peak(model, Symbolic(model), {}).activations
    grown = measure_run(tmp_path / "model.onnx", {})
    assert abs(touched - grown) <= max(2 * _OFF, 0.25 * grown), (touched, grown)
