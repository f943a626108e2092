# SPDX-License-Identifier: Apache-2.0
"""The processor's name, and the CPUs that this process may use."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_SECONDS = 10.0  # that a command of the system may take
_WINDOWS_KEY = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"


def cpu_name() -> str:
    """The processor's name; its architecture where the system does not tell a name."""
    return _read_name() or platform.machine()


def _read_name() -> str:
    """The name; empty where the system does not tell it."""
    if sys.platform == "win32":
        import winreg

        with contextlib.suppress(OSError), winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, _WINDOWS_KEY) as key:
            return str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()
    elif sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS)
            return done.stdout.strip()
    else:
        with contextlib.suppress(OSError):
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return ""


def usable_cpus() -> list[int]:
    """The CPUs that this process may use, by number. macOS limits no process: all of them."""
    if sys.platform == "win32":
        import psutil

        return sorted(psutil.Process().cpu_affinity())
    if sys.platform == "darwin":
        return list(range(os.cpu_count() or 1))
    return sorted(os.sched_getaffinity(0))


def use_cpus(cpus: Sequence[int]) -> None:
    """Has this thread, on Windows this process, use these CPUs alone. On macOS, which knows no such limit, nothing happens."""
    if sys.platform == "win32":
        import psutil

        psutil.Process().cpu_affinity(list(cpus))
    elif sys.platform != "darwin":
        os.sched_setaffinity(0, cpus)


def usable_cores() -> int:
    """How many CPUs this process may use."""
    return len(usable_cpus())
