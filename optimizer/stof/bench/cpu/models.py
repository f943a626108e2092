# SPDX-License-Identifier: Apache-2.0
"""Times a whole model before and after in turns, with OpenVINO, the quotient of the possible, and peak memory."""

from __future__ import annotations

import argparse
import importlib.util
import math
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from stof.bench.core import measure
from stof.bench.core.candidate import Unavailable, require
from stof.bench.core.drawn_feeds import ModelFeeds, TimedFeeds
from stof.bench.core.results import RESULTS, Record, store
from stof.bench.cpu.baselines_ort import bind_inputs, session
from stof.bench.cpu.memory import peak_memory
from stof.bench.cpu.profile import NodeCall, profile, rest_seconds
from stof.options import Options
from stof.pipeline import optimize
from stof.terminal import read_shapes, say
from stof.verification.compare import compare_outputs
from stof.verification.quantization import find_quantizers
from stof.verification.result import Comparison

_FOLDER = Path("build/bench")
_TYPES = {
    "float": "float32",
    "float16": "float16",
    "bool": "bool",
    "int64": "int64",
    "int32": "int32",
    "uint8": "uint8",
}
# Of the outputs' range; stof-optimize has compared far more closely before.
_ALLOWED = {"float16": 1e-2}
_ALLOWED_ELSE = 1e-3
_FLOATS = {onnx.TensorProto.FLOAT: "fp32", onnx.TensorProto.FLOAT16: "fp16", onnx.TensorProto.BFLOAT16: "bf16"}


@dataclass(frozen=True)
class ModelFiles:
    """The files of one model.

    Attributes:
        name: for records.
        original: the model.
        variants: optimized files by label, "optimized" among them.
        is_quantized: the original quantizes what it computes at run time, and rounding makes steps.
        dtype: of most of its weights.
    """

    name: str
    original: Path
    variants: Mapping[str, Path]
    is_quantized: bool
    dtype: str

    @property
    def optimized(self) -> Path:
        """The optimized model."""
        return self.variants["optimized"]


def run(arguments: argparse.Namespace, threads: int) -> int:
    """Measures, prints and stores a model at every length."""
    original, is_stored = _original(arguments.model)
    shapes = read_shapes(arguments.shape)
    optimized: Path = arguments.optimized or original.with_name(original.stem + ".stof.onnx")
    tune = arguments.tune
    if tune or not optimized.is_file() or optimized.stat().st_mtime < original.stat().st_mtime:
        say(f"optimizing {original.name}")
        options = Options(tune=tune, shapes=shapes, inputs=tuple(arguments.inputs))
        report = optimize(original, optimized, options)
        if report.copied:
            say("nothing is replaced: both models are the same")
    variants = {"optimized": optimized}
    for label, changed in (
        (("attention", {"chains": "off"}), ("chains", {"skip": ("*",)})) if arguments.ablation else ()
    ):
        path = original.with_name(f"{original.stem}.{label}.onnx")
        path.unlink(missing_ok=True)
        own = Options(verify=False, tune=0.0 if label == "attention" else tune, shapes=shapes, **changed)
        optimize(original, path, own)
        variants[label] = path if path.is_file() else original  # nothing that gains: the original itself
    drawn = ModelFeeds(original, shapes, tuple(arguments.inputs))
    quantized = bool(find_quantizers(drawn.model))
    name = arguments.model.removesuffix(".onnx").rpartition("/")[2]
    files = ModelFiles(name, original, variants, quantized, _find_dtype(drawn.model))
    records = []
    for feeds in drawn.draw(arguments.lengths, arguments.batch):
        record = measure_point(files, drawn, feeds, threads, arguments.rounds, arguments.without)
        results = arguments.results or (RESULTS if is_stored else None)
        if results is not None:
            store(results / "models-cpu.json", record)
        say(*describe_record(record))
        records.append(record)
    say(*describe_gains(records))
    return 0


