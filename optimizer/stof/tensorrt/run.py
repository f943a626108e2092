# SPDX-License-Identifier: Apache-2.0
"""Running an engine: its time, and its outputs beside those of ONNX Runtime on the model that it was built from."""

from __future__ import annotations

import contextlib
import statistics
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stof.errors import ArgumentError, ModelError, shown
from stof.execution.session_process import RuntimeFailure, create_session, has_onnxruntime
from stof.execution.session_worker import SessionSpec
from stof.files import open_regular
from stof.runtime.library import LibraryError, library_path
from stof.tensorrt.device import Device, open_device
from stof.tensorrt.inspect import deserialize, read_engine
from stof.tensorrt.module import Messages, find
from stof.tensorrt.shapes import Shape

_WARM_UP = 5
_MOST_RUNS = 10_000
# Of an output's largest value, by its type: an engine and ONNX Runtime add up in other orders, over all layers.
_TOLERANCE = {"float32": 5e-3, "float16": 3e-2, "bfloat16": 8e-2}  # fp32 may be TF32 in an engine
_IDS = 2  # integers of which nobody knows the bound are drawn below it


@dataclass(frozen=True)
class RunOptions:
    """What ``stof-trt run`` takes."""

    onnx: Path | None = None
    shapes: dict[str, Shape] = field(default_factory=dict)
    inputs: Path | None = None
    seconds: float = 2.0
    tolerance: float | None = None
    seed: int = 0
    module: str | None = None
    backend: str | None = None  # "cuda-bindings" or "pycuda"
    embedded: bool = False  # the plugins are the engine's own, which is trusted as a program is
    verbose: bool = False


@dataclass(frozen=True)
class Difference:
    """One output beside ONNX Runtime's: the largest difference, and what is allowed."""

    output: str
    difference: float
    allowed: float
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether it is within what is allowed."""
        return not self.detail and self.difference <= self.allowed


@dataclass(frozen=True)
class RunReport:
    """An engine's times in milliseconds, and its outputs' differences."""

    engine: str
    device: str
    shapes: tuple[tuple[str, Shape], ...]
    milliseconds: tuple[float, ...]
    differences: tuple[Difference, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no output differs more than it may."""
        return all(d.ok for d in self.differences)

    def to_text(self) -> str:
        """For the terminal."""
        times = sorted(self.milliseconds)
        inputs = ", ".join(f"{n} {'x'.join(map(str, s)) or 'scalar'}" for n, s in self.shapes)
        lines = [f"{self.engine}: {inputs} ({self.device})"]
        if times:
            last = times[min(len(times) - 1, round(0.99 * len(times)))]
            lines.append(
                f"  median {statistics.median(times):.3f} ms, best {times[0]:.3f}, p99 {last:.3f}, {len(times)} runs"
            )
        for d in self.differences:
            words = d.detail or f"largest difference {d.difference:.2e} of {d.allowed:.2e} allowed"
            lines.append(f"  {'ok    ' if d.ok else 'DIFFERS'} {d.output}: {words}")
        if not self.differences:
            lines.append("  not compared: --onnx MODEL names what to compare with")
        return "\n".join(map(shown, lines))


def run_engine(engine: Path, options: RunOptions | None = None) -> RunReport:
    """Times an engine on the first GPU, and compares its outputs where a model is given.

    Raises:
        ArgumentError: inputs or shapes that the engine does not take.
        ModelError: an engine that TensorRT does not load or run here.
        TensorrtError: TensorRT, a CUDA package or a GPU is missing.
    """
    options = options or RunOptions()
    data = read_engine(engine)
    trt = find(options.module)
    with open_device(options.backend) as device:
        loaded = Engine(trt, data, str(engine), device, Messages(options.verbose), options.embedded)
        shapes = loaded.shapes(options.shapes)
        feeds = _read_inputs(options.inputs, loaded) if options.inputs else draw(loaded.types, shapes, options)
        loaded.set_inputs(feeds)
        outputs = loaded.run()
        times = loaded.time(options.seconds)
    differences = compare(options.onnx, feeds, outputs, options.tolerance) if options.onnx else ()
    sizes = tuple((name, tuple(a.shape)) for name, a in feeds.items())
    return RunReport(str(engine), device.name, sizes, tuple(times), differences)


