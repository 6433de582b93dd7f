# SPDX-License-Identifier: Apache-2.0
"""Keeps one process running: starts it, runs a session while it is alive, and restarts it with backoff after it has
died.

The loop does not depend on what the session does. If a process dies before it was ready for the first time, it is
started again only a few times, and then the startup of the pod fails. The startup fails at once if the exit code
reports a configuration error. Endless restarts would hide the cause of the failure.
"""

import asyncio
import contextlib
import logging
import math
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from quire_server.logs import is_noise
from quire_server.supervisor.child_process import ChildProcess
from quire_spec import constants
from quire_spec.backoff import backoff
from quire_spec.documents.pod_status import ProcessState, ProcessStatus
from quire_spec.errors import QuireError

logger = logging.getLogger(__name__)

MAX_START_ATTEMPTS = 3
_STABLE_UPTIME_S = 30.0
"""If a process ran for at least this many seconds, it is restarted without delay."""
_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 8.0
"""Maximum delay before a restart, in seconds. It is short, because the pod cannot serve requests during the delay."""
_TAIL_LINES = 15
_LOG_LINE = re.compile(r"[\d-]{10} [\d:,]{8,12} [A-Z]+ \S+ (.*)")
"""A line of the log of Quire's processes: date, time, level, logger and text."""


class StartupFailed(QuireError):
    """A process did not start. The message contains the last lines of its output."""

    def __init__(self, message: str, is_config_error: bool) -> None:
        super().__init__(message)
        self.is_config_error = is_config_error
        """True if the exit code reports a configuration error."""


@dataclass(slots=True)
class RestartBackoff:
    """Calculates the delay before each start: by default 0 s, 0.5 s, 1 s, 2 s and so on, up to a maximum. After a
    stable uptime, the delays begin with the first one again."""

    first_delay_s: float = _FIRST_DELAY_S
    max_delay_s: float = _MAX_DELAY_S
    num_immediate: int = 1
    """Number of starts without a delay."""
    failures: int = 0

    def delay_s(self, uptime_s: float) -> float:
        """Return how many seconds to wait before the next start of a process that ran for `uptime_s` seconds."""
        if uptime_s >= _STABLE_UPTIME_S:
            self.failures = 0
        self.failures += 1
        if self.failures <= self.num_immediate:
            return 0.0
        return backoff(self.failures - self.num_immediate - 1, self.first_delay_s, self.max_delay_s)


class ManagedProcess:
    """One process of the pod, with all of its restarts."""

    def __init__(
        self,
        name: str,
        start: Callable[[], Awaitable[ChildProcess]],
        session: Callable[[ChildProcess], Awaitable[str]],
        on_change: Callable[[], None],
        restart_backoff: RestartBackoff | None = None,
        max_start_attempts: int | None = MAX_START_ATTEMPTS,
    ) -> None:
        """Create the process in state STARTING; `run` starts it.

        Args:
            name: name for status and logs.
            start: function that creates the child process.
            session: function that runs once for each child. It calls `mark_ready` when the process serves requests. It
                is cancelled when the child ends. If it returns before that, the child is killed, and the string that it
                returns is the reason.
            on_change: function that is called whenever the state changes.
            restart_backoff: delays between starts.
            max_start_attempts: number of starts after which the startup of the pod fails if the process was never
                ready; None: it is started again forever, because another machine can be the reason.
        """
        self.name = name
        self.child: ChildProcess | None = None
        self.state = ProcessState.STARTING
        self._start = start
        self._session = session
        self._on_change = on_change
        self.last_error = ""
        """The last line of the latest child that has ended."""
        self._backoff = restart_backoff or RestartBackoff()
        self._max_start_attempts = max_start_attempts
        self._num_starts = 0
        self._was_ever_ready = False

    def status(self) -> ProcessStatus:
        """Return the process's entry in the status document."""
        child = self.child
        return ProcessStatus(
            self.state, child.pid if child else None, child.started_at if child else None, max(0, self._num_starts - 1)
        )

    def last_event(self) -> str:
        """Return the text of the last line that the child has logged; empty if it has logged nothing."""
        lines = reversed(self.child.tail) if self.child else ()
        return next((match[1] for line in lines if (match := _LOG_LINE.fullmatch(line))), "")

    def mark_ready(self) -> None:
        """Set the state to ready. The session calls this method when the process serves requests."""
        self._was_ever_ready = True
        self._set_state(ProcessState.READY)

    async def run(self) -> None:
        """Keep the process running until this task is cancelled. The cancellation does not stop the process.

        Raises:
            StartupFailed: the process did not start.
        """
        loop = asyncio.get_running_loop()
        while True:
            started_at = loop.time()
            self._num_starts += 1
            exit_description = await self._run_once()
            self._set_state(ProcessState.RESTARTING)
            delay_s = self._backoff.delay_s(loop.time() - started_at)
            logger.warning("process ended name=%s %s restart_in_s=%g", self.name, exit_description, delay_s)
            await asyncio.sleep(delay_s)

    async def _run_once(self) -> str:
        """Run one child process from its start to its end; return a description of how it ended."""
        try:
            self.child = await self._start()
        except OSError as error:
            # The system has no memory, process ids or disk space left. A later start can succeed.
            self._check_start_limit(None, [str(error)], "no start")
            return f"not started: {error}"
        logger.info("process started name=%s pid=%d", self.name, self.child.pid)
        child = self.child
        exit_code = await self._run_session(child)
        self.child = None
        self.last_error = next((line for line in reversed(child.tail) if line.strip()), _describe_exit(exit_code))
        self._check_start_limit(exit_code, list(child.tail), _describe_exit(exit_code))
        return f"pid={child.pid} {_describe_exit(exit_code)}"

    async def _run_session(self, child: ChildProcess) -> int:
        """Run the session until the child process ends. Then end the session, and return the exit code."""
        session = asyncio.ensure_future(self._session(child))
        try:
            futures: list[asyncio.Future[Any]] = [session, child.exited]
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # End the session first, because it removes the handle of this process.
            session.cancel()
            await asyncio.wait([session])
        if not child.exited.done():
            logger.error("killing process name=%s pid=%d reason=%s", self.name, child.pid, _session_end_reason(session))
            child.kill()
        return await child.wait()

    def _check_start_limit(self, exit_code: int | None, tail: list[str], exit_description: str) -> None:
        """Raise StartupFailed if another start would also fail."""
        max_starts = math.inf if self._max_start_attempts is None else self._max_start_attempts
        if self._was_ever_ready or (exit_code != constants.EXIT_CONFIG and self._num_starts < max_starts):
            return
        lines = [line for line in tail if line.strip() and not is_noise(self.name, line)][-_TAIL_LINES:]
        last_output = "\n".join(f"  {line}" for line in lines) or "  (nothing)"
        attempts = f" {self._num_starts} times" if self._num_starts > 1 else ""
        raise StartupFailed(
            f"{self.name} ended{attempts} with {exit_description} before it was ready; its last lines:\n{last_output}",
            exit_code == constants.EXIT_CONFIG,
        )

    def _set_state(self, state: ProcessState) -> None:
        if state is not self.state:
            self.state = state
            self._on_change()


def _describe_exit(exit_code: int) -> str:
    return f"signal={-exit_code}" if exit_code < 0 else f"exit_code={exit_code}"


def _session_end_reason(session: "asyncio.Future[str]") -> str:
    with contextlib.suppress(asyncio.CancelledError):
        error = session.exception()
        if error is not None:
            logger.error("session failed", exc_info=error)
            return repr(error)
        return session.result()
    return "cancelled"
