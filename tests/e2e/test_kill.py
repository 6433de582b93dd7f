# SPDX-License-Identifier: Apache-2.0
"""SIGKILL of every process under load: streams end with an error, the service recovers, no process is left behind."""

import asyncio
import concurrent.futures
import os
import signal
import threading
import time

import pytest
from support.pod_cluster import ServiceEndpoint
from support.quire_serve import StreamedResponse, example_document, run_concurrently, running_service
from support.steady_clients import KINDS, read_long_stream
from support.thread_workers import rank_worker_processes

pytestmark = [pytest.mark.server, pytest.mark.timeout(240)]

STORY = "Once upon a time"
MODELS = ("tales", "pirate", "sql")
LONG = {"max_tokens": 1800, "ignore_eos": True, "temperature": 0.8}


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    with running_service(example_document(), tmp_path_factory.mktemp("kill")) as service:
        yield service


@pytest.mark.parametrize("victim", ["core", "text", "server", "stub"])
def test_kill(own, victim):
    """Every open stream ends with an error within 2 s, readiness drops, and the service recovers with its adapters."""
    before = {name: own.pid(name) for name in ("core", "text", "server")}
    digests = {adapter["name"]: adapter["digest"] for adapter in own.status()["adapters"]}
    target = own.stub("pirate").pid if victim == "stub" else before[victim]
    models = ["pirate"] * 2 if victim == "stub" else [*MODELS, *MODELS, *MODELS]

    async def scenario() -> tuple[list[StreamedResponse], float]:
        streams, tasks = await own.open_streams(models, STORY, **LONG)
        killed = time.monotonic()
        os.kill(target, signal.SIGKILL)
        await asyncio.wait(tasks, timeout=20)
        return streams, killed

    with own.sampled_unreadiness() as reasons:
        streams, killed = asyncio.run(scenario())
        assert all(s.error for s in streams), [s.error for s in streams]
        delay_s = max(s.ended_at for s in streams) - killed
        assert delay_s < 2.0, delay_s
        recovery_s = own.wait(lambda: serves_all_models(own), 60, "serving all three models again")
    print(f"\n{victim}: streams ended within {delay_s:.2f} s, all models back {recovery_s:.1f} s later")
    assert reasons, "the health port never reported not ready"
    own.wait(lambda: own.health()[0] == 200, 30, "ready")
    status = own.status()
    died = "server" if victim == "stub" else victim
    assert {name for name in before if before[name] != own.pid(name)} == {died}
    assert status["processes"][died]["restarts"] >= 1
    assert {adapter["name"]: adapter["digest"] for adapter in status["adapters"]} == digests


def test_tensor_parallel_rank_is_killed_and_sigterm_drains(tmp_path):
    """The core ends with a killed rank, and the supervisor restarts both; SIGTERM then lets an open request end."""
    document = example_document()
    document["spec"]["engine"]["tensorParallelSize"] = 2
    with running_service(document, tmp_path) as service:
        core = service.pid("core")
        (rank,) = rank_worker_processes(core)

        async def killed_rank() -> StreamedResponse:
            (stream,), (task,) = await service.open_streams(["pirate"], STORY, **LONG)
            rank.kill()
            await asyncio.wait_for(task, 20)
            return stream

        assert "UNAVAILABLE" in str(asyncio.run(killed_rank()).error)
        service.wait(lambda: serves_all_models(service), 90, "serving all three models again")
        assert service.pid("core") != core and not rank.is_running()

        stream = StreamedResponse()

        async def drained() -> None:
            parameters = LONG | {"max_tokens": 400, "return_finish_reason": True}
            task = asyncio.create_task(service.http_stream("tales", STORY, stream, **parameters))
            while not stream.pieces:
                await asyncio.sleep(0.02)
            service.child_processes()
            service.process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(task, 40)

        asyncio.run(drained())
        assert (stream.error, stream.events[-1]["finish_reason"]) == (None, "length")
        assert service.process.wait(40) == 0


def test_lost_pipeline_stage_ends_requests_and_the_service_recovers(tmp_path):
    """A stage that is killed or stopped ends the open requests within 15 s, and the supervisor starts all stages."""
    with running_service(example_document(), tmp_path, "--pipeline-parallel-size", "2") as service:
        for number in (signal.SIGKILL, signal.SIGSTOP):
            core = service.pid("core")
            (rank,) = rank_worker_processes(core)
            assert service.status()["memory"]["pipeline_parallel_size"] == 2

            async def lost_stage(rank=rank, number=number) -> tuple[list[StreamedResponse], float]:
                streams, tasks = await service.open_streams([*MODELS], STORY, **LONG)
                rank.send_signal(number)
                lost = time.monotonic()
                await asyncio.wait(tasks, timeout=20)
                return streams, max(stream.ended_at for stream in streams) - lost

            streams, delay_s = asyncio.run(lost_stage())
            assert all("UNAVAILABLE" in str(stream.error) for stream in streams), [s.error for s in streams]
            assert delay_s < 15.0, delay_s
            print(f"\n{number.name}: streams ended within {delay_s:.2f} s")
            service.wait(lambda: serves_all_models(service), 90, "serving all three models again")
            assert service.pid("core") != core and not rank.is_running()


def test_serves_after_all_kills(own):
    streams = run_concurrently(*(own.http_stream("pirate", STORY, max_tokens=20) for _ in range(8)))
    assert [s.error for s in streams] == [None] * 8


def test_killed_supervisor_ends_each_request_with_one_error_and_leaves_no_process(own):
    """The last test, because it ends the service."""
    endpoint, started = ServiceEndpoint("127.0.0.1", own.ports), {kind: threading.Event() for kind in KINDS}
    with concurrent.futures.ThreadPoolExecutor() as threads:
        streams = {kind: threads.submit(read_long_stream, endpoint, kind, started[kind]) for kind in KINDS}
        own.wait(lambda: all(event.is_set() for event in started.values()), 20, "open streams")
        own.kill()
        errors = {kind: stream.result(timeout=10) for kind, stream in streams.items()}
    assert {kind: len(found) for kind, found in errors.items()} == dict.fromkeys(KINDS, 1), errors
    own.assert_nothing_left()


def serves_all_models(service):
    """Return True if all three models generate."""
    return all(service.generate(m, STORY, max_tokens=2).status == 200 for m in MODELS)
