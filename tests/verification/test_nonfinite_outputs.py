# SPDX-License-Identifier: Apache-2.0
"""Models that give NaN or infinity throughout: what cannot be compared does not read as verified."""

from __future__ import annotations

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "attention_precision"))
from gemm_layers import HIDDEN, REAL, LayerGraph, bert_layer
from precision_runs import run

from stof.errors import VerifyError
from stof.verification.evidence import check_evidence, check_sites_alone, find_nan_weight, find_nonfinite_outputs
from stof.verification.result import Comparison, Coverage, Verification


def spoil_weights(path: Path, value: float, *, elements: int | None = None) -> Path:
    """Puts a number into the model's largest weight; everywhere, or into the first elements."""
    model = onnx.load(path)
    weight = max(model.graph.initializer, key=lambda t: int(np.prod(t.dims)))
    array = numpy_helper.to_array(weight).copy()
    array.reshape(-1)[:elements] = value
    weight.CopyFrom(numpy_helper.from_array(array, weight.name))
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("options", [(), pytest.param(("--allow-bf16",), marks=REAL)])
def test_a_model_of_nan_is_not_written(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = spoil_weights(bert_layer(tmp_path / "model.onnx"), np.nan)
    output = onnx.load(model).graph.output[0].name
    status, target, report = run(tmp_path, model, *options)
    message = capsys.readouterr().err
    assert status == 2
    assert not target.exists()
    assert f"no element of output {output!r}: all of them are NaN or infinite in the original, on each of" in message
    assert "--inputs FILE" in message
    assert "--no-verify" in message
    assert report["failure"] in message
    assert report["verification"] is None


def test_no_verify_writes_it(tmp_path: Path) -> None:
    model = spoil_weights(bert_layer(tmp_path / "model.onnx"), np.nan)
    status, target, _ = run(tmp_path, model, "--no-verify")
    assert status == 0
    assert target.exists()


def two_outputs(folder: Path, operator: str, number: float) -> tuple[Path, str]:
    """A model whose second output is its first one behind an operator with a number, and that output's name."""
    g = LayerGraph()
    attended = g.attention(*[g.heads("x")] * 3)
    second = g.add(operator, [attended, g.constant(number)])
    path = g.save(folder / "model.onnx", attended)
    model = onnx.load(path)
    model.graph.output.append(helper.make_tensor_value_info(second, TensorProto.FLOAT, ["batch", "sequence", HIDDEN]))
    onnx.save(model, path)
    return path, second


def test_one_output_of_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other one is compared, and does not stand for it."""
    model, unknown = two_outputs(tmp_path, "Mul", np.nan)
    status, target, _ = run(tmp_path, model)
    assert (status, target.exists()) == (2, False)
    assert f"no element of output {unknown!r}:" in capsys.readouterr().err


def test_infinities_that_both_have_are_compared(tmp_path: Path) -> None:
    """An output of -inf alone, as a mask without a key, is right where the result has it, too."""
    model, endless = two_outputs(tmp_path, "Sub", np.inf)
    status, target, report = run(tmp_path, model)
    assert (status, target.exists()) == (0, True)
    coverages = [c["coverage"] for c in report["verification"]["comparisons"] if repr(endless) in c["what"]]
    assert coverages
    assert all(c["equal_infinite"] == c["nonfinite"] > 0 for c in coverages)


def test_outputs_that_are_sequences_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ONNX Runtime gives lists of them: they are not compared, and the report says so."""
    g = LayerGraph()
    attended = g.attention(*[g.heads("x")] * 3)
    model = onnx.load(g.save(tmp_path / "model.onnx", attended))
    model.graph.node.append(helper.make_node("SequenceConstruct", [attended, attended], ["both"]))
    model.graph.output.append(helper.make_tensor_sequence_value_info("both", TensorProto.FLOAT, None))
    onnx.save(model, tmp_path / "model.onnx")
    status, target, _ = run(tmp_path, tmp_path / "model.onnx")
    assert (status, target.exists()) == (0, True)
    assert "were not compared: 'both' of SEQUENCE" in capsys.readouterr().out


def test_outputs_with_some_nan_are_compared_elsewhere(tmp_path: Path) -> None:
    """One column is NaN: the others are compared, and the report counts both."""
    g = LayerGraph()
    attended = g.attention(*[g.heads("x")] * 3)
    column = g.weight(HIDDEN)
    numbers = np.ones(HIDDEN, np.float32)
    numbers[3] = np.nan
    g.weights[-1].CopyFrom(numpy_helper.from_array(numbers, column))
    model = g.save(tmp_path / "model.onnx", g.add("Mul", [attended, column]))
    status, target, report = run(tmp_path, model)
    assert (status, target.exists()) == (0, True)
    coverages = [c["coverage"] for c in report["verification"]["comparisons"] if not c["site"]]
    assert coverages
    assert all(c["compared"] == 127 * c["nonfinite"] > 0 for c in coverages)


def comparison(compared: int, nonfinite: int, site: str = "") -> Comparison:
    return Comparison("y", 0.0, 0.0, True, site=site, coverage=Coverage(compared, nonfinite))


def test_one_set_of_inputs_with_numbers_suffices() -> None:
    nothing, some, empty = comparison(0, 8), comparison(1, 7), comparison(0, 0)
    assert find_nonfinite_outputs([[nothing, some], [nothing, nothing]], ["y", "z"]) == ["y"]
    assert find_nonfinite_outputs([[nothing], [some]], ["y"]) == []
    assert find_nonfinite_outputs([[empty], [empty]], ["y"]) == []  # without elements
    assert find_nonfinite_outputs([[nothing], [empty]], ["y"]) == ["y"]


def test_a_fault_is_told_first() -> None:
    """It says more than that another output has no numbers."""
    fault = Comparison("z", np.inf, 0.0, False)
    nothing = comparison(0, 8)
    result = Verification(comparisons=[nothing, fault])
    check_evidence(result, [[nothing, fault]], ["y", "z"], lambda: "w")
    with pytest.raises(VerifyError, match=r"no element of output 'y'.*on the one set of inputs.*weight 'w' holds NaN"):
        check_evidence(Verification(comparisons=[nothing]), [[nothing]], ["y"], lambda: "w")
    check_evidence(Verification(comparisons=[nothing]), [[nothing]], ["y"], lambda: None)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_a_weight_with_nan_is_found_inside_and_outside_the_file(dtype: str, tmp_path: Path) -> None:
    """The last element of many, which are looked at in blocks."""
    numbers = np.ones(3 << 20, np.float32).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    for is_nan in (False, True):
        numbers[-1] = np.nan if is_nan else 1
        weight = numpy_helper.from_array(numbers, "w")
        graph = helper.make_graph([], "g", [], [], [numpy_helper.from_array(np.array([3], np.int64), "n"), weight])
        model = helper.make_model(graph)
        assert find_nan_weight(model, tmp_path) == ("w" if is_nan else None)
        onnx.save(
            model, tmp_path / "model.onnx", save_as_external_data=True, location=f"weights{is_nan}", size_threshold=64
        )
        outside = onnx.load(tmp_path / "model.onnx", load_external_data=False)
        assert outside.graph.initializer[1].data_location == TensorProto.EXTERNAL
        assert find_nan_weight(outside, tmp_path) == ("w" if is_nan else None)


def test_sites_without_outputs() -> None:
    nothing, some = comparison(0, 8, "first"), comparison(4, 4, "second")
    check_sites_alone(Verification(comparisons=[nothing, some]))
    with pytest.raises(VerifyError, match=r"only NaN or infinity at site 'first'\. "):
        check_sites_alone(Verification(comparisons=[nothing, nothing]))
    sites = [comparison(0, 8, f"site {i}") for i in range(5)]
    with pytest.raises(VerifyError, match=r"at all 5 sites \('site 0', 'site 1', 'site 2', 'site 3' and others\)\. "):
        check_sites_alone(Verification(comparisons=sites))
