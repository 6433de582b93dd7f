# SPDX-License-Identifier: Apache-2.0
"""What an API server answers when it does not do what was asked. The type says whether asking again can help.

ApiError
+-- Rejected    400, 405, 413, 415, 422: the object is wrong; the same object is refused again
|   +-- Undeclared  500: it has a field that this API server is too old for
+-- Forbidden   401, 403: a Role lacks a verb, a quota is used up, or the namespace is going
+-- Missing     404: no such object, namespace or kind
+-- Stale       409: somebody else was faster; read again
+-- Expired     410: the watch's place in history is gone; list again
+-- Busy        429, 5xx, no answer: later
"""

import re
from collections.abc import Mapping
from typing import Any

from quire_spec.errors import QuireError


class ApiError(QuireError):
    """The API server refused, or could not be reached; the message says what was asked."""

    def __init__(self, message: str, status: int = 0, retry_after_s: float | None = None) -> None:
        """`status` is HTTP's, 0 when there was no answer; `retry_after_s` is what the server asks us to wait."""
        self.status = status
        self.retry_after_s = retry_after_s
        super().__init__(message)


class Rejected(ApiError):
    """The object is wrong."""


class Forbidden(ApiError):
    """We may not."""


class Missing(ApiError):
    """There is no such thing."""


class Stale(ApiError):
    """The object has changed, or is another one of the same name."""


class Expired(ApiError):
    """The resource version is too old to go on from."""


class Busy(ApiError):
    """Not now."""


class Undeclared(Rejected):
    """An older API server does not know a field, and says so as an internal error; `field` is its path."""

    def __init__(self, message: str, field: tuple[str, ...]) -> None:
        super().__init__(message, 500)
        self.field = field


_UNDECLARED = re.compile(r"\.([A-Za-z0-9.]+): field not declared in schema")
_BY_STATUS: Mapping[int, type[ApiError]] = {401: Forbidden, 403: Forbidden, 404: Missing, 409: Stale, 410: Expired}


def from_answer(asked: str, status: int, body: Any, retry_after: str | None = None) -> ApiError:
    """The error that an answer is; `body` is the parsed Status object, or whatever text came instead."""
    said = body.get("message") if isinstance(body, Mapping) else body
    message = f"{asked}: {status} {said or 'without a reason'}"
    wait = float(retry_after) if retry_after and retry_after.isdecimal() else None
    if status == 500 and (unknown := _UNDECLARED.search(str(said))):
        return Undeclared(message, tuple(unknown[1].split(".")))
    if status == 429 or status >= 500:
        return Busy(message, status, wait)
    return _BY_STATUS.get(status, Rejected)(message, status, wait)


def error_of(event: Mapping[str, Any], asked: str) -> ApiError:
    """The error that a watch's event of type ERROR carries."""
    status = event["object"]
    return from_answer(asked, int(status.get("code") or 500), status)
