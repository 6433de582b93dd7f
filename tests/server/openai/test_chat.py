# SPDX-License-Identifier: Apache-2.0
"""Chat completions through the `openai` client; templates are rendered by real processes that tests kill."""

import json
import re
import shutil
import threading
import time
from types import SimpleNamespace
from typing import Literal

import openai
import pydantic
import pytest
from support.engine_processes import wait_for
from support.openai_front import TINY, running_front
from transformers import AutoTokenizer

from quire_engine.ipc.worker_pool import NUM_WORKERS
from quire_engine.text.chat_renderer import CPU_LIMIT_S

pytestmark = pytest.mark.timeout(120)

TEMPLATE = """{{ bos_token }}{% for m in messages %}{% if m.role == 'developer' %}{{ raise_exception('no developer') }}
{% endif %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.arguments.items() | list }}
{% endfor %}{{ eos_token }}{% if m.content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}
{% endfor %}{% endfor %}{% endif %}{% if m.content == 'bomb' %}{{ m.content * 10**9 }}{% endif %}
{% endfor %}{% if enable_thinking is defined %}thinking={{ enable_thinking }}{% endif %}
{% if tools %}{{ tools | tojson }} <tool_call> {% endif %}{% for d in documents or [] %}[{{ d.title }}]{% endfor %}
{# </think> #}
{% if add_generation_prompt %}assistant:{% if thinking %}<think>{% endif %}
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""
USER = [{"role": "user", "content": "Once upon a time"}]
DAYS = {"type": "integer", "minimum": 1, "maximum": 9}
WEATHER = {"properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": DAYS}, "required": ["city", "days"]}
STRICT = {"type": "object", "additionalProperties": False, **WEATHER}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Weather.", "parameters": STRICT, "strict": True},
    }
]
UNTHINKING = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
ANY_CALL = {"model": "base", "messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS, "max_tokens": 200}
ANY_CALL |= UNTHINKING
FORCED = {"type": "function", "function": {"name": "other"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
GREEDY = {"model": "base", "messages": USER, "max_tokens": 10, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "chat"
    shutil.copytree(TINY, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    defaults = {"max_new_tokens": 7, "temperature": 0.0, "eos_token_id": 1}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    return folder


@pytest.fixture(scope="module")
def chat(tmp_path_factory, folder):
    with running_front(tmp_path_factory.mktemp("front"), model=folder) as front:
        yield front


@pytest.fixture(scope="module")
def chat_client(chat):
    with chat.client() as client:
        yield client


def tokens_of(front, messages, **fields):
    answer = front.request("/tokenize", {"messages": messages, **fields})
    assert answer.status == 200, answer.body
    return answer.body["tokens"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2, "seed": 3, "temperature": 0.9},
        {"n": 2, "logprobs": True, "top_logprobs": 2},
        {"stop": ["a", "e"], "max_tokens": 30},
        {"max_completion_tokens": 4},
        {"messages": [{"role": "assistant", "content": "There"}], "extra_body": {"echo": True}},
    ],
    ids=str,
)
def test_a_streamed_chat_equals_the_complete_one(chat_client, fields):
    fields = GREEDY | fields
    whole = chat_client.chat.completions.create(**fields)
    choices, usage = {}, None
    options = {"include_usage": True}
    for chunk in chat_client.chat.completions.create(stream=True, stream_options=options, **fields):
        assert usage is None
        usage = chunk.usage
        for part in chunk.choices:
            if part.index not in choices:
                assert (part.delta.role, part.delta.content, part.finish_reason) == ("assistant", "", None)
                choices[part.index] = SimpleNamespace(content="", finish_reason=None, logprobs=[])
            choice = choices[part.index]
            assert choice.finish_reason is None
            choice.content += part.delta.content or ""
            choice.logprobs += part.logprobs.content if part.logprobs else []
            choice.finish_reason = part.finish_reason
    for choice in whole.choices:
        part = choices[choice.index]
        assert (part.content, part.finish_reason) == (choice.message.content, choice.finish_reason)
        # The probabilities depend on the batch in their last digits.
        expected = [entry.bytes for entry in choice.logprobs.content] if choice.logprobs else []
        assert [entry.bytes for entry in part.logprobs] == expected
    assert usage.total_tokens == whole.usage.total_tokens
    assert whole.id.startswith("chatcmpl-") and whole.choices[0].message.role == "assistant"
    assert whole.usage.completion_tokens <= fields.get("max_completion_tokens", fields["max_tokens"]) * len(choices)


def test_logprobs_have_the_exact_bytes_of_each_token(chat_client):
    fields = GREEDY | {"logprobs": True, "top_logprobs": 3, "max_tokens": 20}
    # The first byte of a character of four bytes, which is not valid UTF-8 by itself.
    byte = json.loads((TINY / "tokenizer.json").read_text())["model"]["vocab"]["ð"]
    response = chat_client.chat.completions.create(logit_bias={str(byte): 100}, **fields)
    [choice] = response.choices
    content = choice.logprobs.content
    text = b"".join(bytes(entry.bytes) for entry in content).decode(errors="replace")
    assert text.rstrip("�") == choice.message.content.rstrip("�") and "�" in choice.message.content
    assert all(len(entry.top_logprobs) == 3 for entry in content)


@pytest.mark.parametrize(
    "messages",
    [
        USER,
        [{"role": "system", "content": "Be brief."}, *USER, {"role": "assistant", "content": "Hi"}, *USER],
        [{"role": "user", "content": "a<|eos|>b<|bos|><|eos|>"}],
        [{"role": "user", "content": "<|eos|>"}, {"role": "assistant", "content": "x<|eos|>"}],
        [{"role": "user", "content": "\U000f0000"}, {"role": "user", "content": "\U000f0001 <|eos|>\U000f0001"}],
        [{"role": "user", "content": "Grüße 🙂 <|eos"}],
    ],
    ids=str,
)
def test_tokens_equal_those_of_transformers(chat, folder, messages):
    """Control tokens of the template are control tokens; the same text from a user is text."""
    reference = AutoTokenizer.from_pretrained(folder)
    ids = reference.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False, sanitize_control_tokens=True
    )
    ours = tokens_of(chat, messages)
    assert reference.decode(ours) == reference.decode(ids)
    assert ours.count(1) == ids.count(1) == len(messages) and ours.count(0) == ids.count(0) == 1
    assert ours == ids or any("<|eos|>" in message["content"] for message in messages)


def test_roles_parts_and_tool_arguments_reach_the_template(chat):
    parts = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    assert tokens_of(chat, [{"role": "developer", "content": parts}]) == tokens_of(
        chat, [{"role": "system", "content": "Be\nbrief."}]
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    tokens = tokens_of(chat, [{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert "[('a', 1)]" in chat.request("/detokenize", {"tokens": tokens}).body["prompt"]
    documents = tokens_of(chat, USER, documents=[{"title": "one"}, {"title": "two<|eos|>"}])
    assert "[one][two<|eos|>]" in chat.request("/detokenize", {"tokens": documents}).body["prompt"]
    assert documents.count(1) == len(USER), "no control token comes from a document"
    thinking = tokens_of(chat, USER, chat_template_kwargs={"enable_thinking": False})
    assert "thinking=False" in chat.request("/detokenize", {"tokens": thinking}).body["prompt"]


def checked_calls(message):
    """Return the calls of a message, which must match their schema."""
    for call in message.tool_calls:
        assert (call.type, call.function.name) == ("function", "weather")
        arguments = json.loads(call.function.arguments)
        assert set(arguments) == {"city", "days"} and arguments["city"] in ("Paris", "Oslo")
        assert arguments["days"] in range(1, 10)
    assert len({call.id for call in message.tool_calls}) == len(message.tool_calls)
    return message.tool_calls


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
def test_required_tools_are_called_streamed_or_not(chat_client, choice):
    """The model was not trained for tools, so only the grammar makes it write calls."""
    fields = ANY_CALL | {"tool_choice": choice, "temperature": 1.5, "parallel_tool_calls": False}
    whole = chat_client.chat.completions.create(**fields)
    [choice_of_whole] = whole.choices
    assert len(checked_calls(choice_of_whole.message)) == 1
    assert (choice_of_whole.finish_reason, choice_of_whole.message.content) == ("tool_calls", None)
    with chat_client.chat.completions.stream(stream_options={"include_usage": True}, **fields) as stream:
        events = list(stream)
        streamed = stream.get_final_completion()
    assert streamed.choices[0].finish_reason == "tool_calls"
    assert checked_calls(streamed.choices[0].message)
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [event.name for event in done] == ["weather"] * len(streamed.choices[0].message.tool_calls)
    chunks = [event.chunk for event in events if event.type == "chunk"]
    deltas = [part.delta for chunk in chunks for part in chunk.choices]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    parts = [part for delta in deltas for part in delta.tool_calls or []]
    starts = [part for part in parts if part.id is not None]
    assert all(part.id.startswith("chatcmpl-tool-") and part.function.arguments == "" for part in starts)
    assert [part.index for part in starts] == list(range(len(starts)))
    assert all(part.function.name is None for part in parts if part not in starts)
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
def test_required_tools_are_called_if_the_answer_has_a_format(chat_client, choice):
    """An agent that needs a call first, and later an answer in a format, sends both fields with each request."""
    schema = {"type": "object", "properties": {"answer": {"type": "boolean"}}, "required": ["answer"]}
    response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    fields = ANY_CALL | {"tool_choice": choice, "parallel_tool_calls": False, "response_format": response_format}
    [whole] = chat_client.chat.completions.create(**fields).choices
    assert len(checked_calls(whole.message)) == 1 and whole.finish_reason == "tool_calls"


def test_strict_tools_of_the_parse_helper(chat_client):
    class Weather(pydantic.BaseModel):
        city: Literal["Paris", "Oslo"]

    tool = openai.pydantic_function_tool(Weather, name="weather")
    fields = ANY_CALL | {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    for choice in chat_client.chat.completions.parse(**fields).choices:
        assert all(call.function.parsed_arguments.city in ("Paris", "Oslo") for call in choice.message.tool_calls)
    text = chat_client.chat.completions.create(**ANY_CALL | {"tools": [tool], "max_tokens": 5, "temperature": 0})
    assert text.choices[0].message.content and text.choices[0].finish_reason in ("length", "stop")


def test_a_constrained_answer_with_tools_is_a_call_or_the_answer(chat_client):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    answer = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for seed in range(3):
        fields = ANY_CALL | {"response_format": answer, "temperature": 2, "seed": seed, "parallel_tool_calls": False}
        message = chat_client.chat.completions.create(**fields).choices[0].message
        assert checked_calls(message) if message.tool_calls else json.loads(message.content)["ok"] in (True, False)


def test_reasoning_that_fills_the_output(chat, chat_client):
    # A special token that the text does not contain would not count.
    options = {"chat_template_kwargs": {"thinking": True}, "skip_special_tokens": False}
    thinking = GREEDY | {"extra_body": options}
    whole = chat_client.chat.completions.create(**thinking)
    message = whole.choices[0].message
    assert (message.content, whole.choices[0].finish_reason) == (None, "length")
    assert message.reasoning == message.reasoning_content != ""
    assert whole.usage.completion_tokens_details.reasoning_tokens == whole.usage.completion_tokens == 10
    chunks = list(chat_client.chat.completions.create(stream=True, **thinking))
    assert "".join(chunk.choices[0].delta.model_extra.get("reasoning", "") for chunk in chunks) == message.reasoning
    for option in ({"include_reasoning": False}, {"separate_reasoning": False}):
        body = GREEDY | options | option
        answer = chat.request("/v1/chat/completions", body).body["choices"][0]["message"]
        assert "reasoning" not in answer and "reasoning_content" not in answer
        assert (answer["content"] or "").strip("\n") == (message.reasoning if "separate_reasoning" in option else "")


@pytest.mark.parametrize("budget", [0, 3])
def test_a_budget_of_the_reasoning_leaves_tokens_for_the_answer(chat_client, budget):
    extra = {"chat_template_kwargs": {"thinking": True}, "thinking_token_budget": budget, "ignore_eos": True}
    response = chat_client.chat.completions.create(extra_body=extra, **GREEDY)
    assert response.usage.completion_tokens_details.reasoning_tokens == budget
    assert response.usage.completion_tokens == 10 and response.choices[0].message.content
    constrained = extra | {"structured_outputs": {"choice": ["yes"]}}
    response = chat_client.chat.completions.create(extra_body=constrained, **GREEDY)
    assert response.choices[0].message.content == "yes"


def test_generation_config_sets_the_defaults(chat):
    body = {"model": "base", "messages": USER, "ignore_eos": True}
    answers = [chat.request("/v1/chat/completions", body).body for _ in range(2)]
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [7, 7]
    assert answers[0]["choices"] == answers[1]["choices"], "greedy"
    completion = chat.complete(prompt="Once", ignore_eos=True).body
    assert completion["usage"]["completion_tokens"] == 16


def test_continue_final_message(chat, chat_client):
    begun = [*USER, {"role": "assistant", "content": "there was a"}]
    tokens = tokens_of(chat, begun, continue_final_message=True)
    assert chat.request("/detokenize", {"tokens": tokens}).body["prompt"].endswith("assistant: there was a")
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    response = chat_client.chat.completions.create(extra_body=extra, **GREEDY | {"messages": begun})
    assert response.usage.prompt_tokens == len(tokens)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages: must be a list"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\]: must be an object with a role"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content: missing"),
        ({"messages": [{"role": "user", "content": 1}]}, r"messages\[0\].content: must be a text"),
        *(
            ({"messages": [{"role": "user", "content": [{"type": kind}]}]}, f"'{kind}' are not supported")
            for kind in ("input_audio", "file", "video_url")
        ),
        *(
            ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]}, message)
            for url, message in (
                (None, r"messages\[0\].content\[0\].image_url: must be a URL"),
                ({"url": "data:text/plain;base64,YQ=="}, "must be like data:image/png;base64"),
                ({"url": "data:image/png,abc"}, "must be like data:image/png;base64"),
                ({"url": "data:image/png;base64,?"}, "is not valid base64"),
                ({"url": "http://a.example/a.png"}, "must be a data: or https: URL"),
                ({"url": "file:///etc/passwd"}, "must be a data: or https: URL"),
                ({"url": "https://u:p@a.example/a.png"}, "must be a data: or https: URL without a user"),
                ({"url": "https://a.example/a.png"}, "images from 'a.example' are not allowed"),
                ({"url": "data:image/png;base64,YQ=="}, "images: got 1, but this model does not read images"),
            )
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]}, "JSON"),
        ({"messages": [{"role": "user", "content": None}]}, r"messages\[0\].content: missing"),
        ({"messages": USER, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"messages": USER, "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": USER, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "is not allowed"),
        ({"messages": USER, "chat_template_kwargs": {"messages": []}}, "is not allowed"),
        ({"messages": USER, "documents": ["text"]}, r"documents\[0\]: must be an object"),
        ({"messages": USER, "tools": []}, "tools: must be a list with at least one"),
        ({"messages": USER, "tools": [{"type": "function"}]}, r"tools\[0\]: must have the form"),
        ({"messages": USER, "tools": [{"function": {"name": "a b"}}]}, r"tools\[0\].function.name: must have"),
        ({"messages": USER, "tools": [{"function": {"name": "f", "parameters": []}}]}, "parameters: must be a JSON"),
        ({"messages": USER, "tools": [{"function": {"name": "f"}}] * 2}, "'f' occurs more than once"),
        ({"messages": USER, "tools": [{"function": {"name": "f"}}] * 1000}, "at most 256"),
        ({"messages": USER, "tools": TOOLS, "tool_choice": "always"}, "tool_choice: must be none"),
        ({"messages": USER, "tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice: must have the form"),
        ({"messages": USER, "tools": TOOLS, "tool_choice": FORCED}, "'other' is not among the tools; use weather"),
        ({"messages": USER, "tool_choice": "required"}, "tool_choice: requires tools"),
        (
            {"messages": USER, "tools": [{"function": {"name": "f", "parameters": {"type": 5}}}]}
            | {"tool_choice": "required"},
            "tools: the parameters of a tool are not supported|structured_outputs",
        ),
        ({"messages": USER, "parallel_tool_calls": "no"}, "parallel_tool_calls: expected `bool`"),
        ({"messages": USER, "reasoning_effort": "huge"}, "reasoning_effort: must be one of none, minimal"),
        ({"messages": USER, "response_format": {"type": "json"}}, "response_format: type must be text, json_object"),
        (
            {"messages": USER, "response_format": {"type": "text", "schema": {}}},
            "schema is a field of the type json_ob",
        ),
        (
            {"messages": USER, "response_format": {"type": "json_object", "json_schema": {}}},
            "json_schema is a field of",
        ),
        ({"messages": USER, "response_format": {"type": "json_object", "schema": []}}, "schema must be an object"),
        (
            {"messages": USER, "tools": TOOLS, "tool_choice": NAMED, "structured_outputs": {"regex": "a"}},
            "tool_choice: a required or named tool .* structured_outputs",
        ),
        (
            {"messages": USER, "tools": TOOLS, "tool_choice": NAMED, "response_format": {"type": "json_object"}}
            | {"structured_outputs": {"disable_any_whitespace": True}},
            "tool_choice: a required or named tool .* structured_outputs",
        ),
        (
            {"messages": USER, "tools": TOOLS, "tool_choice": "required", "response_format": {"type": "xml"}},
            "response_format: type must be text",
        ),
        ({"messages": USER, "top_logprobs": 2}, "top_logprobs: requires logprobs"),
        ({"messages": USER, "logprobs": 2}, "logprobs: expected `bool`"),
        ({"messages": [{"role": "user", "content": "a", "x": eval("[" * 40 + "]" * 40)}]}, "nested"),
        ({"messages": [{"role": "user", "content": "a " * 100_000}]}, "shorten|at most"),
        ({"messages": USER, "prompt": "a"}, "prompt"),
    ],
    ids=lambda value: str(value)[:70],
)
def test_an_invalid_chat_gets_400(chat, fields, message):
    answer = chat.request("/v1/chat/completions", {"model": "base", **fields})
    assert answer.status == 400, answer.body
    assert re.search(message, answer.message), answer.message


@pytest.mark.parametrize("arguments", ["", "{", "null", "[]", '"x"', '{"a": NaN}', '{"a": "\\ud83d"}', "[" * 99, None])
def test_an_output_of_the_server_is_accepted_as_history(chat, arguments):
    """Also if it was cut off, or if the model wrote arguments that are not an object."""
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    thought = {"role": "assistant", "content": None, "reasoning": "12 pl"}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    history = [*USER, thought, *USER, called, {"role": "tool", "tool_call_id": "c", "content": "x"}]
    for fields in ({}, {"continue_final_message": True, "messages": [*USER, thought]}):
        answer = chat.request("/v1/chat/completions", GREEDY | {"messages": history, "max_tokens": 1} | fields)
        assert answer.status == 200, answer.body


def test_a_model_without_a_template_is_a_clear_error(front):
    answer = front.request("/v1/chat/completions", GREEDY)
    assert answer.status == 400 and "no chat template" in answer.message


@pytest.mark.parametrize("has_base", [True, False])
def test_the_template_of_an_adapter_wins_for_it(chat, front, tmp_path, has_base):
    """Also where the checkpoint has none. A request cannot choose a file."""
    used = chat if has_base else front
    for name, text in (("own", "own<|eos|>{{ messages[0].content }}"), ("broken", "{% for %}")):
        (tmp_path / name).write_text(text)
    files = {name: str(tmp_path / name) for name in ("own", "broken", "absent")}
    with used.engine.connect("text", "supervisor") as supervisor:
        digests = dict.fromkeys([*files, "plain"], "sha256:0")
        supervisor.call("set_adapters", adapters=digests, chat_templates=files)
        try:
            tokens = tokens_of(used, USER, model="own")
            assert tokens.count(1) == 1
            text = used.request("/detokenize", {"tokens": tokens}).body["prompt"]
            assert text == "own<|eos|>Once upon a time"
            answers = {
                name: used.request("/v1/chat/completions", {"model": name, "messages": USER, "max_tokens": 1})
                for name in ("broken", "absent", "plain", "base")
            }
            forged = used.request("/tokenize", {"messages": USER, "template_file": files["own"]})
            plain = used.request("/tokenize", {"messages": USER})
        finally:
            supervisor.call("set_adapters", adapters={})
    assert (answers["broken"].status, answers["absent"].status) == (400, 503)
    assert (forged.status, forged.body) == (plain.status, plain.body)
    assert "template" in answers["broken"].message
    for name in ("plain", "base"):
        assert has_base or "no chat template" in answers[name].message
    assert (answers["base"].status == 200) == has_base


def workers(front):
    return front.text_workers("quire_engine.text.render_worker")


def test_a_template_that_takes_too_long_is_killed_and_others_are_served(chat, chat_client):
    wait_for(lambda: len(workers(chat)) == NUM_WORKERS, what="the processes of the template")
    answers = []
    loop = {"model": "base", "messages": [{"role": "user", "content": "loop"}], "max_tokens": 1}

    def request() -> None:
        # On a busy machine, the process can get too little CPU time to reach its limit.
        while not answers or (answers[-1].status == 503 and len(answers) < 9):
            answers.append(chat.request("/v1/chat/completions", loop))

    thread = threading.Thread(target=request)
    before, started = set(workers(chat)), time.monotonic()
    thread.start()
    while thread.is_alive():
        chat_client.chat.completions.create(**GREEDY | {"max_tokens": 1})
        assert chat.request("/health").status == 200
    assert answers[-1].status == 400 and "more than 5 s of CPU time" in answers[-1].message
    assert time.monotonic() - started < len(answers) * (5 * CPU_LIMIT_S + 5)
    wait_for(lambda: len(set(workers(chat)) - before) == min(len(answers), NUM_WORKERS), what="new processes")


def test_a_template_with_too_much_memory_is_an_error(chat, chat_client):
    answer = chat.request("/v1/chat/completions", {"messages": [{"role": "user", "content": "bomb"}]})
    assert answer.status == 400, answer.body
    assert chat_client.chat.completions.create(**GREEDY).choices[0].message.content


def test_killed_template_processes_are_replaced(chat, chat_client):
    before = workers(chat)
    for worker in before:
        worker.kill()
    answer = chat.request("/v1/chat/completions", GREEDY)
    assert answer.status == 200, answer.body
    # A process that was killed while it started is replaced when the next request arrives.
    wait_for(
        lambda: (
            chat.request("/v1/chat/completions", GREEDY).status == 200
            and len(set(workers(chat)) - set(before)) == NUM_WORKERS
        ),
        what="new processes",
    )
    chat_client.chat.completions.create(**GREEDY)
