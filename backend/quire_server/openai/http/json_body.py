# SPDX-License-Identifier: Apache-2.0
"""Decodes the JSON body of a request, within limits on the number of its values.

Decoding runs on the event loop and holds the interpreter's lock. The limits are checked before that, with functions
that need about 1 ms per MiB. A body within the limits is decoded in less than 50 ms.
"""

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from quire_server.openai.errors import ApiError

MAX_VALUES = 2**20
"""Maximum number of values in a body. This is enough for the token ids of the longest prompts."""
MAX_OBJECTS = 2**17
"""Maximum number of strings, lists and objects in a body. Decoding one of them takes longer than decoding a number."""
_MAX_SURROGATE_BYTES = 2**20
"""In a body that has at most this size, the field with a lone surrogate is searched for."""


def decode_object(body: bytes) -> dict[str, Any]:
    """Return the object in `body`; raises ApiError if the body is no JSON object or has too many values."""
    _check_size(body)
    try:
        document = msgspec.json.decode(body)
    except UnicodeDecodeError:
        raise ApiError(400, "body: is not UTF-8; encode the JSON as UTF-8") from None
    except msgspec.DecodeError as error:
        if field := _field_with_surrogate(body):
            raise ApiError(
                400, f"{field}: contains a lone surrogate, which no text can contain; send valid Unicode"
            ) from None
        raise ApiError(400, f"body: is not JSON: {error}"[:300]) from None
    except RecursionError:
        raise ApiError(400, "body: the JSON is nested too deeply; use fewer levels") from None
    if not isinstance(document, dict):
        raise ApiError(400, f"body: must be a JSON object, got {type(document).__name__}")
    return document


def _check_size(body: bytes) -> None:
    if body.count(b",") + body.count(b"[") + body.count(b"{") <= MAX_OBJECTS:
        return
    # Texts can contain these characters, too. Only the bytes outside of strings count.
    text = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_objects = text.count(b'"') // 2
    if num_objects <= MAX_OBJECTS:
        text = b"".join(text.split(b'"')[::2])
        num_objects += text.count(b"[") + text.count(b"{")
        if num_objects <= MAX_OBJECTS and text.count(b",") < MAX_VALUES:
            return
    raise ApiError(
        400,
        f"{_largest_field(body)}: too many entries; a body can have at most {MAX_VALUES} values, and {MAX_OBJECTS} of "
        "them can be strings, lists and objects; send fewer",
    )


def _largest_field(body: bytes) -> str:
    """Return the name of the field whose value is the longest; body if there are too many fields, or no object."""
    if body.count(b":") > MAX_OBJECTS:
        return "body"
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return "body"
    return max(fields, key=lambda name: len(memoryview(fields[name])), default="body")[:80]


def _field_with_surrogate(body: bytes) -> str:
    """Return the path of the first string that contains a lone surrogate; an empty string if there is none."""
    if len(body) > _MAX_SURROGATE_BYTES or (b"\\ud" not in body and b"\\uD" not in body):
        return ""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    return next((path or "body" for path, text in _strings(document, "") if not _is_valid(text)), "")


def _strings(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the path of each string and each key in a JSON value, and its text."""
    stack = [(path, value)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, str):
            yield path, value
        elif isinstance(value, list):
            stack += [(f"{path}[{i}]", item) for i, item in reversed(list(enumerate(value)))]
        elif isinstance(value, dict):
            for name in value:
                yield path, name
            stack += [(f"{path}.{name}" if path else name, item) for name, item in reversed(value.items())]


def _is_valid(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