def _find_dtype(model: onnx.ModelProto) -> str:
    """The float type of most weights."""
    counts: Counter[str] = Counter()
    for tensor in model.graph.initializer:
        if tensor.data_type in _FLOATS:
            counts[_FLOATS[tensor.data_type]] += math.prod(tensor.dims)
    return max(counts, key=lambda name: counts[name]) if counts else "fp32"


def _original(model: str) -> tuple[Path, bool]:
    """The path of a model file, and whether it is a graph of models/, which is filled with random weights first."""
    path = Path(model)
    if path.is_file():
        return path, False
    builder = Path("models/build.py")
    if not builder.is_file():
        raise ValueError(f"{model} is no file, and there is no {builder} here to make a graph of that name")
    path = _FOLDER / f"{model.replace('/', '-')}.onnx"
    if not path.is_file():
        spec = importlib.util.spec_from_file_location("stof_models_build", builder)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        _FOLDER.mkdir(parents=True, exist_ok=True)
        module.write(model, path)
    return path, True


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


def compare(drawn: ModelFeeds, timed: TimedFeeds, runs: Sequence[Sequence[np.ndarray]]) -> list[Comparison]:
    """Holds the outputs of a variant against the original's, those of rows of KV caches without a key left out.

    Args:
        drawn: tells which rows hold keys.
        timed: the inputs.
        runs: the original's outputs, then the variant's.
    """
    found = []
    for value, expected, output in zip(drawn.model.graph.output, *runs, strict=True):
        allowed = _allowed_share(expected)
        held = drawn.inputs.cache_rows(value.name, timed.feeds, expected.shape)
        found.append(compare_outputs(timed.case, allowed, value.name, expected, [expected], output, held=held))
    return found


def _allowed_share(output: np.ndarray) -> float:
    """The largest difference that an output may have, over its range."""
    return _ALLOWED.get(output.dtype.name, _ALLOWED_ELSE)


def _largest_share(comparisons: Sequence[Comparison], expected: Sequence[np.ndarray]) -> float:
    """The largest difference over the output's range; infinite where shapes or whole numbers differ."""
    pairs = zip(comparisons, expected, strict=True)
    return max((_share(c, _allowed_share(output)) for c, output in pairs), default=0.0)


def _share(comparison: Comparison, allowed: float) -> float:
    if comparison.ok and not comparison.difference:
        return 0.0
    return comparison.difference / comparison.budget * allowed if comparison.budget else math.inf


