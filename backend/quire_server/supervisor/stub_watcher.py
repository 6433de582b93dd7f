# SPDX-License-Identifier: Apache-2.0
"""Detects stub processes of the server that have died. It finds the stubs in /proc and watches them through pidfds.

The server neither restarts nor reaps a stub that has died, and still responds to all probes with 200. When a model is
unloaded, however, the server reaps its stub at once. Therefore, a stub that remains a zombie has died.
process_manager.py reacts to each death.
"""

import asyncio
import contextlib
import logging
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

SCAN_INTERVAL_S = 0.5
"""Seconds between two scans for new stubs. A stub that is already known is watched without polling."""
DEATH_CONFIRMATION_S = 0.2
"""After a stub has ended, this is the number of seconds to wait for the server to reap it. If the server itself ended
the stub, it reaps the stub in less than 10 ms."""
UNKNOWN_DEATH_CONFIRMATION_S = 3.0
"""The same as DEATH_CONFIRMATION_S, for a stub whose model is unknown. Normally, the model of a stub is unknown only if
its load has failed. The wait is longer, because it is not known how many open requests the stub has. If such a stub
were reported as dead by mistake, the whole server would be restarted."""
UNLOAD_GRACE_S = 3.0
"""After its last request, the stub of an unloaded model must exit within this many seconds. Normally, this takes 0.1 s.
If the server has lost a request, the stub does not exit by itself."""

_PROC = Path("/proc")
_STUB_PROGRAM = "triton_python_backend_stub"
_STUB_COMM = _STUB_PROGRAM[:15]
"""Name of the stub program in /proc/PID/stat. A zombie still has this name."""
_INSTANCE_NAME = re.compile(r"([^/]+)_\d+_\d+")


@dataclass(frozen=True, slots=True)
class StubProcess:
    """A stub process."""

    pid: int
    model: str
    """Name of the server model that the stub runs; empty if the stub died before the model was known."""
    start_ticks: int
    """Start time in clock ticks since boot."""


