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


def cpu_name(root: Path = Path("/")) -> str:
    """The processor's name; its architecture where the system does not tell a name.

    Args:
        root: of the file system that says it on Linux.
    """
    return _read_name(root) or platform.machine()


def read_cpuinfo(root: Path = Path("/")) -> dict[str, str]:
    """What Linux says of the first processor in ``/proc/cpuinfo``, by field; empty elsewhere."""
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    return fields


def _read_name(root: Path) -> str:
    """The name; empty where the system does not tell it."""
    name = ""
    if sys.platform == "win32":
        import winreg

        with contextlib.suppress(OSError), winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, _WINDOWS_KEY) as key:
            name = str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()
    elif sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS)
            name = done.stdout.strip()
    else:
        fields = read_cpuinfo(root)
        # Linux on AArch64 has numbers in place of a name.
        numbers = [f"{k} {fields[k]}" for k in ("CPU implementer", "CPU part", "CPU variant") if fields.get(k)]
        name = fields.get("model name") or ", ".join(numbers)
    return name


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
