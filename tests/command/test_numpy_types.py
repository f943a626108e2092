# SPDX-License-Identifier: Apache-2.0
"""The command with models whose inputs or outputs have types that NumPy lacks: what is compared, and what is said."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import onnx.helper
import pytest
from tests.command.test_cli import ATTENTION, WINDOW, attention, text

from stof import cli


def write(model: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("FLOAT8E4M3FN", "outputs against the original, worst difference"),
        ("FLOAT8E5M2", "outputs against the original, worst difference"),
        ("INT4", "Python interface takes no arrays of INT4, which 'small' has"),
        ("UINT4", "Python interface takes no arrays of UINT4, which 'small' has"),
    ],
)
def test_inputs_of_types_that_numpy_lacks(
    kind: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """8-bit floats are handed over by their bits; of others the sites are compared by themselves."""
    model = text(WINDOW + ATTENTION, opset=21)
    model.ir_version = 10
    model.graph.input.append(onnx.helper.make_tensor_value_info("small", onnx.TensorProto.DataType.Value(kind), ["N"]))
    model.graph.node.append(onnx.helper.make_node("Cast", ["small"], ["large"], to=onnx.TensorProto.FLOAT))
    model.graph.output.append(onnx.helper.make_tensor_value_info("large", onnx.TensorProto.FLOAT, ["N"]))
    path = write(model, tmp_path)
    assert cli.main([str(path)]) == 0
    out = capsys.readouterr().out
    assert words in out
    assert ("verified in part" in out) == kind.endswith("INT4")
    assert "1 sites against fp64" in out
    assert attention(path.with_name("model.stof.onnx"))


@pytest.mark.parametrize("chains", ["off", "on"])
def test_outputs_of_types_that_numpy_lacks(chains: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other outputs are compared, and the report names those that are not."""
    model = text(WINDOW + ATTENTION, opset=21)
    model.ir_version = 10
    model.graph.node.append(onnx.helper.make_node("Cast", ["q"], ["small"], to=onnx.TensorProto.INT4))
    model.graph.output.append(onnx.helper.make_tensor_value_info("small", onnx.TensorProto.INT4, None))
    path = write(model, tmp_path)
    report, page = path.with_name("report.json"), path.with_name("report.html")
    assert cli.main([str(path), "--chains", chains, "--json", str(report), "--report", str(page)]) == 0
    words = "utputs of types of which ONNX Runtime gives no arrays were not compared: "
    assert f"{words}'small' of INT4" in capsys.readouterr().out
    assert words in page.read_text()
    found = json.loads(report.read_text())["verification"]
    assert found["unread"] == {"small": "INT4"}
    assert found["partial"] is None
    assert {c["what"].split(",")[0] for c in found["comparisons"] if not c["site"]} == {"output 'out'"}
