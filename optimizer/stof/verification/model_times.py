# SPDX-License-Identifier: Apache-2.0
"""Times the original and the optimized model in ONNX Runtime's CPU provider, by turns and on the same inputs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from stof.errors import explained
from stof.execution.case import Case, Padding
from stof.execution.ort_sessions import file_session
from stof.execution.session_process import RuntimeFailure, Session, TimingLimits, release_sessions
from stof.graph.external_data import external_files
from stof.verification.input_labels import describe_feeds
from stof.verification.model_inputs import ModelInputs
from stof.verification.padding.padded_batch import Feed, PaddedBatch
from stof.verification.padding.padded_texts import pad_texts
from stof.verification.timed_cases import (
    LENGTHS,
    NotTimedError,
    Shapes,
    TimedCase,
    case_of,
    choose_cases,
    choose_padded_case,
)

SECONDS = 20.0  # after which no further round begins, at all lengths together
_LIMITS = TimingLimits(seconds=SECONDS, end=3 * SECONDS, most_rounds=20, least_rounds=3)
_LOAD_SECONDS = 60.0


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
        inputs: the sizes of the inputs by name, in words.
        original: of the original.
        optimized: of the optimized model.
        token: those of a step of one token behind a past; None: the model has no KV cache that is known.
        length: keys of the longest attention, or the longest named dimension; 0: neither is known.
        shapes: the shape of each input.
        shorter: those at shorter inputs, the shortest first.
        padded_over_real: positions over real tokens; None: padding is not left out, and times do not depend on it.
        padded: those of a batch of padded texts; None: padding is not left out, or nothing was timed.
        left_out: longer or other inputs that were to be timed, with the reason.
    """

    inputs: str
    original: RunTimes
    optimized: RunTimes
    token: ModelTimes | None = None
    length: int = 0
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    shorter: tuple[ModelTimes, ...] = ()
    padded_over_real: float | None = None
    padded: ModelTimes | None = None
    left_out: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The sizes of the inputs, with their padding where times depend on it."""
        ratio = self.padded_over_real
        return self.inputs if ratio is None else f"{self.inputs}, padded/real {ratio:.1f}"

    @property
    def speedup(self) -> float:
        """The original's best time over the optimized model's."""
        return self.original.best / max(self.optimized.best, 1e-12)

    @property
    def is_slower(self) -> bool:
        """Whether the optimized model is slower in the two digits that are shown."""
        return round(self.speedup, 2) < 1.0

    @property
    def lengths(self) -> tuple[ModelTimes, ...]:
        """The times at all lengths, the shortest first."""
        return (*self.shorter, self)

    def to_text(self) -> str:
        """Both times, the speed-up and the inputs in one line."""
        return (
            f"{1e3 * self.original.best:.4g} ms -> {1e3 * self.optimized.best:.4g} ms, {self.speedup:.2f}x "
            f"({self.label}; best of {self.optimized.runs} alternating runs)"
        )

    def to_json(self) -> dict[str, Any]:
        """Every fact by its key in the report's JSON."""
        data = {**self._own_json(), "lengths": [times._own_json() for times in self.lengths]}
        others = {"token": self.token, "padded": self.padded}
        return data | {key: times._own_json() for key, times in others.items() if times is not None}

    def _own_json(self) -> dict[str, Any]:
        padding = {} if self.padded_over_real is None else {"padded_over_real": self.padded_over_real}
        return {
            "inputs": self.inputs,
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "length": self.length,
            **padding,
            "original": asdict(self.original),
            "optimized": asdict(self.optimized),
            "speedup": self.speedup,
        }


def time_models(
    original: Path,
    optimized: Path,
    inputs: ModelInputs,
    shapes: Shapes,
    limits: TimingLimits | None = None,
    padded_batches: Sequence[PaddedBatch] = (),
) -> ModelTimes:
    """Times two model files at a few lengths.

    Args:
        original: the first one.
        optimized: the second one, with stof's operators.
        inputs: draws the inputs of both.
        shapes: the ranges in use of the inputs' dimensions, by name.
        limits: how long, of all lengths together; by default about 20 seconds.
        padded_batches: texts whose padding the second one leaves out: padded ones are timed, too.

    Raises:
        NotTimedError: when memory or time do not suffice.
        RuntimeFailure: what ONNX Runtime raises.
    """
    limits = limits or _LIMITS
    weights = sum(_file_bytes(path, inputs) for path in (original, optimized))
    cases = choose_cases(inputs.maker, shapes, weights, limits.seconds, 2 * (1 + limits.least_rounds))
    try:
        first = file_session(original.absolute(), library=False, seconds=_LOAD_SECONDS)
        second = file_session(optimized.absolute(), library=True, seconds=_LOAD_SECONDS)
        times = _Run(first, second, inputs, shapes, limits, padded_batches).time_lengths(cases)
        del first, second
    except TimeoutError:
        raise NotTimedError(f"a session takes more than {_LOAD_SECONDS:.0f} s to load") from None
    finally:
        release_sessions()
    return times


