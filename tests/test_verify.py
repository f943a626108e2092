# SPDX-License-Identifier: Apache-2.0
"""What the verifier runs in the time it has, and how it finds sites that are wrong only together."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stof import cli
from stof.inputs import Padding
from stof.verify import cases, suspects


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("sites", [3, 4, 17, 64])
def test_suspects_are_the_smallest_set(sites: int, count: int) -> None:
    rng = np.random.default_rng(100 * sites + count)
    for _ in range(20):
        culprits = sorted(int(i) for i in rng.choice(sites, count, replace=False))
        runs = 0

        def fails(some: Sequence[Any], culprits: list[int] = culprits) -> bool:
            nonlocal runs
            runs += 1
            assert list(some) == sorted(set(some))
            return set(culprits) <= set(some)

        everything: Any = range(sites)
        assert suspects(everything, fails) == (culprits, True)
        assert runs <= count * (math.ceil(math.log2(sites)) + 1)


def test_one_of_two_causes_is_found() -> None:
    everything: Any = range(30)
    found, enough = suspects(everything, lambda some: {3, 20} <= set(some) or {9, 25} <= set(some))
    assert (found, enough) == ([3, 20], True)


def test_a_search_that_ends_early_says_so() -> None:
    everything: Any = range(40)
    culprits = {1, 5, 9, 20, 30, 39}
    found, enough = suspects(everything, lambda some: culprits <= set(some))
    assert not enough
    assert len(found) > 2
    assert set(found) < culprits


def test_cases_exceed_the_window_and_are_padded_on_both_sides() -> None:
    for tokens in (math.inf, 100):
        found = cases(["abs(q - k) <= 64 and pad[b, k]"], tokens)
        assert {c.padding for c in found if c.length > 65} == set(Padding)
        assert any(c.length < 64 for c in found)
        assert found[-1].batch == 2
        assert max(c.batch for c in found[:-1]) == (2 if tokens == math.inf else 1)


def test_without_time_the_first_and_the_last_case_run(
    narrow: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = narrow("modernbert.dynamo.sdpa")
    report = path.with_name("report.json")
    assert cli.main([str(path), "--verify-budget", "0.000001", "--json", str(report)]) == 0
    assert "cut short by the budget" in capsys.readouterr().out
    verification = json.loads(report.read_text())["verification"]
    assert not verification["complete"]
    outputs = [c["what"] for c in verification["comparisons"] if not c["site"]]
    assert outputs == [
        "output 'last_hidden_state', batch 1, length 53, padded left",
        "output 'last_hidden_state', batch 4, length 9, padded right",
    ]
