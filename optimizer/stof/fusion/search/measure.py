# SPDX-License-Identifier: Apache-2.0
"""Times parts of a region in ONNX Runtime on this device, each as a model of its own with all optimizations."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from stof.errors import UnsupportedError
from stof.execution.captured_messages import import_onnxruntime
from stof.fusion.emit import make_call
from stof.fusion.fusion_graph import FusionGraph
from stof.fusion.search.measure_cuda import cuda_seconds
from stof.fusion.translate import FusedChain
from stof.graph.index import DOMAIN
from stof.graph.names import FreshNames
from stof.runtime.library import register
from stof.symbolic import Int
from stof.symbolic.algebra.sizes import evaluate

_FEWEST_RUNS, _MOST_RUNS = 5, 400  # of one measurement
_SECONDS = 0.04  # of one measurement
_INTERLEAVED_SECONDS = 2.0  # of candidates that run in turns
_FLUSH_BYTES = 1 << 26  # fill the caches
_LARGEST = 1 << 28  # bytes of all inputs and constants
_MOST_RANDOM = 1 << 20  # random numbers of an input, which it repeats
_MOST_CONSTANT = 64  # elements of a constant that stays a constant


class TimeOverError(UnsupportedError):
    """The time for measurements was over before one was complete."""


def part_model(
    graph: FusionGraph,
    node_indices: Sequence[int],
    chains: Sequence[FusedChain],
    outputs: Sequence[str],
    sizes: Mapping[str, int],
    fixed: bool = False,
) -> tuple[onnx.ModelProto, list[str]]:
    """Some nodes as a model of their own, and the names of its inputs.

    Args:
        graph: the nodes' graph.
        node_indices: the nodes.
        chains: chains that replace some of them.
        outputs: outputs of the model.
        sizes: sizes of symbolic dimensions.
        fixed: whether the inputs' shapes are these sizes, or symbolic.
    """
    nodes = _part_nodes(graph, node_indices, chains)
    constants, inputs = _part_constants(graph, nodes, sizes)
    types = graph.symbolic.dtype
    made_inputs = [
        helper.make_tensor_value_info(n, types(n), s)
        for n, s in zip(inputs, evaluate_shapes(graph, inputs, sizes), strict=True)
    ]
    # Symbolic dimensions, as in the model: with static ones a runtime may optimize more.
    for info in () if fixed else made_inputs:
        for i, d in enumerate(info.type.tensor_type.shape.dim):
            d.dim_param = f"{info.name}_{i}"
    infos = [
        helper.make_tensor_value_info(o, d, None)
        for c in chains
        for o, d in zip(c.region.outputs, c.dtypes, strict=True)
    ]
    made_outputs = [helper.make_tensor_value_info(o, types(o), None) for o in outputs]
    body = helper.make_graph(
        nodes, "part", made_inputs, made_outputs, constants, value_info=[v for v in infos if v.name not in outputs]
    )
    opsets = [helper.make_opsetid(e.domain, e.version) for e in graph.model.opset_import if e.domain != DOMAIN]
    opsets.append(helper.make_opsetid(DOMAIN, 1))
    return helper.make_model(body, opset_imports=opsets, ir_version=max(8, graph.model.ir_version)), inputs


def _part_nodes(graph: FusionGraph, node_indices: Sequence[int], chains: Sequence[FusedChain]) -> list[onnx.NodeProto]:
    """The nodes in order, with a call of each chain in place of the last node that it replaces."""
    inside = {p for c in chains for p in c.region.node_indices}
    made = {c.region.node_indices[-1]: c for c in chains}
    nodes = []
    for index in sorted(node_indices):
        if index in made:
            nodes.append(make_call(made[index], 0, (len(made[index].inputs), len(made[index].dtypes)), FreshNames()))
        elif index not in inside:
            nodes.append(graph.nodes[index])
    return nodes


def _part_constants(
    graph: FusionGraph, nodes: Sequence[onnx.NodeProto], sizes: Mapping[str, int]
) -> tuple[list[onnx.TensorProto], list[str]]:
    """What the nodes read and do not write: small constants and weights, and the names of all else."""
    read = dict.fromkeys(n for node in nodes for n in node.input if n)
    written = {o for node in nodes for o in node.output}
    constants, inputs = [], []
    for name in read:
        if name in written:
            continue
        array = graph.symbolic.constant(name)
        if array is not None and array.size <= _MOST_CONSTANT:
            constants.append(onnx.numpy_helper.from_array(array, name))
        elif _is_packed_weight(graph, name):
            (shape,) = evaluate_shapes(graph, [name], sizes)
            constants.append(onnx.numpy_helper.from_array(random_array(np.random.default_rng(0), shape), name))
        else:
            inputs.append(name)
    return constants, inputs


def _is_packed_weight(graph: FusionGraph, name: str) -> bool:
    """Whether a tensor is a weight, which a runtime may pack once."""
    is_fp32 = graph.symbolic.dtype(name) == onnx.TensorProto.FLOAT
    return graph.policy.has_cpu_gemm and name in graph.constants and is_fp32


def evaluate_shapes(graph: FusionGraph, names: Sequence[str], sizes: Mapping[str, int]) -> list[list[int]]:
    """The shapes of tensors at some sizes.

    Raises:
        UnsupportedError: when a shape does not follow from the model's inputs.
    """
    shapes = []
    for name in names:
        shape = graph.symbolic.shape(name)
        if shape is None:
            raise UnsupportedError(f"the shape of {name!r} is not known")
        shapes.append([evaluate(d, sizes) for d in shape])
    return shapes


def random_array(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """Standard normal numbers; a large array repeats them: drawing all would take longer than the timing."""
    count = int(np.prod(shape, dtype=np.int64))
    return np.resize(rng.standard_normal(min(count, _MOST_RANDOM), np.float32), shape)


class Timer:
    """Times nodes of a graph, all candidates on the same inputs.

    Args:
        graph: the graph.
        sizes: sizes of its symbolic dimensions.
        provider: "CPU" or "CUDA".
        threads: 0 is the runtime's default.
        clock: gives seconds, for runs on the CPU.
        seconds_left: after this many seconds no session and no run begins, and a first run is ended. Its graph may be of
            any size.
    """

    def __init__(
        self,
        graph: FusionGraph,
        sizes: Mapping[str, int],
        provider: str = "CPU",
        threads: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        seconds_left: float = math.inf,
    ) -> None:
        self.graph = graph
        self.sizes = sizes
        self.provider = provider
        self.threads = threads
        self.clock = clock
        self.end = clock() + seconds_left
        self.rng = np.random.default_rng(0)

    def seconds(self, node_indices: Sequence[int], chains: Sequence[FusedChain], outputs: Sequence[str]) -> float:
        """The least time of a run of some nodes, with chains in place of some of them.

        Raises:
            UnsupportedError: when they cannot be run alone.
            TimeOverError: when the time is over.
        """
        self._check_time()
        model, feeds = self._part(node_indices, chains, outputs)
        try:
            self._check_time()
            if self.provider == "CUDA":
                return cuda_seconds(model, feeds, evaluate_shapes(self.graph, outputs, self.sizes), self._options())
            return self._least(self._session(model), feeds)
        except UnsupportedError:
            raise
        except Exception as error:  # whatever the runtime raises
            self._check_time()  # a run that was ended
            raise UnsupportedError(f"it cannot be run by itself: {error}") from error

    def measure_interleaved(
        self,
        node_indices: Sequence[int],
        candidates: Sequence[Sequence[FusedChain]],
        outputs: Sequence[str],
        is_over: Callable[[], bool] = lambda: False,
    ) -> list[float]:
        """The least time of some nodes with the chains of each candidate; candidates run in turns, so that noise meets all.

        Before each run the caches are flushed: in a model, weights come from memory.

        Args:
            node_indices: the nodes.
            candidates: the chains of each candidate.
            outputs: the tensors that are computed.
            is_over: whether there is no time for more than the fewest turns.

        Raises:
            UnsupportedError: when a candidate cannot be run alone.
            TimeOverError: when the time is over before the fewest turns.
        """
        try:
            sessions: list[tuple[Any, dict[str, np.ndarray]]] = []
            for chains in candidates:
                self._check_time()
                model, feeds = self._part(node_indices, chains, outputs, len(candidates))
                self._check_time()
                sessions.append((self._session(model), feeds))
            for session, feeds in sessions:
                self._warm_up(session, feeds)
            best = [float("inf")] * len(sessions)
            flush = np.zeros(_FLUSH_BYTES >> 2, np.float32)
            start, turn = self.clock(), 0
            while turn < _FEWEST_RUNS or self.clock() - start < _INTERLEAVED_SECONDS:
                for i in range(len(sessions)):
                    k = (i + turn) % len(sessions)
                    flush += 1.0
                    best[k] = min(best[k], self._time_run(*sessions[k], 0.0 if turn == 0 else best[k]))
                turn += 1
                if turn >= _FEWEST_RUNS and is_over():
                    break
            return best
        except UnsupportedError:
            raise
        except Exception as error:  # whatever the runtime raises
            self._check_time()  # a run that was ended
            raise UnsupportedError(f"it cannot be run by itself: {error}") from error

    def _check_time(self, needed: float = 0.0) -> None:
        if self.clock() + needed > self.end:
            raise TimeOverError("the time for measurements was over")

    def _warm_up(self, session: Any, feeds: Mapping[str, np.ndarray]) -> None:
        """The first run of a session, which is ended when the time is over: nobody knows how long it takes."""
        import onnxruntime as ort

        self._check_time()
        if self.end == math.inf:
            session.run(None, feeds)
            return
        options = ort.RunOptions()
        alarm = threading.Timer(self.end - self.clock(), setattr, (options, "terminate", True))
        alarm.daemon = True
        alarm.start()
        try:
            session.run(None, feeds, options)
        finally:
            alarm.cancel()

    def _time_run(self, session: Any, feeds: Mapping[str, np.ndarray], needed: float) -> float:
        """The seconds of one run, which takes about ``needed``: it does not begin where there is less time."""
        self._check_time(needed)
        start = self.clock()
        session.run(None, feeds)
        return self.clock() - start

    def _least(self, session: Any, feeds: Mapping[str, np.ndarray]) -> float:
        inputs = dict(feeds)
        for _ in range(2):
            self._warm_up(session, inputs)
        best, spent, runs = float("inf"), 0.0, 0
        while runs < _FEWEST_RUNS or (spent < _SECONDS and runs < _MOST_RUNS):
            took = self._time_run(session, inputs, best if runs else 0.0)
            best, spent, runs = min(best, took), spent + took, runs + 1
        return best

    def _part(
        self, node_indices: Sequence[int], chains: Sequence[FusedChain], outputs: Sequence[str], together: int = 1
    ) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
        model, inputs = part_model(self.graph, node_indices, chains, outputs, self.sizes)
        shapes = evaluate_shapes(self.graph, inputs, self.sizes)
        dtypes = [helper.tensor_dtype_to_np_dtype(self.graph.symbolic.dtype(n)) for n in inputs]
        total = sum(int(np.prod(s, dtype=np.int64)) * d.itemsize for s, d in zip(shapes, dtypes, strict=True))
        total += sum(len(t.raw_data) for t in model.graph.initializer)
        if total * together > _LARGEST:
            raise UnsupportedError(f"its inputs and constants have {total} bytes, more than is measured")
        return model, {n: self._random_input(n, s, d) for n, s, d in zip(inputs, shapes, dtypes, strict=True)}

    def _random_input(self, name: str, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """Random data; integers have the values that they have in the model."""
        numbers = random_array(self.rng, shape)
        if dtype.kind not in "iu":
            return numbers > 0 if dtype.kind == "b" else numbers.astype(dtype)
        value = self.graph.symbolic.value(name)
        elements = None if value is None else value.elements()
        if elements is None:
            raise UnsupportedError(f"what the integers {name!r} are is not known")
        integers = [evaluate(e, self.sizes) for e in elements if isinstance(e, Int)]
        return np.array(integers, dtype).reshape(shape)

    def _options(self) -> Any:
        ort = import_onnxruntime()
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = self.threads
        # Threads that spin after a run would take the CPUs of the next session.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        register(options)
        return options

    def _session(self, model: onnx.ModelProto) -> Any:
        ort = import_onnxruntime()
        # Without this, ONNX Runtime prints the error with names of the model, and tries again.
        return ort.InferenceSession(
            model.SerializeToString(), self._options(), providers=["CPUExecutionProvider"], enable_fallback=0
        )
