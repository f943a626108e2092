# SPDX-License-Identifier: Apache-2.0
"""How, when and where a report was made: command, date, machine, versions and file sizes."""

from __future__ import annotations

import contextlib
import importlib.util
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import onnx

from stof.runtime.cuda import device_info
from stof.runtime.library import LibraryError
from stof.system.processor import cpu_name, usable_cores
from stof.targets import Target


@dataclass(frozen=True)
class RunFacts:
    """The facts of one run.

    Attributes:
        command: that gives the same result; empty of a model that Python has in memory.
        date: when the run began, UTC.
        machine: its CPU, cores, instruction set and system, and the GPU that choices are for.
        versions: of stof, ONNX Runtime, onnx and Python.
        model_bytes: of the model with its external data; None: not known.
        output_bytes: of what was written; None: nothing was.
    """

    command: str
    date: str
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    model_bytes: int | None = None
    output_bytes: int | None = None

    def with_sizes(self, model_bytes: int | None, output_bytes: int | None) -> RunFacts:
        """The same with the sizes of files, those that are None as they were."""
        return replace(
            self, model_bytes=model_bytes or self.model_bytes, output_bytes=output_bytes or self.output_bytes
        )

    def to_json(self) -> dict[str, Any]:
        """Every fact by its key in the report's JSON."""
        return asdict(self)


def collect_facts(command: str, library: Mapping[str, Any], target: Target) -> RunFacts:
    """The facts of a run that begins now.

    Args:
        command: that gives the same result.
        library: ``build_info()``.
        target: that choices are for.
    """
    import stof

    machine = {
        "cpu": cpu_name(),
        "cores": str(usable_cores()),
        "isa": str(library.get("cpu_isa", "")),
        "system": platform.platform(),
    }
    if target.uses_gpu:
        with contextlib.suppress(LibraryError):
            machine["gpu"] = device_info().name
    versions = {
        "stof": stof.__version__,
        "onnxruntime": _version_of_onnxruntime(),
        "onnx": onnx.__version__,
        "python": platform.python_version(),
    }
    return RunFacts(command, datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), machine, versions)


def _version_of_onnxruntime() -> str:
    """The installed one, read off its package: an import takes long, and happens in the process of sessions."""
    with contextlib.suppress(OSError, ValueError, ImportError):
        spec = importlib.util.find_spec("onnxruntime")
        if spec is None:
            return "not installed"
        found = re.search(
            r"^__version__ *= *[\"']([^\"']+)", Path(spec.origin or "").read_text(encoding="utf-8"), re.MULTILINE
        )
        if found:
            return found[1]
    return "not known"


def count_bytes(path: Path, data: Iterable[str]) -> int | None:
    """Bytes of a model's file and of its external data beside it; None where one of them cannot be looked at.

    Args:
        path: the model's file.
        data: names of files of external data, relative to the model's folder.
    """
    try:
        return sum(file.stat().st_size for file in {path, *(path.parent / name for name in data)})
    except (OSError, ValueError):
        return None
