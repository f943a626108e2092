# SPDX-License-Identifier: Apache-2.0
"""Times a whole model before and after in turns, with OpenVINO, the quotient of the possible, and peak memory."""

from __future__ import annotations

import argparse
import importlib.util
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from stof.bench.core import measure
from stof.bench.core.candidate import Unavailable, require
from stof.bench.core.results import Record, store
from stof.bench.cpu.baselines_ort import bind_inputs, session
from stof.bench.cpu.memory import peak_memory
from stof.bench.cpu.profile import NodeCall, profile, rest_seconds
from stof.options import Options
from stof.terminal import say

_FOLDER = Path("build/bench")
_TYPES = {
    "float": "float32",
    "float16": "float16",
    "bool": "bool",
    "int64": "int64",
    "int32": "int32",
    "uint8": "uint8",
}
_ALLOWED = 1e-3  # of the outputs' range; stof-optimize has compared far more closely before


def run(arguments: argparse.Namespace, threads: int) -> int:
    """Measures, prints and stores a model at every length."""
    original = _original(arguments.model)
    optimized: Path = arguments.optimized or original.with_name(original.stem + ".stof.onnx")
    tune = arguments.tune
    if tune or not optimized.is_file() or optimized.stat().st_mtime < original.stat().st_mtime:
        from stof.pipeline import optimize

        say(f"optimizing {original.name}")
        optimize(original, optimized, Options(tune=tune))
    variants = {"optimized": optimized}
    for label, options in (
        (("attention", {"chains": "off"}), ("chains", {"skip": ("*",)})) if arguments.ablation else ()
    ):
        from stof.pipeline import optimize

        path = original.with_name(f"{original.stem}.{label}.onnx")
        path.unlink(missing_ok=True)
        optimize(original, path, Options(verify=False, tune=0.0 if label == "attention" else tune, **options))
        variants[label] = path if path.is_file() else original  # nothing that gains: the original itself
    name = arguments.model.removesuffix(".onnx").rpartition("/")[2]
    for length in arguments.lengths:
        shape = (arguments.batch, length)
        record = measure_point(name, original, variants, shape, threads, arguments.rounds, arguments.without)
        store(arguments.results / "models-cpu.json", record)
        say(*describe_record(record))
    return 0


def _original(model: str) -> Path:
    """The path of a model file; a graph of models/ is filled with random weights first."""
    path = Path(model)
    if path.suffix == ".onnx" and path.is_file():
        return path
    builder = Path("models/build.py")
    if not builder.is_file():
        raise ValueError(f"{model} is no .onnx file, and there is no {builder} here to make a graph of that name")
    path = _FOLDER / f"{model.replace('/', '-')}.onnx"
    if not path.is_file():
        spec = importlib.util.spec_from_file_location("stof_models_build", builder)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        _FOLDER.mkdir(parents=True, exist_ok=True)
        module.write(model, path)
    return path


def random_feeds(found: Any, batch: int, length: int) -> dict[str, np.ndarray]:
    """Random token ids and images and masks of ones, by the inputs' names and types; static sizes stay."""
    rng = np.random.default_rng(0)
    feeds = {}
    for value in found.get_inputs():
        dims = [batch, *(d if isinstance(d, int) else length for d in value.shape[1:])]
        kind = value.type.removeprefix("tensor(").removesuffix(")")
        if kind not in _TYPES:
            raise ValueError(f"input {value.name!r} is {value.type}; the benchmark makes integers, booleans and floats")
        if "mask" in value.name or kind == "bool":
            array: np.ndarray = np.ones(dims)
        elif "type" in value.name:
            array = np.zeros(dims)
        elif "position" in value.name:
            array = np.broadcast_to(np.arange(length), dims)
        elif kind in ("float", "float16"):
            array = rng.standard_normal(dims)
        else:
            array = rng.integers(0, 1000, dims)
        feeds[value.name] = np.ascontiguousarray(array, _TYPES[kind])
    return feeds


def _openvino(path: Path, feeds: Mapping[str, np.ndarray], threads: int) -> Callable[[], np.ndarray]:
    ov = require("openvino")
    try:
        model = ov.Core().read_model(str(path))
        model.reshape({name: list(array.shape) for name, array in feeds.items()})
        settings = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
        request = ov.Core().compile_model(model, "CPU", settings).create_infer_request()
        request.infer(dict(feeds))
    except Exception as error:  # OpenVINO raises types of its own, which differ by version
        raise Unavailable(f"{type(error).__name__}: {str(error).strip()[:200]}") from error

    def infer() -> np.ndarray:
        request.infer(dict(feeds), share_inputs=True)
        found: np.ndarray = request.get_output_tensor(0).data
        return found

    return infer


