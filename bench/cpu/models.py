# SPDX-License-Identifier: Apache-2.0
"""``python -m bench model`` on the CPU: the user's command, on graphs of models/ too, with OpenVINO and the quotient."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from bench.core.candidate import Unavailable, require
from bench.core.clone import RESULTS, load_module
from bench.cpu.baselines_ort import bind_inputs
from bench.cpu.profile import NodeCall, profile, rest_seconds
from stof.bench.drawn_feeds import TimedFeeds
from stof.bench.measure import Timing
from stof.bench.model import Extra, MakeExtra, ModelFiles, round_seconds, run_model
from stof.bench.results import Record
from stof.bench.sessions import session

_FOLDER = Path("build/bench")
_TYPES = {
    "float": "float32",
    "float16": "float16",
    "bool": "bool",
    "int64": "int64",
    "int32": "int32",
    "uint8": "uint8",
}


def run(arguments: argparse.Namespace, threads: int) -> int:
    """Times a file, or a graph of models/, whose results are stored in docs/results unless --results says another place."""
    original, is_stored = _find_original(arguments.model)
    name = arguments.model.removesuffix(".onnx").rpartition("/")[2]
    if is_stored and arguments.results is None:
        arguments.results = RESULTS
    makers: dict[str, MakeExtra] = {"openvino": _make_openvino, "quotient": _make_quotient}
    if "openvino" in arguments.without:
        makers["openvino"] = lambda *_: "left out by --without"
    if "quotient" in arguments.without:
        del makers["quotient"]
    run_model(original, name, arguments, threads, makers)
    return 0


def _find_original(model: str) -> tuple[Path, bool]:
    """The path of a model file, and whether it is a graph of models/, which is filled with random weights first."""
    path = Path(model)
    if path.is_file():
        return path, False
    path = _FOLDER / f"{model.replace('/', '-')}.onnx"
    if not path.is_file():
        try:
            builder = load_module("models/build.py")
        except ValueError as error:
            raise ValueError(f"{model} is no file, and {error}") from error
        _FOLDER.mkdir(parents=True, exist_ok=True)
        builder.write(model, path)
    return path, True


def _make_openvino(files: ModelFiles, timed: TimedFeeds, expected: np.ndarray, threads: int) -> Extra | str:
    """OpenVINO's time of the original."""
    try:
        call = _openvino(files.original, timed.feeds, threads)
    except Unavailable as reason:
        return str(reason)
    error = _difference(expected, np.asarray(call()))

    def complete(record: Record, _: Timing, timings: Sequence[Timing]) -> None:
        record["seconds"]["openvino"] = round_seconds(timings[0].best)
        record["median_seconds"]["openvino"] = round_seconds(timings[0].median)
        record["error"]["openvino"] = float(f"{error:.1e}")

    return Extra([call], complete)


def _make_quotient(files: ModelFiles, timed: TimedFeeds, _: np.ndarray, threads: int) -> Extra | str | None:
    """The optimized model's time over that of the original's nodes outside of attention and of the operators alone."""
    if timed.is_token:
        return None
    feeds = dict(timed.feeds)
    try:
        profiled = profile(str(files.optimized), feeds, threads, stof=True, runs=1)[-1]
        sites = _site_calls(files.optimized, profiled, threads)
    except Exception as reason:  # an extra: whatever ONNX Runtime says about a node by itself
        return f"{type(reason).__name__}: {' '.join(str(reason).split())[:200]}"
    if not sites:
        return None

    def complete(record: Record, optimized: Timing, timings: Sequence[Timing]) -> None:
        alone = sum(t.best * count for t, (_, count, _) in zip(timings, sites, strict=True))
        before_runs = profile(str(files.original), feeds, threads, stof=False)
        rest, attention = rest_seconds(before_runs, *timed.scores)
        record["quotient"] = {
            "non_attention_s": round_seconds(rest),
            "attention_s": round_seconds(attention),
            "op_alone_s": round_seconds(alone),
            "quotient": round(optimized.best / (rest + alone), 4),
        }

    return Extra([call for call, _, _ in sites], complete)


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


def _difference(expected: np.ndarray, found: np.ndarray) -> float:
    """The largest difference over the range of the expected numbers."""
    if expected.shape != found.shape or not expected.size:
        return math.inf if expected.shape != found.shape else 0.0
    with np.errstate(invalid="ignore"):
        away = np.abs(found.astype(np.float64) - expected)
        return float(np.nanmax(away)) / max(float(np.nanmax(expected) - np.nanmin(expected)), 1e-30)
