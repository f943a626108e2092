# SPDX-License-Identifier: Apache-2.0
"""fp16 and bf16 models: sites are replaced and verified, also where the CPU provider cannot run the original."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from ml_dtypes import bfloat16
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.transformers.float16 import convert_float_to_float16

import build
import stof
from stof import cli, pipeline
from stof.passes.emit import emit
from stof.widen import widen

NAMES = ("modernbert.dynamo.sdpa", "modernbert.torchscript.eager", "bert.torchscript.sdpa", "mistral.dynamo.eager")


def fp16(name: str) -> onnx.ModelProto:
    """A narrow export as ONNX Runtime's own tool converts it."""
    model = build.fill(build.load_graph(f"narrow/{name}"), seed=1)
    return convert_float_to_float16(model, disable_shape_infer=True)


def bf16(model: onnx.ModelProto) -> onnx.ModelProto:
    """An fp16 model with bfloat16 in its place."""
    found = onnx.ModelProto()
    found.CopyFrom(model)

    def convert(tensor: onnx.TensorProto) -> None:
        if tensor.data_type == TensorProto.FLOAT16:
            array = numpy_helper.to_array(tensor).astype(np.float32)
            array[array <= -60000] = float(np.finfo(np.float32).min)
            wide = np.maximum(array, -3.38e38).astype(bfloat16)
            tensor.CopyFrom(numpy_helper.from_array(wide, tensor.name))

    for tensor in found.graph.initializer:
        convert(tensor)
    for node in found.graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                convert(attribute.t)
            if attribute.name in ("to", "dtype") and attribute.i == TensorProto.FLOAT16:
                attribute.i = TensorProto.BFLOAT16
    for infos in (found.graph.input, found.graph.output, found.graph.value_info):
        for info in infos:
            if info.type.tensor_type.elem_type == TensorProto.FLOAT16:
                info.type.tensor_type.elem_type = TensorProto.BFLOAT16
    return found


def outputs(model: onnx.ModelProto, *, library: bool = True) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if library:
        stof.register(options)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    mask = np.ones((2, 61), np.int64)
    mask[0, :9] = 0
    mask[1, -20:] = 0
    feeds = {"input_ids": np.random.default_rng(5).integers(0, 90, (2, 61)), "attention_mask": mask}
    found: list[np.ndarray] = session.run(None, feeds)
    return [x[mask.astype(bool)] for x in found]


def check(path: Path, dtype: int) -> onnx.ModelProto:
    report = stof.optimize(path)
    assert report.replaced == len(report.sites) > 0
    assert report.verification is not None
    assert not report.verification.failures
    assert {c.site for c in report.verification.comparisons if c.site} == {s.site for s in report.sites}
    model = onnx.load(str(path.with_name("model.stof.onnx")))
    assert model.graph.output[0].type.tensor_type.elem_type == dtype
    return model


@pytest.mark.parametrize("name", NAMES)
def test_fp16(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    original = fp16(name)
    onnx.save(original, str(path))
    optimized = check(path, TensorProto.FLOAT16)
    for a, b, c in zip(outputs(original), outputs(optimized), outputs(optimized, library=False), strict=True):
        assert a.dtype == np.float16
        span = float(np.ptp(a.astype(np.float64)))
        # Both round every intermediate tensor to 11 bits.
        for found in (b, c):
            assert np.abs(found.astype(np.float64) - a).max() <= 4e-3 * span


@pytest.mark.parametrize("name", ["modernbert.dynamo.sdpa", "mistral.dynamo.eager"])
def test_bf16(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    original = bf16(fp16(name))
    onnx.save(original, str(path))
    optimized = check(path, TensorProto.BFLOAT16)
    a, b = (outputs(widen(m, tmp_path))[0] for m in (original, optimized))
    assert np.abs(a - b).max() <= 2e-5 * np.ptp(a)


def test_planted_fault_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(bf16(fp16("modernbert.dynamo.sdpa")), str(path))

    def faulty(*arguments: Any) -> onnx.ModelProto:
        model = emit(*arguments)
        node = [n for n in model.graph.node if n.op_type == "StofAttention"][1]
        mask = next(a for a in node.attribute if a.name == "mask")
        mask.s = mask.s.replace(b"<= 16", b"<= 15")
        return model

    monkeypatch.setattr(pipeline, "emit", faulty)
    assert cli.main([str(path)]) == 2
    assert "verification failed at site" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


def test_weights_in_a_folder_that_is_not_written_to(narrow: Callable[[str], Path], tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    target.mkdir()
    model = onnx.load(str(narrow("modernbert.dynamo.sdpa")))
    onnx.save(model, str(source / "m.onnx"), save_as_external_data=True, location="m.data", size_threshold=64)
    source.chmod(0o555)
    before = source.stat().st_mtime_ns
    try:
        report = stof.optimize(source / "m.onnx", target / "m.onnx")
    finally:
        source.chmod(0o755)
    assert source.stat().st_mtime_ns == before
    assert report.verification is not None
    assert len(report.verification.comparisons) > len(report.sites)
    assert sorted(p.name for p in target.iterdir()) == ["m.data", "m.onnx"]
    assert helper.make_opsetid("stof", 1) in onnx.load(str(target / "m.onnx")).opset_import
