# SPDX-License-Identifier: Apache-2.0
"""ChildProcess with real processes: output, exit codes, and the end of the whole process group."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from quire_server.supervisor.child_process import ChildProcess, become_subreaper

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


async def test_relays_output_by_line_including_the_last_one():
    lines = []
    child = await ChildProcess.start(
        "core",
        python("import sys; print('a'); print('é', file=sys.stderr); print('50%\\r100%\\r\\nend', end='')"),
        lambda name, line: lines.append((name, line)),
    )
    assert await child.wait() == 0
    assert sorted(lines) == sorted([("core", "a"), ("core", "é"), ("core", "100%"), ("core", "end")])


async def test_relays_the_state_of_a_bar_before_its_line_ends():
    lines = []
    code = "import time; print('\\r10%\\r20%', end='', flush=True); time.sleep(0.5); print('\\r100%')"
    child = await ChildProcess.start("core", python(code), lambda _, line: lines.append(line))
    assert await child.wait() == 0
    assert (lines[0], lines[-1], list(child.tail)) == ("\r20%", "100%", ["100%"])


@pytest.mark.parametrize("cancelled", [True, False])
async def test_failed_or_cancelled_start_leaves_no_process(cancelled, monkeypatch):
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


async def test_splits_an_endless_line():
    child = await start("print('x' * 1_000_000, end='')")
    assert await child.wait() == 0
    assert max(map(len, child.tail)) < 200_000
    assert len(child.tail) > 1


async def test_death_is_detected_at_once_and_kills_the_group():
    become_subreaper()
    child = await start(PARENT_AND_CHILD)
    grandchild = int(await first_line(child))
    os.kill(child.pid, signal.SIGKILL)
    # The grandchild keeps the output pipe open for a minute.
    async with asyncio.timeout(20):
        assert await child.wait() == -signal.SIGKILL
    assert not psutil.pid_exists(grandchild), "neither running nor a zombie"


async def test_stop_kills_after_the_timeout():
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


async def test_missing_program_is_reported():
    child = await ChildProcess.start("text", ["/no/such/program"], lambda *_: None)
    assert await child.wait() == 1
    assert child.tail[-1] == "exec_with_pdeathsig: '/no/such/program': No such file or directory"


def test_children_die_with_their_parent_after_sigkill():
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
