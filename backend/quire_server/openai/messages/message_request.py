# SPDX-License-Identifier: Apache-2.0
"""Converts a request of Anthropic's Messages API to a request for chat completions. If both APIs have a field, the
field is passed on unchanged, and the chat route checks it."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from quire_server.openai.errors import ApiError
from quire_server.openai.http.ignored_fields import IgnoredFields, names_of
from quire_server.openai.messages.conversation import chat_messages
from quire_server.openai.request_fields import CHAT_ONLY_FIELDS, describe_invalid
from quire_spec.errors import truncated_repr

_CHAT_ONLY_FIELDS: Mapping[str, str] = {
    "stop": "use stop_sequences",
    "max_completion_tokens": "use max_tokens",
    "response_format": "use output_config.format",
    "reasoning_effort": "use output_config.effort",
    "thinking_token_budget": "use thinking.budget_tokens",
    "parallel_tool_calls": "use tool_choice.disable_parallel_tool_use",
    **dict.fromkeys(("logprobs", "top_logprobs", *CHAT_ONLY_FIELDS), "use chat completions"),
}
_UNSUPPORTED_FIELDS: Mapping[str, str] = {
    "container": "leave it out",
    "thread": "send the complete conversation in messages",
    "compaction": "ask for a summary in messages",
}
_TOOL_FIELDS = frozenset({"type", "name", "description", "input_schema", "strict", "cache_control"})
_FORMAT_FIELDS = frozenset({"type", "schema", "name"})


class ToolChoice(msgspec.Struct, kw_only=True):
    """Field `tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(msgspec.Struct, kw_only=True):
    """Field `thinking`."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    """Maximum number of tokens of the reasoning."""
    display: Literal["summarized", "omitted"] | None = None
    """With omitted, the response contains no reasoning. Other responses contain the complete reasoning."""


class OutputConfig(msgspec.Struct, kw_only=True):
    """Field `output_config`."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class Metadata(msgspec.Struct, kw_only=True):
    """Field `metadata`."""

    user_id: str | None = None
    """The session of the request, if the header X-Session-Id is missing."""


class MessageFields(msgspec.Struct, kw_only=True):
    """Fields of a request that chat completions do not have, or that have another meaning there."""

    model: str
    messages: list[Any]
    max_tokens: int | None = None
    system: str | list[Any] = ""
    stop_sequences: list[str] = []
    stream: bool = False
    tools: list[dict[str, Any]] = []
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    metadata: Metadata = msgspec.field(default_factory=Metadata)
    output_config: OutputConfig = msgspec.field(default_factory=OutputConfig)
    output_format: dict[str, Any] | None = None
    """Older name of output_config.format."""
    cache_control: Any = None
    """Accepted and ignored, because all prompts are cached."""
    service_tier: str | None = None
    inference_geo: str | None = None
    speed: str | None = None
    mcp_servers: list[Any] = []
    container: Any = None
    thread: Any = None
    compaction: Any = None


def parse_message_request(
    document: Mapping[str, Any], ignored: IgnoredFields, has_thinking_budget: bool
) -> tuple[MessageFields, dict[str, Any]]:
    """Return the parsed fields of a request, and the request for chat completions that is run instead.

    `ignored` gets the nested fields that are not known; the chat route checks the others. `has_thinking_budget` is
    False if the model's reasoning cannot be limited.

    Raises:
        ApiError: a field is invalid or not supported.
    """
    present = {name: value for name, value in document.items() if value is not None}
    own_names = names_of(MessageFields)
    for name in present.keys() & _CHAT_ONLY_FIELDS.keys():
        raise ApiError(400, f"{name}: is not a field of this request; {_CHAT_ONLY_FIELDS[name]}", name)
    try:
        fields = msgspec.convert({name: present[name] for name in present.keys() & own_names}, MessageFields)
    except msgspec.ValidationError as error:
        raise ApiError(400, describe_invalid(error)) from None
    if fields.mcp_servers:
        raise ApiError(400, "mcp_servers: are not supported by this server; run the tools in the client")
    for name, fix in _UNSUPPORTED_FIELDS.items():
        if getattr(fields, name) is not None:
            raise ApiError(400, f"{name}: is not supported by this server; {fix}", name)
    for name, known in _NESTED_FIELDS.items():
        ignored.check(present.get(name), known, f"{name}.")
    chat = {name: value for name, value in present.items() if name not in own_names}
    chat |= {"model": fields.model, "stream": fields.stream, "max_completion_tokens": fields.max_tokens}
    chat |= {"user": fields.metadata.user_id, "stop": fields.stop_sequences or None}
    chat["reasoning_effort"] = fields.output_config.effort
    chat["messages"] = chat_messages(fields.system, fields.messages, ignored)
    if _is_prefill(chat["messages"][-1]):
        chat["continue_final_message"] = True
    chat |= _tool_fields(fields, ignored)
    if fields.thinking is not None:
        chat |= _thinking_fields(fields.thinking, chat.get("chat_template_kwargs"), ignored, has_thinking_budget)
    if (output_format := fields.output_config.format or fields.output_format) is not None:
        chat["response_format"] = _response_format(output_format, ignored)
    return fields, chat


_NESTED_FIELDS: Mapping[str, frozenset[str]] = {
    "tool_choice": names_of(ToolChoice),
    "thinking": names_of(Thinking),
    "metadata": names_of(Metadata),
    "output_config": names_of(OutputConfig),
}


def _is_prefill(message: Mapping[str, Any]) -> bool:
    """Return True if the output must continue the last message."""
    return message["role"] == "assistant" and bool(message["content"]) and "tool_calls" not in message


def _tool_fields(fields: MessageFields, ignored: IgnoredFields) -> dict[str, Any]:
    chat: dict[str, Any] = {}
    if fields.tools:
        chat["tools"] = [_tool(tool, f"tools[{i}]", ignored) for i, tool in enumerate(fields.tools)]
    choice = fields.tool_choice
    if choice is None or (not fields.tools and choice.type in ("auto", "none")):
        return chat
    if choice.type == "tool":
        if choice.name is None:
            raise ApiError(400, "tool_choice.name: missing; name one of the tools")
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        chat["tool_choice"] = {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    return chat | {"parallel_tool_calls": not choice.disable_parallel_tool_use}


def _tool(tool: Mapping[str, Any], path: str, ignored: IgnoredFields) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise ApiError(
            400, f"{path}.type: {truncated_repr(tool['type'])} is not supported; define the tool with an input_schema"
        )
    ignored.check(tool, _TOOL_FIELDS, "tools.")
    function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    if (schema := tool.get("input_schema")) is not None:
        function["parameters"] = schema
    return {"type": "function", "function": function}


def _thinking_fields(
    thinking: Thinking, template_kwargs: Any, ignored: IgnoredFields, has_thinking_budget: bool
) -> dict[str, Any]:
    is_enabled = thinking.type != "disabled"
    chat: dict[str, Any] = {"include_reasoning": thinking.display != "omitted"}
    if isinstance(template_kwargs, dict | None):
        # Templates have one of these two variables.
        kwargs = dict.fromkeys(("enable_thinking", "thinking"), is_enabled)
        chat["chat_template_kwargs"] = kwargs | (template_kwargs or {})
    if is_enabled and thinking.budget_tokens is not None:
        if has_thinking_budget:
            chat["thinking_token_budget"] = thinking.budget_tokens
        else:
            ignored.check(
                {"budget_tokens": thinking.budget_tokens}, names_of(Thinking) - {"budget_tokens"}, "thinking."
            )
    return chat


def _response_format(output_format: Mapping[str, Any], ignored: IgnoredFields) -> dict[str, Any]:
    if output_format.get("type") != "json_schema":
        shown = truncated_repr(output_format.get("type"))
        raise ApiError(400, f"output_config.format.type: must be json_schema, got {shown}")
    ignored.check(output_format, _FORMAT_FIELDS, "output_config.format.")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": output_format.get("schema")}}
