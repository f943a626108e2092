# SPDX-License-Identifier: Apache-2.0
"""What the ops describe: problems are values, and layers that ask the same of kernels have equal ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from stof.attention.describe.site_problem import SiteProblem
from stof.cached_attention.problem import CacheProblem
from stof.fusion.describe.region_problems import ChainProblem
from stof.ops import OPS
from stof.options import Options
from stof.pipeline import optimize
from stof.sparse_mlp.problem import MlpProblem


def made(problem: type[Any], **fields: Any) -> Any:
    """A problem whose fields are hashable values of no meaning, but for those that are given."""
    return problem(**{name: fields.get(name, 1) for name in problem.__dataclass_fields__})


@pytest.mark.parametrize("problem", [SiteProblem, CacheProblem, MlpProblem, ChainProblem])
def test_problems_are_values(problem: type[Any]) -> None:
    assert is_dataclass(problem)
    one, other = made(problem), made(problem)
    assert one == other
    assert hash(one) == hash(other)
    for name in problem.__dataclass_fields__:
        assert made(problem, **{name: 2}) != one, f"{name} is part of the problem"
        with pytest.raises(FrozenInstanceError):
            setattr(one, name, 2)


def test_layers_that_ask_the_same_have_one_problem(
    narrow: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    described: dict[str, Any] = {}
    for op in OPS:

        def decide(job: Any, found: Any, op: Any = op, plain: Any = op.decide) -> Any:
            described[op.key] = found
            return plain(job, found)

        monkeypatch.setattr(op, "decide", decide)
    optimize(narrow("bert.dynamo.sdpa"), options=Options(chains="on", verify=False))
    problems = [s.problem for s in described["sites"].sites]
    assert len(problems) == 2
    assert len(set(problems)) == 1
