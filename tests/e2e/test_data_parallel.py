# SPDX-License-Identifier: Apache-2.0
"""A real service with two cores: the same outputs as with one, one series for each metric that pickers read, and the
death, the hang and the return of a core under load."""

import asyncio
import http.client
import json
import os
import re
import signal
import time

import pytest
from support.engine_processes import IpcClient
from support.quire_serve import StreamedResponse, example_document, run_concurrently, running_service

from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.protocol.messages import GenerateRequest

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

MODELS = ("tales", "pirate", "sql")
PROMPTS = tuple(f"{name} went to the {place} and" for name in ("Tom", "Ann", "Bob") for place in ("sea", "wood"))
GREEDY = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
LONG = {"max_tokens": 1800, "ignore_eos": True, "temperature": 0.8}


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    document = example_document()
    document["spec"]["engine"]["dataParallelSize"] = 2
    with running_service(document, tmp_path_factory.mktemp("cores")) as service:
        yield service


def greedy_outputs(service):
    cases = [(model, prompt) for model in MODELS for prompt in PROMPTS]
    streams = run_concurrently(*(service.http_stream(model, prompt, **GREEDY) for model, prompt in cases))
    assert [stream.error for stream in streams] == [None] * len(cases)
    return {case: stream.text for case, stream in zip(cases, streams, strict=True)}


def series(service, name):
    """Return the values of a metric by its labels."""
    page = service.request("health", "/metrics").body
    return {
        labels: float(value) for labels, value in re.findall(rf"^{re.escape(name)}{{(.*)}} (\S+)$", page, re.MULTILINE)
    }


def dispatched(service):
    """Return the number of requests that each core has got."""
    return [*series(service, "quire_core_requests_dispatched_total").values()]


def test_outputs_are_those_of_one_core_and_each_core_works(own, service):
    assert greedy_outputs(own) == greedy_outputs(service)
    assert min(dispatched(own)) >= 1
    several = own.request("openai", "/v1/completions", {"model": "sql", "prompt": "a b", "n": 3, "temperature": 0})
    assert len({choice["text"] for choice in several.body["choices"]}) == 1
    status = own.status()
    assert {"core-0", "core-1", "text"} <= status["processes"].keys() and "core" not in status["processes"]
    assert {name: core["connected"] for name, core in status["cores"].items()} == {"core-0": True, "core-1": True}
    assert status["degraded"] == ""


def test_a_picker_reads_one_series_for_the_pod(own):
    blocks = own.status()["memory"]["num_blocks"]
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert series(own, f"vllm:{name}").keys() == {'model_name="tales"'}
        assert [*series(own, f"quire_core_{name}")] == [f'engine="{core}",model_name="tales"' for core in (0, 1)]
    (info,) = series(own, "vllm:cache_config_info")
    assert f'num_gpu_blocks="{2 * blocks}"' in info

    async def load():
        _, tasks = await own.open_streams(["tales"] * 6, "x", **LONG)
        running = series(own, "vllm:num_requests_running")['model_name="tales"']
        by_core = series(own, "quire_core_num_requests_running")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return running, sum(by_core.values())

    running, total = asyncio.run(load())
    assert running == 6 == total


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_core_dies_and_the_others_serve_on(own, how):
    """Streams of the victim end with UNAVAILABLE, its requests without output move unseen, and the pod stays ready."""
    victim, other = own.pid("core-1"), own.pid("core-0")

    async def scenario():
        streams, tasks = await own.open_streams(["tales", "pirate"] * 4, "Once", **LONG)
        os.kill(victim, signal.SIGSTOP)  # so that the new requests have no output when it dies
        await asyncio.sleep(0.2)
        queued = [StreamedResponse() for _ in range(12)]
        new = [
            asyncio.create_task(own.http_stream(MODELS[i % 3], PROMPTS[i % 6], queued[i], **GREEDY)) for i in range(12)
        ]
        await asyncio.sleep(0.3)
        if how == signal.SIGKILL:
            os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        await asyncio.wait(new, timeout=60)
        degraded = own.status()["degraded"]
        await asyncio.wait(tasks, timeout=60)
        return streams, queued, degraded, max(stream.ended_at for stream in queued) - killed

    expected = greedy_outputs(own)
    moved = sum(series(own, "quire_core_requests_redispatched_total").values())
    with own.sampled_unreadiness() as reasons:
        streams, queued, degraded, delay_s = asyncio.run(scenario())
        if how == signal.SIGSTOP:
            os.kill(victim, signal.SIGKILL)
        own.wait(lambda: own.status()["degraded"] == "" and own.is_restarted("core-1", victim), 60, "both cores")
    assert reasons == [] and own.pid("core-0") == other
    assert [(q.error, q.text) for q in queued] == [(None, expected[MODELS[i % 3], PROMPTS[i % 6]]) for i in range(12)]
    failed = [stream.error for stream in streams if stream.error]
    assert 0 < len(failed) < len(streams) and all("UNAVAILABLE" in error for error in failed)
    assert sum(series(own, "quire_core_requests_redispatched_total").values()) > moved
    if how == signal.SIGKILL:
        assert degraded == "cores 1 of 2" and delay_s < 10
    # The new core has the adapters before it gets their requests.
    own.wait(lambda: min(series(own, "quire_core_up").values()) == 1, 30, "two connected cores")
    assert greedy_outputs(own) == expected