def measure_point(
    files: ModelFiles, drawn: ModelFeeds, timed: TimedFeeds, threads: int, rounds: int, without: Sequence[str]
) -> Record:
    """Measures one model on one set of inputs.

    Raises:
        ValueError: when the outputs of a variant are not the original's.
    """
    feeds = dict(timed.feeds)
    missing: dict[str, str] = {}
    before = session(str(files.original), threads)
    own = {k: session(str(path), threads, stof=True) for k, path in files.variants.items()}
    runs: dict[str, Callable[[], object]] = {
        "original": partial(before.run, None, feeds),
        **{k: partial(found.run, None, feeds) for k, found in own.items()},
    }
    expected = before.run(None, feeds)
    errors = {}
    for kind, found in own.items():
        comparisons = compare(drawn, timed, (expected, found.run(None, feeds)))
        errors[kind] = _largest_share(comparisons, expected)
        failed = [c for c in comparisons if not c.ok]
        if failed and not files.is_quantized:  # there stof-optimize has compared with the spread of the original's runs
            raise ValueError(f"the model {kind!r} gives other outputs than the original: {failed[0].message()}")
    if "openvino" in without:
        missing["openvino"] = "left out by --without"
    else:
        try:
            runs["openvino"] = _openvino(files.original, feeds, threads)
            errors["openvino"] = _difference(expected[0], np.asarray(runs["openvino"]()))
        except Unavailable as reason:
            missing["openvino"] = str(reason)
    sites: list[tuple[Callable[[], object], int, tuple[Any, ...]]] = []
    if "quotient" not in without and not timed.is_token:
        try:
            profiled = profile(str(files.optimized), feeds, threads, stof=True, runs=1)[-1]
            sites = _site_calls(files.optimized, profiled, threads)
        except Exception as reason:  # an extra: whatever ONNX Runtime says about a node by itself
            missing["quotient"] = f"{type(reason).__name__}: {' '.join(str(reason).split())[:200]}"
    rates = measure.rates(threads)
    timings = measure.interleave([*runs.values(), *[call for call, _, _ in sites]], rounds)
    rates = measure.best_rates(rates, measure.rates(threads))
    times = dict(zip(runs, timings, strict=False))
    name = f"{files.name}, one token" if timed.is_token else files.name
    record: Record = {
        "key": [name, timed.batch, timed.length, threads],
        "grid": "model",
        "model": name,
        "inputs": timed.words,
        "shape": {"B": timed.batch, "S": timed.length, "dtype": files.dtype},
        "machine": {**measure.machine(threads), **rates},
        "rounds": rounds,
        "seconds": {k: _round_seconds(t.best) for k, t in times.items()},
        "median_seconds": {k: _round_seconds(t.median) for k, t in times.items()},
        "error": {k: float(f"{e:.1e}") for k, e in errors.items()},
        "missing": missing,
    }
    if sites:
        alone = sum(t.best * count for t, (_, count, _) in zip(timings[len(runs) :], sites, strict=True))
        before_runs = profile(str(files.original), feeds, threads, stof=False)
        rest, attention = rest_seconds(before_runs, *timed.scores)
        record["quotient"] = {
            "non_attention_s": _round_seconds(rest),
            "attention_s": _round_seconds(attention),
            "op_alone_s": _round_seconds(alone),
            "quotient": round(times["optimized"].best / (rest + alone), 4),
        }
    del before
    own.clear()
    runs.clear()
    sites.clear()
    if "memory" not in without:
        paths = (("original", files.original), ("optimized", files.optimized))
        try:
            record["memory"] = {k: peak_memory(str(path), feeds, threads) for k, path in paths}
        except (OSError, ValueError, subprocess.CalledProcessError) as reason:
            missing["memory"] = f"{type(reason).__name__}: {str(reason)[:200]}"
    return record


def _round_seconds(seconds: float) -> float:
    """Seconds to 10 µs, of short runs to four digits."""
    return round(seconds, 5) if seconds >= 0.1 else float(f"{seconds:.4g}")


def _difference(expected: np.ndarray, found: np.ndarray) -> float:
    """The largest difference over the range of the expected numbers."""
    if expected.shape != found.shape or not expected.size:
        return math.inf if expected.shape != found.shape else 0.0
    with np.errstate(invalid="ignore"):
        away = np.abs(found.astype(np.float64) - expected)
        return float(np.nanmax(away)) / max(float(np.nanmax(expected) - np.nanmin(expected)), 1e-30)


def describe_gains(records: Sequence[Record]) -> list[str]:
    """How much faster the optimized model is, a line for each set of inputs."""
    lines = [f"{records[0]['machine']['threads']} thread(s): original -> optimized"] if records else []
    for record in records:
        before, after = (1e3 * record["seconds"][k] for k in ("original", "optimized"))
        token = "one token, " if record["model"].endswith(", one token") else ""
        lines.append(
            f"  {before:9.4g} ms -> {after:9.4g} ms  {before / max(after, 1e-9):6.2f}x  {token}{record['inputs']}"
        )
    return lines


def describe_record(record: Record) -> list[str]:
    """The record as text."""
    seconds, machine = record["seconds"], record["machine"]
    found = [
        f"{record['model']}  {record['inputs']}; {machine['threads']} thread(s), "
        f"best of {record['rounds']}; FMA {machine['fma_gflops']:.0f} GFLOP/s, read {machine['read_gbps']:.1f} GB/s"
    ]
    for name, value in seconds.items():
        error = f", differs by {record['error'][name]:.0e} of the range" if name in record["error"] else ""
        found.append(f"  {name:10s} {value * 1e3:10.2f} ms  {value / seconds['optimized']:6.2f}x{error}")
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
            f"  peak memory of a run above the weights: {first:.0f} MiB -> {second:.0f} MiB, "
            f"{first / max(second, 1e-3):.1f}x less"
        )
    return found
