# SPDX-License-Identifier: Apache-2.0
"""One process of the pod: started in a group of its own, its output relayed line by line, its end seen at once.

Knows nothing of what the process does, nor whether it should be started again (keeper.py decides that). Ends are seen
by pidfd, so no thread or timer runs per process. A process that ends takes its whole group with it: a killed server
leaves no stub behind.
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
_TAIL_LINES = 40
_MAX_LINE_BYTES = 8192
_OUTPUT_TIMEOUT_S = 0.5
"""How long the last output of an ended process may take to arrive."""
_REAP_TIMEOUT_S = 1.0


def become_subreaper() -> None:
    """Make this process the parent of its descendants' orphans, so that it can reap the stubs of a killed server."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


class ChildProcess:
    """A running or ended process. Make it with `start` in the main thread, inside a running event loop."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], relay: Callable[[str, str], None]) -> None:
        self.name = name
        self.pid = popen.pid
        self.started_at = utc_now()
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        """The last lines that it wrote, shown or not."""
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Its exit code, negative for a signal."""
        self._popen = popen
        self._relay = relay
        self._output_closed = asyncio.Event()
        self._transport: asyncio.ReadTransport | None = None
        self._pidfd = os.pidfd_open(popen.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_exit)

    @classmethod
    async def start(
        cls,
        name: str,
        argv: Sequence[str],
        relay: Callable[[str, str], None],
        env: Mapping[str, str] | None = None,
    ) -> "ChildProcess":
        """Start `argv`, tied to this process's life; `relay(name, line)` gets each line of its output.

        Raises:
            OSError: no process could be made.
        """
        popen = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(exec_with_pdeathsig.__file__)), str(os.getpid()), *argv],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            process_group=0,
        )
        try:
            child = cls(name, popen, relay)
            child._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: _LineSplitter(child._on_line, child._output_closed.set), popen.stdout
            )
        except BaseException:
            # Cancelled, or out of descriptors: nobody has it yet, so nobody else would end it.
            os.killpg(popen.pid, signal.SIGKILL)
            popen.wait()
            if popen.stdout is not None:
                popen.stdout.close()
            raise
        return child

    def send_signal(self, signal_number: int) -> None:
        """Send a signal to the process itself, if it still runs."""
        self._popen.send_signal(signal_number)

    def kill(self) -> None:
        """End the process and its whole group at once."""
        if not self.exited.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def wait(self) -> int:
        """Wait for its end and its last output; returns the exit code."""
        code = await asyncio.shield(self.exited)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._output_closed.wait(), _OUTPUT_TIMEOUT_S)
        if self._transport is not None:
            self._transport.close()
        await self._reap_group()
        return code

    async def stop(self, timeout_s: float) -> int:
        """SIGTERM, and SIGKILL to the group when that takes longer than `timeout_s`; returns the exit code."""
        self.send_signal(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self.wait(), timeout_s)
        except TimeoutError:
            self.kill()
            return await self.wait()

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        # Before the process is reaped: until then its group's number cannot belong to anyone else.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.exited.set_result(self._popen.wait())

    async def _reap_group(self) -> None:
        """Collect the ended members of the group that came to us as orphans (`adopt_orphans`)."""
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


class _LineSplitter(asyncio.Protocol):
    """Cuts output into lines. What a progress bar overwrote with a carriage return is left out."""

    def __init__(self, on_line: Callable[[str], None], on_eof: Callable[[], None]) -> None:
        self._on_line = on_line
        self._on_eof = on_eof
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._emit(line)
        if len(self._buffer) > _MAX_LINE_BYTES:
            self._emit(self._buffer)
            self._buffer = b""

    def connection_lost(self, error: Exception | None) -> None:
        if self._buffer:
            self._emit(self._buffer)
        self._on_eof()

    def _emit(self, line: bytes) -> None:
        self._on_line(line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace"))
