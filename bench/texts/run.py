# SPDX-License-Identifier: Apache-2.0
"""``python -m bench texts``: models that embed and rerank, on batches of padded texts, beside their peers."""

from __future__ import annotations

import argparse
import gc
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from pathlib import Path
from time import monotonic

from bench.core.candidate import select
from bench.core.point import describe_failure, measure_point
from bench.gpu.timing import ROUNDS
from bench.texts.candidates import CANDIDATES, TextCandidate
from bench.texts.cuda import CudaTextDevice, CudaTextPoint, CudaTextProblem
from bench.texts.cuda_candidates import CUDA_CANDIDATES
from bench.texts.cuda_models import (
    CAPACITY,
    CUDA_PRECISIONS,
    choose_capacity,
    shape_ranges,
    write_capacity_file,
    write_cuda_files,
)
from bench.texts.describe import describe_record
from bench.texts.lengths import LENGTHS, TextWindow
from bench.texts.memory import measure_memory
from bench.texts.problem import TextDevice, TextProblem
from bench.texts.runtimes import STOF, CpuRuntime, CudaRuntime
from bench.texts.text_models import DEFAULT_MODELS, MODELS, PRECISIONS, UNPADDED, TextFiles, TextModel, write_files
from stof.bench.results import Record, store
from stof.files import temporary_folder
from stof.terminal import say


class TextBench(ABC):
    """What a device has of the command.

    Args:
        arguments: of the command.

    Attributes:
        name: of the device.
        precisions: that models run in there.
        candidates: those that are asked for.
    """

    name: str
    precisions: tuple[str, ...]
    all_candidates: tuple[TextCandidate, ...]

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.candidates = select(self.all_candidates, arguments.peers)

    @property
    def kinds(self) -> set[str]:
        """The kinds of files that the candidates run."""
        return {candidate.kind for candidate in self.candidates}

    @abstractmethod
    def write(self, model: TextModel, precision: str, folder: Path) -> TextFiles:
        """Makes the files of a model, with those that all points share."""

    @abstractmethod
    def measure(
        self, model: TextModel, precision: str, files: TextFiles, window: TextWindow, rows: int, folder: Path
    ) -> Record:
        """The record of a point."""


class CpuTextBench(TextBench):
    """The CPU with a number of threads: times, then memory."""

    name = "cpu"
    precisions = PRECISIONS
    all_candidates = CANDIDATES

    def __init__(self, arguments: argparse.Namespace, threads: int) -> None:
        super().__init__(arguments)
        self._threads = threads

    def write(self, model: TextModel, precision: str, folder: Path) -> TextFiles:
        return write_files(model, precision, folder, self.kinds)

    def measure(
        self, model: TextModel, precision: str, files: TextFiles, window: TextWindow, rows: int, folder: Path
    ) -> Record:
        del folder
        arguments, threads = self.arguments, self._threads
        problem = TextProblem(model, precision, files, window, rows, arguments.batches, CpuRuntime(threads))
        record = measure_point(problem, self.candidates, TextDevice(threads), arguments.rounds)
        problem.close()
        if not arguments.no_memory:
            timed = [name for name, row in record["peers"].items() if "us" in row]
            record["memory"] = measure_memory(problem, files, timed, threads)
        return record


class CudaTextBench(TextBench):
    """A GPU: times of fp16 models, and the time of their kernels."""

    name = "cuda"
    precisions = CUDA_PRECISIONS
    all_candidates = CUDA_CANDIDATES

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        self._runtime = CudaRuntime()

    def write(self, model: TextModel, precision: str, folder: Path) -> TextFiles:
        del precision
        longest = max(LENGTHS[name].longest for name in choose_lengths(model, self.arguments.lengths))
        return write_cuda_files(model, folder, self.kinds, shape_ranges(self.arguments.batch, longest))

    def measure(
        self, model: TextModel, precision: str, files: TextFiles, window: TextWindow, rows: int, folder: Path
    ) -> Record:
        count = self.arguments.batches
        shapes = shape_ranges([rows], window.lengths.longest)
        capacity = choose_capacity(window.arrival(rows, count).feeds)
        files = write_capacity_file(files, folder, self.kinds, capacity, shapes)
        problem = CudaTextProblem(model, precision, files, window, rows, count, self._runtime)
        point = CudaTextPoint(problem, self.candidates, CudaTextDevice(self._runtime))
        return point.measure(self.arguments.rounds)


def run(arguments: argparse.Namespace, threads: int) -> int:
    """The command on the CPU."""
    return measure_models(CpuTextBench(arguments, threads))


def run_on_gpu(arguments: argparse.Namespace) -> int:
    """The command on a GPU."""
    arguments.rounds = arguments.rounds or ROUNDS
    return measure_models(CudaTextBench(arguments))


def choose_lengths(model: TextModel, names: Collection[str] | None) -> list[str]:
    """The distributions of lengths of a model that are asked for.

    Raises:
        ValueError: when it has none of them.
    """
    chosen = [name for name in model.lengths if names is None or name in names]
    if not chosen:
        raise ValueError(f"{model.name} is timed with {', '.join(model.lengths)}")
    return chosen


def choose_precisions(bench: TextBench) -> Sequence[str]:
    """The precisions that are asked for.

    Raises:
        ValueError: when the device has not all of them.
    """
    asked: Sequence[str] = bench.arguments.precisions or bench.precisions
    if other := [precision for precision in asked if precision not in bench.precisions]:
        raise ValueError(f"{', '.join(other)}: models run in {', '.join(bench.precisions)} on --device {bench.name}")
    return asked


def measure_models(bench: TextBench) -> int:
    """Measures, prints and stores every point that the arguments ask for.

    Returns:
        0; 3 where stof could not run one, or a point was not measured.
    """
    arguments, begin = bench.arguments, monotonic()
    names = [MODELS[name] for name in arguments.models or DEFAULT_MODELS]
    points = [(model, precision) for model in names for precision in choose_precisions(bench)]
    chosen = {model.name: choose_lengths(model, arguments.lengths) for model in names}
    has_failed, lost = False, []
    for model, precision in points:
        with temporary_folder() as folder:
            files: TextFiles | None = None
            for lengths, rows in ((name, rows) for name in chosen[model.name] for rows in arguments.batch):
                title = f"{model.name} {precision}, {lengths}, batches of {rows}"
                if arguments.limit is not None and monotonic() - begin > arguments.limit:
                    lost.append(f"{title}: the time was over")
                    continue
                if files is None:
                    say(f"{model.name} {precision}: making the models")
                    files = bench.write(model, precision, folder)
                try:
                    window = TextWindow(LENGTHS[lengths], model.vocabulary, model.inputs, arguments.seed)
                    record = bench.measure(model, precision, files, window, rows, folder)
                except ValueError:  # of what the user asked for
                    raise
                except Exception as failure:  # runtimes raise types of their own; the other points are measured
                    lost.append(f"{title}: {describe_failure(failure)}")
                    continue
                record["seed"] = arguments.seed
                store(arguments.results / f"texts-{bench.name}.json", record)
                say(*describe_record(record))
                has_failed |= _has_failed(record, bench.candidates)
                gc.collect()
    say(*(f"not measured: {text}" for text in lost))
    return 3 if has_failed or lost else 0


def _has_failed(record: Record, candidates: Sequence[TextCandidate]) -> bool:
    """Whether a candidate of stof has no time, or left the padding where it should not."""
    kept = any("padded_because" in record["files"].get(kind, {}) for kind in (UNPADDED, CAPACITY))
    own = [c.name for c in candidates if c.engine == STOF]
    return kept or any("us" not in record["peers"][name] for name in own)
