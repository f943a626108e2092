# SPDX-License-Identifier: Apache-2.0
"""Times the variants of a whole fp16 model in ONNX Runtime's CUDA provider in turns, each as a captured graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from bench.core.candidate import require
from bench.gpu.baselines.onnx_runtime import session, unsynchronized_run_options
from bench.gpu.device_lock import DeviceLock
from bench.gpu.timing import CapturedLaunches, interleave_launches
from bench.gpu.trace import NodeRun, trace
from bench.gpu.variants import LABELS, assemble
from bench.gpu.worker_pool import now, versions
from stof.bench.drawn_feeds import draw_static_feeds
from stof.bench.results import Record
from stof.files import temporary_folder
from stof.runtime.library import build_info

_KINDS = {
    "int64": onnx.TensorProto.INT64,
    "int32": onnx.TensorProto.INT32,
    "bool": onnx.TensorProto.BOOL,
    "float16": onnx.TensorProto.FLOAT16,
}
_ALLOWED = 0.02  # of the outputs' range, between fp16 models of random weights
OWN = ("attention", "chains", "plain", "stof", "tool-stof")
_TRACED = ("exported", "tool", "attention", "stof")


class _ModelVariant:
    """A variant with inputs and output in device memory; its session captures and replays a graph where it can."""

    def __init__(self, path: Path, feeds: Mapping[str, np.ndarray], output: list[int], stream: Any) -> None:
        self.torch: Any = require("torch")
        self.path = path
        self.stream = stream
        self.how = "enable_cuda_graph"
        self._given = feeds
        self._feeds: dict[str, Any] = {}
        self.output = self.torch.full(output, float("nan"), dtype=self.torch.float16, device="cuda")
        self.options = unsynchronized_run_options()
        self.session: Any = None
        self.binding: Any = None
        self.refused = ""
        try:
            self.session = self._session(enable_cuda_graph="1")
        except Exception as reason:  # ONNX Runtime's types differ by version; start() captures in another way then
            self.refused = str(reason)

    def start(self) -> None:
        """Runs the session for the first times, in which it captures its graph."""
        if not self.refused:
            try:
                self._first_runs()
                return
            except Exception as reason:  # as above
                self.refused = str(reason)
        # With nodes on the CPU, the session captures nothing. Launches that copy nothing can still be captured from outside.
        self.how = f"captured from outside ({' '.join(self.refused.split())[:120]})"
        self.session = self._session()
        self._first_runs()

    def _first_runs(self) -> None:
        self.binding = self.bind(self.session)
        for _ in range(3):
            self._run()
        self.stream.synchronize()

    def _session(self, profile: str | None = None, **provider: Any) -> Any:
        return session(str(self.path), self.stream, stof=True, profile=profile, fallback=True, **provider)

    def bind(self, found: Any) -> Any:
        """A binding of a session of this model to the tensors on the device."""
        if not self._feeds:
            names = [value.name for value in found.get_inputs()]
            self._feeds = {n: self.torch.from_numpy(self._given[n]).cuda() for n in names}
        binding = found.io_binding()
        for name, tensor in self._feeds.items():
            kind = _KINDS[str(tensor.dtype).removeprefix("torch.")]
            binding.bind_input(name, "cuda", 0, kind, tuple(tensor.shape), tensor.data_ptr())
        name = found.get_outputs()[0].name
        binding.bind_output(name, "cuda", 0, onnx.TensorProto.FLOAT16, tuple(self.output.shape), self.output.data_ptr())
        return binding

    def _run(self) -> None:
        self.session.run_with_iobinding(self.binding, self.options)

    def timed(self) -> CapturedLaunches:
        """The launches to time; one is a replay of the session's own graph where it has one."""
        found = CapturedLaunches(lambda _: self._run(), 1, self.stream)
        if self.how == "enable_cuda_graph":
            found.use_own_graph()
        else:
            found.capture()
        return found

    def nodes(self) -> list[NodeRun]:
        """The session's nodes with their time on the device, without a captured graph."""
        bindings: dict[int, Any] = {}

        def run(found: Any) -> None:
            if id(found) not in bindings:
                bindings[id(found)] = self.bind(found)
            found.run_with_iobinding(bindings[id(found)], self.options)
            self.stream.synchronize()

        return trace(lambda prefix: self._session(profile=prefix), run)


