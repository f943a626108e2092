# SPDX-License-Identifier: Apache-2.0
"""A candidate that is ready to run, and the reason why one is not there."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


class Unavailable(Exception):
    """A peer that is not installed, cannot express the case or would not fit into memory; listed with the reason."""


@dataclass(frozen=True)
class Runner:
    """``run`` is timed; ``output`` runs once and gives [B, H, S, D]; ``keep`` holds what both need."""

    run: Callable[[], object]
    output: Callable[[], np.ndarray]
    keep: tuple[Any, ...] = ()


def require(package: str) -> Any:
    """Imports a peer's package.

    Raises:
        Unavailable: when it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise Unavailable(f"{package} is not installed ({error})") from error
