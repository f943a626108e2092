# SPDX-License-Identifier: Apache-2.0
"""The tables that the pattern of one attention looks up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stof.errors import ArgumentError
from stof.runtime.library import type_limits


@dataclass(frozen=True)
class _TableLimits:
    most_tables: int  # that masks of an operator with a KV cache look up


def _most_tables() -> int:
    """The most tables that each operator with a KV cache takes, by the plugin library; others take more."""
    operators = ("StofCachedAttention", "StofPagedAttention")
    return min(n.most_tables for op in operators for n in type_limits(op, "cpu", _TableLimits).values())


class Tables:
    """The constants that an expression looks up; equal ones share a name."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}

    def add(self, array: np.ndarray) -> str:
        """The name of a constant.

        Raises:
            ArgumentError: when there are too many.
        """
        for name, other in self.arrays.items():
            if other.dtype == array.dtype and np.array_equal(other, array):
                return name
        if len(self.arrays) == (most := _most_tables()):
            raise ArgumentError(f"--sparsify puts more than {most} tables on one attention; use fewer clauses")
        name = f"table{len(self.arrays)}"
        self.arrays[name] = array
        return name
