# SPDX-License-Identifier: Apache-2.0
"""``stof-trt`` as far as it goes without TensorRT: arguments, shapes, what is missing, engine files, Triton."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import onnx
import pytest
from onnx import TensorProto

from stof.errors import ArgumentError
from stof.tensorrt import load_plugins, module
from stof.tensorrt.cli import main
from stof.tensorrt.inspect import Layer, parse_layers, read_recorded_layers
from stof.tensorrt.module import TensorrtError
from stof.tensorrt.selftest import model_of, problems
from stof.tensorrt.shapes import Ranges, parse_shapes


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No TensorRT, and no plugin library."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in module.MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delenv("STOF_TRT_LIBRARY", raising=False)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plugin library, as far as its path goes, with one that registers itself with TensorRT 10."""
    path = tmp_path / "libraries" / "libstof_trt.so"
    path.parent.mkdir()
    path.write_bytes(b"plugins")
    path.with_name("libstof_trt_autoreg10.so").write_bytes(b"registers")
    monkeypatch.setenv("STOF_TRT_LIBRARY", str(path))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with one operator of stof's."""
    path = tmp_path / "model.onnx"
    onnx.save(model_of(next(problems())[1]), str(path))
    return path


def test_plugin_path(library: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["--plugin-path"]) == 0
    assert capsys.readouterr().out.strip() == str(library)
    monkeypatch.setenv("STOF_TRT_LIBRARY", "/none.so")
    assert main(["--plugin-path"]) == 1
    assert "STOF_TRT_LIBRARY is '/none.so', expected a file that exists" in capsys.readouterr().err


@pytest.mark.usefixtures("missing")
def test_nothing_is_installed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--plugin-path"]) == 1
    assert (
        "libstof_trt.so is not installed; in stof's source folder: CMAKE_ARGS=-DSTOF_TENSORRT=ON pip install ."
        in capsys.readouterr().err
    )
    for arguments in (["build", str(model)], ["selftest"], ["run", str(model)]):
        assert main(arguments) == 1
        assert "neither tensorrt nor tensorrt_rtx is installed: pip install tensorrt" in capsys.readouterr().err
    assert main(["build", str(model), "--tensorrt", "tensorrt_rtx"]) == 1
    assert "tensorrt_rtx is not installed" in capsys.readouterr().err
    assert not model.with_suffix(".plan").exists()


def test_a_module_that_does_not_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tensorrt.py").write_text("raise OSError('libnvinfer.so.10: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    with pytest.raises(TensorrtError, match=r"tensorrt is installed but does not load: libnvinfer.so.10"):
        module.find("tensorrt")


def test_a_missing_name_of_the_library_is_told_before_it_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("tensorrt_rtx_libs", "tensorrt_rtx_bindings"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "tensorrt_rtx_libs" / "libtensorrt_rtx.so.1").write_bytes(b"")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TensorrtError, match=r"no libtensorrt_rtx.so, .*: ln -s libtensorrt_rtx.so.1 "):
        module.find("tensorrt_rtx_bindings")
    (tmp_path / "tensorrt_rtx_libs" / "libtensorrt_rtx.so").symlink_to("libtensorrt_rtx.so.1")
    assert module.find("tensorrt_rtx_bindings").__name__ == "tensorrt_rtx_bindings"
    for name in ("tensorrt_rtx_libs", "tensorrt_rtx_bindings"):
        del sys.modules[name]


class Registry:
    """A plugin registry that counts what it loads, and what that registers."""

    def __init__(self, registers: bool = True) -> None:
        self.registers = registers
        self.loaded: list[str] = []

    def load_library(self, path: str) -> object:
        self.loaded.append(path)
        return object()

    def get_creator(self, name: str, version: str, namespace: str) -> object:
        assert (name, version, namespace) == ("StofAttention", "1", "stof")
        return object() if self.loaded and self.registers else None


