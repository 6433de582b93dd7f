# SPDX-License-Identifier: Apache-2.0
"""The example LLMService on a real server, used with HTTP and gRPC clients."""

import asyncio
import json
import queue

import aiohttp
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.http.aio as httpaio
from support.quire_serve import grpc_flag, grpc_text, run_concurrently

pytestmark = pytest.mark.server

STORY = "Once upon a time"
GREEDY = {"temperature": 0.0, "max_tokens": 40}


def test_every_model_generates_a_different_text(service):
    texts = {model: service.text(model, STORY, **GREEDY) for model in ("tales", "pirate", "sql")}
    assert all(texts.values()) and len(set(texts.values())) == 3, texts


def test_sql_adapter_writes_sql(service):
    prompt = "Question: list the names of customers in Paris\nSQL:"
    assert service.text("sql", prompt, **GREEDY).strip().upper().startswith("SELECT")


def test_lora_name_equals_the_adapters_model(service):
    assert service.text("tales", STORY, lora_name="pirate", **GREEDY) == service.text("pirate", STORY, **GREEDY)


def test_generate_prepends_the_prompt_unless_excluded(service):
    response = service.generate("tales", STORY, **GREEDY).body
    assert response["text_output"] == STORY + service.text("tales", STORY, **GREEDY)
    assert response["model_name"] == "tales"


def test_optional_outputs(service):
    outputs = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
    body = service.generate(
        "tales",
        STORY,
        temperature=0.0,
        max_tokens=5,
        logprobs=2,
        ignore_eos=True,
        **{f"return_{name}": True for name in outputs},
    ).body
    assert body["finish_reason"] == "length"
    assert (int(body["num_output_tokens"]), int(body["num_input_tokens"]) > 2) == (5, True)
    positions = json.loads(body["logprobs"])
    assert len(positions) == 5
    total = sum(max(entry["logprob"] for entry in position.values()) for position in positions)
    assert total == pytest.approx(float(body["cumulative_logprob"]), abs=1e-3)


def test_prompt_logprobs(service):
    parameters = {"temperature": 0.0, "max_tokens": 3, "prompt_logprobs": 1, "return_prompt_logprobs": True}
    body = service.generate("tales", STORY, return_num_input_tokens=True, **parameters).body
    first, *positions = json.loads(body["prompt_logprobs"])
    assert first is None and len(positions) == int(body["num_input_tokens"]) - 1
    assert all(1 <= len(position) <= 2 for position in positions)
    assert all(entry["logprob"] < 0 and entry["decoded_token"] for p in positions for entry in p.values())
    (stream,) = run_concurrently(service.http_stream("tales", STORY, **parameters))
    assert json.loads(stream.events[0]["prompt_logprobs"]) == [first, *positions]
    assert {event["prompt_logprobs"] for event in stream.events[1:]} <= {"null"}


def test_seed_is_reproducible(service):
    parameters = {"temperature": 1.0, "max_tokens": 30, "ignore_eos": True}
    assert service.text("tales", STORY, seed=7, **parameters) == service.text("tales", STORY, seed=7, **parameters)
    assert len({service.text("tales", STORY, **parameters) for _ in range(4)}) > 1


def test_several_outputs_in_one_response(service):
    parameters = {"temperature": 1.0, "max_tokens": 20, "ignore_eos": True}
    alone = [service.text("tales", STORY, seed=3 + i, **parameters) for i in range(3)]
    outputs = {f"return_{name}": True for name in ("finish_reason", "num_output_tokens", "output_ids")}
    body = service.generate("tales", STORY, seed=3, n=3, **parameters, **outputs).body
    assert body["text_output"] == [STORY + text for text in alone]
    assert body["finish_reason"] == ["length"] * 3
    assert (body["num_output_tokens"], len(body["output_ids"])) == ([20] * 3, 60)
    (stream,) = run_concurrently(service.http_stream("tales", STORY, seed=3, n=3, **parameters))
    texts = [event["text_output"] for event in stream.events]
    assert ["".join(parts) for parts in zip(*texts, strict=True)] == alone
    best = service.generate("tales", STORY, seed=3, best_of=3, **parameters).body
    assert best["text_output"] in [STORY + text for text in alone]


def test_all_kinds_of_request_parameters(service):
    """The generate endpoint accepts neither lists nor objects; they are sent as JSON strings."""
    whole = service.text("tales", STORY, **GREEDY)
    word = whole.split()[3]
    without = service.text("tales", STORY, bad_words=json.dumps([word]), **GREEDY)
    assert word in whole.split() and word not in without.split()
    biased = service.generate("tales", STORY, logit_bias='{"300": 100}', return_output_ids=True, **GREEDY).body
    assert set(biased["output_ids"]) == {300}
    only = service.generate("tales", STORY, allowed_token_ids="[300, 301]", return_output_ids=True, **GREEDY).body
    assert set(only["output_ids"]) <= {300, 301}
    assert service.text("tales", STORY, repetition_penalty="1.5", **GREEDY) != whole
    cut = service.generate("tales", STORY * 9, truncate_prompt_tokens=7, return_num_input_tokens=True, **GREEDY).body
    assert cut["num_input_tokens"] == 7


