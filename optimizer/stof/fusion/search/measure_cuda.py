# SPDX-License-Identifier: Apache-2.0
"""Times small models in ONNX Runtime's CUDA provider, as replays of a captured graph.

The graph holds copies of the model, each with inputs of its own, so that kernels are timed rather than the launch.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from stof.execution.captured_messages import import_onnxruntime

_MOST_COPIES = 16
_COPIED_BYTES = 64 << 20  # most bytes of all copies' inputs
_ROUNDS = 5
_RUNS = 10  # queued in a round
_PROVIDER = "CUDAExecutionProvider"


def has_cuda_provider() -> bool:
    """Whether the installed ONNX Runtime runs on CUDA."""
    if importlib.util.find_spec("onnxruntime") is None:
        return False
    ort = import_onnxruntime()
    return _PROVIDER in ort.get_available_providers()


def cuda_seconds(
    model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], shapes: Sequence[Sequence[int]], options: Any
) -> float:
    """The least seconds of one run of a model.

    Args:
        model: the model.
        feeds: inputs by name.
        shapes: shapes of the outputs, in order.
        options: session options.

    Raises:
        Exception: whatever the runtime raises.
    """
    ort = import_onnxruntime()
    size = sum(a.nbytes for a in feeds.values())
    copies = max(1, min(_MOST_COPIES, _COPIED_BYTES // max(1, size)))
    text = repeat_model(model, copies).SerializeToString()
    try:
        session = _BoundSession(ort, text, options, feeds, (model, shapes), copies, graph=True)
    except Exception:  # nodes on the CPU: no graph can be captured
        session = _BoundSession(ort, text, options, feeds, (model, shapes), copies, graph=False)
    return session.seconds()


class _BoundSession:
    """A session with inputs and outputs in device memory."""

    def __init__(
        self,
        ort: Any,
        text: bytes,
        options: Any,
        feeds: Mapping[str, np.ndarray],
        outputs: tuple[onnx.ModelProto, Sequence[Sequence[int]]],
        copies: int,
        graph: bool,
    ) -> None:
        self.copies = copies
        provider_options = {"enable_cuda_graph": "1"} if graph else {}
        # Without this, ONNX Runtime prints the error with names of the model, and goes on without the graph.
        self.session = ort.InferenceSession(
            text, options, providers=[(_PROVIDER, provider_options), "CPUExecutionProvider"], enable_fallback=0
        )
        self.binding = self.session.io_binding()
        model, shapes = outputs
        kinds = {i.name: i.type.tensor_type.elem_type for i in (*model.graph.input, *model.graph.output)}
        self.kept = []
        for i in range(copies):
            for name, array in feeds.items():
                value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.ascontiguousarray(array), kinds[name])
                on_cuda = ort.OrtValue.ortvalue_from_shape_and_type(list(array.shape), kinds[name], "cuda", 0)
                on_cuda.update_inplace(value.numpy() if array.dtype != "bfloat16" else array)
                self.binding.bind_ortvalue_input(_copy_of(name, i), on_cuda)
                self.kept.append(on_cuda)
            for info, shape in zip(model.graph.output, shapes, strict=True):
                value = ort.OrtValue.ortvalue_from_shape_and_type(list(shape), kinds[info.name], "cuda", 0)
                self.binding.bind_ortvalue_output(_copy_of(info.name, i), value)
                self.kept.append(value)
        self.options = ort.RunOptions()
        self.options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        for _ in range(3):
            self._run()
        self.binding.synchronize_outputs()

    def _run(self) -> None:
        self.session.run_with_iobinding(self.binding, self.options)

    def seconds(self) -> float:
        """The least seconds of one copy."""
        best = float("inf")
        for _ in range(_ROUNDS):
            self.binding.synchronize_outputs()
            start = time.perf_counter()
            for _ in range(_RUNS):
                self._run()
            self.binding.synchronize_outputs()
            best = min(best, time.perf_counter() - start)
        return best / (_RUNS * self.copies)


def _copy_of(name: str, number: int) -> str:
    return f"{name}/copy{number}" if name else ""


def repeat_model(model: onnx.ModelProto, copies: int) -> onnx.ModelProto:
    """A model that holds copies of a model's graph; constants are shared, all else has names of its own.

    Inputs are not shared: a runtime would compute equal nodes of equal inputs once.
    """
    repeated = onnx.ModelProto()
    repeated.CopyFrom(model)
    shared = {t.name for t in model.graph.initializer}
    for field in ("node", "input", "output", "value_info"):
        del getattr(repeated.graph, field)[:]
    for i in range(copies):
        for infos, target in (
            (model.graph.input, repeated.graph.input),
            (model.graph.output, repeated.graph.output),
            (model.graph.value_info, repeated.graph.value_info),
        ):
            for info in infos:
                made = target.add()
                made.CopyFrom(info)
                made.name = _copy_of(info.name, i)
        for node in model.graph.node:
            copy = repeated.graph.node.add()
            copy.CopyFrom(node)
            copy.name = _copy_of(node.name, i)
            copy.input[:] = [n if n in shared else _copy_of(n, i) for n in node.input]
            copy.output[:] = [_copy_of(n, i) for n in node.output]
    return repeated
