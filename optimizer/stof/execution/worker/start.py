# SPDX-License-Identifier: Apache-2.0
"""Starts the process that holds sessions, with a channel to it. It ends with this process, however this one ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from stof.execution.worker.channel import Channel

# What the process runs: its arguments are a socket, the end of a pipe that nobody writes to, and the paths of imports. The first
# argument is no path: the folder that Python puts first with -c is not looked into before it is gone.
# The kernel ends the process when the pipe closes, also within native code; if it closed before, no signal comes. That is stated
# first: to import NumPy takes a while, in which the parent may end. macOS ignores this signal by default, and Python's own
# handlers wait for the end of native code: the C library's function is the handler.
_START = """
import sys
connection, parent = map(int, sys.argv[1:3])
sys.path[:] = sys.argv[3:]
import fcntl, os, select, signal
if sys.platform == "darwin":
    import ctypes
    c = ctypes.CDLL(None)
    c.signal.argtypes, c.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    c.signal(signal.SIGIO, ctypes.cast(c._exit, ctypes.c_void_p))
else:
    signal.signal(signal.SIGIO, signal.SIG_DFL)
fcntl.fcntl(parent, fcntl.F_SETOWN, os.getpid())
fcntl.fcntl(parent, fcntl.F_SETFL, fcntl.fcntl(parent, fcntl.F_GETFL) | os.O_ASYNC)
closed = select.poll()
closed.register(parent, select.POLLIN)
if closed.poll(0):
    sys.exit()
from stof.execution.session_worker import serve_socket
serve_socket(connection)
"""
# Windows: the arguments are the paths of imports. The parent's job ends the process, and else the end of its standard input does.
_START_WITH_PIPES = """
import sys
sys.path[:] = sys.argv[1:]
from stof.execution.session_worker import serve_pipes
serve_pipes()
"""


class Worker:
    """A process that serves requests.

    Attributes:
        popen: the process.
        channel: to it.
    """

    def __init__(self, popen: subprocess.Popen[bytes], channel: Channel, lifeline: int | None) -> None:
        self.popen = popen
        self.channel = channel
        self._lifeline = lifeline

    def kill(self) -> None:
        """Ends the process."""
        self.popen.kill()
        self.channel.close()
        if self._lifeline is not None:
            os.close(self._lifeline)
        self.popen.wait()

    def disown(self) -> None:
        """Leaves the process to the one that started it: this one is a forked child of that."""
        self.popen.returncode = 0


def start_worker(environment: Mapping[str, str], stderr: int) -> Worker:
    """Starts a process.

    Args:
        environment: its variables besides those of this process.
        stderr: the descriptor of its standard error.

    Raises:
        OSError: when it cannot be started.
    """
    return _start({**os.environ, **environment}, stderr)


if sys.platform == "win32":

    def _start(environment: dict[str, str], stderr: int) -> Worker:
        import io

        from stof.execution.worker.pipe_channel import PipeChannel
        from stof.system.windows_api import end_with_this_process

        # In a virtual environment sys.executable starts the interpreter as a further process, which has the memory to look at.
        python = getattr(sys, "_base_executable", None) or sys.executable
        popen = subprocess.Popen(
            [python, "-c", _START_WITH_PIPES, *map(str, sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            bufsize=0,
            env=environment,
            # What a console sends goes to the caller, who then ends this process; and no window opens.
            creationflags=subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW,
        )
        end_with_this_process(int(popen._handle))  # type: ignore[attr-defined]
        assert isinstance(popen.stdout, io.FileIO)
        assert isinstance(popen.stdin, io.FileIO)
        return Worker(popen, PipeChannel(popen.stdout, popen.stdin), None)

else:

    def _start(environment: dict[str, str], stderr: int) -> Worker:
        from stof.execution.worker.socket_channel import SocketChannel

        own_socket, worker_socket = SocketChannel.pair()
        read, write = os.pipe()
        try:
            command = [sys.executable, "-c", _START, str(worker_socket.fileno()), str(read), *map(str, sys.path)]
            # A session of the operating system's: what a terminal sends goes to the caller, who then ends this process.
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env=environment,
                pass_fds=(worker_socket.fileno(), read),
                start_new_session=True,
            )
        except BaseException:
            own_socket.close()
            os.close(write)
            raise
        finally:
            worker_socket.close()
            os.close(read)
        return Worker(popen, SocketChannel(own_socket), write)
