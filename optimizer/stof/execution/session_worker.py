# SPDX-License-Identifier: Apache-2.0
"""The process that sessions of ONNX Runtime live in; session_process.py starts it and is its only user.

It imports little, since its start is part of a user's first run.
"""

from __future__ import annotations

import ctypes
import io
import math
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from stof.errors import explained
from stof.execution.worker.channel import Channel

if TYPE_CHECKING:
    from stof.runtime.skip_counts import SkipCounts

# The types of ONNX Runtime's tensors that ml_dtypes has and NumPy has not: the name there, and the number in
# onnx.TensorProto.DataType.
_BIT_TYPES = {
    "tensor(bfloat16)": ("bfloat16", 16),
    "tensor(float8e4m3fn)": ("float8_e4m3fn", 17),
    "tensor(float8e4m3fnuz)": ("float8_e4m3fnuz", 18),
    "tensor(float8e5m2)": ("float8_e5m2", 19),
    "tensor(float8e5m2fnuz)": ("float8_e5m2fnuz", 20),
}
# The numbers of types whose arrays a run takes and gives.
ARRAY_TYPES = frozenset(number for _, number in _BIT_TYPES.values())


@dataclass(frozen=True)
class SessionSpec:
    """What a session on the CPU provider is made of.

    Attributes:
        model: the absolute path of a file, or a serialized model.
        library: the path of stof's library, "" without it.
        optimizations: "none", "extended" or "all".
        log_severity: 3 logs errors, 4 fatal ones alone.
        threads: of an operator; 0 is the runtime's default.
        entries: of the session's configuration.
        without: optimizers that are not to run.
        optimized_path: where the optimized model is written, "" for nowhere.
        reference: onnx's own evaluator instead of ONNX Runtime.
        lean: tensors are freed at their last use, rather than kept for later ones: slower, with a lower peak of memory.
        shared_buffers: pairs of an input and an output that are one buffer in a run.
    """

    model: str | bytes
    library: str = ""
    optimizations: str = "all"
    log_severity: int = 3
    threads: int = 0
    entries: tuple[tuple[str, str], ...] = ()
    without: tuple[str, ...] = ()
    optimized_path: str = ""
    reference: bool = False
    lean: bool = False
    shared_buffers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Create:
    """Asks for a session; the answer is :class:`Created`."""

    number: int
    spec: SessionSpec


@dataclass(frozen=True)
class Run:
    """Asks for a run; the answer is the list of outputs."""

    number: int
    outputs: tuple[str, ...] | None  # None: all of them
    feeds: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Measure:
    """Asks for the times of sessions that run alternately; the answer is a list of seconds for each.

    Attributes:
        numbers: the sessions.
        feeds: the inputs of all of them.
        seconds: after which no further round begins; the warm-up counts.
        most_rounds: how many rounds there are at most.
        least_rounds: how many there are in any case.
    """

    numbers: tuple[int, ...]
    feeds: Mapping[str, np.ndarray]
    seconds: float
    most_rounds: int
    least_rounds: int


@dataclass(frozen=True)
class Version:
    """Asks for ONNX Runtime's version."""


@dataclass(frozen=True)
class TakeSkipCounts:
    """Asks for what attention skipped by score since the last such request; the answer is ``SkipCounts``, or None."""


Body: TypeAlias = "Create | Run | Measure | Version | TakeSkipCounts"


@dataclass(frozen=True)
class Request:
    """One of the above, after sessions that nobody needs any more are gone."""

    released: tuple[int, ...]
    body: Body | None


@dataclass(frozen=True)
class Created:
    """The names of a session's inputs and outputs."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Failure:
    """What the runtime raised."""

    words: str


def serve_socket(connection: int) -> None:
    """Serves requests until the other end closes.

    Args:
        connection: the descriptor of a socket.
    """
    if sys.platform != "win32":
        from stof.execution.worker.socket_channel import SocketChannel

        _serve(SocketChannel(socket.socket(fileno=connection)))


def serve_pipes() -> None:
    """Serves requests from standard input, with answers to standard output, and ends with the other end's process."""
    from stof.execution.worker.pipe_channel import PipeChannel

    incoming, outgoing = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):  # what libraries print is no message
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
    # Also within a run, in which the main thread reads nothing.
    _serve(PipeChannel(io.FileIO(incoming, "rb"), io.FileIO(outgoing, "wb"), lambda: os._exit(0)))


def _serve(channel: Channel) -> None:
    sessions: dict[int, Any] = {}
    while True:
        try:
            request = channel.receive()
        except EOFError:
            return
        assert isinstance(request, Request)
        for number in request.released:
            sessions.pop(number, None)
        try:
            answer = _answer(request.body, sessions)
        except Exception as error:  # whatever the runtime raises
            answer = Failure(explained(error) or type(error).__name__)
        del request  # and with it the memory of the inputs
        try:
            channel.send(answer)
        except ConnectionError:  # the other process has ended, in the moment before this one learns of it
            return
        del answer


def _answer(body: Body | None, sessions: dict[int, Any]) -> object:
    if isinstance(body, Create):
        session = _Evaluator(body.spec) if body.spec.reference else _Session(body.spec)
        sessions[body.number] = session
        return session.names
    if isinstance(body, Run):
        return sessions[body.number].run(body.outputs, body.feeds)
    if isinstance(body, Measure):
        return _measure(body, [sessions[number] for number in body.numbers])
    if isinstance(body, Version):
        import onnxruntime as ort

        return str(ort.__version__)
    if isinstance(body, TakeSkipCounts):
        return _take_skip_counts()
    return None


