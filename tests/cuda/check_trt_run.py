# SPDX-License-Identifier: Apache-2.0
"""What ``stof-trt run`` does on a GPU besides TensorRT's own part: memory, copies, streams, times, by CUDA's real packages.

Usage: check_trt_run.py BACKEND.., of ``cuda-bindings`` and ``pycuda``. TensorRT is a stand-in whose engine copies its input to
its output on the stream that it is given.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tensorrt"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "optimizer"))
import fakes
import numpy as np
import onnx
from onnx import TensorProto, helper

from stof.tensorrt import cli, device, run
from stof.tensorrt.module import TensorrtError

_LARGE = 1 << 26  # bytes


def free_memory() -> int:
    """Bytes of the current device that nobody holds."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    if ctypes.CDLL("libcuda.so.1").cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) != 0:
        raise SystemExit("cuMemGetInfo failed")
    return free.value


def copies_and_times(name: str) -> None:
    """Arrays of many types and sizes there and back, points in time, and nothing left behind."""
    rng = np.random.default_rng(0)
    with device.open_device(name) as first:
        assert first.name == name
        first.allocate(1)
        before = free_memory()
        with device.open_device(name) as found:
            for dtype in (np.float16, np.float32, np.int32, np.int64, np.bool_):
                for shape in ((), (0, 3), (1,), (3, 5), (7, 1001, 13)):
                    array = np.asarray(rng.integers(0, 2, shape), dtype)
                    back = np.asarray(1 - array.astype(np.int8), dtype)  # all different
                    address = found.allocate(array.nbytes)
                    assert address % 256 == 0
                    found.upload(address, array)
                    found.download(back, address)
                    found.wait()
                    assert np.array_equal(array, back), (dtype, shape)
            large = rng.integers(0, 256, _LARGE, np.uint8)
            address, back = found.allocate(_LARGE), np.zeros_like(large)
            begin = found.mark()
            found.upload(address, large)
            found.download(back, address)
            end = found.mark()
            found.wait()
            assert np.array_equal(large, back)
            milliseconds = found.elapsed(begin, end)
            assert 1 < milliseconds < 1000, milliseconds  # 128 MiB over PCIe
            assert free_memory() <= before - _LARGE
        assert free_memory() >= before - (1 << 21), "memory was not freed"
    print(f"{name}: copies and times, {2 * _LARGE / milliseconds / 1e6:.1f} GB/s")


def standing_in(factor: int) -> fakes.TensorRT:
    """A TensorRT whose engine copies ``x`` to ``y`` on the device, ``factor`` 1, or leaves ``y`` alone, 0."""
    found = fakes.TensorRT()
    create = found.engine.create_execution_context
    driver = ctypes.CDLL("libcuda.so.1")

    def make() -> Any:
        context = create()

        def execute(stream: int) -> bool:
            found.runs += 1
            size = 4 * int(np.prod(context.shape)) * factor
            x, y = (ctypes.c_uint64(context.addresses[n]) for n in ("x", "y"))
            return int(driver.cuMemcpyDtoDAsync_v2(y, x, ctypes.c_size_t(size), ctypes.c_void_p(stream))) == 0

        context.execute_async_v3 = execute  # type: ignore[method-assign]
        return context

    found.engine.create_execution_context = make  # type: ignore[method-assign]
    return found


def the_command(name: str, folder: Path) -> None:
    """``stof-trt run`` from its arguments to its exit status."""
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["B", 3]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [x], [y])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), str(folder / "m.onnx")
    )
    (folder / "m.plan").write_bytes(b"engine")
    arguments = ["run", str(folder / "m.plan"), "--onnx", str(folder / "m.onnx"), "--seconds", "0.2"]
    other = next(n for n in device.BACKENDS if n != name)
    hidden = {"cuda-bindings": "cuda", "pycuda": "pycuda"}[other]
    imported = device._import
    device._import = lambda module: None if module.split(".")[0] == hidden else imported(module)
    try:
        for factor, wanted in ((1, 0), (0, 2)):
            found = standing_in(factor)
            run.find = lambda module, found=found: found
            run.deserialize = lambda trt, data, messages, embedded, found=found: (None, found.engine)
            status = cli.main([*arguments, "--shape", "x:8x3"])
            assert status == wanted, (status, wanted)
            assert found.runs > 10
    finally:
        device._import = imported
    print(f"{name}: stof-trt run")


def main(names: list[str]) -> int:
    """Status 0: all that was asked for is right."""
    for name in names:
        try:
            copies_and_times(name)
        except TensorrtError as error:
            print(f"{name}: {error}")
            return 1
        with tempfile.TemporaryDirectory() as folder:
            the_command(name, Path(folder))
    return 0 if names else 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
