# SPDX-License-Identifier: Apache-2.0
"""Socket server of the text process, for frontends and the supervisor.

Runs on one event loop, which handles thousands of small messages per second. Nothing on the event loop may take longer
than about a millisecond: long prompts are tokenized in threads, and metrics are rendered in a thread. This module
handles connections and message types; the request manager owns the requests, and methods.py contains the methods.
"""

import logging
from collections.abc import Sequence

from quire_engine.text.frontend_connection import FrontendConnection
from quire_engine.text.methods import TextMethods
from quire_engine.text.metrics import RequestMetrics
from quire_engine.text.request_manager import RequestManager
from quire_engine.text.result_coalescer import ResponseThrottle, ResultCoalescer
from quire_spec.errors import Internal
from quire_spec.protocol.connection import Connection
from quire_spec.protocol.framing import InvalidFrame, Oversized
from quire_spec.protocol.messages import (
    CancelRequests,
    FieldsIgnored,
    GenerateRequest,
    Message,
    PrefillReported,
    RequestRejected,
)
from quire_spec.protocol.server import Server

logger = logging.getLogger(__name__)


class TextServer(Server):
    """Handler of the connections of frontends and supervisors."""

    def __init__(
        self,
        request_manager: RequestManager,
        metrics: RequestMetrics,
        methods: TextMethods,
        max_payload_bytes: int,
        throttle: ResponseThrottle,
        coalescers: Sequence[ResultCoalescer],
    ) -> None:
        super().__init__(
            methods.table(),
            (GenerateRequest, CancelRequests, RequestRejected, FieldsIgnored, PrefillReported),
            max_payload_bytes,
        )
        self._request_manager = request_manager
        self._metrics = metrics
        self._text_methods = methods
        self._throttle = throttle
        self._coalescers = coalescers
        self._frontends: dict[Connection, FrontendConnection] = {}

    def on_connected(self, connection: Connection) -> None:
        """Called when a peer has sent its Hello."""
        hello = connection.peer
        assert hello is not None, "only the end that accepts the connection gets a Hello"
        if hello.role in ("stub", "openai"):
            self._frontends[connection] = FrontendConnection(connection, hello, self._metrics, self._throttle)
            if hello.role == "openai":
                self._text_methods.start_workers()
        elif hello.role != "supervisor":
            raise Internal(f"Hello: role {hello.role!r} is not accepted here; expected stub, openai or supervisor")

    def on_request(self, connection: Connection, message: Message) -> None:
        """Called for each message of a frontend that is not a call."""
        frontend = self._frontends.get(connection)
        if frontend is not None and isinstance(message, GenerateRequest):
            self._request_manager.submit(frontend, message)
        elif frontend is not None and isinstance(message, CancelRequests):
            self._request_manager.cancel(frontend, message.ids)
        elif frontend is not None and isinstance(message, RequestRejected):
            self._metrics.record_rejected(message.code)
        elif frontend is not None and isinstance(message, FieldsIgnored):
            self._metrics.record_ignored_fields()
        elif frontend is not None and isinstance(message, PrefillReported):
            self._metrics.record_prefill(message.result)
        else:
            super().on_request(connection, message)

    def on_invalid_frame(self, connection: Connection, frame: InvalidFrame) -> None:
        """Called for each frame that was not accepted. If it is a request of a frontend, the metrics count it."""
        error = frame.error
        if isinstance(error, Oversized):
            error = self._request_manager.oversize_error(error.num_bytes)
        frontend = self._frontends.get(connection)
        if frontend is not None and frame.message_type is GenerateRequest:
            for request_id in frame.request_ids:
                self._request_manager.reject(frontend, request_id, error)
        else:
            self.reject(connection, InvalidFrame(frame.message_type, frame.request_ids, error))

    def on_writable(self, connection: Connection) -> None:
        """Called when a peer has read the unsent messages."""
        if frontend := self._frontends.get(connection):
            for coalescer in self._coalescers:
                coalescer.on_frontend_writable(frontend)

    def on_closed(self, connection: Connection) -> None:
        """Called when the connection closes."""
        if (frontend := self._frontends.pop(connection, None)) is None:
            return
        for coalescer in self._coalescers:
            coalescer.on_frontend_closed(frontend)
        num_open = self._request_manager.on_frontend_closed(frontend)
        hello = frontend.hello
        logger.info(
            "frontend disconnected role=%s model=%s pid=%s num_open=%d", hello.role, hello.model, hello.pid, num_open
        )
