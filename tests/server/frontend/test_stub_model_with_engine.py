# SPDX-License-Identifier: Apache-2.0
"""The frontend on a real server with real text and core processes, compared with transformers on a tiny model."""

import asyncio
import json
import time

import pytest
from support.engine_processes import EngineProcesses
from support.frontend_harness import BASE, FrontendHarness
from support.quire_serve import StreamedResponse, run_concurrently
from support.tiny_checkpoints import greedy_output, make_llama, make_llama_adapter
from transformers import AutoTokenizer

pytestmark = pytest.mark.server

PROMPT = "the quick brown fox"
GREEDY = {"temperature": 0.0, "max_tokens": 24}
LONG = {"max_tokens": 100_000, "temperature": 1.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("llama"), max_positions=131072)


@pytest.fixture(scope="module")
def pod(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    config = {"model": str(model), "dtype": "float32", "kv_cache_memory_bytes": 96 * 2**20, "enable_lora": True}
    with EngineProcesses(folder, **config, max_loras=2) as pod:
        pod.start("core", "text")
        adapter = make_llama_adapter(model, folder / "adapter", seed=1)
        with pod.connect("core", "supervisor") as core, pod.connect("text", "supervisor") as text:
            core.call("load_adapter", digest="sha256:1", path=str(adapter), pinned=False)
            text.call("set_adapters", adapters={"sql": "sha256:1"})
        yield pod


@pytest.fixture(scope="module")
def running(pod):
    server = FrontendHarness(pod.folder)
    try:
        server.start()
        server.add_model("sql")
        yield server
        server.stop()
    finally:
        server.terminate()


@pytest.fixture(autouse=True)
def engine_becomes_idle(pod, running):
    yield
    pod.wait_idle()


@pytest.fixture(scope="module")
def expected(model):
    """Return the token ids and text that transformers generates."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = greedy_output(model, tokenizer(PROMPT)["input_ids"], 24)
    return ids, tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_generate_matches_transformers(running, expected):
    assert running.generate(BASE, PROMPT, **GREEDY).body["text_output"] == PROMPT + expected[1]


def test_streams_match_transformers(running, expected):
    http, grpc = run_concurrently(
        running.http_stream(BASE, PROMPT, **GREEDY), running.grpc_stream(BASE, PROMPT, **GREEDY)
    )
    assert (http.text, grpc.text, http.error, grpc.error) == (expected[1], expected[1], None, None)


def test_ids_and_counts(running, expected, model):
    ids = AutoTokenizer.from_pretrained(model)(PROMPT)["input_ids"]
    outputs = {f"return_{name}": True for name in ("num_input_tokens", "num_output_tokens", "finish_reason")}
    body = {"input_ids": ids, **GREEDY, **outputs}
    response = running.request("http", f"/v2/models/{BASE}/generate", body).body
    assert (response["output_ids"], response["text_output"]) == expected
    assert (response["num_input_tokens"], response["num_output_tokens"], response["finish_reason"]) == (
        len(ids),
        24,
        "length",
    )


def test_logprobs_and_their_sum(running):
    outputs = {"return_logprobs": True, "return_cumulative_logprob": True}
    response = running.generate(BASE, PROMPT, logprobs=2, **GREEDY, **outputs).body
    positions = json.loads(response["logprobs"])
    assert [len(position) for position in positions] == [2] * 24
    best = [max(entry["logprob"] for entry in position.values()) for position in positions]
    assert response["cumulative_logprob"] == pytest.approx(sum(best), abs=1e-3)
    alone = running.generate(BASE, PROMPT, return_cumulative_logprob=True, return_logprobs=True, **GREEDY).body
    assert alone["cumulative_logprob"] == pytest.approx(sum(best), abs=1e-3)
    assert alone["logprobs"] == "null"


def test_adapter_by_model_and_by_lora_name(running, expected):
    by_model = running.text("sql", PROMPT, **GREEDY)
    assert by_model == running.text(BASE, PROMPT, lora_name="sql", **GREEDY)
    assert by_model != expected[1]
    response = running.generate(BASE, PROMPT, lora_name="unknown", **GREEDY)
    assert (response.status, response.body["error"].startswith("NOT_FOUND: ")) == (400, True)
    assert "sql" in response.body["error"]


def test_rejects_prompt_longer_than_the_context(running):
    response = running.generate(BASE, "x" * 200_000)
    assert (response.status, response.body["error"].startswith("INVALID_ARG: ")) == (400, True)


def test_disconnected_clients_free_their_kv_blocks(running, pod):
    """The fixture waits until the engine is idle."""

    async def disconnect() -> None:
        streams = [StreamedResponse() for _ in range(8)]
        calls = [running.http_stream, running.grpc_stream]
        tasks = [
            asyncio.create_task(calls[i % 2]((BASE, "sql")[i // 2 % 2], PROMPT, stream, **LONG))
            for i, stream in enumerate(streams)
        ]
        while not all(stream.pieces for stream in streams):
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    asyncio.run(disconnect())
    assert pod.core_stats()["num_blocks"] > 0


@pytest.mark.parametrize("victim", ["text", "core"])
def test_killed_process_ends_every_stream_and_service_recovers(running, pod, expected, victim):
    streams = [StreamedResponse() for _ in range(8)]

    async def scenario() -> float:
        calls = [running.http_stream, running.grpc_stream]
        tasks = [asyncio.create_task(calls[i % 2](BASE, PROMPT, stream, **LONG)) for i, stream in enumerate(streams)]
        while not all(stream.pieces for stream in streams):
            await asyncio.sleep(0.01)
        pod.kill(victim)
        killed = time.monotonic()
        await asyncio.wait(tasks, timeout=20)
        return killed

    killed = asyncio.run(scenario())
    assert all("UNAVAILABLE" in (stream.error or "") for stream in streams), [s.error for s in streams]
    assert max(stream.ended_at for stream in streams) - killed < 2
    response = running.generate(BASE, PROMPT)
    assert (response.status, response.body["error"].startswith("UNAVAILABLE: ")) == (400, True)
    pod.start(victim)
    pod.wait_core_connected(True)
    assert running.text(BASE, PROMPT, **GREEDY) == expected[1]
