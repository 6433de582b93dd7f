# SPDX-License-Identifier: Apache-2.0
"""The stream of responses to one request. A stub collects the deltas that it receives from the text process. A sender
thread then sends all collected deltas as one response.

While the sender threads are fast enough, each delta becomes one response. Otherwise, one response contains several
deltas. At any time, a stream has at most one owner. The owner is either a thread or the queue of the senders. Therefore
the responses keep their order, and only one response is marked as final. The final response frees the request. After
that, no thread may check whether the request was cancelled. This module does not use the server's API. Its caller is
stub_model.py.
"""

import math
import threading
from dataclasses import dataclass, field
from typing import Any

from quire_server.frontend.tensors import OutputOptions, initial_outputs
from quire_spec.errors import QuireError, Unavailable
from quire_spec.protocol.messages import OutputDelta

MAX_PENDING_TOKENS = 16384
"""Maximum number of output tokens that a stream buffers. If a client reads so slowly that more tokens are waiting, its
request fails."""


@dataclass(slots=True, eq=False)
class ResponseStream:
    """An open request.

    Any thread can call `push`, `fail` and `try_acquire`. Only the thread that acquired the stream can use the other
    methods, until it calls `release`.
    """

    request_id: int
    options: OutputOptions | None
    """The outputs that the request selects. None if the request was rejected. In this case, its only response is an
    error."""
    sender: Any
    """The server's response sender."""
    opened_at: float
    """Time of arrival, in monotonic seconds."""
    last_sent: list[OutputDelta] = field(init=False)
    """For each output, the last delta that was sent in a response."""
    failed_locally: bool = False
    """True if the stub itself ended the request. In that case, the stub must notify the text process."""
    sent_at: float = -math.inf
    """Time of the last response, in monotonic seconds."""
    checked_at: float = field(init=False)
    """Time of the last cancellation check, in monotonic seconds."""
    _pending_deltas: list[OutputDelta] = field(default_factory=list)
    _num_pending_tokens: int = 0
    _closed: bool = False
    """True after the final delta was added. Later deltas are dropped."""
    _is_acquired: bool = False
    """True while a thread or the senders' queue owns the stream."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.last_sent = [] if self.options is None else initial_outputs(self.request_id, self.options)
        self.checked_at = self.opened_at

    def push(self, delta: OutputDelta) -> bool:
        """Add a delta; return True if the caller must enqueue the stream for the senders."""
        with self._lock:
            if self._closed:
                return False
            self._closed = delta.final
            self._pending_deltas.append(delta)
            self._num_pending_tokens += len(delta.token_ids)
            if self._num_pending_tokens > MAX_PENDING_TOKENS and self._is_streaming and not delta.final:
                return self._fail(
                    Unavailable(f"response stream: the client reads too slowly, {MAX_PENDING_TOKENS} tokens are unsent")
                )
            return self._has_sendable() and self._try_acquire()

    def fail(self, error: QuireError) -> bool:
        """Replace the pending deltas with `error`; return True if the caller must enqueue the stream for the
        senders."""
        with self._lock:
            return not self._closed and self._fail(error)

    def try_acquire(self) -> bool:
        """Acquire the stream if it has no owner. If the result is True, the caller must call `release` later."""
        with self._lock:
            return self._try_acquire()

    def pop_deltas(self) -> list[OutputDelta]:
        """Remove and return all pending deltas."""
        with self._lock:
            deltas, self._pending_deltas = self._pending_deltas, []
            self._num_pending_tokens = 0
            return deltas

    def push_back(self, delta: OutputDelta) -> None:
        """Make `delta` pending again. It must be the delta that was popped last."""
        with self._lock:
            self._pending_deltas = [delta]

    def release(self) -> bool:
        """Release the stream; return True if new deltas are pending and the caller must enqueue it again."""
        with self._lock:
            self._is_acquired = self._has_sendable()
            return self._is_acquired

    def _has_sendable(self) -> bool:
        """Return True if there is something to send as a response. A request without streaming gets a single response,
        which is sent at the end of the request."""
        return bool(self._pending_deltas) and (self._closed or self._is_streaming)

    @property
    def _is_streaming(self) -> bool:
        return self.options is not None and self.options.stream

    def _fail(self, error: QuireError) -> bool:
        self._closed = self.failed_locally = True
        self._pending_deltas = [OutputDelta.from_error(self.request_id, error)]
        return self._try_acquire()

    def _try_acquire(self) -> bool:
        was_acquired, self._is_acquired = self._is_acquired, True
        return not was_acquired
