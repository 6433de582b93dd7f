# SPDX-License-Identifier: Apache-2.0
"""StubWatcher: discovers stubs, reports each death once, and kills stubs of unloaded models.

The test process takes the role of the server.
"""

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
    """Return a function that starts a process that looks like the stub of a model."""
    processes = []

    def start(model):
        program = tmp_path / "triton_python_backend_stub"
        if not program.exists():
            program.symlink_to(sys.executable)
        argv = [str(program), "-c", "import time; time.sleep(60)", *([f"{model}_0_0"] if model else [])]
        processes.append(subprocess.Popen(argv))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
async def watch():
    deaths = []
    # Zombies that other tests left behind have no model.
    watch = StubWatcher(os.getpid(), lambda stub: stub.model and deaths.append(stub))
    yield watch, deaths
    watch.close()


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_reports_a_death_once(watch, stub):
    watch, deaths = watch
    sql, _ = stub("sql"), stub("pirate")
    await until(lambda: watch.pids_of("sql") == {sql.pid} and watch.pids_of("pirate"))
    os.kill(sql.pid, signal.SIGKILL)
    await until(lambda: deaths)
    await asyncio.sleep(2 * stub_watcher.SCAN_INTERVAL_S)
    assert [(d.pid, d.model) for d in deaths] == [(sql.pid, "sql")]


async def test_ignores_the_servers_test_run_of_the_stub_program(watch, stub):
    watch, deaths = watch
    test_run, other = stub(""), stub("pirate")
    await until(lambda: watch.pids_of("pirate"))
    for process in (test_run, other):
        process.kill()
    await until(lambda: deaths)
    assert [death.pid for death in deaths] == [other.pid] and test_run.pid not in watch.pids_of("")


async def test_reports_only_stubs_among_zombies():
    """These died before the first scan. The server reaps its own shells later."""
    deaths = []
    shell = subprocess.Popen(["sh", "-c", "exit"])
    stub = subprocess.Popen(["sh", "-c", f"printf {stub_watcher._STUB_COMM} > /proc/$$/comm"])
    with shell, stub:
        for process in (shell, stub):
            await until(lambda pid=process.pid: stub_watcher._read_stat(pid)[1] == "Z")
        watch = StubWatcher(os.getpid(), lambda death: deaths.append(death.pid))
        await asyncio.sleep(2 * stub_watcher.DEATH_CONFIRMATION_S)
        assert deaths == [], "the server may still reap it"
        await until(lambda: stub.pid in deaths)
        await asyncio.sleep(stub_watcher.DEATH_CONFIRMATION_S)
        assert shell.pid not in deaths
        watch.close()


async def test_process_names_can_contain_any_bytes(watch, stub):
    """The kernel truncates names to 15 bytes, also within a UTF-8 character."""
    argv = ["sh", "-c", "printf ') \\377' > /proc/$$/comm; echo; read -r _"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        sql = stub("sql")
        await until(lambda: watch[0].pids_of("sql") == {sql.pid})
        assert stub_watcher._read_stat(other.pid)[:3] == (") \ufffd", "S", os.getpid())
        other.communicate(b"\n")


async def test_was_replaced_if_the_model_has_a_newer_stub(watch, stub):
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


async def test_kills_stub_of_unloaded_model_without_open_requests(watch, stub, monkeypatch):
    monkeypatch.setattr(stub_watcher, "UNLOAD_GRACE_S", 0.4)
    watch, deaths = watch
    old, other = stub("sql"), stub("pirate")
    await until(lambda: watch.pids_of("sql") and watch.pids_of("pirate"))
    num_open, polls = {old.pid: 1}, []
    kill_task = asyncio.create_task(
        watch.kill_unloaded(watch.pids_of("sql"), lambda pid: polls.append(pid) or num_open[pid])
    )
    # More polls than are needed to kill a stub without open requests.
    await until(lambda: len(polls) > stub_watcher.UNLOAD_GRACE_S / stub_watcher.DEATH_CONFIRMATION_S + 1)
    assert old.poll() is None and not kill_task.done()
    num_open[old.pid] = 0
    await asyncio.wait_for(kill_task, 20)
    await asyncio.sleep(2 * stub_watcher.DEATH_CONFIRMATION_S)
    assert old.wait(20) == -signal.SIGKILL
    assert other.poll() is None and deaths == []


async def test_does_not_kill_stub_that_exits_by_itself(watch, stub):
    watch, _ = watch
    old = stub("sql")
    await until(lambda: watch.pids_of("sql"))
    kill_task = asyncio.create_task(watch.kill_unloaded(watch.pids_of("sql"), lambda pid: 0))
    old.terminate()
    old.wait()
    await asyncio.wait_for(kill_task, 20)
    assert old.returncode == -signal.SIGTERM
