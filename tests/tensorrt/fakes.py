# SPDX-License-Identifier: Apache-2.0
"""Stand-ins over host memory for what needs a GPU: CUDA's two Python packages, and a TensorRT that runs an engine."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np


def copy(target: int, source: int, size: int) -> None:
    """Bytes from one address to another."""
    ctypes.memmove(target, source, size)


class Cudart:
    """cuda.bindings.runtime: functions give a status and results."""

    class cudaMemcpyKind:
        cudaMemcpyHostToDevice = 1
        cudaMemcpyDeviceToHost = 2

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.live: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.clock = 0.0
        self.streams = 0

    def __getattr__(self, name: str) -> Any:
        if name == self.fails:
            return lambda *_: (35,)
        if name in ("cudaSetDevice", "cudaStreamSynchronize"):
            return lambda *_: (0,)
        raise AttributeError(name)

    def cudaGetErrorString(self, status: int) -> tuple[int, bytes]:
        return 0, b"no driver"

    def cudaStreamCreate(self) -> tuple[int, int]:
        self.streams += 1
        return 0, 77

    def cudaStreamDestroy(self, stream: int) -> tuple[int]:
        self.streams -= 1
        return (0,)

    def cudaMalloc(self, size: int) -> tuple[int, int]:
        memory = ctypes.create_string_buffer(size)
        self.live[ctypes.addressof(memory)] = memory
        return 0, ctypes.addressof(memory)

    def cudaFree(self, address: int) -> tuple[int]:
        del self.live[address]
        return (0,)

    def cudaMemcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int) -> tuple[int]:
        assert stream == 77
        assert (target if kind == 1 else source) in self.live
        copy(target, source, size)
        return (0,)

    def cudaEventCreate(self) -> tuple[int, list[float]]:
        return 0, []

    def cudaEventRecord(self, event: list[float], stream: int) -> tuple[int]:
        self.clock += 1.5
        event.append(self.clock)
        return (0,)

    def cudaEventElapsedTime(self, first: list[float], second: list[float]) -> tuple[int, float]:
        return 0, second[0] - first[0]


class Driver:
    """pycuda.driver."""

    class Error(Exception):
        pass

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.live = 0
        self.contexts = 0
        self.clock = 0.0
        outer = self

        class Memory:
            def __init__(self, size: int) -> None:
                self.memory = ctypes.create_string_buffer(size)
                outer.live += 1

            def __int__(self) -> int:
                return ctypes.addressof(self.memory)

            def free(self) -> None:
                outer.live -= 1

        class Stream:
            handle = 77

            def synchronize(self) -> None:
                pass

        class Event:
            at = 0.0

            def record(self, stream: Stream) -> None:
                assert isinstance(stream, Stream)
                outer.clock += 1.5
                self.at = outer.clock

            def time_since(self, other: Event) -> float:
                return self.at - other.at

        self.mem_alloc, self.Stream, self.Event = Memory, Stream, Event

    def init(self) -> None:
        if self.fails:
            raise self.Error("no driver")

    def Device(self, index: int) -> Driver:
        assert index == 0
        return self

    def retain_primary_context(self) -> Driver:
        return self

    def push(self) -> None:
        self.contexts += 1

    def pop(self) -> None:
        self.contexts -= 1

    def memcpy_htod_async(self, address: int, array: np.ndarray, stream: Any) -> None:
        copy(address, array.ctypes.data, array.nbytes)

    def memcpy_dtoh_async(self, array: np.ndarray, address: int, stream: Any) -> None:
        copy(array.ctypes.data, address, array.nbytes)


class TensorRT:
    """The parts of TensorRT that run an engine; this one doubles ``x`` [-1, 3] fp32 into ``y``."""

    __name__ = "tensorrt"
    __version__ = "0"

    class TensorIOMode:
        INPUT, OUTPUT = "input", "output"

    class DataType:
        FLOAT, BF16 = "float", "bf16"

    @staticmethod
    def nptype(kind: str) -> type:
        assert kind == "float"
        return np.float32

    def __init__(self, factor: float = 2.0) -> None:
        self.factor = factor
        self.runs = 0
        outer = self

        class Context:
            shape = (1, 3)

            def __init__(self) -> None:
                self.addresses: dict[str, int] = {}

            def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
                self.shape = shape
                return name == "x" and shape[1:] == (3,)

            def infer_shapes(self) -> list[str]:
                return []

            def get_tensor_shape(self, name: str) -> tuple[int, ...]:
                return self.shape

            def set_tensor_address(self, name: str, address: int) -> None:
                self.addresses[name] = address

            def execute_async_v3(self, stream: int) -> bool:
                assert stream == 77
                outer.runs += 1
                size = int(np.prod(self.shape))
                x, y = (
                    np.ctypeslib.as_array((ctypes.c_float * size).from_address(self.addresses[n])) for n in ("x", "y")
                )
                y[:] = outer.factor * x
                return True

        class Engine:
            num_io_tensors = 2

            def get_tensor_name(self, i: int) -> str:
                return "xy"[i]

            def get_tensor_mode(self, name: str) -> str:
                return "input" if name == "x" else "output"

            def get_tensor_dtype(self, name: str) -> str:
                return "float"

            def get_tensor_shape(self, name: str) -> tuple[int, ...]:
                return (-1, 3)

            def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
                return [(1, 3), (2, 3), (8, 3)]

            def create_execution_context(self) -> Context:
                return Context()

        self.engine = Engine()
