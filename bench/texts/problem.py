# SPDX-License-Identifier: Apache-2.0
"""A point of the bench of texts: a model in one precision and texts of one distribution of lengths."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bench.core.candidate import Runner, Unavailable
from bench.core.problem import PointProblem
from bench.cpu.device import CpuDevice
from bench.texts.candidates import CANDIDATES, TextRunner
from bench.texts.cuda_candidates import CUDA_CANDIDATES
from bench.texts.lengths import TextBatches, TextWindow
from bench.texts.runtimes import OPENVINO, RunBatch, TextRuntime
from bench.texts.text_models import EXPORTED, TextFiles, TextModel
from stof.bench.measure import Timing
from stof.bench.results import Record

_TOLERANCE = {"fp32": 1e-4, "int8": 1e-4, "float16": 1e-3}
_ROUNDING = 2.0  # times what a precision changes: two roundings that have nothing in common differ by 1.4 times
_CANDIDATES = {candidate.name: candidate for candidate in (*CUDA_CANDIDATES, *CANDIDATES)}
_OWN = {"ratio": "stof", "ratio_sorted": "stof-sorted", "ratio_captured": "stof-captured"}


class TextProblem(PointProblem):
    """Batches in both orders, and the outputs of the exported model for them in ONNX Runtime.

    Dynamic quantization takes its scales from all tokens of a batch, so outputs of int8 depend on the batch and its padding. A
    right result of int8 differs from that of the exported int8 model by no more than twice what that one differs from fp32 by.
    One of fp16 differs from that of the exported fp32 model by no more than twice what the exported fp16 model does.

    Args:
        model: what is run.
        precision: "fp32", "int8" or "float16".
        files: of the model.
        window: the texts.
        rows: texts of a batch.
        count: batches that are run, in each order.
        runtime: what runs the exported model, and the candidates on the CPU.
    """

    reference = "ONNX Runtime as exported"
    relative_to = "the outputs' root mean square"

    def __init__(
        self,
        model: TextModel,
        precision: str,
        files: TextFiles,
        window: TextWindow,
        rows: int,
        count: int,
        runtime: TextRuntime,
    ) -> None:
        self._model, self._precision, self._files, self._lengths = model, precision, files, window.lengths
        self._rows, self._count, self._runtime = rows, count, runtime
        self._batches = (window.arrival(rows, count), window.by_length(rows, count))
        self._opened: dict[tuple[str, str], RunBatch] = {}
        self._expected, changed = self._run_exported()
        self.tolerance = max(_TOLERANCE[precision], _ROUNDING * changed)

    def _run_exported(self) -> tuple[tuple[np.ndarray, ...], float]:
        """The expected outputs in both orders, and by how much the precision changes those in the order of arrival.

        Raises:
            Unavailable: where the exported model itself gives a value that is not finite.
        """
        if self._precision == "float16":  # these models take memory of the GPU, and no candidate runs them
            exported = self._runtime.open("ort", self._files.paths[EXPORTED], self._batches[0].feeds)
        else:
            exported = self.model("ort", EXPORTED)
        if self._precision == "fp32":
            return tuple(_run_all(exported, batches) for batches in self._batches), 0.0
        fp32 = self._runtime.open("ort", self._files.fp32, self._batches[0].feeds)
        if self._precision == "int8":
            expected = tuple(_run_all(exported, batches) for batches in self._batches)
            return expected, _distance(_run_all(fp32, self._batches[0]), expected[0])
        expected = tuple(_run_all(fp32, batches) for batches in self._batches)
        changed = _distance(expected[0], _run_all(exported, self._batches[0]))
        if not np.isfinite(changed):
            raise Unavailable("the exported fp16 model gives values that are not finite")
        return expected, changed

    def empty_outputs(self, is_sorted: bool) -> list[np.ndarray]:
        """Arrays for the output of each batch in one order, in fp16."""
        return [np.empty((self._rows, *self._expected[is_sorted].shape[1:]), np.float16) for _ in range(self._count)]

    def path(self, kind: str) -> Path:
        """A file of the model.

        Raises:
            Unavailable: when it could not be made.
        """
        if kind in self._files.missing:
            raise Unavailable(self._files.missing[kind])
        return self._files.paths[kind]

    def batches(self, is_sorted: bool) -> TextBatches:
        """The batches in one order."""
        return self._batches[is_sorted]

    def model(self, engine: str, kind: str) -> RunBatch:
        """A loaded model, which candidates share.

        Raises:
            Unavailable: when it could not be made, or an engine refuses it.
        """
        path = self.path(kind)
        if (engine, kind) not in self._opened:
            self._opened[engine, kind] = self._runtime.open(engine, path, self._batches[0].feeds)
        return self._opened[engine, kind]

    def close(self) -> None:
        """Frees the loaded models."""
        self._opened.clear()

    def error(self, output: Any) -> float:
        """The root mean square of the differences of (outputs, whether the batches are sorted), over that of the outputs."""
        found, is_sorted = output
        return _distance(self._expected[is_sorted], found)

    def describe(self, threads: int) -> Record:
        arrival, by_length = self._batches
        return {
            "key": [self._model.name, self._precision, self._lengths.name, self._rows, self._count, threads],
            "model": self._model.name,
            "graph": self._model.graph,
            "precision": self._precision,
            "lengths": self._lengths.describe(),
            "rows": self._rows,
            "batches": self._count,
            "real_tokens": {"arrival": arrival.real, "sorted": by_length.real},
            "padded_over_real": {"arrival": _padding(arrival), "sorted": _padding(by_length)},
            "tolerance": float(f"{self.tolerance:.1e}"),
            "files": self._files.facts,
        }

    def figures(self, candidate: str, seconds: float, rates: Mapping[str, float]) -> dict[str, float]:
        del rates
        real = self.batches(_CANDIDATES[candidate].is_sorted).real
        return {"useful_tokens_per_second": round(real / seconds, 1)}

    def seconds(self, timing: Timing) -> float:
        """The time that counts: the least one."""
        return timing.best

    def compare(self, timings: Mapping[str, Timing]) -> Record:
        """Ratios of useful tokens a second: of stof in the order of arrival, sorted and captured, over every other."""
        rates = {n: self.batches(_CANDIDATES[n].is_sorted).real / self.seconds(t) for n, t in timings.items()}
        found: Record = {}
        for field, own in _OWN.items():
            if own in rates:
                found[field] = {name: round(rates[own] / rate, 3) for name, rate in rates.items() if name != own}
        if "stof" in rates and "stof-padded" in rates:
            share = rates["stof"] / rates["stof-padded"] / _padding(self._batches[0])
            found["share_of_padded_over_real"] = round(share, 3)
        return found


class TextDevice(CpuDevice):
    """The CPU, where the check of a candidate is the run that warms it."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads, warm=0)

    def error(self, built: Runner, problem: PointProblem) -> float:
        """Runs all batches once; the difference from the exported model's outputs."""
        assert isinstance(built, TextRunner)
        return problem.error((built.output(), built.is_sorted))


def is_absent(name: str, row: Mapping[str, Any]) -> bool:
    """Whether a candidate's package is not installed, which is no failure."""
    return _CANDIDATES[name].engine == OPENVINO and "is not installed" in row.get("missing", "")


def _run_all(run_batch: RunBatch, batches: TextBatches) -> np.ndarray:
    return np.concatenate([run_batch(feeds) for feeds in batches.feeds])


def _padding(batches: TextBatches) -> float:
    return round(batches.padded / batches.real, 3)


def _distance(expected: np.ndarray, found: np.ndarray) -> float:
    """The root mean square of the differences over that of the expected values; NaN where a value is NaN."""
    if expected.shape != found.shape:
        return float("inf")
    differences = found.astype(np.float64) - expected
    return float(np.linalg.norm(differences)) / max(float(np.linalg.norm(expected)), 1e-30)
