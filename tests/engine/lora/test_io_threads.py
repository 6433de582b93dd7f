# SPDX-License-Identifier: Apache-2.0
"""Reads of adapters beside the event loop: a repeated read joins the running one."""

import asyncio
import threading
from pathlib import Path

import pytest

from quire_engine.lora.io_threads import AdapterIOThreads


def test_repeated_reads_join_the_running_read() -> None:
    """A client gave up twice and called again; another adapter is read meanwhile."""

    async def run() -> None:
        threads, release, num_reads = AdapterIOThreads(), threading.Event(), 0

        def read() -> int:
            nonlocal num_reads
            num_reads += 1
            assert release.wait(30)
            return num_reads

        for _ in range(2):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(threads.read(Path("/a"), read), 0.05)
        joined = [asyncio.ensure_future(threads.read(Path("/a"), read)) for _ in range(3)]
        assert await threads.read(Path("/b"), lambda: "b") == "b"
        release.set()
        assert await asyncio.gather(*joined) == [1, 1, 1]
        assert await threads.read(Path("/a"), read) == 2

    asyncio.run(run())


def test_a_failed_read_fails_all_its_callers_and_is_repeated() -> None:
    async def run() -> None:
        threads = AdapterIOThreads()

        def fail() -> None:
            raise OSError("broken")

        results = await asyncio.gather(*(threads.read(Path("/a"), fail) for _ in range(2)), return_exceptions=True)
        assert [str(result) for result in results] == ["broken", "broken"]
        assert await threads.read(Path("/a"), lambda: 1) == 1

    asyncio.run(run())
