# SPDX-License-Identifier: Apache-2.0
"""Device memory, a stream and a clock, by pycuda or by cuda-python, whichever is installed."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any

import numpy as np

from stof.tensorrt.module import TensorrtError

BACKENDS = ("cuda-bindings", "pycuda")


class Device(ABC):
    """The first GPU: addresses and streams are plain integers, as TensorRT's Python module takes them."""

    name: str
    stream: int

    @abstractmethod
    def allocate(self, size: int) -> int:
        """Memory of ``size`` bytes, freed by ``close``."""

    @abstractmethod
    def upload(self, address: int, array: np.ndarray) -> None:
        """Queues a copy to the device. The array has to stay as it is until ``wait``."""

    @abstractmethod
    def download(self, array: np.ndarray, address: int) -> None:
        """Queues a copy from the device; the array is valid after ``wait``."""

    @abstractmethod
    def wait(self) -> None:
        """Waits for everything that was queued."""

    @abstractmethod
    def mark(self) -> Any:
        """Queues a point in time."""

    @abstractmethod
    def elapsed(self, first: Any, second: Any) -> float:
        """Milliseconds between two points in time, after ``wait``."""

    @abstractmethod
    def close(self) -> None:
        """Frees what was allocated."""

    def __enter__(self) -> Device:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class CudaBindings(Device):
    """By the runtime API of cuda-python (package cuda-bindings)."""

    name = "cuda-bindings"

    def __init__(self, cudart: Any) -> None:
        self._cudart = cudart
        self._memory: list[int] = []
        self._call("cudaSetDevice", 0)
        self.stream = int(self._call("cudaStreamCreate"))

    def _call(self, function: str, *arguments: Any) -> Any:
        status, *results = getattr(self._cudart, function)(*arguments)
        if int(status) != 0:
            _, text = self._cudart.cudaGetErrorString(status)
            words = text.decode() if isinstance(text, bytes) else text
            raise TensorrtError(
                f"{function} failed: {words}; is there a GPU and a driver that is new enough (nvidia-smi)?"
            )
        return results[0] if results else None

    def allocate(self, size: int) -> int:
        address = int(self._call("cudaMalloc", max(1, size)))
        self._memory.append(address)
        return address

    def upload(self, address: int, array: np.ndarray) -> None:
        kind = self._cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("cudaMemcpyAsync", address, array.ctypes.data, array.nbytes, kind, self.stream)

    def download(self, array: np.ndarray, address: int) -> None:
        kind = self._cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._call("cudaMemcpyAsync", array.ctypes.data, address, array.nbytes, kind, self.stream)

    def wait(self) -> None:
        self._call("cudaStreamSynchronize", self.stream)

    def mark(self) -> Any:
        event = self._call("cudaEventCreate")
        self._call("cudaEventRecord", event, self.stream)
        return event

    def elapsed(self, first: Any, second: Any) -> float:
        return float(self._call("cudaEventElapsedTime", first, second))

    def close(self) -> None:
        for address in self._memory:
            self._call("cudaFree", address)
        self._memory.clear()
        self._call("cudaStreamDestroy", self.stream)


class PyCuda(Device):
    """By pycuda's driver API, in the device's primary context, which TensorRT uses."""

    name = "pycuda"

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        try:
            driver.init()
            self._context = driver.Device(0).retain_primary_context()
            self._context.push()
        except driver.Error as error:
            raise TensorrtError(
                f"pycuda finds no GPU: {error}; is there one, with a driver that is new enough (nvidia-smi)?"
            ) from error
        self._memory: list[Any] = []
        self._stream = driver.Stream()
        self.stream = int(self._stream.handle)

    def allocate(self, size: int) -> int:
        memory = self._driver.mem_alloc(max(1, size))
        self._memory.append(memory)
        return int(memory)

    def upload(self, address: int, array: np.ndarray) -> None:
        if array.nbytes:
            self._driver.memcpy_htod_async(address, array, self._stream)

    def download(self, array: np.ndarray, address: int) -> None:
        if array.nbytes:
            self._driver.memcpy_dtoh_async(array, address, self._stream)

    def wait(self) -> None:
        self._stream.synchronize()

    def mark(self) -> Any:
        event = self._driver.Event()
        event.record(self._stream)
        return event

    def elapsed(self, first: Any, second: Any) -> float:
        return float(second.time_since(first))

    def close(self) -> None:
        for memory in self._memory:
            memory.free()
        self._memory.clear()
        self._context.pop()


def open_device(backend: str | None = None) -> Device:
    """The first GPU, by the first back end that imports, or by the one that is asked for.

    Raises:
        TensorrtError: when none imports, or when there is no GPU.
    """
    if backend in (None, "cuda-bindings"):
        for name in ("cuda.bindings.runtime", "cuda.cudart"):  # the second one is that of versions before 12.6
            if (module := _import(name)) is not None:
                return CudaBindings(module)
    if backend in (None, "pycuda") and (module := _import("pycuda.driver")) is not None:
        return PyCuda(module)
    wanted = "neither cuda-python nor pycuda is" if backend is None else f"{backend} is not"
    raise TensorrtError(
        f"{wanted} installed, which running an engine needs: pip install cuda-python, or pip install pycuda"
    )


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError):
        return None
