# SPDX-License-Identifier: Apache-2.0
"""What counts as equal: outputs that say something, rows that matter, quantized models, rows of large sites."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

from stof import cli
from stof.attention.checks import row_sample
from stof.attention.checks.row_sample import choose_rows
from stof.execution.case import Case, Padding
from stof.runtime.library import Op
from stof.symbolic import Symbolic
from stof.verification.compare import compare_outputs
from stof.verification.perturb import Noisy, perturb
from stof.verification.quantization import find_quantizers, quantizer_noise
from stof.verification.result import Comparison
from stof.verification.verifier import Verifier

_CASE = Case(2, 9, Padding.RIGHT)


def _compare(plain: np.ndarray, legal: np.ndarray, found: np.ndarray, **options: Any) -> Comparison:
    return compare_outputs(_CASE, 1e-6, "y", plain, [legal], found, **options)


def _numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_what_allows_as_much_as_the_numbers_vary_compares_nothing(scale: float) -> None:
    plain = scale * _numbers(2, 9, 40)
    for off, comparable in ((1e-4, True), (0.02, True), (0.03, False), (1.0, False)):
        found = _compare(plain, plain + np.float32(off * scale), plain)
        assert found.ok
        assert found.comparable is comparable, off


def test_numbers_that_hardly_vary_are_comparable() -> None:
    same = np.full((2, 9, 40), 5, np.float32)
    assert _compare(same, same, same).comparable
    assert _compare(same, same + np.float32(1e-6), same).comparable
    few = np.array([[1.0, 1.0000001]], np.float32)
    assert _compare(few, few, few).comparable
    assert not _compare(few, few + 0.5, few).comparable


def test_numbers_beside_a_large_offset_may_differ_by_their_last_places() -> None:
    """Their range is small, and legal runs may agree; a fault of their size is found all the same."""
    plain = 300 + _numbers(2, 9, 40)
    found = _compare(plain, plain, plain + 2 * np.spacing(np.float32(300)))
    assert found.ok
    assert found.comparable
    assert not _compare(plain, plain, plain + np.float32(1e-3)).ok


def test_numbers_that_rounding_flips_are_not_comparable() -> None:
    plain = np.arange(100)
    flipped, other = plain.copy(), plain.copy()
    flipped[3] += 1
    other[4] += 1
    assert not _compare(plain, plain, other).ok
    found = _compare(plain, flipped, other)
    assert (found.ok, found.comparable) == (True, False)
    assert "1 of 100 elements change" in found.detail
    assert _compare(plain, flipped, plain).comparable
    assert not _compare(plain, flipped, plain + 1).ok


def test_lengths_that_rounding_flips_are_not_comparable() -> None:
    found = _compare(_numbers(2, 9), _numbers(2, 8), _numbers(2, 8))
    assert (found.ok, found.comparable) == (True, False)
    assert not _compare(_numbers(2, 9), _numbers(2, 9), _numbers(2, 8)).ok


def test_padded_queries_alone_may_differ() -> None:
    plain = _numbers(2, 9, 40)
    padded = np.zeros((2, 9), bool)
    padded[1, 6:] = True
    found = plain.copy()
    found[1, 6:] += 1
    assert not _compare(plain, plain, found).ok
    allowed = _compare(plain, plain, found, padded=padded)
    assert allowed.ok
    assert (allowed.coverage.compared, allowed.coverage.padded) == (15 * 40, 3 * 40)
    assert allowed.coverage.elements == plain.size
    found[0, 2] += 1
    assert not _compare(plain, plain, found, padded=padded).ok
    assert _compare(plain, plain, plain, padded=padded).coverage.padded == 0
    pooled = plain.mean(1)  # an output without queries
    assert not _compare(pooled, pooled, pooled + 1, padded=padded).ok


@pytest.mark.parametrize("shape", [(1, 8, 2000), (2, 3, 517), (1, 40, 100)])
def test_sampled_rows(shape: tuple[int, int, int]) -> None:
    away, empty = np.zeros(shape), np.zeros(shape, bool)
    length = shape[2]
    away[0, 1, 77] = 3.0
    empty[0, :, 41] = True
    sample = choose_rows(away, empty, length, most=shape[0] * shape[1] * length * 60)
    assert sample is not None
    again = choose_rows(away, empty, length, most=shape[0] * shape[1] * length * 60)
    assert again is not None
    np.testing.assert_array_equal(sample.rows, again.rows)
    assert {0, 41, 63, 64, 77, length - 1} <= set(sample.rows.tolist())
    assert 1 in sample.heads
    assert len(sample.rows) == 60
    assert choose_rows(away, empty, length, most=away.size * length) is None
    tiny = choose_rows(away, empty, length, most=100)
    assert tiny is not None
    assert {0, length - 1, 77} <= set(tiny.rows.tolist())
    assert tiny.heads.tolist() == [1]
    array = np.arange(away.size * 5).reshape(*shape, 5)
    np.testing.assert_array_equal(sample.pick(array), array[:, sample.heads][:, :, sample.rows])
    np.testing.assert_array_equal(sample.pick(array[0, 0])[0, 0], array[0, 0][sample.rows])
    assert sample.pick(array[:, :1, :1]).shape == (shape[0], 1, 1, 5)


@pytest.mark.parametrize("row", [5, 30, 52])
@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_fault_in_one_row_of_a_large_site_is_found(
    row: int,
    is_wrong: bool,
    narrow: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(choose_rows, "__defaults__", (53 * 2 * 2 * 12,))
    monkeypatch.setattr(row_sample, "_LEAST_ROWS", 12)
    run = Op.run

    def spoiled(self: Op, inputs: list[np.ndarray], outputs: list[np.ndarray], *rest: Any, **options: Any) -> None:
        run(self, inputs, outputs, *rest, **options)
        if is_wrong and self.name == "StofAttention":
            outputs[0].reshape(-1)[row * outputs[0].size // 53 + 1] += 1e-3

    monkeypatch.setattr(Op, "run", spoiled)
    path = narrow("bert.torchscript.sdpa")
    assert cli.main([str(path), "--chains", "off"]) == (2 if is_wrong else 0)
    said = capsys.readouterr()
    assert ("verification failed at site" in said.err) is is_wrong
    assert ("rows of large sites was compared" in said.out) is not is_wrong


def _quantized(path: Path) -> Path:
    target = path.with_name("quantized.onnx")
    quantize_dynamic(path, target, weight_type=QuantType.QInt8)
    return target


@pytest.mark.parametrize("name", ["modernbert.dynamo.sdpa", "bert.torchscript.sdpa", "mistral.dynamo.eager"])
def test_a_dynamically_quantized_model_is_named(
    name: str, narrow: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    plain = narrow(name)
    path, report = _quantized(plain), plain.with_name("report.json")
    assert cli.main([str(path), "--json", str(report)]) == 0
    said = capsys.readouterr().out
    assert "dynamically quantized" in said
    assert "may flip" in said
    verification = json.loads(report.read_text())["verification"]
    assert verification["quantized"]
    others = [c for c in verification["comparisons"] if not c["comparable"]]
    assert all(c["site"] == "" for c in others)
    assert bool(others) == ("not comparable at the model's outputs" in said)
    assert cli.main([str(plain), "--json", str(report)]) == 0
    assert "may flip" not in capsys.readouterr().out
    assert not json.loads(report.read_text())["verification"]["quantized"]


def test_faults_of_a_quantized_model_are_found(
    narrow: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Verifier.run

    def spoiled(self: Verifier, original: Path, emitted: onnx.ModelProto, *rest: Any) -> Any:
        other = onnx.ModelProto()
        other.CopyFrom(emitted)
        name = other.graph.output[0].name
        last = next(n for n in other.graph.node if name in n.output)
        last.output[list(last.output).index(name)] = "right"
        other.graph.node.append(helper.make_node("Mul", ["right", "most"], [name]))
        other.graph.initializer.append(numpy_helper.from_array(np.float32(0.5), "most"))
        return run(self, original, other, *rest)

    monkeypatch.setattr(Verifier, "run", spoiled)
    assert cli.main([str(_quantized(narrow("bert.torchscript.sdpa")))]) == 2
    assert "verification failed" in capsys.readouterr().err


def test_noise_of_quantizers_is_of_their_last_places() -> None:
    nodes = [
        helper.make_node("Exp", ["x"], ["a"]),
        helper.make_node("DynamicQuantizeLinear", ["a"], ["b", "s", "z"]),
        helper.make_node("DequantizeLinear", ["b", "s", "z"], ["c"]),
    ]
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [4, 32]) for n in "xac"]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=9)
    assert len(find_quantizers(model)) == 1
    noise = quantizer_noise(model, Symbolic(model))
    assert noise == {"a": Noisy(TensorProto.FLOAT, 32, 0.0)}
    noisy = perturb(model, noise, 0)
    evaluator = onnx.reference.ReferenceEvaluator(noisy)
    x = _numbers(4, 32)
    found = evaluator.run(["a"], {"x": x})[0]
    relative = np.abs(found / np.exp(x) - 1)
    assert 0 < relative.max() < 2.0**-20


def test_noise_of_channels_that_are_not_the_last_axis() -> None:
    """A site may write [B, N, S], channels first: noise of N numbers is added along that axis, of any length S."""
    nodes = [helper.make_node("Exp", ["x"], ["a"])]
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["B", 32, "S"]) for n in "xa"]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=9)
    noisy = perturb(model, {"a": Noisy(TensorProto.FLOAT, 32, 1.0, 1)}, 0)
    x = _numbers(2, 32, 7)
    found = onnx.reference.ReferenceEvaluator(noisy).run(["a"], {"x": x})[0]
    assert 0 < np.abs(found - np.exp(x)).max() < 2.0**-20
