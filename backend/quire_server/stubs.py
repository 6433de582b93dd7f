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

log = logging.getLogger(__name__)

SCAN_S = 0.5
"""How often new stubs are looked for. Known ones are watched without polling."""
CONFIRM_S = 0.2
"""How long the server may take to reap a stub that it ended itself; it takes less than 10 ms."""
CONFIRM_UNKNOWN_S = 3.0
"""The same of one whose model nobody knows, most likely of a load that failed: no request of it is known either, and to
take it for dead costs the whole server."""
LINGER_S = 3.0
"""How long an unloaded stub may stay after its last request; it takes 0.1 s, unless the server has lost one."""

_PROC = Path("/proc")
_STUB = "triton_python_backend_stub"
_NAME = _STUB[:15]
"""As the kernel has it, also of one that is dead."""
_INSTANCE = re.compile(r"([^/]+)_\d+_\d+")


@dataclass(frozen=True, slots=True)
class Stub:
    """A stub process."""

    pid: int
    model: str
    """The server model that it runs; empty when it died too soon to tell."""
    started: int
    """When, in ticks since the machine's start."""


class StubWatch:
    """Watches the stubs of one server process; `on_death` is told once for each that died. Make it in the loop."""

    def __init__(self, server_pid: int, on_death: Callable[[Stub], None]) -> None:
        self._server_pid = server_pid
        self._on_death = on_death
        self._foreign: set[int] = set()
        """Processes that are not the server's, so that a scan reads only what is new."""
        self._watched: dict[int, tuple[int, Stub]] = {}
        """Process id to its pidfd and stub."""
        self._killed: set[int] = set()
        """By us."""
        self._loop = asyncio.get_running_loop()
        self._confirming: dict[int, asyncio.TimerHandle] = {}
        self._scanning = self._loop.create_task(self._scan_forever(), name="stub scan")

    def of(self, model: str) -> set[int]:
        """Process ids of a model's stubs."""
        return {pid for pid, (_, stub) in self._watched.items() if stub.model == model}

    def replaced(self, dead: Stub) -> bool:
        """Whether its model has got another stub since: the server ended this one itself, and was slow to reap it."""
        return any(stub.model == dead.model and stub.started > dead.started for _, stub in self._watched.values())

    async def retire(self, pids: set[int], num_open: Callable[[int], int]) -> None:
        """See that the stubs of an unloaded model end: once `num_open` requests is 0 for LINGER_S, they are killed.

        Release 24.10 sometimes loses a request whose gRPC stream is cancelled on its last response; it waits for that
        for ever, and keeps the stub.
        """
        idle_s = 0.0
        while (left := pids & self._alive()) and idle_s < LINGER_S:
            await asyncio.sleep(CONFIRM_S)
            idle_s = 0.0 if any(map(num_open, left)) else idle_s + CONFIRM_S
        for pid in left:
            log.warning("stub is killed: its model was unloaded, it has no request, the server keeps it pid=%d", pid)
            # No death to tell of.
            self._killed.add(pid)
            signal.pidfd_send_signal(self._watched[pid][0], signal.SIGKILL)

    def _alive(self) -> set[int]:
        return self._watched.keys() - self._confirming.keys()

    def close(self) -> None:
        """Watch no more."""
        self._scanning.cancel()
        for timer in self._confirming.values():
            timer.cancel()
        for pid in list(self._watched):
            self._forget(pid)

    def scan(self) -> None:
        """Look for stubs that are not watched yet."""
        listed = {int(name) for name in os.listdir(_PROC) if name.isdigit()}
        self._foreign &= listed
        for pid in listed - self._foreign - self._watched.keys():
            name, state, parent, started = _stat(pid)
            if parent != self._server_pid:
                self._foreign.add(pid)
            elif model := _model(pid):
                self._watch(Stub(pid, model, started))
            elif state == "Z" and name == _NAME:
                self._watch(Stub(pid, "", started))
            elif state == "Z" or model == "":
                # At each load the server tries whether a stub can be run, in a shell that it waits for itself.
                self._foreign.add(pid)

    async def _scan_forever(self) -> None:
        while True:
            self.scan()
            await asyncio.sleep(SCAN_S)

    def _watch(self, stub: Stub) -> None:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(stub.pid)
            self._watched[stub.pid] = (pidfd, stub)
            self._loop.add_reader(pidfd, self._ended, stub)

    def _ended(self, stub: Stub) -> None:
        self._loop.remove_reader(self._watched[stub.pid][0])
        wait_s = CONFIRM_S if stub.model else CONFIRM_UNKNOWN_S
        self._confirming[stub.pid] = self._loop.call_later(wait_s, self._confirm, stub)

    def _confirm(self, stub: Stub) -> None:
        del self._confirming[stub.pid]
        died = _stat(stub.pid)[1:3] == ("Z", self._server_pid)
        self._forget(stub.pid)
        if died:
            # It stays a zombie as long as the server lives, and is told only once.
            self._foreign.add(stub.pid)
            if stub.pid not in self._killed:
                self._on_death(stub)
        self._killed.discard(stub.pid)

    def _forget(self, pid: int) -> None:
        pidfd, _ = self._watched.pop(pid)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)


def _stat(pid: int) -> tuple[str, str, int, int]:
    """Name, state letter, parent and time of start of a process; the state is X when there is none."""
    try:
        # The name, in parentheses, may hold anything.
        text = (_PROC / str(pid) / "stat").read_bytes().decode(errors="replace")
    except OSError:
        return "", "X", 0, 0
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return name, fields[0], int(fields[1]), int(fields[19])


def _model(pid: int) -> str | None:
    """The server model that a stub runs, empty for one that runs none; None while it is (still) something else."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    if not words[0].endswith(_STUB):
        return None
    models = [match[1] for word in words if (match := _INSTANCE.fullmatch(word))]
    return models[-1] if models else ""
