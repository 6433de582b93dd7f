# SPDX-License-Identifier: Apache-2.0
"""Converts the messages of a chat request to the form that chat templates read.

The parts of a message's content are joined into one text. The role `developer` is replaced with `system`. The arguments
of earlier tool calls are parsed into objects, because templates encode them again. Messages of the server itself are
always accepted: their content can be null, and their arguments can be cut off or can be no object. The content of a
message with images stays a list of parts, because the template writes a mark at the place of each image. Audio and file
parts are rejected.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from quire_server.openai.errors import ApiError
from quire_server.openai.http.ignored_fields import IgnoredFields
from quire_server.openai.images.image_parts import IMAGE_PARTS
from quire_spec.errors import truncated_repr

MAX_MESSAGES = 10_000
MAX_DEPTH = 32
"""Objects and lists in a message or in a template argument can be nested up to this depth."""
MAX_TEMPLATE_KWARGS = 32
_TEMPLATE_KWARG = re.compile(r"[A-Za-z]\w{0,63}")
_RESERVED_KWARGS = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"),
        *(
            "raise_exception",
            "strftime_now",
            "namespace",
            "range",
            "dict",
            "lipsum",
            "cycler",
            "joiner",
            "self",
            "loop",
        ),
    }
)
"""Names that the server or the template language sets. Requests can pass all other arguments to the template, as in
vLLM, because each family of models has variables of its own. Names of special tokens (bos_token) are reserved, too."""
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_DOCUMENTS = 1024
MAX_TOOL_CALLS = 256
"""Maximum number of tool calls in one message."""
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_PART_FIELDS = frozenset({"type", *_TEXT_PARTS.values(), "image_url", "detail"})
_IMAGE = {"type": "image"}
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


def normalize_messages(messages: object) -> list[dict[str, Any]]:
    """Return the messages in the form that templates read; raises ApiError if a message is invalid."""
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages: must be a list with at least one message")
    if len(messages) > MAX_MESSAGES:
        raise ApiError(400, f"messages: at most {MAX_MESSAGES} are allowed, got {len(messages)}")
    return [_normalize(message, f"messages[{i}]") for i, message in enumerate(messages)]


def check_parts(messages: object, ignored: IgnoredFields) -> None:
    """Record the fields of content parts that are not known. The fields of a message itself are passed to the
    template."""
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            for part in content:
                ignored.check(part, _PART_FIELDS, "messages.content.")


def normalize_template_kwargs(kwargs: Mapping[str, Any] | None, reasoning_effort: str | None) -> dict[str, Any]:
    """Return the arguments of the template; raises ApiError for a name that is not allowed."""
    if len(kwargs or {}) > MAX_TEMPLATE_KWARGS:
        raise ApiError(400, f"chat_template_kwargs: at most {MAX_TEMPLATE_KWARGS} are allowed, got {len(kwargs or {})}")
    for name in kwargs or {}:
        if name in _RESERVED_KWARGS or name.endswith("_token") or not _TEMPLATE_KWARG.fullmatch(name):
            raise ApiError(
                400,
                f"chat_template_kwargs: {truncated_repr(name)} is not allowed; the server sets it, or it is not the "
                "name of a variable",
            )
    check_depth(kwargs, "chat_template_kwargs")
    if reasoning_effort is not None and reasoning_effort not in REASONING_EFFORTS:
        raise ApiError(
            400, f"reasoning_effort: must be one of {', '.join(REASONING_EFFORTS)}, got {reasoning_effort[:80]!r}"
        )
    effort = {} if reasoning_effort is None else {"reasoning_effort": reasoning_effort}
    if reasoning_effort == "none":
        effort["enable_thinking"] = False  # type: ignore[assignment]
    return {**effort, **(kwargs or {})}


def normalize_documents(documents: object) -> list[dict[str, Any]] | None:
    """Return the documents for a template, or None if there are no documents. Raises ApiError if a document is not an
    object."""
    if documents is None:
        return None
    if not isinstance(documents, list) or len(documents) > MAX_DOCUMENTS:
        raise ApiError(400, f"documents: must be a list of at most {MAX_DOCUMENTS} documents")
    for i, document in enumerate(documents):
        if not isinstance(document, dict):
            raise ApiError(400, f"documents[{i}]: must be an object, got {truncated_repr(document)}")
        check_depth(document, f"documents[{i}]")
    return documents or None


def check_depth(value: object, name: str, depth: int = MAX_DEPTH) -> None:
    """Reject a value that is nested too deeply."""
    if depth == 0:
        raise ApiError(400, f"{name}: is nested more than {MAX_DEPTH} levels deep; use fewer levels")
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            if isinstance(item, dict | list):
                check_depth(item, name, depth - 1)


def _normalize(message: object, path: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(400, f"{path}: must be an object with a role, got {truncated_repr(message)}")
    check_depth(message, path)
    fields = {name: value for name, value in message.items() if value is not None}
    if fields["role"] == "developer":
        fields["role"] = "system"
    if fields.get("tool_calls"):
        fields["tool_calls"] = [
            _parse_arguments(call, f"{path}.tool_calls") for call in _list(fields, "tool_calls", path)
        ]
    else:
        fields.pop("tool_calls", None)
    if "content" in fields:
        fields["content"] = _content(fields["content"], f"{path}.content")
    elif fields["role"] == "assistant":
        # Most templates join the content with other text, so it must be a string.
        fields["content"] = ""
    else:
        raise ApiError(400, f"{path}.content: missing; give a text")
    reasoning = next((fields[name] for name in _REASONING_FIELDS if name in fields), None)
    if reasoning is not None:
        fields |= dict.fromkeys(_REASONING_FIELDS, reasoning)
    return fields


def _content(content: object, path: str) -> str | list[dict[str, Any]]:
    """Return the content as one text, or as a list of parts if it has images."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{path}: must be a text or a list of parts, got {truncated_repr(content)}")
    parts: list[str | dict[str, Any]] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, str):
            parts.append(part)
        elif kind in IMAGE_PARTS:
            parts.append(_IMAGE)
        elif kind not in _TEXT_PARTS:
            raise ApiError(
                400, f"{path}[{i}]: parts of type {truncated_repr(kind)} are not supported; send text and images only"
            )
        elif not isinstance(text := part.get(_TEXT_PARTS[kind]), str):
            raise ApiError(400, f"{path}[{i}].text: must be a text, got {truncated_repr(text)}")
        else:
            parts.append(text)
    if _IMAGE not in parts:
        return "\n".join(part for part in parts if isinstance(part, str))
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def _parse_arguments(call: object, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(
            400, f"{path}: each call must be an object with a function and its name, got {truncated_repr(call)}"
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _decoded_arguments(arguments)
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ApiError(400, f"{path}: the arguments of {function['name'][:80]!r} are not a JSON object")
    check_depth(arguments, path)
    return {**call, "function": {**function, "arguments": arguments}}


def _decoded_arguments(text: str) -> dict[str, Any]:
    """Return the arguments that a model has written. If they are not an object, return an empty one, as vLLM does."""
    try:
        arguments = msgspec.json.decode(text, type=dict[str, Any])
        check_depth(arguments, "arguments")
    except (msgspec.DecodeError, RecursionError, ApiError):
        return {}
    return arguments


def _list(fields: Mapping[str, Any], name: str, path: str) -> list[Any]:
    if not isinstance(value := fields[name], list) or len(value) > MAX_TOOL_CALLS:
        raise ApiError(
            400, f"{path}.{name}: must be a list of at most {MAX_TOOL_CALLS} calls, got {truncated_repr(value)}"
        )
    return value
