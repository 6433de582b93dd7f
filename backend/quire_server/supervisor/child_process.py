# SPDX-License-Identifier: Apache-2.0
"""A child process in its own process group. Its output is passed on line by line, and a pidfd shows when the process
has ended.

This module does not know which program runs, and never restarts it; managed_process.py does this. A child is watched
through the event loop, without a thread or a timer. When the process ends, its whole group is killed. Therefore the
stubs of a killed server end, too.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from quire_server.supervisor import exec_with_pdeathsig
from quire_spec.documents.pod_status import utc_now

_PR_SET_CHILD_SUBREAPER = 36
_UMASK = 0o077
"""Only the supervisor's user can read what a child creates: the stubs' regions of shared memory contain prompts."""
RETURN_MEMORY_ENV = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(4 * 2**20)}
"""Default environment variables of the processes that handle requests. With them, glibc returns the memory of large
requests to the system. By default, it keeps up to 64 MiB, because the thresholds grow with each large block."""
_TAIL_LINES = 40
_MAX_LINE_BYTES = 8192
_OUTPUT_TIMEOUT_S = 0.5
"""After a process has ended, the supervisor waits at most this many seconds for its last output."""
_REAP_TIMEOUT_S = 1.0


def become_subreaper() -> None:
    """Make this process the parent of orphaned descendants. It can then reap the stubs of a server that was killed."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


class ChildProcess:
    """A process that is running or has ended. `start` creates a ChildProcess. The main thread must call `start` while
    an event loop is running."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], relay: Callable[[str, str], None]) -> None:
        self.name = name
        self.pid = popen.pid
        self.started_at = utc_now()
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        """The last lines of output. They include lines that are not written to the log."""
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Future that contains the exit code after the process has ended. The exit code is negative if a signal ended
        the process."""
        self._popen = popen
        self._relay = relay
        self._output_closed = asyncio.Event()
        self._transport: asyncio.ReadTransport | None = None
        self._pidfd = os.pidfd_open(popen.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_exit)

    @classmethod
    async def start(
        cls, name: str, argv: Sequence[str], relay: Callable[[str, str], None], env: Mapping[str, str] | None = None
    ) -> "ChildProcess":
        """Start `argv` as a child process. If this process ends, the kernel kills the child. `relay(name, line)` is
        called for each output line. A line that begins with a carriage return is the present state of a progress bar.

        Raises:
            OSError: the process could not be created.
        """
        popen = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(exec_with_pdeathsig.__file__)), str(os.getpid()), *argv],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            process_group=0,
            umask=_UMASK,
        )
        try:
            child = cls(name, popen, relay)
            child._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: _LineSplitter(child._on_line, child._on_progress, child._output_closed.set), popen.stdout
            )
        except BaseException:
            # The start was cancelled, or there are no free file descriptors. No caller has the child yet, so this
            # method must end it.
            os.killpg(popen.pid, signal.SIGKILL)
            popen.wait()
            if popen.stdout is not None:
                popen.stdout.close()
            raise
        return child

    def send_signal(self, signal_number: int) -> None:
        """Send a signal to the process (not to its group) if it is running."""
        self._popen.send_signal(signal_number)

    def kill(self) -> None:
        """Kill the process and its group."""
        if not self.exited.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def wait(self) -> int:
        """Wait until the process has ended and its last output has arrived; return the exit code."""
        code = await asyncio.shield(self.exited)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._output_closed.wait(), _OUTPUT_TIMEOUT_S)
        if self._transport is not None:
            self._transport.close()
        await self._reap_group()
        return code

    async def stop(self, timeout_s: float) -> int:
        """Send SIGTERM. If the process is still running after `timeout_s` seconds, send SIGKILL to its group. Return
        the exit code."""
        self.send_signal(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self.wait(), timeout_s)
        except TimeoutError:
            self.kill()
            return await self.wait()

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        # Kill the group before the process is reaped. The kernel cannot reuse the id of the group before that.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.exited.set_result(self._popen.wait())

    async def _reap_group(self) -> None:
        """Reap those processes of the group that have ended. They became children of this process through
        `become_subreaper`."""
        deadline = asyncio.get_running_loop().time() + _REAP_TIMEOUT_S
        while asyncio.get_running_loop().time() < deadline:
            try:
                pid, _ = os.waitpid(-self.pid, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                await asyncio.sleep(0.01)

    def _on_line(self, line: str) -> None:
        self.tail.append(line)
        self._relay(self.name, line)

    def _on_progress(self, state: str) -> None:
        self._relay(self.name, f"\r{state}")


class _LineSplitter(asyncio.Protocol):
    """Splits output into lines. If a line contains carriage returns, as in progress bars, only the text after the last
    one is kept. Before the line ends, `on_progress` gets this text whenever it changes."""

    def __init__(
        self, on_line: Callable[[str], None], on_progress: Callable[[str], None], on_eof: Callable[[], None]
    ) -> None:
        self._on_line, self._on_progress = on_line, on_progress
        self._on_eof = on_eof
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._emit(line)
        if len(self._buffer) > _MAX_LINE_BYTES:
            self._emit(self._buffer)
            self._buffer = b""
        elif b"\r" in self._buffer:
            self._on_progress(_after_carriage_return(self._buffer))

    def connection_lost(self, error: Exception | None) -> None:
        if self._buffer:
            self._emit(self._buffer)
        self._on_eof()

    def _emit(self, line: bytes) -> None:
        self._on_line(_after_carriage_return(line))


def _after_carriage_return(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
