# SPDX-License-Identifier: Apache-2.0
"""The Responses API through the `openai` client: a real front before a text process whose output the test writes."""

import json
import subprocess
import sys
import time

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nodocker_cluster.ports import free_ports
from support import fake_engine
from support.pod_config import write_pod_config

from quire_server.openai.errors import ApiError
from quire_server.openai.http.ignored_fields import IgnoredFields
from quire_server.openai.responses.output_items import OutputItems
from quire_server.openai.responses.response_request import parse_response_request
from quire_spec.protocol.parsed_output import (
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    merge_events,
)

pytestmark = pytest.mark.timeout(120)

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": False}
TURN = [
    *(["reasoning", "I need "], ["reasoning", "the weather."], ["content", "Let me "], ["content", "look."]),
    *(["call", 0, "weather", "call_1"], ["arguments", 0, '{"city":'], ["arguments", 0, ' "Oslo"}']),
    *(["call", 1, "weather", "call_2"], ["arguments", 1, "{}"]),
]
REASONING_EVENTS = ["output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"]
MESSAGE_EVENTS = ["output_item.added", "content_part.added", "output_text.delta", "output_text.delta"]
CALL_EVENTS = ["output_item.added", "function_call_arguments.delta"]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("responses")
    env = fake_engine.install(folder / "fakes")
    [port] = free_ports(1)
    names = ("quire_engine.core", "quire_engine.text", "quire_server.openai")
    config_file = write_pod_config(folder / "pod.json", {"openai": {"port": port}})
    common = ["--config", str(config_file), "--run-dir", str(folder)]
    processes = [subprocess.Popen([sys.executable, "-m", name, *common], env=env) for name in names]
    try:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=20) as client:
            deadline = time.monotonic() + 30
            while True:
                try:
                    if client.responses.create(model="base", input="[]").status == "completed":
                        break
                except openai.OpenAIError:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            yield client
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(20)


def create(client, events=(), **fields):
    return client.responses.create(model="base", **{"input": json.dumps(events), **fields})


def kinds(items):
    return [item.type for item in items]


def test_a_complete_response(client):
    response = create(client, TURN, tools=[TOOL], instructions="Be brief.", metadata={"a": "b"}, store=True)
    assert kinds(response.output) == ["reasoning", "message", "function_call", "function_call"]
    assert response.output[0].content[0].text == "I need the weather."
    assert response.output_text == "Let me look."
    calls = [(call.call_id, call.name, call.arguments, call.status) for call in response.output[2:]]
    assert calls[0] == ("call_1", "weather", '{"city": "Oslo"}', "completed") and calls[1][2] == "{}"
    assert response.status == "completed" and response.metadata == {"a": "b"} and response.id.startswith("resp_")
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (7, len(TURN), 7 + len(TURN))
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (2, 2)


