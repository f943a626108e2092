# SPDX-License-Identifier: Apache-2.0
"""``--tune N`` ends within N + 5 s however long sessions and runs take, and the report says what it left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stof.fusion.decide.measured import make_chain_decider
from stof.fusion.search.measure import Timer
from stof.options import Options
from stof.pipeline import optimize

SECONDS, ALLOWED = 3.0, 5.0


class Clock:
    """A clock that only what is measured moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("part", "session", "run"),
    [
        (0.0, 0.004, 0.002),  # a small model: the search itself has to stop
        (0.3, 1.5, 0.4),  # large weights, which a session packs
        (0.0, 2.9, 0.0),
        (0.0, 0.01, 1.4),  # long runs
        (2.0, 0.1, 0.1),  # large inputs to draw
    ],
)
def test_tuning_ends_in_time(
    narrow: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, part: float, session: float, run: float
) -> None:
    clock = Clock()
    made: list[float] = []  # when sessions were made

    class Runs:
        def run(self, outputs: object, feeds: object, options: object = None) -> None:
            clock.now += run

    def make_part(*_: object) -> tuple[None, Mapping[str, np.ndarray]]:
        clock.now += part
        return None, {}

    def make_session(*_: object) -> Any:
        made.append(clock.now)
        clock.now += session
        return Runs()

    monkeypatch.setattr("stof.fusion.decide.measured.Timer", partial(Timer, clock=clock))
    monkeypatch.setattr(Timer, "_part", make_part)
    monkeypatch.setattr(Timer, "_session", make_session)
    monkeypatch.setattr("stof.fusion.rewrite.make_chain_decider", partial(make_chain_decider, clock=clock))
    start = clock.now
    report = optimize(narrow("bert.dynamo.sdpa"), options=Options(tune=SECONDS, verify=False))
    assert made
    assert SECONDS <= clock.now - start <= SECONDS + ALLOWED
    left = [h for h in report.sections["chains"].hints() if "s of --tune were over" in h]
    assert len(left) == 1, report.to_text()
    assert "different regions were not measured, or not fully" in report.to_text()
    unmeasured = [c for c in report.chains if "of --tune were over" in c.reason]
    assert unmeasured or session < 0.1


def test_nothing_is_left_out_where_there_is_time(
    narrow: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("stof.fusion.rewrite.make_chain_decider", partial(make_chain_decider, clock=clock))
    monkeypatch.setattr("stof.fusion.decide.measured.Timer.seconds", lambda *_: 1.0)
    monkeypatch.setattr(
        "stof.fusion.decide.measured.Timer.measure_interleaved", lambda _s, _n, found, *_: [1.0] * len(found)
    )
    report = optimize(narrow("bert.dynamo.sdpa"), options=Options(tune=SECONDS, verify=False))
    assert report.chains
    assert report.sections["chains"].hints() == []
    assert not any("--tune" in c.reason for c in report.chains)
