# SPDX-License-Identifier: Apache-2.0
"""The core process with a second rank: it serves, is idle when idle, and both end when one does."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.engine_processes import EngineProcesses, wait_for, wait_quiet
from support.thread_workers import tp_worker_processes
from support.tiny_checkpoints import greedy_output, make_llama

from quire_spec.protocol.messages import OutputDeltas

ENDLESS = {"temperature": 0, "max_tokens": 1000, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def pod(model: Path, tmp_path: Path) -> Iterator[EngineProcesses]:
    config = {"model": str(model), "dtype": "float32", "kv_cache_memory_bytes": 8 * 2**20, "tensor_parallel_size": 2}
    # As on GPUs: a rank dies with two steps in flight.
    config["async_scheduling"] = True
    with EngineProcesses(tmp_path, **config) as made:
        yield made.start("text", "core")


def test_it_serves_takes_no_processor_time_when_idle_and_ends_with_a_rank(pod: EngineProcesses, model: Path):
    with pod.connect("text", "frontend") as client:
        events = client.generate([1, 2, 3], temperature=0, max_tokens=12)
    assert [i for event in events for i in event.token_ids] == greedy_output(model, [1, 2, 3], 12)
    with pod.connect("core", "supervisor") as supervisor:
        memory = supervisor.call("status")["memory"]
    assert memory["tensor_parallel_size"] == 2
    assert "tensor-parallel worker ready rank=1 size=2" in pod.log("core")
    core = psutil.Process(pod.processes["core"].pid)
    both = [core, *tp_worker_processes(core.pid)]
    assert len(both) == 2
    wait_quiet(both, 0.03)

    open_request_ends(pod, both[1])
    assert pod.processes["core"].wait(10) == 70
    assert "rank 1 of 2 ended: killed by SIGKILL" in pod.log("core")


def test_a_killed_core_leaves_no_rank(pod: EngineProcesses):
    core = psutil.Process(pod.processes["core"].pid)
    (rank,) = tp_worker_processes(core.pid)
    open_request_ends(pod, core)
    # An orphan now, for which nobody here can wait.
    wait_for(lambda: has_ended(rank), 10)


def has_ended(process: psutil.Process) -> bool:
    """Whether it is gone or a zombie."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def open_request_ends(pod: EngineProcesses, victim: psutil.Process) -> None:
    """A request that runs when a process is killed gets UNAVAILABLE, and soon."""
    with pod.connect("text", "frontend") as client:
        request = client.submit([1, 2, 3], **ENDLESS)
        first = client.receive()
        assert isinstance(first, OutputDeltas) and first.deltas[0].token_ids
        victim.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        assert client.collect([request])[request][-1].error_code == "UNAVAILABLE"
        assert time.monotonic() - killed < 5
