# SPDX-License-Identifier: Apache-2.0
"""What the verifier runs in the time it has, and how it finds sites that are wrong only together."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from stof import cli
from stof.attention.checks.site_checks import cases
from stof.execution.case import Padding
from stof.mask.expression import MaskExpression
from stof.verification.suspects import find_suspects
from stof.verification.verifier import Verifier


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("sites", [3, 4, 17, 64])
def test_suspects_are_the_smallest_set(sites: int, count: int) -> None:
    rng = np.random.default_rng(100 * sites + count)
    for _ in range(20):
        culprits = sorted(int(i) for i in rng.choice(sites, count, replace=False))
        runs = 0

        def fails(some: Sequence[Any], culprits: list[int] = culprits) -> bool:
            nonlocal runs
            runs += 1
            assert list(some) == sorted(set(some))
            return set(culprits) <= set(some)

        everything: Any = range(sites)
        assert find_suspects(everything, fails) == (culprits, True)
        assert runs <= count * (math.ceil(math.log2(sites)) + 1)


def test_one_of_two_causes_is_found() -> None:
    everything: Any = range(30)
    found, enough = find_suspects(everything, lambda some: {3, 20} <= set(some) or {9, 25} <= set(some))
    assert (found, enough) == ([3, 20], True)


def test_a_search_that_ends_early_says_so() -> None:
    everything: Any = range(40)
    culprits = {1, 5, 9, 20, 30, 39}
    found, enough = find_suspects(everything, lambda some: culprits <= set(some))
    assert not enough
    assert len(found) > 2
    assert set(found) < culprits


def test_cases_exceed_the_window_and_are_padded_on_both_sides() -> None:
    for tokens in (math.inf, 100):
        found = cases([MaskExpression.parse("abs(q - k) <= 64 and pad[b, k]")], tokens)
        assert {c.padding for c in found if c.length > 65} == {Padding.NONE, Padding.LEFT, Padding.RIGHT}
        assert any(c.length < 64 for c in found)
        assert found[-1].batch == 2
        assert max(c.batch for c in found[:-1]) == (2 if tokens == math.inf else 1)


def test_without_time_the_first_and_the_last_case_run(
    narrow: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = narrow("modernbert.dynamo.sdpa")
    report = path.with_name("report.json")
    assert cli.main([str(path), "--verify-budget", "0.000001", "--json", str(report)]) == 0
    assert "cut short by the budget" in capsys.readouterr().out
    verification = json.loads(report.read_text())["verification"]
    assert not verification["complete"]
    outputs = [c["what"] for c in verification["comparisons"] if not c["site"]]
    assert outputs == [
        "output 'last_hidden_state', batch 1, sequence 53, padded left",
        "output 'last_hidden_state', batch 4, sequence 9, padded right",
    ]


def on_a_grid(path: Path) -> Path:
    """A window's attention whose outputs are rounded to multiples of 2^-14: last places that differ make steps."""
    positions = np.arange(96)
    near = np.abs(positions[:, None] - positions) <= 8
    constants = {"near": near, "least": np.float32(-np.inf), "scale": np.float32(0.25), "large": np.float32(1000)}
    nodes = [
        helper.make_node("Transpose", ["k"], ["turned"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "turned"], ["products"]),
        helper.make_node("Mul", ["products", "scale"], ["scaled"]),
        helper.make_node("Where", ["near", "scaled", "least"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", "v"], ["heads"]),
        helper.make_node("Add", ["heads", "large"], ["far"]),
        helper.make_node("Sub", ["far", "large"], ["y"]),
    ]
    shape = [2, 4, 96, 16]
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in ("q", "k", "v", "y")]
    weights = [numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()]
    graph = helper.make_graph(nodes, "grid", values[:3], values[3:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_rounding_that_no_other_run_shows_is_looked_for(tmp_path: Path) -> None:
    path, report = on_a_grid(tmp_path / "model.onnx"), tmp_path / "report.json"
    assert cli.main([str(path), "--json", str(report)]) == 0
    found = [c for c in json.loads(report.read_text())["verification"]["comparisons"] if not c["site"]]
    # Without a step in one of the runs this would show nothing.
    assert max(c["difference"] for c in found) >= 2.0**-14
    assert max(c["budget"] for c in found) < 1e-3


def test_rounding_is_no_excuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Verifier.run

    def wrong(self: Verifier, original: Path, emitted: onnx.ModelProto, *rest: Any) -> Any:
        other = onnx.ModelProto()
        other.CopyFrom(emitted)
        last = next(n for n in other.graph.node if n.output[0] == "y")
        last.output[0] = "right"
        other.graph.node.append(helper.make_node("Add", ["right", "little"], ["y"]))
        other.graph.initializer.append(numpy_helper.from_array(np.float32(2e-3), "little"))
        return run(self, original, other, *rest)

    monkeypatch.setattr(Verifier, "run", wrong)
    path = on_a_grid(tmp_path / "model.onnx")
    assert cli.main([str(path)]) != 0
    assert "verification failed" in capsys.readouterr().err
    assert not path.with_suffix(".stof.onnx").exists()


@pytest.mark.parametrize("names", ["q", "k", "v", "kv"])
@pytest.mark.parametrize("where", ["in the file", "external", "a default"])
def test_sites_of_constant_queries_keys_and_values_are_compared(tmp_path: Path, names: str, where: str) -> None:
    rng = np.random.default_rng(7)
    rows = {"q": 1031, "k": 1033, "v": 1033}
    constants = [numpy_helper.from_array(rng.standard_normal((1, 4, rows[n], 8)).astype(np.float32), n) for n in names]
    scale = numpy_helper.from_array(np.float32(0.35), "scale")
    nodes = [
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "kt"], ["s"]),
        helper.make_node("Mul", ["s", "scale"], ["s2"]),
        helper.make_node("Softmax", ["s2"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "v"], ["y"]),
    ]
    inputs = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 4, rows[n], 8])
        for n in "qkv"
        if n not in names or where == "a default"
    ]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "constant", inputs, [output], [*constants, scale])
    path, report = tmp_path / "model.onnx", tmp_path / "report.json"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path, save_as_external_data=where == "external", size_threshold=1024)
    assert cli.main([str(path), "--json", str(report)]) == 0
    comparisons = json.loads(report.read_text())["verification"]["comparisons"]
    (site,) = [c for c in comparisons if c["site"]]
    assert site["ok"]
    assert 0 < site["difference"] < 1e-5
    after = onnx.load(str(path.with_name("model.stof.onnx")), load_external_data=False)
    assert [n.op_type for n in after.graph.node] == ["StofAttention"]