def test_the_text_process_dies(own):
    """The new one learns from the cores what they have."""
    expected, cores = greedy_outputs(own), [own.pid("core-0"), own.pid("core-1")]
    os.kill(own.pid("text"), signal.SIGKILL)
    own.wait(lambda: own.health()[0] == 503, 5, "not ready")
    own.wait(lambda: own.health()[0] == 200 and min(series(own, "quire_core_up").values()) == 1, 60, "ready")
    assert greedy_outputs(own) == expected and min(dispatched(own)) > 0
    assert [own.pid("core-0"), own.pid("core-1")] == cores


def test_a_client_can_choose_the_core(own):
    before = dispatched(own)
    with IpcClient(own.folder / "run/text.sock", "openai") as client:

        def run(request_id, rank):
            params = SamplingParams(max_tokens=2, temperature=0.0)
            client.send(GenerateRequest(request_id, "tales", "x", None, params, False, data_parallel_rank=rank))
            return client.collect([request_id])[request_id][-1]

        assert [run(i, 1).finish_reason for i in range(1, 6)] == ["length"] * 5
        for wrong in (2, -1):
            refused = run(9, wrong)
            assert refused.error_code == "INVALID_ARG" and "must be from 0 to 1" in refused.error
    assert dispatched(own) == [before[0], before[1] + 5]
    body = json.dumps({"model": "tales", "prompt": "x", "max_tokens": 2})
    for rank, status in (("0", 200), ("2", 400), ("one", 400)):
        connection = http.client.HTTPConnection("127.0.0.1", own.ports["openai"])
        headers = {"Content-Type": "application/json", "X-data-parallel-rank": rank}
        connection.request("POST", "/v1/completions", body, headers)
        assert connection.getresponse().status == status, rank
        connection.close()
    assert dispatched(own) == [before[0] + 1, before[1] + 5]


def test_all_cores_die(own):
    for name in ("core-0", "core-1"):
        os.kill(own.pid(name), signal.SIGKILL)
    own.wait(lambda: own.health()[0] == 503, 5, "not ready")
    body = {"model": "tales", "prompt": "x", "max_tokens": 2}
    assert own.request("openai", "/v1/completions", body).status == 503
    own.wait(lambda: own.health()[0] == 200, 60, "ready")
    own.wait(lambda: own.request("openai", "/v1/completions", body | {"model": "sql"}).status == 200, 30, "the adapter")
