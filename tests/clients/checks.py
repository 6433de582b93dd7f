# SPDX-License-Identifier: Apache-2.0
"""Checks of a running OpenAI front with the client that users have; run.py starts both.

Runs in the environment of requirements.txt, which contains nothing of Quire: `python checks.py BASE_URL`.
"""

import asyncio
import sys
from typing import Annotated, Literal

import openai
import pydantic

MODELS = ("tales", "pirate", "sql", "tools")
GREEDY = {"max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell a story."}]


def check_openai(url):
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    cards = {card.id: card for card in client.models.list()}
    assert set(MODELS) <= set(cards) and cards["sql"].parent == "tales"
    texts = {}
    for model in MODELS:
        whole = client.completions.create(model=model, prompt="Once upon a time", **GREEDY)
        chunks = client.completions.create(model=model, prompt="Once upon a time", stream=True, **GREEDY)
        texts[model] = whole.choices[0].text
        assert "".join(chunk.choices[0].text for chunk in chunks) == texts[model]
        assert whole.usage.completion_tokens == 12 and whole.model == model
    assert len(set(texts.values())) == len(MODELS), texts
    # The client's own stream raises an error for an answer that the length limit ends.
    stopped = {"max_tokens": 200, "temperature": 0, "stop": ["a", "e", "o", "\n"], "extra_body": {"min_tokens": 6}}
    chat = client.chat.completions.create(model="tales", messages=MESSAGES, **stopped)
    with client.chat.completions.stream(model="tales", messages=MESSAGES, **stopped) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert final.choices[0].message.content == chat.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"
    assert {event.type for event in events} >= {"chunk", "content.delta", "content.done"}
    raw = client.chat.completions.with_raw_response.create(model="tales", messages=MESSAGES, **GREEDY)
    assert raw.headers["x-request-id"] and raw.parse().choices
    for error, fields in (
        (openai.NotFoundError, {"model": "absent"}),
        (openai.BadRequestError, {"model": "tales", "temperature": -1}),
        (openai.BadRequestError, {"model": "tales", "extra_body": {"guided_json": []}}),
    ):
        try:
            client.completions.create(prompt="a", **fields)
        except error as caught:
            assert caught.body["message"] and caught.body["code"] == caught.status_code
        else:
            raise AssertionError(f"no {error.__name__} for {fields}")


class Weather(pydantic.BaseModel):
    """Get the weather in a city."""

    city: Literal["Paris", "Oslo"]
    days: Annotated[int, pydantic.Field(ge=1, le=9)]


def check_tools(url):
    """Calls match the schema with every adapter, because a grammar enforces it, and go through the client's helpers."""
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    tools = [openai.pydantic_function_tool(Weather, name="weather")]
    fields = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
    fields["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}  # of the tiny model it may not end
    for model in MODELS:
        parsed = client.chat.completions.parse(model=model, messages=MESSAGES, **fields).choices[0]
        [call] = parsed.message.tool_calls
        assert isinstance(call.function.parsed_arguments, Weather) and parsed.finish_reason == "tool_calls"
        assert parsed.message.content is None
        with client.chat.completions.stream(model=model, messages=MESSAGES, **fields) as stream:
            events = list(stream)
            [streamed] = stream.get_final_completion().choices[0].message.tool_calls
        assert streamed.function == call.function
        [done] = [event for event in events if event.type == "tool_calls.function.arguments.done"]
        assert done.parsed_arguments == call.function.parsed_arguments
        result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
        turns = [*MESSAGES, parsed.message.to_dict(), result]
        answer = client.chat.completions.create(model=model, messages=turns, tools=tools, tool_choice="none", **GREEDY)
        assert answer.choices[0].message.content and answer.usage.completion_tokens_details.reasoning_tokens == 0


def check_responses(url):
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    stop = {"stop": ["a", "e", "o", "\n"], "min_tokens": 6}
    chat = client.chat.completions.create(
        model="tales", messages=MESSAGES, max_tokens=200, temperature=0, extra_body=stop
    )
    fields = {"model": "tales", "max_output_tokens": 200, "temperature": 0, "extra_body": stop}
    whole = client.responses.create(instructions="Be brief.", input="Tell a story.", **fields)
    with client.responses.stream(instructions="Be brief.", input="Tell a story.", **fields) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.output_text == "".join(deltas) == whole.output_text == chat.choices[0].message.content
    assert final.status == "completed" and final.usage == whole.usage
    history = [*MESSAGES, *whole.output, {"role": "user", "content": "Go on."}]
    assert client.responses.create(input=history, **fields).status == "completed"
    parsed = client.responses.parse(model="tales", input="Weather?", text_format=Weather, temperature=0)
    assert isinstance(parsed.output_parsed, Weather)
    tool = openai.pydantic_function_tool(Weather, name="weather")["function"] | {"type": "function"}
    calling = {"model": "tales", "tools": [tool], "parallel_tool_calls": False, "temperature": 0}
    asked = client.responses.create(input="Weather?", tool_choice="required", **calling)
    with client.responses.stream(input="Weather?", tool_choice="required", **calling) as stream:
        streamed = stream.get_final_response().output[-1]
    call = asked.output[-1]
    assert Weather.model_validate_json(call.arguments) and streamed.arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    history = [{"role": "user", "content": "Weather?"}, *asked.output, result]
    assert client.responses.create(input=history, tool_choice="none", max_output_tokens=20, **calling).output_text
    try:
        client.responses.retrieve(whole.id)
    except openai.NotFoundError as caught:
        assert "not stored" in caught.body["message"]
    else:
        raise AssertionError("no NotFoundError for a response that is not stored")


def check_openai_asyncio(url):
    async def stream(client, model):
        stream = await client.completions.create(
            model=model, prompt="Once upon a time", stream=True, stream_options={"include_usage": True}, **GREEDY
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage.completion_tokens == 12 and not chunks[-1].choices

    async def run():
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            await asyncio.gather(*(stream(client, model) for model in MODELS * 8))

    asyncio.run(run())


def main(url):
    """Run all checks; the first failure ends the run."""
    for check in (check_openai, check_tools, check_responses, check_openai_asyncio):
        check(url)
        print(f"openai {openai.__version__}: {check.__name__} passed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
