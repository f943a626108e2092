# SPDX-License-Identifier: Apache-2.0
"""The process of sessions ends with its parent: at once where that is gone before it begins, and later within native code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from stof.execution.worker.start import _START


def start(code: str, pipe: int, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, *options, "-c", code, "0", str(pipe), *sys.path]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, pass_fds=(pipe,), text=True, **streams)  # type: ignore[call-overload,no-any-return]


def test_a_parent_that_is_gone_already() -> None:
    """It does not import NumPy first, which takes seconds on a busy machine."""
    read, write = os.pipe()
    os.close(write)
    with start(_START, read, "-v") as child:
        os.close(read)
        _, imports = child.communicate(timeout=120)
    assert child.returncode == 0
    assert "import 'fcntl'" in imports
    assert "import 'stof'" not in imports
    assert "import 'numpy" not in imports


def test_a_parent_that_ends_meanwhile() -> None:
    read, write = os.pipe()
    # Backtracking of a regular expression is one long call, in which Python handles no signals.
    endless = "print('alive', flush=True)\nimport re\nre.match('(a|aa)+$', 'a' * 120 + 'b')\n"
    with start(_START.partition("from stof")[0] + endless, read) as child:
        os.close(read)
        assert child.stdout is not None
        assert child.stdout.readline() == "alive\n"
        assert child.poll() is None
        os.close(write)
        assert child.wait(60) == -signal.SIGIO
