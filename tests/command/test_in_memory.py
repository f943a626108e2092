# SPDX-License-Identifier: Apache-2.0
"""``stof.optimize`` with models in memory: the same kind comes back, and what was given stays as it is."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime as ort
import pytest
from onnx import numpy_helper
from tests.command.test_cli import ATTENTION, WINDOW, snapshot, text

import stof
from stof.api import in_memory
from stof.attention.subgraphs import emit_scopes
from stof.errors import ArgumentError, ModelError, VerifyError
from stof.report import describe_registration

WIDTH = 64


def projected(body: str = WINDOW + ATTENTION) -> onnx.ModelProto:
    """Attention, and behind it a projection with a weight of 2 KB and a bias of 32 bytes."""
    model = text(body)
    rng = np.random.default_rng(0)
    weight, bias = rng.standard_normal((8, WIDTH), np.float32), rng.standard_normal(WIDTH, np.float32)
    model.graph.initializer.extend([numpy_helper.from_array(weight, "weight"), numpy_helper.from_array(bias, "bias")])
    model.graph.node.append(onnx.helper.make_node("MatMul", ["out", "weight"], ["product"], "projection"))
    model.graph.node.append(onnx.helper.make_node("Add", ["product", "bias"], ["projected"]))
    model.graph.output[0].name = "projected"
    model.doc_string, model.producer_name = "kept", "test"
    model.metadata_props.add(key="license", value="own")
    return model


def outputs(model: bytes | str) -> np.ndarray:
    options = ort.SessionOptions()
    stof.register(options)
    rng = np.random.default_rng(1)
    feeds = {n: rng.standard_normal((1, 4, 33, 8), np.float32) for n in "qkv"}
    found: np.ndarray = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run(None, feeds)[0]
    return found


def to_proto(model: Any) -> onnx.ModelProto:
    return model if isinstance(model, onnx.ModelProto) else onnx_ir.to_proto(model)


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files lie; nothing is left there."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


KINDS: dict[str, Callable[[onnx.ModelProto], Any]] = {"proto": lambda m: m, "ir": onnx_ir.from_proto}
kinds = pytest.mark.parametrize("kind", KINDS)
FAST = stof.Options(verify_budget=1.0)


@kinds
@pytest.mark.parametrize("large", [False, True])
def test_the_same_kind_comes_back(kind: str, large: bool, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by way of external data, as for models above 2 GB."""
    if large:
        monkeypatch.setattr(in_memory, "_LARGEST_WHOLE", 100)
    given = KINDS[kind](projected())
    before = to_proto(given).SerializeToString(deterministic=True)
    found = stof.optimize(given, options=FAST)
    assert type(found) is type(given)
    assert found is not given
    assert to_proto(given).SerializeToString(deterministic=True) == before
    assert list(scratch.iterdir()) == []
    proto = to_proto(found)
    onnx.checker.check_model(proto)
    assert "StofAttention" in [n.op_type for n in proto.graph.node]
    assert [t.data_location for t in proto.graph.initializer] == [onnx.TensorProto.DEFAULT] * len(
        proto.graph.initializer
    )
    assert (proto.doc_string, proto.producer_name, proto.metadata_props[0].value) == ("kept", "test", "own")
    wanted = outputs(projected().SerializeToString())
    np.testing.assert_allclose(outputs(proto.SerializeToString()), wanted, atol=1e-5)
    np.testing.assert_array_equal(
        numpy_helper.to_array(next(t for t in proto.graph.initializer if t.name == "weight")),
        numpy_helper.to_array(projected().graph.initializer[0]),
    )


def test_the_result_is_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(projected(), path)
    report = stof.optimize(path, options=FAST)
    assert isinstance(report, stof.report.Report)
    wanted = onnx.load(path.with_name("model.stof.onnx"))
    assert stof.optimize(projected(), options=FAST).SerializeToString(deterministic=True) == wanted.SerializeToString(
        deterministic=True
    )


@kinds
def test_the_report_comes_along(kind: str, tmp_path: Path, scratch: Path) -> None:
    options = stof.Options(verify_budget=1.0, json=tmp_path / "report.json", save_plan=tmp_path / "plan.json")
    found, report = stof.optimize(KINDS[kind](projected()), options=options, return_report=True)
    assert len(to_proto(found).graph.node) == report.nodes_after
    assert (report.replaced, report.output, report.copied) == (1, None, False)
    name = {"proto": "the ModelProto 'g'", "ir": "the onnx_ir.Model 'g'"}[kind]
    assert report.model == name
    words = report.to_text()
    assert words.startswith(f"{name}: 1 softmax, 1 attention sites replaced")
    assert words.splitlines()[-2] == "the optimized model is returned"
    assert describe_registration(stof.get_library_path()) in words.splitlines()[-1]
    assert str(scratch) not in words
    data = json.loads((tmp_path / "report.json").read_text())
    assert (data["model"], data["output"], data["verification"]["ok"]) == (name, None, True)
    assert str(scratch) not in json.dumps(data)
    again = stof.optimize(KINDS[kind](projected()), options=stof.Options(plan=tmp_path / "plan.json", verify=False))
    assert "StofAttention" in [n.op_type for n in to_proto(again).graph.node]


