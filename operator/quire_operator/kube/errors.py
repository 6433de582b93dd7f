# SPDX-License-Identifier: Apache-2.0
"""Errors that requests to the API server raise. The class of an error shows whether a retry can help.

ApiError
+-- InvalidObject           400, 405, 413, 415, 422: the object is invalid, and will be rejected again
|   +-- UnknownFields       500: the API server does not know some of its fields
+-- Forbidden               401, 403: a Role lacks a verb, a quota is used up, or the namespace is being deleted
|   +-- WebhookFailed       500: an admission webhook does not answer
+-- ObjectNotFound          404: the object, namespace or kind does not exist
+-- WriteConflict           409: the object has changed; read it again
+-- ResourceVersionExpired  410: the watch's resourceVersion was compacted; list again
+-- ApiServerUnavailable    429, 5xx, no response: retry later
"""

from collections.abc import Mapping
from typing import Any

from quire_operator.kube.unknown_fields import FieldPath, unknown_fields
from quire_spec.errors import QuireError


class ApiError(QuireError):
    """The API server rejected a request or did not respond. The message begins with the method and the path of the
    request."""

    def __init__(self, message: str, status: int = 0, retry_after_s: float | None = None) -> None:
        """`status` is the HTTP status, or 0 if there was no response. `retry_after_s` is the value of the header
        Retry-After."""
        self.status = status
        self.retry_after_s = retry_after_s
        super().__init__(message)


class InvalidObject(ApiError):
    """The object is invalid."""


class Forbidden(ApiError):
    """The operator lacks a permission, or a quota is used up."""


class WebhookFailed(Forbidden):
    """An admission webhook, which must allow the object, does not answer. Other objects can still be written."""


class ObjectNotFound(ApiError):
    """The object, namespace or kind does not exist."""


class WriteConflict(ApiError):
    """The object has changed, or another object has its name."""


class ResourceVersionExpired(ApiError):
    """The resourceVersion is too old to continue a watch."""


class ApiServerUnavailable(ApiError):
    """The API server is overloaded, has failed or did not respond. A retry can succeed."""


class UnknownFields(InvalidObject):
    """The API server does not know some fields of the object. `fields` contains their paths."""

    def __init__(self, message: str, fields: frozenset[FieldPath]) -> None:
        super().__init__(message, 500)
        self.fields = fields


_WEBHOOK_FAILURE = "failed calling webhook"
_BY_STATUS: Mapping[int, type[ApiError]] = {
    401: Forbidden,
    403: Forbidden,
    404: ObjectNotFound,
    409: WriteConflict,
    410: ResourceVersionExpired,
}


def error_from_response(request_line: str, status: int, body: Any, retry_after: str | None = None) -> ApiError:
    """Convert a response to an error. `body` is the parsed Status object, or the text of the response if it is not a
    Status."""
    reason = body.get("message") if isinstance(body, Mapping) else body
    message = f"{request_line}: {status} {reason or 'no reason given'}"
    retry_after_s = float(retry_after) if retry_after and retry_after.isdecimal() else None
    if fields := unknown_fields(status, str(reason)):
        return UnknownFields(message, fields)
    if status == 500 and _WEBHOOK_FAILURE in str(reason):
        return WebhookFailed(message, status, retry_after_s)
    if status == 429 or status >= 500:
        return ApiServerUnavailable(message, status, retry_after_s)
    return _BY_STATUS.get(status, InvalidObject)(message, status, retry_after_s)


def error_from_event(event: Mapping[str, Any], request_line: str) -> ApiError:
    """Convert a watch event of type ERROR to an error."""
    status = event["object"]
    return error_from_response(request_line, int(status.get("code") or 500), status)
