# SPDX-License-Identifier: Apache-2.0
"""The candidates of a grid: stof and its baselines, by name, and what a candidate that is ready to run can do."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from bench.core.case import AttentionCase
from stof.errors import ArgumentError

Asked = TypeVar("Asked")
Resource = TypeVar("Resource")
Built = TypeVar("Built")


class Unavailable(ArgumentError):
    """A candidate that is not installed, cannot express the case or does not fit into memory; listed with the reason."""


@dataclass(frozen=True)
class Candidate(Generic[Asked, Resource, Built]):
    """What may be timed: stof, or a baseline.

    Attributes:
        name: its name in results and options.
        label: its name in tables.
        build: makes it ready to run, of the problem and the number of threads (CPU) or the stream (GPU).
        grids: the grids that it is timed in; () is all of them.
        score_tensors: how many fp32 tensors [B, H, S, T] it holds during a run.
    """

    name: str
    label: str
    build: Callable[[Asked, Resource], Built]
    grids: tuple[str, ...] = ()
    score_tensors: int = 0

    def score_bytes(self, case: AttentionCase) -> int:
        """Bytes of scores that a run holds."""
        return 4 * self.score_tensors * case.B * case.H * case.S * case.T


AnyCandidate = TypeVar("AnyCandidate", bound="Candidate[Any, Any, Any]")


def select(
    candidates: Sequence[AnyCandidate], names: Sequence[str] | None, grid: str | None = None
) -> list[AnyCandidate]:
    """The candidates of a grid (None: of any), or those of them that are named.

    Raises:
        ValueError: when there is no candidate of a name.
    """
    unknown = set(names or ()) - {c.name for c in candidates}
    if unknown:
        known = ", ".join(c.name for c in candidates)
        raise ValueError(f"no candidate {', '.join(sorted(unknown))}; there are {known}")
    in_grid = [c for c in candidates if grid is None or not c.grids or grid in c.grids]
    return [c for c in in_grid if names is None or c.name in names]


@dataclass(frozen=True)
class Runner:
    """A candidate that is ready to run on the CPU.

    Attributes:
        run: what is timed.
        output: runs once and gives [B, H, S, D].
        keep: objects that both need.
    """

    run: Callable[[], object]
    output: Callable[[], np.ndarray]
    keep: tuple[Any, ...] = ()


def require(package: str) -> Any:
    """Imports a package of a baseline.

    Raises:
        Unavailable: when it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise Unavailable(f"{package} is not installed ({error})") from error
