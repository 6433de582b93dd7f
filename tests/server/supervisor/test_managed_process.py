# SPDX-License-Identifier: Apache-2.0
"""Processes started, relayed, ended and kept running: with real ones, and nothing left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from quire_server.logs import is_noise
from quire_server.supervisor.child_process import ChildProcess, become_subreaper
from quire_server.supervisor.managed_process import ManagedProcess, RestartBackoff, StartupFailed
from quire_spec.documents.pod_status import ProcessState

PARENT_AND_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


def python(code):
    return [sys.executable, "-c", code]


async def start(code, lines=None):
    return await ChildProcess.start("test", python(code), lambda name, line: (lines or []).append((name, line)))


async def first_line(child):
    async with asyncio.timeout(60):
        while not child.tail:
            await asyncio.sleep(0.01)
    return child.tail[0]


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_output_comes_line_by_line_with_the_name_and_its_end_without_newline():
    lines = []
    child = await ChildProcess.start(
        "core",
        python("import sys; print('a'); print('é', file=sys.stderr); print('50%\\r100%\\r\\nend', end='')"),
        lambda name, line: lines.append((name, line)),
    )
    assert await child.wait() == 0
    assert sorted(lines) == sorted([("core", "a"), ("core", "é"), ("core", "100%"), ("core", "end")])


@pytest.mark.parametrize("cancelled", [True, False])
async def test_a_start_that_does_not_come_to_its_end_leaves_no_process(cancelled, monkeypatch):
    reached = asyncio.Event()

    async def connect(*_):
        reached.set()
        if cancelled:
            await asyncio.Event().wait()
        raise OSError("too many open files")

    monkeypatch.setattr(asyncio.get_running_loop(), "connect_read_pipe", connect)
    before = {child.pid for child in psutil.Process().children()}
    starting = asyncio.create_task(start("import time; time.sleep(60)"))
    await reached.wait()
    if cancelled:
        starting.cancel()
    with pytest.raises(asyncio.CancelledError if cancelled else OSError):
        await starting
    assert not [child for child in psutil.Process().children() if child.pid not in before]


async def test_an_endless_line_is_cut_not_kept():
    child = await start("print('x' * 1_000_000, end='')")
    assert await child.wait() == 0
    assert max(map(len, child.tail)) < 200_000
    assert len(child.tail) > 1


async def test_a_killed_process_is_seen_at_once_and_takes_its_group_with_it():
    become_subreaper()
    child = await start(PARENT_AND_CHILD)
    grandchild = int(await first_line(child))
    os.kill(child.pid, signal.SIGKILL)
    # The grandchild holds the other end of its output for a minute.
    async with asyncio.timeout(20):
        assert await child.wait() == -signal.SIGKILL
    assert not psutil.pid_exists(grandchild), "neither running nor a zombie"


async def test_stop_is_polite_for_a_while_only():
    child = await start(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    )
    await first_line(child)
    assert await child.stop(0.2) == -signal.SIGKILL
    child = await start(
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(3));"
        "print(1, flush=True); time.sleep(60)"
    )
    await first_line(child)
    assert await child.stop(10) == 3


async def test_a_program_that_is_not_there_says_so():
    child = await ChildProcess.start("text", ["/no/such/program"], lambda *_: None)
    assert await child.wait() == 1
    assert child.tail[-1] == "exec_with_pdeathsig: '/no/such/program': No such file or directory"


def test_children_die_with_their_parent_even_by_sigkill():
    code = """
import asyncio, sys
from quire_server.supervisor.child_process import ChildProcess
async def main():
    child = await ChildProcess.start("x", ["sleep", "60"], lambda *_: None)
    print(child.pid, flush=True)
    await child.wait()
