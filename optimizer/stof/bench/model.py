# SPDX-License-Identifier: Apache-2.0
"""Times a whole model before and after in turns, and measures the peak memory of both."""

from __future__ import annotations

import argparse
import math
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx

from stof.bench import measure
from stof.bench.drawn_feeds import ModelFeeds, TimedFeeds
from stof.bench.measure import Timing
from stof.bench.memory import peak_memory
from stof.bench.results import Record, store
from stof.bench.sessions import session
from stof.errors import ArgumentError
from stof.options import Options
from stof.pipeline import optimize
from stof.terminal import read_shapes, say
from stof.verification.compare import compare_outputs
from stof.verification.quantization import find_quantizers
from stof.verification.result import Comparison

# Of the outputs' range; stof-optimize has compared far more closely before.
_ALLOWED = {"float16": 1e-2}
_ALLOWED_ELSE = 1e-3
_BF16 = "bf16"  # the variant of --allow-bf16
# bf16 has 8 bits, of which each layer rounds some away; stof-optimize has held each operator to --max-error.
_ALLOWED_BF16 = 5e-2
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


@dataclass(frozen=True)
class Extra:
    """A figure beside the times of the models.

    Attributes:
        calls: what takes turns with the models.
        complete: adds the figure to the record, from the time of the optimized model and those of the calls.
    """

    calls: Sequence[Callable[[], object]]
    complete: Callable[[Record, Timing, Sequence[Timing]], None]


# From the files, the inputs, the original's first output and a number of threads; a text is why there is none of it.
MakeExtra = Callable[[ModelFiles, TimedFeeds, np.ndarray, int], Extra | str | None]


def run(arguments: argparse.Namespace, threads: int) -> int:
    """Times the user's file at every length, prints the times, and stores them where ``--results`` says."""
    path: Path = arguments.model
    if not path.is_file():
        raise ArgumentError(
            f"{path} is no file; a graph of models/ is timed in a clone of the repository: python -m bench model {path}"
        )
    run_model(path, path.name.removesuffix(".onnx"), arguments, threads)
    return 0


def run_model(
    original: Path,
    name: str,
    arguments: argparse.Namespace,
    threads: int,
    extras: Mapping[str, MakeExtra] = MappingProxyType({}),
) -> None:
    """Optimizes a model where that is not done, times it at every length, prints and stores the records.

    Args:
        original: its file.
        name: in records.
        arguments: of the command.
        threads: of a session.
        extras: further figures, by name.
    """
    shapes = read_shapes(arguments.shape)
    variants = _write_variants(original, arguments, shapes)
    drawn = ModelFeeds(original, shapes, tuple(arguments.inputs))
    files = ModelFiles(name, original, variants, bool(find_quantizers(drawn.model)), _find_dtype(drawn.model))
    records = []
    for feeds in drawn.draw(arguments.lengths, arguments.batch):
        record = time_model(files, drawn, feeds, threads, arguments.rounds, arguments.without, extras)
        if arguments.results is not None:
            store(arguments.results / "models-cpu.json", record)
        say(*describe_record(record))
        records.append(record)
    say(*describe_gains(records))


def _write_variants(
    original: Path, arguments: argparse.Namespace, shapes: dict[str, tuple[int, int]]
) -> dict[str, Path]:
    """The files of the optimized model, of ``--allow-bf16`` and of ``--ablation``, by label."""
    optimized: Path = arguments.optimized or original.with_name(original.stem + ".stof.onnx")
    tune = arguments.tune
    if tune or not optimized.is_file() or optimized.stat().st_mtime < original.stat().st_mtime:
        say(f"optimizing {original.name}")
        options = Options(tune=tune, shapes=shapes, inputs=tuple(arguments.inputs))
        report = optimize(original, optimized, options)
        if report.copied:
            say("nothing is replaced: both models are the same")
    variants = {"optimized": optimized}
    changes: dict[str, dict[str, Any]] = {"attention": {"chains": "off"}, "chains": {"skip": ("*",)}}
    if arguments.allow_bf16:
        path = original.with_name(f"{original.stem}.{_BF16}.onnx")
        say(f"optimizing {original.name} with --allow-bf16")
        report = optimize(
            original, path, Options(tune=tune, shapes=shapes, inputs=tuple(arguments.inputs), allow_bf16=True)
        )
        assert report.attention_precision is not None
        say(report.attention_precision.headline)
        variants[_BF16] = path
    for label, changed in changes.items() if arguments.ablation else ():
        path = original.with_name(f"{original.stem}.{label}.onnx")
        path.unlink(missing_ok=True)
        options_of_variant = Options(verify=False, tune=0.0 if label == "attention" else tune, shapes=shapes, **changed)
        optimize(original, path, options_of_variant)
        variants[label] = path if path.is_file() else original  # nothing that gains: the original itself
    return variants


