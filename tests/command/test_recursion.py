# SPDX-License-Identifier: Apache-2.0
"""Python's recursion limit is as before after an optimization, in whatever order threads end theirs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import stof
from stof.errors import ModelError
from stof.options import Options
from stof.recursion import deep_recursion


@pytest.fixture(autouse=True)
def limit() -> Iterator[int]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(before + 123)  # a value that nobody else sets
    yield before + 123
    sys.setrecursionlimit(before)


def test_an_optimization_leaves_the_limit_alone(narrow: Callable[[str], Path], limit: int) -> None:
    assert stof.optimize(narrow("bert.dynamo.sdpa"), options=Options(dry_run=True)).replaced == 2
    assert sys.getrecursionlimit() == limit


def test_so_does_one_that_fails(tmp_path: Path, limit: int) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no model")
    with pytest.raises(ModelError):
        stof.optimize(tmp_path / "model.onnx")
    assert sys.getrecursionlimit() == limit


def test_blocks_that_overlap_restore_it_at_the_last_end(limit: int) -> None:
    first, second = ExitStack(), ExitStack()
    first.enter_context(deep_recursion())
    second.enter_context(deep_recursion())
    first.close()
    assert sys.getrecursionlimit() > limit
    second.close()
    assert sys.getrecursionlimit() == limit


def test_a_higher_limit_is_kept(limit: int) -> None:
    sys.setrecursionlimit(50_000)
    with deep_recursion():
        assert sys.getrecursionlimit() == 50_000
    assert sys.getrecursionlimit() == 50_000
