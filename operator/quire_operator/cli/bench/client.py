# SPDX-License-Identifier: Apache-2.0
"""Sends the requests of a benchmark, and records when the parts of each answer came."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp

from quire_operator.cli.bench.workload import Request
from quire_spec.errors import QuireError, Unavailable
from quire_spec.net.server_url import is_loopback

_NUM_TOP_LOGPROBS = 5
_CONNECT_TIMEOUT_S = 10.0
_REQUEST_TIMEOUT_S = 3600.0
_MAX_LINE_BYTES = 2**20
_MAX_ERROR_CHARS = 300


@dataclass(slots=True)
class Token:
    """A generated token, with the log probabilities of the likeliest tokens at its position."""

    text: str
    top_logprobs: dict[str, float]


@dataclass(slots=True)
class Outcome:
    """What came of a request. Times are in seconds of the same clock."""

    request: Request
    started_at: float
    arrivals: list[float] = field(default_factory=list)
    """Times of the parts with text. The first is that of the first token."""
    ended_at: float = 0.0
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    """Only if they were asked for."""
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """What all requests have in common."""

    root: str
    """URL of the server without /v1."""
    api_key: str | None
    is_chat: bool
    ignore_eos: bool
    seed: int


class Client:
    """Connections to one server, as many as there are open requests."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._url = f"{settings.root}/v1/{'chat/completions' if settings.is_chat else 'completions'}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S, sock_connect=_CONNECT_TIMEOUT_S),
            headers={"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {},
            trust_env=not is_loopback(settings.root),
            read_bufsize=_MAX_LINE_BYTES,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._session.close()

    async def models(self) -> list[dict[str, Any]]:
        """Return the entries of /v1/models.

        Raises:
            QuireError: the server does not answer with a list.
        """
        url = f"{self._settings.root}/v1/models"
        try:
            async with self._session.get(url, allow_redirects=False) as response:
                if response.status != 200:
                    raise Unavailable(f"{url}: {_error_text(response.status, await response.text())}")
                return [
                    {"id": str(card["id"]), "parent": card.get("parent")} for card in (await response.json())["data"]
                ]
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unavailable(f"{url}: no connection: {_reason(error)}; start the server, or correct --url") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Unavailable(f"{url}: this is not a server of the OpenAI API; correct --url") from error

    async def send(self, request: Request, logprobs: bool = False) -> Outcome:
        """Send a request and read its answer. A failure is in the outcome.

        Args:
            logprobs: whether to ask for the log probabilities of the likeliest tokens.
        """
        outcome = Outcome(request, time.perf_counter())
        body = self._body(request, logprobs)
        try:
            async with self._session.post(self._url, json=body, allow_redirects=False) as response:
                if response.status != 200:
                    outcome.error = _error_text(response.status, await response.text(errors="replace"))
                else:
                    async for line in response.content:
                        if line.startswith(b"data:"):
                            self._add(outcome, line[5:].strip(), time.perf_counter())
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            outcome.error = f"connection: {_reason(error)}"[:_MAX_ERROR_CHARS]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            outcome.error = f"the server sent an event that is not a chunk: {error}"[:_MAX_ERROR_CHARS]
        except QuireError as error:
            outcome.error = str(error)[:_MAX_ERROR_CHARS]
        outcome.ended_at = time.perf_counter()
        if outcome.error is None and outcome.finish_reason is None:
            outcome.error = "the stream ended before the answer was complete"
        if not outcome.arrivals:  # an answer without text
            outcome.arrivals.append(outcome.ended_at)
        outcome.num_output_tokens = outcome.num_output_tokens or len(outcome.arrivals)
        return outcome

    def _body(self, request: Request, logprobs: bool) -> dict[str, Any]:
        settings = self._settings
        body: dict[str, Any] = {"model": request.model, "max_tokens": request.max_tokens, "temperature": 0}
        body |= {"seed": settings.seed, "stream": True, "stream_options": {"include_usage": True}}
        if not settings.is_chat:
            body["prompt"] = request.prompt
        elif isinstance(request.prompt, str):
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            body["messages"] = request.prompt
        if settings.ignore_eos:
            body["ignore_eos"] = True
        if logprobs and settings.is_chat:
            body |= {"logprobs": True, "top_logprobs": _NUM_TOP_LOGPROBS}
        elif logprobs:
            body["logprobs"] = _NUM_TOP_LOGPROBS
        return body

    def _add(self, outcome: Outcome, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if error := event.get("error"):
            raise Unavailable(str(error.get("message", error) if isinstance(error, dict) else error))
        if usage := event.get("usage"):
            outcome.num_input_tokens = usage["prompt_tokens"]
            outcome.num_output_tokens = usage["completion_tokens"]
        for choice in event["choices"]:
            text = _text(choice)
            if text:
                outcome.arrivals.append(now)
                outcome.text += text
            outcome.finish_reason = choice.get("finish_reason") or outcome.finish_reason
            if logprobs := choice.get("logprobs"):
                outcome.tokens += _tokens(logprobs)


def _text(choice: dict[str, Any]) -> str:
    """Return the text of a chunk, including thinking and the arguments of tool calls."""
    if "delta" not in choice:
        return choice["text"] or ""
    delta = choice["delta"]
    calls = (call.get("function") or {} for call in delta.get("tool_calls") or ())
    reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
    return reasoning + (delta.get("content") or "") + "".join(call.get("arguments") or "" for call in calls)


def _tokens(logprobs: dict[str, Any]) -> Iterator[Token]:
    """Yield the tokens of a chunk: in the format of chats, or in that of completions."""
    if "content" in logprobs:
        for token in logprobs["content"] or ():
            yield Token(token["token"], {top["token"]: top["logprob"] for top in token["top_logprobs"]})
    else:
        for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
            yield Token(token, top or {})


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _error_text(status: int, body: str) -> str:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = " ".join(body.split())
    return f"status {status}: {message}"[:_MAX_ERROR_CHARS]
