# SPDX-License-Identifier: Apache-2.0
"""``stof-trt run`` over stand-ins for CUDA's packages and TensorRT, and for what it compares a real ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from stof.errors import ArgumentError, ModelError
from stof.tensorrt import device, run
from stof.tensorrt.cli import main
from stof.tensorrt.module import TensorrtError
from stof.tensorrt.run import RunOptions, difference, draw, run_engine


def imports(**found: object) -> Callable[[str], object]:
    """What ``device`` imports: modules by name, others are not installed."""
    return lambda name: found.get(name.replace(".", "_"))


@pytest.mark.parametrize("name", device.BACKENDS)
def test_both_back_ends_copy_time_and_free(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cudart, driver = fakes.Cudart(), fakes.Driver()
    monkeypatch.setattr(device, "_import", imports(cuda_bindings_runtime=cudart, pycuda_driver=driver))
    with device.open_device(name) as found:
        assert (found.name, found.stream) == (name, 77)
        array = np.random.default_rng(0).standard_normal((3, 5))
        address, back = found.allocate(array.nbytes), np.zeros_like(array)
        found.allocate(0)
        found.upload(address, array)
        found.download(back, address)
        found.wait()
        assert np.array_equal(array, back)
        assert found.elapsed(found.mark(), found.mark()) == 1.5
        assert len(cudart.live) + driver.live == 2
    assert (len(cudart.live), cudart.streams, driver.live, driver.contexts) == (0, 0, 0, 0)


def test_the_first_back_end_that_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_import", imports(pycuda_driver=fakes.Driver()))
    assert device.open_device().name == "pycuda"
    monkeypatch.setattr(device, "_import", imports(pycuda_driver=fakes.Driver(), cuda_cudart=fakes.Cudart()))
    assert device.open_device().name == "cuda-bindings"
    monkeypatch.setattr(device, "_import", imports())
    with pytest.raises(TensorrtError, match=r"neither cuda-python nor pycuda is installed.*pip install cuda-python"):
        device.open_device()
    with pytest.raises(TensorrtError, match="pycuda is not installed"):
        device.open_device("pycuda")


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_import", imports(cuda_bindings_runtime=fakes.Cudart("cudaSetDevice")))
    with pytest.raises(TensorrtError, match=r"cudaSetDevice failed: no driver; is there a GPU"):
        device.open_device()
    monkeypatch.setattr(device, "_import", imports(pycuda_driver=fakes.Driver(fails=True)))
    with pytest.raises(TensorrtError, match="pycuda finds no GPU: no driver"):
        device.open_device()


@pytest.fixture(params=device.BACKENDS)
def tensorrt(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> fakes.TensorRT:
    """A TensorRT that loads every engine file, and one of the two back ends."""
    found = fakes.TensorRT()
    modules: dict[str, Any] = {"cuda-bindings": {"cuda_bindings_runtime": fakes.Cudart()}}
    modules["pycuda"] = {"pycuda_driver": fakes.Driver()}
    monkeypatch.setattr(device, "_import", imports(**modules[request.param]))
    monkeypatch.setattr(run, "find", lambda module: found)
    monkeypatch.setattr(run, "deserialize", lambda trt, data, messages, embedded: (None, trt.engine))
    return found


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """An engine file, and a model that doubles its input."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", 3])
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"], "twice")], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.save(model, str(tmp_path / "model.onnx"))
    (tmp_path / "model.plan").write_bytes(b"engine")
    return tmp_path / "model.plan", tmp_path / "model.onnx"


def test_an_engine_runs_and_compares(tensorrt: fakes.TensorRT, files: tuple[Path, Path]) -> None:
    report = run_engine(files[0], RunOptions(onnx=files[1], seconds=0.05))
    assert report.ok
    assert report.shapes == (("x", (2, 3)),)
    assert len(report.milliseconds) == tensorrt.runs - 1 - 5
    assert set(report.milliseconds) == {1.5}
    assert "median 1.500 ms" in report.to_text()
    assert "ok     y: largest difference 0.00e+00" in report.to_text()


