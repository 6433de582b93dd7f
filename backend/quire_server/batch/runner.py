# SPDX-License-Identifier: Apache-2.0
"""Runs the requests of an input file.

The runner keeps a number of requests open, sends failed requests again, and stores each reply. It does not depend on
the kind of endpoint (`Endpoint`) or on the format of the files. If the run ends at any point, only the open requests
are lost.
"""

import asyncio
import itertools
import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

from quire_server.batch.input_file import InputFile
from quire_server.batch.progress import Progress
from quire_server.batch.reply import Endpoint, Reply
from quire_server.batch.request_line import RequestLine
from quire_server.batch.result_store import ResultStore
from quire_spec.errors import Unavailable

MAX_LOST = 4
"""Maximum number of lost attempts. An attempt is lost if the server received it but did not complete it. After this
number of lost attempts, the request itself is considered the cause, and it fails."""
_MAX_LOST_TOGETHER = 2
"""Requests that have lost this many attempts are sent one after the other. If they were sent together, one of them
could make the others fail."""
SYNC_INTERVAL_S = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """Settings for sending requests."""

    max_inflight: int
    """Maximum number of requests that are open at the same time."""
    priority: int = 0
    """Priority for requests that do not have one. A request with a higher number runs later. If `priority` is 0, no
    priority is sent."""
    retry_s: float = 600.0
    """If no request succeeds for this many seconds, the run ends with an error."""


class BatchRunner:
    """One run of a batch."""

    def __init__(
        self,
        endpoint: Endpoint,
        input_file: InputFile,
        results: ResultStore,
        progress: Progress,
        settings: RunnerSettings,
    ) -> None:
        self._endpoint = endpoint
        self._input = input_file
        self._results = results
        self._progress = progress
        self._settings = settings
        self._priority = settings.priority
        self._pending: deque[RequestLine] = deque()
        self._is_input_read = False
        self._read_lock = asyncio.Lock()
        self._suspects_lock = asyncio.Lock()
        self._last_success_time = -1.0

    async def run(self) -> None:
        """Run all requests that do not have a result yet.

        Raises:
            StorageFailed: a result could not be written.
            Unavailable: no request has succeeded for `retry_s` seconds.
            ConfigError: the input cannot be read.
        """
        try:
            async with asyncio.TaskGroup() as group:
                sync_task = group.create_task(self._sync_repeatedly())
                async with asyncio.TaskGroup() as workers:
                    for _ in range(self._settings.max_inflight):
                        workers.create_task(self._work())
                sync_task.cancel()
        except BaseExceptionGroup as group_error:
            # Several requests can fail for one reason, such as a full disk.
            raise _first_error(group_error) from None
        finally:
            await asyncio.to_thread(self._results.sync)

    async def _work(self) -> None:
        while (line := await self._next_line()) is not None:
            reply = await self._run_request(line)
            self._results.add_reply(line.custom_id, reply)
            self._progress.advance(1, reply)

    async def _next_line(self) -> RequestLine | None:
        async with self._read_lock:
            while not self._pending and not self._is_input_read:
                window = await asyncio.to_thread(self._input.next_window)
                self._is_input_read = window.is_last
                self._pending.extend(window.requests)
                for bad_line in window.bad_lines:
                    self._results.add_bad_line(bad_line)
                self._progress.advance(len(window.bad_lines))
        return self._pending.popleft() if self._pending else None

    async def _run_request(self, line: RequestLine) -> Reply:
        """Send a request until its reply is final."""
        loop = asyncio.get_running_loop()
        first_failure_time, num_lost = None, 0
        for num_attempts in itertools.count(1):
            reply = await self._send(line, num_lost)
            now = loop.time()
            if not reply.is_retryable:
                self._last_success_time = now
                return reply
            first_failure_time = now if first_failure_time is None else first_failure_time
            num_lost += reply.was_received and not reply.is_overload
            others_succeed = self._last_success_time >= first_failure_time
            is_stuck = others_succeed and not reply.is_overload and now - first_failure_time > self._settings.retry_s
            if is_stuck or (num_lost >= MAX_LOST and (others_succeed or reply.status)):
                return reply
            if now - max(first_failure_time, self._last_success_time) > self._settings.retry_s:
                raise Unavailable(
                    f"no request succeeded for {self._settings.retry_s:g} s, and the last request failed with "
                    f"{reply.describe()}; run the same command again when the server answers"
                )
            logger.info("request repeated line=%d attempt=%d %s", line.number, num_attempts, reply.describe())
            await asyncio.sleep(reply.delay_s(num_attempts))
        raise AssertionError("unreachable")

    async def _send(self, line: RequestLine, num_lost: int) -> Reply:
        if num_lost < _MAX_LOST_TOGETHER:
            return await self._post(line)
        async with self._suspects_lock:
            return await self._post(line)

    async def _post(self, line: RequestLine) -> Reply:
        body, priority = line.body, self._priority
        if not priority or "priority" in body:
            return await self._endpoint.post(line.url, body)
        reply = await self._endpoint.post(line.url, {**body, "priority": priority})
        if not reply.rejects_field("priority"):
            return reply
        if self._priority:
            self._priority = 0
            logger.warning("the server does not schedule by priority, requests are sent without it")
        return await self._endpoint.post(line.url, body)

    async def _sync_repeatedly(self) -> None:
        while True:
            await asyncio.sleep(SYNC_INTERVAL_S)
            await asyncio.to_thread(self._results.sync)


def _first_error(group: BaseExceptionGroup[Any]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