def _find_dtype(model: onnx.ModelProto) -> str:
    """The float type of most weights."""
    counts: Counter[str] = Counter()
    for tensor in model.graph.initializer:
        if tensor.data_type in _FLOATS:
            counts[_FLOATS[tensor.data_type]] += math.prod(tensor.dims)
    return max(counts, key=lambda name: counts[name]) if counts else "fp32"


def compare(
    drawn: ModelFeeds, timed: TimedFeeds, runs: Sequence[Sequence[np.ndarray]], tolerance: float = 0.0
) -> list[Comparison]:
    """Holds the outputs of a variant against the original's, those of rows of KV caches without a key left out.

    Args:
        drawn: tells which rows hold keys.
        timed: the inputs.
        runs: the original's outputs, then the variant's.
        tolerance: an output may differ by this share of its range, or by that of its type, whichever is larger.
    """
    comparisons = []
    for value, expected, output in zip(drawn.model.graph.output, *runs, strict=True):
        allowed = _find_allowed_share(expected, tolerance)
        held = drawn.inputs.cache_rows(value.name, timed.feeds, expected.shape)
        comparisons.append(compare_outputs(timed.case, allowed, value.name, expected, [expected], output, held=held))
    return comparisons


def _find_allowed_share(output: np.ndarray, tolerance: float) -> float:
    """The largest difference that an output may have, over its range."""
    return max(_ALLOWED.get(output.dtype.name, _ALLOWED_ELSE), tolerance)


def _largest_share(comparisons: Sequence[Comparison], expected: Sequence[np.ndarray], tolerance: float) -> float:
    """The largest difference over the output's range; infinite where shapes or whole numbers differ."""
    pairs = zip(comparisons, expected, strict=True)
    return max((_share(c, _find_allowed_share(output, tolerance)) for c, output in pairs), default=0.0)


def _share(comparison: Comparison, allowed: float) -> float:
    if comparison.ok and not comparison.difference:
        return 0.0
    return comparison.difference / comparison.budget * allowed if comparison.budget else math.inf


def time_model(
    files: ModelFiles,
    drawn: ModelFeeds,
    timed: TimedFeeds,
    threads: int,
    rounds: int,
    without: Sequence[str] = (),
    extras: Mapping[str, MakeExtra] = MappingProxyType({}),
) -> Record:
    """Times one model on one set of inputs.

    Args:
        files: of the model.
        drawn: where the inputs come from.
        timed: the inputs.
        threads: of a session.
        rounds: how often the candidates take turns.
        without: figures that are left out; "memory" is one.
        extras: further figures, by name.

    Raises:
        ValueError: when the outputs of a variant are not the original's.
    """
    feeds = dict(timed.feeds)
    before = session(str(files.original), threads)
    variants = {k: session(str(path), threads, stof=True) for k, path in files.variants.items()}
    expected = before.run(None, feeds)
    errors = _check_variants(files, drawn, timed, expected, variants)
    runs: dict[str, Callable[[], object]] = {
        "original": partial(before.run, None, feeds),
        **{k: partial(candidate.run, None, feeds) for k, candidate in variants.items()},
    }
    made = {name: make(files, timed, expected[0], threads) for name, make in extras.items()}
    missing = {name: extra for name, extra in made.items() if isinstance(extra, str)}
    kept = [extra for extra in made.values() if isinstance(extra, Extra)]
    made.clear()
    rates = measure.rates(threads)
    timings = iter(measure.interleave([*runs.values(), *[call for extra in kept for call in extra.calls]], rounds))
    rates = measure.best_rates(rates, measure.rates(threads))
    times = dict(zip(runs, timings, strict=False))
    record: Record = {
        **_describe_case(files, timed, threads),
        "machine": {**measure.machine(threads), **rates},
        "rounds": rounds,
        "seconds": {k: round_seconds(t.best) for k, t in times.items()},
        "median_seconds": {k: round_seconds(t.median) for k, t in times.items()},
        "error": {k: float(f"{e:.1e}") for k, e in errors.items()},
        "missing": missing,
    }
    for extra in kept:
        extra.complete(record, times["optimized"], [next(timings) for _ in extra.calls])
    del before
    for sessions in (variants, runs, kept):
        sessions.clear()
    if "memory" not in without:
        _add_memory(record, files, feeds, threads)
    return record


