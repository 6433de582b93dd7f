# SPDX-License-Identifier: Apache-2.0
"""The Messages API: a real front before a text process whose output the test writes. `make test-clients` runs the
`anthropic` package against a real server."""

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nodocker_cluster.ports import free_ports
from support import fake_engine
from support.openai_front import running_front
from support.pod_config import write_pod_config

from quire_server.openai.chat_messages import normalize_messages
from quire_server.openai.errors import ApiError
from quire_server.openai.http.ignored_fields import HEADER, IgnoredFields
from quire_server.openai.messages.content_blocks import ContentBlocks
from quire_server.openai.messages.message_request import parse_message_request
from quire_spec.protocol.parsed_output import (
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    merge_events,
)

pytestmark = pytest.mark.timeout(120)

TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
TURN = [
    *(["reasoning", "I need "], ["reasoning", "the weather."], ["content", "Let me "], ["content", "look."]),
    *(["call", 0, "weather", "call_1"], ["arguments", 0, '{"city":'], ["arguments", 0, ' "Oslo"}']),
    *(["call", 1, "weather", "call_2"], ["arguments", 1, "{}"]),
]
BLOCKS = [
    {"type": "thinking", "thinking": "I need the weather.", "signature": ""},
    {"type": "text", "text": "Let me look."},
    {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Oslo"}},
    {"type": "tool_use", "id": "call_2", "name": "weather", "input": {}},
]
ROLES = ("user", "assistant", "system")
USER = {"role": "user", "content": "Weather?"}
RECORDED = [
    json.loads(line) for line in Path(__file__).with_name("claude_code_requests.jsonl").read_text().splitlines()
]
"""Requests of Claude Code 2.1.197 with its own fields and headers. Long texts are cut off."""


@pytest.fixture(scope="module")
def post(tmp_path_factory):
    """Return a function that sends a request to a front with API keys."""
    folder = tmp_path_factory.mktemp("messages")
    (folder / "keys").mkdir()
    (folder / "keys/alice").write_text("secret")
    env = fake_engine.install(folder / "fakes")
    [port] = free_ports(1)
    names = ("quire_engine.core", "quire_engine.text", "quire_server.openai")
    settings = {"openai": {"port": port, "apiKeysDir": str(folder / "keys"), "maxBodyBytes": 100_000}}
    config_file = write_pod_config(folder / "pod.json", settings)
    common = ["--config", str(config_file), "--run-dir", str(folder)]
    processes = [subprocess.Popen([sys.executable, "-m", name, *common], env=env) for name in names]
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20)

    def send(events=(), path="/v1/messages", headers=None, **fields):
        body = {"model": "base", "max_tokens": 99, "messages": [{"role": "user", "content": json.dumps(events)}]}
        body = {name: value for name, value in (body | fields).items() if value is not None}
        return client.post(path, json=body, headers={"x-api-key": "secret"} if headers is None else headers)

    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                if send().status_code == 200:
                    break
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield send
    finally:
        client.close()
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(20)


@pytest.fixture(scope="module")
def front(tmp_path_factory):
    with running_front(tmp_path_factory.mktemp("engine")) as front:
        yield front


def events_of(response) -> list[dict]:
    """Return the events of a stream, whose types are also their names."""
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    events = []
    for part in response.text.strip().split("\n\n"):
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def message_of(events: list[dict]) -> dict:
    """Build the message of a stream, as clients do."""
    message, texts = dict(events[0]["message"]), {}
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                texts[event["index"]] = ""
            case "content_block_delta":
                (_, text) = (event["delta"].pop("type"), *event["delta"].values())
                texts[event["index"]] += text
            case "content_block_stop":
                block = message["content"][event["index"]]
                text = texts.pop(event["index"])
                name = {"tool_use": "input"}.get(block["type"], block["type"])
                block[name] = json.loads(text or "{}") if name == "input" else text
            case "message_delta":
                message |= event["delta"]
                message["usage"] = message["usage"] | event["usage"]
    assert not texts and events[-1]["type"] == "message_stop"
    return message


def chat_of(post, **fields) -> dict:
    """Return the conversation that the text process gets."""
    response = post(**fields)
    assert response.status_code == 200, response.text
    return json.loads(response.json()["content"][0]["text"])


def test_a_complete_message(post):
    response = post(TURN, tools=[TOOL])
    message = response.json()
    assert message["content"] == BLOCKS and message["stop_reason"] == "tool_use"
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "base")
    assert message["id"].startswith("msg_") and response.headers["request-id"] in message["id"]
    assert message["usage"] == {
        "input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": len(TURN),
    }
    plain = post([["content", "a"]]).json()
    assert (plain["content"], plain["stop_reason"]) == ([{"type": "text", "text": "a"}], "end_turn")
    assert post([["content", "a"]], max_tokens=1).json()["stop_reason"] == "max_tokens"