def test_a_stream_has_the_events_in_order_and_the_same_output(client):
    with client.responses.stream(model="base", input=json.dumps(TURN), tools=[TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.type.removeprefix("response.") for event in events] == [
        *("created", "in_progress", *REASONING_EVENTS, "reasoning_text.done", "content_part.done", "output_item.done"),
        *(*MESSAGE_EVENTS, "output_text.done", "content_part.done", "output_item.done"),
        *(*CALL_EVENTS, "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        *(*CALL_EVENTS, "function_call_arguments.done", "output_item.done", "completed"),
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    complete = create(client, TURN, tools=[TOOL])

    def without_ids(items):
        for item in (documents := [item.to_dict() for item in items]):
            item["id"] = item["parsed_arguments"] = None
            for part in item.get("content", []):
                part["parsed"] = None
        return documents

    assert without_ids(final.output) == without_ids(complete.output)
    assert final.usage == complete.usage and final.output_text == "Let me look."


def test_a_whole_conversation_goes_back_as_input(client):
    """The output of a response is valid input, and becomes one turn of the assistant."""
    first = create(client, TURN, tools=[TOOL])
    history = [{"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}, *first.output]
    history += [{"type": "function_call_output", "call_id": f"call_{i}", "output": "rain"} for i in (1, 2)]
    history += [{"role": "developer", "content": "Answer."}]
    response = create(client, input=history, tools=[TOOL], instructions="Be brief.", reasoning={"effort": "low"})
    chat = json.loads(response.output_text)
    roles = ["system", "user", "assistant", "tool", "tool", "system"]
    assert [message["role"] for message in chat["messages"]] == roles
    turn = chat["messages"][2]
    assert (turn["content"], turn["reasoning"]) == ("Let me look.", "I need the weather.")
    functions = [call["function"] for call in turn["tool_calls"]]
    assert functions[0] == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert chat["messages"][3] == {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
    assert chat["tools"][0]["function"]["name"] == "weather"
    assert chat["template_kwargs"]["reasoning_effort"] == "low"


@pytest.mark.parametrize("stream", [False, True])
def test_an_output_that_is_cut_is_incomplete(client, stream):
    events = [["content", "a"], ["content", "b"]]
    answer = create(client, events, max_output_tokens=2, stream=stream)
    if stream:
        events = list(answer)
        assert events[-1].type == "response.incomplete"
        answer = events[-1].response
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete" and answer.output_text == "ab"


def test_a_failure_in_the_stream_is_an_event_and_one_before_it_a_status(client):
    *_, last = create(client, [["content", "a"], ["fail"]], stream=True)
    assert (last.type, last.response.status, last.response.error.code) == ("response.failed", "failed", "server_error")
    assert "restarting" in last.response.error.message
    with pytest.raises(openai.InternalServerError, match="restarting") as error:
        create(client, [["fail"]], stream=True)
    assert error.value.status_code == 503
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="absent", input="a", stream=True)


def test_nothing_is_stored(client):
    response = create(client)
    assert response.store is False
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="not stored"):
            call(response.id)
    with pytest.raises(openai.NotFoundError, match="send the whole conversation"):
        create(client, previous_response_id=response.id)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"n": 2}, "use chat completions"),
        ({"max_tokens": 2}, "use max_output_tokens"),
        ({"suffix": "x"}, "suffix"),
        ({"regex": "a+"}, "regex"),
        ({"temperature": 1e9}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "'web_search' is not supported"),
        ({"tool_choice": "required"}, "requires tools"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {"a": {"b": 1}}}, "metadata"),
        ({"text": json.loads('{"format":' * 200 + "{}" + "}" * 200)}, "text: is nested more than 32 levels"),
        ({"input": 5}, "input"),
        ({"input": ["a"]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "send the item itself"),
        ({"input": [{"type": "computer_call"}]}, "'computer_call' are not supported"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]},
            "a data: or https: URL",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "file_id 'f' has no file",
        ),
        ({"input": [{"type": "function_call", "name": "f", "arguments": 5}]}, "JSON object"),
        ({"input": [{"role": "user", "content": "a"}] * 10_001}, "at most 10000"),
        ({"input": []}, "at least one message"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_field_that_cannot_be_honoured_is_an_error_that_names_it(client, fields, problem):
    with pytest.raises(openai.BadRequestError) as error:
        create(client, extra_body=fields)
    assert problem in str(error.value) and len(str(error.value)) < 1000


def test_fields_of_clients_that_change_nothing_are_accepted(client):
    fields = {"include": ["reasoning.encrypted_content"], "service_tier": "auto", "prompt_cache_key": "k"}
    fields |= {"reasoning": {"summary": "auto"}, "text": {"verbosity": "low"}, "user": "u"}
    assert create(client, [["content", "a"]], **fields).output_text == "a"


@given(
    st.recursive(
        st.none() | st.text() | st.integers(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(
                    ["type", "role", "content", "output", "name", "arguments", "call_id", "text", "summary"]
                )
                | st.text(),
                inner
                | st.sampled_from(
                    ["message", "reasoning", "function_call", "function_call_output", "assistant", "user"]
                ),
            )
        ),
    )
)
def test_any_input_is_parsed_or_rejected(value):
    try:
        _, chat = parse_response_request({"input": value}, IgnoredFields())
    except ApiError as error:
        assert error.status == 400 and len(error.message) < 1000
    else:
        assert all(isinstance(message, dict) for message in chat["messages"])


@given(
    st.lists(
        st.one_of(
            st.builds(ContentDelta, st.text(min_size=1)),
            st.builds(ReasoningDelta, st.text(min_size=1)),
            st.builds(ToolCallStart, st.just(0), st.sampled_from(["f", "g"]), st.just("id")),
        )
    )
)
def test_items_have_the_events_of_any_output(events):
    """Every item opens once, closes once, and its deltas add up to its text."""
    events = [
        e
        for event in events
        for e in ([event, ToolCallArguments(0, "{}")] if type(event) is ToolCallStart else [event])
    ]
    items = OutputItems()
    streamed = [streamed for event in events for streamed in items.add(event)] + list(items.close())
    names = [name for name, _ in streamed]
    assert names.count("response.output_item.added") == names.count("response.output_item.done") == len(items.items)
    for i, item in enumerate(items.items):
        own = [(name, fields) for name, fields in streamed if fields.get("output_index") == i]
        assert own[0][0] == "response.output_item.added" and own[-1] == (
            "response.output_item.done",
            {"output_index": i, "item": item},
        )
        text = "".join(fields["delta"] for _, fields in own if "delta" in fields)
        assert text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
    texts = [item["content"][0]["text"] for item in items.items if item["type"] == "message"]
    assert "".join(texts) == merge_events(e for e in events if type(e) is ContentDelta).content
