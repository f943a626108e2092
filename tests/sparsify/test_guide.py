# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/guide/sparsify.md run as they are printed, and its specifications are legal."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from stof import cli
from stof.sparsify.spec import parse_spec

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cached_attention"))
from gqa_models import Shape, model_of

GUIDE = (Path(__file__).resolve().parents[2] / "docs/guide/sparsify.md").read_text()
COMMANDS = re.findall(r"^stof-optimize (.*)$", GUIDE, re.MULTILINE)
WORDS, WIDTH = 31, 24


def decoder(path: Path, layers: int = 3) -> None:
    """Tokens, layers of attention over a cache with residual connections, logits."""
    rng = np.random.default_rng(0)
    shape = Shape(H=4, G=2, D=16, packed=True)
    model = model_of(*[shape] * layers, masks=True)
    graph = model.graph
    attention = [n for n in graph.node if n.op_type == "GroupQueryAttention"]
    nodes = [n for n in graph.node if n.op_type != "GroupQueryAttention"]
    nodes.append(helper.make_node("Gather", ["embedding", "input_ids"], ["x0"]))
    weights = {"embedding": (WORDS, WIDTH), "head": (WIDTH, WORDS)}
    for i, node in enumerate(attention):
        weights |= {f"in{i}": (WIDTH, (4 + 2 * 2) * 16), f"out{i}": (4 * 16, WIDTH)}
        nodes += [
            helper.make_node("MatMul", [f"x{i}", f"in{i}"], [node.input[0]]),
            node,
            helper.make_node("MatMul", [node.output[0], f"out{i}"], [f"y{i}"]),
            helper.make_node("Add", [f"x{i}", f"y{i}"], [f"x{i + 1}"]),
        ]
    nodes.append(helper.make_node("MatMul", [f"x{layers}", "head"], ["logits"]))
    stored = [numpy_helper.from_array(rng.standard_normal(d).astype(np.float32) / 4, n) for n, d in weights.items()]
    inputs = [i for i in graph.input if not i.name.endswith("query")]
    inputs.insert(0, helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["B", "S"]))
    outputs = [o for o in graph.output if "present" in o.name]
    outputs.insert(0, helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", "S", WORDS]))
    made = helper.make_graph(nodes, "decoder", inputs, outputs, stored)
    onnx.save(helper.make_model(made, opset_imports=model.opset_import, ir_version=10), path)


def test_commands_are_listed() -> None:
    assert len(COMMANDS) == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decoder(tmp_path / "decoder.onnx")
    np.savez(tmp_path / "prompts.npz", ids=np.random.default_rng(0).integers(0, WORDS, (1, 20)))
    onnx.save(model_of(Shape(H=16, G=8, D=16)), tmp_path / "rank1.onnx")
    monkeypatch.chdir(tmp_path)
    assert cli.main(shlex.split(command)) == 0
    text = capsys.readouterr().out
    assert "OUTPUTS CHANGE" in text.splitlines()[0]
    assert ("loss of decoding on 1 prompt" in text) == ("--prompts" in command)
    assert list(tmp_path.glob("*.stof.onnx"))


def test_specifications_are_legal() -> None:
    """Those with numbers; letters stand for numbers in a table."""
    found = re.findall(r"`((?:s2:|window=|mask=)[^`]*)`", GUIDE)
    specs = [re.sub(r"=[LVWN]\b", "=9", spec) for spec in found]
    assert len(specs) >= 4
    for spec in specs:
        parse_spec(spec)
