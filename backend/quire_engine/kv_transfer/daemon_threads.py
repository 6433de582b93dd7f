# SPDX-License-Identifier: Apache-2.0
"""Threads for transfers that no one waits for at the end of the process."""

import contextlib
import logging
import queue
import threading
import weakref
from collections.abc import Callable

_Tasks = queue.SimpleQueue[Callable[[], None] | None]

logger = logging.getLogger(__name__)


class DaemonThreads:
    """Threads that run tasks. They end with this object or with the process, which drops the tasks that have not begun.

    They start at once, so that `submit` cannot fail if the process has no room for further threads.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._tasks: _Tasks = queue.SimpleQueue()
        for number in range(num_threads):
            threading.Thread(target=_run, args=(self._tasks,), name=f"{name}-{number}", daemon=True).start()
        weakref.finalize(self, _end, self._tasks, num_threads)

    def submit(self, task: Callable[[], None]) -> None:
        """Run a task in one of the threads. It starts after the tasks before it have started."""
        self._tasks.put(task)


def _run(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        try:
            task()
        except Exception:
            logger.exception("a task failed")
        # While the thread waits, it must not keep the owner of the task alive.
        del task


def _end(tasks: _Tasks, num_threads: int) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            tasks.get_nowait()
    for _ in range(num_threads):
        tasks.put(None)
