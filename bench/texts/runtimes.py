# SPDX-License-Identifier: Apache-2.0
"""Where models of texts run: ONNX Runtime and OpenVINO on the CPU, ONNX Runtime on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from onnx import TensorProto

from bench.core.candidate import Unavailable, require
from bench.core.point import describe_failure
from bench.core.torch_buffers import TorchBuffers
from bench.gpu.baselines import onnx_runtime
from stof.bench.sessions import session

Feeds = Mapping[str, np.ndarray]
RunBatch = Callable[[Feeds], np.ndarray]
OPENVINO = "openvino"
STOF = "stof"
_ELEMENTS = {"int64": TensorProto.INT64, "float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}


class TextRuntime(Protocol):
    """Loads models."""

    def open(self, engine: str, path: Path, batches: Sequence[Feeds]) -> RunBatch:
        """Loads a model; a function that runs a batch and gives its output.

        Args:
            engine: "ort", "stof" or "openvino".
            path: of the model.
            batches: those that it will run.

        Raises:
            Unavailable: when the engine is not installed or refuses the model.
        """


@dataclass(frozen=True)
class CpuRuntime:
    """Runs models on the CPU with a number of threads."""

    threads: int

    def open(self, engine: str, path: Path, batches: Sequence[Feeds]) -> RunBatch:
        """Loads a model into one of three engines."""
        if engine == OPENVINO:
            return _open_openvino(path, batches, self.threads)
        loaded = session(str(path), self.threads, stof=engine == STOF)

        def run(feeds: Feeds) -> np.ndarray:
            found: np.ndarray = loaded.run(None, feeds)[0]
            return found

        return run


def _open_openvino(path: Path, batches: Sequence[Feeds], threads: int) -> RunBatch:
    """OpenVINO in fp32, with fixed sizes where all batches have the same."""
    ov = require("openvino")
    settings = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    shapes = {tuple(feeds["input_ids"].shape) for feeds in batches}
    try:
        core = ov.Core()
        model = core.read_model(str(path))
        if len(shapes) == 1:
            model.reshape({name: list(array.shape) for name, array in batches[0].items()})
        request = core.compile_model(model, "CPU", settings).create_infer_request()
    except Exception as error:  # OpenVINO raises types of its own, which differ by version
        raise Unavailable(describe_failure(error)) from error

    def run(feeds: Feeds) -> np.ndarray:
        request.infer(dict(feeds), share_inputs=True)
        return np.array(request.get_output_tensor(0).data)

    return run


class DeviceMemory(Protocol):
    """Buffers at addresses that do not change, and sessions that read and write them; runs are queued on one stream."""

    name: str  # as ONNX Runtime has it

    def place(self, array: np.ndarray) -> Any:
        """A buffer with these values."""

    def copy(self, source: Any, target: Any) -> None:
        """Queues a copy of a buffer into another one."""

    def read(self, buffer: Any) -> np.ndarray:
        """The values of a buffer, once everything that is queued is done."""

    def address(self, buffer: Any) -> int:
        """Where a buffer lies."""

    def session(self, path: Path, *, stof: bool, sizes: Mapping[str, int] | None = None, captures: bool = False) -> Any:
        """A session of a model, with sizes for its symbolic dimensions; ``captures``: runs replay a captured graph."""

    def run(self, session: Any, binding: Any) -> None:
        """Queues a run."""

    def wait(self) -> None:
        """Waits until everything that is queued is done."""


class CudaRuntime(TorchBuffers):
    """ONNX Runtime's CUDA provider; buffers are torch tensors, and work is queued on one stream.

    Raises:
        Unavailable: without torch, or without a GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.torch.cuda.set_stream(self.stream)
        self._options: Any = None

    def open(self, engine: str, path: Path, batches: Sequence[Feeds]) -> RunBatch:
        """Loads a model whose inputs and outputs are arrays, for what is not timed; fp32 stays fp32."""
        del batches
        loaded = onnx_runtime.session(str(path), self.stream, stof=engine == STOF, fallback=True, use_tf32="0")

        def run(feeds: Feeds) -> np.ndarray:
            found: np.ndarray = loaded.run(None, dict(feeds))[0]
            return found

        return run

    def copy(self, source: Any, target: Any) -> None:
        target.copy_(source, non_blocking=True)

    def session(self, path: Path, *, stof: bool, sizes: Mapping[str, int] | None = None, captures: bool = False) -> Any:
        return onnx_runtime.session(
            str(path), self.stream, stof=stof, fallback=True, sizes=sizes, enable_cuda_graph=str(int(captures))
        )

    def run(self, session: Any, binding: Any) -> None:
        self._options = self._options or onnx_runtime.unsynchronized_run_options()
        session.run_with_iobinding(binding, self._options)

    def wait(self) -> None:
        self.stream.synchronize()


def bind(memory: DeviceMemory, session: Any, feeds: Mapping[str, Any], output: Any) -> Any:
    """A binding of a session to buffers: inputs by name, and its first output.

    Args:
        memory: of the buffers.
        session: of a model.
        feeds: buffers that have ``shape`` and ``dtype``.
        output: likewise.
    """
    binding = session.io_binding()
    for name, buffer in feeds.items():
        binding.bind_input(name, memory.name, 0, _element(buffer), tuple(buffer.shape), memory.address(buffer))
    first = session.get_outputs()[0].name
    binding.bind_output(first, memory.name, 0, _element(output), tuple(output.shape), memory.address(output))
    return binding


def _element(buffer: Any) -> int:
    return int(_ELEMENTS[str(buffer.dtype).removeprefix("torch.")])
