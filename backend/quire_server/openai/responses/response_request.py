# SPDX-License-Identifier: Apache-2.0
"""Converts a request of the Responses API to a request for chat completions. Input items become messages, and some
fields get other names.

Responses are not stored. Therefore a field that refers to an earlier response is an error. If both APIs have a field,
the field is passed on unchanged, and the chat route checks it.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from quire_server.openai.chat_messages import MAX_DEPTH, MAX_MESSAGES, check_depth
from quire_server.openai.errors import ApiError
from quire_server.openai.http.ignored_fields import IgnoredFields, names_of
from quire_server.openai.request_fields import CHAT_ONLY_FIELDS, describe_invalid
from quire_spec.errors import truncated_repr

NOT_STORED = "responses are not stored by this server"
_LOGPROBS = "message.output_text.logprobs"
_INCLUDES = frozenset({_LOGPROBS, "reasoning.encrypted_content"})
"""The values of `include` that are supported. reasoning.encrypted_content is accepted but has no effect, because the
text of reasoning items is never encrypted."""
_CHAT_ONLY_FIELDS: Mapping[str, str] = {
    "messages": "use input",
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "response_format": "use text.format",
    "reasoning_effort": "use reasoning.effort",
    "logprobs": "use include and top_logprobs",
    **dict.fromkeys(CHAT_ONLY_FIELDS, "use chat completions"),
}


_REPEATED_FIELDS = frozenset({"metadata", "text", "tools", "tool_choice"})
"""Fields of the request that are repeated in the response."""
MAX_METADATA_ENTRIES = 16
MAX_METADATA_CHARS = 512
"""Maximum number of characters in a metadata key or value. The limits are the same as OpenAI's. They are necessary
because a stream contains the metadata three times."""


class Reasoning(msgspec.Struct, kw_only=True):
    """Field `reasoning`."""

    effort: str | None = None
    summary: str | None = None
    """Accepted and ignored, because the response contains the complete reasoning instead of a summary."""
    generate_summary: str | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    """Field `text`."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None
    """Accepted and ignored."""


class ResponseFields(msgspec.Struct, kw_only=True):
    """Fields of a request that chat completions do not have, or that have another name there."""

    input: str | list[Any]
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = {}
    reasoning: Reasoning = msgspec.field(default_factory=Reasoning)
    text: TextConfig = msgspec.field(default_factory=TextConfig)
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    include: list[str] = []
    top_logprobs: int = 0
    truncation: str = "disabled"
    store: bool = True
    background: bool = False
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    stream: bool = False
    stream_options: dict[str, Any] = {}
    """Accepted and ignored, because the only option is obfuscation."""

    @property
    def has_logprobs(self) -> bool:
        """True if the response contains log probabilities."""
        return _LOGPROBS in self.include or self.top_logprobs > 0


_NESTED_FIELDS: Mapping[str, frozenset[str]] = {
    "reasoning": names_of(Reasoning),
    "text": names_of(TextConfig),
    "stream_options": frozenset({"include_obfuscation"}),
}
_TOOL_FIELDS = ("name", "description", "parameters", "strict")
_FORMAT_FIELDS = ("name", "description", "schema", "strict")
_COMMON_ITEM_FIELDS = frozenset({"type", "id", "status"})
_ITEM_FIELDS: Mapping[str, frozenset[str]] = {
    "message": frozenset({"role", "content"}),
    "reasoning": frozenset({"summary", "content", "encrypted_content"}),
    "function_call": frozenset({"call_id", "name", "arguments"}),
    "function_call_output": frozenset({"call_id", "output"}),
}
"""Fields of each type of input item, beside the common ones."""


def parse_response_request(
    document: Mapping[str, Any], ignored: IgnoredFields
) -> tuple[ResponseFields, dict[str, Any]]:
    """Return the parsed fields of a request, and the request for chat completions that is run instead. `ignored` gets
    the nested fields that are not known; the chat route checks the others.

    Raises:
        ApiError: a field is invalid or not supported.
    """
    present = {name: value for name, value in document.items() if value is not None}
    own_names = names_of(ResponseFields)
    for name in _REPEATED_FIELDS & present.keys():
        check_depth(present[name], name)
    for name in present.keys() & _CHAT_ONLY_FIELDS.keys():
        raise ApiError(400, f"{name}: is not a field of this request; {_CHAT_ONLY_FIELDS[name]}", name)
    try:
        fields = msgspec.convert({name: present[name] for name in present.keys() & own_names}, ResponseFields)
    except msgspec.ValidationError as error:
        raise ApiError(400, describe_invalid(error)) from None
    _check_supported(fields)
    for name, known in _NESTED_FIELDS.items():
        ignored.check(present.get(name), known, f"{name}.")
    chat = {name: value for name, value in present.items() if name not in own_names}
    messages = [] if fields.instructions is None else [{"role": "system", "content": fields.instructions}]
    chat |= {"messages": messages + _messages(fields.input, ignored), "stream": fields.stream}
    chat |= {"max_completion_tokens": fields.max_output_tokens, "reasoning_effort": fields.reasoning.effort}
    if fields.tools:
        chat |= {"tools": [_tool(tool, f"tools[{i}]", ignored) for i, tool in enumerate(fields.tools)]}
        chat |= {"parallel_tool_calls": fields.parallel_tool_calls}
    if fields.tools or fields.tool_choice not in ("auto", "none"):
        chat["tool_choice"] = fields.tool_choice
    if fields.has_logprobs:
        chat |= {"logprobs": True, "top_logprobs": fields.top_logprobs}
    if fields.text.format is not None:
        chat["response_format"] = _response_format(fields.text.format, ignored)
    return fields, chat


