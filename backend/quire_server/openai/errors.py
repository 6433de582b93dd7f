# SPDX-License-Identifier: Apache-2.0
"""Errors of the OpenAI API. Each error has an HTTP status, a type, and the JSON body {"error": {message, type, param,
code}}.

This module maps the codes of the text process to HTTP statuses. OpenAI's clients repeat a request after status 408, 409
or 429, and after every status of 500 or higher. They do not repeat it if the response has `x-should-retry: false`.
"""

import math
import re
from typing import Any

import msgspec

from quire_spec.errors import Code, QuireError, bounded_text
from quire_spec.protocol.messages import OutputDelta

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    431: "RequestHeaderFieldsTooLargeError",
    499: "ClientClosedRequest",
    503: "ServiceUnavailableError",
}
_STATUS_BY_CODE = {
    Code.INVALID_ARG: 400,
    Code.NOT_FOUND: 404,
    Code.UNAVAILABLE: 503,
    Code.CANCELLED: 499,
    Code.INTERNAL: 500,
}
CODE_BY_STATUS = {404: Code.NOT_FOUND, 429: Code.UNAVAILABLE, 503: Code.UNAVAILABLE, 500: Code.INTERNAL}
"""Maps HTTP statuses to the error codes that the metrics use. All other statuses count as INVALID_ARG."""
_RETRY_AFTER_S = 1.0
_PARAM = re.compile(r"(?:sampling parameter )?'?([a-z_]{1,64})'?[:.\[]")
"""Pattern that finds a field's name at the start of an error message."""


class ApiError(Exception):
    """An error response."""

    is_counted = False
    """True if the text process has already counted the request in its metrics."""

    def __init__(self, status: int, message: str, param: str | None = None, retry_after_s: float | None = None) -> None:
        message = bounded_text(message)
        super().__init__(message)
        self.status = status
        self.message = message
        if param is None and status in (400, 404) and (match := _PARAM.match(message)):
            param = match[1]
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """Return the JSON document."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": _TYPES.get(self.status, "InternalServerError"),
            "param": self.param,
            "code": self.status,
        }
        return msgspec.json.encode({"error": error})

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that tell a client whether and when it can retry."""
        if self.retry_after_s is not None:
            return [(b"retry-after", str(max(1, math.ceil(self.retry_after_s))).encode())]
        if self.status == 500:
            # The request itself can be the cause of the error. Without this header, the client would send it two more
            # times.
            return [(b"x-should-retry", b"false")]
        if self.status == 401:
            return [(b"www-authenticate", b"Bearer")]
        return []


def error_from_code(code: str, message: str, retry_after_s: float | None = None) -> ApiError:
    """Return the API error for an error code of the text process."""
    status = _STATUS_BY_CODE[Code(code)] if code in Code.__members__ else 500
    if status == 503 and retry_after_s is not None:
        return ApiError(429, message, retry_after_s=retry_after_s)
    return ApiError(status, message, retry_after_s=_RETRY_AFTER_S if status == 503 else None)


def as_api_error(error: ApiError | QuireError) -> ApiError:
    """Return the API error for an error of a call to another process."""
    return error if isinstance(error, ApiError) else error_from_code(error.code, str(error))


def error_from_delta(delta: OutputDelta) -> ApiError:
    """Return the API error for a delta that ends a request with an error. The text process has already counted this
    request in its metrics."""
    error = error_from_code(delta.error_code or Code.INTERNAL, delta.error, delta.retry_after_s)
    error.is_counted = True
    return error
