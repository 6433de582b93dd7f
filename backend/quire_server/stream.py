# SPDX-License-Identifier: Apache-2.0
"""Stream: one open request of a stub, between the text process's events and the responses to its client.

Events gather here until a sender thread takes all of them at once: one response per event while the senders keep up,
fewer and larger ones when they do not. A stream is in the senders' queue or in one sender's hands at most once, so its
responses keep their order and exactly one of them is final. Knows nothing of the server; frontend.py moves it about.
"""

import threading
from typing import Any

from quire_server.wire import Wanted
from quire_spec.errors import QuireError, Unavailable
from quire_spec.messages import Event

MAX_PENDING_TOKENS = 16384
"""Output tokens that may wait for the senders; more means that the server does not take them."""


class Stream:
    """An open request. Any thread may `put` and `cut`; only the sender that holds it may `take` and `release`."""

    __slots__ = (
        "_closed",
        "_events",
        "_held",
        "_lock",
        "_num_pending",
        "checked_at",
        "cut_off",
        "id",
        "num_sent",
        "sender",
        "wanted",
    )

    def __init__(self, request_id: int, wanted: Wanted | None, sender: Any, now: float) -> None:
        self.id = request_id
        self.wanted = wanted
        """None when the request was refused: then its only response is an error."""
        self.sender = sender
        """The server's response sender."""
        self.num_sent = 0
        """Output tokens that responses told of."""
        self.cut_off = False
        """Ended from this side: the text process has to be told."""
        self.checked_at = now
        """When the server was last asked whether the client is gone, in monotonic seconds."""
        self._events: list[Event] = []
        self._num_pending = 0
        self._closed = False
        """The last event is in; no other is taken."""
        self._held = False
        """In the senders' queue, or with a sender."""
        self._lock = threading.Lock()

    def put(self, event: Event) -> bool:
        """Add an event; True when the caller must queue the stream for the senders."""
        with self._lock:
            if self._closed:
                return False
            self._closed = event.final
            self._events.append(event)
            self._num_pending += len(event.token_ids)
            if self._num_pending > MAX_PENDING_TOKENS and not event.final:
                return self._cut(
                    Unavailable(f"{MAX_PENDING_TOKENS} tokens are waiting to be sent; the reader is too slow")
                )
            streams = self.wanted is not None and self.wanted.stream
            return (event.final or streams) and self._hold()

    def cut(self, error: QuireError) -> bool:
        """End with `error` instead of what is waiting; True when the caller must queue the stream for the senders."""
        with self._lock:
            return not self._closed and self._cut(error)

    def take(self) -> list[Event]:
        """All waiting events."""
        with self._lock:
            events, self._events = self._events, []
            self._num_pending = 0
            return events

    def release(self) -> bool:
        """The sender is done with what it took; True when more has come and it must queue the stream again."""
        with self._lock:
            self._held = bool(self._events)
            return self._held

    def _cut(self, error: QuireError) -> bool:
        self._closed = self.cut_off = True
        self._events = [Event(self.id, error_code=error.code, error=str(error))]
        return self._hold()

    def _hold(self) -> bool:
        """True for the first of those who want the stream queued."""
        held, self._held = self._held, True
        return not held
