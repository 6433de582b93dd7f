# SPDX-License-Identifier: Apache-2.0
"""The server's stub processes: found in /proc, watched by pidfd.

The server neither restarts nor even reaps a stub that died, and answers 200 on every probe meanwhile; one that it
unloaded it reaps at once. So a stub that stays a zombie has died. What then is done is the supervisor's to decide.
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
"""How often new stubs are looked for. Known ones are watched without polling."""
DEATH_CONFIRMATION_S = 0.2
"""How long the server may take to reap a stub that it ended itself; it takes less than 10 ms."""
UNKNOWN_DEATH_CONFIRMATION_S = 3.0
"""The same of one whose model nobody knows, most likely of a load that failed: no request of it is known either, and to
take it for dead costs the whole server."""
UNLOAD_GRACE_S = 3.0
"""How long an unloaded stub may stay after its last request; it takes 0.1 s, unless the server has lost one."""

_PROC = Path("/proc")
_STUB_PROGRAM = "triton_python_backend_stub"
_STUB_COMM = _STUB_PROGRAM[:15]
"""As the kernel has it, also of one that is dead."""
_INSTANCE_NAME = re.compile(r"([^/]+)_\d+_\d+")


@dataclass(frozen=True, slots=True)
class StubProcess:
    """A stub process."""

    pid: int
    model: str
    """The server model that it runs; empty when it died too soon to tell."""
    start_ticks: int
    """When, in ticks since the machine's start."""


class StubWatcher:
    """Watches the stubs of one server process; `on_death` is told once for each that died. Make it in the loop."""

    def __init__(self, server_pid: int, on_death: Callable[[StubProcess], None]) -> None:
        self._server_pid = server_pid
        self._on_death = on_death
        self._ignored_pids: set[int] = set()
        """Processes that are not the server's, so that a scan reads only what is new."""
        self._stubs: dict[int, tuple[int, StubProcess]] = {}
        """Process id to its pidfd and stub."""
        self._killed_pids: set[int] = set()
        """By us."""
        self._loop = asyncio.get_running_loop()
        self._confirmation_timers: dict[int, asyncio.TimerHandle] = {}
        self._scan_task = self._loop.create_task(self._scan_forever(), name="stub scan")

    def pids_of(self, model: str) -> set[int]:
        """Process ids of a model's stubs."""
        return {pid for pid, (_, stub) in self._stubs.items() if stub.model == model}

    def was_replaced(self, dead_stub: StubProcess) -> bool:
        """Whether its model has got another stub since: the server ended this one itself, and was slow to reap it."""
        return any(
            stub.model == dead_stub.model and stub.start_ticks > dead_stub.start_ticks
            for _, stub in self._stubs.values()
        )

    async def kill_unloaded(self, pids: set[int], count_open_requests: Callable[[int], int]) -> None:
        """See that the stubs of an unloaded model end: once `num_open` requests is 0 for LINGER_S, they are killed.

        Release 24.10 sometimes loses a request whose gRPC stream is cancelled on its last response; it waits for that
        for ever, and keeps the stub.
        """
        idle_s = 0.0
        while (remaining := pids & self._alive()) and idle_s < UNLOAD_GRACE_S:
            await asyncio.sleep(DEATH_CONFIRMATION_S)
            idle_s = 0.0 if any(map(count_open_requests, remaining)) else idle_s + DEATH_CONFIRMATION_S
        for pid in remaining:
            logger.warning("stub is killed: its model was unloaded, it has no request, the server keeps it pid=%d", pid)
            # No death to tell of.
            self._killed_pids.add(pid)
            signal.pidfd_send_signal(self._stubs[pid][0], signal.SIGKILL)

    def _alive(self) -> set[int]:
        return self._stubs.keys() - self._confirmation_timers.keys()

    def close(self) -> None:
        """Watch no more."""
        self._scan_task.cancel()
        for timer in self._confirmation_timers.values():
            timer.cancel()
        for pid in list(self._stubs):
            self._unwatch(pid)

    def scan(self) -> None:
        """Look for stubs that are not watched yet."""
        pids = {int(comm) for comm in os.listdir(_PROC) if comm.isdigit()}
        self._ignored_pids &= pids
        for pid in pids - self._ignored_pids - self._stubs.keys():
            name, state, parent, start_ticks = _read_stat(pid)
            if parent != self._server_pid:
                self._ignored_pids.add(pid)
            elif model := _read_model_name(pid):
                self._watch(StubProcess(pid, model, start_ticks))
            elif state == "Z" and name == _STUB_COMM:
                self._watch(StubProcess(pid, "", start_ticks))
            elif state == "Z" or model == "":
                # At each load the server tries whether a stub can be run, in a shell that it waits for itself.
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
            # It stays a zombie as long as the server lives, and is told only once.
            self._ignored_pids.add(stub.pid)
            if stub.pid not in self._killed_pids:
                self._on_death(stub)
        self._killed_pids.discard(stub.pid)

    def _unwatch(self, pid: int) -> None:
        pidfd, _ = self._stubs.pop(pid)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)


def _read_stat(pid: int) -> tuple[str, str, int, int]:
    """Name, state letter, parent and time of start of a process; the state is X when there is none."""
    try:
        # The name, in parentheses, may hold anything.
        text = (_PROC / str(pid) / "stat").read_bytes().decode(errors="replace")
    except OSError:
        return "", "X", 0, 0
    name, _, remainder = text.partition("(")[2].rpartition(")")
    fields = remainder.split()
    return name, fields[0], int(fields[1]), int(fields[19])


def _read_model_name(pid: int) -> str | None:
    """The server model that a stub runs, empty for one that runs none; None while it is (still) something else."""
    try:
        argv = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    if not argv[0].endswith(_STUB_PROGRAM):
        return None
    models = [match[1] for word in argv if (match := _INSTANCE_NAME.fullmatch(word))]
    return models[-1] if models else ""
