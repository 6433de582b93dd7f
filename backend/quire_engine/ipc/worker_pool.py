# SPDX-License-Identifier: Apache-2.0
"""Worker processes that may die.

Each worker reads JSON objects from its standard input, one per line. It answers each of them with a JSON object.

The workers process input from clients, which can need any amount of time or memory. A worker that takes too long is
killed and replaced; another worker serves in the meantime. The first line that a worker gets contains its
configuration. When the worker answers this line, it is ready.
"""

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NUM_WORKERS = 2
"""Number of workers: one works while the other one is replaced."""
_START_TIMEOUT_S = 60.0
_MAX_LINE_BYTES = 256 * 2**20
_LOWEST_PRIORITY = 19
_FIRST_TO_BE_KILLED = "1000"

logger = logging.getLogger(__name__)


class WorkerError(Exception):
    """A worker did not answer."""


class WorkersBusy(WorkerError):
    """No worker was free in time."""


class WorkerTimeout(WorkerError):
    """The worker took too long and was killed."""


class WorkerDied(WorkerError):
    """The worker ended before it answered."""


class WorkerPool:
    """A pool of NUM_WORKERS processes that run the same module. It is used on one event loop."""

    def __init__(
        self,
        module: str,
        config: Mapping[str, Any],
        timeout_s: float,
        queue_timeout_s: float,
        low_priority_after_s: float | None = None,
    ) -> None:
        """Store the parameters; `start` starts the workers.

        Args:
            module: name of the Python module of the worker, which is run as `python -m module`.
            config: each worker gets it as JSON in its first line.
            timeout_s: maximum time of one answer.
            queue_timeout_s: maximum wait for a free worker.
            low_priority_after_s: a worker that takes longer gets the lowest scheduling priority, so that it does not
                slow down the engine on the same cores. A worker with the lowest priority is replaced after its answer.
                If None, no worker gets the lowest priority.
        """
        self._module = module
        self._config_line = json.dumps(config).encode() + b"\n"
        self._timeout_s, self._queue_timeout_s = timeout_s, queue_timeout_s
        self._low_priority_after_s = low_priority_after_s
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._num_workers = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self) -> None:
        """Start the workers in the background, unless they are already running."""
        while self._num_workers < NUM_WORKERS:
            self._num_workers += 1
            task = asyncio.get_running_loop().create_task(self._add_worker())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message to a free worker and return its answer.

        Raises:
            WorkerError: no worker answered; the subclass states why.
        """
        self.start()
        line = json.dumps(message).encode() + b"\n"
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                worker = await self._idle.get()
        except TimeoutError:
            raise WorkersBusy from None
        # The worker answers even if the caller is cancelled. To replace the worker would take far longer, and other
        # requests would wait for the new one.
        exchange = asyncio.get_running_loop().create_task(self._exchange(worker, line))
        self._tasks.add(exchange)
        exchange.add_done_callback(self._tasks.discard)
        return await asyncio.shield(exchange)

    async def _exchange(self, worker: "_Worker", line: bytes) -> dict[str, Any]:
        keep = False
        demotion = self._schedule_demotion(worker)
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await worker.ask(line)
            keep = not worker.has_low_priority
        except TimeoutError:
            logger.warning("worker took too long module=%s limit_s=%g", self._module, self._timeout_s)
            raise WorkerTimeout from None
        except (OSError, ValueError, asyncio.IncompleteReadError):
            logger.warning("worker died module=%s", self._module)
            raise WorkerDied from None
        finally:
            if demotion is not None:
                demotion.cancel()
            if keep:
                self._idle.put_nowait(worker)
            else:
                self._replace(worker)
        return answer

    def _schedule_demotion(self, worker: "_Worker") -> asyncio.TimerHandle | None:
        if self._low_priority_after_s is None:
            return None
        return asyncio.get_running_loop().call_later(self._low_priority_after_s, worker.lower_priority)

    def _replace(self, worker: "_Worker") -> None:
        worker.kill()
        self._num_workers -= 1
        self.start()

    async def _add_worker(self) -> None:
        worker = None
        try:
            worker = await _Worker.start(self._module)
            async with asyncio.timeout(_START_TIMEOUT_S):
                await worker.ask(self._config_line)
            self._idle.put_nowait(worker)
        except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError) as error:
            logger.warning("worker did not start module=%s error=%s", self._module, error)
            if worker is not None:
                worker.kill()
            # The next request tries to start a worker again.
            self._num_workers -= 1


class _Worker:
    """One process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        self._process = process
        self._stdin, self._stdout = process.stdin, process.stdout
        self.has_low_priority = False

    @classmethod
    async def start(cls, module: str) -> "_Worker":
        """Start a process; raises OSError."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
        )
        # If a pod runs out of memory, the kernel ends this process rather than the engine.
        with contextlib.suppress(OSError):
            Path(f"/proc/{process.pid}/oom_score_adj").write_text(_FIRST_TO_BE_KILLED)
        return cls(process)

    async def ask(self, line: bytes) -> dict[str, Any]:
        """Send a line and return the answer; an error is raised if the process ends."""
        self._stdin.write(line)
        await self._stdin.drain()
        answer: dict[str, Any] = json.loads(await self._stdout.readuntil(b"\n"))
        return answer

    def lower_priority(self) -> None:
        """Give the process the lowest scheduling priority."""
        self.has_low_priority = True
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _LOWEST_PRIORITY)

    def kill(self) -> None:
        """Kill the process."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._stdin.close()