def _take_skip_counts() -> SkipCounts | None:
    """What sessions of this process skipped, which is then forgotten; None: the library does not count."""
    from stof.runtime.library import LibraryError
    from stof.runtime.skip_counts import reset_skip_counts, skip_counts

    try:
        counts = skip_counts()
        reset_skip_counts()
    except LibraryError:
        return None
    return counts


def _measure(body: Measure, sessions: Sequence[Any]) -> list[list[float]]:
    deadline = time.perf_counter() + body.seconds
    feeds = dict(body.feeds)
    for session in sessions:  # the first run allocates memory and builds block masks
        session.run(None, feeds)
    times: list[list[float]] = [[] for _ in sessions]
    for number in range(body.most_rounds):
        if number >= body.least_rounds and time.perf_counter() >= deadline:
            break
        for i in range(len(sessions)):
            turn = (i + number) % len(sessions)  # each goes first once
            start = time.perf_counter()
            sessions[turn].run(None, feeds)
            times[turn].append(time.perf_counter() - start)
    return times


class _Session:
    def __init__(self, spec: SessionSpec) -> None:
        import onnxruntime as ort

        levels = ort.GraphOptimizationLevel
        options = ort.SessionOptions()
        options.log_severity_level = spec.log_severity
        options.intra_op_num_threads = spec.threads
        options.graph_optimization_level = {
            "none": levels.ORT_DISABLE_ALL,
            "extended": levels.ORT_ENABLE_EXTENDED,
            "all": levels.ORT_ENABLE_ALL,
        }[spec.optimizations]
        if spec.lean:
            options.enable_cpu_mem_arena = False
            options.enable_mem_pattern = False
        for key, value in spec.entries:
            options.add_session_config_entry(key, value)
        if spec.library:
            options.register_custom_ops_library(spec.library)
        if spec.optimized_path:
            options.optimized_model_filepath = spec.optimized_path
        self._session = ort.InferenceSession(
            spec.model,
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=list(spec.without),
            enable_fallback=0,  # else it prints an error raw and tries again
        )
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        self.names = Created(tuple(i.name for i in inputs), tuple(o.name for o in outputs))
        self._shared = {output: name for name, output in spec.shared_buffers}
        self._has_bits = any(i.type in _BIT_TYPES for i in (*inputs, *outputs))

    def run(self, outputs: Sequence[str] | None, feeds: Mapping[str, np.ndarray]) -> list[Any]:
        if self._shared or self._has_bits:
            return self._run_bound(outputs, feeds)
        return list(self._session.run(outputs, dict(feeds)))

    def _run_bound(self, outputs: Sequence[str] | None, feeds: Mapping[str, np.ndarray]) -> list[Any]:
        """The outputs, some of which are written over copies of inputs, or of types that NumPy does not have."""
        binding = self._session.io_binding()
        buffers = set(self._shared.values())
        values = {n: _to_value(x.copy() if n in buffers else x) for n, x in feeds.items()}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        wanted = self.names.outputs if outputs is None else tuple(outputs)
        for name in dict.fromkeys((*wanted, *self._shared)):
            if name in self._shared:
                binding.bind_ortvalue_output(name, values[self._shared[name]])
            else:
                binding.bind_output(name)
        self._session.run_with_iobinding(binding)
        output_values = dict(zip(dict.fromkeys((*wanted, *self._shared)), binding.get_outputs(), strict=True))
        return [_to_array(output_values[n]) for n in wanted]


def _to_value(array: np.ndarray) -> Any:
    """ONNX Runtime's value of an array, also of a type that NumPy does not have."""
    from onnxruntime import OrtValue

    kind = dict(_BIT_TYPES.values()).get(array.dtype.name)
    if kind is None:
        return OrtValue.ortvalue_from_numpy(array)
    bits = np.ascontiguousarray(array).view(np.dtype(f"u{array.dtype.itemsize}"))
    return OrtValue.ortvalue_from_numpy_with_onnx_type(bits, kind)


def _to_array(value: Any) -> np.ndarray:
    """A copy of a value of ONNX Runtime, whose interface gives some types as no array, or as one of their bits."""
    bit_type = _BIT_TYPES.get(value.data_type())
    if bit_type is None:
        return np.array(value.numpy())
    import ml_dtypes

    dtype = np.dtype(getattr(ml_dtypes, bit_type[0]))
    shape = tuple(value.shape())
    size = math.prod(shape) * dtype.itemsize
    raw = ctypes.string_at(value.data_ptr(), size) if size else b""
    return np.frombuffer(raw, dtype).reshape(shape).copy()


class _Evaluator:
    def __init__(self, spec: SessionSpec) -> None:
        import onnx
        from onnx.reference import ReferenceEvaluator

        model = onnx.load(spec.model) if isinstance(spec.model, str) else onnx.load_from_string(spec.model)
        self._evaluator = ReferenceEvaluator(model)
        self.names = Created(tuple(self._evaluator.input_names), tuple(self._evaluator.output_names))

    def run(self, outputs: Sequence[str] | None, feeds: Mapping[str, np.ndarray]) -> list[Any]:
        return [np.asarray(x) for x in self._evaluator.run(outputs, dict(feeds))]
