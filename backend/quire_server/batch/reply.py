# SPDX-License-Identifier: Apache-2.0
"""The reply of an endpoint to one request, and the rule that decides whether the request is sent again. Pure."""

import json
from dataclasses import dataclass
from typing import Any, Protocol

from quire_spec.backoff import backoff

_RETRYABLE = frozenset({0, 408, 409, 429})
_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 30.0
_MAX_RETRY_AFTER_S = 120.0
_MAX_MESSAGE_CHARS = 500


@dataclass(frozen=True, slots=True)
class Reply:
    """A response, or the reason why there is no response."""

    status: int
    """HTTP status, or 0 if there is no response."""
    body: bytes = b""
    request_id: str = ""
    retry_after_s: float | None = None
    should_retry: bool | None = None
    """Value of the response's header x-should-retry. None if the response does not have this header."""
    problem: str = ""
    """Reason why there is no response."""
    was_received: bool = True
    """False if the request did not reach the server. In this case, the request cannot be the cause of the failure."""

    @property
    def is_retryable(self) -> bool:
        """True if another attempt can succeed. OpenAI's clients use the same rule."""
        if self.should_retry is not None:
            return self.should_retry
        return self.status in _RETRYABLE or self.status >= 500

    @property
    def is_overload(self) -> bool:
        """True if the server rejected the request because it is overloaded. The request itself is not the cause."""
        return self.status == 429

    def delay_s(self, num_attempts: int) -> float:
        """Return how many seconds to wait before the next attempt. `num_attempts` is the number of attempts so far."""
        delay_s = backoff(num_attempts - 1, _FIRST_DELAY_S, _MAX_DELAY_S)
        return delay_s if self.retry_after_s is None else max(delay_s, min(self.retry_after_s, _MAX_RETRY_AFTER_S))

    def json_body(self) -> Any:
        """Return the JSON document in the body, or None if the body is not JSON."""
        try:
            return json.loads(self.body) if self.body else None
        except (ValueError, RecursionError):
            return None

    def describe(self) -> str:
        """Return the status and the start of the message, for errors and logs."""
        if self.status == 0:
            return self.problem
        document = self.json_body()
        error = document.get("error") if isinstance(document, dict) else None
        message = error.get("message") if isinstance(error, dict) else self.body.decode(errors="replace")
        return f"status {self.status}: {message}"[:_MAX_MESSAGE_CHARS]

    def rejects_field(self, name: str) -> bool:
        """Return True if the server rejected the request because it does not accept the field `name`."""
        if self.status not in (400, 422):
            return False
        document = self.json_body()
        error = document.get("error") if isinstance(document, dict) else None
        return isinstance(error, dict) and (error.get("param") == name or name in str(error.get("message")))


class Endpoint(Protocol):
    """Protocol of an endpoint that accepts requests of the OpenAI API: a server, or an engine on this machine."""

    async def post(self, url: str, body: dict[str, Any]) -> Reply:
        """Send one request.

        `url` is a path such as /v1/completions. If the request fails, no error is raised, and the Reply describes the
        failure.
        """
