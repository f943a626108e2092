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
from stof import cli
from stof.attention.subgraphs import emit_scopes
from stof.execution.upcast import Twins, widen
from stof.op_parts import collect_typed_attributes
from stof.ops import OPS

NAMES = ("modernbert.dynamo.sdpa", "modernbert.torchscript.eager", "bert.torchscript.sdpa", "mistral.dynamo.eager")


def fp16(name: str) -> onnx.ModelProto:
    """A narrow export as ONNX Runtime's own tool converts it."""
    model = build.fill(build.load_graph(f"narrow/{name}"), seed=1)
    return convert_float_to_float16(model, disable_shape_infer=True)


def with_fp32_softmax(model: onnx.ModelProto) -> onnx.ModelProto:
    """What exporters write for ``softmax(scores, dtype=float32).to(query.dtype)``."""
    found = onnx.ModelProto()
    found.CopyFrom(model)
    nodes: list[onnx.NodeProto] = []
    for i, node in enumerate(found.graph.node):
        if node.op_type != "Softmax":
            nodes.append(node)
            continue
        scores, weights = node.input[0], node.output[0]
        node.input[0], node.output[0] = f"wide_scores_{i}", f"wide_weights_{i}"
        nodes.append(helper.make_node("Cast", [scores], [node.input[0]], f"widen_{i}", to=TensorProto.FLOAT))
        nodes.append(node)
        nodes.append(helper.make_node("Cast", [node.output[0]], [weights], f"narrow_{i}", to=TensorProto.FLOAT16))
    copies = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del found.graph.node[:]
    found.graph.node.extend(copies)
    return found


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


def test_converted_with_external_data(tmp_path: Path) -> None:
    """The conversion of docs/guide/half-precision.md: weights stay external data, inputs keep their types."""
    source, path = tmp_path / "fp32.onnx", tmp_path / "model.onnx"
    single = build.fill(build.load_graph("narrow/modernbert.dynamo.sdpa"), seed=1)
    onnx.save(single, str(source), save_as_external_data=True, location="fp32.data", size_threshold=256)
    half = convert_float_to_float16(onnx.load(str(source)), disable_shape_infer=True, keep_io_types=True)
    onnx.save(half, str(path), save_as_external_data=True, location="half.data", size_threshold=256)
    kept = (tmp_path / "half.data").read_bytes()
    report = stof.optimize(path)
    assert report.replaced == len(report.sites) > 0
    assert (tmp_path / "half.data").read_bytes() == kept
    written = onnx.load(str(tmp_path / "model.stof.onnx"), load_external_data=False)
    places = [e.value for t in written.graph.initializer for e in t.external_data if e.key == "location"]
    assert places
    assert set(places) == {"half.data"}
    optimized = onnx.load(str(tmp_path / "model.stof.onnx"))
    assert "StofAttention" in {n.op_type for n in optimized.graph.node}
    a, b = outputs(onnx.load(str(path)))[0], outputs(optimized)[0]
    assert a.dtype == np.float32
    assert np.abs(a - b).max() <= 4e-3 * np.ptp(a)


