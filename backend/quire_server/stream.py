# SPDX-License-Identifier: Apache-2.0
"""Stream: one open request of a stub, between the text process's events and the responses to its client.

Events gather here until a sender thread takes all of them at once: one response per event while the senders keep up,
fewer and larger ones when they do not. A stream is held by at most one thread, or by the senders' queue: so its
responses keep their order, exactly one of them is final, and the server is never asked about a request while its final
response goes out (it frees what the question is about). Knows nothing of the server; frontend.py moves it about.
"""

import math
import threading
from typing import Any

from quire_server.wire import Wanted, nothing_told
from quire_spec.errors import QuireError, Unavailable
from quire_spec.messages import Event

MAX_PENDING_TOKENS = 16384
"""Output tokens that may wait for the senders; more means that the server does not take them."""


class Stream:
    """An open request. Any thread may `put`, `cut` and `hold`; only its holder may touch the rest, until `release`."""

    __slots__ = (
        "_closed",
        "_events",
        "_held",
        "_lock",
        "_num_pending",
        "checked_at",
        "cut_off",
        "id",
        "opened_at",
        "sender",
        "sent_at",
        "told",
        "wanted",
    )

    def __init__(self, request_id: int, wanted: Wanted | None, sender: Any, now: float) -> None:
        self.id = request_id
        self.wanted = wanted
        """None when the request was refused: then its only response is an error."""
        self.sender = sender
        """The server's response sender."""
        self.told = [] if wanted is None else nothing_told(request_id, wanted)
        """What responses told of each output."""
        self.cut_off = False
        """Ended from this side: the text process has to be told."""
        self.opened_at = now
        """When it came, in monotonic seconds."""
        self.sent_at = -math.inf
        """When its last response was sent, in monotonic seconds."""
        self.checked_at = now
        """When the server was last asked whether the client is gone, in monotonic seconds."""
        self._events: list[Event] = []
        self._num_pending = 0
        self._closed = False
        """The last event is in; no other is taken."""
        self._held = False
        """In the senders' queue, or in a thread's hands."""
        self._lock = threading.Lock()

    def put(self, event: Event) -> bool:
        """Add an event; True when the caller must queue the stream for the senders."""
        with self._lock:
            if self._closed:
                return False
            self._closed = event.final
            self._events.append(event)
            self._num_pending += len(event.token_ids)
            if self._num_pending > MAX_PENDING_TOKENS and self._streams and not event.final:
                return self._cut(
                    Unavailable(f"{MAX_PENDING_TOKENS} tokens are waiting to be sent; the reader is too slow")
                )
            return self._ready() and self._hold()

    def cut(self, error: QuireError) -> bool:
        """End with `error` instead of what is waiting; True when the caller must queue the stream for the senders."""
        with self._lock:
            return not self._closed and self._cut(error)

    def hold(self) -> bool:
        """Take hold of the stream, if nobody has it: True, and `release` must follow."""
        with self._lock:
            return self._hold()

    def take(self) -> list[Event]:
        """All waiting events."""
        with self._lock:
            events, self._events = self._events, []
            self._num_pending = 0
            return events

    def give_back(self, event: Event) -> None:
        """The last of what was taken, to be taken again."""
        with self._lock:
            self._events = [event]

    def release(self) -> bool:
        """Let go; True when something to send has come meanwhile, and the caller must queue the stream again."""
        with self._lock:
            self._held = self._ready()
            return self._held

    def _ready(self) -> bool:
        """True when there is something to send: a request that does not stream waits for its end."""
        return bool(self._events) and (self._closed or self._streams)

    @property
    def _streams(self) -> bool:
        return self.wanted is not None and self.wanted.stream

    def _cut(self, error: QuireError) -> bool:
        self._closed = self.cut_off = True
        self._events = [Event(self.id, error_code=error.code, error=str(error))]
        return self._hold()

    def _hold(self) -> bool:
        held, self._held = self._held, True
        return not held
