# SPDX-License-Identifier: Apache-2.0
"""Completions through the `openai` client and a real front, text and core process."""

import asyncio
import json
import socket
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest

from quire_server.openai import generation
from quire_server.openai.app import Application
from quire_server.openai.settings import FrontSettings
from quire_spec.documents.pod_config import OpenAIConfig

pytestmark = pytest.mark.timeout(120)

STORY = "Once upon a time"
GREEDY = {"model": "base", "max_tokens": 12, "temperature": 0}


def streamed_choices(client, **fields):
    """Return text, finish reason and logprobs of each choice of a streamed request, and its usage."""
    choices, usage = {}, None
    for chunk in client.completions.create(stream=True, stream_options={"include_usage": True}, **fields):
        assert usage is None, "a chunk follows the usage"
        usage = chunk.usage
        for part in chunk.choices:
            choice = choices.setdefault(part.index, SimpleNamespace(text="", finish_reason=None, tokens=[]))
            assert choice.finish_reason is None, "a chunk follows the last one of its choice"
            choice.text += part.text
            choice.tokens += part.logprobs.tokens if part.logprobs else []
            choice.finish_reason = part.finish_reason
    return choices, usage


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": STORY},
        {"prompt": [STORY, "A dog"], "n": 2, "seed": 7, "temperature": 0.8},
        {"prompt": [521, 624, 259]},
        {"prompt": [[521, 624, 259], [1, 2, 3]], "logprobs": 1},
        {"prompt": STORY, "n": 3},
        {"prompt": STORY, "echo": True, "logprobs": 0},
        {"prompt": STORY, "stop": [" was", " a"], "max_tokens": 40},
        {"prompt": STORY, "stop": " was", "extra_body": {"include_stop_str_in_output": True, "min_tokens": 2}},
        {"prompt": STORY, "logit_bias": {"13": 100}, "presence_penalty": 0.5, "extra_body": {"top_k": 5}},
    ],
    ids=str,
)
def test_a_streamed_request_equals_the_complete_one(client, fields):
    fields = GREEDY | fields
    whole = client.completions.create(**fields)
    choices, usage = streamed_choices(client, **fields)
    assert [c.index for c in whole.choices] == sorted(choices) == list(range(len(whole.choices)))
    for choice in whole.choices:
        part = choices[choice.index]
        assert (part.text, part.finish_reason) == (choice.text, choice.finish_reason)
        assert part.tokens == (choice.logprobs.tokens if choice.logprobs else [])
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.total_tokens == whole.usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert whole.id.startswith("cmpl-") and whole.object == "text_completion" and whole.model == "base"


def test_greedy_outputs_are_equal_and_count_their_prompt_once(client):
    one, three = (client.completions.create(prompt=STORY, n=n, **GREEDY) for n in (1, 3))
    assert {choice.text for choice in three.choices} == {one.choices[0].text}
    assert three.usage.prompt_tokens == one.usage.prompt_tokens
    assert three.usage.completion_tokens == 3 * one.usage.completion_tokens


def test_usage_counts_tokens_of_the_prefix_cache(client):
    prompt = list(range(100, 180))
    fields = GREEDY | {"prompt": prompt, "max_tokens": 1, "extra_body": {"cache_salt": "usage"}}
    first, second = (client.completions.create(**fields).usage for _ in range(2))
    assert (first.prompt_tokens, first.prompt_tokens_details.cached_tokens) == (80, 0)
    assert second.prompt_tokens_details.cached_tokens >= 64


def test_echo_without_output_scores_the_prompt(client):
    """lm-eval scores prompts in this way."""
    fields = GREEDY | {"max_tokens": 0, "echo": True, "logprobs": 2}
    response = client.completions.create(prompt=STORY, **fields)
    [choice] = response.choices
    assert choice.text == STORY and response.usage.completion_tokens == 0
    scores = choice.logprobs
    assert "".join(scores.tokens).endswith(STORY) and scores.tokens[0]
    assert scores.token_logprobs[0] is None and all(score <= 0 for score in scores.token_logprobs[1:])
    assert scores.text_offset == [len("".join(scores.tokens[:i])) for i in range(len(scores.tokens))]
    assert [len(top or ()) for top in scores.top_logprobs] == [0] + [2] * (len(scores.tokens) - 1)


def test_token_ids_in_and_out(client):
    fields = GREEDY | {"prompt": [521, 624], "logprobs": 1}
    extra = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    [choice] = client.completions.create(extra_body=extra, **fields).choices
    assert choice.prompt_token_ids == [521, 624] and len(choice.token_ids) == 12
    assert choice.logprobs.tokens == [f"token_id:{i}" for i in choice.token_ids]