@pytest.mark.parametrize("name", ["bert.torchscript.eager", "gemma3.dynamo.eager", "modernbert.dynamo.sdpa"])
@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_softmax_in_fp32(name: str, dtype: int, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    original = with_fp32_softmax(fp16(name))
    if dtype == TensorProto.BFLOAT16:
        original = bf16(original)
    onnx.save(original, str(path))
    optimized = check(path, dtype)
    assert not any(n.op_type == "Softmax" for n in optimized.graph.node)
    a, b = (outputs(widen(m))[0] for m in (original, optimized))
    assert np.abs(a - b).max() <= 2e-5 * np.ptp(a)
    if dtype == TensorProto.FLOAT16:
        a, b = outputs(original)[0].astype(np.float64), outputs(optimized)[0].astype(np.float64)
        assert np.abs(a - b).max() <= 4e-3 * np.ptp(a)


@pytest.mark.parametrize("name", ["modernbert.dynamo.sdpa", "mistral.dynamo.eager"])
def test_bf16(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    original = bf16(fp16(name))
    onnx.save(original, str(path))
    optimized = check(path, TensorProto.BFLOAT16)
    a, b = (outputs(widen(m, tmp_path))[0] for m in (original, optimized))
    assert np.abs(a - b).max() <= 2e-5 * np.ptp(a)


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("kind", [fp16, lambda name: bf16(fp16(name))])
def test_twins_share_their_weights(kind: Callable[[str], onnx.ModelProto], external: bool, tmp_path: Path) -> None:
    model = kind("modernbert.dynamo.sdpa")
    model.graph.initializer.append(numpy_helper.from_array(np.random.default_rng(1).random((40, 50)), "other"))
    wanted = {t.name: numpy_helper.to_array(t) for t in widen(model).graph.initializer}
    path = tmp_path / "model.onnx"
    onnx.save(model, str(path), save_as_external_data=external, location="model.data", size_threshold=0)
    model = onnx.load(str(path), load_external_data=False)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    twins = Twins(tmp_path, scratch)
    first = twins.of(model)
    size = twins.file.stat().st_size
    assert twins.of(model) == first
    assert twins.file.stat().st_size == size
    assert max(len(t.raw_data) for t in first.graph.initializer if t.name != "other") <= 4096
    onnx.save(first, str(scratch / "wide.onnx"))
    found = {t.name: numpy_helper.to_array(t) for t in onnx.load(str(scratch / "wide.onnx")).graph.initializer}
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name, strict=True)


def test_types_that_do_not_fit_are_caught_although_twins_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(fp16("modernbert.dynamo.sdpa"), str(path))

    def faulty(*arguments: Any) -> onnx.ModelProto:
        model = emit_scopes(*arguments)
        node = next(n for n in model.graph.node if n.op_type == "StofAttention")
        model.graph.node.insert(
            list(model.graph.node).index(node),
            helper.make_node("Cast", [node.input[0]], ["wide"], "wide", to=TensorProto.FLOAT),
        )
        next(n for n in model.graph.node if n.op_type == "StofAttention").input[0] = "wide"
        return model

    monkeypatch.setattr("stof.attention.rewrite.emit_scopes", faulty)
    assert cli.main([str(path)]) == 2
    assert "the optimized model in its own types: does not run" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


def test_the_report_says_that_twins_were_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(bf16(fp16("bert.torchscript.sdpa")), str(path))
    assert cli.main([str(path)]) == 0
    assert "half precision: both ran widened to fp32" in capsys.readouterr().out


def test_element_types_in_texts_of_attributes_are_widened(tmp_path: Path) -> None:
    text = "axes b = x0.0, n = x0.1\nout y0 f16 [b, n] = f16(-65504) + f16(x0[b, n])"
    chain = helper.make_node("StofChain", ["x"], ["y"], domain="stof", chain=text)
    other = helper.make_node("Other", ["x"], ["z"], domain="stof", chain=text)
    model = helper.make_model(helper.make_graph([chain, other], "g", [], []))
    twins = Twins(tmp_path, tmp_path, typed_attributes=collect_typed_attributes(OPS))
    found = [n.attribute[0].s.decode() for n in twins.of(model).graph.node]
    assert found == ["axes b = x0.0, n = x0.1\nout y0 f32 [b, n] = -1024.0 + f32(x0[b, n])", text]


def test_planted_fault_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(bf16(fp16("modernbert.dynamo.sdpa")), str(path))

    def faulty(*arguments: Any) -> onnx.ModelProto:
        model = emit_scopes(*arguments)
        node = [n for n in model.graph.node if n.op_type == "StofAttention"][1]
        mask = next(a for a in node.attribute if a.name == "mask")
        mask.s = mask.s.replace(b"<= 16", b"<= 15")
        return model

    monkeypatch.setattr("stof.attention.rewrite.emit_scopes", faulty)
    assert cli.main([str(path)]) == 2
    assert "verification failed at site" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16"])
def test_weights_in_a_folder_that_is_not_written_to(kind: str, narrow: Callable[[str], Path], tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    target.mkdir()
    name = "modernbert.dynamo.sdpa"
    model = onnx.load(str(narrow(name))) if kind == "fp32" else fp16(name) if kind == "fp16" else bf16(fp16(name))
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
