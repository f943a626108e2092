# SPDX-License-Identifier: Apache-2.0
"""Memory of processes and of the machine. Linux says it in /proc; elsewhere psutil asks the system."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

NO_LIMIT = 1 << 60  # what control groups without a limit say, in one way or another
_RESET_PEAK = "5"  # proc(5), clear_refs: the peak becomes what is held now


def resident_bytes(process: int | None = None) -> int:
    """The memory that a process holds, by default this one; 0 where it is gone, or the system does not say."""
    if sys.platform != "linux":
        return _ask_psutil(process, "rss")
    try:
        pages = int(_process_file(process, "statm").read_text(encoding="utf-8").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _read_peak(process: int) -> int:
    """The most that a process has held in its life, or since it was reset; 0 on macOS, which does not say it."""
    if sys.platform != "linux":
        return _ask_psutil(process, "peak_wset")
    with contextlib.suppress(OSError, ValueError):
        for line in _process_file(process, "status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0


def _reset_peak(process: int) -> bool:
    """Makes the peak what is held now: whether the system does so. A hardened Linux does not."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            _process_file(process, "clear_refs").write_text(_RESET_PEAK, encoding="ascii")
            return True
    return False


def _process_file(process: int | None, name: str) -> Path:
    return Path(f"/proc/{'self' if process is None else process}/{name}")


def _ask_psutil(process: int | None, figure: str) -> int:
    """A figure of a process's memory; 0 where it is gone, or the system has no such figure."""
    import psutil

    try:
        return int(getattr(psutil.Process(process).memory_info(), figure, 0))
    except (psutil.Error, OSError):
        return 0


class PeakMemory:
    """The most memory that a process has held since this object was made, also between two samples.

    Systems keep the peak of a process's whole life. Where it may not be reset, a peak from before tells nothing, and what the
    process holds at a sample counts. On macOS samples alone count.

    Args:
        process: its number.
    """

    def __init__(self, process: int) -> None:
        self._process = process
        self._start = 0 if _reset_peak(process) else _read_peak(process)

    def peak_bytes(self) -> int:
        """The peak so far; 0 where the process is gone, or the system does not say."""
        peak = _read_peak(self._process)
        return max(resident_bytes(self._process), peak if peak > self._start else 0)


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that are free on this machine, and within the control groups of this process; 0 where nothing tells.

    Args:
        root: of the file system that says it on Linux.
    """
    if sys.platform != "linux":
        import psutil

        return int(psutil.virtual_memory().available)
    amounts = []
    with contextlib.suppress(OSError, ValueError):
        lines = (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
        amounts += [int(x.split()[1]) << 10 for x in lines if x.startswith("MemAvailable:")]
    for folder in _control_groups(root):
        for limit, use in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with contextlib.suppress(OSError, ValueError):  # "max" is no number
                most = int((folder / limit).read_text(encoding="utf-8"))
                if most < NO_LIMIT:
                    amounts.append(
                        max(0, most - int((folder / use).read_text(encoding="utf-8")) + _read_reclaimable(folder))
                    )
    return min(amounts, default=0)


def _read_reclaimable(folder: Path) -> int:
    """The use of a control group that is cached files, which the system takes back where it needs memory."""
    with contextlib.suppress(OSError, ValueError):
        words = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines())
        return int(words.get("total_inactive_file", words.get("inactive_file", 0)))
    return 0


def _control_groups(root: Path) -> list[Path]:
    """The folders of the control groups that limit this process, from its own to the outermost; of version 1 and 2."""
    folders: list[Path] = []
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                mounts = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
            elif "memory" in controllers.split(","):
                mounts = [root / "sys/fs/cgroup/memory"]
            else:
                continue
            for mount in mounts:
                group = mount / path.strip("/")  # within a container the path may be of the machine's
                folders += [group, *(p for p in group.parents if p.is_relative_to(mount)), mount]
    return list(dict.fromkeys(folders))
