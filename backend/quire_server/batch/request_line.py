# SPDX-License-Identifier: Apache-2.0
"""Parses one line of an input file.

The result is a request, or the error of an invalid line. The module is pure: it does not depend on files or servers.

A line has the format of OpenAI's Batch API: {"custom_id", "method": "POST", "url", "body"}.
"""

import json
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"),
    *("/v1/score", "/v1/rerank", "/v1/classify"),
)
"""Routes that a request can use. If a server does not have the route of a request, it responds with 404."""
MAX_CUSTOM_ID_CHARS = 512
_MAX_SORT_CHARS = 2048
_MAX_MESSAGE_CHARS = 200


@dataclass(frozen=True, slots=True)
class RequestLine:
    """A request of an input file."""

    number: int
    """Number of the line, counted from 1."""
    custom_id: str
    url: str
    body: dict[str, Any]
    sort_key: tuple[str, str]
    """The model and the start of the prompt. Lines are sorted by this key. Requests for the same model share an adapter
    slot, and prompts with the same start share KV blocks."""


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is not a request."""

    id: str
    """An id that consists of the line's number and digest. If the line is corrected, it gets another id."""
    custom_id: str | None
    code: str
    """Error code. The codes have the same names as in the error files of OpenAI's Batch API."""
    message: str


def parse_line(number: int, line: bytes) -> RequestLine | BadLine:
    """Parse a line of an input file."""
    custom_id = None
    try:
        document = json.loads(line, parse_constant=_reject_constant)
        if not isinstance(document, dict):
            raise ValueError(f"must be a JSON object, got {type(document).__name__}")
    except (ValueError, RecursionError) as error:
        problem = "the JSON is nested too deeply" if isinstance(error, RecursionError) else str(error)
        return bad_line(number, line, None, "invalid_json_line", f"line {number}: is not a JSON object: {problem}")
    custom_id = document.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        problem = f"custom_id must be a string of 1 to {MAX_CUSTOM_ID_CHARS} characters"
        return bad_line(number, line, None, "invalid_custom_id", f"line {number}: {problem}")
    if problem_and_code := _check(document):
        problem, code = problem_and_code
        return bad_line(number, line, custom_id, code, f"line {number}: {problem}")
    body = document["body"]
    return RequestLine(number, custom_id, document["url"], body, (body.get("model") or "", _prompt_start(body)))


def bad_line(number: int, line: bytes, custom_id: str | None, code: str, message: str) -> BadLine:
    """Return the error for a line."""
    digest = blake2b(line, digest_size=8).hexdigest()
    return BadLine(f"batch_line_{number}_{digest}", custom_id, code, message[: _MAX_MESSAGE_CHARS + 100])


def _check(document: dict[str, Any]) -> tuple[str, str] | None:
    """Return the message and the code for an invalid line, or None if the line is valid."""
    if (method := document.get("method")) != "POST":
        return f"method must be POST, got {_shorten(method)}", "invalid_method"
    if (url := document.get("url")) not in URLS:
        return f"url must be one of {', '.join(URLS)}, got {_shorten(url)}", "invalid_url"
    if not isinstance(body := document.get("body"), dict):
        return f"body must be a JSON object, got {_shorten(body)}", "invalid_body"
    if not isinstance(model := body.get("model"), str | None):
        return f"body.model must be a string, got {_shorten(model)}", "invalid_body"
    if body.get("stream"):
        return "body.stream must be false in a batch; leave it out", "invalid_body"
    return None


def _prompt_start(body: dict[str, Any]) -> str:
    prompt = next((body[name] for name in ("messages", "prompt", "input") if name in body), "")
    # A list is cut before it is converted to text. Otherwise, the whole text of a long prompt would be built, but not
    # used.
    start = prompt[:64] if isinstance(prompt, list) else prompt
    text = start if isinstance(start, str) else json.dumps(start)
    return text[:_MAX_SORT_CHARS]


def _shorten(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= _MAX_MESSAGE_CHARS else f"{text[:_MAX_MESSAGE_CHARS]}..."


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")
