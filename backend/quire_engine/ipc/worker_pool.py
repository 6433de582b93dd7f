# SPDX-License-Identifier: Apache-2.0
"""Worker processes that may die.

Each worker reads JSON objects from its standard input, one per line. It answers each of them with a JSON object.

The workers process input from clients, which can need any amount of time or memory. A worker that uses too much CPU
time is killed and replaced; another worker serves in the meantime. CPU time is counted because a busy machine must not
reject what an idle machine accepts. The first line that a worker gets contains its
configuration. When the worker answers this line, it is ready.
"""

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from quire_engine.ipc.process import BACKGROUND_NICE

NUM_WORKERS = 2
"""Number of workers: one works while the other one is replaced."""
_START_TIMEOUT_S = 60.0
_WALL_PER_CPU_S = 5.0
"""A worker that gets less than a fifth of a core is killed, too, so that others do not wait for it."""
_MIN_POLL_S = 0.01
"""The kernel counts CPU time in steps of this length."""
_CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MAX_LINE_BYTES = 256 * 2**20
_FIRST_TO_BE_KILLED = "1000"

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class WorkerError(Exception):
    """A worker did not answer."""


class WorkersBusy(WorkerError):
    """No worker was free in time, or the worker did not get enough CPU time."""


class WorkerTimeout(WorkerError):
    """The worker used too much CPU time and was killed."""


class WorkerDied(WorkerError):
    """The worker ended before it answered."""


class WorkerPool:
    """A pool of NUM_WORKERS processes that run the same module. It is used on one event loop."""

    def __init__(self, module: str, config: Mapping[str, Any], cpu_limit_s: float, queue_timeout_s: float) -> None:
        """Store the parameters; `start` starts the workers.

        Args:
            module: name of the Python module of the worker, which is run as `python -m module`.
            config: each worker gets it as JSON in its first line.
            cpu_limit_s: maximum CPU time of one answer, in seconds.
            queue_timeout_s: maximum wait for a free worker.
        """
        self._module = module
        self._config_line = json.dumps(config).encode() + b"\n"
        self._cpu_limit_s, self._queue_timeout_s = cpu_limit_s, queue_timeout_s
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._num_workers = 0
        self._workers: set[_Worker] = set()
        """All workers, also those that were killed, until their processes have ended."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def start(self) -> None:
        """Start the workers in the background, unless they are already running."""
        while self._num_workers < NUM_WORKERS and not self._closed:
            self._num_workers += 1
            self._create_task(self._add_worker())

    async def aclose(self) -> None:
        """End all workers, and wait for their processes. Answers that callers wait for are cancelled."""
        self._closed = True
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
        for worker in self._workers:
            worker.kill()
        await asyncio.gather(*(worker.wait() for worker in self._workers))
        self._workers.clear()

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
                while worker.has_ended:
                    self._replace(worker)
                    worker = await self._idle.get()
        except TimeoutError:
            raise WorkersBusy from None
        # The worker answers even if the caller is cancelled. To replace the worker would take far longer, and other
        # requests would wait for the new one.
        return await asyncio.shield(self._create_task(self._exchange(worker, line)))

    def _create_task(self, coroutine: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _exchange(self, worker: "_Worker", line: bytes) -> dict[str, Any]:
        keep = False
        answer = asyncio.get_running_loop().create_task(worker.ask(line))
        try:
            await self._wait(worker, answer)
            result = answer.result()
            keep = True
            return result
        except WorkerError as error:
            logger.warning("worker killed module=%s reason=%s", self._module, error)
            raise
        except (OSError, ValueError):
            logger.warning("worker died module=%s", self._module)
            raise WorkerDied from None
        finally:
            answer.cancel()
            if keep:
                self._idle.put_nowait(worker)
            else:
                self._replace(worker)

    async def _wait(self, worker: "_Worker", answer: asyncio.Task[dict[str, Any]]) -> None:
        """Wait for an answer. Raises WorkerError if the worker exceeds a limit."""
        clock = asyncio.get_running_loop().time
        first_cpu_s, deadline = worker.cpu_s(), clock() + _WALL_PER_CPU_S * self._cpu_limit_s
        while not answer.done():
            used_s = worker.cpu_s() - first_cpu_s
            if used_s >= self._cpu_limit_s:
                raise WorkerTimeout(f"an answer took more than {self._cpu_limit_s:g} s of CPU time")
            if clock() >= deadline:
                raise WorkersBusy(f"an answer got only {used_s:g} s of CPU time")
            left_s = min(self._cpu_limit_s - used_s, deadline - clock())
            await asyncio.wait({answer}, timeout=max(_MIN_POLL_S, left_s))

    def _replace(self, worker: "_Worker") -> None:
        self._end(worker)
        self._num_workers -= 1
        self.start()

    async def _add_worker(self) -> None:
        """Start a worker. If the kernel kills it while it starts, start another one."""
        if not await self._start_worker() and not await self._start_worker():
            # The next request tries to start a worker again.
            self._num_workers -= 1

    async def _start_worker(self) -> bool:
        worker = None
        try:
            worker = await _Worker.start(self._module)
            self._workers.add(worker)
            async with asyncio.timeout(_START_TIMEOUT_S):
                await worker.ask(self._config_line)
            self._idle.put_nowait(worker)
            return True
        except (OSError, ValueError, TimeoutError) as error:
            logger.warning("worker did not start module=%s error=%s", self._module, error)
            if worker is not None:
                self._end(worker)
            return False

    def _end(self, worker: "_Worker") -> None:
        """Kill a worker, and forget it, with what it has written, when its process has ended."""
        worker.kill()
        self._create_task(self._forget(worker))

    async def _forget(self, worker: "_Worker") -> None:
        await worker.wait()
        self._workers.discard(worker)


class _Worker:
    """One process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        self._process = process
        self._stdin, self._stdout = process.stdin, process.stdout

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
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, BACKGROUND_NICE)
        return cls(process)

    @property
    def has_ended(self) -> bool:
        """True if the process has ended."""
        return self._process.returncode is not None

    async def ask(self, line: bytes) -> dict[str, Any]:
        """Send a line and return the answer; an error is raised if the process ends or the answer is too long."""
        self._stdin.write(line)
        await self._stdin.drain()
        answer: dict[str, Any] = json.loads(await self._stdout.readline())
        return answer

    def cpu_s(self) -> float:
        """Return the CPU time of the process in seconds; 0 if it has ended."""
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS_PER_S

    def kill(self) -> None:
        """Kill the process."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._stdin.close()

    async def wait(self) -> None:
        """Wait until a killed process has ended and its pipes are closed. A loop that closes earlier leaks them."""
        await self._process.wait()
        with contextlib.suppress(OSError):
            await self._stdin.wait_closed()
        await self._stdout.read()
