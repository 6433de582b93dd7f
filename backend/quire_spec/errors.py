# SPDX-License-Identifier: Apache-2.0
"""Errors that cross a process boundary, each with the code that clients of the server receive.

The code that raises an error chooses its class; each process passes the error code on unchanged
(protocol/messages.py). The message names the field or object, the problem, and the fix.

    QuireError
    +-- InvalidArgument     the request or document is wrong; a retry does not help
    |   +-- ConfigError     a configuration file or field is wrong
    +-- NotFound            no model, adapter or file has that name
    +-- Unavailable         the request is valid but cannot be served now: queue full, engine restarting, draining
    |   +-- AccessDenied    a source denies access: the Secret is missing, wrong, or lacks permission
    +-- Cancelled           the client cancelled or disconnected
    +-- Internal            a defect in Quire
"""

from enum import StrEnum


class Code(StrEnum):
    """Error codes, named as Triton Inference Server names them."""

    INVALID_ARG = "INVALID_ARG"
    NOT_FOUND = "NOT_FOUND"
    UNAVAILABLE = "UNAVAILABLE"
    CANCELLED = "CANCELLED"
    INTERNAL = "INTERNAL"


class QuireError(Exception):
    """Base of all errors with a code; `str(error)` is the message for the client."""

    code: Code = Code.INTERNAL


class InvalidArgument(QuireError):
    """The request or document is wrong."""

    code = Code.INVALID_ARG


class ConfigError(InvalidArgument):
    """A configuration field is wrong; the message names field, value and fix."""


class NotFound(QuireError):
    """There is no object with the requested name."""

    code = Code.NOT_FOUND


class Unavailable(QuireError):
    """The request is valid but cannot be served now; retry later."""

    code = Code.UNAVAILABLE

    def __init__(self, message: str = "", retry_after_s: float | None = None) -> None:
        """`retry_after_s` is the delay in the peer's header Retry-After; None if the peer sent none."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class AccessDenied(Unavailable):
    """A source denies access. A retry can succeed after the Secret is corrected."""


class Cancelled(QuireError):
    """The client cancelled or disconnected."""

    code = Code.CANCELLED


class Internal(QuireError):
    """A defect in Quire."""


_ERROR_TYPES: dict[Code, type[QuireError]] = {
    Code.INVALID_ARG: InvalidArgument,
    Code.NOT_FOUND: NotFound,
    Code.UNAVAILABLE: Unavailable,
    Code.CANCELLED: Cancelled,
    Code.INTERNAL: Internal,
}


def error_from_code(code: str, message: str) -> QuireError:
    """Return the exception for a code received over the wire; an unknown code becomes `Internal`."""
    error_code = Code(code) if code in Code.__members__ else Code.INTERNAL
    return _ERROR_TYPES[error_code](message)


def truncated_repr(value: object) -> str:
    """Return `repr(value)` for a message, cut to 80 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        text = f"a value of type {type(value).__name__} with thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."
