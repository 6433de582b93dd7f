# SPDX-License-Identifier: Apache-2.0
"""Loader: reads adapters and copies them into slots beside the steps, for the engine core.

Each piece of work has a thread that ends with it. Threads that stayed would slow the steps: libgomp keeps workers for
every thread that ever computed, and once all of them are more than the cores, it has them sleep where they would wait
awake (step_thread.py). For the same reason they compute on one core.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_NICENESS = 10
"""Steps go first where a core is wanted by both; at 10 a load still gets a tenth of a core that steps never leave, so
that whoever waits for it waits seconds at most."""

T = TypeVar("T")


class AdapterIOThreads:
    """Threads for adapters on their way from disk to host memory and on to slots. Used from one event loop."""

    def __init__(self) -> None:
        # Two: an adapter on a disk that hangs does not hold up the next one.
        self._read_semaphore = asyncio.Semaphore(2)
        # One after the other: two at once would halve the memory's speed for both, and for the steps.
        self._copy_semaphore = asyncio.Semaphore(1)

    async def read(self, function: Callable[[], T]) -> T:
        """Do what reads an adapter; raises what it raises."""
        return await self._run_in_thread(self._read_semaphore, function)

    async def copy(self, function: Callable[[], T]) -> T:
        """Do what copies one into a slot; raises what it raises."""
        return await self._run_in_thread(self._copy_semaphore, function)

    async def _run_in_thread(self, semaphore: asyncio.Semaphore, function: Callable[[], T]) -> T:
        async with semaphore:
            with ThreadPoolExecutor(1, "adapter", initializer=lower_thread_priority) as executor:
                return await asyncio.get_running_loop().run_in_executor(executor, function)


def lower_thread_priority() -> None:
    """Have this thread, and no other, run where steps leave a core free, and on one core only."""
    import torch  # here, so that importing the core's sockets costs no torch

    # On Linux priorities are a thread's. Not fatal where that is forbidden: then loads compete with steps.
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    except OSError:
        pass
    torch.set_num_threads(1)
