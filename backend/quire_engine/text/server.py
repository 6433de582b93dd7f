# SPDX-License-Identifier: Apache-2.0
"""Socket server of the text process, for frontends and the supervisor.

Runs on one event loop, which handles thousands of small messages per second. Nothing on the event loop may take longer
than about a millisecond: long prompts are tokenized in threads, and metrics are rendered in a thread. This module
handles connections and message types; the request manager owns the requests.
"""

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from quire_engine.ipc.connection import Connection, ConnectionHandler, listen
from quire_engine.text.frontend_calls import FrontendCalls
from quire_engine.text.frontend_connection import FrontendConnection
from quire_engine.text.metrics import RequestMetrics
from quire_engine.text.request_manager import RequestManager
from quire_engine.text.result_coalescer import ResponseThrottle
from quire_spec.constants import OPENAI_FRONTEND
from quire_spec.dataclass_json import from_json
from quire_spec.documents.adapter_catalog import AdapterLimits
from quire_spec.documents.pod_status import utc_now
from quire_spec.errors import Internal, InvalidArgument, QuireError, error_from_code
from quire_spec.protocol.messages import (
    CancelRequests,
    ControlRequest,
    ControlResponse,
    GenerateRequest,
    IpcMessage,
    RequestRejected,
)

_GENERATE_REQUEST_HEAD = re.compile(rb'\["GenerateRequest",(\d{1,18}),')

logger = logging.getLogger(__name__)


class TextServer(ConnectionHandler):
    """Handler of the connections of frontends and supervisors."""

    def __init__(
        self,
        request_manager: RequestManager,
        metrics: RequestMetrics,
        frontend_calls: FrontendCalls,
        max_frame_bytes: int,
        throttle: ResponseThrottle,
    ) -> None:
        self._request_manager = request_manager
        self._metrics = metrics
        self._frontend_calls = frontend_calls
        self._max_frame_bytes = max_frame_bytes
        self._throttle = throttle
        self._frontends: dict[Connection, FrontendConnection] = {}
        self._started_at = utc_now()
        self._control_methods: dict[str, Callable[[Connection, ControlRequest], None]] = {
            "set_adapters": self._set_adapters,
            "set_loading_adapters": self._set_loading_adapters,
            "status": self._get_status,
            "metrics": self._render_metrics,
            "drain": self._drain,
        }

    async def listen(self, path: Path) -> None:
        """Start to accept connections."""
        self._server = await listen(path, lambda: Connection(self, max_frame_bytes=self._max_frame_bytes))

    def on_connected(self, connection: Connection) -> None:
        """Called when a peer has sent its Hello."""
        hello = connection.peer
        assert hello is not None, "only the end that accepts the connection gets a Hello"
        if hello.role == "frontend":
            self._frontends[connection] = FrontendConnection(connection, hello, self._metrics, self._throttle)
            if hello.model == OPENAI_FRONTEND:
                self._frontend_calls.start_workers()
        elif hello.role != "supervisor":
            raise Internal(f"Hello: role {hello.role!r} is not accepted here; expected frontend or supervisor")

    def on_message(self, connection: Connection, message: IpcMessage) -> None:
        """Called for each message of a frontend or a supervisor."""
        frontend = self._frontends.get(connection)
        if frontend is not None and isinstance(message, GenerateRequest):
            self._request_manager.submit(frontend, message)
        elif frontend is not None and isinstance(message, CancelRequests):
            self._request_manager.cancel(frontend, message.ids)
        elif frontend is not None and isinstance(message, RequestRejected):
            self._metrics.record_rejected(error_from_code(message.code, "").code)
        elif frontend is not None and isinstance(message, ControlRequest):
            self._frontend_calls.handle(connection, message)
        elif isinstance(message, ControlRequest):
            self._handle_control_request(connection, message)
        else:
            raise Internal(f"unexpected {type(message).__name__}")

    def on_oversized_frame(self, connection: Connection, head: bytes, length: int) -> None:
        """Called for a frame that exceeds max_frame_bytes. If the frame is a request of a frontend, the request is
        rejected."""
        frontend, match = self._frontends.get(connection), _GENERATE_REQUEST_HEAD.match(head)
        if frontend is None or match is None:
            raise Internal(f"message of {length} bytes: {head[:80]!r}")
        self._request_manager.reject_oversize(frontend, int(match[1]), length)

    def on_writable(self, connection: Connection) -> None:
        """Called when a peer has read the unsent messages."""
        if frontend := self._frontends.get(connection):
            frontend.flush()

    def on_closed(self, connection: Connection) -> None:
        """Called when the connection closes."""
        if (frontend := self._frontends.pop(connection, None)) is None:
            return
        num_open = self._request_manager.on_frontend_closed(frontend)
        hello = frontend.hello
        logger.info("frontend disconnected model=%s pid=%s num_open=%d", hello.model, hello.pid, num_open)

    def _handle_control_request(self, connection: Connection, request: ControlRequest) -> None:
        try:
            if request.method not in self._control_methods:
                raise InvalidArgument(
                    f"method {request.method!r} is unknown; use one of {', '.join(self._control_methods)}"
                )
            self._control_methods[request.method](connection, request)
        except QuireError as error:
            connection.send(ControlResponse(request.id, None, error.code, str(error)))

    def _set_adapters(self, connection: Connection, request: ControlRequest) -> None:
        digest_by_name = request.args.get("adapters")
        if not isinstance(digest_by_name, Mapping) or not all(isinstance(d, str) for d in digest_by_name.values()):
            raise InvalidArgument(f"set_adapters: adapters must map names to digests, got {str(digest_by_name)[:80]!r}")
        limits = request.args.get("limits", {})
        if not isinstance(limits, Mapping):
            raise InvalidArgument(f"set_adapters: limits must map names to limits, got {str(limits)[:80]}")
        limits_by_name = {
            name: from_json(AdapterLimits, document, f"limits.{name}") for name, document in limits.items()
        }
        chat_templates = request.args.get("chat_templates", {})
        if not isinstance(chat_templates, Mapping) or not all(isinstance(f, str) for f in chat_templates.values()):
            raise InvalidArgument(
                f"set_adapters: chat_templates must map names to files, got {str(chat_templates)[:80]}"
            )
        self._request_manager.set_adapters(digest_by_name, limits_by_name, chat_templates)
        logger.info("adapters set count=%d", len(digest_by_name))
        connection.send(ControlResponse(request.id, {}))

    def _set_loading_adapters(self, connection: Connection, request: ControlRequest) -> None:
        names = request.args.get("names")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise InvalidArgument(f"set_loading_adapters: names must be a list of names, got {str(names)[:80]!r}")
        self._request_manager.set_loading_adapters(frozenset(names))
        connection.send(ControlResponse(request.id, {}))

    def _get_status(self, connection: Connection, request: ControlRequest) -> None:
        connection.send(ControlResponse(request.id, {"started_at": self._started_at, **self._request_manager.status()}))

    def _drain(self, connection: Connection, request: ControlRequest) -> None:
        logger.info("draining num_open=%d", self._request_manager.num_open)
        self._request_manager.drain(lambda: connection.send(ControlResponse(request.id, {})))

    def _render_metrics(self, connection: Connection, request: ControlRequest) -> None:
        self._frontend_calls.handle(connection, request)
