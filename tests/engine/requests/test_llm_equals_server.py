# SPDX-License-Identifier: Apache-2.0
"""The offline LLM and the server give the same output for every kind of request."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.chats import conversation
from support.engine_processes import EngineProcesses, IpcClient
from support.tiny_checkpoints import VOCAB, make_checkpoint
from support.tokenizer import byte_level, save_tokenizer

from quire_engine import LLM, CompletionOutput, RequestOutput, SamplingParams
from quire_spec.errors import InvalidArgument
from quire_spec.protocol.messages import GenerateRequest, OutputDelta
from quire_spec.protocol.parsed_output import OutputParsing, merge_events

REASONING_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }} <tool_call>{% endfor %}"
    "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if thinks %}<think>{% endif %}{% endif %}"
    "{# the answer follows </think> #}"
)
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
CONFIG = {"dtype": "float32", "kv_cache_memory_bytes": 2**22, "max_model_len": 256, "scheduling_policy": "priority"}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"]}}
TOOLS = [{"type": "function", "function": TOOL}]
STRICT_TOOLS = [{"type": "function", "function": TOOL | {"strict": True}}]
LONG = "the quick brown fox jumps over the lazy dog " * 5


@dataclass(frozen=True)
class Kind:
    """A kind of request. Exactly one of `prompt`, `token_ids` and `messages` is set."""

    prompt: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    thinks: bool = False
    params: dict[str, Any] = field(default_factory=dict)


CHAT = [{"role": "user", "content": "Say <s> or </think>."}]
KINDS = {
    "text": Kind("the fox", params={"temperature": 0}),
    "token ids": Kind(token_ids=[5, 9, 30], params={"temperature": 0}),
    "priority": Kind("the fox", params={"temperature": 0, "max_tokens": 3}),
    "chat": Kind(messages=CHAT, params={"temperature": 0}),
    "reasoning": Kind(messages=CHAT, thinks=True, params={"temperature": 0, "thinking_token_budget": 4}),
    "schema": Kind("the fox", params={"temperature": 0, "structured_outputs": {"json": SCHEMA}}),
    "chat with schema": Kind(messages=CHAT, params={"structured_outputs": {"json": SCHEMA}, "seed": 1}),
    "chat with schema and reasoning": Kind(
        messages=CHAT,
        thinks=True,
        # The two tokens of the reasoning are complete characters.
        params={"temperature": 0, "structured_outputs": {"json": SCHEMA}, "thinking_token_budget": 2, "max_tokens": 60},
    ),
    "constraint after a token": Kind(
        messages=CHAT,
        tools=None,
        thinks=True,
        params={"structured_outputs": {"regex": "[ab]{3}", "begin_after_token_ids": [40]}, "logit_bias": {40: 50}}
        | {"temperature": 0},
    ),
    "tools": Kind(messages=CHAT, tools=TOOLS, params={"temperature": 0}),
    "strict tools": Kind(
        messages=CHAT, tools=STRICT_TOOLS, params={"temperature": 0, "logit_bias": {VOCAB - 1: 1}, "max_tokens": 40}
    ),
    "tools with schema": Kind(
        messages=CHAT, tools=TOOLS, params={"structured_outputs": {"json": SCHEMA}, "seed": 3, "max_tokens": 60}
    ),
    "n": Kind("the fox", params={"n": 3, "seed": 5}),
    "n chats with schema": Kind(
        messages=CHAT, params={"n": 2, "seed": 5, "structured_outputs": {"choice": ["a", "b"]}}
    ),
    "best_of": Kind("the fox", params={"n": 2, "best_of": 4, "seed": 5, "logprobs": 1}),
    "beams": Kind("the fox", params={"use_beam_search": True, "n": 2, "best_of": 3, "stop": ["e"]}),
    "bad words": Kind("the fox", params={"temperature": 0, "bad_words": ["a", "the"]}),
    "truncated text": Kind(LONG, params={"temperature": 0, "truncate_prompt_tokens": 9}),
    "text truncated on the right": Kind(
        LONG, params={"temperature": 0, "truncate_prompt_tokens": 9, "truncation_side": "right"}
    ),
    "truncated token ids": Kind(token_ids=[*range(5, 60)], params={"temperature": 0, "truncate_prompt_tokens": 7}),
    "truncated to the context": Kind(token_ids=[7] * 300, params={"truncate_prompt_tokens": -1, "temperature": 0}),
    "logprobs": Kind("the fox", params={"temperature": 0, "logprobs": 3, "prompt_logprobs": 2}),
    "named logprobs": Kind("the fox", params={"temperature": 0, "logprobs": 1, "logprob_token_ids": [17, 3]}),
    "stop strings": Kind("the fox", params={"seed": 11, "stop": ["e", "a"], "max_tokens": 60}),
    "kept stop string": Kind(
        "the fox", params={"seed": 11, "stop": ["e", "a"], "include_stop_str_in_output": True, "max_tokens": 60}
    ),
    "stop tokens": Kind("the fox", params={"seed": 2, "stop_token_ids": [*range(60, 160)], "min_tokens": 4}),
    "tokens only": Kind("the fox", params={"seed": 2, "detokenize": False}),
    "allowed tokens": Kind(
        "the fox", params={"seed": 2, "allowed_token_ids": [*range(60, 70)], "logit_bias": {61: -3}}
    ),
    "penalties": Kind("the fox", params={"temperature": 0, "repetition_penalty": 1.7, "presence_penalty": 0.5}),
}
INVALID_KINDS = {
    "empty": Kind(token_ids=[]),
    "too long": Kind(token_ids=[7] * 256),
    "unknown token": Kind(token_ids=[VOCAB]),
    "unknown stop token": Kind("a", params={"stop_token_ids": [VOCAB]}),
    "too many logprobs": Kind("a", params={"logprobs": 21}),
    "too many prompt logprobs": Kind("a", params={"prompt_logprobs": -1}),
    "forbidden tokens": Kind("a", params={"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 2}),
    "empty word": Kind("a", params={"bad_words": [" "]}),
    "schema": Kind("a", params={"structured_outputs": {"json": {"type": "unknown"}}}),
    "beams with tools": Kind(messages=CHAT, tools=STRICT_TOOLS, params={"use_beam_search": True}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "llama")
    tokenizer = byte_level(VOCAB - len(MARKS) - 1)
    tokenizer.add_tokens(MARKS)
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    return save_tokenizer(tokenizer, folder, chat_template=REASONING_TEMPLATE)


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, **CONFIG)


@pytest.fixture(scope="module")
def client(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[IpcClient]:
    with (
        EngineProcesses(tmp_path_factory.mktemp("run"), model=str(model), **CONFIG) as pod,
        pod.start("core", "text").connect("text", "stub") as client,
    ):
        yield client


def serve(client: IpcClient, kind: Kind, request_id: int) -> list[OutputDelta]:
    chat = parsing = None
    if kind.messages is not None:
        chat = conversation(*kind.messages, tools=kind.tools, template_kwargs={"thinks": kind.thinks})
        parsing = OutputParsing("none" if kind.tools is None else "auto")
    params = SamplingParams.from_mapping(kind.params).freeze()
    request = GenerateRequest(
        request_id,
        "base",
        kind.prompt,
        kind.token_ids,
        params,
        False,
        chat=chat,
        parsing=parsing,
        return_prompt_token_ids=True,
    )
    client.send(request)
    return client.collect([request_id])[request_id]


def generate(llm: LLM, kind: Kind) -> RequestOutput:
    params = SamplingParams.from_mapping(kind.params)
    if kind.messages is not None:
        [output] = llm.chat(
            kind.messages, params, tools=kind.tools, chat_template_kwargs={"thinks": kind.thinks}, use_tqdm=False
        )
        return output
    prompt = kind.token_ids if kind.prompt is None else kind.prompt
    [output] = llm.generate([prompt], params, use_tqdm=False)
    return output


def assert_equal(completion: CompletionOutput, delta: OutputDelta) -> None:
    assert completion.token_ids == delta.token_ids
    assert (completion.finish_reason, completion.stop_reason) == (delta.finish_reason, delta.stop_reason)
    assert completion.cumulative_logprob == pytest.approx(delta.cumulative_logprob, abs=1e-4)
    assert (completion.logprobs is None) == (delta.logprobs is None)
    for position, entries in zip(completion.logprobs or [], delta.logprobs or [], strict=True):
        assert list(position) == [entry.token_id for entry in entries]
        assert [logprob.decoded_token for logprob in position.values()] == [entry.text for entry in entries]
    if delta.parsed is None:
        assert completion.text == delta.text


@pytest.mark.parametrize("name", KINDS)
def test_llm_equals_server(llm: LLM, client: IpcClient, name: str) -> None:
    output = generate(llm, KINDS[name])
    deltas = sorted(serve(client, KINDS[name], sorted(KINDS).index(name)), key=lambda delta: delta.index)
    assert deltas[0].error_code is None, deltas[0].error
    assert output.prompt_token_ids == next(d.prompt_token_ids for d in deltas if d.prompt_token_ids is not None)
    for completion, delta in zip(output.outputs, deltas, strict=True):
        assert_equal(completion, delta)
    served_logprobs = next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None)
    assert len(output.prompt_logprobs or []) == len(served_logprobs or [])


def test_a_schema_applies_to_the_answer_after_the_reasoning(llm: LLM, client: IpcClient) -> None:
    kind = KINDS["chat with schema and reasoning"]
    text = generate(llm, kind).outputs[0].text
    reasoning, _, answer = text.partition("</think>")
    assert reasoning and isinstance(json.loads(answer)["a"], bool)
    [delta] = serve(client, kind, 1000)
    parsed = merge_events(delta.parsed or [])
    assert json.loads(parsed.content) == json.loads(answer)


@pytest.mark.parametrize("name", INVALID_KINDS)
def test_llm_and_server_reject_with_the_same_words(llm: LLM, client: IpcClient, name: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        generate(llm, INVALID_KINDS[name])
    [delta] = serve(client, INVALID_KINDS[name], 2000 + sorted(INVALID_KINDS).index(name))
    assert (delta.error_code, delta.error) == ("INVALID_ARG", str(caught.value))
