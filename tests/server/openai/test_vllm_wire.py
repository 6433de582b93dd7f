# SPDX-License-Identifier: Apache-2.0
"""Routes and fields that programs for vLLM and OpenAI's clients use, in vLLM's form."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.openai_front import TINY, OpenAIFront, running_front

MESSAGES = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "look", "send")]


@pytest.fixture(scope="module")
def chat_front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAIFront]:
    folder = tmp_path_factory.mktemp("wire")
    with running_front(folder, model=TINY) as front:
        yield front


def chat(front: OpenAIFront, **fields: Any) -> Any:
    answer = front.request("/v1/chat/completions", {"model": "base", "messages": MESSAGES, "max_tokens": 4, **fields})
    assert answer.status == 200, answer.body
    return answer.body


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def test_echo_of_token_ids_has_their_log_probabilities(chat_front: OpenAIFront) -> None:
    """lm-evaluation-harness sends only such requests."""
    prompts = [[5, 6, 7, 8, 9], [10, 11]]
    body = chat_front.complete(prompt=prompts, max_tokens=1, echo=True, logprobs=1, temperature=0).body
    for choice, prompt in zip(body["choices"], prompts, strict=True):
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"][0] is None and len(logprobs["token_logprobs"]) == len(prompt) + 1
        text = chat_front.request("/detokenize", {"tokens": prompt}).body["prompt"]
        assert choice["text"].startswith(text)


def test_chats_have_the_fields_of_the_prompt_at_the_top(chat_front: OpenAIFront) -> None:
    body = chat(chat_front, return_token_ids=True, prompt_logprobs=1)
    ids = chat_front.request("/tokenize", {"messages": MESSAGES}).body["tokens"]
    assert body["prompt_token_ids"] == ids and len(body["prompt_logprobs"]) == len(ids)
    assert not {"prompt_token_ids", "prompt_logprobs"} & body["choices"][0].keys()
    chunks = events(chat(chat_front, return_token_ids=True, stream=True, n=2, temperature=1))
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [ids]
    assert "prompt_token_ids" not in chunks[0]["choices"][0]


def test_usage_of_each_chunk_needs_include_usage_and_counts_from_zero(chat_front: OpenAIFront) -> None:
    options = {"include_usage": False, "continuous_usage_stats": True}
    assert not any("usage" in chunk for chunk in events(chat(chat_front, stream=True, stream_options=options)))
    options["include_usage"] = True
    chunks = events(chat(chat_front, stream=True, stream_options=options, ignore_eos=True))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 0 and counts == sorted(counts) and counts[-1] == 4
    usages = [chunk["usage"] for chunk in chunks]
    assert all(u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] for u in usages)


@pytest.mark.parametrize("seed", [-5, -(2**63), 3.0])
def test_seeds_are_int64(chat_front: OpenAIFront, seed: float) -> None:
    texts = {
        tuple(c["text"] for c in chat_front.complete(prompt="Once", seed=seed, temperature=1, n=2).body["choices"])
        for _ in range(2)
    }
    assert len(texts) == 1


def test_numbers_may_have_a_zero_fraction(chat_front: OpenAIFront) -> None:
    fields = {"max_tokens": 3.0, "n": 1.0, "top_k": 5.0, "priority": 2.0, "stop_token_ids": [7.0], "logprobs": 1.0}
    assert chat_front.complete(prompt="Once", **fields).status == 200
    assert "max_tokens" in chat_front.complete(prompt="Once", max_tokens=3.5).message


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(chat_front: OpenAIFront, mode: str) -> None:
    allowed = {"mode": mode, "tools": [TOOLS[1]]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    body = chat(chat_front, tools=TOOLS, tool_choice=choice, max_tokens=200, temperature=1, seed=1)
    message = body["choices"][0]["message"]
    calls = message.get("tool_calls") or []
    assert {call["function"]["name"] for call in calls} <= {"look"} and (mode == "auto" or calls)
    responses_tools = [{"type": "function", "name": tool["function"]["name"]} for tool in TOOLS]
    flat = {"type": "allowed_tools", "mode": mode, "tools": responses_tools[1:2]}
    fields = {"model": "base", "input": "Hi", "tools": responses_tools, "tool_choice": flat, "max_output_tokens": 100}
    assert chat_front.request("/v1/responses", fields).status == 200


@pytest.mark.parametrize(
    "allowed",
    [
        None,
        {},
        {"mode": "none", "tools": TOOLS},
        {"mode": "auto", "tools": [{"type": "function"}]},
        {"mode": "auto", "tools": [{"type": "function", "function": {"name": "lost"}}]},
    ],
)
def test_wrong_allowed_tools_are_named(chat_front: OpenAIFront, allowed: Any) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    body = {"model": "base", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
    answer = chat_front.request("/v1/chat/completions", body)
    assert answer.status == 400 and "tool_choice" in answer.message


def test_an_unknown_model_is_404_on_every_route(chat_front: OpenAIFront) -> None:
    bodies = {
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": {"messages": MESSAGES},
        "/v1/responses": {"input": "a"},
        "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
        "/v1/messages/count_tokens": {"messages": MESSAGES},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [5]},
    }
    for path, body in bodies.items():
        assert chat_front.request(path, {**body, "model": "lost"}).status == 404, path
        assert chat_front.request(path, {**body, "model": "base"}).status == 200, path
        assert chat_front.request(f"{path}/", {**body, "model": "base"}).status == 200, path


def test_routes_of_vllm(chat_front: OpenAIFront) -> None:
    assert chat_front.request("/ping").status == chat_front.request("/ping", b"", method="POST").status == 200
    assert chat_front.request("/load").body == {"server_load": 0}
    info = chat_front.request("/server_info").body
    assert info["vllm_config"]["model"] == str(TINY) and info["version"]
    tokenizer = chat_front.request("/tokenizer_info").body
    assert tokenizer["eos_token"] and "messages" in tokenizer["chat_template"]


def test_priorities_are_ignored_without_priority_scheduling(chat_front: OpenAIFront) -> None:
    assert chat_front.complete(prompt="Once", max_tokens=1, priority=7).status == 200


def test_templates_get_the_variables_of_their_family(chat_front: OpenAIFront) -> None:
    chat(chat_front, chat_template_kwargs={"controls": {"length": "short"}, "xml_tools": []})
    for name in ("messages", "bos_token", "raise_exception", "a b", ""):
        body = {"model": "base", "messages": MESSAGES, "chat_template_kwargs": {name: 1}}
        assert chat_front.request("/v1/chat/completions", body).status == 400, name