class StubWatcher:
    """Watches the stubs of one server process, and calls `on_death` once for each stub that died. A StubWatcher must be
    created in a running event loop."""

    def __init__(
        self, server_pid: int, on_death: Callable[[StubProcess], None], other_repository: Path | None = None
    ) -> None:
        """`other_repository` is the folder of --model-repository. Instances of the models in this folder can have any
        name."""
        self._server_pid = server_pid
        self._other_repository = other_repository
        self._on_death = on_death
        self._ignored_pids: set[int] = set()
        """Ids of processes that are not stubs of the server. A scan skips them."""
        self._stubs: dict[int, tuple[int, StubProcess]] = {}
        """Maps the process id of each stub to its pidfd and description."""
        self._killed_pids: set[int] = set()
        """Process ids of stubs that were killed by `kill_unloaded`. Their deaths are not reported."""
        self._loop = asyncio.get_running_loop()
        self._confirmation_timers: dict[int, asyncio.TimerHandle] = {}
        self._scan_task = self._loop.create_task(self._scan_forever(), name="stub scan")

    def pids_of(self, model: str) -> set[int]:
        """Return the process ids of a model's stubs."""
        return {pid for pid, (_, stub) in self._stubs.items() if stub.model == model}

    def was_replaced(self, dead_stub: StubProcess) -> bool:
        """Return True if the model of `dead_stub` has a newer stub. In that case, the server itself has ended
        `dead_stub` and reaped it late."""
        return any(
            stub.model == dead_stub.model and stub.start_ticks > dead_stub.start_ticks
            for _, stub in self._stubs.values()
        )

    async def kill_unloaded(self, pids: set[int], count_open_requests: Callable[[int], int]) -> None:
        """Kill those stubs of an unloaded model that have no open requests and do not exit within UNLOAD_GRACE_S.

        A server of release 24.10 sometimes loses a request if its gRPC stream is cancelled during the last response.
        The server then waits forever for this request, and does not end the stub.
        """
        idle_s = 0.0
        while (remaining := pids & self._alive()) and idle_s < UNLOAD_GRACE_S:
            await asyncio.sleep(DEATH_CONFIRMATION_S)
            idle_s = 0.0 if any(map(count_open_requests, remaining)) else idle_s + DEATH_CONFIRMATION_S
        for pid in remaining:
            logger.warning("killing stub of an unloaded model without open requests pid=%d", pid)
            # This stub is killed on purpose, so its death must not be reported to `on_death`.
            self._killed_pids.add(pid)
            signal.pidfd_send_signal(self._stubs[pid][0], signal.SIGKILL)

    def _alive(self) -> set[int]:
        return self._stubs.keys() - self._confirmation_timers.keys()

    def close(self) -> None:
        """Stop watching."""
        self._scan_task.cancel()
        for timer in self._confirmation_timers.values():
            timer.cancel()
        for pid in list(self._stubs):
            self._unwatch(pid)

    def scan(self) -> None:
        """Find stubs that are not watched yet, and watch them."""
        pids = {int(comm) for comm in os.listdir(_PROC) if comm.isdigit()}
        self._ignored_pids &= pids
        for pid in pids - self._ignored_pids - self._stubs.keys():
            name, state, parent, start_ticks = _read_stat(pid)
            if parent != self._server_pid:
                self._ignored_pids.add(pid)
            elif model := _read_model_name(pid, self._other_repository):
                self._watch(StubProcess(pid, model, start_ticks))
            elif state == "Z" and name == _STUB_COMM:
                self._watch(StubProcess(pid, "", start_ticks))
            elif state == "Z" or model == "":
                # This process is not a stub. At each load, the server starts a shell to check that a stub can be
                # executed, and reaps the shell itself.
                self._ignored_pids.add(pid)

    async def _scan_forever(self) -> None:
        while True:
            self.scan()
            await asyncio.sleep(SCAN_INTERVAL_S)

    def _watch(self, stub: StubProcess) -> None:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(stub.pid)
            self._stubs[stub.pid] = (pidfd, stub)
            self._loop.add_reader(pidfd, self._on_exit, stub)

    def _on_exit(self, stub: StubProcess) -> None:
        self._loop.remove_reader(self._stubs[stub.pid][0])
        wait_s = DEATH_CONFIRMATION_S if stub.model else UNKNOWN_DEATH_CONFIRMATION_S
        self._confirmation_timers[stub.pid] = self._loop.call_later(wait_s, self._confirm_death, stub)

    def _confirm_death(self, stub: StubProcess) -> None:
        del self._confirmation_timers[stub.pid]
        is_dead = _read_stat(stub.pid)[1:3] == ("Z", self._server_pid)
        self._unwatch(stub.pid)
        if is_dead:
            # The stub remains a zombie until the server ends, and it must be reported only once.
            self._ignored_pids.add(stub.pid)
            if stub.pid not in self._killed_pids:
                self._on_death(stub)
        self._killed_pids.discard(stub.pid)

    def _unwatch(self, pid: int) -> None:
        pidfd, _ = self._stubs.pop(pid)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)


def _read_stat(pid: int) -> tuple[str, str, int, int]:
    """Return the name, the state letter, the parent and the start time of a process. The state is X if the process does
    not exist."""
    try:
        # The name of the process is in parentheses. It can contain any character.
        text = (_PROC / str(pid) / "stat").read_bytes().decode(errors="replace")
    except OSError:
        return "", "X", 0, 0
    name, _, remainder = text.partition("(")[2].rpartition(")")
    fields = remainder.split()
    return name, fields[0], int(fields[1]), int(fields[19])


def _read_model_name(pid: int, other_repository: Path | None) -> str | None:
    """Return the name of a stub's model; it is empty if the stub has no model. Return None if the process is not a
    stub, or not yet a stub."""
    try:
        argv = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    if not argv[0].endswith(_STUB_PROGRAM):
        return None
    if other_repository is not None and len(argv) > 1 and Path(argv[1]).is_relative_to(other_repository):
        # REPOSITORY/MODEL/VERSION/model.py
        return Path(argv[1]).relative_to(other_repository).parts[0]
    models = [match[1] for word in argv if (match := _INSTANCE_NAME.fullmatch(word))]
    return models[-1] if models else ""
