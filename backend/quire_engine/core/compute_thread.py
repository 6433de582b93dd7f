# SPDX-License-Identifier: Apache-2.0
"""The compute thread: in the core process, only this thread computes. It loads the engine, and then runs its steps.

libgomp keeps a team of workers for every thread that has computed before. Once there are more workers than cores, they
sleep instead of spinning. The matrix products of a layer took 25 % longer in this thread when the main thread had
loaded the engine (64 rows, bf16, two Zen 4 cores).
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn, TypeVar

from quire_engine.ipc import process

T = TypeVar("T")
logger = logging.getLogger(__name__)


class ComputeThread:
    """A thread that runs functions one after the other. The name of the thread begins with "steps"."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "steps")

    def run_sync(self, action: Callable[[], T]) -> T:
        """Run a function in the thread; return its result or raise its exception."""
        return self._executor.submit(action).result()

    def run_forever(self, action: Callable[[], NoReturn]) -> None:
        """Start a function that never returns. If it raises, the process exits."""
        self._executor.submit(self._run_or_exit, action)

    def _run_or_exit(self, action: Callable[[], NoReturn]) -> None:
        try:
            action()
        except BaseException:
            logger.exception("engine loop failed: ending this process")
            process.exit_now(process.EXIT_SOFTWARE)
