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

from quire_server.frontend.tensors import OutputOptions, initial_outputs
from quire_spec.errors import QuireError, Unavailable
from quire_spec.protocol.messages import OutputDelta

MAX_PENDING_TOKENS = 16384
"""Output tokens that may wait for the senders; more means that the server does not take them."""


class ResponseStream:
    """An open request. Any thread may `put`, `cut` and `hold`; only its holder may touch the rest, until `release`."""

    __slots__ = (
        "_closed",
        "_is_acquired",
        "_lock",
        "_num_pending_tokens",
        "_pending_deltas",
        "checked_at",
        "failed_locally",
        "last_sent",
        "opened_at",
        "options",
        "request_id",
        "sender",
        "sent_at",
    )

    def __init__(self, request_id: int, options: OutputOptions | None, sender: Any, now: float) -> None:
        self.request_id = request_id
        self.options = options
        """None when the request was refused: then its only response is an error."""
        self.sender = sender
        """The server's response sender."""
        self.last_sent = [] if options is None else initial_outputs(request_id, options)
        """What responses told of each output."""
        self.failed_locally = False
        """Ended from this side: the text process has to be told."""
        self.opened_at = now
        """When it came, in monotonic seconds."""
        self.sent_at = -math.inf
        """When its last response was sent, in monotonic seconds."""
        self.checked_at = now
        """When the server was last asked whether the client is gone, in monotonic seconds."""
        self._pending_deltas: list[OutputDelta] = []
        self._num_pending_tokens = 0
        self._closed = False
        """The last event is in; no other is taken."""
        self._is_acquired = False
        """In the senders' queue, or in a thread's hands."""
        self._lock = threading.Lock()

    def push(self, delta: OutputDelta) -> bool:
        """Add an event; True when the caller must queue the stream for the senders."""
        with self._lock:
            if self._closed:
                return False
            self._closed = delta.final
            self._pending_deltas.append(delta)
            self._num_pending_tokens += len(delta.token_ids)
            if self._num_pending_tokens > MAX_PENDING_TOKENS and self._is_streaming and not delta.final:
                return self._fail(
                    Unavailable(f"{MAX_PENDING_TOKENS} tokens are waiting to be sent; the reader is too slow")
                )
            return self._has_sendable() and self._try_acquire()

    def fail(self, error: QuireError) -> bool:
        """End with `error` instead of what is waiting; True when the caller must queue the stream for the senders."""
        with self._lock:
            return not self._closed and self._fail(error)

    def try_acquire(self) -> bool:
        """Take hold of the stream, if nobody has it: True, and `release` must follow."""
        with self._lock:
            return self._try_acquire()

    def drain(self) -> list[OutputDelta]:
        """All waiting events."""
        with self._lock:
            deltas, self._pending_deltas = self._pending_deltas, []
            self._num_pending_tokens = 0
            return deltas

    def push_back(self, delta: OutputDelta) -> None:
        """The last of what was taken, to be taken again."""
        with self._lock:
            self._pending_deltas = [delta]

    def release(self) -> bool:
        """Let go; True when something to send has come meanwhile, and the caller must queue the stream again."""
        with self._lock:
            self._is_acquired = self._has_sendable()
            return self._is_acquired

    def _has_sendable(self) -> bool:
        """True when there is something to send: a request that does not stream waits for its end."""
        return bool(self._pending_deltas) and (self._closed or self._is_streaming)

    @property
    def _is_streaming(self) -> bool:
        return self.options is not None and self.options.stream

    def _fail(self, error: QuireError) -> bool:
        self._closed = self.failed_locally = True
        self._pending_deltas = [OutputDelta(self.request_id, error_code=error.code, error=str(error))]
        return self._try_acquire()

    def _try_acquire(self) -> bool:
        was_acquired, self._is_acquired = self._is_acquired, True
        return not was_acquired