def fake(name: str, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of TensorRT with a registry."""
    found = ModuleType(name)
    found.__dict__.update(__version__="11.0", get_plugin_registry=lambda: registry)
    monkeypatch.setitem(sys.modules, name, found)
    return found


def test_plugins_are_loaded_once(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    trt = fake("fake_tensorrt_one", registry, monkeypatch)
    assert load_plugins(trt) == load_plugins(trt) == library
    assert registry.loaded == [str(library)]
    monkeypatch.delenv("STOF_TRT_LIBRARY")
    assert load_plugins(trt) is None  # known already, from wherever


@pytest.mark.usefixtures("library")
def test_a_library_without_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    trt = fake("fake_tensorrt_two", Registry(registers=False), monkeypatch)
    with pytest.raises(TensorrtError, match="registers no plugin StofAttention version 1"):
        load_plugins(trt)


def test_shapes() -> None:
    assert parse_shapes("a:1x2x3,scope:b:7", "--opt") == {"a": (1, 2, 3), "scope:b": (7,)}
    assert parse_shapes("s:scalar", "--opt") == {"s": ()}
    for text in ("a", "a:", ":1", "a:1xb", "a:-1", "a:1x2,,"):
        with pytest.raises(ArgumentError, match="expected NAME:SIZExSIZE"):
            parse_shapes(text, "--opt")
    with pytest.raises(ArgumentError, match="--opt names 'a' twice"):
        parse_shapes("a:1,a:2", "--opt")


def test_ranges_complete_each_other() -> None:
    sizes = (-1, 4)
    assert Ranges({}, {"x": (2, 4)}, {}).of("x", sizes) == ((2, 4),) * 3
    assert Ranges({"x": (1, 4)}, {}, {"x": (8, 4)}).of("x", sizes) == ((1, 4), (8, 4), (8, 4))
    assert Ranges({"x": (1, 4)}, {"x": (2, 4)}, {}).of("x", sizes) == ((1, 4), (2, 4), (2, 4))
    for least, usual, most, words in [
        ((1, 4), (9, 4), (8, 4), "do not rise"),
        ((1, 5), (1, 5), (8, 5), "the model has -1x4"),
        ((1,), (1, 4), (8, 4), "--min gives input 'x' the shape 1; the model has -1x4"),
    ]:
        with pytest.raises(ArgumentError, match=words):
            Ranges({"x": least}, {"x": usual}, {"x": most}).of("x", sizes)
    with pytest.raises(ArgumentError, match="as in --opt x:1x4"):
        Ranges({}, {}, {}).of("x", sizes)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no command given, expected one of build, run, inspect, selftest, triton-repo"),
        (["make"], "invalid choice: 'make'"),
        (["build"], "the following arguments are required: model"),
        (["build", "none.onnx"], "none.onnx does not exist"),
        (["build", "{model}", "-o", "{model}"], "is the input; choose another file"),
        (["build", "{model}", "--opt", "x"], "--opt 'x': expected NAME:SIZE"),
        (["build", "{model}", "--opt", "x:1", "--opt", "x:1"], "--opt names 'x' twice"),
        (["build", "{model}", "--optimization-level", "6"], "invalid choice: 6"),
        (["inspect", "none.plan"], "the engine none.plan does not exist"),
        (["triton-repo", "{folder}", "--name", "x"], "give either --onnx MODEL or --engine FILE"),
        (["triton-repo", "{folder}", "--name", "a/b", "--onnx", "{model}"], "expected the name of a folder"),
        (["triton-repo", "{folder}", "--name", "x", "--engine", "{model}", "--cpu"], "--cpu is for --onnx"),
        (["triton-repo", "{folder}", "--name", "x", "--engine", "none.plan"], "the engine none.plan does not exist"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], words: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert main([a.format(model=model, folder=tmp_path / "repository") for a in arguments]) == 1
    assert words in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def plan(types: dict[str, str], front: bytes = b"") -> bytes:
    """An engine file as TensorRT for RTX writes it, as far as its table of plugins goes."""
    table, data = b"", b"other" + b"\0"
    for name, kind in types.items():
        text = kind.encode() + b"\0"
        table += b'  buffer={ name="%s_pluginType" size=%d offset=%d }\n' % (name.encode(), len(text), len(data))
        data += text
    return front + b"user_buffers {\n" + table + b"}\0\1\2" + data + b"\0" * 9


def test_a_plan_names_its_plugins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    types = {"layer 0/attn": "StofAttention", "nms": "EfficientNMS_TRT", "layer 1": "StofAttention"}
    wanted = tuple(Layer(n, k, k.startswith("Stof")) for n, k in types.items())
    # Somewhere else a name of the right size stands, at which the others would be no types.
    assert read_recorded_layers(plan(types, front=b"\1\2StofAttention\0\3\4")) == wanted
    assert read_recorded_layers(plan({"nms": "EfficientNMS_TRT"})) == ()
    assert read_recorded_layers(b"StofAttention\0 without a table") == ()
    path = tmp_path / "x.plan"
    path.write_bytes(plan(types))
    assert main(["inspect", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [layer["stof"] for layer in found["layers"]] == [True, False, True]
    assert not found["complete"]
    path.write_bytes(b"none")
    assert main(["inspect", str(path)]) == 3
    assert "The file by itself names no plugin layers either" in capsys.readouterr().err


def test_names_of_layers_are_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan file is read without TensorRT, and holds the names of the model that somebody else made."""
    path = tmp_path / "x\x1b.plan"
    table = plan({"layer 0\x1b[31m\nstof  gemm  fake": "StofAttention", "layer 1": "StofAttention"})
    path.write_bytes(table.replace(b"layer 1", b"layer \xff"))
    assert main(["inspect", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.isprintable() for line in lines)
    assert lines[1:] == [
        r"  stof  StofAttention  layer 0\x1b[31m\nstof  gemm  fake",
        r"  stof  StofAttention  layer \xff",
    ]
    assert main(["inspect", str(path), "--json"]) == 0
    words = capsys.readouterr().out
    assert words.replace("\n", "").isprintable()
    assert json.loads(words)["layers"][0]["name"] == "layer 0\x1b[31m\nstof  gemm  fake"
    assert main(["inspect", str(tmp_path / "none\x1b[31m")]) == 1
    assert capsys.readouterr().err.splitlines()[0].isprintable()


def test_what_tensorrt_says_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    messages = module.Messages(verbose=True)
    messages.add(1, "layer a\x1b[31m\x07:\nno kernel")
    assert capsys.readouterr().err == "layer a\\x1b[31m\\x07:\nno kernel\n"
    assert str(TensorrtError(messages.last())).isprintable()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"Layers": ["a"b"]}', "[" * 100_000])
def test_an_inspector_that_gives_no_json(text: str) -> None:
    """Names stand in its JSON as they are: quotes in one make it none."""
    with pytest.raises(TensorrtError, match="gives no JSON"):
        parse_layers(text)


@pytest.mark.parametrize("text", ["{}", '{"Layers": [1, null]}', '{"Layers": 3}'])
def test_an_inspector_that_names_no_layers(text: str) -> None:
    assert parse_layers(text) == ()


def test_the_inspectors_json() -> None:
    layers = [
        {"Name": "a", "LayerType": "PluginV3", "PluginType": "StofAttention"},
        {"Name": "b", "LayerType": "gemm"},
        "c/StofAttention",
    ]
    assert parse_layers(json.dumps({"Layers": layers})) == (
        Layer("a", "StofAttention", True),
        Layer("b", "gemm", False),
        Layer("c/StofAttention", "", True),
    )


def test_triton_onnxruntime(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = onnx.load(str(model))
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    tensor.external_data.append(onnx.StringStringEntryProto(key="location", value="w.bin"))
    weights.graph.initializer.append(tensor)
    model.with_name("w.bin").write_bytes(b"12345678")
    onnx.save(weights, str(model))
    folder = tmp_path / "repository"
    arguments = ["triton-repo", str(folder), "--name", "bert", "--onnx", str(model), "--served-at", "/models/"]
    assert main(arguments) == 0
    assert "tritonserver --model-repository=/models" in capsys.readouterr().out
    files = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert files == {"bert/config.pbtxt", "bert/1/model.onnx", "bert/1/w.bin", "bert/1/libstof_ort.so"}
    text = (folder / "bert/config.pbtxt").read_text()
    assert 'backend: "onnxruntime"' in text
    assert 'model_operations { op_library_filename: "/models/bert/1/libstof_ort.so" }' in text
    assert "KIND_GPU" in text
    assert main(arguments) == 1
    assert "bert exists; delete it" in capsys.readouterr().err
    assert main([*arguments[:3], "other", *arguments[4:], "--cpu"]) == 0
    assert "KIND_CPU" in (folder / "other/config.pbtxt").read_text()
    # Data under the library's name would be replaced by it.
    weights.graph.initializer[-1].external_data[0].value = "libstof_ort.so"
    onnx.save(weights, str(model))
    model.with_name("libstof_ort.so").write_bytes(b"12345678")
    assert main([*arguments[:3], "third", *arguments[4:]]) == 1
    assert "has external data at 'libstof_ort.so', which cannot stand beside it" in capsys.readouterr().err
    assert {p.name for p in folder.iterdir()} == {"bert", "other"}


def test_triton_tensorrt(library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine, folder = tmp_path / "x.plan", tmp_path / "repository"
    engine.write_bytes(b"engine")
    assert main(["triton-repo", str(folder), "--name", "bert", "--engine", str(engine)]) == 0
    opened = folder / "bert/1/libstof_trt_autoreg10.so"
    assert f'--backend-config=tensorrt,plugins="{opened}"' in capsys.readouterr().out
    assert (folder / "bert/1/model.plan").read_bytes() == b"engine"
    assert opened.with_name("libstof_trt.so").read_bytes() == b"plugins"
    assert str(opened) in (folder / "bert/config.pbtxt").read_text()
    assert main(["triton-repo", str(folder), "--name", "b", "--engine", str(engine), "--tensorrt-major", "11"]) == 1
    assert "libstof_trt_autoreg11.so, by which Triton finds the plugins, is not beside" in capsys.readouterr().err
    assert [p.name for p in folder.iterdir()] == ["bert"]


def test_self_test_models_are_right_in_onnx_runtime() -> None:
    """What ``selftest`` builds computes what it compares with."""
    import onnxruntime as ort

    from stof.attention.checks.reference import assert_close, reference

    for _, problem in problems():
        found = model_of(problem)
        onnx.checker.check_model(found)
        names = [i.name for i in found.graph.input]
        arrays = [a for a, n in zip(problem.inputs(), found.graph.node[0].input, strict=True) if n in names]
        session = ort.InferenceSession(found.SerializeToString(), providers=["CPUExecutionProvider"])
        assert_close(session.run(None, dict(zip(names, arrays, strict=True)))[0], reference(problem))


def test_messages_keep_what_matters() -> None:
    messages = module.Messages()
    for severity, text in [(0, "internal"), (1, "wrong\n  twice"), (2, "odd"), (3, "note")]:
        messages.add(severity, text)
    assert messages.errors == ["internal", "wrong\n  twice"]
    assert messages.warnings == ["odd"]
    assert messages.last() == "internal; wrong twice"
    assert module.is_rtx(SimpleNamespace(__name__="tensorrt_rtx"))
    assert not module.is_rtx(SimpleNamespace(__name__="tensorrt"))


def test_a_folder_called_tensorrt_is_no_tensorrt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorrt").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    assert importlib.util.find_spec("tensorrt") is not None
    with pytest.raises(TensorrtError, match="tensorrt is not installed"):
        module.find("tensorrt")