@kinds
@pytest.mark.parametrize("large", [False, True])
def test_an_output_is_a_file_and_gives_the_report(
    kind: str, large: bool, tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr(in_memory, "_LARGEST_WHOLE", 100)
    folder = tmp_path / "out"
    folder.mkdir()
    report = stof.optimize(KINDS[kind](projected()), folder / "fast.onnx", FAST)
    assert (report.replaced, report.output) == (1, str(folder / "fast.onnx"))
    assert {p.name for p in folder.iterdir()} == ({"fast.onnx", "fast.onnx.data"} if large else {"fast.onnx"})
    np.testing.assert_allclose(outputs(str(folder / "fast.onnx")), outputs(projected().SerializeToString()), atol=1e-5)
    assert list(scratch.iterdir()) == []


@kinds
def test_nothing_to_replace_gives_what_was_given(kind: str, tmp_path: Path) -> None:
    given = KINDS[kind](projected("kt = Add (q, k)\nout = Add (kt, v)"))
    found, report = stof.optimize(given, return_report=True)
    assert found is given
    assert (report.replaced, report.copied, report.output) == (0, False, None)
    assert "no file was written" in report.to_text()
    report = stof.optimize(given, tmp_path / "copy.onnx")
    assert report.copied
    assert len(onnx.load(tmp_path / "copy.onnx").graph.node) == 4
    given = KINDS[kind](projected())
    assert stof.optimize(given, options=stof.Options(dry_run=True)) is given


def test_weights_of_the_ir_are_shared() -> None:
    """A weight that stays as it is is not in memory twice."""
    given = onnx_ir.from_proto(projected())
    found = stof.optimize(given, options=FAST)
    assert found.graph.initializers["weight"].const_value is given.graph.initializers["weight"].const_value
    assert found.graph.initializers["bias"].const_value is not given.graph.initializers["bias"].const_value


@pytest.mark.parametrize("with_output", [False, True])
def test_external_data_of_the_ir_stays_where_it_is(with_output: bool, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    onnx.save(projected(), folder / "m.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    given = onnx_ir.load(folder / "m.onnx")
    before = snapshot(folder)
    if with_output:
        (tmp_path / "out").mkdir()
        stof.optimize(given, tmp_path / "out" / "m.onnx", FAST)
        assert {p.name for p in (tmp_path / "out").iterdir()} == {"m.onnx", "m.onnx.data"}
        found = outputs(str(tmp_path / "out" / "m.onnx"))
    else:
        model = stof.optimize(given, options=FAST)
        weight = model.graph.initializers["weight"].const_value
        assert weight is given.graph.initializers["weight"].const_value
        assert isinstance(weight, onnx_ir.ExternalTensor)
        assert Path(weight.path) == folder / "weights.bin"
        onnx_ir.external_data.load_to_model(model)
        found = outputs(onnx_ir.to_proto(model).SerializeToString())
    assert snapshot(folder) == before
    np.testing.assert_allclose(found, outputs(projected().SerializeToString()), atol=1e-5)
    (folder / "weights.bin").unlink()
    with pytest.raises(ArgumentError, match=r"weights\.bin of the onnx_ir.Model 'g' does not exist"):
        stof.optimize(onnx_ir.load(folder / "m.onnx"))


def test_external_data_of_a_proto_has_to_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(projected(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    with pytest.raises(
        ArgumentError, match=r"the ModelProto 'g' has external data that is not loaded \(tensor 'weight'"
    ):
        stof.optimize(onnx.load(path, load_external_data=False))
    assert "StofAttention" in [n.op_type for n in stof.optimize(onnx.load(path), options=FAST).graph.node]


def test_large_weights_of_every_form_become_external(monkeypatch: pytest.MonkeyPatch) -> None:
    """In raw bytes, in fields of their type, in types that stay inside, and smaller than what pays."""
    monkeypatch.setattr(in_memory, "_LARGEST_WHOLE", 100)
    model = projected()
    rng = np.random.default_rng(2)
    arrays = {
        "raw": rng.standard_normal((40, 10), np.float32),
        "floats": rng.standard_normal((40, 10), np.float32),
        "integers": rng.integers(-9, 9, (300,)),
        "halves": rng.standard_normal(700).astype(np.float16),
        "small": np.arange(3),
    }
    for name, array in arrays.items():
        if name in ("raw", "small"):
            tensor = numpy_helper.from_array(array, name)
        else:
            kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
            tensor = onnx.helper.make_tensor(name, kind, array.shape, array.reshape(-1))
        model.graph.initializer.append(tensor)
        model.graph.node.append(onnx.helper.make_node("Identity", [name], [f"{name}_out"]))
        info = onnx.helper.make_tensor_value_info(f"{name}_out", tensor.data_type, array.shape)
        model.graph.output.append(info)
    before = model.SerializeToString(deterministic=True)
    found = stof.optimize(model, options=FAST)
    assert model.SerializeToString(deterministic=True) == before
    tensors = {t.name: t for t in found.graph.initializer}
    for name, array in arrays.items():
        np.testing.assert_array_equal(numpy_helper.to_array(tensors[name]), array, strict=True)


def test_messages_name_the_model_and_no_temporary_file(scratch: Path) -> None:
    broken = projected()
    broken.graph.node.append(onnx.helper.make_node("Abs", ["nowhere"], ["b"]))
    with pytest.raises(ModelError, match=r"^the ModelProto 'g': .* reads 'nowhere', which nothing writes") as caught:
        stof.optimize(broken)
    assert str(scratch) not in str(caught.value)
    with pytest.raises(ModelError, match=r"^the ModelProto '' is no ONNX model"):
        stof.optimize(onnx.ModelProto())
    assert list(scratch.iterdir()) == []


def test_a_failed_verification_returns_nothing(tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*arguments: Any) -> onnx.ModelProto:
        model = emit_scopes(*arguments)
        node = next(n for n in model.graph.node if n.op_type == "StofAttention")
        next(a for a in node.attribute if a.name == "scale").f *= 1.5
        return model

    monkeypatch.setattr("stof.attention.rewrite.emit_scopes", faulty)
    with pytest.raises(VerifyError, match="verification failed at site"):
        stof.optimize(projected(), options=stof.Options(json=tmp_path / "report.json"))
    data = json.loads((tmp_path / "report.json").read_text())
    assert (data["output"], data["verification"]["ok"]) == (None, False)
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("model", [None, 3, b"model.onnx", [projected()], projected().graph])
def test_other_kinds_are_refused(model: Any) -> None:
    with pytest.raises(ArgumentError, match=r"expected a path, an onnx.ModelProto or an onnx_ir.Model"):
        stof.optimize(model)


def test_arguments_that_say_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="name the output of a model in memory as an argument"):
        stof.optimize(projected(), options=stof.Options(output=tmp_path / "m.onnx"))
    with pytest.raises(ArgumentError, match="return_report is for models in memory"):
        stof.optimize(str(tmp_path / "m.onnx"), return_report=True)  # type: ignore[call-overload]


def test_onnx_ir_is_not_needed() -> None:
    script = """
sys.modules["onnx_ir"] = None
import onnx, stof
model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 18]> g (float[4] x) => (float[4] y) { y = Abs (x) }')
assert stof.optimize(model) is model
"""
    path = str(Path(stof.__file__).parents[1])
    subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r})\n{script}"], check=True)


TYPES = """
from typing import assert_type
import onnx, onnx_ir, stof
from stof.report import Report

proto, ir = onnx.ModelProto(), onnx_ir.load("m.onnx")
assert_type(stof.optimize(proto), onnx.ModelProto)
assert_type(stof.optimize(ir, options=stof.Options()), onnx_ir.Model)
assert_type(stof.optimize(proto, return_report=True), tuple[onnx.ModelProto, Report])
assert_type(stof.optimize(ir, return_report=True), tuple[onnx_ir.Model, Report])
assert_type(stof.optimize(proto, "m.onnx"), Report)
assert_type(stof.optimize("m.onnx"), Report)
assert_type(stof.optimize("m.onnx", "n.onnx", stof.Options()), Report)
assert_type(stof.optimize(proto), Report)  # wrong
stof.optimize(3)  # wrong
"""


@pytest.mark.slow
def test_type_checkers_know_what_comes_back(tmp_path: Path) -> None:
    api = pytest.importorskip("mypy.api")
    path = tmp_path / "program.py"
    path.write_text(TYPES)
    root = Path(__file__).resolve().parents[2]
    words, _, _ = api.run(
        [str(path), "--config-file", str(root / "pyproject.toml"), "--cache-dir", str(root / ".mypy_cache")]
    )
    wrong = [i for i, line in enumerate(TYPES.splitlines(), 1) if line.endswith("# wrong")]
    assert [int(line.split(":")[1]) for line in words.splitlines() if ": error:" in line] == wrong, words