def _describe_case(files: ModelFiles, timed: TimedFeeds, threads: int) -> Record:
    """What was timed, as fields of a record."""
    name = f"{files.name}, one token" if timed.is_token else files.name
    return {
        "key": [name, timed.batch, timed.length, threads],
        "grid": "model",
        "model": name,
        "inputs": timed.words,
        "shape": {"B": timed.batch, "S": timed.length, "dtype": files.dtype},
    }


def _check_variants(
    files: ModelFiles, drawn: ModelFeeds, timed: TimedFeeds, expected: Sequence[np.ndarray], sessions: Mapping[str, Any]
) -> dict[str, float]:
    """The largest differences of the variants' outputs from the original's, over the range of an output.

    Raises:
        ValueError: when one is too large.
    """
    errors = {}
    for kind, variant in sessions.items():
        runs = expected, variant.run(None, dict(timed.feeds))
        tolerance = _ALLOWED_BF16 if kind == _BF16 else 0.0
        comparisons = compare(drawn, timed, runs, tolerance)
        errors[kind] = _largest_share(comparisons, expected, tolerance)
        failed = [c for c in comparisons if not c.ok]
        if failed and not files.is_quantized:  # there stof-optimize has compared with the spread of the original's runs
            raise ValueError(f"the model {kind!r} gives other outputs than the original: {failed[0].message()}")
    return errors


def _add_memory(record: Record, files: ModelFiles, feeds: Mapping[str, np.ndarray], threads: int) -> None:
    """Adds the peak memory of a run of both models."""
    paths = (("original", files.original), ("optimized", files.optimized))
    try:
        record["memory"] = {k: peak_memory(str(path), feeds, threads) for k, path in paths}
    except (OSError, ValueError, subprocess.CalledProcessError) as reason:
        record["missing"]["memory"] = f"{type(reason).__name__}: {str(reason)[:200]}"


def round_seconds(seconds: float) -> float:
    """Seconds to 10 µs, of short runs to four digits."""
    return round(seconds, 5) if seconds >= 0.1 else float(f"{seconds:.4g}")


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
    lines = [
        f"{record['model']}  {record['inputs']}; {machine['threads']} thread(s), "
        f"best of {record['rounds']}; FMA {machine['fma_gflops']:.0f} GFLOP/s, read {machine['read_gbps']:.1f} GB/s"
    ]
    for name, value in seconds.items():
        error = f", differs by {record['error'][name]:.0e} of the range" if name in record["error"] else ""
        lines.append(f"  {name:10s} {value * 1e3:10.2f} ms  {value / seconds['optimized']:6.2f}x{error}")
    lines += [f"  {name:10s} missing: {reason}" for name, reason in record["missing"].items()]
    if "quotient" in record:
        q = record["quotient"]
        lines.append(
            f"  quotient {q['quotient']:.3f} = optimized / (outside attention {q['non_attention_s'] * 1e3:.1f} ms + "
            f"operators alone {q['op_alone_s'] * 1e3:.1f} ms); attention took {q['attention_s'] * 1e3:.1f} ms"
        )
    if "memory" in record:
        memory = record["memory"]
        first, second = (memory[k]["above"] / 2**20 for k in ("original", "optimized"))
        lines.append(
            f"  peak memory of a run above the weights: {first:.0f} MiB -> {second:.0f} MiB, "
            f"{first / max(second, 1e-3):.1f}x less"
        )
    return lines