def time_model_variants(
    name: str, prepared: Path, shape: tuple[int, int], rounds: int, traced: bool, lock: DeviceLock | None = None
) -> Record:
    """Times the variants in a folder that ``variants.prepare`` wrote, while other processes wait for the lock."""
    lock = lock or DeviceLock()
    torch: Any = require("torch")
    torch.set_grad_enabled(False)
    stream = torch.cuda.Stream()
    labels: dict[str, str] = {}
    errors: dict[str, float] = {}
    missing: dict[str, str] = {}
    how: dict[str, str] = {}
    record: Record = {
        "key": [name, *shape],
        "grid": "model",
        "model": name,
        "shape": {"B": shape[0], "S": shape[1], "dtype": "float16"},
        "rounds": rounds,
    }
    with temporary_folder() as folder:
        kinds = assemble(prepared, folder)
        models: dict[str, _ModelVariant] = {}
        output, feeds = _output(folder / "exported.onnx"), draw_static_feeds(folder / "exported.onnx")
        for kind in kinds:
            labels[kind] = LABELS[kind]
            try:
                with torch.cuda.stream(stream):
                    model = _ModelVariant(folder / f"{kind}.onnx", feeds, output, stream)
                    with lock.held():
                        model.start()
                if kind != "exported":
                    errors[kind] = _difference(models["exported"].output, model.output)
                    if not errors[kind] <= _ALLOWED:
                        missing[kind] = (
                            f"the output differs from the exported model's by {errors[kind]:.1e} of the range"
                        )
                        continue
                models[kind] = model
                how[kind] = model.how
            except Exception as failure:  # whatever a variant's runtime raises: the others are timed without it
                missing[kind] = f"{type(failure).__name__}: {' '.join(str(failure).split())[:240]}"
        with lock.held(), torch.cuda.stream(stream):
            timed = {kind: model.timed() for kind, model in models.items()}
            timings = dict(zip(timed, interleave_launches(list(timed.values()), rounds), strict=True))
        record["us"] = {k: round(t.median * 1e6, 1) for k, t in timings.items()}
        record["spread_us"] = {k: [round(t.best * 1e6, 1), round(t.worst * 1e6, 1)] for k, t in timings.items()}
        others = [us for k, us in record["us"].items() if k not in OWN]
        if others and "stof" in record["us"]:
            record["over_best"] = round(min(others) / record["us"]["stof"], 3)
        if traced:
            timed.clear()
            for kind in [k for k in _TRACED if k in models]:
                try:
                    with lock.held():  # other processes' kernels would stretch these
                        nodes = models[kind].nodes()
                    record.setdefault("profile", {})[kind] = _sums(nodes, shape[1])
                except Exception as failure:  # a trace is an extra, and the profiler may fail in any way
                    missing[f"profile of {kind}"] = f"{type(failure).__name__}: {' '.join(str(failure).split())[:240]}"
            _quotient(record)
    info = build_info()
    record |= {
        "labels": labels,
        "error": {k: float(f"{e:.1e}") for k, e in errors.items()},
        "missing": missing,
        "graphs": how,
        "machine": {
            "device": torch.cuda.get_device_name(), "versions": versions(), "library": info["build_id"],
            "compiler": info["compiler"], "date": now(),
        },
    }  # fmt: skip
    return record


def _output(path: Path) -> list[int]:
    """The shape of a model's first output."""
    model = onnx.load(str(path), load_external_data=False)
    return [d.dim_value for d in model.graph.output[0].type.tensor_type.shape.dim]


def _difference(expected: Any, found: Any) -> float:
    expected, found = expected.float(), found.float()
    return float((found - expected).abs().max() / (expected.max() - expected.min()))


def _sums(nodes: Sequence[NodeRun], length: int) -> dict[str, Any]:
    """Device time inside and outside of attention, that of StofAttention, and where nodes ran."""
    own = [n for n in nodes if n.call.op == "StofAttention"]
    inside = sum(n.device_seconds for n in nodes if n.call.touches(length, length))
    total = sum(n.device_seconds for n in nodes)
    by_op: dict[str, float] = {}
    for n in nodes:
        by_op[n.call.op] = by_op.get(n.call.op, 0.0) + n.device_seconds * 1e6
    elsewhere = sorted({n.call.op for n in nodes if "CUDA" not in n.provider})
    return {
        "nodes": len(nodes),
        "total_us": round(total * 1e6, 1),
        "attention_us": round(inside * 1e6, 1),
        "rest_us": round((total - inside) * 1e6, 1),
        "stof_us": round(sum(n.device_seconds for n in own) * 1e6, 1),
        "stof_nodes": len(own),
        "stof_nodes_on_cuda": sum("CUDA" in n.provider for n in own),
        "memcpy_nodes": sum(n.call.op.startswith("Memcpy") for n in nodes),
        "ops_on_other_providers": elsewhere,
        "by_op_us": {k: round(v, 1) for k, v in sorted(by_op.items(), key=lambda i: -i[1]) if v >= 1},
    }


def _quotient(record: Record) -> None:
    found = record.get("profile", {})
    if "exported" in found and "stof" in found and "stof" in record["us"]:
        possible = found["exported"]["rest_us"] + found["stof"]["stof_us"]
        record["quotient"] = {
            "rest_us": found["exported"]["rest_us"],
            "kernels_us": found["stof"]["stof_us"],
            "quotient": round(record["us"]["stof"] / possible, 4),
        }


def describe_record(record: Record) -> list[str]:
    """The record as text."""
    found = [
        f"{record['model']} fp16 B{record['shape']['B']} S{record['shape']['S']}, median of {record['rounds']} rounds"
    ]
    own = record["us"].get("stof")
    for kind, us in record["us"].items():
        over = f"{us / own:6.2f}x" if own else ""
        error = f", differs by {record['error'][kind]:.0e} of the range" if kind in record["error"] else ""
        low, high = record["spread_us"][kind]
        found.append(
            f"  {record['labels'][kind]:30s} {us:10.1f} us {over} ({low:.1f} to {high:.1f}){error}; {record['graphs'][kind]}"
        )
    found += [f"  missing: {k}: {v}" for k, v in record["missing"].items()]
    for kind, sums in record.get("profile", {}).items():
        found.append(
            f"  profile of {kind}: {sums['nodes']} nodes, device {sums['total_us']:.0f} us, of it attention "
            f"{sums['attention_us']:.0f}, StofAttention {sums['stof_us']:.0f} ({sums['stof_nodes_on_cuda']} of "
            f"{sums['stof_nodes']} nodes on CUDA), {sums['memcpy_nodes']} Memcpy nodes; elsewhere: "
            f"{', '.join(sums['ops_on_other_providers']) or 'none'}"
        )
        found.append("    " + ", ".join(f"{k} {v:.0f}" for k, v in list(sums["by_op_us"].items())[:12]))
    if "quotient" in record:
        q = record["quotient"]
        found.append(
            f"  quotient {q['quotient']:.3f} = optimized / (outside attention {q['rest_us']:.0f} us + kernels "
            f"{q['kernels_us']:.0f} us)"
        )
    return found