def test_a_stream_builds_the_same_message(post):
    events = events_of(post(TURN, tools=[TOOL], stream=True))
    assert events[0]["message"]["content"] == [] and events[0]["message"]["usage"]["output_tokens"] == 0
    streamed, complete = message_of(events), post(TURN, tools=[TOOL]).json()
    assert streamed | {"id": ""} == complete | {"id": ""}
    kinds = [event["delta"].get("type") for event in events if event["type"] == "content_block_delta"]
    assert kinds == [None] * 7, "message_of has removed the types"
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use", "tool_use"]


def test_a_whole_conversation_goes_back_as_input(post):
    results = [
        {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
        {"type": "tool_result", "tool_use_id": "call_2", "content": "no city", "is_error": True},
        {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
    ]
    messages = [
        *(USER, {"role": "system", "content": "Answer."}, {"role": "assistant", "content": BLOCKS}),
        {"role": "user", "content": results},
    ]
    system = [{"type": "text", "text": "x-anthropic-billing-header: v=1"}, {"type": "text", "text": "Be brief."}]
    chat = chat_of(post, messages=messages, system=system, tools=[TOOL], tool_choice={"type": "none"})
    texts = [(message["role"], message["content"]) for message in chat["messages"]]
    assert texts == [
        *(("system", "Be brief."), ("user", "Weather?\nAnswer."), ("assistant", "Let me look.")),
        *(("tool", "rain"), ("tool", "Error: no city"), ("user", "Go on.")),
    ]
    turn = chat["messages"][2]
    assert turn["reasoning"] == "I need the weather."
    assert [call["function"]["arguments"] for call in turn["tool_calls"]] == [{"city": "Oslo"}, {}]
    assert chat["messages"][3]["tool_call_id"] == "call_1"
    assert chat["tools"][0]["function"]["parameters"] == TOOL["input_schema"]
    assert chat["add_generation_prompt"] and not chat["continue_final_message"]


PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
PNG_PART = {"type": "image_url", "image_url": "data:image/png;base64,aGk="}


def test_documents_search_results_and_images_of_results_become_parts():
    texts = [{"type": "text", "text": "page 1"}, {"type": "text", "text": "page 2"}]
    blocks = [
        {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}},
        {"type": "document", "context": "C", "source": {"type": "content", "content": [*texts, PNG]}},
        {"type": "document", "source": {"type": "content", "content": "plain"}},
        {"type": "search_result", "title": "S", "source": "https://a.example", "content": texts, "citations": {}},
    ]
    turn = [{"type": "tool_use", "id": id_, "name": "read", "input": {}} for id_ in ("a", "b")]
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": [texts[0], PNG]},
        {"type": "tool_result", "tool_use_id": "b", "content": blocks},
        {"type": "text", "text": "Read it."},
    ]
    messages = [
        {"role": "user", "content": blocks},
        {"role": "assistant", "content": turn},
        {"role": "user", "content": results},
    ]
    ignored = IgnoredFields(rejects=True)
    _, chat = parse_message_request({"model": "base", "messages": messages}, ignored, True)
    search = "S\nhttps://a.example\npage 1\npage 2"
    assert [message["content"] for message in chat["messages"]] == [
        ["T\nD", "C", "page 1", "page 2", PNG_PART, "plain", search],
        [],
        "page 1",
        f"T\nD\nC\npage 1\npage 2\nplain\n{search}",
        [PNG_PART, PNG_PART, "Read it."],
    ]
    assert not ignored


def test_models_have_the_form_of_the_api_for_its_clients(front):
    headers = {"anthropic-version": "2023-06-01"}
    listed = front.request("/v1/models", headers=headers).body
    [card, *_] = listed["data"]
    assert (listed["first_id"], listed["has_more"]) == (card["id"], False) == ("base", False)
    assert (card["type"], card["display_name"], card["max_input_tokens"]) == ("model", "base", 2047)
    assert front.request("/v1/models/base", headers=headers).body == card
    assert front.request("/v1/models/absent", headers=headers).body["error"]["type"] == "not_found_error"
    assert front.request("/v1/models").body["object"] == "list"


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_many_parts_are_joined_in_linear_time(role):
    block = {"type": "thinking", "thinking": "x" * 60} if role == "assistant" else {"type": "text", "text": "x" * 60}
    content = [block] * 10
    messages = [USER, *([{"role": role, "content": content}] * 9_999)]
    started = time.process_time()
    _, chat = parse_message_request({"model": "base", "messages": messages}, IgnoredFields(), True)
    normalized = normalize_messages(chat["messages"])
    assert time.process_time() - started < 2
    assert len(normalized[-1]["content" if role == "user" else "reasoning"]) > 99_000 * 61


