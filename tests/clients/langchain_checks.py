# SPDX-License-Identifier: Apache-2.0
"""Checks of a running OpenAI front with LangChain's client: `python langchain_checks.py BASE_URL`; run.py starts both.

Runs in the environment of requirements-langchain.txt, which contains nothing of Quire.
"""

import sys
from importlib.metadata import version
from typing import Literal

import pydantic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

MESSAGES = [SystemMessage("Be brief."), HumanMessage("Tell a story.")]
UNTHINKING = {"chat_template_kwargs": {"enable_thinking": False}}
STOPPED = {"stop": ["a", "e", "o", "\n"]}


class City(pydantic.BaseModel):
    """A city and a number of days."""

    city: Literal["Paris", "Oslo"]
    days: Literal[1, 2, 3]


@tool
def get_weather(city: Literal["Paris", "Oslo"]) -> str:
    """Get the weather in a city."""
    return f"Sunny in {city}."


def chat_model(url: str, **options: object) -> ChatOpenAI:
    """Return a client; `extra_body` of the options replaces the one that turns reasoning off."""
    fields = {
        "model": "tales",
        "temperature": 0,
        "max_retries": 0,
        "max_tokens": 40,
        "extra_body": UNTHINKING,
    } | options
    return ChatOpenAI(base_url=url, api_key="none", **fields)  # type: ignore[arg-type]


def check_chat(url: str) -> None:
    """Whole and streamed answers are equal and count their tokens."""
    model = chat_model(url, stream_usage=True)
    whole = model.invoke(MESSAGES, **STOPPED)
    chunks = list(model.stream(MESSAGES, **STOPPED))
    streamed = sum(chunks[1:], chunks[0])
    assert whole.content == streamed.content
    assert whole.usage_metadata["total_tokens"] == streamed.usage_metadata["total_tokens"]
    assert whole.usage_metadata["output_tokens"] > 0 and "cache_read" in whole.usage_metadata["input_token_details"]
    assert whole.response_metadata["finish_reason"] == "stop"
    texts = model.batch([[HumanMessage(f"Tell story {i}.")] for i in range(4)])
    assert all(isinstance(message, AIMessage) for message in texts)


def check_tools(url: str) -> None:
    """A required call matches its schema, and its result goes back to the model."""
    calling = chat_model(url).bind_tools([get_weather], tool_choice="required", parallel_tool_calls=False)
    question = HumanMessage("What is the weather in Paris?")
    for answer in (calling.invoke([question]), sum((chunks := list(calling.stream([question])))[1:], chunks[0])):
        [call] = answer.tool_calls
        assert call["name"] == "get_weather" and call["args"]["city"] in ("Paris", "Oslo")
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    assert chat_model(url).invoke([question, answer, result]).content


def check_structured_output(url: str) -> None:
    """Both methods of with_structured_output return an object of the class."""
    for method in ("json_schema", "function_calling"):
        structured = chat_model(url, max_tokens=80).with_structured_output(City, method=method)
        assert isinstance(structured.invoke(MESSAGES), City), method


def check_other_routes(url: str) -> None:
    """Completions with an adapter, and the Responses API."""
    model = OpenAI(base_url=url, api_key="none", model="pirate", temperature=0, max_tokens=12, max_retries=0)
    assert model.invoke("Once upon a time") == "".join(model.stream("Once upon a time")) != ""
    responses = chat_model(url, use_responses_api=True, extra_body=None)
    assert responses.invoke([HumanMessage("Tell a story.")]).content


def main(url: str) -> None:
    """Run all checks; the first failure ends the run."""
    for check in (check_chat, check_tools, check_structured_output, check_other_routes):
        check(url)
        print(f"langchain-openai {version('langchain-openai')}: {check.__name__} passed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
