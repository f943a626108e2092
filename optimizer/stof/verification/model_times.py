# SPDX-License-Identifier: Apache-2.0
"""Times the original and the optimized model in ONNX Runtime's CPU provider, by turns and on the same inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from stof.errors import UnsupportedError
from stof.execution.case import Case
from stof.execution.inputs import InputMaker
from stof.execution.ort_sessions import file_session
from stof.execution.run_limits import free_memory
from stof.execution.session_process import RuntimeFailure, Session, TimingLimits, release_sessions
from stof.graph.external_data import external_files
from stof.symbolic.algebra.sizes import evaluate
from stof.verification.model_inputs import ModelInputs
from stof.verification.timed_cases import NotTimedError

SECONDS = 20.0  # after which no further round begins
_LIMITS = TimingLimits(seconds=SECONDS, end=3 * SECONDS, most_rounds=20, least_rounds=3)
_LOAD_SECONDS = 60.0
_LENGTHS = (2048, 1024, 512, 256, 128)  # of which the longest that runs fast enough is timed
_FLOPS = 6e10  # a second, of two cores
_RUNS = 2 * (1 + _LIMITS.least_rounds)
_COPIES = 2  # of weights in a session: as they are, and in the layout of kernels
_SCORES = 3  # tensors of the size of scores that unfused attention holds at a time


@dataclass(frozen=True)
class RunTimes:
    """Seconds of the runs of one model.

    Attributes:
        best: the least.
        median: the median.
        runs: how many there were.
    """

    best: float
    median: float
    runs: int


@dataclass(frozen=True)
class ModelTimes:
    """The times of both models.

    Attributes:
        inputs: batch and length, in words.
        original: of the original.
        optimized: of the optimized model.
        token: those of a step of one token behind a past; None: the model has no KV cache that is known.
    """

    inputs: str
    original: RunTimes
    optimized: RunTimes
    token: ModelTimes | None = None

    @property
    def speedup(self) -> float:
        """The original's best time over the optimized model's."""
        return self.original.best / max(self.optimized.best, 1e-12)

    def to_text(self) -> str:
        """Both times, the speed-up and the inputs in one line."""
        return (
            f"{1e3 * self.original.best:.4g} ms -> {1e3 * self.optimized.best:.4g} ms, {self.speedup:.2f}x "
            f"({self.inputs}; best of {self.optimized.runs} alternating runs)"
        )

    def to_json(self) -> dict[str, Any]:
        """Every fact by its key in the report's JSON."""
        data = {**asdict(self), "speedup": self.speedup}
        del data["token"]
        return data if self.token is None else {**data, "token": self.token.to_json()}


def time_models(
    original: Path,
    optimized: Path,
    inputs: ModelInputs,
    shapes: Mapping[str, tuple[int, int]],
    limits: TimingLimits | None = None,
) -> ModelTimes:
    """Times two model files.

    Args:
        original: the first one.
        optimized: the second one, with stof's operators.
        inputs: draws the inputs of both.
        shapes: the ranges in use of the inputs' dimensions, by name.
        limits: how long; by default about 20 seconds.

    Raises:
        NotTimedError: when memory or time do not suffice.
        RuntimeFailure: what ONNX Runtime raises.
    """
    limits = limits or _LIMITS
    weights = sum(_file_bytes(path, inputs) for path in (original, optimized))
    case, words = _choose_case(inputs, shapes, weights)
    feeds = inputs.maker.draw(case, np.random.default_rng(0))
    try:
        first = file_session(original.absolute(), library=False, seconds=_LOAD_SECONDS)
        second = file_session(optimized.absolute(), library=True, seconds=_LOAD_SECONDS)
        samples = first.measure([second], feeds, limits)
        token = inputs.maker.token_case(case.length)
        of_token = None if token is None else _time_token(first, second, inputs, token, limits)
        del first, second
    except TimeoutError:
        raise NotTimedError(f"it takes more than {limits.end:.0f} s at {case}") from None
    finally:
        release_sessions()
    return replace(_times(words, samples), token=of_token)


def _times(inputs: str, samples: Sequence[Sequence[float]]) -> ModelTimes:
    before, after = (RunTimes(min(s), median(s), len(s)) for s in samples)
    return ModelTimes(inputs, before, after)


def _time_token(
    first: Session, second: Session, inputs: ModelInputs, case: Case, limits: TimingLimits
) -> ModelTimes | None:
    """Times one token; None where it does not run, as the times of the prompt are there already."""
    feeds = inputs.maker.draw(case, np.random.default_rng(1))
    try:
        words = f"batch {case.batch}, behind {case.length - 1} others"
        return _times(words, first.measure([second], feeds, limits))
    except (RuntimeFailure, TimeoutError):
        return None


def _file_bytes(path: Path, inputs: ModelInputs) -> int:
    data = [path.parent / name for name in external_files(inputs.working)]
    return path.stat().st_size + sum(p.stat().st_size for p in data if p.is_file())


def _choose_case(inputs: ModelInputs, shapes: Mapping[str, tuple[int, int]], weights: int) -> tuple[Case, str]:
    """The longest inputs for which time and memory suffice, within the ranges in use; the shortest anyway where memory does.

    Returns the case, and its sizes in words.

    Raises:
        NotTimedError: when memory suffices for none.
    """
    tokens = SECONDS / _RUNS * _FLOPS / (2 * max(1, weights // 8))  # 4 bytes a weight, in two files
    memory = 0
    for length in _LENGTHS:
        other = tuple((name, min(max(low, length), high)) for name, (low, high) in shapes.items())
        prompt = inputs.maker.prompt_case(length)
        own = tuple((n, s) for n, s in other if s != length)
        case = replace(prompt, other=tuple({**dict(prompt.other), **dict(own)}.items()))
        batch = math.prod(size for name, size in other if name in inputs.maker.dimensions.batch_names)
        if length > tokens / batch and length != _LENGTHS[-1]:
            continue
        memory = _COPIES * weights + _SCORES * 4 * _score_elements(inputs.maker, case)
        if memory <= (free_memory() or 1 << 62) // 2:  # 0: nothing tells
            return case, str(replace(case, other=own))
    raise NotTimedError(f"two sessions need about {memory >> 20} MiB, more than half of the memory that is free")


def _score_elements(maker: InputMaker, case: Case) -> int:
    """Elements of the largest scores at a case; 0 where they are not known."""
    sizes = maker.sizes(case)
    found = [0]
    for shape in maker.dimensions.scores:
        try:
            found.append(math.prod(evaluate(d, sizes) for d in shape))
        except (KeyError, UnsupportedError):
            continue
    return max(found)
