# SPDX-License-Identifier: Apache-2.0
"""What runs batches of texts: ONNX Runtime, OpenVINO and stof, in the order of arrival or sorted by length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.core.candidate import Candidate, Runner, Unavailable, require
from bench.core.point import describe_failure
from bench.texts.text_models import EXPORTED, PADDED, TRANSFORMERS, UNPADDED
from stof.bench.sessions import session

if TYPE_CHECKING:
    from bench.texts.problem import TextProblem

Feeds = Mapping[str, np.ndarray]
RunBatch = Callable[[Feeds], np.ndarray]
OPENVINO = "openvino"
STOF = "stof"


@dataclass(frozen=True)
class TextRunner(Runner):
    """A candidate that is ready to run its batches.

    Attributes:
        is_sorted: whether they are sorted by length.
    """

    is_sorted: bool = False


@dataclass(frozen=True)
class TextCandidate(Candidate["TextProblem", int, Runner]):
    """A candidate of a point.

    Attributes:
        kind: of the file that it runs.
        engine: what runs it: "ort", "stof" or "openvino".
        is_sorted: whether its batches are sorted by length.
    """

    kind: str = EXPORTED
    engine: str = "ort"
    is_sorted: bool = False


def open_model(engine: str, path: Path, batches: Sequence[Feeds], threads: int) -> RunBatch:
    """Loads a model; a function that runs a batch and gives its output.

    Args:
        engine: "ort", "stof" or "openvino".
        path: of the model.
        batches: those that it will run.
        threads: that the runtime may use.

    Raises:
        Unavailable: when the engine is not installed or refuses the model.
    """
    if engine == OPENVINO:
        return _open_openvino(path, batches, threads)
    loaded = session(str(path), threads, stof=engine == STOF)

    def run(feeds: Feeds) -> np.ndarray:
        found: np.ndarray = loaded.run(None, feeds)[0]
        return found

    return run


def _open_openvino(path: Path, batches: Sequence[Feeds], threads: int) -> RunBatch:
    """OpenVINO in fp32, with fixed sizes where all batches have the same."""
    ov = require("openvino")
    settings = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    shapes = {tuple(feeds["input_ids"].shape) for feeds in batches}
    try:
        core = ov.Core()
        model = core.read_model(str(path))
        if len(shapes) == 1:
            model.reshape({name: list(array.shape) for name, array in batches[0].items()})
        request = core.compile_model(model, "CPU", settings).create_infer_request()
    except Exception as error:  # OpenVINO raises types of its own, which differ by version
        raise Unavailable(describe_failure(error)) from error

    def run(feeds: Feeds) -> np.ndarray:
        request.infer(dict(feeds), share_inputs=True)
        return np.array(request.get_output_tensor(0).data)

    return run


def _make(name: str, label: str, kind: str, engine: str = "ort", is_sorted: bool = False) -> TextCandidate:
    """A candidate whose model runs the batches of its order."""

    def build(problem: TextProblem, threads: int) -> Runner:
        batches = problem.batches(is_sorted).feeds
        run_batch = problem.model(engine, kind, threads)

        def run() -> None:
            for feeds in batches:
                run_batch(feeds)

        return TextRunner(run, lambda: np.concatenate([run_batch(f) for f in batches]), is_sorted=is_sorted)

    return TextCandidate(name, label, build, kind=kind, engine=engine, is_sorted=is_sorted)


CANDIDATES = (
    _make("stof", "stof, --unpad auto", UNPADDED, STOF),
    _make("stof-padded", "stof, --unpad off", PADDED, STOF),
    _make("ort", "ONNX Runtime, as exported", EXPORTED),
    _make("ort-transformers", "ONNX Runtime, transformers optimizer", TRANSFORMERS),
    _make("openvino", "OpenVINO", EXPORTED, OPENVINO),
    _make("stof-sorted", "sorted: stof, --unpad auto", UNPADDED, STOF, is_sorted=True),
    _make("stof-padded-sorted", "sorted: stof, --unpad off", PADDED, STOF, is_sorted=True),
    _make("ort-sorted", "sorted: ONNX Runtime, as exported", EXPORTED, is_sorted=True),
    _make("ort-transformers-sorted", "sorted: ONNX Runtime, transformers", TRANSFORMERS, is_sorted=True),
)