class Engine:
    """A loaded engine with one context; inputs and outputs are arrays by name."""

    def __init__(
        self, trt: Any, data: bytes, name: str, device: Device, messages: Messages, embedded: bool = False
    ) -> None:
        self.trt = trt
        self.name = name
        self.device = device
        self.messages = messages
        self.runtime, self.engine = deserialize(trt, data, messages, embedded)
        if self.engine is None:
            raise ModelError(
                f"{trt.__name__} {trt.__version__} does not load {name}: {messages.last() or 'no reason given'}"
            )
        self.context = self.engine.create_execution_context()
        if self.context is None:
            raise ModelError(f"{name} gets no execution context: {messages.last()}")
        names = [self.engine.get_tensor_name(i) for i in range(self.engine.num_io_tensors)]
        self.inputs = [n for n in names if self.engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT]
        self.outputs = [n for n in names if n not in self.inputs]
        self.types = {n: self._dtype(n) for n in names}
        self._arrays: dict[str, np.ndarray] = {}
        self._sizes: dict[str, int] = {}
        self._addresses: dict[str, int] = {}

    def _dtype(self, name: str) -> np.dtype:
        kind = self.engine.get_tensor_dtype(name)
        if kind == self.trt.DataType.BF16:
            import ml_dtypes

            kind = ml_dtypes.bfloat16
        else:
            kind = self.trt.nptype(kind)
        dtype: np.dtype = np.dtype(kind)
        return dtype

    def shapes(self, stated: Mapping[str, Shape]) -> dict[str, Shape]:
        """Every input's shape: as given, or the usual one of the first profile.

        Raises:
            ArgumentError: for a name that is no input, or a shape outside of the profile.
        """
        for name in stated:
            if name not in self.inputs:
                raise ArgumentError(
                    f"--shape names {name!r}, which is no input of {self.name}: {', '.join(self.inputs)}"
                )
        shapes = {}
        for name in self.inputs:
            fixed = tuple(int(n) for n in self.engine.get_tensor_shape(name))
            least, usual, most = (tuple(int(n) for n in s) for s in self.engine.get_tensor_profile_shape(name, 0))
            shape = stated.get(name, usual if -1 in fixed else fixed)
            if (-1 in fixed and not _between(least, shape, most)) or (-1 not in fixed and shape != fixed):
                raise ArgumentError(f"input {name!r} of {self.name} takes shapes {least} to {most}, found {shape}")
            shapes[name] = shape
        return shapes

    def set_inputs(self, feeds: Mapping[str, np.ndarray]) -> None:
        """Uploads inputs, and makes room for the outputs of their shapes.

        Raises:
            ArgumentError: for inputs that are missing or that the engine does not take.
        """
        for name in self.inputs:
            if name not in feeds:
                raise ArgumentError(f"{self.name} has input {name!r}, which is not given; there are {', '.join(feeds)}")
            array = np.ascontiguousarray(feeds[name], self.types[name])
            if not self.context.set_input_shape(name, array.shape):
                raise ArgumentError(
                    f"input {name!r} of {self.name} cannot have shape {array.shape}: {self.messages.last()}"
                )
            self._place(name, array)
            self.device.upload(self._addresses[name], array)
        if missing := list(self.context.infer_shapes()):
            raise ArgumentError(f"{self.name} needs shapes of {', '.join(missing)}")
        for name in self.outputs:
            shape = tuple(int(n) for n in self.context.get_tensor_shape(name))
            if -1 in shape:
                raise ModelError(
                    f"output {name!r} of {self.name} has a shape that depends on data; run does not take such engines"
                )
            self._place(name, np.zeros(shape, self.types[name]))
        self.device.wait()

    def _place(self, name: str, array: np.ndarray) -> None:
        self._arrays[name] = array
        if self._sizes.get(name, -1) < array.nbytes:
            self._addresses[name] = self.device.allocate(array.nbytes)
            self._sizes[name] = array.nbytes
        self.context.set_tensor_address(name, self._addresses[name])

    def run(self) -> dict[str, np.ndarray]:
        """One execution; the outputs by name.

        Raises:
            ModelError: when TensorRT reports a failure.
        """
        self._enqueue()
        for name in self.outputs:
            self.device.download(self._arrays[name], self._addresses[name])
        self.device.wait()
        return {n: self._arrays[n].copy() for n in self.outputs}

    def _enqueue(self) -> None:
        if not self.context.execute_async_v3(self.device.stream):
            raise ModelError(f"{self.name} fails to run: {self.messages.last() or 'no reason given'}")

    def time(self, seconds: float) -> list[float]:
        """Milliseconds of each run on the device, without copies, warmed up."""
        for _ in range(_WARM_UP):
            self._enqueue()
        self.device.wait()
        end = time.monotonic() + seconds
        milliseconds: list[float] = []
        while len(milliseconds) < _MOST_RUNS and (not milliseconds or time.monotonic() < end):
            first = self.device.mark()
            self._enqueue()
            second = self.device.mark()
            self.device.wait()
            milliseconds.append(self.device.elapsed(first, second))
        return milliseconds


