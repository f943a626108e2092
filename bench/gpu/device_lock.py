# SPDX-License-Identifier: Apache-2.0
"""A lock by which one process at a time times on the device, while others compile and create sessions."""

from __future__ import annotations

import fcntl
import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class DeviceLock:
    """A file that processes lock; without a path, nothing is locked."""

    def __init__(self, path: Path | None = None) -> None:
        self._file = path.open("a") if path is not None else None
        self._depth = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds the lock; may be nested."""
        if self._file is None:
            yield
            return
        if not self._depth:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def around_tuning(self) -> None:
        """Takes the lock around each measurement of torch's compiler."""
        kind = type(importlib.import_module("torch._inductor.runtime.benchmarking").benchmarker)
        own = kind.benchmark_gpu

        @functools.wraps(own)
        def locked(*arguments: Any, **options: Any) -> Any:
            with self.held():
                return own(*arguments, **options)

        kind.benchmark_gpu = locked
