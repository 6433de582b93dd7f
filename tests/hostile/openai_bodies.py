# SPDX-License-Identifier: Apache-2.0
"""Bodies of the OpenAI port: wrong values of every field, many entries, deep nesting, large texts."""

from collections.abc import Iterator
from functools import partial

from attack import Attack, Target, json_with

GROUP = "OpenAI bodies"
COMPLETION = {"model": "tales", "prompt": "Once", "max_tokens": 2}
CHAT = {"model": "tales", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
ROUTES = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"model": "tales", "input": "Hi", "max_output_tokens": 2},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": CHAT,
    "/tokenize": {"model": "tales", "prompt": "Hi"},
    "/detokenize": {"model": "tales", "tokens": [5]},
}
FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "n", "best_of", "max_tokens", "min_tokens", "seed", "stop"),
    *(
        "stop_token_ids",
        "bad_words",
        "allowed_token_ids",
        "logit_bias",
        "logprobs",
        "prompt_logprobs",
        "echo",
        "stream",
    ),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "priority", "cache_salt", "model", "prompt"),
    *("truncate_prompt_tokens", "stream_options", "response_format", "structured_outputs", "ignore_eos"),
)
WRONG_VALUES = {
    "negative": "-1",
    "huge": "1000000000",
    "beyond int64": "9223372036854775808",
    "beyond float": "1e400",
    "not a number": "NaN",
    "text": '"x"',
    "list of lists": "[[[]]]",
    "object": '{"a": {"b": null}}',
    "surrogate": r'"\ud800"',
}
MANY = 1_000_000


def attacks() -> Iterator[Attack]:
    """Yield all attacks of this group."""
    for field in FIELDS:
        document = {name: value for name, value in COMPLETION.items() if name != field}
        for name, value in WRONG_VALUES.items():
            yield _post(f"{field}: {name}", "/v1/completions", json_with(document, field, value))
    for path, document in ROUTES.items():
        yield from _entries(path, document)
    yield from _large()


def _entries(path: str, document: dict[str, object]) -> Iterator[Attack]:
    [field] = {"prompt", "messages", "input", "tokens"} & document.keys()
    rest = {name: value for name, value in document.items() if name != field}
    for depth in (100, 500, 980, 984, 987, 1000, 100_000):
        yield _post(f"{path}: depth {depth}", path, json_with(rest, field, "[" * depth + "]" * depth))
    for name, item in {"numbers": "1", "texts": '""', "lists": "[]", "objects": "{}", "null": "null"}.items():
        yield _post(f"{path}: {MANY} {name}", path, json_with(rest, field, f"[{','.join([item] * MANY)}]"))
    keys = ",".join(f'"k{i}":1' for i in range(400_000))
    yield _post(f"{path}: many keys", path, f"{{{keys}}}".encode())
    for name, body in {
        "empty": b"",
        "null": b"null",
        "half": b'{"model": "tal',
        "not UTF-8": b'{"model": "\xff\xfe"}',
        "NUL": b'{"model": "tales\\u0000", "prompt": "\\u0000"}',
        "binary": bytes(range(256)) * 100,
        "9 MiB": b" " * (9 * 2**20),
        "twice": b'{"model": "a", "model": "tales"}{}',
    }.items():
        yield _post(f"{path}: {name}", path, body)


def _large() -> Iterator[Attack]:
    for size in (1_500_000, 4_000_000, 8_000_000):
        for name, text in {
            "letters": "x" * size,
            "spaces": " " * (size - 1) + "x",
            "text": "the fox " * (size // 8),
        }.items():
            yield _post(f"prompt of {size} {name}", "/v1/completions", COMPLETION | {"prompt": text})
            yield _post(f"tokenize {size} {name}", "/tokenize", {"model": "tales", "prompt": text})
    yield _post("tokens", "/detokenize", {"model": "tales", "tokens": [5] * 900_000})
    for field, value in {
        "prompt": ["x"] * 100_000,
        "stop": ["x"] * 100_000,
        "bad_words": ["x"] * 100_000,
        "allowed_token_ids": list(range(100_000)),
        "logit_bias": {str(i): 1 for i in range(100_000)},
        "stop_token_ids": [1] * 500_000,
    }.items():
        yield _post(f"{field} of {len(value)}", "/v1/completions", COMPLETION | {field: value})
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    for field, value in {
        "messages": [{"role": "user", "content": "x"}] * 50_000,
        "tools": [tool] * 20_000,
        "documents": [{"text": "x"}] * 30_000,
        "chat_template_kwargs": {str(i): i for i in range(50_000)},
    }.items():
        yield _post(f"{field} of {len(value)}", "/v1/chat/completions", CHAT | {field: value})
    yield from _messages()
    for outputs in (1024, 10**6, 10**9):
        for field in ("n", "best_of", "logprobs", "prompt_logprobs", "max_tokens"):
            yield _post(f"{field} {outputs}", "/v1/completions", COMPLETION | {"max_tokens": 1, field: outputs})


def _messages() -> Iterator[Attack]:
    """Yield bodies of the Messages API whose parts are merged, converted or nested."""
    deep: object = "x"
    for _ in range(400):
        deep = [{"type": "tool_result", "content": deep}]
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    tool = {"name": "f", "input_schema": {"type": "object", "properties": {}}}
    for name, fields in {
        "merged messages": {"messages": [{"role": "user", "content": "x" * 500}] * 9_999},
        "text blocks": {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 40_000}]},
        "thinking blocks": {
            "messages": [
                CHAT["messages"][0],
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}] * 40_000},
            ]
        },
        "tool results": {"messages": [{"role": "user", "content": [{"type": "tool_result"}] * 60_000}]},
        "calls": {"messages": [CHAT["messages"][0], {"role": "assistant", "content": [call] * 20_000}]},
        "nested results": {"messages": [{"role": "user", "content": deep}]},
        "system blocks": {"system": [{"type": "text", "text": "x"}] * 40_000},
        "tools": {"tools": [tool] * 20_000},
        "stop sequences": {"stop_sequences": ["x"] * 100_000},
        "unknown fields": {f"field-{i}\n": 1 for i in range(60_000)},
        "a budget": {"thinking": {"type": "enabled", "budget_tokens": 10**30}},
        "a schema": {"output_config": {"format": {"type": "json_schema", "schema": {"anyOf": [{}] * 50_000}}}},
    }.items():
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            yield _post(f"{path}: {name}", path, CHAT | fields)


def _post(name: str, path: str, body: object) -> Attack:
    async def send(target: Target, body: object) -> str:
        return await target.post(path, body)

    return Attack(GROUP, name, partial(send, body=body), limit_s=20.0)
