# SPDX-License-Identifier: Apache-2.0
"""Member: a started rank, as group.py holds it, and what it is started with."""

import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Protocol

MAX_CALL_BYTES = 64 << 10
"""Of a call or a reply; each is one packet."""

_EXIT_TIMEOUT_S = 5.0
"""How long a process that has let go of its socket may take to end."""


@dataclass(frozen=True, slots=True)
class WorkerChannels:
    """File descriptors of a rank's ends of what it shares with rank 0."""

    control_fd: int
    """Socket of calls and replies."""
    memory_fd: int
    """Of the ring."""
    doorbell_fd: int


class WorkerHandle(Protocol):
    """A started rank: a process, or in tests a thread."""

    def kill(self) -> None:
        """End it at once."""
        ...

    def join(self) -> str:
        """Wait for its end; says how it ended."""
        ...


class WorkerProcess:
    """A rank as a process of its own. Made in a thread that lives as long as the process should: see
    process.die_with_parent."""

    def __init__(self, channels: WorkerChannels) -> None:
        fds = (channels.control_fd, channels.memory_fd, channels.doorbell_fd)
        argv = [sys.executable, "-P", "-m", "quire_engine.executor.tp_worker_process", *map(str, fds)]
        self._popen = subprocess.Popen(argv, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=sys.__stderr__)

    def kill(self) -> None:
        """See Member."""
        self._popen.kill()

    def join(self) -> str:
        """See Member."""
        try:
            code = self._popen.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._popen.wait()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
