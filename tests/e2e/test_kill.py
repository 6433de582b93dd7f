# SPDX-License-Identifier: Apache-2.0
"""SIGKILL of every process under load: streams end with an error, the service recovers, no process is left behind."""

import asyncio
import contextlib
import os
import signal
import threading
import time

import pytest
from support.quire_serve import QuireServeProcess, StreamedResponse, example_document, run_concurrently, running_service
from support.thread_workers import tp_worker_processes

pytestmark = [pytest.mark.server, pytest.mark.timeout(240)]

STORY = "Once upon a time"
LONG = {"max_tokens": 1800, "ignore_eos": True, "temperature": 0.8}


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    with running_service(example_document(), tmp_path_factory.mktemp("kill")) as service:
        yield service


@pytest.mark.parametrize("victim", ["core", "text", "server", "stub"])
def test_kill(own, victim):
    """Every open stream ends with an error within 2 s, readiness drops, and the service recovers with its adapters."""
    pid = own.stub("pirate").pid if victim == "stub" else own.pid(victim)
    models = ["tales", "pirate", "sql"]
    streams = [StreamedResponse() for _ in range(9)]
    calls = [own.http_stream, own.grpc_stream, own.http_stream]
    sampler = ReadinessSampler(own)

    async def scenario() -> float:
        tasks = [
            asyncio.create_task(calls[i // 3](models[i % 3], STORY, streamed_response=stream, **LONG))
            for i, stream in enumerate(streams)
        ]
        while not all(s.pieces for s in streams):
            await asyncio.sleep(0.02)
            assert not any(t.done() for t in tasks), [s.error for s in streams]
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        await asyncio.wait(tasks, timeout=20)
        return killed

    with sampler:
        killed = asyncio.run(scenario())
        affected = streams if victim != "stub" else [s for i, s in enumerate(streams) if i % 3 == 1]
        delays_s = [round(s.ended_at - killed, 2) for s in affected]
        assert all(s.error for s in affected), [s.error for s in affected]
        assert max(delays_s) < 2.0, delays_s
        recovery_s = own.wait(lambda: serves_all_models(own), 60, "serving all three models again")
    print(f"\n{victim}: streams ended within {max(delays_s):.2f} s, all models back {recovery_s:.1f} s later")
    assert sampler.reasons, "the health port never reported not ready"
    own.wait(lambda: own.health()[0] == 200, 30, "ready")
    assert own.status()["processes"]["core" if victim == "core" else "server"]["state"] == "Ready"


def test_kill_a_tensor_parallel_rank(tmp_path):
    """The core ends with it, and the supervisor restarts both with their adapters."""
    document = example_document()
    document["spec"]["engine"]["tensorParallelSize"] = 2
    with running_service(document, tmp_path) as service:
        core = service.pid("core")
        (rank,) = tp_worker_processes(core)
        stream = StreamedResponse()

        async def scenario() -> None:
            task = asyncio.create_task(service.http_stream("pirate", STORY, streamed_response=stream, **LONG))
            while not stream.pieces:
                await asyncio.sleep(0.02)
            rank.kill()
            await asyncio.wait_for(task, 20)

        asyncio.run(scenario())
        assert stream.error is not None and "UNAVAILABLE" in stream.error
        service.wait(lambda: serves_all_models(service), 90, "serving all three models again")
        assert service.pid("core") != core and not rank.is_running()


def test_kill_of_idle_stub_reloads_only_its_model(own):
    server = own.pid("server")
    own.stub("sql").kill()
    own.wait(lambda: serves_all_models(own), 20, "serving again")
    assert own.pid("server") == server


def test_killed_supervisor_leaves_no_process(tmp_path):
    with started_service(tmp_path) as service:
        service.child_processes()
        service.kill()
        service.assert_nothing_left()


def test_sigterm_drains_open_requests(tmp_path):
    with started_service(tmp_path) as service:
        stream = StreamedResponse()

        async def scenario() -> None:
            task = asyncio.create_task(
                service.http_stream(
                    "tales", STORY, streamed_response=stream, max_tokens=400, ignore_eos=True, return_finish_reason=True
                )
            )
            while not stream.pieces:
                await asyncio.sleep(0.02)
            service.child_processes()
            service.process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(task, 40)

        asyncio.run(scenario())
        assert stream.error is None
        assert stream.events[-1]["finish_reason"] == "length"
        assert service.process.wait(40) == 0
        service.assert_nothing_left()


@contextlib.contextmanager
def started_service(folder):
    """Start a service and wait until it is ready; kill it at the end if it still runs."""
    service = QuireServeProcess(example_document(), folder)
    try:
        service.wait_ready()
        yield service
    finally:
        if service.process.poll() is None:
            service.kill()
            service.assert_nothing_left()
        service.clean_up()


class ReadinessSampler:
    """Samples the reasons of non-readiness in a thread."""

    def __init__(self, service):
        self.service, self.reasons, self._stop = service, [], threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _run(self):
        while not self._stop.wait(0.02):
            status, body = self.service.health()
            if status != 200:
                self.reasons.append(body.get("reason"))


def serves_all_models(service):
    """Return True if all three models generate."""
    return all(service.generate(m, STORY, max_tokens=2).status == 200 for m in ("tales", "pirate", "sql"))


def test_serves_after_all_kills(own):
    assert [
        s.error for s in run_concurrently(*(own.http_stream("pirate", STORY, max_tokens=20) for _ in range(8)))
    ] == [None] * 8
