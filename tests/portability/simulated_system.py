# SPDX-License-Identifier: Apache-2.0
"""Makes a Python on Linux look like one on Windows or macOS, as far as stof can see: run before stof is imported.

What the system lacks is gone: modules, functions, constants. What Windows alone has stands in, with the same effect: locks by
``flock``, handles by descriptors, the end of a job by nothing (the other means of ending a process has to do).
``python simulated_system.py SYSTEM SCRIPT ARGUMENTS..`` runs a script so.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Iterable, Sequence
from typing import Any

# They look at the system themselves, at their import.
import multiprocessing.util  # isort: skip
import numpy
import onnx_graphsurgeon
import psutil
import pytest

LOADED = (multiprocessing.util, numpy, onnx_graphsurgeon, psutil, pytest)
MODULES = {
    "win32": ("fcntl", "resource", "pwd", "grp", "termios", "tty", "readline", "curses"),
    "darwin": (),
}
NAMES: dict[str, dict[Any, tuple[str, ...]]] = {
    "win32": {
        os: (
            *("fork", "forkpty", "killpg", "setsid", "pipe2", "pread", "pwrite", "memfd_create", "sysconf", "statvfs"),
            *("sched_getaffinity", "sched_setaffinity", "getuid", "geteuid", "getgid", "getegid", "mkfifo", "nice"),
            *("O_CLOEXEC", "O_NONBLOCK", "O_NOCTTY", "O_NOFOLLOW", "O_DIRECTORY", "O_ASYNC", "MFD_CLOEXEC", "uname"),
        ),
        signal: ("SIGHUP", "SIGKILL", "SIGIO", "SIGPIPE", "SIGALRM", "SIGUSR1", "SIGUSR2", "setitimer", "pause"),
        socket: ("AF_UNIX", "SOCK_SEQPACKET", "MSG_NOSIGNAL", "send_fds", "recv_fds"),
        select: ("poll", "epoll"),
    },
    "darwin": {
        os: ("pipe2", "memfd_create", "sched_getaffinity", "sched_setaffinity", "MFD_CLOEXEC", "posix_fadvise"),
        socket: ("SOCK_SEQPACKET", "MSG_NOSIGNAL"),
        select: ("epoll",),
    },
}
LOCK_VIOLATION = 33
_flock, _flags = fcntl.flock, (fcntl.LOCK_SH, fcntl.LOCK_EX, fcntl.LOCK_NB)
_socketpair, _local = socket.socketpair, socket.AF_UNIX


class _Refused:
    """Finds the modules that the system lacks, and refuses them."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in self._names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


class _Kernel:
    """The functions of kernel32 that stof calls."""

    def __init__(self) -> None:
        self.LockFileEx = self._Function(self._lock)
        self.CreateJobObjectW = self._Function(lambda *_: 1)
        self.SetInformationJobObject = self._Function(lambda *_: 1)
        self.AssignProcessToJobObject = self._Function(lambda *_: 1)

    class _Function:
        """A function of ctypes may be given the types of its arguments."""

        def __init__(self, run: Any) -> None:
            self._run = run

        def __call__(self, *arguments: Any) -> int:
            return int(self._run(*arguments))

    @staticmethod
    def _lock(handle: int, flags: int, reserved: int, low: int, high: int, where: object) -> int:
        assert (reserved, low, high) == (0, 1, 0)
        shared, exclusive, at_once = _flags
        try:
            _flock(handle, (exclusive if flags & 2 else shared) | (at_once if flags & 1 else 0))
        except BlockingIOError:
            ctypes.set_last_error(LOCK_VIOLATION)  # type: ignore[attr-defined]
            return 0
        return 1


def _add_windows() -> None:
    last = [0]
    windows = {
        "WinDLL": lambda name, use_last_error=False: _Kernel(),
        "get_last_error": lambda: last[0],
        "set_last_error": lambda code: last.__setitem__(0, code),
        "WinError": lambda code: OSError(code, "of Windows"),
    }
    for name, value in windows.items():
        setattr(ctypes, name, value)
    sys.modules["msvcrt"] = types.SimpleNamespace(get_osfhandle=lambda descriptor: descriptor)  # type: ignore[assignment]

    def refuse(*_: object) -> None:
        raise FileNotFoundError

    sys.modules["winreg"] = types.SimpleNamespace(OpenKey=refuse, HKEY_LOCAL_MACHINE=0)  # type: ignore[assignment]
    socket.socketpair = lambda: _socketpair(_local)  # type: ignore[assignment]
    os.O_BINARY = os.O_TEMPORARY = 0  # type: ignore[attr-defined]
    signal.SIGBREAK = signal.SIGTTIN  # type: ignore[attr-defined]
    subprocess.CREATE_NEW_PROCESS_GROUP = subprocess.CREATE_NO_WINDOW = 0  # type: ignore[attr-defined]
    subprocess.Popen.kill = lambda self: self.send_signal(9)  # type: ignore[method-assign]
    subprocess.Popen._handle = property(lambda self: self.pid)  # type: ignore[attr-defined]


def simulate(system: str) -> None:
    """Makes this process look like one of ``win32`` or ``darwin``."""
    sys.meta_path.insert(0, _Refused(MODULES[system]))
    for module in MODULES[system]:
        sys.modules.pop(module, None)
    for owner, names in NAMES[system].items():
        for name in names:
            if hasattr(owner, name):
                delattr(owner, name)
    sys.platform = system
    import platformdirs.windows  # it chooses by the system

    if system == "win32":
        platformdirs.windows._RESOLVE_WIN_FOLDER = platformdirs.windows.get_win_folder_from_env_vars
        _add_windows()


def main(arguments: Sequence[str]) -> None:
    """Runs a script."""
    system, script, *rest = arguments
    simulate(system)
    sys.argv = [script, *rest]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
