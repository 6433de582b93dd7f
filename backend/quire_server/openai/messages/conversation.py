# SPDX-License-Identifier: Apache-2.0
"""Converts the system prompt and the messages of the Messages API to messages of chat completions.

Successive messages of one role become one message, as in Anthropic's API, because many templates accept only messages
of alternating roles. For the same reason, a system message after other messages becomes text of the user.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire_server.openai.chat_messages import MAX_MESSAGES, check_depth
from quire_server.openai.errors import ApiError
from quire_server.openai.http.ignored_fields import IgnoredFields
from quire_spec.errors import truncated_repr

_BLOCK_FIELDS: Mapping[str, frozenset[str]] = {
    "text": frozenset({"text", "citations"}),
    "document": frozenset({"source", "title", "context", "citations"}),
    "search_result": frozenset({"source", "title", "content", "citations"}),
    "image": frozenset({"source"}),
    "thinking": frozenset({"thinking", "signature"}),
    "redacted_thinking": frozenset({"data"}),
    "tool_use": frozenset({"id", "name", "input", "caller"}),
    "tool_result": frozenset({"tool_use_id", "content", "is_error"}),
}
"""Fields of each type of content block, beside type and cache_control. Signatures and citations have no effect."""
_TEXT_BLOCKS = ("text", "document", "search_result")
_ROLE_BLOCKS: Mapping[str, tuple[str, ...]] = {
    "system": _TEXT_BLOCKS,
    "user": (*_TEXT_BLOCKS, "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
_RESULT_BLOCKS = (*_TEXT_BLOCKS, "image")
_BILLING_PREFIX = "x-anthropic-billing-header:"
"""Start of a text with which a client tells Anthropic's API its version. It is dropped, because it differs between
conversations, which could not share the cached prefix of the system prompt otherwise."""

Document = dict[str, Any]
Part = str | Document
"""A text, or an image part of chat completions."""


def chat_messages(system: str | list[Any], messages: list[Any], ignored: IgnoredFields) -> list[Document]:
    """Return the conversation as messages of chat completions, whose contents are lists of texts and images. `ignored`
    gets the fields that are not known.

    Raises:
        ApiError: a message or a block is invalid or not supported.
    """
    if not messages:
        raise ApiError(400, "messages: must be a list with at least one message")
    if len(messages) > MAX_MESSAGES:
        raise ApiError(400, f"messages: at most {MAX_MESSAGES} are allowed, got {len(messages)}")
    chat: list[Document] = []
    texts = _texts(system, "system", ignored)
    _add_parts(chat, "system", [text for text in texts if not text.startswith(_BILLING_PREFIX)])
    for i, message in enumerate(messages):
        path = f"messages[{i}]"
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or role not in _ROLE_BLOCKS:
            raise ApiError(400, f"{path}.role: must be user, assistant or system, got {truncated_repr(role)}")
        check_depth(message, path)
        ignored.check(message, {"role", "content"}, "messages.")
        content = message.get("content")
        if role == "assistant":
            _add_assistant(chat, content, f"{path}.content", ignored)
        elif role == "user" or any(other["role"] != "system" for other in chat):
            _add_user(chat, content, f"{path}.content", ignored)
        else:
            _add_parts(chat, "system", _texts(content, f"{path}.content", ignored))
    if all(message["role"] == "system" for message in chat):
        raise ApiError(400, "messages: must contain a message of the user")
    for message in chat:
        if "reasoning" in message:
            message["reasoning"] = "\n".join(message["reasoning"])
    return chat


def _add_user(chat: list[Document], content: object, path: str, ignored: IgnoredFields) -> None:
    parts: list[Part] = []
    num_results = 0
    images: list[Part] = []
    """Images of results. They follow the results as a message of the user, because few templates have images there."""
    for block, block_path in _blocks(content, path, _ROLE_BLOCKS["user"], ignored):
        if block["type"] != "tool_result":
            parts += _parts(block, block_path, ignored)
            continue
        _add_parts(chat, "user", parts)
        parts = []
        num_results += 1
        result: list[Part] = []
        for inner, inner_path in _blocks(block.get("content") or "", f"{block_path}.content", _RESULT_BLOCKS, ignored):
            result += _parts(inner, inner_path, ignored)
        images += [part for part in result if not isinstance(part, str)]
        text = "\n".join(part for part in result if isinstance(part, str) and part)
        if block.get("is_error"):
            # Templates have no mark for a call that has failed.
            text = f"Error: {text}"
        chat.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
    parts = images + parts
    _add_parts(chat, "user", parts if parts or num_results else [""])


def _add_assistant(chat: list[Document], content: object, path: str, ignored: IgnoredFields) -> None:
    if not chat or chat[-1]["role"] != "assistant":
        chat.append({"role": "assistant", "content": []})
    message = chat[-1]
    for block, block_path in _blocks(content, path, _ROLE_BLOCKS["assistant"], ignored):
        if block["type"] == "text":
            message["content"] += filter(None, _parts(block, block_path, ignored))
        elif block["type"] == "thinking":
            message.setdefault("reasoning", []).append(_string(block, "thinking", block_path))
        elif block["type"] == "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise ApiError(400, f"{block_path}.input: must be an object, got {truncated_repr(arguments)}")
            function = {"name": _string(block, "name", block_path), "arguments": arguments}
            call = {"id": block.get("id"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)


def _add_parts(chat: list[Document], role: str, parts: Sequence[Part]) -> None:
    """Add parts to the last message, if that has the same role, or else as a new message."""
    if not parts:
        return
    if not chat or chat[-1]["role"] != role:
        chat.append({"role": role, "content": []})
    chat[-1]["content"] += filter(None, parts)


def _texts(content: object, path: str, ignored: IgnoredFields) -> list[str]:
    """Return the texts of a content that has only texts."""
    texts: list[str] = []
    for block, block_path in _blocks(content, path, _ROLE_BLOCKS["system"], ignored):
        for part in _parts(block, block_path, ignored):
            if not isinstance(part, str):
                raise ApiError(400, f"{block_path}: has an image; send images in a message of the user")
            texts.append(part)
    return [text for text in texts if text]


def _blocks(
    content: object, path: str, kinds: tuple[str, ...], ignored: IgnoredFields
) -> Iterator[tuple[Document, str]]:
    """Yield the blocks of a content, each with its path in the request. `kinds` are the types that are allowed."""
    if isinstance(content, str):
        yield {"type": "text", "text": content}, path
        return
    if not isinstance(content, list):
        raise ApiError(400, f"{path}: must be a text or a list of blocks, got {truncated_repr(content)}")
    for i, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str) or kind not in kinds:
            raise ApiError(
                400,
                f"{path}[{i}].type: must be one of {', '.join(kinds)}, got {truncated_repr(kind)}",
            )
        ignored.check(block, _BLOCK_FIELDS[kind] | {"type", "cache_control"}, "messages.content.")
        yield block, f"{path}[{i}]"


def _parts(block: Mapping[str, Any], path: str, ignored: IgnoredFields) -> list[Part]:
    """Return a block of a text, an image, a document or a search result as parts of chat completions."""
    match block["type"]:
        case "text":
            return [_string(block, "text", path)]
        case "image":
            return [_image(block, path)]
        case "search_result":
            texts = [_string(block, name, path) for name in ("title", "source")]
            for inner, inner_path in _blocks(block.get("content"), f"{path}.content", ("text",), ignored):
                texts.append(_string(inner, "text", inner_path))
            return ["\n".join(filter(None, texts))]
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else source
    if not isinstance(source, dict) or kind not in ("text", "content"):
        raise ApiError(
            400,
            f"{path}.source.type: must be text or content, got {truncated_repr(kind)}; convert the document to text",
        )
    head = "\n".join(text for name in ("title", "context") if isinstance(text := block.get(name), str) and text)
    if kind == "text":
        return ["\n".join(filter(None, [head, _string(source, "data", f"{path}.source")]))]
    parts: list[Part] = [head]
    for inner, inner_path in _blocks(source.get("content"), f"{path}.source.content", ("text", "image"), ignored):
        parts += _parts(inner, inner_path, ignored)
    return parts


def _image(block: Mapping[str, Any], path: str) -> Document:
    """Return an image block as an image part of chat completions."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else source
    if not isinstance(source, dict) or kind not in ("base64", "url"):
        raise ApiError(400, f"{path}.source.type: must be base64 or url, got {truncated_repr(kind)}")
    if kind == "url":
        return {"type": "image_url", "image_url": _string(source, "url", f"{path}.source")}
    media_type, data = (_string(source, name, f"{path}.source") for name in ("media_type", "data"))
    if not media_type.startswith("image/"):
        shown = truncated_repr(media_type)
        raise ApiError(400, f"{path}.source.media_type: must be the type of an image, such as image/png, got {shown}")
    return {"type": "image_url", "image_url": f"data:{media_type};base64,{data}"}


def _string(block: Mapping[str, Any], name: str, path: str) -> str:
    if not isinstance(value := block.get(name), str):
        raise ApiError(400, f"{path}.{name}: must be a text, got {truncated_repr(value)}")
    return value
