# SPDX-License-Identifier: Apache-2.0
"""Whole quantized models in ONNX Runtime, before and after: ``python -m bench quantized``.

Stored graphs get random weights and are quantized by ONNX Runtime's own tools, attention matmuls included. The quantized model,
the one with the graph's own rounding and the one with float attention alternate, each optimized by ONNX Runtime as far as it
can; the medians count. Files are kept in ``--folder``, and found there again; times go to ``--results``.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

import stof
from bench.core.clone import load_module
from stof.bench import measure
from stof.bench.results import Record, store
from stof.options import Options
from stof.terminal import say

MODELS = ("modernbert-base.torchscript.eager", "bert-base.torchscript.eager")
FORMATS = {"qdq": "QDQ", "operator": "QOperator"}
OPERATORS = {"matmul": ["MatMul"], "all": None}
_CALIBRATION_LENGTH = 128
_TOKENS = 90  # ids below it are in every vocabulary


@dataclass(frozen=True)
class QuantizedFiles:
    """A quantized model and what became of it.

    Attributes:
        quantized: by ONNX Runtime's tools.
        rounded: optimized, with the graph's own rounding.
        dequantized: optimized, with float attention.
    """

    quantized: Path
    rounded: Path
    dequantized: Path

    def by_name(self) -> dict[str, Path]:
        """By the names of the table."""
        return {"quantized": self.quantized, "own rounding": self.rounded, "float attention": self.dequantized}


def draw(model: onnx.ModelProto, length: int, seed: int = 0) -> dict[str, np.ndarray]:
    """One set of inputs: token ids, masks without padding, pixels."""
    rng = np.random.default_rng(seed)
    feed: dict[str, np.ndarray] = {}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        shape = [d.dim_value or (1 if i == 0 else length) for i, d in enumerate(dims)]
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            feed[value.name] = rng.standard_normal(shape).astype(np.float32)
        else:
            feed[value.name] = np.ones(shape, np.int64) if "mask" in value.name else rng.integers(5, _TOKENS, shape)
    return feed


class RunError(ValueError):
    """A model does not run at a length."""


def prepare(name: str, format_name: str, operators: str, folder: Path) -> QuantizedFiles:
    """Makes the files of a model that are not in a folder yet."""
    # The tools take a second to import, which other commands do not need.
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    short = name.replace("/", "-")
    source, prepared = folder / f"{short}.onnx", folder / f"{short}.prepared.onnx"
    stem = f"{short}.{format_name}.{operators}"
    files = QuantizedFiles(*(folder / f"{stem}{end}.onnx" for end in ("", ".rounded", ".dequantized")))
    if not source.is_file():
        load_module("models/build.py").write(name, source)
    if not prepared.is_file():
        quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
    if not files.quantized.is_file():
        feed = draw(onnx.load(source, load_external_data=False), _CALIBRATION_LENGTH)
        quantize_static(
            str(prepared),
            str(files.quantized),
            _make_calibration_reader(feed),
            quant_format=QuantFormat[FORMATS[format_name]],
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            op_types_to_quantize=OPERATORS[operators],
        )
    # Verification of models of this size is a matter of the tests, on narrow ones.
    if not files.rounded.is_file():
        stof.optimize(files.quantized, files.rounded, Options(verify=False))
    if not files.dequantized.is_file():
        stof.optimize(files.quantized, files.dequantized, Options(verify=False, dequantize_attention=True, force=True))
    return files


def _make_calibration_reader(feed: dict[str, np.ndarray]) -> Any:
    from onnxruntime.quantization import CalibrationDataReader

    class OneFeed(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._feeds = iter([feed])

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self._feeds, None)

    return OneFeed()


def time_files(files: QuantizedFiles, length: int, threads: int, rounds: int) -> dict[str, float]:
    """The median milliseconds of each file, of interleaved runs; the first one of each does not count.

    Raises:
        RunError: where the quantized model does not run.
    """
    feed = draw(onnx.load(files.quantized, load_external_data=False), length)
    sessions = {}
    for name, path in files.by_name().items():
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        stof.register(options)
        sessions[name] = ort.InferenceSession(str(path), options, ["CPUExecutionProvider"])
        try:
            sessions[name].run(None, feed)
        except Exception as error:  # the runtime's own types have no common base
            if name != "quantized":
                raise
            cause = str(error).partition("Status Message: ")[2] or str(error)
            raise RunError(
                f"{files.quantized.name} does not run at S = {length}: {cause.splitlines()[0]}. Leave a length beyond its "
                "positions out of --lengths"
            ) from error
    times: dict[str, list[float]] = {name: [] for name in sessions}
    for _ in range(rounds):
        for name, session in sessions.items():
            start = time.perf_counter()
            session.run(None, feed)
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: float(np.median(found)) for name, found in times.items()}


def describe(
    case: tuple[str, str, str, int],
    times: Mapping[str, float],
    arguments: argparse.Namespace,
    rates: Mapping[str, float],
) -> Record:
    """The record of a model, a format, the quantized operators and a length.

    Args:
        case: these.
        times: median milliseconds by the names of the table.
        arguments: of the command.
        rates: of the machine.
    """
    name, format_name, operators, length = case
    return {
        "key": [*case, arguments.threads],
        "grid": "quantized",
        "model": name,
        "format": format_name,
        "operators": operators,
        "shape": {"B": 1, "S": length},
        "machine": {**measure.machine(arguments.threads), **rates},
        "rounds": arguments.rounds,
        "median_seconds": {key: round(1e-3 * ms, 6) for key, ms in times.items()},
    }


def run(arguments: argparse.Namespace) -> int:
    """The command: a table, and its records; 1 where a length is beyond a model's positions."""
    arguments.folder.mkdir(parents=True, exist_ok=True)
    logging.disable(logging.WARNING)
    say(
        "| model | format | quantized operators | S | quantized | own rounding | float attention |",
        "|---|---|---|---|---|---|---|",
    )
    beyond: list[str] = []
    rates = measure.rates(arguments.threads)
    for name in arguments.models:
        for format_name in arguments.formats:
            for operators in arguments.operators:
                files = prepare(name, format_name, operators, arguments.folder)
                for length in arguments.lengths:
                    try:
                        found = time_files(files, length, arguments.threads, arguments.rounds)
                    except RunError as error:
                        beyond.append(str(error))
                        continue
                    case = (name, format_name, operators, length)
                    store(arguments.results / "quantized-cpu.json", describe(case, found, arguments, rates))
                    base = found["quantized"]
                    cells = [f"{base:.0f} ms", *(f"{base / ms:.2f}x" for n, ms in found.items() if n != "quantized")]
                    say(f"| {name} | {format_name} | {operators} | {length} | {' | '.join(cells)} |")
    say(*beyond)
    return 1 if beyond else 0
