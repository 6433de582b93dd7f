# SPDX-License-Identifier: Apache-2.0
"""Threads in which the core server reads adapters, copies them into slots and encodes images while steps run.

Each task runs in a new thread, which ends with the task. Long-lived threads slow down the steps, because libgomp keeps
a team of workers for every thread that has computed before. Once there are more workers than cores, they sleep instead
of spinning (see core.compute_thread). For the same reason a task uses only one core.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from quire_engine.ipc.process import BACKGROUND_NICE
from quire_engine.lora.adapter_source import AdapterSource

T = TypeVar("T")


class AdapterIOThreads:
    """Runs tasks in threads. A task reads an adapter from disk, or copies an adapter into a slot. Used from one event
    loop."""

    def __init__(self) -> None:
        # Two tasks can read at the same time, so that an adapter on a hanging disk does not delay the next adapter.
        self._read_semaphore = asyncio.Semaphore(2)
        # Only one task can copy at a time. Concurrent copies would leave less memory bandwidth for the steps.
        self._copy_semaphore = asyncio.Semaphore(1)
        self._running_reads: dict[AdapterSource, asyncio.Future[object]] = {}

    async def read(self, source: AdapterSource, function: Callable[[], object]) -> object:
        """Run a function that reads the adapter in `source`. Its exceptions propagate.

        If the adapter is being read already, return the result of that read. A client that repeats a call after a
        timeout must not start a second thread.
        """
        read = self._running_reads.get(source)
        if read is None:
            read = asyncio.ensure_future(self._run_in_thread(self._read_semaphore, function))
            self._running_reads[source] = read
            read.add_done_callback(lambda _: self._running_reads.pop(source))
        return await asyncio.shield(read)

    async def copy(self, function: Callable[[], T]) -> T:
        """Run a function that copies an adapter into a slot. Its exceptions propagate."""
        return await self._run_in_thread(self._copy_semaphore, function)

    async def _run_in_thread(self, semaphore: asyncio.Semaphore, function: Callable[[], T]) -> T:
        async with semaphore:
            return await run_in_background("adapter", function)


async def run_in_background(name: str, function: Callable[[], T]) -> T:
    """Run a function in a thread of this name. Its exceptions propagate."""
    with ThreadPoolExecutor(1, name, initializer=lower_thread_priority) as executor:
        return await asyncio.get_running_loop().run_in_executor(executor, function)


def lower_thread_priority() -> None:
    """Lower the priority of the calling thread below that of the steps, and limit it to one core. A task still gets a
    quarter of a busy core, so a request does not wait much longer for its adapter or image."""
    import torch  # imported here, so that importing the core server does not import torch

    # On Linux the priority is per thread. If the call is forbidden, tasks compete with steps.
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BACKGROUND_NICE)
    except OSError:
        pass
    torch.set_num_threads(1)
