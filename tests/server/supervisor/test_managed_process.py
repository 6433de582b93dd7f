# SPDX-License-Identifier: Apache-2.0
"""ManagedProcess: restarts with backoff, startup failures, and the session's end, with real processes."""

import asyncio
import os
import signal
import sys

import psutil
import pytest

from quire_server.supervisor.child_process import ChildProcess
from quire_server.supervisor.managed_process import ManagedProcess, RestartBackoff, StartupFailed
from quire_spec.documents.pod_status import ProcessState


async def start(code):
    return await ChildProcess.start("test", [sys.executable, "-c", code], lambda name, line: None)


def test_backoff_grows_to_a_cap_and_resets_after_stable_uptime():
    other_nodes = RestartBackoff(1.0, 60.0, num_immediate=0)
    assert [other_nodes.delay_s(1) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    backoff = RestartBackoff()
    assert [backoff.delay_s(1) for _ in range(8)] == [0, 0.5, 1, 2, 4, 8, 8, 8]
    assert [backoff.delay_s(31), backoff.delay_s(1)] == [0, 0.5]


async def idle(child):
    await asyncio.Event().wait()


async def test_failed_process_creation_counts_as_attempt(monkeypatch):
    monkeypatch.setattr(RestartBackoff, "delay_s", lambda *_: 0.0)

    async def start_child():
        raise OSError(12, "Cannot allocate memory")

    with pytest.raises(StartupFailed, match=r"core ended 3 times with no start(?s:.*)Cannot allocate memory"):
        await ManagedProcess("core", start_child, idle, lambda: None).run()


async def test_restarts_a_process_that_was_ready(monkeypatch):
    states, delays, delay_s = [], [], RestartBackoff.delay_s

    def record_delay(*args):
        delays.append(delay_s(*args))
        return delays[-1]

    monkeypatch.setattr(RestartBackoff, "delay_s", record_delay)

    async def session(child):
        managed.mark_ready()
        await idle(child)
        return ""

    managed = ManagedProcess(
        "core", lambda: start("import time; time.sleep(60)"), session, lambda: states.append(managed.state)
    )
    run_task = asyncio.create_task(managed.run())
    first = await pid_of(managed)
    os.kill(first, signal.SIGKILL)
    second = await pid_of(managed, other_than=first)
    assert delays == [0], "the first restart is immediate"
    assert managed.status().restarts == 1
    assert states == [ProcessState.READY, ProcessState.RESTARTING, ProcessState.READY]
    run_task.cancel()
    await asyncio.wait([run_task])
    assert psutil.pid_exists(second), "cancelling run() must not end the process"
    await managed.child.stop(5)


async def test_end_of_the_session_kills_the_process(caplog):
    async def session(child):
        managed.mark_ready()
        await asyncio.sleep(0.1)
        return "no response for 120 s"

    managed = ManagedProcess("core", lambda: start("import time; time.sleep(60)"), session, lambda: None)
    run_task = asyncio.create_task(managed.run())
    first = await pid_of(managed)
    await pid_of(managed, other_than=first)
    assert not psutil.pid_exists(first)
    assert "reason=no response for 120 s" in caplog.text
    run_task.cancel()
    await asyncio.wait([run_task])
    await managed.child.stop(5)


async def pid_of(managed, other_than=None):
    async with asyncio.timeout(60):
        while not (managed.state is ProcessState.READY and managed.child and managed.child.pid != other_than):
            await asyncio.sleep(0.01)
    return managed.child.pid


async def test_the_last_event_is_the_text_of_the_last_log_line():
    async def session(child):
        while len(child.tail) < 3:
            await asyncio.sleep(0.01)
        events.append(managed.last_event())
        managed.mark_ready()
        return await idle(child)

    lines = ["a warning of a library", "2026-11-27 22:20:42,180 INFO quire_kernels.cpu_native compiling with g++", "x"]
    code = f"import time; print({chr(10).join(lines)!r}, flush=True); time.sleep(60)"
    events = []
    managed = ManagedProcess("core", lambda: start(code), session, lambda: None)
    assert managed.last_event() == ""
    run_task = asyncio.create_task(managed.run())
    async with asyncio.timeout(60):
        while not events:
            await asyncio.sleep(0.01)
    assert events == ["compiling with g++"]
    run_task.cancel()
    await asyncio.wait([run_task])
    await managed.child.stop(5)
