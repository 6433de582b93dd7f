# SPDX-License-Identifier: Apache-2.0
"""The core process with one tensor-parallel worker: it serves, uses no CPU when idle, and both end together."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.engine_processes import EngineProcesses, wait_for, wait_quiet
from support.thread_workers import rank_worker_processes
from support.tiny_checkpoints import greedy_output, make_llama

from quire_spec.protocol.messages import OutputDeltas

REPORT_FROZEN = """
import gc, os, pathlib, signal
def report(*_):
    path = pathlib.Path(os.environ["FREEZE_COUNTS"], str(os.getpid()))
    path.with_suffix(".part").write_text(str(gc.get_freeze_count()))
    path.with_suffix(".part").rename(path)
signal.signal(signal.SIGUSR2, report)
"""
"""A sitecustomize.py: the process writes the number of its frozen objects to a file when it gets SIGUSR2."""
ENDLESS = {"temperature": 0, "max_tokens": 1000, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder into which the processes write the numbers of their frozen objects."""
    (tmp_path / "sitecustomize.py").write_text(REPORT_FROZEN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("FREEZE_COUNTS", str(tmp_path))
    return tmp_path


@pytest.fixture
def pod(model: Path, tmp_path: Path, counts: Path) -> Iterator[EngineProcesses]:
    config = {"model": str(model), "dtype": "float32", "kv_cache_memory_bytes": 8 * 2**20, "tensor_parallel_size": 2}
    # As on GPUs, so that the worker dies with two steps in flight.
    config["async_scheduling"] = True
    with EngineProcesses(tmp_path, **config) as processes:
        yield processes.start("text", "core")


def test_core_with_a_worker_serves_idles_without_cpu_time_and_ends_with_the_worker(pod: EngineProcesses, model: Path):
    with pod.connect("text", "stub") as client:
        events = client.generate([1, 2, 3], temperature=0, max_tokens=12)
    assert [i for event in events for i in event.token_ids] == greedy_output(model, [1, 2, 3], 12)
    with pod.connect("core", "supervisor") as supervisor:
        memory = supervisor.call("status")["memory"]
    assert memory["tensor_parallel_size"] == 2
    assert "worker ready rank=1 size=2" in pod.log("core")
    core = psutil.Process(pod.processes["core"].pid)
    both = [core, *rank_worker_processes(core.pid)]
    assert len(both) == 2
    wait_quiet(both, 0.03)

    check_request_fails_when_killed(pod, both[1])
    assert pod.processes["core"].wait(10) == 70
    assert "rank 1 of 2 ended: killed by SIGKILL" in pod.log("core")


def test_killed_core_leaves_no_worker(pod: EngineProcesses):
    core = psutil.Process(pod.processes["core"].pid)
    (rank,) = rank_worker_processes(core.pid)
    check_request_fails_when_killed(pod, core)
    # The worker is an orphan now, so this process cannot wait for it.
    wait_for(lambda: has_ended(rank), 10)


def test_every_process_excludes_its_model_from_garbage_collections(pod: EngineProcesses, counts: Path):
    """Collections in the middle of a step do not traverse the objects that exist when loading ends."""
    core = pod.processes["core"].pid
    for pid in (pod.processes["text"].pid, core, *(rank.pid for rank in rank_worker_processes(core))):
        os.kill(pid, signal.SIGUSR2)
        wait_for((counts / str(pid)).exists, 10, f"a report of process {pid}")
        assert int((counts / str(pid)).read_text()) > 10_000


def has_ended(process: psutil.Process) -> bool:
    """Return whether the process does not exist or is a zombie."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def check_request_fails_when_killed(pod: EngineProcesses, victim: psutil.Process) -> None:
    """Check that a running request fails with UNAVAILABLE within 20 s after a process is killed."""
    with pod.connect("text", "stub") as client:
        request = client.submit([1, 2, 3], **ENDLESS)
        first = client.receive()
        assert isinstance(first, OutputDeltas) and first.deltas[0].token_ids
        victim.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        assert client.collect([request])[request][-1].error_code == "UNAVAILABLE"
        assert time.monotonic() - killed < 20
