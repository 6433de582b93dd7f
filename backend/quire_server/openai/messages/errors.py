# SPDX-License-Identifier: Apache-2.0
"""Errors in the form of Anthropic's API: {"type": "error", "error": {type, message}, "request_id"}."""

import re

import msgspec

from quire_server.openai.errors import ApiError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_STATUSES = {503: 529}
"""Statuses that Anthropic's API has other numbers for."""
_NAMES = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "continue_final_message": "messages",
}
"""Fields of chat completions, and the fields of the Messages API from which they result."""
_FIELD = re.compile(rf"(?:sampling parameter )?'?({'|'.join(_NAMES)})'?(?=[:.\[])")
_PROMPT_TOO_LONG = re.compile(r"the prompt has (\d+) tokens and max_model_len is (\d+)")


def status_of(error: ApiError) -> int:
    """Return the HTTP status of an error."""
    return _STATUSES.get(error.status, error.status)


def error_body(error: ApiError, request_id: str) -> bytes:
    """Return the JSON document of an error."""
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    document = {"type": "error", "error": {"type": kind, "message": _message(error)}, "request_id": request_id}
    return msgspec.json.encode(document)


def error_event(error: ApiError, request_id: str) -> bytes:
    """Return the event that ends a stream with an error."""
    return b"event: error\ndata: %b\n\n" % error_body(error, request_id)


def _message(error: ApiError) -> str:
    """Return the message. Agents recognize a prompt that is too long by Anthropic's words, and then compact it."""
    if error.status == 400 and (match := _PROMPT_TOO_LONG.match(error.message)):
        return f"prompt is too long: {match[1]} tokens > {int(match[2]) - 1} maximum"
    if error.status == 400 and error.message.startswith("the request has "):
        return f"prompt is too long: {error.message}"
    return _NAMES[match[1]] + error.message[match.end() :] if (match := _FIELD.match(error.message)) else error.message
