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

from collections.abc import Mapping
from typing import Any

from quire_operator.kube.old_api_servers import unknown_field
from quire_spec.errors import QuireError


class ApiError(QuireError):
    """The API server refused, or could not be reached; the message says what was asked."""

    def __init__(self, message: str, status: int = 0, retry_after_s: float | None = None) -> None:
        """`status` is HTTP's, 0 when there was no answer; `retry_after_s` is what the server asks us to wait."""
        self.status = status
        self.retry_after_s = retry_after_s
        super().__init__(message)


class InvalidObject(ApiError):
    """The object is wrong."""


class Forbidden(ApiError):
    """We may not."""


class ObjectNotFound(ApiError):
    """There is no such thing."""


class WriteConflict(ApiError):
    """The object has changed, or is another one of the same name."""


class ResourceVersionExpired(ApiError):
    """The resource version is too old to go on from."""


class ApiServerUnavailable(ApiError):
    """Not now."""


class UnknownField(InvalidObject):
    """An older API server does not know a field, and says so as an internal error; `field` is its path."""

    def __init__(self, message: str, field: tuple[str, ...]) -> None:
        super().__init__(message, 500)
        self.field = field


_BY_STATUS: Mapping[int, type[ApiError]] = {
    401: Forbidden,
    403: Forbidden,
    404: ObjectNotFound,
    409: WriteConflict,
    410: ResourceVersionExpired,
}


def error_from_response(request_line: str, status: int, body: Any, retry_after: str | None = None) -> ApiError:
    """The error that an answer is; `body` is the parsed Status object, or whatever text came instead."""
    reason = body.get("message") if isinstance(body, Mapping) else body
    message = f"{request_line}: {status} {reason or 'without a reason'}"
    retry_after_s = float(retry_after) if retry_after and retry_after.isdecimal() else None
    if field := unknown_field(status, str(reason)):
        return UnknownField(message, field)
    if status == 429 or status >= 500:
        return ApiServerUnavailable(message, status, retry_after_s)
    return _BY_STATUS.get(status, InvalidObject)(message, status, retry_after_s)


def error_from_event(event: Mapping[str, Any], request_line: str) -> ApiError:
    """The error that a watch's event of type ERROR carries."""
    status = event["object"]
    return error_from_response(request_line, int(status.get("code") or 500), status)
