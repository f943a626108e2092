# SPDX-License-Identifier: Apache-2.0
"""Times of a decoder's step in ONNX Runtime's CUDA provider: 16 StofCachedAttention nodes in one session beside 16 of
the runtime's GroupQueryAttention, with and without graph capture; IO binding, caches in place.

``PYTHONPATH=. python tests/cuda/time_cached_layers.py`` with onnxruntime-gpu, torch and ``STOF_LIBRARY``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from onnx import TensorProto, helper
from ort_models import ELEMENTS, session

import stof
from bench.gpu.cases import CACHED_MASKS, CACHED_SHAPES
from stof.files import strict_json

LAYERS = 16
# B, H, G, T, D: the grid `cached` of ``bench/``, and batches of small models, whose steps the host's time limits.
SHAPES = (*CACHED_SHAPES, (16, 16, 2, 6000, 64), (4, 14, 2, 2048, 64), (16, 8, 8, 1024, 64))
WINDOW = 1024
_CACHE_BYTES = 48 << 30  # of all layers; layers share caches beyond it
_COVER = 2_000_000  # cycles that a first kernel spins while the host queues a run
_ROUNDS = 15
_WARM_RUNS = 3
KINDS = ("stof", "gqa")


@dataclass(frozen=True)
class Step:
    """One query that is appended to caches of T - 1 keys, [B, G, T, D] each, in every layer."""

    mask: str
    B: int
    H: int
    G: int
    T: int
    D: int

    @property
    def is_windowed(self) -> bool:
        """Whether a query attends the last WINDOW keys alone."""
        return self.mask != "dense"

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of one layer, in fp16."""
        return 2 * 2 * self.B * self.G * self.T * self.D


def list_steps(shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Step]:
    """The steps that are timed; windows where T is at least four of them."""
    return [
        Step(mask, *shape) for shape in shapes for mask in CACHED_MASKS if mask == "dense" or shape[3] >= 4 * WINDOW
    ]


def build_model(step: Step, kind: str) -> bytes:
    """LAYERS nodes, each with the output of the one before as its query; keys and values of all are inputs."""
    tensor = helper.make_tensor_value_info
    shape, kv = ["b", 1, step.H * step.D], ["b", 1, step.G * step.D]
    given = [tensor("x", TensorProto.FLOAT16, shape)]
    given += [tensor(n, TensorProto.FLOAT16, kv) for n in ("key", "value")]
    given += [tensor("lengths", TensorProto.INT32, ["b"]), tensor("total", TensorProto.INT32, [1])]
    nodes, results = [], []
    for i in range(LAYERS):
        cache = ["b", step.G, "t", step.D]
        given += [tensor(f"past_{n}{i}", TensorProto.FLOAT16, cache) for n in "kv"]
        results += [tensor(f"present_{n}{i}", TensorProto.FLOAT16, cache) for n in "kv"]
        attributes: dict[str, Any] = {"num_heads": step.H, "kv_num_heads": step.G}
        if kind == "stof":
            mask = f"k <= q and q - k <= {WINDOW - 1}" if step.is_windowed else "k <= q"
            attributes |= {"mask": mask, "domain": "stof"}
        else:
            attributes |= {"domain": "com.microsoft"}
            if step.is_windowed:
                attributes["local_window_size"] = WINDOW
        names = [f"h{i}" if i else "x", "key", "value", f"past_k{i}", f"past_v{i}", "lengths", "total"]
        outputs = [f"h{i + 1}", f"present_k{i}", f"present_v{i}"]
        op = "StofCachedAttention" if kind == "stof" else "GroupQueryAttention"
        nodes.append(helper.make_node(op, names, outputs, f"layer{i}", **attributes))
    results.append(tensor(f"h{LAYERS}", TensorProto.FLOAT16, shape))
    imports = [helper.make_opsetid(d, v) for d, v in (("", 18), ("com.microsoft", 1), ("stof", 1))]
    graph = helper.make_graph(nodes, "g", given, results)
    return bytes(helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString())