def _site_calls(
    optimized: Path, calls: list[NodeCall], threads: int
) -> list[tuple[Callable[[], object], int, tuple[Any, ...]]]:
    """Each distinct StofAttention of the model, alone in a session: (run, how many sites it stands for, objects to keep)."""
    model = onnx.load(str(optimized), load_external_data=False)
    nodes = {n.name: n for n in model.graph.node if n.domain == "stof"}
    counts: Counter[tuple[bytes, tuple[Any, ...]]] = Counter()
    for call in calls:
        if call.op != "StofAttention":
            continue
        node = onnx.NodeProto()
        node.CopyFrom(nodes[call.name])
        roles = next((a.s.decode() for a in node.attribute if a.name == "operands"), "").split()
        if set(roles) - {"pad", "unused"}:
            raise Unavailable(f"site {call.name!r} has operands {' '.join(roles)}, which are not made up here")
        kept = [a for a in node.attribute if a.name != "mask_id"]
        del node.attribute[:]
        node.attribute.extend(sorted(kept, key=lambda a: a.name))
        node.name = "site"
        del node.input[:], node.output[:]
        node.input.extend(f"x{i}" for i in range(len(call.inputs)))
        node.output.append("y")
        counts[node.SerializeToString(deterministic=True), call.inputs] += 1
    found: list[tuple[Callable[[], object], int, tuple[Any, ...]]] = []
    for (serialized, shapes), count in counts.items():
        rng = np.random.default_rng(2)
        feeds = {}
        for i, (kind, shape) in enumerate(shapes):
            array = rng.standard_normal(shape, np.float32) if i < 3 else np.ones(shape)
            feeds[f"x{i}"] = array.astype(_TYPES[kind])
        graph = helper.make_graph(
            [onnx.NodeProto.FromString(serialized)],
            "site",
            [
                helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
                for n, a in feeds.items()
            ],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        )
        one = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("stof", 1)])
        one.ir_version = 9
        alone = session(one.SerializeToString(), threads, stof=True)
        binding = bind_inputs(alone, feeds)
        found.append((partial(alone.run_with_iobinding, binding), count, (alone, binding)))
    return found


def _first(found: Any, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
    return np.asarray(found.run(None, dict(feeds))[0])


def measure_point(
    name: str,
    original: Path,
    variants: Mapping[str, Path],
    shape: tuple[int, int],
    threads: int,
    rounds: int,
    without: list[str],
) -> Record:
    """Measures one model at one shape [batch, length]; ``variants`` are files by label, "optimized" among them."""
    batch, length = shape
    optimized = variants["optimized"]
    missing: dict[str, str] = {}
    before = session(str(original), threads)
    own = {k: session(str(path), threads, stof=True) for k, path in variants.items()}
    feeds = random_feeds(before, batch, length)
    runs: dict[str, Callable[[], np.ndarray]] = {
        "original": lambda: before.run(None, feeds)[0],
        **{k: partial(_first, found, feeds) for k, found in own.items()},
    }
    expected = runs["original"]()
    if "openvino" in without:
        missing["openvino"] = "left out by --without"
    else:
        try:
            runs["openvino"] = _openvino(original, feeds, threads)
        except Unavailable as reason:
            missing["openvino"] = str(reason)
    span = float(expected.max() - expected.min())
    errors = {k: float(np.abs(call() - expected).max()) / span for k, call in runs.items() if k != "original"}
    for kind in variants:
        if not errors[kind] <= _ALLOWED:
            raise ValueError(f"the model {kind!r} gives an output that differs by {errors[kind]:.1e} of the range")
    sites = []
    if "quotient" not in without:
        profiled = profile(str(optimized), feeds, threads, stof=True, runs=1)[-1]
        sites = _site_calls(optimized, profiled, threads)
    rates = measure.rates(threads)
    timings = measure.interleave([*runs.values(), *[call for call, _, _ in sites]], rounds)
    rates = measure.best_rates(rates, measure.rates(threads))
    times = dict(zip(runs, timings, strict=False))
    record: Record = {
        "key": [name, batch, length, threads],
        "grid": "model",
        "model": name,
        "shape": {"B": batch, "S": length, "dtype": "fp32"},
        "machine": {**measure.machine(threads), **rates},
        "rounds": rounds,
        "seconds": {k: round(t.best, 5) for k, t in times.items()},
        "median_seconds": {k: round(t.median, 5) for k, t in times.items()},
        "error": {k: float(f"{e:.1e}") for k, e in errors.items()},
        "missing": missing,
    }
    if sites:
        alone = sum(t.best * count for t, (_, count, _) in zip(timings[len(runs) :], sites, strict=True))
        rest, attention = rest_seconds(profile(str(original), feeds, threads, stof=False), length, length)
        record["quotient"] = {
            "non_attention_s": round(rest, 5),
            "attention_s": round(attention, 5),
            "op_alone_s": round(alone, 5),
            "quotient": round(times["optimized"].best / (rest + alone), 4),
        }
    before = None
    own.clear()
    runs.clear()
    sites.clear()
    if "memory" not in without:
        record["memory"] = {
            k: peak_memory(str(p), feeds, threads) for k, p in (("original", original), ("optimized", optimized))
        }
    return record


def describe_record(record: Record) -> list[str]:
    """The record as text."""
    seconds, machine = record["seconds"], record["machine"]
    found = [
        f"{record['model']}  B{record['shape']['B']} S{record['shape']['S']}, {machine['threads']} thread(s), "
        f"best of {record['rounds']}; FMA {machine['fma_gflops']:.0f} GFLOP/s, read {machine['read_gbps']:.1f} GB/s"
    ]
    for name, value in seconds.items():
        error = f", differs by {record['error'][name]:.0e} of the range" if name in record["error"] else ""
        found.append(f"  {name:10s} {value * 1e3:10.1f} ms  {value / seconds['optimized']:6.2f}x{error}")
    found += [f"  {name:10s} missing: {reason}" for name, reason in record["missing"].items()]
    if "quotient" in record:
        q = record["quotient"]
        found.append(
            f"  quotient {q['quotient']:.3f} = optimized / (outside attention {q['non_attention_s'] * 1e3:.1f} ms + "
            f"operators alone {q['op_alone_s'] * 1e3:.1f} ms); attention took {q['attention_s'] * 1e3:.1f} ms"
        )
    if "memory" in record:
        memory = record["memory"]
        first, second = (memory[k]["above"] / 2**20 for k in ("original", "optimized"))
        found.append(
            f"  peak memory of a run above the weights: {first:.0f} MiB -> {second:.0f} MiB, {first / second:.1f}x less"
        )
    return found
