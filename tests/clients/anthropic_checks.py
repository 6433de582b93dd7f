# SPDX-License-Identifier: Apache-2.0
"""Checks of a running Messages API with the client that users have; run.py starts both.

Runs in the environment of requirements-anthropic.txt, which contains nothing of Quire: `python anthropic_checks.py
BASE_URL`.
"""

import asyncio
import sys
import typing

import anthropic
from anthropic import types
from anthropic.types import beta, message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params

MODELS = ("tales", "pirate", "sql", "tools")
MESSAGES = [{"role": "user", "content": "Tell a story."}]
GREEDY = {"extra_body": {"temperature": 0}}
COMMON = {"max_tokens": 60, "system": "Be brief.", "thinking": {"type": "disabled"}, **GREEDY}
TOOL = {
    "name": "weather",
    "description": "Get the weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}

TEXTS = [{"type": "text", "text": "A text."}]
NAMED = "named"
"""The field is ignored, and the response names it."""
FIELDS = {
    **dict.fromkeys(("model", "messages", "max_tokens", "system", "stop_sequences", "stream"), "honoured"),
    **dict.fromkeys(("tools", "tool_choice", "thinking", "metadata", "output_config"), "honoured"),
    **dict.fromkeys(("cache_control", "service_tier", "inference_geo", "speed"), "ignored"),
    **dict.fromkeys(
        ("diagnostics", "context_management", "billing_policy", "fallbacks", "fallback_credit_token"), NAMED
    ),
    **dict.fromkeys(("container", "mcp_servers", "thread", "compaction"), "refused"),
    # Parameters of the client, which it sends as headers or does not send.
    **dict.fromkeys(("betas", "user_profile_id", "workspace_id", "output_format"), "client"),
}
"""The outcome for each field of a request that the package has. A release with another field fails the check."""
BLOCKS = {
    "text": {"text": "A text."},
    "document": {"source": {"type": "content", "content": TEXTS}},
    "search_result": {"title": "T", "source": "S", "content": TEXTS},
    "thinking": {"thinking": "Hm.", "signature": ""},
    "redacted_thinking": {"data": ""},
    "tool_use": {"id": "call", "name": "weather", "input": {}},
    "tool_result": {"tool_use_id": "call", "content": TEXTS},
}
"""Blocks that are served. The tiny model has no images. All other blocks are refused by the names of their types."""
UNIONS = (
    (types.ContentBlockParam, beta.BetaContentBlockParam),
    (types.ToolUnionParam, beta.BetaToolUnionParam),
)
ASSISTANT_BLOCKS = ("thinking", "redacted_thinking", "tool_use")


def client_of(url):
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


def check_messages(url):
    client = client_of(url)
    assert set(MODELS) <= {model.id for model in client.models.list()}
    texts = {}
    for model in MODELS:
        whole = client.messages.create(model=model, messages=MESSAGES, **COMMON)
        with client.messages.stream(model=model, messages=MESSAGES, **COMMON) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        texts[model] = whole.content[0].text
        assert text == texts[model] == final.content[0].text and whole.model == final.model == model
        assert whole.stop_reason == final.stop_reason and whole._request_id
        assert final.usage.output_tokens == whole.usage.output_tokens > 0
        counted = client.messages.count_tokens(model=model, messages=MESSAGES, system=COMMON["system"])
        assert counted.input_tokens > 0
        stopped = client.messages.create(model=model, messages=MESSAGES, stop_sequences=[text[5:8]], **COMMON)
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[5:8])
    assert len(set(texts.values())) == len(MODELS), texts