def test_prompts_lose_tokens_on_the_side_that_the_request_names(front):
    kept = {}
    for side in ("left", "right"):
        fields = {"truncate_prompt_tokens": 2, "truncation_side": side, "return_token_ids": True, "max_tokens": 1}
        kept[side] = [
            front.complete(prompt=prompt, **fields).body["choices"][0]["prompt_token_ids"]
            for prompt in ([5, 6, 7, 8], "Once upon a time")
        ]
    whole = front.complete(prompt="Once upon a time", max_tokens=1, return_token_ids=True).body["choices"][0]
    begin, first, *_, last = whole["prompt_token_ids"]
    assert kept == {"left": [[7, 8], [begin, last]], "right": [[5, 6], [begin, first]]}


def test_a_stream_with_an_interval_has_fewer_events_and_the_same_text(client):
    fields = GREEDY | {"prompt": STORY, "max_tokens": 21, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    whole = client.completions.create(**fields).choices[0]
    fields["extra_body"] = fields["extra_body"] | {"stream_interval": 8}
    chunks = [chunk.choices[0] for chunk in client.completions.create(stream=True, **fields)]
    counts = [len(chunk.token_ids) for chunk in chunks]
    assert sum(counts) == 21 and counts[0] <= 2 and all(count >= 8 for count in counts[1:-1]) and len(counts) <= 4
    assert "".join(chunk.text for chunk in chunks) == whole.text


def test_log_probabilities_of_named_tokens(front):
    fields = {"prompt": STORY, "logprobs": 1, "logprob_token_ids": [15, 13], "max_tokens": 4, "temperature": 0}
    [choice] = front.complete(**fields, return_tokens_as_token_ids=True).body["choices"]
    assert all({"token_id:15", "token_id:13"} <= top.keys() for top in choice["logprobs"]["top_logprobs"])


def test_stop_reason(client):
    [choice] = client.completions.create(prompt=STORY, stop=[" was"], **GREEDY | {"max_tokens": 30}).choices
    assert (choice.finish_reason, choice.stop_reason) == ("stop", " was")
    [choice] = client.completions.create(prompt=STORY, **GREEDY).choices
    assert (choice.finish_reason, choice.stop_reason) == ("length", None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "n": 0, "temperature": 0}, "n"),
        ({"prompt": ["a"] * 100, "n": 100}, "prompt"),
        ({"prompt": "a", "logprobs": -2}, "logprobs"),
        ({"prompt": "a", "stream": "yes"}, "stream"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format"),
        ({"prompt": "a", "response_format": {"type": "json_object"}, "guided_json": {}}, "structured_outputs"),
        ({"prompt": "a", "structured_outputs": {"regx": "a"}}, "structured_outputs"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "stream_interval": 0}, "stream_interval"),
        ({"prompt": "a", "logprobs": 1, "logprob_token_ids": [10**9]}, "logprob_token_ids"),
        ({"prompt": "a", "truncation_side": "middle"}, "truncation_side"),
        ({"prompt": "a", "thinking_token_budget": 1.5}, "thinking_token_budget"),
        ({"prompt": "a", "early_stopping": True}, "early_stopping"),
        ({"prompt": "a", "use_beam_search": True, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"prompt": "a", "cache_salt": "a/b"}, "cache_salt"),
        ({"prompt": "a", "priority": 2**31}, "priority"),
        ({"prompt": "a", "max_completion_tokens": 1}, "max_completion_tokens"),
        ({"prompt": "a" * 300_000}, None),
        ({"prompt": "a", "stop_token_ids": [10**9]}, "stop_token_ids"),
        ({"prompt": [10**9]}, None),
    ],
    ids=lambda value: str(value)[:60],
)
def test_an_invalid_request_gets_400_with_the_field(front, fields, param):
    for stream in ({}, {} if "stream" in fields or "stream_options" in fields else {"stream": True}):
        answer = front.complete(**fields, **stream)
        error = answer.body["error"]
        assert (answer.status, error["code"], error["type"]) == (400, 400, "BadRequestError"), error
        assert param is None or error["param"] == param, error