def test_the_last_message_of_the_assistant_is_continued(post):
    chat = chat_of(post, messages=[USER, {"role": "assistant", "content": "It is"}])
    assert chat["continue_final_message"] and not chat["add_generation_prompt"]


@pytest.mark.parametrize(
    ("thinking", "effort", "expected"),
    [
        (None, None, {}),
        ({"type": "disabled"}, None, {"enable_thinking": False, "thinking": False}),
        ({"type": "adaptive"}, "high", {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}),
        ({"type": "enabled", "budget_tokens": 1024}, None, {"enable_thinking": True, "thinking": True}),
    ],
)
def test_thinking_reaches_the_template(post, thinking, effort, expected):
    output_config = None if effort is None else {"effort": effort}
    response = post([], messages=[USER], thinking=thinking, output_config=output_config)
    chat = json.loads(response.json()["content"][0]["text"])
    assert chat["template_kwargs"] == expected
    # The model of the fake text process has no reasoning.
    has_budget = thinking is not None and "budget_tokens" in thinking
    assert response.headers.get(HEADER.decode()) == ("thinking.budget_tokens" if has_budget else None)
    omitted = post(TURN, thinking={"type": "enabled", "display": "omitted"}).json()
    assert omitted["content"] == BLOCKS[1:]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"model": None}, "model"),
        ({"max_tokens": None}, "max_tokens: missing"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "system", "content": "a"}]}, "a message of the user"),
        ({"messages": [USER] * 10_001}, "body: larger than"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content: must be a text"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{**PNG, "source": {**PNG["source"], "media_type": "text/html"}}]}
                ]
            },
            "source.media_type: must be the type of an image, such as image/png, got 'text/html'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "source.type: must be base64 or url",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "url"}}]}]}, "source.type"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]}, "input"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"stop": ["a"]}, "use stop_sequences"),
        ({"n": 2}, "use chat completions"),
        ({"stop_sequences": [1]}, "stop_sequences[0]"),
        ({"regex": "a+"}, "regex"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"thread": {"type": "create"}}, "thread: is not supported"),
        ({"compaction": {"type": "summarize"}}, "compaction: is not supported"),
        (
            {"system": [{"type": "document", "source": {"type": "content", "content": [{"type": "image"}]}}]},
            "system[0].source.content[0].source.type",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type: 'web_search_20250305'"),
        ({"tools": [TOOL, TOOL]}, "occurs more than once"),
        ({"tool_choice": {"type": "any"}}, "requires tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "'g' is not among the tools"),
        ({"thinking": {"type": "always"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": -5}}, "thinking.budget_tokens"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort: must be one of"),
        ({"stop_sequences": [""]}, "stop_sequences: "),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_an_invalid_request_gets_400_in_the_form_of_the_api(post, fields, problem):
    response = post(**fields)
    document = response.json()
    assert response.status_code in (400, 413), document
    assert problem in document["error"]["message"] and document["type"] == "error"
    kind = "invalid_request_error" if response.status_code == 400 else "request_too_large"
    assert document["error"]["type"] == kind and document["request_id"] == response.headers["request-id"]


def test_other_errors_have_the_form_of_the_api(post):
    for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer wrong", "x-api-key": "secret"}):
        response = post(headers=headers)
        assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
    assert post(headers={"authorization": "Bearer secret"}).status_code == 200
    assert post(path="/v1/chat/completions").status_code == 200, "every route accepts X-Api-Key"
    for response in (post(model="absent"), post(path="/v1/messages/batches")):
        assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
    for stream in (False, True):
        response = post([["fail"]], stream=stream)
        assert (response.status_code, response.json()["error"]["type"]) == (529, "overloaded_error")
        assert response.headers["retry-after"]
    events = events_of(post([["content", "a"], ["fail"]], stream=True))
    assert events[-1]["error"]["type"] == "overloaded_error" and events[0]["type"] == "message_start"
    assert post(path="/v1/chat/completions", headers={}).json()["error"]["code"] == 401


def test_unknown_fields_are_ignored_and_named(post):
    block = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "vendor": 1}
    fields = {"messages": [{"role": "user", "content": [block]}], "context_management": {"edits": []}}
    response = post(**fields, metadata={"user_id": "u", "plan": 1}, service_tier="auto", cache_control={})
    assert response.status_code == 200
    names = {"context_management", "messages.content.vendor", "metadata.plan"}
    assert set(response.headers[HEADER.decode()].split(",")) == names


@pytest.mark.parametrize("request_", RECORDED, ids=range(len(RECORDED)))
def test_requests_of_a_coding_agent_succeed(post, front, request_):
    headers = {name: value for name, value in request_["headers"].items() if name.lower() != "authorization"}
    response = post(**request_["body"] | {"model": "base"}, path=request_["path"], headers=headers | KEY)
    chat = json.loads(message_of(events_of(response))["content"][0]["text"])
    assert response.headers[HEADER.decode()] == "context_management"
    assert {message["role"] for message in chat["messages"]} <= {"system", "user", "assistant", "tool"}
    assert len(chat["tools"]) == len(request_["body"]["tools"]) >= 20
    body = request_["body"] | {"model": "base", "max_tokens": 20, "stream": False}
    answer = front.request(request_["path"], body, request_["headers"])
    assert answer.status == 200 and answer.body["usage"]["output_tokens"] <= 20, answer.body
    counted = front.request("/v1/messages/count_tokens?beta=true", {n: body[n] for n in body if n != "max_tokens"})
    usage = answer.body["usage"]
    assert counted.body == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


KEY = {"x-api-key": "secret"}


def test_a_real_engine_stops_thinks_and_counts(front):
    body = {"model": "base", "messages": [{"role": "user", "content": "Tell a story."}], "max_tokens": 60}
    body |= {"temperature": 0, "thinking": {"type": "disabled"}}
    whole = front.request("/v1/messages", body).body
    chat = {"chat_template_kwargs": {"enable_thinking": False}, "messages": body["messages"], "temperature": 0}
    same = front.request("/v1/chat/completions", chat | {"max_tokens": 60}).body["choices"][0]["message"]
    text = whole["content"][0]["text"]
    assert text == same["content"] and len(text) > 20
    stopped = front.request("/v1/messages", body | {"stop_sequences": [text[10:13]]}).body
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", text[10:13])
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 3}, "max_tokens": 40}
    answer = front.request("/v1/messages", body | thinking)
    assert answer.status == 200 and HEADER.decode() not in answer.headers
    long = body | {"messages": [{"role": "user", "content": "a b c d " * 1500}]}
    error = front.request("/v1/messages", long).body["error"]["message"]
    assert error.startswith("prompt is too long: ") and error.endswith(" tokens > 2047 maximum")
    count = front.request("/v1/messages/count_tokens", {n: v for n, v in long.items() if n != "max_tokens"}).body
    assert f" {count['input_tokens']} tokens" in error
    nearly_full = [{"role": "user", "content": "a b c d " * 480}]
    full = front.request("/v1/messages", body | {"messages": nearly_full, "max_tokens": 999, "ignore_eos": True}).body
    assert full["stop_reason"] == "model_context_window_exceeded"


@given(
    st.recursive(
        st.none() | st.text() | st.integers(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "type",
                        "role",
                        "content",
                        "text",
                        "thinking",
                        "input",
                        "name",
                        "source",
                        "data",
                        "title",
                        "system",
                    ]
                )
                | st.text(),
                inner
                | st.sampled_from(
                    [*("text", "document", "search_result", "thinking", "tool_use", "tool_result"), *ROLES, {}]
                ),
            )
        ),
    )
)
def test_any_input_is_parsed_or_rejected(value):
    for fields in ({"messages": value}, {"messages": [{"role": "user", "content": value}], "system": value}):
        try:
            _, chat = parse_message_request({"model": "base", **fields}, IgnoredFields(), True)
        except ApiError as error:
            assert error.status == 400 and len(error.message) < 1000
        else:
            roles = [message["role"] for message in chat["messages"]]
            pairs = itertools.pairwise(roles)
            assert all(first != second or first == "tool" for first, second in pairs)
            assert "system" not in roles[1:]


