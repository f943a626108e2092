# SPDX-License-Identifier: Apache-2.0
"""Times of parts of a region in ONNX Runtime on this device, each as a model of its own with all optimizations on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from stof.errors import UnsupportedError
from stof.execution.inputs import evaluate
from stof.fusion.emit import call
from stof.fusion.regions import Graph
from stof.fusion.search.measure_cuda import cuda_seconds
from stof.fusion.translate import Chain
from stof.graph.index import DOMAIN
from stof.graph.names import FreshNames
from stof.runtime.library import register
from stof.symbolic import Int

_LEAST, _MOST = 5, 400  # runs
_SECONDS = 0.04  # of runs, for one measurement
_TURNS = 2.0  # seconds of candidates that take turns
_OTHER = 1 << 26  # bytes that fill the caches
_LARGEST = 1 << 28  # bytes of all inputs and constants


def part_model(
    graph: Graph,
    places: Sequence[int],
    chains: Sequence[Chain],
    outputs: Sequence[str],
    sizes: Mapping[str, int],
    fixed: bool = False,
) -> tuple[onnx.ModelProto, list[str]]:
    """Some nodes as a model of their own, and its inputs.

    Args:
        graph: what the nodes are of.
        places: which nodes.
        chains: what takes the place of some of them.
        outputs: of the model.
        sizes: of symbolic dimensions.
        fixed: whether the model's inputs have these sizes, or any.
    """
    inside = {p for c in chains for p in c.region.places}
    made = {c.region.places[-1]: c for c in chains}
    nodes, read, written = [], dict[str, None](), set[str]()
    for place in sorted(places):
        if place in made:
            nodes.append(call(made[place], 0, (len(made[place].inputs), len(made[place].dtypes)), FreshNames()))
        elif place not in inside:
            nodes.append(graph.nodes[place])
        else:
            continue
        read.update(dict.fromkeys(n for n in nodes[-1].input if n))
        written.update(nodes[-1].output)
    constants, inputs = [], []
    for name in read:
        if name in written:
            continue
        array = graph.symbolic.constant(name)
        if array is not None and array.size <= _SMALL:
            constants.append(onnx.numpy_helper.from_array(array, name))
        elif graph.on_cpu and name in graph.constant and graph.symbolic.dtype(name) == onnx.TensorProto.FLOAT:
            # Factors that a runtime may bring into an order of its own once.
            (shape,) = shapes_of(graph, [name], sizes)
            constants.append(onnx.numpy_helper.from_array(drawn(np.random.default_rng(0), shape), name))
        else:
            inputs.append(name)
    types = graph.symbolic.dtype
    made_inputs = [
        helper.make_tensor_value_info(n, types(n), s)
        for n, s in zip(inputs, shapes_of(graph, inputs, sizes), strict=True)
    ]
    # Free dimensions, as in the model: a runtime may do more with sizes that it knows.
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


def shapes_of(graph: Graph, names: Sequence[str], sizes: Mapping[str, int]) -> list[list[int]]:
    """The sizes of tensors.

    Raises:
        UnsupportedError: for sizes that depend on more than the model's inputs.
    """
    found = []
    for name in names:
        shape = graph.symbolic.shape(name)
        if shape is None:
            raise UnsupportedError(f"the shape of {name!r} is not known")
        found.append([evaluate(d, sizes) for d in shape])
    return found


def drawn(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """Random numbers; a part of many is repeated: drawing all would take longer than the timing."""
    count = int(np.prod(shape, dtype=np.int64))
    return np.resize(rng.standard_normal(min(count, _MOST_DRAWN), np.float32), shape)


class Timer:
    """Measures; the same inputs for all candidates of a problem.

    Args:
        graph: what the operators are of.
        sizes: of its symbolic dimensions.
        provider: "CPU" or "CUDA".
        threads: 0 is the runtime's default.
        clock: the seconds that runs on the CPU take.
    """

    def __init__(
        self,
        graph: Graph,
        sizes: Mapping[str, int],
        provider: str = "CPU",
        threads: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.graph = graph
        self.sizes = sizes
        self.provider = provider
        self.threads = threads
        self.clock = clock
        self.rng = np.random.default_rng(0)

    def seconds(self, places: Sequence[int], chains: Sequence[Chain], outputs: Sequence[str]) -> float:
        """The least time of a run of some nodes, of which chains replace some.

        Raises:
            UnsupportedError: where they cannot be run by themselves.
        """
        model, feeds = self._part(places, chains, outputs)
        try:
            if self.provider == "CUDA":
                return cuda_seconds(model, feeds, shapes_of(self.graph, outputs, self.sizes), self._options())
            return _least(self._session(model), feeds, self.clock)
        except Exception as error:  # whatever the runtime raises
            raise UnsupportedError(f"it cannot be run by itself: {error}") from error

    def in_turns(
        self,
        places: Sequence[int],
        candidates: Sequence[Sequence[Chain]],
        outputs: Sequence[str],
        over: Callable[[], bool] = lambda: False,
    ) -> list[float]:
        """The least times of some nodes with the chains of each candidate, which take turns: what else the machine does
        meets all of them.

        Before each run the caches are filled with something else: in a model, weights come from memory. ``over``: there is
        no time for more turns than it takes at least.

        Raises:
            UnsupportedError: where one cannot be run by itself.
        """
        try:
            parts = [self._part(places, chains, outputs, len(candidates)) for chains in candidates]
            sessions = [(self._session(model), feeds) for model, feeds in parts]
            for session, feeds in sessions:
                session.run(None, feeds)
            best = [float("inf")] * len(sessions)
            other = np.zeros(_OTHER >> 2, np.float32)
            start, turn = self.clock(), 0
            while turn < _LEAST or self.clock() - start < _TURNS:
                for i in range(len(sessions)):
                    k = (i + turn) % len(sessions)
                    other += 1.0
                    begin = self.clock()
                    sessions[k][0].run(None, sessions[k][1])
                    best[k] = min(best[k], self.clock() - begin)
                turn += 1
                if turn >= _LEAST and over():
                    break
            return best
        except UnsupportedError:
            raise
        except Exception as error:  # whatever the runtime raises
            raise UnsupportedError(f"it cannot be run by itself: {error}") from error

    def _part(
        self, places: Sequence[int], chains: Sequence[Chain], outputs: Sequence[str], together: int = 1
    ) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
        model, inputs = part_model(self.graph, places, chains, outputs, self.sizes)
        shapes = shapes_of(self.graph, inputs, self.sizes)
        dtypes = [helper.tensor_dtype_to_np_dtype(self.graph.symbolic.dtype(n)) for n in inputs]
        total = sum(int(np.prod(s, dtype=np.int64)) * d.itemsize for s, d in zip(shapes, dtypes, strict=True))
        total += sum(len(t.raw_data) for t in model.graph.initializer)
        if total * together > _LARGEST:
            raise UnsupportedError(f"its inputs and constants have {total} bytes, more than is measured")
        return model, {n: self._drawn(n, s, d) for n, s, d in zip(inputs, shapes, dtypes, strict=True)}

    def _drawn(self, name: str, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """Random data; bounds and shapes have the values that they have in the model."""
        numbers = drawn(self.rng, shape)
        if dtype.kind not in "iu":
            return numbers > 0 if dtype.kind == "b" else numbers.astype(dtype)
        value = self.graph.symbolic.value(name)
        elements = None if value is None else value.elements()
        if elements is None:
            raise UnsupportedError(f"what the integers {name!r} are is not known")
        known = [evaluate(e, self.sizes) for e in elements if isinstance(e, Int)]
        return np.array(known, dtype).reshape(shape)

    def _options(self) -> Any:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = self.threads
        # Threads of one session that spin after its run would take the next one's processors.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        register(options)
        return options

    def _session(self, model: onnx.ModelProto) -> Any:
        import onnxruntime as ort

        # By itself it would print the error, names of the model in it, and try the same again.
        return ort.InferenceSession(
            model.SerializeToString(), self._options(), providers=["CPUExecutionProvider"], enable_fallback=0
        )


_MOST_DRAWN = 1 << 20  # numbers
_SMALL = 64  # elements of a constant that stays one


def _least(session: Any, feeds: Mapping[str, np.ndarray], clock: Callable[[], float]) -> float:
    given = dict(feeds)
    for _ in range(2):
        session.run(None, given)
    best, spent, runs = float("inf"), 0.0, 0
    while runs < _LEAST or (spent < _SECONDS and runs < _MOST):
        start = clock()
        session.run(None, given)
        took = clock() - start
        best, spent, runs = min(best, took), spent + took, runs + 1
    return best
