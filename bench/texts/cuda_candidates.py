# SPDX-License-Identifier: Apache-2.0
"""What runs batches of texts on a GPU: ONNX Runtime's CUDA provider with and without stof, captured or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.core.candidate import Runner
from bench.texts.bound_batches import BoundBatches, CapturedBatches
from bench.texts.candidates import TextCandidate, TextRunner
from bench.texts.cuda_models import CAPACITY, PACKED
from bench.texts.runtimes import STOF, DeviceMemory
from bench.texts.text_models import EXPORTED, PADDED, TRANSFORMERS, UNPADDED

if TYPE_CHECKING:
    from bench.texts.problem import TextProblem


def _make(name: str, label: str, kind: str, engine: str = "ort", is_sorted: bool = False) -> TextCandidate:
    """A candidate whose session runs batches of any size."""

    def build(problem: TextProblem, memory: DeviceMemory) -> Runner:
        session = memory.session(problem.path(kind), stof=engine == STOF)
        bound = BoundBatches(memory, session, problem.batches(is_sorted).feeds, problem.empty_outputs(is_sorted))
        return TextRunner(bound.run, bound.outputs, is_sorted=is_sorted)

    return TextCandidate(name, label, build, kind=kind, engine=engine, is_sorted=is_sorted)


def _make_captured(name: str, label: str, kind: str, engine: str = "ort") -> TextCandidate:
    """A candidate that replays a captured graph for each shape of its batches."""

    def build(problem: TextProblem, memory: DeviceMemory) -> Runner:
        feeds, outputs = problem.batches(False).feeds, problem.empty_outputs(False)
        captured = CapturedBatches(memory, problem.path(kind), engine == STOF, feeds, outputs)
        return TextRunner(captured.run, captured.outputs)

    return TextCandidate(name, label, build, kind=kind, engine=engine)


CUDA_CANDIDATES = (
    _make("ort", "ONNX Runtime, as exported", EXPORTED),
    _make("ort-transformers", "ONNX Runtime, transformers optimizer", TRANSFORMERS),
    _make("ort-packed", "the same in packing mode", PACKED),
    _make("stof-padded", "stof, --unpad off", PADDED, STOF),
    _make("stof", "stof, --unpad on", UNPADDED, STOF),
    _make("ort-sorted", "sorted: ONNX Runtime, as exported", EXPORTED, is_sorted=True),
    _make("ort-transformers-sorted", "sorted: ONNX Runtime, transformers", TRANSFORMERS, is_sorted=True),
    _make("ort-packed-sorted", "sorted: the same in packing mode", PACKED, is_sorted=True),
    _make("stof-padded-sorted", "sorted: stof, --unpad off", PADDED, STOF, is_sorted=True),
    _make("stof-sorted", "sorted: stof, --unpad on", UNPADDED, STOF, is_sorted=True),
    _make_captured("ort-captured", "captured: ONNX Runtime, as exported", EXPORTED),
    _make_captured("ort-transformers-captured", "captured: ONNX Runtime, transformers", TRANSFORMERS),
    _make_captured("stof-padded-captured", "captured: stof, --unpad off", PADDED, STOF),
    _make_captured("stof-captured", "captured: stof, --unpad-capacity", CAPACITY, STOF),
)
