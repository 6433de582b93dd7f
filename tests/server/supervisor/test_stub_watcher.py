# SPDX-License-Identifier: Apache-2.0
"""Stubs are found, their deaths told once, and those that outstay their model are ended. This process is the server."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from quire_server.supervisor import stub_watcher
from quire_server.supervisor.stub_watcher import StubWatcher


@pytest.fixture
def stub(tmp_path):
    """Starts a process that looks like the stub of a model."""
    started = []

    def start(model):
        program = tmp_path / "triton_python_backend_stub"
        if not program.exists():
            program.symlink_to(sys.executable)
        argv = [str(program), "-c", "import time; time.sleep(60)", *([f"{model}_0_0"] if model else [])]
        started.append(subprocess.Popen(argv))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
async def watch():
    deaths = []
    # Dead children that other tests have left to this process have no model.
    watch = StubWatcher(os.getpid(), lambda stub: stub.model and deaths.append(stub))
    yield watch, deaths
    watch.close()


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_death_is_told_once(watch, stub):
    watch, deaths = watch
    sql, _ = stub("sql"), stub("pirate")
    await until(lambda: watch.pids_of("sql") == {sql.pid} and watch.pids_of("pirate"))
    os.kill(sql.pid, signal.SIGKILL)
    await until(lambda: deaths)
    await asyncio.sleep(2 * stub_watcher.SCAN_INTERVAL_S)
    assert [(d.pid, d.model) for d in deaths] == [(sql.pid, "sql")]


async def test_a_try_whether_a_stub_can_be_run_is_no_stub(watch, stub):
    watch, deaths = watch
    tried, other = stub(""), stub("pirate")
    await until(lambda: watch.pids_of("pirate"))
    for process in (tried, other):
        process.kill()
    await until(lambda: deaths)
    assert [death.pid for death in deaths] == [other.pid] and watch.pids_of("") == set()


async def test_of_dead_processes_of_the_server_only_stubs_are_told():
    """Of those that died before they were seen. For a shell of its own the server waits when it comes to it."""
    deaths = []
    shell = subprocess.Popen(["sh", "-c", "exit"])
    stub = subprocess.Popen(["sh", "-c", f"printf {stub_watcher._STUB_COMM} > /proc/$$/comm"])
    with shell, stub:
        for process in (shell, stub):
            await until(lambda pid=process.pid: stub_watcher._read_stat(pid)[1] == "Z")
        watch = StubWatcher(os.getpid(), lambda death: deaths.append(death.pid))
        await asyncio.sleep(2 * stub_watcher.DEATH_CONFIRMATION_S)
        assert deaths == [], "the server may come to it yet"
        await until(lambda: stub.pid in deaths)
        await asyncio.sleep(stub_watcher.DEATH_CONFIRMATION_S)
        assert shell.pid not in deaths
        watch.close()


async def test_the_names_of_other_processes_are_anything(watch, stub):
    """Such as words in another alphabet, of which the kernel keeps fifteen bytes."""
    named = ["sh", "-c", "printf ') \\377' > /proc/$$/comm; echo; read -r _"]
    with subprocess.Popen(named, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        sql = stub("sql")
        await until(lambda: watch[0].pids_of("sql") == {sql.pid})
        assert stub_watcher._read_stat(other.pid)[:3] == (") \ufffd", "S", os.getpid())
        other.communicate(b"\n")


async def test_a_model_that_has_got_another_stub_since_lacks_none(watch, stub):
    watch, deaths = watch
    old = stub("sql")
    await until(lambda: watch.pids_of("sql") == {old.pid})
    new = stub("sql")
    await until(lambda: watch.pids_of("sql") == {old.pid, new.pid})
    for process, replaced in ((old, True), (new, False)):
        deaths.clear()
        os.kill(process.pid, signal.SIGKILL)
        await until(lambda: deaths)
        assert [(death.pid, watch.was_replaced(death)) for death in deaths] == [(process.pid, replaced)]


async def test_a_stub_that_outstays_its_model_is_killed_once_it_has_no_request(watch, stub, monkeypatch):
    monkeypatch.setattr(stub_watcher, "UNLOAD_GRACE_S", 0.4)
    watch, deaths = watch
    old, other = stub("sql"), stub("pirate")
    await until(lambda: watch.pids_of("sql") and watch.pids_of("pirate"))
    num_open, asked = {old.pid: 1}, []
    retiring = asyncio.create_task(
        watch.kill_unloaded(watch.pids_of("sql"), lambda pid: asked.append(pid) or num_open[pid])
    )
    # More often than it would take to kill it, had it no request.
    await until(lambda: len(asked) > stub_watcher.UNLOAD_GRACE_S / stub_watcher.DEATH_CONFIRMATION_S + 1)
    assert old.poll() is None and not retiring.done()
    num_open[old.pid] = 0
    await asyncio.wait_for(retiring, 20)
    await asyncio.sleep(2 * stub_watcher.DEATH_CONFIRMATION_S)
    assert old.wait(20) == -signal.SIGKILL
    assert other.poll() is None and deaths == []


async def test_a_stub_that_ends_by_itself_is_left_alone(watch, stub):
    watch, _ = watch
    old = stub("sql")
    await until(lambda: watch.pids_of("sql"))
    retiring = asyncio.create_task(watch.kill_unloaded(watch.pids_of("sql"), lambda pid: 0))
    old.terminate()
    old.wait()
    await asyncio.wait_for(retiring, 20)
    assert old.returncode == -signal.SIGTERM
