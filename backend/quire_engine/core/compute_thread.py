# SPDX-License-Identifier: Apache-2.0
"""StepThread: the one thread of the core process that computes; it loads the engine, and then runs its steps.

One, because libgomp keeps a team of workers for every thread that ever computed and, once all of them are more than the
cores, has them sleep instead of waiting awake: an engine that the main thread had loaded took 25 % longer for
a layer's products in this thread (64 rows, bf16, two Zen 4 cores).
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn, TypeVar

from quire_engine.ipc import process

T = TypeVar("T")
logger = logging.getLogger(__name__)


class ComputeThread:
    """A thread that does one thing after the other."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "steps")

    def run_sync(self, action: Callable[[], T]) -> T:
        """Do something there; returns, or raises, what it does."""
        return self._executor.submit(action).result()

    def run_forever(self, action: Callable[[], NoReturn]) -> None:
        """Begin what never ends; if it raises, the process ends."""
        self._executor.submit(self._run_or_exit, action)

    def _run_or_exit(self, action: Callable[[], NoReturn]) -> None:
        try:
            action()
        except BaseException:
            logger.exception("steps ended")
            process.exit_now(process.EXIT_SOFTWARE)
