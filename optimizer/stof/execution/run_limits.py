# SPDX-License-Identifier: Apache-2.0
"""What a verification may take: wall time, and memory of this process and of the one that holds its sessions."""

from __future__ import annotations

import re
import time

from stof.system.memory import NO_LIMIT, free_memory, resident_bytes

RUNS = 3  # of each set of inputs: without graph optimizations, with them, and of the optimized model
GRACE = 4.0  # seconds beyond the budget after which a run is ended; the first inputs run even with a budget of 0
_LEAST = 0.05  # seconds that a run may take when none are left: sockets and Python need some
_FIRST = 0.45  # of all time, until the first run has to end: two further runs take as long
_LEFT = 0.3  # of what is left, which the first run has in any case: to load a model takes time, too
# Shares of all time from which a run that was ended may be endless: one with a limit of its own, and one that had the rest.
_MAY_BE_ENDLESS, _WAS_NEARLY_ALL = 0.1, 0.75
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class LimitReached(Exception):
    """A run was ended at a limit, or not begun. The message says at which, and what to do.

    Attributes:
        kind: the limit in a word.
        seconds: how long the run took until then.
    """

    kind = ""
    seconds = 0.0


class TimeLimit(LimitReached):
    """No time is left.

    Attributes:
        step: what ONNX Runtime did; empty where it did nothing.
    """

    kind = "time"
    step = ""


class MemoryLimit(LimitReached):
    """The processes would need more memory than they may have."""

    kind = "memory"


class RunLimits:
    """The time and memory of one verification.

    Args:
        budget: seconds after which nothing optional is begun.
        memory: bytes that this process and the one with the sessions may hold together; 0: half of what is free.
        end: the moment, of ``time.monotonic``, at which all runs are ended; by default shortly after the budget.

    Attributes:
        asked: the budget of the whole verification, for messages.
        deadline: the moment at which no further inputs are begun.
        end: the moment at which runs are ended.
        last_end: that of the whole verification, of which this is a part.
    """

    def __init__(self, budget: float, memory: int = 0, end: float | None = None) -> None:
        self.budget = self.asked = budget
        self.start = time.monotonic()
        self.deadline = self.start + budget
        self.end = self.last_end = self.deadline + GRACE if end is None else end
        self.memory = memory or default_memory()

    def share(self, budget: float) -> RunLimits:
        """Limits of a part of this verification, which ends with it."""
        limits = RunLimits(budget, self.memory, min(self.end, time.monotonic() + budget + GRACE))
        limits.asked, limits.last_end = self.asked, self.last_end
        return limits

    def extend(self, seconds: float) -> None:
        """Moves the end of a part to where so many seconds are left, at most to the end of the whole verification."""
        self.end = max(self.end, min(self.last_end, time.monotonic() + seconds))

    @property
    def total(self) -> float:
        """Seconds from the start to the end."""
        return self.end - self.start

    def seconds_left(self, until: float | None = None) -> float:
        """What a run may take that has to end at a moment, by default at the end."""
        return max(_LEAST, (self.end if until is None else min(until, self.end)) - time.monotonic())

    def is_over(self) -> bool:
        """Whether nothing may begin."""
        return time.monotonic() >= self.end

    def moment(self, share: float) -> float:
        """The moment at which a share of the time is over."""
        return self.start + share * self.total

    @property
    def first_end(self) -> float:
        """The moment at which the first run has to be over if it begins now."""
        now = time.monotonic()
        return max(self.moment(_FIRST), now + _LEFT * (self.end - now))

    def end_of_case(self, reserved: float = 0.0) -> float:
        """The moment at which a run of a case has to be over if it begins now: all runs of the case fit into what is left.

        Args:
            reserved: seconds of what is left that others need.
        """
        now = time.monotonic()
        return now + max(0.0, self.end - now - reserved) / RUNS

    def check_time(self) -> None:
        """Raises :class:`TimeLimit` when the time is over."""
        if self.is_over():
            raise TimeLimit(
                f"verification was ended after {self.asked:g} s and nothing was compared. Nothing was written; raise "
                "--verify-budget, or leave verification out with --no-verify"
            )

    def end_step(self, step: str, seconds: float, until: float | None = None) -> TimeLimit:
        """The error for a step that was ended.

        Args:
            step: what ONNX Runtime did: "run the original".
            seconds: how long it took.
            until: the moment at which it had to be over; None: it had the rest of the time.
        """
        is_rest = until is None or until >= self.end
        share = seconds / max(self.total, 1e-9)
        if share >= (_WAS_NEARLY_ALL if is_rest else _MAY_BE_ENDLESS):
            words = f"ONNX Runtime took longer than {seconds:.1f} s to {step}, which may be endless"
        elif is_rest:
            words = f"--verify-budget is used up: {seconds:.1f} s were left to {step}, which was not enough"
        else:
            words = f"ONNX Runtime took longer than {seconds:.1f} s to {step}, the share of --verify-budget for that"
        error = TimeLimit(
            f"verification was ended: {words}. Nothing was written; where it is slow, raise --verify-budget ({self.asked:g} s), "
            "or leave verification out with --no-verify"
        )
        error.seconds, error.step = seconds, step
        return error


def default_memory() -> int:
    """The memory that a verification may have: what this process holds, and half of what is free."""
    free = free_memory()
    return resident_bytes() + free // 2 if free else NO_LIMIT


def parse_bytes(text: str) -> int:
    """A number of bytes from text such as ``2G``, ``512M`` or ``1000000``.

    Raises:
        ValueError: where it is none.
    """
    parsed = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if parsed is None or not (number := int(float(parsed[1]) * _UNITS[parsed[2].upper()])):
        raise ValueError(text)
    return number


def show_bytes(number: float) -> str:
    """Bytes for people, in three digits."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if number >= 0.9995 * size:
            return f"{number / size:.3g} {unit}"
    return f"{number / 1024:.3g} KiB"