asyncio.run(main())
"""
    with subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        while psutil.Process(child).name() != "sleep":
            time.sleep(0.01)
        parent.kill()
    deadline = time.monotonic() + 20
    while alive(child):
        assert time.monotonic() < deadline, "left behind"
        time.sleep(0.01)


def test_backoff_is_immediate_first_then_grows_to_a_cap_and_forgets_after_a_steady_life():
    backoff = RestartBackoff()
    assert [backoff.delay_s(1) for _ in range(8)] == [0, 0.5, 1, 2, 4, 8, 8, 8]
    assert [backoff.delay_s(31), backoff.delay_s(1)] == [0, 0.5]


async def idle(child):
    await asyncio.Event().wait()


async def test_a_configuration_that_is_wrong_ends_it_at_once_with_what_the_process_said():
    starts = []

    async def begin():
        starts.append(1)
        return await start("import sys; print('engine.json: model: missing'); sys.exit(2)")

    with pytest.raises(StartupFailed, match=r"exit_code=2(?s:.*)engine.json: model: missing") as caught:
        await ManagedProcess("core", begin, idle, lambda: None).run()
    assert caught.value.is_config_error
    assert len(starts) == 1


async def test_a_process_that_never_comes_up_is_tried_three_times(monkeypatch):
    monkeypatch.setattr(RestartBackoff, "delay_s", lambda *_: 0.0)
    starts = []

    async def begin():
        starts.append(1)
        return await start("raise SystemExit('out of memory')")

    with pytest.raises(StartupFailed, match=r"3 times(?s:.*)out of memory") as caught:
        await ManagedProcess("core", begin, idle, lambda: None).run()
    assert not caught.value.is_config_error
    assert len(starts) == 3


async def test_a_machine_without_room_for_a_process_is_asked_again(monkeypatch):
    monkeypatch.setattr(RestartBackoff, "delay_s", lambda *_: 0.0)

    async def begin():
        raise OSError(12, "Cannot allocate memory")

    with pytest.raises(StartupFailed, match=r"core ended 3 times with no start(?s:.*)Cannot allocate memory"):
        await ManagedProcess("core", begin, idle, lambda: None).run()


async def test_once_ready_a_process_is_started_again_whatever_it_ends_with(monkeypatch):
    states, pauses, delay_s = [], [], RestartBackoff.delay_s

    def noted(*args):
        pauses.append(delay_s(*args))
        return pauses[-1]

    monkeypatch.setattr(RestartBackoff, "delay_s", noted)

    async def session(child):
        keeper.mark_ready()
        await idle(child)
        return ""

    keeper = ManagedProcess(
        "core", lambda: start("import time; time.sleep(60)"), session, lambda: states.append(keeper.state)
    )
    running = asyncio.create_task(keeper.run())
    first = await pid_of(keeper)
    os.kill(first, signal.SIGKILL)
    second = await pid_of(keeper, other_than=first)
    assert pauses == [0], "the first restart is immediate"
    assert keeper.status().restarts == 1
    assert states == [ProcessState.READY, ProcessState.RESTARTING, ProcessState.READY]
    running.cancel()
    await asyncio.wait([running])
    assert alive(second), "how it ends is the owner's to say"
    await keeper.child.stop(5)


async def test_a_session_that_gives_up_has_the_process_killed(caplog):
    async def session(child):
        keeper.mark_ready()
        await asyncio.sleep(0.1)
        return "no answer for 120 s"

    keeper = ManagedProcess("core", lambda: start("import time; time.sleep(60)"), session, lambda: None)
    running = asyncio.create_task(keeper.run())
    first = await pid_of(keeper)
    await pid_of(keeper, other_than=first)
    assert not psutil.pid_exists(first)
    assert "reason=no answer for 120 s" in caplog.text
    running.cancel()
    await asyncio.wait([running])
    await keeper.child.stop(5)


async def pid_of(keeper, other_than=None):
    async with asyncio.timeout(60):
        while not (keeper.state is ProcessState.READY and keeper.child and keeper.child.pid != other_than):
            await asyncio.sleep(0.01)
    return keeper.child.pid


@pytest.mark.parametrize(
    ("name", "line", "hidden"),
    [
        ("server", 'I1121 03:04:40.773568 8875 model_lifecycle.cc:472] "loading: base:1"', True),
        ("server", "| base  | 1       | READY  |", True),
        ("server", "+-----+", True),
        ("server", "", True),
        ("server", 'E1121 03:04:40.772334 8875 server.cc:241] "CudaDriverHelper has not been initialized."', True),
        (
            "server",
            'E1122 3:04:40.9 8875 infer_handler.h:840] "[INTERNAL] HandleCancellation called even when the context was '
            'not cancelled for ModelStreamInferHandler, rpc_ok=1, context 0, 0 step COMPLETE"',
            True,
        ),
        ("server", "E1121 03:04:40.9 8875 model_lifecycle.cc:9] \"failed to load 'x'\"", False),
        ("server", 'W1121 03:04:40.9 8875 x.cc:9] "odd"', False),
        ("server", "Traceback (most recent call last):", False),
        ("core", "2026-11-21 03:30:32,003 INFO quire.core engine core listens", False),
        ("core", "| looks like a table", False),
    ],
)
def test_the_servers_chatter_is_hidden_and_nothing_else(name, line, hidden):
    assert is_noise(name, line) is hidden
