# SPDX-License-Identifier: Apache-2.0
"""The errors that cross a process boundary, each with the code that the server's clients see.

A code is decided where the error is raised and travels unchanged (messages.py) to the client. Whoever raises one
writes a message that says what was asked, what was found and what to do.

    QuireError
    +-- InvalidArgument     the request or document is wrong; sending it again changes nothing
    |   +-- ConfigError     a configuration file or field is wrong
    +-- NotFound            no model, adapter or file of that name
    +-- Unavailable         right, but not now: queue full, engine restarting, draining
    |   +-- AccessDenied    a place of files does not let us in: no Secret, a wrong one, or one that lacks access
    +-- Cancelled           the client went away or cancelled
    +-- Internal            our fault
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
    """Nothing of that name."""

    code = Code.NOT_FOUND


class Unavailable(QuireError):
    """Right, but not now; try again."""

    code = Code.UNAVAILABLE

    def __init__(self, message: str = "", retry_after_s: float | None = None) -> None:
        """`retry_after_s` is how long whoever refuses asks to be left alone, None where that was not said."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class AccessDenied(Unavailable):
    """A place of files does not let us in; right once the Secret is."""


class Cancelled(QuireError):
    """The client went away or cancelled."""

    code = Code.CANCELLED


class Internal(QuireError):
    """A defect of ours."""


_ERROR_TYPES: dict[Code, type[QuireError]] = {
    Code.INVALID_ARG: InvalidArgument,
    Code.NOT_FOUND: NotFound,
    Code.UNAVAILABLE: Unavailable,
    Code.CANCELLED: Cancelled,
    Code.INTERNAL: Internal,
}


def error_from_code(code: str, message: str) -> QuireError:
    """The exception for a code that came over the wire; an unknown code becomes `Internal`."""
    error_code = Code(code) if code in Code.__members__ else Code.INTERNAL
    return _ERROR_TYPES[error_code](message)


def truncated_repr(value: object) -> str:
    """`value` as a message quotes it."""
    try:
        text = repr(value)
    except ValueError:  # Python writes integers of thousands of digits only when told to
        text = f"a value of type {type(value).__name__} with thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."