@given(
    st.lists(
        st.one_of(
            st.builds(ContentDelta, st.text(min_size=1)),
            st.builds(ReasoningDelta, st.text(min_size=1)),
            st.builds(ToolCallStart, st.just(0), st.sampled_from(["f", "g"]), st.just("id")),
        )
    )
)
def test_blocks_have_the_events_of_any_output(events):
    """Every block opens once, closes once, and its deltas add up to its text."""
    events = [
        e
        for event in events
        for e in ([event, ToolCallArguments(0, '{"a": 1}')] if type(event) is ToolCallStart else [event])
    ]
    blocks = ContentBlocks()
    sent = b"".join([b"".join(blocks.add(event)) for event in events]) + b"".join(blocks.close())
    start = b'data: {"type":"message_start","message":{"content":[],"usage":{}}}\n\ndata: {"type":"message_stop"}\n\n'
    first, last, _ = start.split(b"\n\n")
    documents = [json.loads(line[6:]) for line in sent.split(b"\n") if line.startswith(b"data: ")]
    message = message_of([json.loads(first[6:]), *documents, json.loads(last[6:])])
    assert message["content"] == blocks.blocks
    merged = merge_events(events)
    assert "".join(block.get("text", "") for block in blocks.blocks) == (merged.content or "")
    assert "".join(block.get("thinking", "") for block in blocks.blocks) == (merged.reasoning or "")
