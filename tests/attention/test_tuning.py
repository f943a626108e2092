# SPDX-License-Identifier: Apache-2.0
"""The tuner: its choices from given times, its budget, its cache."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stof.attention.decide import tune as tuning
from stof.attention.decide.tune import Tuner
from stof.attention.describe.site_problem import SiteProblem
from stof.mask.expression import MaskExpression
from stof.mask.site import AttentionSite, EmptyRows, Layout, LiftedMask, MaskTerm, Operand, RuntimeOperand, TermKind
from stof.runtime.cuda import DeviceInfo
from stof.runtime.library import LibraryError
from stof.tuning_cache import Cache

DEVICE = DeviceInfo("a device", 90)
NAMES = ["sm80", "sm90-128x64x2", "sm90-64x64x4"]


def _site() -> AttentionSite:
    operand = Operand("x", Layout.BHSD)
    return AttentionSite(
        "site", 0, "softmax", operand, operand, operand, "y", Layout.BHSD, 12, 12, 64, 64, 0.125, 10
    )  # fmt: skip


def _problem(mask: LiftedMask | None = None, **changed: Any) -> SiteProblem:
    return SiteProblem.of(replace(_site(), **changed), mask or MASK)


MASK = LiftedMask(MaskExpression.parse("abs(q - k) <= 64"))


class Bench:
    """Stands for the device: times by kernel and length, and a clock that each measurement moves by a second."""

    def __init__(self, times: dict[str, dict[int, float]]) -> None:
        self.times = times
        self.calls: list[tuple[int, str]] = []

    def clock(self) -> float:
        return float(len(self.calls))

    def measure(self, problem: SiteProblem, batch: int, length: int, kernel: str) -> float:
        self.calls.append((length, kernel))
        return self.times[kernel][length]


@pytest.fixture
def tuner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tuning, "kernel_names", lambda size, dtype: NAMES)

    def make(bench: Bench, seconds: float = 1000.0, path: Path | None = None) -> Tuner:
        cache = Cache(path or tmp_path / "cache" / "tuning.sqlite", DEVICE.name, "a build")
        return Tuner(seconds, cache, bench.clock, bench.measure, DEVICE)

    return make


def _flat(**times: float) -> dict[str, dict[int, float]]:
    names = {"model": "", "old": NAMES[0], "two": NAMES[1], "four": NAMES[2]}
    return {names[k]: {512: t, 4096: 10 * t} for k, t in times.items()}


def test_measurements_of_earlier_runs_are_counted(tuner) -> None:
    bench = Bench(_flat(model=10, old=30, two=8, four=9))
    first, second = tuner(bench), None
    first.tune(_problem(), 1, [512, 4096])
    assert first.cache.earlier is None
    second = tuner(bench)
    second.tune(_problem(), 1, [512, 4096])
    assert (second.cache.earlier.decisions, len(second.cache.earlier.times)) == (1, 8)


def test_the_fastest_kernel_is_taken(tuner) -> None:
    bench = Bench(_flat(model=10, old=30, two=8, four=9))
    tuned = tuner(bench).tune(_problem(), 1, [512, 4096])
    assert tuned.kernel == NAMES[1]
    assert tuned.whole
    assert tuned.microseconds[4096] == pytest.approx({"": 100, NAMES[0]: 300, NAMES[1]: 80, NAMES[2]: 90})


def test_noise_leaves_the_choice_to_the_model(tuner) -> None:
    assert tuner(Bench(_flat(model=10, old=30, two=9.8, four=11))).tune(_problem(), 1, [512]).kernel == ""


def test_a_kernel_that_loses_at_a_length_is_not_taken(tuner) -> None:
    times = _flat(model=10, old=30, two=5, four=9)
    times[NAMES[1]][4096] = 105
    assert tuner(Bench(times)).tune(_problem(), 1, [512, 4096]).kernel == NAMES[2]


def test_what_was_measured_is_not_measured_again(tuner) -> None:
    first, second = Bench(_flat(model=10, old=30, two=8, four=9)), Bench({})
    chosen = tuner(first).tune(_problem(), 1, [512])
    again = tuner(second).tune(_problem(), 1, [512])
    assert chosen == again
    assert chosen.kernel == NAMES[1]
    assert len(first.calls) == 4
    assert not second.calls
    # Another mask, batch, length or size is another problem.
    third = Bench(_flat(model=10, old=30, two=8, four=9))
    other = tuner(third)
    other.tune(_problem(LiftedMask(MaskExpression.parse("k <= q"))), 1, [512])
    other.tune(_problem(), 2, [512])
    other.tune(_problem(head_size=128), 1, [512])
    other.tune(_problem(), 1, [4096, 512])
    assert len(third.calls) == 16


def test_the_budget_ends_it_with_what_is_known(tuner) -> None:
    bench = Bench(_flat(model=10, old=5, two=8, four=1))
    tuned = tuner(bench, seconds=2).tune(_problem(), 1, [512])
    assert len(bench.calls) == 2
    assert not tuned.whole
    assert tuned.kernel == NAMES[0]


def test_one_kernel_leaves_no_choice(tuner) -> None:
    bench = Bench({})
    term = MaskTerm(TermKind.ADD, "bias")
    assert tuner(bench).tune(_problem(replace(MASK, bias=(term,))), 1, [512]).kernel == ""
    assert tuner(bench).tune(_problem(softcap=30.0), 1, [512]).kernel == ""
    assert tuner(bench).tune(_problem(scale=-0.125), 1, [512]).kernel == ""
    assert not bench.calls


def test_what_cannot_be_run_is_left_to_the_model(tuner) -> None:
    class Narrow(Bench):
        def measure(self, problem: SiteProblem, batch: int, length: int, kernel: str) -> float:
            if length > 512 or kernel == NAMES[0]:
                raise LibraryError("no device memory for 1 bytes of a tensor")
            return super().measure(problem, batch, length, kernel)

    tuned = tuner(Narrow(_flat(model=10, old=1, two=8, four=9))).tune(_problem(), 1, [512, 4096])
    assert tuned.kernel == NAMES[1]
    assert not tuned.whole
    assert tuned.microseconds == {4096: {}, 512: {"": 10, NAMES[1]: 8, NAMES[2]: 9}}
    # Nothing of it is kept: with more memory it is measured.
    again = Bench(_flat(model=10, old=1, two=8, four=9))
    assert tuner(again).tune(_problem(), 1, [512, 4096]).whole
    assert len(again.calls) == 5


def test_measurements_of_earlier_versions_are_found() -> None:
    """The text of a problem in the cache is the one that versions before ``SiteProblem`` wrote."""
    table = ("table0", "bool", (2, 2), b"\1\0\1\1")
    operands = (RuntimeOperand("segment_q", "s"), RuntimeOperand("pad", "p"))
    mask = LiftedMask(MaskExpression.parse("abs(q - k) <= 64"), operands, (table,), empty_rows=EmptyRows.MEAN)
    problem = _problem(mask, kv_num_heads=4, value_head_size=32, softcap=30.0, query_offset=1)
    assert json.dumps({**problem.cache_key, "batch": 2, "length": 512}, sort_keys=True) == (
        '{"batch": 2, "dtype": 10, "empty_rows": "mean", "heads": [12, 4], "length": 512, "mask": "abs(q - k) <= 64", "op": '
        '"StofAttention", "operands": ["pad", "segment_q"], "query_offset": 1, "sizes": [64, 32], "softcap": 30.0, "tables": '
        '[["table0", "bool", [2, 2], "52a5c4a10657220cac05c63adfa923c7771c55d868a58ee360eb3d1511985c3e"]]}'
    )


def test_problems_are_equal_wherever_they_stand() -> None:
    one, other = _problem(), SiteProblem.of(replace(_site(), name="other", index=3, output="z", scale=0.125), MASK)
    assert one == other
    assert hash(one) == hash(other)
    assert one != _problem(dtype=1)