class Caches:
    """The inputs of a step on the device. Layers take caches in turns, as many as fit _CACHE_BYTES."""

    def __init__(self, step: Step) -> None:
        random = torch.Generator("cuda").manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=random, device="cuda", dtype=torch.float16)

        count = max(1, min(LAYERS, _CACHE_BYTES // step.cache_bytes))
        shape = (step.B, step.G, step.T, step.D)
        self.caches = [(draw(*shape), draw(*shape)) for _ in range(count)]
        self.query = draw(step.B, 1, step.H * step.D)
        self.key, self.value = (draw(step.B, 1, step.G * step.D) for _ in range(2))
        self.lengths = torch.full((step.B,), step.T - 1, dtype=torch.int32, device="cuda")
        self.total = np.array([step.T], np.int32)


class Layers:
    """A session of LAYERS nodes, bound to caches in place, on one stream."""

    def __init__(self, step: Step, kind: str, caches: Caches, stream: Any, captures: bool) -> None:
        settings = {"user_compute_stream": str(stream.cuda_stream), "enable_cuda_graph": str(int(captures))}
        self.session = session(build_model(step, kind), **settings)
        self.output = torch.full_like(caches.query, float("nan"))
        self.stream = stream
        self._total = ort.OrtValue.ortvalue_from_numpy(caches.total)
        binding = self.session.io_binding()

        def bind(is_input: bool, name: str, tensor: torch.Tensor) -> None:
            to = binding.bind_input if is_input else binding.bind_output
            to(name, "cuda", 0, ELEMENTS[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())

        for name, tensor in (("x", caches.query), ("key", caches.key), ("value", caches.value)):
            bind(True, name, tensor)
        bind(True, "lengths", caches.lengths)
        binding.bind_ortvalue_input("total", self._total)
        for i in range(LAYERS):
            for name, tensor in zip("kv", caches.caches[i % len(caches.caches)], strict=True):
                bind(True, f"past_{name}{i}", tensor)
                bind(False, f"present_{name}{i}", tensor)
        bind(False, f"h{LAYERS}", self.output)
        self.binding = binding
        self._options = ort.RunOptions()
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def queue(self) -> None:
        """Queues one run and does not wait for it."""
        self.session.run_with_iobinding(self.binding, self._options)

    def time_step(self) -> float:
        """Seconds of a run and of waiting for it, as a server does for every token."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.queue()
        self.stream.synchronize()
        return time.perf_counter() - start

    def time_host(self) -> float:
        """Seconds of the host for one run, while the device is busy with another kernel."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(_COVER)
        start = time.perf_counter()
        self.queue()
        spent = time.perf_counter() - start
        torch.cuda.synchronize()
        return spent


def measure(step: Step, stream: Any, rounds: int = _ROUNDS) -> dict[str, Any]:
    """Microseconds a layer of both operators, in turns: medians over the rounds, and medians of the rounds' quotients."""
    caches = Caches(step)
    plain = {kind: Layers(step, kind, caches, stream, False) for kind in KINDS}
    captured = {kind: Layers(step, kind, caches, stream, True) for kind in KINDS}
    timed: dict[str, Callable[[], float]] = {}
    for kind in KINDS:
        timed |= {f"{kind} host": plain[kind].time_host, f"{kind} step": plain[kind].time_step}
        timed[f"{kind} captured"] = captured[kind].time_step
    for layers in (*plain.values(), *captured.values()):
        for _ in range(_WARM_RUNS):
            layers.queue()
    torch.cuda.synchronize()
    found = [layers.output.float() for layers in (*plain.values(), *captured.values())]
    difference = max(float((x - found[0]).abs().max() / found[0].abs().max()) for x in found)
    if not difference < 2e-2:
        raise RuntimeError(f"{step}: outputs differ by {difference:.1e} of the largest")
    samples: dict[str, list[float]] = {name: [] for name in timed}
    names = list(timed)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            samples[name].append(timed[name]() / LAYERS * 1e6)
    row: dict[str, Any] = {**vars(step), "difference": float(f"{difference:.1e}")}
    row |= {name: round(statistics.median(s), 2) for name, s in samples.items()}
    for how in ("host", "step", "captured"):
        pairs = zip(samples[f"stof {how}"], samples[f"gqa {how}"], strict=True)
        row[f"{how} ratio"] = round(statistics.median(a / b for a, b in pairs), 3)
    return row


def _parse_shape(text: str) -> tuple[int, ...]:
    shape = tuple(int(x) for x in text.split(","))
    if len(shape) != 5 or min(shape) < 1:
        raise ValueError
    return shape


def main() -> int:
    """Times all steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, help="a JSON file for the times")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no step is begun after so long")
    parser.add_argument(
        "--shapes", type=_parse_shape, nargs="+", default=SHAPES, metavar="B,H,G,T,D", help="these alone"
    )
    arguments = parser.parse_args()
    steps = list_steps(arguments.shapes)
    start, rows, stream = time.monotonic(), [], torch.cuda.Stream()
    for step in steps:
        if time.monotonic() - start > arguments.seconds:
            print(f"not timed, as the time was over: {step}", flush=True)
            continue
        rows.append(measure(step, stream))
        print(json.dumps(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    if arguments.results is not None:
        machine = {"device": torch.cuda.get_device_name(), "onnxruntime": ort.__version__, "library": stof.build_info()}
        text = strict_json.dumps_by_line({"machine": machine, "layers": LAYERS, "rows": rows})
        arguments.results.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
