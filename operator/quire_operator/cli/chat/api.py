# SPDX-License-Identifier: Apache-2.0
"""A client of the OpenAI API on the standard library: the list of models, and one streamed answer at a time."""

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Generator, Iterable, Iterator, Mapping
from http.client import HTTPException, HTTPResponse
from typing import Any, NamedTuple

from quire_spec.errors import InvalidArgument, NotFound, QuireError, Unavailable
from quire_spec.net.server_url import is_loopback

_MODELS_TIMEOUT_S = 10.0
_ANSWER_TIMEOUT_S = 600.0
"""Longest time without a byte of the answer. A request can wait in the queue of the server before its first token."""
_MAX_ERROR_BYTES = 2**16


class Piece(NamedTuple):
    """A part of an answer."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None


class Api:
    """The routes of one server."""

    def __init__(self, root: str, api_key: str | None) -> None:
        """`root` is the URL without /v1."""
        self.root = root
        self._headers = {"Content-Type": "application/json", "User-Agent": "quire-chat"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        handlers: list[urllib.request.BaseHandler] = [_NoRedirects()]
        if is_loopback(root):
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)

    def model_names(self) -> list[str]:
        """Return the names of the models and adapters; empty if the server has no list.

        Raises:
            QuireError: the server does not answer, or denies access.
        """
        try:
            with self._open("/v1/models", None, _MODELS_TIMEOUT_S) as response:
                document = json.load(response)
                return [str(card["id"]) for card in document["data"]]
        except NotFound:
            return []
        except (ValueError, KeyError, TypeError) as error:
            raise Unavailable(f"{self.root}: this is not a server of the OpenAI API; correct the URL") from error

    def stream_chat(self, body: Mapping[str, Any]) -> Generator[Piece, None, None]:
        """Send a chat, and yield the answer. Closing the iterator closes the connection, which ends the request.

        Raises:
            QuireError: the request failed, or the connection ended before the answer was complete.
        """
        data = json.dumps({**body, "stream": True}).encode()
        with self._open("/v1/chat/completions", data, _ANSWER_TIMEOUT_S) as response, self._readable():
            finish_reason = None
            for event in _events(response):
                if event == "[DONE]":
                    break
                piece = _piece(event)
                finish_reason = piece.finish_reason or finish_reason
                yield piece
            if finish_reason is None:
                raise Unavailable("the connection ended before the answer was complete; send the message again")

    def _open(self, path: str, data: bytes | None, timeout_s: float) -> HTTPResponse:
        request = urllib.request.Request(self.root + path, data, self._headers)
        with self._readable():
            try:
                response: HTTPResponse = self._opener.open(request, timeout=timeout_s)
            except urllib.error.HTTPError as error:
                with error:
                    raise _error_of(error) from error
            return response

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        """Turn errors of the connection into an error that names the server."""
        try:
            yield
        except TimeoutError as error:
            raise Unavailable(f"{self.root}: no answer within the time limit; try again") from error
        except urllib.error.URLError as error:
            raise Unavailable(
                f"{self.root}: no connection: {_reason(error)}; start the server, or correct the URL"
            ) from error
        except (OSError, HTTPException) as error:
            raise Unavailable(f"{self.root}: the connection was lost: {error or type(error).__name__}") from error


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would send the key to another server."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _events(lines: Iterable[bytes]) -> Iterator[str]:
    """Yield the data of server-sent events."""
    for line in lines:
        if line.startswith(b"data:"):
            yield line[5:].strip().decode(errors="replace")


def _piece(event: str) -> Piece:
    try:
        document = json.loads(event)
        if error := document.get("error"):
            raise Unavailable(str(error.get("message", error) if isinstance(error, dict) else error))
        if not document["choices"]:  # the usage
            return Piece()
        choice = document["choices"][0]
        delta = choice.get("delta") or {}
        reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
        return Piece(str(delta.get("content") or ""), str(reasoning), choice.get("finish_reason"))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise Unavailable(f"the server sent an event that is not a chunk of a chat: {event[:100]!r}") from error


def _error_of(error: urllib.error.HTTPError) -> QuireError:
    """Return the error of a response, with the server's message."""
    text = ""
    with contextlib.suppress(OSError, HTTPException):
        text = error.read(_MAX_ERROR_BYTES).decode(errors="replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(text)["error"]["message"])
    text = " ".join(text.split())[:2000] or error.reason
    if error.code in (401, 403):
        return InvalidArgument(f"{text} (status {error.code}); give the key with QUIRE_API_KEY or --api-key")
    if error.code == 404:
        return NotFound(f"{text} (status 404)")
    return (InvalidArgument if error.code < 500 else Unavailable)(f"{text} (status {error.code})")


def _reason(error: urllib.error.URLError) -> str:
    reason = error.reason
    return str(getattr(reason, "strerror", None) or reason)