def check_tools(url):
    """Inputs match the schema with every adapter, because a grammar enforces it, and go back as a conversation."""
    client = client_of(url)
    choice = {"type": "any", "disable_parallel_tool_use": True}
    fields = {**COMMON, "max_tokens": 200, "tools": [TOOL]}
    for model in MODELS:
        asked = client.messages.create(model=model, messages=MESSAGES, tool_choice=choice, **fields)
        with client.messages.stream(model=model, messages=MESSAGES, tool_choice=choice, **fields) as stream:
            events = list(stream)
            streamed = stream.get_final_message()
        [call] = asked.content
        assert call.type == "tool_use" and asked.stop_reason == streamed.stop_reason == "tool_use"
        assert call.input["city"] in ("Paris", "Oslo") and 1 <= call.input["days"] <= 9
        assert streamed.content[0].input == call.input and "input_json" in {event.type for event in events}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."}
        turns = [*MESSAGES, {"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
        answer = client.messages.create(model=model, messages=turns, tool_choice={"type": "none"}, **fields)
        assert answer.content[0].type == "text"


def check_thinking(url):
    client = client_of(url)
    sums = [{"role": "user", "content": "What is 12 plus 7?"}]
    fields = {"model": "tales", "max_tokens": 200, "messages": sums, **GREEDY}
    whole = client.messages.create(thinking={"type": "enabled", "budget_tokens": 1024}, **fields)
    assert [block.type for block in whole.content] == ["thinking", "text"] and whole.content[0].thinking
    with client.messages.stream(thinking={"type": "adaptive"}, **fields) as stream:
        assert {"thinking", "text"} <= {event.type for event in stream}
        final = stream.get_final_message()
    assert final.content[0].thinking == whole.content[0].thinking and final.content[1].text == whole.content[1].text
    turns = [*sums, {"role": "assistant", "content": whole.content}, *sums]
    assert client.messages.create(**fields | {"messages": turns}).content
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
    config = {"format": {"type": "json_schema", "schema": schema}}
    constrained = client.messages.create(thinking={"type": "disabled"}, output_config=config, **fields)
    assert constrained.content[-1].text.startswith('{"answer":')


def check_errors(url):
    client = client_of(url)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    server_tool = {"type": "web_search_20250305", "name": "web_search"}
    for error, kind, fields in (
        (anthropic.NotFoundError, "not_found_error", {"model": "absent"}),
        (anthropic.BadRequestError, "invalid_request_error", {"extra_body": {"temperature": -1}}),
        (anthropic.BadRequestError, "invalid_request_error", {"messages": [{"role": "user", "content": [image]}]}),
        (anthropic.BadRequestError, "invalid_request_error", {"tools": [server_tool]}),
        (anthropic.ContentTooLargeError, "request_too_large", {"system": "x" * 9 * 2**20}),
    ):
        for stream in (False, True):
            try:
                client.messages.create(
                    **{"model": "tales", "messages": MESSAGES, "max_tokens": 5, "stream": stream, **fields}
                )
            except error as caught:
                assert caught.body["type"] == "error" and caught.body["error"]["type"] == kind, caught.body
                assert caught.request_id
            else:
                raise AssertionError(f"no {error.__name__} for {str(fields)[:100]}")
    beta = client.beta.messages.create(
        model="tales",
        messages=MESSAGES,
        max_tokens=5,
        betas=["context-management-2025-06-27"],
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
        metadata={"user_id": "u"},
    )
    assert beta.content


def check_fields(url):
    """Each field, block and tool of the package is honoured, ignored with a name, or refused by its name."""
    client = client_of(url)
    common = {"model": "tales", "messages": MESSAGES, "max_tokens": 2}

    def send(**fields):
        """Return the names of the ignored fields, or the message of the error."""
        try:
            raw = client.messages.with_raw_response.create(**common, extra_body=fields)
        except anthropic.BadRequestError as error:
            return error.body["error"]["message"]
        return raw.headers.get("x-quire-ignored-fields", "").split(",")

    names = set()
    for module in (message_create_params, beta_message_create_params):
        for kind in ("Base", "Streaming"):
            names |= getattr(module, f"MessageCreateParams{kind}").__annotations__.keys()
    names |= beta_message_create_params.ParseMessageCreateParamsBase.__annotations__.keys()
    assert names == FIELDS.keys(), names ^ FIELDS.keys()
    for name, outcome in FIELDS.items():
        if outcome in ("ignored", NAMED):
            assert (name in send(**{name: "auto"})) == (outcome == NAMED), name
        elif outcome == "refused":
            assert name in str(send(**{name: [{"type": "url"}]}))
    blocks, tools = (_types_of(params) | _types_of(beta_params) for params, beta_params in UNIONS)
    assert BLOCKS.keys() < blocks and "custom" in tools, (blocks, tools)
    for block in blocks:
        role = "assistant" if block in ASSISTANT_BLOCKS else "user"
        answer = send(messages=[*MESSAGES, {"role": role, "content": [{"type": block, **BLOCKS.get(block, {})}]}])
        assert answer == [""] if block in BLOCKS else f"'{block}'" in answer or block == "image", (block, answer)
    for tool in tools:
        answer = send(tools=[TOOL | {"type": tool}])
        assert answer == [""] if tool == "custom" else "tools[0].type: " in answer, (tool, answer)


def _types_of(union):
    """Return the values that the field type has in the members of a union."""
    values = set()
    for member in typing.get_args(union):
        if hasattr(member, "__total__"):  # a TypedDict; others are types of responses
            annotation = typing.get_type_hints(member)["type"]
            while not isinstance(annotation, str):
                annotation = next(iter(typing.get_args(annotation)), "")
            values.add(annotation or "custom")
        else:
            values |= _types_of(member)
    return values


def check_asyncio(url):
    async def stream(client, model):
        async with client.messages.stream(model=model, messages=MESSAGES, **COMMON) as stream:
            assert (await stream.get_final_message()).usage.output_tokens > 0

    async def run():
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
            await asyncio.gather(*(stream(client, model) for model in MODELS * 8))

    asyncio.run(run())


def main(url):
    """Run all checks; the first failure ends the run."""
    for check in (check_messages, check_tools, check_thinking, check_errors, check_fields, check_asyncio):
        check(url.removesuffix("/v1"))
        print(f"anthropic {anthropic.__version__}: {check.__name__} passed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