def _between(least: Sequence[int], shape: Sequence[int], most: Sequence[int]) -> bool:
    return len(shape) == len(least) and all(a <= n <= b for a, n, b in zip(least, shape, most, strict=True))


def _read_inputs(path: Path, engine: Engine) -> dict[str, np.ndarray]:
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as arrays:
            return {n: arrays[n] for n in engine.inputs if n in arrays}
    except (OSError, EOFError, TypeError, ValueError, zipfile.BadZipFile) as error:  # TypeError: one array, not several
        raise ArgumentError(f"--inputs {path} cannot be read: {error}; numpy.savez writes such files") from error


def draw(types: Mapping[str, np.dtype], shapes: Mapping[str, Shape], options: RunOptions) -> dict[str, np.ndarray]:
    """Random inputs: ids below what the model's tables hold, padding where a mask is read, else normal numbers."""
    rng = np.random.default_rng(options.seed)
    rows, pads = _read_input_rows(options.onnx) if options.onnx else ({}, frozenset())
    feeds = {}
    for name, shape in shapes.items():
        if name in pads or (options.onnx is None and "mask" in name):
            array: np.ndarray = np.ones(shape)
            if len(shape) == 2 and shape[0] > 1:
                array[-1, -(shape[1] // 4) or shape[1] :] = 0
        elif types[name].kind in "iub":
            array = rng.integers(0, rows.get(name) or _IDS, shape)
        else:
            array = rng.standard_normal(shape)
        feeds[name] = np.asarray(array).astype(types[name])
    return feeds


def _read_input_rows(model: Path) -> tuple[dict[str, int], frozenset[str]]:
    """How many rows the tables have that inputs look up, and the inputs that are read as padding."""
    from stof.execution.inputs import InputMaker
    from stof.graph.external_data import read_constants
    from stof.graph.index import DOMAIN, all_nodes
    from stof.graph.load_save import load
    from stof.symbolic import Symbolic

    graph = load(model)
    read_constants(model, graph)
    pads = set()
    for node in all_nodes(graph.graph.node):
        if node.domain == DOMAIN:
            roles: list[str] = next(
                (a.s.decode(errors="replace").split() for a in node.attribute if a.name == "operands"), []
            )
            pads |= {name for role, name in zip(roles, node.input[3:], strict=False) if role == "pad"}
    maker = InputMaker(graph, Symbolic(graph), frozenset(pads))
    return {n: r for n, r in maker.rows.items() if r}, frozenset(maker.pads)


def compare(
    model: Path, feeds: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray], tolerance: float | None
) -> tuple[Difference, ...]:
    """An engine's outputs beside ONNX Runtime's on the CPU, with stof's library where it is installed.

    Raises:
        ArgumentError: without onnxruntime.
        ModelError: when ONNX Runtime does not run the model.
    """
    if not has_onnxruntime():
        raise ArgumentError("--onnx needs onnxruntime, which is not installed: pip install onnxruntime")
    library = ""
    with contextlib.suppress(LibraryError):  # the model's own function bodies do
        library = str(library_path())
    try:
        session = create_session(SessionSpec(str(model.absolute()), library=library), None)
        inputs = {n: feeds[n] for n in session.inputs if n in feeds}
        wanted = dict(zip(session.outputs, session.run(None, inputs, None), strict=True))
    except RuntimeFailure as error:
        raise ModelError(f"ONNX Runtime does not run {model} with the engine's inputs: {error}") from error
    if missing := [n for n in outputs if n not in wanted]:
        raise ModelError(f"the engine has output {missing[0]!r}, which {model} has not: the engine is of another model")
    return tuple(difference(n, outputs[n], wanted[n], tolerance) for n in outputs)


def difference(name: str, output: np.ndarray, wanted: np.ndarray, tolerance: float | None) -> Difference:
    """One output's difference. NaN and infinities have to stand where they stand in the other."""
    if output.shape != wanted.shape:
        return Difference(name, 0.0, 0.0, f"has shape {output.shape}, expected {wanted.shape}")
    if wanted.dtype.kind in "iub":
        count = int((output != wanted).sum())
        return Difference(name, float(count), 0.0, f"{count} elements differ" if count else "")
    a, b = output.astype(np.float64), wanted.astype(np.float64)
    finite = np.isfinite(b)
    odd = int((np.isfinite(a) != finite).sum())
    if odd:
        return Difference(name, 0.0, 0.0, f"{odd} elements are NaN or infinite in one of them alone")
    scale = float(np.abs(b[finite]).max(initial=0.0))
    share = _TOLERANCE.get(wanted.dtype.name, _TOLERANCE["float32"]) if tolerance is None else tolerance
    return Difference(name, float(np.abs(a[finite] - b[finite]).max(initial=0.0)), share * scale + 1e-6)
