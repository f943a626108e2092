# SPDX-License-Identifier: Apache-2.0
"""What a statement, an option or a path could hide: masks that leave something out, rows that may differ, odd targets."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import stof
from stof import cli
from stof.attention.subgraphs import emit_scopes
from stof.mask.check.checker import MaskChecker


def with_window(path: Path, size: int) -> Path:
    """Narrow Mistral, exported with a window of 20, with another one."""
    model = onnx.load(str(path))
    changed = 0
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.size == 1 and array.dtype.kind == "i" and int(array.reshape(-1)[0]) in (20, 19, -19, -20):
            value = int(array.reshape(-1)[0])
            longer = np.full(array.shape, np.sign(value) * (size + abs(value) - 20), array.dtype)
            tensor.CopyFrom(numpy_helper.from_array(longer, tensor.name))
            changed += 1
    assert changed
    onnx.save(model, str(path))
    return path


@pytest.mark.parametrize("size", [100, 3000])
def test_a_stated_mask_without_the_window_is_refused(
    size: int, narrow: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = with_window(narrow("mistral.dynamo.sdpa"), size)
    stated = [word for i in (0, 1) for word in ("--mask", f"{i}=k <= q and pad[b, k]")]
    assert cli.main([str(path), *stated]) == 2
    assert "differs from the graph" in capsys.readouterr().err
    assert [p.name for p in path.parent.iterdir()] == ["model.onnx"]


def test_a_window_longer_than_any_input_that_is_tried(
    narrow: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = with_window(narrow("mistral.dynamo.sdpa"), 3000)
    assert cli.main([str(path), "--dry-run"]) == 0
    assert "q - k <= 2999" in capsys.readouterr().out

    def faulty(*arguments: Any) -> onnx.ModelProto:
        model = emit_scopes(*arguments)
        node = next(n for n in model.graph.node if n.op_type == "StofAttention")
        mask = next(a for a in node.attribute if a.name == "mask")
        mask.s = mask.s.replace(b"<= 2999", b"<= 2998")
        return model

    monkeypatch.setattr("stof.attention.rewrite.emit_scopes", faulty)
    assert cli.main([str(path)]) == 2
    assert "q - k <= 2998" in capsys.readouterr().err


def test_a_stated_mask_that_forgets_a_boolean_padding_is_refused(
    narrow: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = narrow("bert.dynamo.sdpa")
    model = onnx.load(str(path))
    mask = next(i for i in model.graph.input if i.name == "attention_mask")
    mask.type.tensor_type.elem_type = TensorProto.BOOL
    cast = helper.make_node("Cast", ["attention_mask"], ["attention_mask_int"], to=TensorProto.INT64, name="to_int")
    for node in model.graph.node:
        node.input[:] = ["attention_mask_int" if n == "attention_mask" else n for n in node.input]
    model.graph.node.insert(0, cast)
    onnx.save(model, str(path))
    assert cli.main([str(path), "--mask", "0=True", "--mask", "1=True"]) == 2
    assert "differs from the graph" in capsys.readouterr().err


def test_empty_rows_may_be_ignored(narrow: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = narrow("mistral.dynamo.eager")
    assert cli.main([str(path), "--empty-rows", "ignore"]) == 0
    assert "verified" in capsys.readouterr().out
    nodes = onnx.load(str(path.with_name("model.stof.onnx"))).graph.node
    policies = [a.s for n in nodes if n.op_type == "StofAttention" for a in n.attribute if a.name == "empty_rows"]
    assert policies == [b"zero"] * 2


@pytest.mark.parametrize("option", ["-o", "--json", "--save-plan"])
def test_a_pipe_is_not_replaced(option: str, narrow: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = narrow("bert.dynamo.eager")
    pipe = path.with_name("pipe")
    os.mkfifo(pipe)
    assert cli.main([str(path), option, str(pipe)]) == 1
    assert "pipe" in capsys.readouterr().err
    assert pipe.is_fifo()


def test_sizes_that_overflow_are_refused() -> None:
    keys = 1 << 22
    shapes = {"q": [1 << 42, 0, 1, 1], "k": [1 << 42, 0, keys, 1], "v": [1 << 42, 0, keys, 1], "pad": [1, keys]}
    nodes = [helper.make_node("ConstantOfShape", [f"{n}_shape"], [n]) for n in shapes]
    nodes.append(
        helper.make_node(
            "StofAttention", list(shapes), ["y"], domain="stof", name="site", mask="pad[b, k]", operands="pad"
        )
    )
    sizes = [numpy_helper.from_array(np.array(s, np.int64), f"{n}_shape") for n, s in shapes.items()]
    graph = helper.make_graph(nodes, "g", [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], sizes)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("stof", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    stof.register(options)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    with pytest.raises(Exception, match=r"site.*batch size must be at most"):
        session.run(None, {})


def _fixed(path: Path, keep: onnx.NodeProto, kept: list[int], values: dict[str, np.ndarray]) -> Path:
    """Attention of 2 x 40 tokens, one head of 16, with a boolean mask that a node makes of stored numbers or of ``data``."""
    shape = [2, 1, 40, 16]
    nodes = [
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "kt"], ["s"]),
        keep,
        helper.make_node("Where", ["keep", "s", "low"], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["w"], axis=-1),
        helper.make_node("MatMul", ["w", "v"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "fixed",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in "qkv"]
        + [helper.make_tensor_value_info("data", TensorProto.FLOAT, [2, 1, 1, 40])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(np.float32(-np.inf), "low")]
        + [numpy_helper.from_array(a, n) for n, a in values.items()],
        value_info=[helper.make_tensor_value_info("keep", TensorProto.BOOL, kept)],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("elsewhere", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return path


def test_a_mask_that_does_not_run_at_its_only_size_is_not_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = np.arange(40, dtype=np.int64)
    keep = helper.make_node("MakeMask", ["rows", "columns"], ["keep"], domain="elsewhere")
    path = _fixed(tmp_path / "model.onnx", keep, [40, 40], {"rows": rows[:, None], "columns": rows[None]})
    assert cli.main([str(path), "--no-verify", "--mask", "0=abs(q - k) <= 3"]) != 0
    assert "does not run" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize("of_data", [True, False])
def test_a_mask_of_data_is_run_on_many_draws(of_data: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of shapes alone, at its only size, once."""
    drawn: list[int] = []
    compare = MaskChecker._compare

    def counted(self: MaskChecker, *arguments: Any, **named: Any) -> None:
        drawn.append(len(arguments))
        compare(self, *arguments, **named)

    monkeypatch.setattr(MaskChecker, "_compare", counted)
    read = "data" if of_data else "stored"
    keep = helper.make_node("Less", [read, "limit"], ["keep"])
    stored = np.zeros((2, 1, 1, 40), np.float32)
    values = {"limit": np.array(100, np.float32), "stored": stored}
    path = _fixed(tmp_path / "model.onnx", keep, [2, 1, 1, 40], values)
    assert cli.main([str(path), "--no-verify", "--mask", "0=True"]) == 0
    assert len(drawn) >= 10 if of_data else len(drawn) == 2  # as stated, and as what is written
