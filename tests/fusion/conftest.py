# SPDX-License-Identifier: Apache-2.0
"""Time for measurements that does not depend on the machine's speed."""

from __future__ import annotations

from functools import partial

import pytest

from stof.fusion.decide.measured import make_chain_decider


@pytest.fixture(autouse=True)
def _tuning_has_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds of ``--tune`` are never over: searches end by themselves."""
    monkeypatch.setattr("stof.fusion.rewrite.make_chain_decider", partial(make_chain_decider, clock=lambda: 0.0))
