# SPDX-License-Identifier: Apache-2.0
"""Workers that answer requests of clients, and callers that do not wait for the answer."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from quire_engine.ipc import worker_pool
from quire_engine.ipc.worker_pool import NUM_WORKERS, WorkerDied, WorkerPool, WorkersBusy, WorkerTimeout

WORKER = """
import json, os, sys, time
for line in sys.stdin:
    message = json.loads(line)
    time.sleep(message.get("sleep_s", 0))
    while time.process_time() < message.get("cpu_s", 0):
        pass
    print(json.dumps({"pid": os.getpid(), "text": "x" * message.get("length", 0)}), flush=True)
"""

NewPool = Callable[[float], WorkerPool]


@pytest.fixture
async def new_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NewPool]:
    """Returns pools with this limit of CPU time."""
    (tmp_path / "slow_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    pools: list[WorkerPool] = []

    def create(cpu_limit_s: float) -> WorkerPool:
        pools.append(WorkerPool("slow_worker", {}, cpu_limit_s, queue_timeout_s=30))
        return pools[-1]

    yield create
    for pool in pools:
        await pool.aclose()


@pytest.mark.parametrize("delay_s", [0, 0.002, 0.01, 0.3])
async def test_a_closed_pool_leaves_no_process(new_pool: NewPool, delay_s: float) -> None:
    """Neither of workers that start, nor of a worker that computes. Its pipes would warn at the end of this test."""
    pool = new_pool(30)
    caller = asyncio.create_task(pool.ask({"sleep_s": 30}))
    await asyncio.sleep(delay_s)
    await pool.aclose()
    caller.cancel()
    await asyncio.wait({caller})
    assert not [p for p in psutil.Process().children() if "slow_worker" in " ".join(p.cmdline())]


async def test_a_cancelled_caller_costs_no_worker(new_pool: NewPool) -> None:
    pool = new_pool(30)

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


async def test_a_worker_is_limited_by_its_cpu_time(new_pool: NewPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine delays an answer like a sleep: the worker waits, and uses no CPU time."""
    monkeypatch.setattr(worker_pool, "_WALL_PER_CPU_S", 200.0)
    pool = new_pool(0.3)
    assert await pool.ask({"sleep_s": 0.6})
    with pytest.raises(WorkerTimeout, match=r"more than 0.3 s of CPU time"):
        await pool.ask({"cpu_s": 60})
    monkeypatch.setattr(worker_pool, "_WALL_PER_CPU_S", 5.0)
    with pytest.raises(WorkersBusy, match="only 0"):
        await pool.ask({"sleep_s": 60})


async def test_a_worker_whose_answer_cannot_be_read_is_replaced(
    new_pool: NewPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, the rest of the answer would be the answer to the next request."""
    monkeypatch.setattr(worker_pool, "_MAX_LINE_BYTES", 1000)
    pool = new_pool(30)
    for _ in range(3):
        with pytest.raises(WorkerDied):
            await pool.ask({"length": 5000})
        answers = await asyncio.gather(*(pool.ask({"length": 10}) for _ in range(NUM_WORKERS)))
        assert [answer["text"] for answer in answers] == ["x" * 10] * NUM_WORKERS
