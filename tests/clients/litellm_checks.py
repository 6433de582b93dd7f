# SPDX-License-Identifier: Apache-2.0
"""Checks of a running OpenAI front with LiteLLM: `python litellm_checks.py BASE_URL`; run.py starts both.

Runs in the environment of requirements-litellm.txt, which contains nothing of Quire.
"""

import json
import os
import sys
from importlib.metadata import version

# Otherwise the import reads prices from the network.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell a story."}]
UNTHINKING = {"chat_template_kwargs": {"enable_thinking": False}}
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Paris", "Oslo"]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": PARAMETERS}}]


def complete(url: str, model: str = "tales", **fields: object) -> litellm.ModelResponse:
    """Return the answer of a chat by LiteLLM's provider for vLLM."""
    options = {"messages": MESSAGES, "temperature": 0, "max_tokens": 40, "extra_body": UNTHINKING} | fields
    return litellm.completion(model=f"hosted_vllm/{model}", api_base=url, api_key="none", num_retries=0, **options)


def check_chat(url: str) -> None:
    """Whole and streamed answers of the base and an adapter are equal, and count their tokens."""
    for model in ("tales", "sql"):
        whole = complete(url, model, stop=["a", "e", "\n"])
        stream = complete(url, model, stop=["a", "e", "\n"], stream=True, stream_options={"include_usage": True})
        chunks = list(stream)
        content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert content == (whole.choices[0].message.content or "")
        assert whole.usage.completion_tokens > 0 and whole.usage.prompt_tokens_details.cached_tokens is not None
        assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def check_reasoning(url: str) -> None:
    """The reasoning is separate from the answer."""
    question = [{"role": "user", "content": "What is 12 plus 7?"}]
    message = complete(url, messages=question, max_tokens=60, extra_body=None).choices[0].message
    assert message.reasoning_content and message.reasoning_content not in (message.content or "")


def check_tools(url: str) -> None:
    """A required call, also streamed."""
    for stream in (False, True):
        answer = complete(url, tools=TOOLS, tool_choice="required", stream=stream)
        if stream:
            answer = litellm.stream_chunk_builder(list(answer))
        call = answer.choices[0].message.tool_calls[0]
        assert call.function.name == "get_weather" and json.loads(call.function.arguments)["city"] in ("Paris", "Oslo")


def check_response_format(url: str) -> None:
    """A JSON schema is enforced."""
    json_schema = {"name": "weather", "schema": PARAMETERS | {"additionalProperties": False}, "strict": True}
    answer = complete(url, response_format={"type": "json_schema", "json_schema": json_schema})
    assert json.loads(answer.choices[0].message.content)["city"] in ("Paris", "Oslo")


def check_errors(url: str) -> None:
    """Errors have LiteLLM's classes and contain the reason."""
    for model, fields, error in (
        ("absent", {}, litellm.NotFoundError),
        ("tales", {"extra_body": {"guided_regex": "("}}, litellm.BadRequestError),
    ):
        try:
            complete(url, model, **fields)
        except error as caught:
            assert "absent" in str(caught) or "structured_outputs" in str(caught)
        else:
            raise AssertionError(f"no {error.__name__}")


def main(url: str) -> None:
    """Run all checks; the first failure ends the run."""
    for check in (check_chat, check_reasoning, check_tools, check_response_format, check_errors):
        check(url)
        print(f"litellm {version('litellm')}: {check.__name__} passed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