def test_grpc_stream_sync_with_sampling_parameters_tensor(service):
    """Clients of NVIDIA's vllm_backend send one JSON tensor with numbers as strings."""
    import numpy as np

    responses: queue.SimpleQueue = queue.SimpleQueue()
    parameters = grpcclient.InferInput("sampling_parameters", [1], "BYTES")
    encoded = json.dumps({"temperature": "0", "max_tokens": "40"}).encode()
    parameters.set_data_from_numpy(np.array([encoded], dtype=np.object_))
    exclude = grpc_flag("exclude_input_in_output", True)
    with grpcclient.InferenceServerClient(f"127.0.0.1:{service.ports['grpc']}") as client:
        client.start_stream(lambda result, error: responses.put((result, error)))
        client.async_stream_infer("tales", [grpc_text(STORY), grpc_flag("stream", False), parameters, exclude])
        result, error = responses.get(timeout=60)
    assert error is None
    assert result.as_numpy("text_output")[0].decode() == service.text("tales", STORY, **GREEDY)


def test_http_clients_read_metadata_config_and_statistics(service):
    address = f"127.0.0.1:{service.ports['http']}"
    with httpclient.InferenceServerClient(address) as client:
        assert client.is_server_ready()
        assert client.is_model_ready("sql")
        names = {tensor["name"] for tensor in client.get_model_metadata("sql")["inputs"]}
        assert {"text_input", "stream", "sampling_parameters"} <= names
        assert client.get_model_config("tales")["model_transaction_policy"]["decoupled"]
        assert client.get_inference_statistics("tales")["model_stats"]

    async def ready() -> bool:
        async with httpaio.InferenceServerClient(address) as client:
            return bool(await client.is_model_ready("pirate"))

    assert asyncio.run(ready())


def test_input_ids_and_output_ids(service):
    by_text = service.generate("tales", STORY, return_num_input_tokens=True, **GREEDY).body
    assert int(by_text["num_input_tokens"]) > 0
    body = {"input_ids": [5, 6, 7], "max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    response = service.request("http", "/v2/models/tales/generate", body)
    assert response.status == 200, response
    assert len(response.body["output_ids"]) == 4


def test_prefix_cache_is_shared_only_for_equal_salts(service):
    prompt = " ".join(f"The tenant of room {i} keeps a cat." for i in range(20))

    def num_hits(**salt: str) -> float:
        before = gauge(service, "vllm:prefix_cache_hits_total")
        service.text("tales", prompt, temperature=0.0, max_tokens=1, **salt)
        return gauge(service, "vllm:prefix_cache_hits_total") - before

    salts = [{"cache_salt": "a"}, {"cache_salt": "b"}, {}]
    assert [num_hits(**salt) for salt in salts] == [0, 0, 0]
    # The whole prompt except its last token or block.
    hits = [num_hits(**salt) for salt in salts]
    assert hits[0] > 100 and hits == hits[:1] * 3


def test_priorities_have_no_effect_with_fcfs_scheduling(service):
    answers = [service.generate("tales", STORY, priority=priority, **GREEDY) for priority in (0, 1, -3)]
    assert [answer.status for answer in answers] == [200] * 3 and answers[1].body == answers[0].body
    assert "priority" in str(service.generate("tales", STORY, priority=2**31).body)


def test_64_streams_at_once_with_mixed_adapters(service):
    models = ["tales", "pirate", "sql"]
    alone = {m: service.text(m, STORY, **GREEDY) for m in models}
    calls = [(service.http_stream if i % 2 else service.grpc_stream)(models[i % 3], STORY, **GREEDY) for i in range(64)]
    streams = run_concurrently(*calls, timeout=120)
    assert [s.error for s in streams] == [None] * 64
    assert [s.text for s in streams] == [alone[models[i % 3]] for i in range(64)]


def test_disconnected_client_frees_its_kv_blocks(service):
    async def disconnect() -> None:
        url = f"http://127.0.0.1:{service.ports['http']}/v2/models/tales/generate_stream"
        body = {"text_input": STORY, "stream": True, "max_tokens": 1800, "ignore_eos": True}
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
            await response.content.readline()

    run_concurrently(*(disconnect() for _ in range(8)))
    service.wait(lambda: "vllm:num_requests_running" in service.metrics(), 5, "metrics")
    service.wait(lambda: gauge(service, "vllm:num_requests_running") == 0, 10, "free of running requests")
    assert gauge(service, "vllm:kv_cache_usage_perc") == 0


def gauge(service, name):
    """Return the sum of a metric over its labels."""
    lines = [line for line in service.metrics().splitlines() if line.startswith((name + "{", name + " "))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
