# SPDX-License-Identifier: Apache-2.0
"""The text and core processes over real sockets: outputs, streams, cancellation, invalid requests, slow readers."""

import os
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.engine_processes import (
    LONG_CONTEXT,
    EngineProcesses,
    IpcClient,
    engine_config,
    events_of,
    first_event,
    text_of,
    wait_for,
)
from support.tiny_checkpoints import greedy_output, make_llama, make_llama_adapter
from transformers import AutoTokenizer

from quire_engine.text.process import load_tokenizer
from quire_engine.text.result_coalescer import RESPONSES_PER_S_PER_CORE
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import ConfigError, InvalidArgument
from quire_spec.protocol.framing import encode_frame
from quire_spec.protocol.messages import CancelRequests, GenerateRequest, Hello, OutputDelta, OutputDeltas

PROMPTS = ["the quick brown fox", "Grüße aus Köln", "naïve café\n", "你好", "a", "over the lazy dog, then "]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"), max_positions=LONG_CONTEXT)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, tuple[list[int], str]]:
    """Token ids and text of the greedy output of 24 tokens, by prompt."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    outputs = {}
    for prompt in PROMPTS:
        ids = greedy_output(model, tokenizer(prompt)["input_ids"], 24)
        outputs[prompt] = ids, tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return outputs


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcesses]:
    # All other pods of the tests run without async scheduling, which is the default on a CPU.
    settings = {"enable_lora": True, "max_loras": 2, "async_scheduling": True}
    with EngineProcesses(tmp_path_factory.mktemp("run"), **engine_config(model, **settings)) as pod:
        yield pod.start("core", "text")


@pytest.fixture
def pod(shared: EngineProcesses) -> Iterator[EngineProcesses]:
    """Both processes. Checks after each test that the engine is idle and that nothing failed."""
    yield shared
    shared.wait_idle()
    assert "Traceback" not in shared.log("text") + shared.log("core")


@pytest.fixture
def client(pod: EngineProcesses) -> Iterator[IpcClient]:
    with pod.connect("text", "stub") as peer:
        yield peer


@pytest.mark.parametrize(("stream", "as_ids"), [(True, False), (False, True)])
def test_greedy_text_equals_transformers(
    client: IpcClient, model: Path, expected: dict[str, tuple[list[int], str]], stream: bool, as_ids: bool
):
    tokenizer, lengths = AutoTokenizer.from_pretrained(model), []
    for prompt, (ids, text) in expected.items():
        prompt_ids = tokenizer(prompt)["input_ids"]
        events = client.generate(prompt_ids if as_ids else prompt, stream=stream, temperature=0, max_tokens=24)
        assert text_of(events) == text
        assert [i for event in events for i in event.token_ids] == ids
        assert (events[-1].finish_reason, events[-1].num_output_tokens) == ("length", 24)
        assert events[-1].num_input_tokens == len(prompt_ids)
        lengths.append(len(events))
    # Tokens that arrive while the text process is busy share a delta.
    assert 2 < max(lengths) <= 24 if stream else set(lengths) == {1}


def test_a_model_without_a_tokenizer_starts_only_with_skip_tokenizer_init(model: Path, tmp_path: Path):
    config = EngineConfig(model=str(tmp_path))
    with pytest.raises(ConfigError, match=r"has no tokenizer \(tokenizer\.json.*set skip_tokenizer_init"):
        load_tokenizer(tmp_path, config)
    skipping = EngineConfig(model=str(model), skip_tokenizer_init=True)
    assert load_tokenizer(model, skipping) is None and load_tokenizer(model, EngineConfig(model=str(model)))


def test_64_concurrent_streams_get_their_own_text(client: IpcClient, expected: dict[str, tuple[list[int], str]]):
    started = time.monotonic()
    prompts = {client.submit(p, temperature=0, max_tokens=24): p for p in PROMPTS * 10 + PROMPTS[:4]}
    assert len(prompts) == 64
    events_by_request = client.collect(prompts)
    # The throttle does not delay the first and the last delta of a stream, and some before its first delay.
    max_rate = RESPONSES_PER_S_PER_CORE * len(os.sched_getaffinity(0))
    assert sum(map(len, events_by_request.values())) <= max_rate * (time.monotonic() - started) + 3 * 64
    for request, events in events_by_request.items():
        assert text_of(events) == expected[prompts[request]][1]
        counts = [event.num_output_tokens for event in events]
        assert counts == sorted(counts) and counts[-1] == 24


def test_stop_string_ends_the_request_in_both_processes(
    pod: EngineProcesses, client: IpcClient, expected: dict[str, tuple[list[int], str]]
):
    text = expected["a"][1]
    stop = text[10:13]
    cut = text.index(stop)
    for include in (False, True):
        events = client.generate("a", temperature=0, max_tokens=10_000, stop=[stop], include_stop_str_in_output=include)
        assert text_of(events) == text[: cut + 3 if include else cut]
        assert events[-1].finish_reason == "stop"
    pod.wait_idle()


@pytest.mark.parametrize("as_ids", [True, False])
def test_text_parameters_reach_the_core_as_tokens(client: IpcClient, model: Path, as_ids: bool):
    tokenizer = AutoTokenizer.from_pretrained(model)
    text, long = "the lazy dog ", "the quick brown fox, then " * 200
    ids = tokenizer(text)["input_ids"]
    events = client.generate(ids if as_ids else text, temperature=0, max_tokens=4, logit_bias={"300": 90})
    assert [i for event in events for i in event.token_ids] == [300] * 4
    # A bad word is never sampled, not even with a bias. The long word is tokenized in a thread.
    token = tokenizer("the", add_special_tokens=False)["input_ids"]
    assert len(token) == 1
    params = {"temperature": 0, "max_tokens": 4, "logit_bias": {str(token[0]): 90}, "bad_words": ["the", "fox " * 250]}
    events = client.generate(ids if as_ids else text, **params)
    assert token[0] not in [i for event in events for i in event.token_ids]
    events = client.generate(tokenizer(long)["input_ids"] if as_ids else long, max_tokens=2, truncate_prompt_tokens=9)
    assert events[-1].num_input_tokens == 9
    (event,) = client.generate(ids, stream=False, max_tokens=2, detokenize=False)
    assert (event.text, len(event.token_ids)) == ("", 2)


def test_output_i_of_n_has_seed_plus_i(client: IpcClient):
    params = {"temperature": 1.5, "max_tokens": 12, "logprobs": 0, "ignore_eos": True}
    alone = [client.generate("the fox", seed=7 + i, **params) for i in range(3)]
    events = client.generate("the fox", seed=7, n=3, **params)
    texts = [text_of([event for event in events if event.index == index]) for index in range(3)]
    assert texts == [text_of(single) for single in alone] and len(set(texts)) == 3
    sums = sorted((single[-1].cumulative_logprob for single in alone), reverse=True)
    best = client.generate("the fox", stream=False, seed=7, n=2, best_of=3, **params)
    assert [event.cumulative_logprob for event in best] == pytest.approx(sums[:2], abs=1e-4)


@pytest.mark.parametrize("stream", [True, False])
def test_beam_search_returns_each_output_in_one_part(client: IpcClient, stream: bool):
    params = {"use_beam_search": True, "n": 2, "best_of": 4, "max_tokens": 8, "ignore_eos": True}
    events = client.generate("the fox", stream=stream, **params)
    assert [(event.index, len(event.token_ids), event.other_outputs_pending) for event in events] == [
        (0, 8, True),
        (1, 8, False),
    ]
    sums = [event.cumulative_logprob for event in events]
    assert sums == sorted(sums, reverse=True) and len({event.text for event in events}) == 2
    # A stop string in the best output ends its beam, and is found by both processes.
    stop = events[0].text[2:4]
    stopped = client.generate("the fox", stream=stream, stop=[stop], **params)
    assert {event.stop_reason for event in stopped if len(event.token_ids) < 8} <= {stop}
    assert not any(stop in event.text for event in stopped)


def test_logprobs_are_those_of_the_sampled_and_the_most_likely_tokens(client: IpcClient):
    streamed = client.generate("fox", temperature=0, max_tokens=6, logprobs=2)
    whole = client.generate("fox", temperature=0, max_tokens=6, logprobs=2, stream=False)
    positions = [p for event in streamed for p in event.logprobs or []]
    ids = [i for event in streamed for i in event.token_ids]
    assert whole[0].logprobs is not None and len(whole[0].logprobs) == len(positions) == 6
    total = 0.0
    for token_id, position, other in zip(ids, positions, whole[0].logprobs, strict=True):
        assert [entry.token_id for entry in position] == [entry.token_id for entry in other]
        # The greedy token is the most likely one, so there are two entries and not three.
        assert len(position) == 2 and position[0].token_id == token_id
        assert all(isinstance(entry.text, str) and entry.token_bytes is None for entry in position)
        assert position[0].rank == 1
        total += position[0].logprob
    assert streamed[-1].cumulative_logprob == pytest.approx(total, abs=1e-5)
    assert client.generate("fox", max_tokens=2)[-1].logprobs is None


def test_cancel_frees_blocks_and_ends_events(pod: EngineProcesses, client: IpcClient):
    request = client.submit("fox", n=5, max_tokens=100_000, ignore_eos=True)
    wait_for(lambda: pod.core_stats()["num_running"] == 5)
    client.send(CancelRequests([request, 999_999]))
    pod.wait_idle()
    # Deltas that were already sent can still arrive; after them only the next request has deltas.
    other = client.submit("fox", temperature=0, max_tokens=4)
    seen: list[OutputDelta] = []
    while not (seen and seen[-1].id == other and seen[-1].final):
        message = client.receive()
        assert isinstance(message, OutputDeltas)
        seen += message.deltas
    late = [event for event in seen if event.id == request]
    assert not any(event.final for event in late)
    assert seen.index(next(e for e in seen if e.id == other)) >= len(late)


def test_requests_end_when_their_frontend_disconnects(pod: EngineProcesses):
    with pod.connect("text", "stub", "sql") as frontend:
        for _ in range(3):
            frontend.submit("fox", max_tokens=100_000)
        wait_for(lambda: pod.core_stats()["num_running"] == 3)
    pod.wait_idle()
    assert f"frontend disconnected role=stub model=sql pid={os.getpid()} num_open=3" in pod.log("text")


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("fox", {"temperature": -1}, "temperature"),
        ("fox", {"n": 2, "best_of": 3}, "'best_of': the best 2 of 3 outputs are only known at the end"),
        ("fox", {"stop_token_ids": [384]}, "'stop_token_ids': 384"),
        ("fox", {"use_beam_search": True, "n": 128}, "'n': 128 beams are more than max_num_seqs"),
        ("fox", {"bad_words": [" "]}, "'bad_words'"),
        ([5] * LONG_CONTEXT, {}, f"{LONG_CONTEXT} tokens"),
        ("xy " * 150_000, {}, "tokens and max_model_len"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_invalid_request_fails_alone(client: IpcClient, prompt: object, params: dict[str, object], message: str):
    good = client.submit("fox", temperature=0, max_tokens=8)
    wrong = client.submit(prompt, **params)  # type: ignore[arg-type]
    deltas = client.collect([good, wrong])
    (rejected,) = deltas[wrong]
    assert rejected.error_code == "INVALID_ARG" and message in rejected.error
    assert deltas[good][-1].finish_reason == "length"


def test_adapters_are_served_by_name(pod: EngineProcesses, client: IpcClient, model: Path, tmp_path: Path):
    with pod.connect("core", "supervisor") as core, pod.connect("text", "supervisor") as supervisor:
        for i in range(2):
            folder = make_llama_adapter(model, tmp_path / str(i), seed=i)
            core.call("load_adapter", digest=f"sha256:{i}", path=str(folder))
        supervisor.call("set_adapters", adapters={"sql": "sha256:0", "chat": "sha256:1", "lost": "sha256:2"})
        requests = {
            name: client.submit("fox", model=name, temperature=0, max_tokens=16) for name in ("base", "sql", "chat")
        }
        deltas = client.collect(requests.values())
        texts = {name: text_of(deltas[request]) for name, request in requests.items()}
        assert len(set(texts.values())) == 3
        assert text_of(client.generate("fox", model="sql", temperature=0, max_tokens=16)) == texts["sql"]
        assert client.generate("fox", model="lost")[0].error_code == "UNAVAILABLE"

        running = client.submit("fox", model="sql", max_tokens=100_000)
        first_event(client, running)
        exposed = supervisor.call("metrics")
        assert 'lora_requests_info{max_lora="2",running_lora_adapters="chat,sql",waiting_lora_adapters=""}' in exposed
        assert 'quire_adapter_requests_total{adapter="sql",model_name="base"} 3.0' in exposed
        assert 'quire_adapter_slot_residency{adapter="sql",model_name="base"} 1.0' in exposed
        # A running request keeps its adapter when the name gets another digest.
        supervisor.call("set_adapters", adapters={"sql": "sha256:1"})
        client.send(CancelRequests([running]))
        assert (
            text_of(events_of(client, client.submit("fox", model="sql", temperature=0, max_tokens=16))) == texts["chat"]
        )
        supervisor.call("set_adapters", adapters={})
        assert events_of(client, client.submit("fox", model="sql"))[0].error_code == "NOT_FOUND"
        for i in range(2):
            core.call("unload_adapter", digest=f"sha256:{i}")


def test_prompt_of_50_mb_is_rejected_at_once_and_stalls_no_stream(pod: EngineProcesses, client: IpcClient):
    frame = encode_frame(GenerateRequest(77, "base", "word " * 10_000_000, None, SamplingParams(), True))
    with pod.connect("text", "stub") as other:
        stream = other.submit("fox", temperature=0, max_tokens=100_000)
        first_event(other, stream)
        start = time.monotonic()
        client.socket.sendall(frame)
        event = first_event(client, 77)
        assert time.monotonic() - start < 5.0
        assert event.error_code == "INVALID_ARG" and "50000" in event.error and "max_model_len" in event.error
        assert longest_gap(other, 0.2) < 1.0
    assert psutil.Process(pod.processes["text"].pid).memory_info().rss < 300 * 2**20
    assert text_of(client.generate("fox", max_tokens=2)) is not None


def longest_gap(client: IpcClient, for_s: float, until: Future[Any] | None = None) -> float:
    """Return the longest time without a delta on `client`, within `for_s` seconds and until `until` is done.

    Deltas that wait in the socket are included.
    """
    last = start = time.monotonic()
    longest = 0.0
    while last - start < for_s or (until is not None and not until.done()):
        client.receive()
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    return longest


def test_tokenizing_a_long_prompt_does_not_stall_streams(pod: EngineProcesses, client: IpcClient):
    with pod.connect("text", "stub") as other:
        stream = other.submit("fox", temperature=0, max_tokens=100_000)
        first_event(other, stream)
        with ThreadPoolExecutor(1) as pool:
            # Each prompt takes about 0.5 s to tokenize and is then rejected for its number of tokens.
            start = time.monotonic()
            sent = [client.submit("the quick brown fox " * 80_000) for _ in range(2)]
            rejected = pool.submit(client.collect, sent)
            longest = longest_gap(other, 0.5, rejected)
            elapsed_s = time.monotonic() - start
        # Tokenizing on the event loop would stall the stream for half of the time.
        assert longest < max(0.25, elapsed_s / 3), (longest, elapsed_s)
        assert all("tokens and max_model_len" in e[0].error for e in rejected.result().values())


def test_slow_reader_is_disconnected_without_effect_on_others(pod: EngineProcesses, client: IpcClient):
    with pod.connect("text", "supervisor") as supervisor, pod.connect("text", "stub", "slow") as slow:
        before = metric(supervisor, "quire_slow_readers_total")
        for _ in range(16):
            slow.submit("fox", temperature=0, max_tokens=100_000, logprobs=20)
        worst = 0.0
        while metric(supervisor, "quire_slow_readers_total") == before:
            start = time.monotonic()
            assert text_of(client.generate("fox", temperature=0, max_tokens=4)) is not None
            worst = max(worst, time.monotonic() - start)
        assert worst < 5.0
        with pytest.raises(EOFError):
            while True:
                slow.receive()
        pod.wait_idle()
        assert "closed the connection of a frontend that does not read model=slow" in pod.log("text")
        assert re.search("frontend disconnected role=stub model=slow .* num_open=16", pod.log("text"))


def metric(supervisor: IpcClient, name: str) -> float:
    families = text_string_to_metric_families(supervisor.call("metrics"))
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


def test_metrics_and_status_while_a_request_runs(pod: EngineProcesses, client: IpcClient):
    with pod.connect("text", "supervisor") as supervisor:
        before = metric(supervisor, "vllm:generation_tokens_total")
        client.generate("fox", max_tokens=9)
        assert metric(supervisor, "vllm:generation_tokens_total") == before + 9
        request = client.submit("fox", max_tokens=100_000)
        first_event(client, request)
        wait_for(lambda: metric(supervisor, "vllm:num_requests_running") == 1)
        assert metric(supervisor, "vllm:kv_cache_usage_perc") > 0
        status = supervisor.call("status")
        assert (status["core"], status["num_open"], status["num_queued"]) == (True, 1, 0)
        client.send(CancelRequests([request]))
        wait_for(lambda: metric(supervisor, "vllm:num_requests_running") == 0)
        assert metric(supervisor, "vllm:kv_cache_usage_perc") == 0
        with pytest.raises(InvalidArgument, match="'nope' is unknown"):
            supervisor.call("nope")
        with pytest.raises(InvalidArgument, match=r"set_adapters: Expected `object`, got `array` - at `\$\.adapters`"):
            supervisor.call("set_adapters", adapters=["sql"])


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        encode_frame(CancelRequests([1])),
        encode_frame(Hello("wizard")),  # type: ignore[arg-type]
        encode_frame(Hello("text")),
        encode_frame(Hello("stub")) + b"[[[[[" * 4,
    ],
    ids=range(5),
)
def test_protocol_violation_closes_only_that_connection(pod: EngineProcesses, client: IpcClient, garbage: bytes):
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(10)
        raw.connect(str(pod.folder / "text.sock"))
        raw.sendall(garbage)
        assert raw.recv(1) == b""
    assert client.generate("fox", max_tokens=2)[-1].finish_reason == "length"
