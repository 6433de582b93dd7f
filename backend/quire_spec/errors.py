# SPDX-License-Identifier: Apache-2.0
"""Errors that one process reports to another. Each error has a code, which the clients of the server receive.

The code that raises an error chooses the class of the error. Each process passes the error code on unchanged
(protocol/messages.py). The message of an error names the field or object, the problem, and the fix.

    QuireError
    +-- InvalidArgument     the request or document is wrong; a retry does not help
    |   +-- ConfigError     a configuration file or field is wrong
    +-- NotFound            no model, adapter or file has that name
    +-- Unavailable         the request is valid but cannot be served now: queue full, engine restarting, draining
    |   +-- AccessDenied    a source denies access: the Secret is missing, wrong, or lacks permission
    +-- Cancelled           the client cancelled or disconnected
    +-- Internal            a defect in Quire
"""

import itertools
from asyncio import CancelledError
from collections.abc import Iterable, Iterator
from enum import StrEnum

PROCESS_ENDS = (KeyboardInterrupt, SystemExit, GeneratorExit, CancelledError)
"""Exceptions that are not the fault of a request. Code that serves a request passes them on, and then catches
BaseException: if native code panics (tokenizers and llguidance are written in Rust), its exception is no `Exception`.
"""


MAX_ERROR_BYTES = 4096
"""Maximum size of an error text that leaves a process. Parts of it can come from a client or from a template."""
_MAX_REPR_CHARS = 80


class Code(StrEnum):
    """Error codes. Their names are those of Triton Inference Server."""

    INVALID_ARG = "INVALID_ARG"
    NOT_FOUND = "NOT_FOUND"
    UNAVAILABLE = "UNAVAILABLE"
    CANCELLED = "CANCELLED"
    INTERNAL = "INTERNAL"


class QuireError(Exception):
    """Base class of all errors that have a code. `str(error)` is the message that the client receives."""

    code: Code = Code.INTERNAL


class InvalidArgument(QuireError):
    """The request or the document is wrong."""

    code = Code.INVALID_ARG


class ConfigError(InvalidArgument):
    """A configuration field is wrong. The message names the field, its value and the fix."""


class NotFound(QuireError):
    """An object with the requested name does not exist."""

    code = Code.NOT_FOUND


class Unavailable(QuireError):
    """The request is valid but cannot be served now. The client can retry it later."""

    code = Code.UNAVAILABLE

    def __init__(self, message: str = "", retry_after_s: float | None = None) -> None:
        """`retry_after_s` is the delay from the header Retry-After that the other side sent; None if it did not send
        one."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class AccessDenied(Unavailable):
    """A source denies access. A retry can succeed after the Secret is corrected."""


class Cancelled(QuireError):
    """The client cancelled the request or disconnected."""

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


def error_text(error: BaseException) -> str:
    """Return the message of an error for another process or for a client: at most MAX_ERROR_BYTES bytes of UTF-8, and
    with question marks instead of lone surrogates, which no message can contain."""
    return bounded_text(str(error))


def bounded_text(text: str) -> str:
    """Return a text in the form that `error_text` describes."""
    data = text.encode(errors="replace")
    if len(data) > MAX_ERROR_BYTES:
        return data[: MAX_ERROR_BYTES - 3].decode(errors="ignore") + "..."
    return data.decode()


def error_from_code(code: str, message: str) -> QuireError:
    """Create the exception for a code that was received from another process. A code that is unknown becomes
    `Internal`."""
    error_code = Code(code) if code in Code.__members__ else Code.INTERNAL
    return _ERROR_TYPES[error_code](message)


def truncated_repr(value: object) -> str:
    """Return `repr(value)`, cut to 80 characters, for use in a message. Only the start of a large value is read."""
    text = ""
    for piece in _repr_pieces(value):
        text += piece
        if len(text) > _MAX_REPR_CHARS:
            return text[: _MAX_REPR_CHARS - 3] + "..."
    return text


def _repr_pieces(value: object) -> Iterator[str]:
    """Yield the parts of `repr(value)`."""
    if type(value) is list:
        yield from _joined("[", map(_repr_pieces, value), "]")
    elif type(value) is tuple:
        yield from _joined("(", map(_repr_pieces, value), ",)" if len(value) == 1 else ")")
    elif type(value) is dict:
        items = (itertools.chain(_repr_pieces(key), (": ",), _repr_pieces(item)) for key, item in value.items())
        yield from _joined("{", items, "}")
    elif type(value) in (str, bytes):
        # Four characters of a repr can be one character of the value, but not the other way round.
        yield repr(value[: _MAX_REPR_CHARS + 1])  # type: ignore[index]
    else:
        try:
            yield repr(value)
        except ValueError:  # Python refuses to print integers of thousands of digits
            yield f"a value of type {type(value).__name__} with thousands of digits"


def _joined(start: str, items: Iterable[Iterable[str]], end: str) -> Iterator[str]:
    yield start
    for i, item in enumerate(items):
        if i:
            yield ", "
        yield from item
    yield end