def test_a_wrong_engine_is_told(
    tensorrt: fakes.TensorRT, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    tensorrt.factor = 2.2
    assert main(["run", str(files[0]), "--onnx", str(files[1]), "--seconds", "0", "--shape", "x:4x3"]) == 2
    assert "DIFFERS y: largest difference" in capsys.readouterr().out
    assert main(["run", str(files[0]), "--onnx", str(files[1]), "--seconds", "0", "--tolerance", "0.2"]) == 0
    tensorrt.factor = float("nan")
    assert main(["run", str(files[0]), "--onnx", str(files[1]), "--seconds", "0"]) == 2
    assert "elements are NaN or infinite in one of them alone" in capsys.readouterr().out


def test_inputs_and_shapes_that_do_not_fit(tensorrt: fakes.TensorRT, files: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"input 'x' of .* takes shapes \(1, 3\) to \(8, 3\), found \(9, 3\)"):
        run_engine(files[0], RunOptions(shapes={"x": (9, 3)}))
    with pytest.raises(ArgumentError, match="--shape names 'z', which is no input"):
        run_engine(files[0], RunOptions(shapes={"z": (1, 3)}))
    np.savez(tmp_path / "in.npz", z=np.zeros(3))
    with pytest.raises(ArgumentError, match="has input 'x', which is not given"):
        run_engine(files[0], RunOptions(inputs=tmp_path / "in.npz"))
    np.savez(tmp_path / "in.npz", x=np.full((3, 3), 7, np.float32))
    assert run_engine(files[0], RunOptions(inputs=tmp_path / "in.npz", onnx=files[1], seconds=0)).ok
    np.savez(tmp_path / "in.npz", x=np.zeros((3, 4)))
    with pytest.raises(ArgumentError, match="cannot have shape"):
        run_engine(files[0], RunOptions(inputs=tmp_path / "in.npz"))
    (tmp_path / "in.npz").write_bytes(b"no archive")
    with pytest.raises(ArgumentError, match=r"--inputs .* cannot be read"):
        run_engine(files[0], RunOptions(inputs=tmp_path / "in.npz"))
    with pytest.raises(ArgumentError, match="does not exist"):
        run_engine(tmp_path / "none.plan")


def test_an_engine_of_another_model(tensorrt: fakes.TensorRT, files: tuple[Path, Path]) -> None:
    model = onnx.load(str(files[1]))
    model.graph.node[0].output[0] = model.graph.output[0].name = "z"
    onnx.save(model, str(files[1]))
    with pytest.raises(ModelError, match=r"the engine has output 'y', which .* has not"):
        run_engine(files[0], RunOptions(onnx=files[1], seconds=0))


def test_inputs_are_drawn_below_the_tables_size(narrow: Callable[[str], Path]) -> None:
    path = narrow("modernbert.dynamo.sdpa")
    types = {"input_ids": np.dtype(np.int64), "attention_mask": np.dtype(np.int64)}
    shapes = dict.fromkeys(types, (2, 40))
    drawn = draw(types, shapes, RunOptions(onnx=path))
    assert 2 < drawn["input_ids"].max() < 96
    found = draw(types, shapes, RunOptions())
    assert found["input_ids"].max() == 1
    assert found["attention_mask"].sum() == 70
    assert found["attention_mask"][0].all()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_differences(dtype: str) -> None:
    wanted = np.array([1.0, -4.0, np.inf], dtype)
    assert difference("y", wanted.copy(), wanted, None).ok
    far = wanted + np.array([0.2, 0, 0], dtype)
    assert not difference("y", far, wanted, None).ok
    assert difference("y", far, wanted, 0.1).ok
    assert not difference("y", wanted[:2], wanted, None).ok
    assert not difference("y", np.array([1.0, np.nan, np.inf], dtype), wanted, None).ok
    assert not difference("y", np.array([1, 2]), np.array([1, 3]), None).ok
