# SPDX-License-Identifier: Apache-2.0
"""The environment variables that Python reads: one table, and one error for a wrong value.

Those of the plugin libraries stand in plugins/core/host/environment.cc. docs/reference/environment.md is made of both.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from stof.errors import ArgumentError, StofError, shown

_MOST_SHOWN = 200  # characters of a value; paths are long


class Kind(Enum):
    """The type of a variable; its value is what an error and the page say is expected."""

    FLAG = "0 or 1"
    FILE = "a file that exists"
    PATH = "a path"


@dataclass(frozen=True)
class Variable:
    """An environment variable. An empty value counts as unset.

    Attributes:
        name: of the variable.
        kind: of its values.
        help: its meaning, as Markdown for docs/reference.
        default: what holds where it is unset, where the meaning does not say it.
        reader: who reads it.
        is_for_users: whether it is for users; else for tests and measurements.
    """

    name: str
    kind: Kind
    help: str
    default: str = ""
    reader: str = "Python"
    is_for_users: bool = True

    def text(self) -> str:
        """The value; empty where it is unset."""
        return os.environ.get(self.name, "")

    def flag(self) -> bool:
        """Whether the value is 1.

        Raises:
            ArgumentError: when it is neither 0 nor 1.
        """
        if self.text() not in ("", "0", "1"):
            raise self._wrong(ArgumentError)
        return self.text() == "1"

    def file(self, error: type[StofError] = ArgumentError) -> Path | None:
        """The file that the value names, without links; None where it is unset.

        Raises:
            StofError: an ``error`` when it names no file.
        """
        if not self.text():
            return None
        path = Path(self.text())
        if not path.is_file():
            raise self._wrong(error)
        return path.resolve()

    def _wrong(self, error: type[StofError]) -> StofError:
        value = shown(repr(self.text()), _MOST_SHOWN)
        return error(f"the environment variable {self.name} is {value}, expected {self.kind.value}")


LIBRARY = Variable("STOF_LIBRARY", Kind.FILE, "the ONNX Runtime plugin library, instead of the package's")
TRT_LIBRARY = Variable(
    "STOF_TRT_LIBRARY", Kind.FILE, "the TensorRT plugin library, instead of the package's or the one beside it"
)
CACHE = Variable(
    "STOF_CACHE",
    Kind.PATH,
    "the file of [measurements](../guide/tuning.md#measurements-of-earlier-runs), by which runs without `--tune` decide, too",
    "`tuning.sqlite` in `~/.cache/stof`, `~/Library/Caches/stof` or `%LOCALAPPDATA%\\stof\\Cache`",
    "`stof-optimize`",
)
TRACEBACK = Variable(
    "STOF_TRACEBACK",
    Kind.FLAG,
    "`1`: print where an internal error, or an error with a cause, came from",
    "`0`",
    "the commands",
)
CHECK_STEPS = Variable(
    "STOF_CHECK_STEPS",
    Kind.FLAG,
    "`1`: [compare models](../design/architecture.md#what-prepare-may-do) before and after each step that only reads them",
    "`0`",
    "`stof-optimize`",
    is_for_users=False,
)
VARIABLES = (LIBRARY, TRT_LIBRARY, CACHE, TRACEBACK, CHECK_STEPS)
