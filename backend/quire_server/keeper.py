# SPDX-License-Identifier: Apache-2.0
"""Keeps one process running: starts it, holds a session with it while it lives, starts it again when it dies.

Knows nothing of what the session does. A process that dies before it was ever ready ends everything after a few tries
(at once when it says that its configuration is wrong): trying for ever would hide the reason.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from quire_server.output import is_chatter
from quire_server.processes import Child
from quire_spec import names
from quire_spec.errors import QuireError
from quire_spec.status import ProcessState, ProcessStatus

log = logging.getLogger(__name__)

MAX_FIRST_STARTS = 3
_STEADY_S = 30.0
"""A process that was up this long has earned an immediate restart."""
_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 8.0
"""Short: every second of it is an outage, and a start costs nobody else anything."""
_TAIL_LINES = 15


class CannotRun(QuireError):
    """A process could not be brought up; the message holds what it said last."""

    def __init__(self, message: str, wrong_config: bool) -> None:
        super().__init__(message)
        self.wrong_config = wrong_config
        """Its configuration is wrong, as it says itself."""


@dataclass(slots=True)
class Backoff:
    """Delays between starts: none, then 0.5 s, 1 s, 2 s and so on up to a cap; none again after a steady life."""

    failures: int = 0

    def delay_s(self, up_s: float) -> float:
        """How long to wait after a life of `up_s` seconds."""
        if up_s >= _STEADY_S:
            self.failures = 0
        self.failures += 1
        return 0.0 if self.failures == 1 else min(_FIRST_DELAY_S * 2.0 ** (self.failures - 2), _MAX_DELAY_S)


class Keeper:
    """One process of the pod, over all its lives."""

    def __init__(
        self,
        name: str,
        start: Callable[[], Awaitable[Child]],
        session: Callable[[Child], Awaitable[str]],
        on_change: Callable[[], None],
    ) -> None:
        """`session` runs once for each life, calls `ready()` when the process serves, and is cancelled when it dies.

        When `session` returns, what it returns is why the process has to be killed. `on_change` is called on each
        change of state.
        """
        self.name = name
        self.child: Child | None = None
        self.state = ProcessState.STARTING
        self._start = start
        self._session = session
        self._on_change = on_change
        self._backoff = Backoff()
        self._lives = 0
        self._ever_ready = False

    def status(self) -> ProcessStatus:
        """For the status document."""
        child = self.child
        return ProcessStatus(
            self.state, child.pid if child else None, child.started_at if child else None, max(0, self._lives - 1)
        )

    def ready(self) -> None:
        """The session says that the process serves."""
        self._ever_ready = True
        self._set(ProcessState.READY)

    async def run(self) -> None:
        """Keep the process running until cancelled; the process is then left as it is.

        Raises:
            CannotRun: it never came up.
        """
        loop = asyncio.get_running_loop()
        while True:
            begun = loop.time()
            self._lives += 1
            ended = await self._live_once()
            self._set(ProcessState.RESTARTING)
            delay = self._backoff.delay_s(loop.time() - begun)
            log.warning("process ended name=%s %s restart_in_s=%g", self.name, ended, delay)
            await asyncio.sleep(delay)

    async def _live_once(self) -> str:
        """Start and end of one life; how it ended."""
        try:
            self.child = await self._start()
        except OSError as error:
            # No memory, no process ids, no disk: the next start may find some.
            self._judge(None, [str(error)], "no start")
            return f"not started: {error}"
        log.info("process started name=%s pid=%d", self.name, self.child.pid)
        child = self.child
        code = await self._live(child)
        self.child = None
        self._judge(code, list(child.tail), _how(code))
        return f"pid={child.pid} {_how(code)}"

    async def _live(self, child: Child) -> int:
        """One life: returns the exit code. The session has ended when this returns."""
        session = asyncio.ensure_future(self._session(child))
        try:
            either: list[asyncio.Future[Any]] = [session, child.ended]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # First of all: it takes back what it has told others about this process.
            session.cancel()
            await asyncio.wait([session])
        if not child.ended.done():
            log.error("process is killed name=%s pid=%d reason=%s", self.name, child.pid, _reason(session))
            child.kill()
        return await child.wait()

    def _judge(self, code: int | None, tail: list[str], how: str) -> None:
        """Raise CannotRun when another start makes no sense."""
        if self._ever_ready or (code != names.EXIT_CONFIG and self._lives < MAX_FIRST_STARTS):
            return
        lines = [line for line in tail if line.strip() and not is_chatter(self.name, line)][-_TAIL_LINES:]
        said = "\n".join(f"  {line}" for line in lines) or "  (nothing)"
        times = f" {self._lives} times" if self._lives > 1 else ""
        raise CannotRun(
            f"{self.name} ended{times} with {how} before it was ready; its last lines:\n{said}",
            code == names.EXIT_CONFIG,
        )

    def _set(self, state: ProcessState) -> None:
        if state is not self.state:
            self.state = state
            self._on_change()


def _how(code: int) -> str:
    return f"signal={-code}" if code < 0 else f"exit_code={code}"


def _reason(session: "asyncio.Future[str]") -> str:
    with contextlib.suppress(asyncio.CancelledError):
        error = session.exception()
        if error is not None:
            log.error("session failed", exc_info=error)
            return repr(error)
        return session.result()
    return "cancelled"
