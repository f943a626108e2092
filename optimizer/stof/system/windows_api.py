# SPDX-License-Identifier: Apache-2.0
"""The calls of the Windows API that Python's library lacks: locks of parts of files, and jobs that end with their owner."""

from __future__ import annotations

import ctypes
import errno
import functools
import sys
from typing import Any

if sys.platform == "win32":
    import msvcrt

    _FAIL_IMMEDIATELY, _EXCLUSIVE = 1, 2
    _LOCK_VIOLATION, _IO_PENDING = 33, 997  # what LockFileEx says of a lock that somebody else has
    _BEHIND_ALL_DATA = 1 << 62  # locks are mandatory there: one within the file would hinder its readers
    _EXTENDED_LIMITS, _KILL_ON_JOB_CLOSE = 9, 0x2000

    class _Overlapped(ctypes.Structure):
        _fields_ = [
            ("internal", ctypes.c_void_p),
            ("internal_high", ctypes.c_void_p),
            ("offset", ctypes.c_uint32),
            ("offset_high", ctypes.c_uint32),
            ("event", ctypes.c_void_p),
        ]

    class _BasicLimits(ctypes.Structure):
        _fields_ = [
            ("process_time", ctypes.c_int64),
            ("job_time", ctypes.c_int64),
            ("flags", ctypes.c_uint32),
            ("least_working_set", ctypes.c_size_t),
            ("most_working_set", ctypes.c_size_t),
            ("processes", ctypes.c_uint32),
            ("affinity", ctypes.c_size_t),
            ("priority", ctypes.c_uint32),
            ("scheduling", ctypes.c_uint32),
        ]

    class _ExtendedLimits(ctypes.Structure):
        _fields_ = [
            ("basic", _BasicLimits),
            ("transfers", ctypes.c_uint64 * 6),
            ("memory", ctypes.c_size_t * 4),
        ]

    @functools.cache
    def _kernel() -> Any:
        kernel = ctypes.WinDLL("kernel32", use_last_error=True)
        handle, word = ctypes.c_void_p, ctypes.c_uint32
        kernel.LockFileEx.argtypes = [handle, word, word, word, word, ctypes.POINTER(_Overlapped)]
        kernel.CreateJobObjectW.argtypes = [ctypes.c_void_p, ctypes.c_wchar_p]
        kernel.CreateJobObjectW.restype = handle
        kernel.SetInformationJobObject.argtypes = [handle, ctypes.c_int, ctypes.c_void_p, word]
        kernel.AssignProcessToJobObject.argtypes = [handle, handle]
        return kernel

    def lock_file(descriptor: int, *, shared: bool, waits: bool) -> None:
        """Locks an open file, until it is closed.

        Raises:
            BlockingIOError: when somebody else has the lock, and it is not waited for.
            OSError: when the file system has no locks.
        """
        flags = (0 if shared else _EXCLUSIVE) | (0 if waits else _FAIL_IMMEDIATELY)
        where = _Overlapped(offset=_BEHIND_ALL_DATA & 0xFFFFFFFF, offset_high=_BEHIND_ALL_DATA >> 32)
        if _kernel().LockFileEx(msvcrt.get_osfhandle(descriptor), flags, 0, 1, 0, ctypes.byref(where)):
            return
        code = ctypes.get_last_error()
        if code in (_LOCK_VIOLATION, _IO_PENDING):
            raise BlockingIOError(errno.EAGAIN, "another process holds the lock")
        raise ctypes.WinError(code)

    @functools.cache
    def _own_job() -> int | None:
        """A job whose processes are ended when its last handle is closed: this process's, which it keeps to its end."""
        job = _kernel().CreateJobObjectW(None, None)
        limits = _ExtendedLimits(basic=_BasicLimits(flags=_KILL_ON_JOB_CLOSE))
        size = ctypes.sizeof(limits)
        if not job or not _kernel().SetInformationJobObject(job, _EXTENDED_LIMITS, ctypes.byref(limits), size):
            return None
        return int(job)

    def end_with_this_process(handle: int) -> bool:
        """Has a process be ended with this one, however this one ends: whether the system does so.

        Args:
            handle: of the process.
        """
        job = _own_job()
        return job is not None and bool(_kernel().AssignProcessToJobObject(job, handle))
