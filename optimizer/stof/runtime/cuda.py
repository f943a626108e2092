# SPDX-License-Identifier: Apache-2.0
"""Operators of the library on tensors in device memory, without a runtime: for benchmarks and tests on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stof.runtime.library import DTYPES, ERROR_SIZE, LibraryError, Op, Tensor, call, library, tensor_of

_NAMES_SIZE = 4096


@dataclass(frozen=True)
class DeviceTensor:
    """A dense row-major tensor in device memory. ``dtype`` is NumPy's name of the type, or ``bfloat16``."""

    address: int
    dtype: str
    shape: tuple[int, ...]

    def _view(self) -> Tensor:
        if self.dtype not in DTYPES or len(self.shape) > 8:
            raise ValueError(f"the library does not read {self.dtype} of rank {len(self.shape)}")
        return Tensor(
            self.address or None, DTYPES[self.dtype], len(self.shape), (ctypes.c_int64 * 8)(*self.shape)
        )  # fmt: skip


class CudaOp(Op):
    """An operator of the library for the current device."""

    def __init__(
        self,
        op_type: str,
        attributes: Mapping[str, int | float | str | Sequence[int]],
        inputs: int,
        constants: Mapping[int, np.ndarray] | None = None,
    ) -> None:
        """``constants`` are the inputs, by number, that never change; a mask's tables have to be among them."""
        super().__init__(op_type, attributes)
        self._inputs = inputs
        self._constants = {i: np.ascontiguousarray(a) for i, a in (constants or {}).items()}
        tensors = (Tensor * max(1, inputs))()
        for i, array in self._constants.items():
            tensors[i] = tensor_of(array)
        call("stof_op_prepare", self._handle, tensors, inputs)

    def bind(
        self,
        inputs: Sequence[DeviceTensor],
        outputs: Sequence[DeviceTensor],
        stream: int,
        workspace: DeviceTensor | None = None,
    ) -> Callable[[], None]:
        """A function that queues the operator on ``stream``; ``inputs`` are those that are no constants, in their order.

        The tensors have to outlive what the function queues, and the function must not outlive this object's owner's use of
        them. Raises LibraryError when the library refuses the call.
        """
        varying = iter(inputs)
        tensors = (Tensor * max(1, self._inputs))()
        for i in range(self._inputs):
            constant = self._constants.get(i)
            tensors[i] = next(varying)._view() if constant is None else tensor_of(constant)
        results = (Tensor * max(1, len(outputs)))(*[t._view() for t in outputs])
        size = 0
        if workspace is not None:
            size = int(np.prod(workspace.shape)) * np.dtype(workspace.dtype).itemsize
        address = ctypes.c_void_p(workspace.address if workspace is not None else None)
        error = ctypes.create_string_buffer(ERROR_SIZE)
        function = library().stof_op_run_cuda
        arguments = (
            self._handle, tensors, ctypes.c_int(self._inputs), results, ctypes.c_int(len(outputs)),
            address, ctypes.c_size_t(size), ctypes.c_void_p(stream), error, ctypes.c_size_t(ERROR_SIZE),
        )  # fmt: skip

        def run() -> None:
            if function(*arguments) != 0:
                raise LibraryError(error.value.decode(errors="replace"))

        return run

    def time(
        self, tensors: Sequence[tuple[str, tuple[int, ...]]], arrays: Sequence[np.ndarray], seconds: float
    ) -> float:
        """Microseconds of one run on the current device: the median of replays of a captured graph for ``seconds``.

        The first inputs are drawn at random, by type and shape; the others are the arrays.

        Raises:
            LibraryError: when the library refuses the call.
        """
        kept = [np.ascontiguousarray(a) for a in arrays]
        operands = [DeviceTensor(0, dtype, shape)._view() for dtype, shape in tensors] + [tensor_of(a) for a in kept]
        microseconds = ctypes.c_double()
        call(
            "stof_op_time_cuda", self._handle, (Tensor * len(operands))(*operands), len(operands), 1,
            ctypes.c_double(seconds), ctypes.byref(microseconds),
        )  # fmt: skip
        return microseconds.value


@dataclass(frozen=True)
class DeviceInfo:
    """The current CUDA device; ``capability`` is 10 × major + minor."""

    name: str
    capability: int


def device_info() -> DeviceInfo:
    """What the CUDA device of this thread is.

    Raises:
        LibraryError: without a device, a driver or CUDA kernels in the library.
    """
    name = ctypes.create_string_buffer(256)
    capability = ctypes.c_int32()
    call("stof_cuda_device", name, ctypes.c_size_t(256), ctypes.byref(capability))
    return DeviceInfo(name.value.decode(errors="replace"), capability.value)


def kernel_names(head_size: int, dtype: int) -> list[str]:
    """The attention kernels of the device for a head size and an ONNX element type; empty where there is no choice."""
    names = ctypes.create_string_buffer(_NAMES_SIZE)
    call("stof_cuda_kernels", ctypes.c_int64(head_size), ctypes.c_int32(dtype), names, ctypes.c_size_t(_NAMES_SIZE))
    return names.value.decode().split()