def test_fields_for_bookkeeping_and_neutral_values_are_accepted(front):
    accepted = {"user": "u", "store": False, "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "s"}
    neutral = {"response_format": {"type": "text"}, "suffix": None, "best_of": 1, "use_beam_search": False}
    answer = front.complete(prompt=STORY, max_tokens=1, **accepted, **neutral)
    assert answer.status == 200, answer.body


@pytest.mark.parametrize(
    ("path", "body", "method", "status"),
    [
        ("/v1/completions", b"{", None, 400),
        ("/v1/completions", b"[]", None, 400),
        ("/v1/completions", b'{"prompt":"\\ud800"}', None, 400),
        ("/v1/completions", b"[" * 100_000, None, 400),
        ("/v1/completions", b'{"prompt":"' + b"a" * 9 * 2**20 + b'"}', None, 413),
        ("/v1/completions", None, "GET", 405),
        ("/v1/nothing", None, "GET", 404),
        ("/v1/models/nothing", None, "GET", 404),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_http_gets_its_status(front, path, body, method, status):
    answer = front.request(path, body, method=method)
    assert (answer.status, answer.body["error"]["code"]) == (status, status)


def test_unknown_model_is_404(client):
    with pytest.raises(openai.NotFoundError, match="not served"):
        client.completions.create(model="absent", prompt="a")


def test_adapters_that_cannot_answer_now_say_when_to_retry(front):
    """An unknown adapter is 404, one that is being loaded 503, one at its limit 429."""
    with front.engine.connect("text", "supervisor") as supervisor:
        supervisor.call("set_loading_adapters", names=["soon"])
        supervisor.call("set_adapters", adapters={"busy": "sha256:0"}, limits={"busy": {"maxTokensPerSecond": 1}})
        try:
            answers = [
                front.request("/v1/completions", {"model": model, "prompt": list(range(100, 140))})
                for model in ("absent", "soon", "busy", "busy")
            ]
            cards = front.request("/v1/models").body["data"]
            loading = front.request("/v1/models/soon")
        finally:
            supervisor.call("set_loading_adapters", names=[])
            supervisor.call("set_adapters", adapters={}, limits={})
    absent, soon, _, limited = answers
    assert (absent.status, "retry-after" in absent.headers) == (404, False)
    for answer in (soon, loading):
        assert (answer.status, answer.headers["retry-after"]) == (503, "1") and "not loaded yet" in answer.message
    assert (limited.status, limited.body["error"]["type"]) == (429, "RateLimitError")
    assert 25 < int(limited.headers["retry-after"]) < 35 and "maxTokensPerSecond" in limited.message
    assert [(card["id"], card["parent"]) for card in cards] == [("base", None), ("busy", "base")]


def test_models_health_version_metrics(front, client):
    [model] = client.models.list().data
    assert (model.id, model.parent, model.object) == ("base", None, "model")
    assert client.models.retrieve("base") == model
    assert front.request("/health").status == front.request("/version").status == 200
    assert "vllm:num_requests_running" in front.request("/metrics").body


def test_request_id_is_returned(front):
    sent = front.complete({"X-Request-Id": "my-id.1"}, prompt="a", max_tokens=1)
    assert sent.headers["x-request-id"] == "my-id.1" and sent.body["id"] == "cmpl-my-id.1"
    forged = front.complete({"X-Request-Id": "a b\t"}, prompt="a", max_tokens=1)
    assert len(forged.headers["x-request-id"]) == 32


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_its_request(front, stream):
    body = {"model": "base", "prompt": STORY, "max_tokens": 1900, "ignore_eos": True, "stream": stream}
    data = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", front.port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(data), data)
        )
        front.engine_is_busy()
    front.engine.wait_idle()


async def no_defaults():
    return {}


async def test_an_idle_stream_gets_comments(monkeypatch):
    """The application alone, with a text process that never answers."""
    monkeypatch.setattr(generation, "KEEP_ALIVE_S", 0.01)
    cancelled = []
    text = SimpleNamespace(
        sampling_defaults=no_defaults,
        new_id=lambda: 1,
        submit=lambda request, sink: None,
        cancel=cancelled.extend,
        report_rejected=print,
    )
    body = json.dumps({"prompt": "a", "stream": True}).encode()
    messages = [{"type": "http.request", "body": body}]
    sent = []

    async def receive():
        if messages:
            return messages.pop()
        while len(sent) < 3:
            await asyncio.sleep(0.005)
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    settings = FrontSettings(run_dir=Path(), served_name="base", host="127.0.0.1", openai=OpenAIConfig())
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    await Application(settings, text)(scope, receive, send)
    assert sent[0]["status"] == 200 and dict(sent[0]["headers"])[b"content-type"].startswith(b"text/event-stream")
    assert [message["body"] for message in sent[1:3]] == [b": keep-alive\n\n"] * 2
    assert cancelled == [1]
