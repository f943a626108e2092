# SPDX-License-Identifier: Apache-2.0
"""What runs batches of texts on the CPU: ONNX Runtime, OpenVINO and stof, in the order of arrival or sorted by length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.core.candidate import Candidate, Runner
from bench.texts.runtimes import OPENVINO, STOF
from bench.texts.text_models import EXPORTED, PADDED, TRANSFORMERS, UNPADDED

if TYPE_CHECKING:
    from bench.texts.problem import TextProblem


@dataclass(frozen=True)
class TextRunner(Runner):
    """A candidate that is ready to run its batches.

    Attributes:
        is_sorted: whether they are sorted by length.
    """

    is_sorted: bool = False


@dataclass(frozen=True)
class TextCandidate(Candidate["TextProblem", Any, Runner]):
    """A candidate of a point.

    Attributes:
        kind: of the file that it runs.
        engine: what runs it: "ort", "stof" or "openvino".
        is_sorted: whether its batches are sorted by length.
    """

    kind: str = EXPORTED
    engine: str = "ort"
    is_sorted: bool = False


def _make(name: str, label: str, kind: str, engine: str = "ort", is_sorted: bool = False) -> TextCandidate:
    """A candidate whose model runs the batches of its order."""

    def build(problem: TextProblem, threads: int) -> Runner:
        del threads  # the problem's runtime has as many
        batches = problem.batches(is_sorted).feeds
        run_batch = problem.model(engine, kind)

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
