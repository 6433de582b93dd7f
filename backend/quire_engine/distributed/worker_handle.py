# SPDX-License-Identifier: Apache-2.0
"""A handle on a started worker of a rank, and the file descriptors that the worker inherits. Used by `worker_group.py`,
and on other nodes by `executor/rank_node.py`."""

import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Protocol

_EXIT_TIMEOUT_S = 5.0
"""After a worker process has closed its socket, it must exit within this many seconds."""


@dataclass(frozen=True, slots=True)
class WorkerChannels:
    """The worker's file descriptors for its channels to rank 0."""

    control_fd: int
    """Socket for calls and replies."""
    memory_fd: int
    """Memory of the ring buffer."""
    doorbell_fd: int


class WorkerHandle(Protocol):
    """A started worker: a process, a rank of another node (other_nodes.py), or a thread in tests."""

    def kill(self) -> None:
        """Stop the worker at once."""

    def join(self) -> str:
        """Wait until the worker has ended. Return a description of how it ended, for error messages."""


class WorkerProcess:
    """A worker in a process of its own.

    The thread that creates this object must live as long as the worker, see `process.set_parent_death_signal`.
    """

    def __init__(self, channels: WorkerChannels) -> None:
        fds = (channels.control_fd, channels.memory_fd, channels.doorbell_fd)
        argv = [sys.executable, "-P", "-m", "quire_engine.executor.rank_worker_process", *map(str, fds)]
        self._popen = subprocess.Popen(argv, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=sys.__stderr__)

    def kill(self) -> None:
        """See WorkerHandle."""
        self._popen.kill()

    def join(self) -> str:
        """See WorkerHandle."""
        try:
            code = self._popen.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._popen.wait()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