class _Run:
    """Two sessions that are timed by turns, until the time is over."""

    def __init__(
        self,
        first: Session,
        second: Session,
        inputs: ModelInputs,
        shapes: Shapes,
        limits: TimingLimits,
        padded_batches: Sequence[PaddedBatch] = (),
    ) -> None:
        self.first = first
        self.second = second
        self.inputs = inputs
        self.shapes = shapes
        self.limits = limits
        self.padded_batches = padded_batches
        self.start = time.monotonic()
        self.left_out: list[str] = []

    def time_lengths(self, cases: Sequence[TimedCase]) -> ModelTimes:
        """The times at each length, and of one token behind the longest; what does not run leaves the others.

        The shortest length comes first: its time tells whether there is enough for a longer one.
        """
        measured: list[ModelTimes] = []
        for i, timed in enumerate(cases):
            is_last = i == len(cases) - 1
            # The longest length gets what is left but for the token's part, the others less than an equal part.
            share = 2 / 3 if is_last else 1 / (len(cases) - i + 2)
            if measured and not self._has_time_for(timed, measured):
                words = self._describe(self._draw(timed.case))
                self.left_out.append(f"{words}: longer than the {self.limits.seconds:.0f} s of --time")
            elif (times := self._time(timed.case, timed.keys, share)) is not None:
                measured.append(times)
            if not self.first.is_alive:  # its process was ended at the limit
                break
        measured += self._time_between(cases, measured)
        if not measured:
            raise NotTimedError("; ".join(self.left_out))
        reached = measured[-1]
        case = self.inputs.maker.token_case(reached.length if reached.length > 1 else cases[-1].length)
        padded = self._time_padded(reached, cases[-1].length) if self.padded_batches else None
        # Behind as many keys as the longest prompt has.
        token = None if case is None or not self.first.is_alive else self._time(case, reached.length, 1.0)
        return replace(reached, token=token, padded=padded, shorter=tuple(measured[:-1]), left_out=tuple(self.left_out))

    def _time_between(self, cases: Sequence[TimedCase], measured: Sequence[ModelTimes]) -> list[ModelTimes]:
        """The times at half the longest length, or at half of that: stored positions may end before the longest one."""
        if not self.left_out or not self.first.is_alive:
            return []
        count, length = len(self.left_out), cases[-1].length // 2
        while length >= LENGTHS[-1]:
            timed = case_of(self.inputs.maker, self.shapes, length)
            if measured and (timed.keys <= measured[-1].length or not self._has_time_for(timed, measured)):
                break
            times = self._time(timed.case, timed.keys, 2 / 3)
            del self.left_out[count:]  # the longest one says why
            if times is not None or not self.first.is_alive:
                return [times] if times is not None else []
            length //= 2
        return []

    def _time_padded(self, reached: ModelTimes, length: int) -> ModelTimes | None:
        """The times of a batch of padded texts, as many as there is time for going by one text without padding."""
        seconds = (
            (1 + self.limits.least_rounds) * (reached.original.best + reached.optimized.best) / max(1, reached.length)
        )
        timed = choose_padded_case(
            self.inputs.maker,
            self.shapes,
            reached.length if reached.length > 1 else length,
            lambda positions: positions * seconds <= self._seconds_left(),
        )
        if timed is None or not self.first.is_alive:
            self.left_out.append("padded texts: no time or memory was left")
            return None
        return self._time(timed.case, timed.keys, 1.0)

    def _seconds_left(self) -> float:
        return self.limits.seconds - (time.monotonic() - self.start)

    def _has_time_for(self, timed: TimedCase, shorter: Sequence[ModelTimes]) -> bool:
        """Whether the least number of runs fits, going by shorter lengths.

        From one length to the next, time grows at least as it did before: first weights are read once whatever the length is,
        then matmuls grow with it, then scores with its square.
        """
        times = [(t.length, t.original.best + t.optimized.best) for t in shorter[-2:]]
        (before, least), (last, seconds) = times[0], times[-1]
        if last > before:
            seconds += max(0.0, (seconds - least) / (last - before) * (timed.keys - last))
        return (1 + self.limits.least_rounds) * seconds <= self._seconds_left()

    def _draw(self, case: Case) -> Feed:
        return self.inputs.maker.draw(case, np.random.default_rng(0))

    def _describe(self, feeds: Mapping[str, np.ndarray]) -> str:
        return describe_feeds(self.inputs.working.graph.input, feeds)

    def _time(self, case: Case, keys: int, share: float) -> ModelTimes | None:
        """The times at a case in so large a part of the time left; None with a reason where it does not run."""
        seconds = share * max(0.0, self._seconds_left())
        end = max(1e-3, self.limits.end - (time.monotonic() - self.start))
        feeds, ratio = self._draw(case), 1.0
        if case.padding is not Padding.NONE:
            feeds, ratio = pad_texts(self.padded_batches, self.inputs.maker, feeds)
        words = self._describe(feeds)
        try:
            samples = self.first.measure([self.second], feeds, replace(self.limits, seconds=seconds, end=end))
        except TimeoutError:
            self.left_out.append(f"it takes more than {self.limits.end:.0f} s at {words}")
            return None
        except RuntimeFailure as error:
            self.left_out.append(f"{words}: ONNX Runtime does not run it: {explained(error)}")
            return None
        before, after = (RunTimes(min(s), median(s), len(s)) for s in samples)
        shapes = {name: tuple(array.shape) for name, array in feeds.items()}
        padded_over_real = ratio if self.padded_batches else None
        return ModelTimes(words, before, after, length=keys, shapes=shapes, padded_over_real=padded_over_real)


def _file_bytes(path: Path, inputs: ModelInputs) -> int:
    data = [path.parent / name for name in external_files(inputs.working)]
    return path.stat().st_size + sum(p.stat().st_size for p in data if p.is_file())
