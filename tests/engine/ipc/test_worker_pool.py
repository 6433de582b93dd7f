# SPDX-License-Identifier: Apache-2.0
"""Workers that answer requests of clients, and callers that do not wait for the answer."""

import asyncio
import os
from pathlib import Path

import pytest

from quire_engine.ipc.worker_pool import NUM_WORKERS, WorkerPool

WORKER = """
import json, os, sys, time
for line in sys.stdin:
    time.sleep(json.loads(line).get("sleep_s", 0))
    print(json.dumps({"pid": os.getpid()}), flush=True)
"""


async def test_a_cancelled_caller_costs_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    pool = WorkerPool("slow_worker", {}, timeout_s=30, queue_timeout_s=30)

    async def ask_all_workers() -> set[int]:
        answers = await asyncio.gather(*(pool.ask({"sleep_s": 0.5}) for _ in range(NUM_WORKERS)))
        return {answer["pid"] for answer in answers}

    while len(pids := await ask_all_workers()) < NUM_WORKERS:
        await asyncio.sleep(0.05)
    callers = [asyncio.create_task(pool.ask({"sleep_s": 0.5})) for _ in range(NUM_WORKERS)]
    await asyncio.sleep(0.1)
    for caller in callers:
        caller.cancel()
    assert all(isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*callers, return_exceptions=True))
    assert await ask_all_workers() == pids