def _check_supported(fields: ResponseFields) -> None:
    if fields.previous_response_id is not None:
        raise ApiError(404, f"previous_response_id: {NOT_STORED}; send the whole conversation as input")
    if fields.conversation is not None:
        raise ApiError(400, f"conversation: {NOT_STORED}; send the whole conversation as input")
    if fields.background:
        raise ApiError(400, f"background: is not supported, because {NOT_STORED}; leave it out")
    if fields.prompt is not None:
        raise ApiError(400, "prompt: prompt templates are not supported; use input and instructions")
    longest = max((len(text) for item in fields.metadata.items() for text in item), default=0)
    if len(fields.metadata) > MAX_METADATA_ENTRIES or longest > MAX_METADATA_CHARS:
        raise ApiError(
            400,
            f"metadata: at most {MAX_METADATA_ENTRIES} entries are allowed, and keys and values can have at most "
            f"{MAX_METADATA_CHARS} characters; got {len(fields.metadata)} entries with up to {longest} characters",
        )
    if fields.truncation != "disabled":
        raise ApiError(
            400, f"truncation: must be disabled, got {truncated_repr(fields.truncation)}; shorten input instead"
        )
    if unknown := set(fields.include) - _INCLUDES:
        raise ApiError(
            400, f"include: {truncated_repr(min(unknown))} is not supported; use {' or '.join(sorted(_INCLUDES))}"
        )


def _messages(items: str | list[Any], ignored: IgnoredFields) -> list[dict[str, Any]]:
    """Return the input as chat messages. The reasoning, the text and the tool calls of one turn are combined into one
    message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if len(items) > MAX_MESSAGES:
        raise ApiError(400, f"input: at most {MAX_MESSAGES} items are allowed, got {len(items)}")
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None
    """The assistant's message to which the next item can be added. None if the next item must start a new message."""

    def assistant_turn(new_if: str) -> dict[str, Any]:
        nonlocal turn
        if turn is None or new_if in turn:
            turn = {"role": "assistant"}
            messages.append(turn)
        return turn

    for i, item in enumerate(items):
        path = f"input[{i}]"
        if not isinstance(item, dict):
            raise ApiError(400, f"{path}: must be an object, got {truncated_repr(item)}")
        check_depth(item, path, MAX_DEPTH)
        kind = item.get("type", "message")
        if isinstance(kind, str) and kind in _ITEM_FIELDS:
            ignored.check(item, _ITEM_FIELDS[kind] | _COMMON_ITEM_FIELDS, "input.")
        if kind == "message" and item.get("role") == "assistant":
            # If a text follows a call, it belongs to the next turn.
            message = assistant_turn("tool_calls" if turn and "tool_calls" in turn else "content")
            message["content"] = item.get("content")
        elif kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
            turn = None
        elif kind == "reasoning":
            assistant_turn("content" if turn and "content" in turn else "tool_calls")["reasoning"] = _reasoning(item)
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            calls = assistant_turn("").setdefault("tool_calls", [])
            calls.append({"id": item.get("call_id"), "type": "function", "function": function})
        elif kind == "function_call_output":
            content = item.get("output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
            turn = None
        elif kind == "item_reference":
            raise ApiError(400, f"{path}: {NOT_STORED}; send the item itself")
        else:
            raise ApiError(400, f"{path}.type: items of type {truncated_repr(kind)} are not supported; leave them out")
    for message in messages:
        if message["role"] == "assistant" and "tool_calls" not in message:
            message.setdefault("content", "")
    return messages


def _reasoning(item: Mapping[str, Any]) -> str:
    """Return the text of a reasoning item. The text is taken from the item's content, or from the summary if the item
    has no content."""
    parts = item.get("content") or item.get("summary") or []
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "\n".join(text for text in texts if isinstance(text, str))


def _tool(tool: Mapping[str, Any], path: str, ignored: IgnoredFields) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise ApiError(400, f"{path}.type: {truncated_repr(tool.get('type'))} is not supported; use function")
    ignored.check(tool, {"type", *_TOOL_FIELDS}, "tools.")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name in _TOOL_FIELDS}}


def _response_format(text_format: Mapping[str, Any], ignored: IgnoredFields) -> dict[str, Any]:
    """Return the value of the field response_format for chat completions. There, the schema is nested in
    json_schema."""
    if text_format.get("type") != "json_schema":
        return dict(text_format)
    ignored.check(text_format, {"type", *_FORMAT_FIELDS}, "text.format.")
    schema = {name: value for name, value in text_format.items() if name in _FORMAT_FIELDS}
    return {"type": "json_schema", "json_schema": schema}
