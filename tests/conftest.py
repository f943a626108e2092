# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures: narrow graphs that real exporters wrote, filled with seeded weights."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import onnx
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "helpers"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "models"))
import build
from stof.runtime.library import LibraryError, build_info


def pytest_sessionstart() -> None:
    """Ends at once without a library, with how to build one, in the place of a failure for each test."""
    try:
        build_info()
    except LibraryError as error:
        pytest.exit(
            f"the tests need a built library: {error}. In this folder: cmake --preset dev && cmake --build --preset dev, then "
            "export STOF_LIBRARY=$PWD/build/dev/libstof_ort.so",
            returncode=1,
        )


# Whoever starts the tests in the background may have signals ignored, and processes inherit that.
if threading.current_thread() is threading.main_thread():
    for _number in (getattr(signal, "SIGHUP", signal.SIGTERM), signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(_number) is signal.SIG_IGN:
            signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _no_cache_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured on this machine before decides nothing in a test."""
    monkeypatch.setenv("STOF_CACHE", str(tmp_path / "own-cache" / "tuning.sqlite"))


@pytest.fixture(autouse=True)
def _steps_change_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run of the optimizer in a test is held to it: emit alone changes a graph."""
    monkeypatch.setenv("STOF_CHECK_STEPS", "1")


@pytest.fixture(autouse=True)
def _no_progress_of_slow_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of over 15 s logs its steps; tests of messages must not depend on how long it takes."""
    monkeypatch.setattr("stof.progress._LOG_EVERY", 3600.0)


@pytest.fixture
def small_mlps_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny MLPs are replaced as large ones are; test_small_mlps.py tests that they stay dense otherwise."""
    monkeypatch.setattr("stof.sparse_mlp.decide.cpu._CACHED_BYTES", 0)


@pytest.fixture
def dequantized_mlps_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantized MLPs without accuracy_level 4 are replaced with any number of active neurons."""
    monkeypatch.setattr("stof.sparse_mlp.decide.cpu._MOST_ACTIVE_DEQUANTIZED", 1.0)


# How long one example takes says something about the machine, not about stof. `make test` draws the same examples
# each time, so that what it says depends on the code alone; `make test-all` draws others.
hypothesis.settings.register_profile(
    "stof",
    deadline=None,
    derandomize=not os.environ.get("STOF_TEST_ALL"),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("stof")


@pytest.fixture
def watchdog() -> Iterator[None]:
    """Ends a process that hangs, with all its stacks; no test is meant to come near to that."""
    faulthandler.dump_traceback_later(600, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def narrow(tmp_path: Path) -> Callable[[str], Path]:
    """Writes ``narrow/<name>`` into a fresh folder and returns its path."""

    def make(name: str) -> Path:
        path = tmp_path / "model.onnx"
        onnx.save(build.fill(build.load_graph(f"narrow/{name}"), seed=1), str(path))
        return path

    return make
