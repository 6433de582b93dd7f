# SPDX-License-Identifier: Apache-2.0
"""TextServer: where frontends and supervisors come to the text process.

asyncio on one thread: thousands of small messages, none of which may wait for another. What takes longer than a
millisecond (tokenizing a long prompt, rendering metrics) runs in a thread and comes back as a callback. Requests are
the desk's business; here is only who is connected, who reads, and what a message is passed to.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire_engine.ipc.connection import Connection, listen
from quire_engine.text.frontend_connection import FrontendConnection
from quire_engine.text.metrics import RequestMetrics
from quire_engine.text.request_manager import RequestManager
from quire_engine.text.request_state import RequestState
from quire_engine.text.result_coalescer import ResponseThrottle
from quire_engine.tokenization.tokenizer import Tokenizer
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

_MAX_INLINE_CHARS = 2048
"""Prompts up to this are tokenized at once: about half a millisecond, and a thread costs a tenth of one."""

_TokenizedPrompt = tuple[list[int], list[list[int]]]
"""Of a prompt, and of the words that its output must not have."""

_GENERATE_REQUEST_HEAD = re.compile(rb'\["GenerateRequest",(\d{1,18}),')

logger = logging.getLogger(__name__)


class TextServer:
    """Serves frontends and supervisors; the handler of their connections."""

    def __init__(
        self,
        request_manager: RequestManager,
        tokenizer: Tokenizer | None,
        metrics: RequestMetrics,
        max_frame_bytes: int,
        throttle: ResponseThrottle,
    ) -> None:
        self._request_manager = request_manager
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._max_frame_bytes = max_frame_bytes
        self._throttle = throttle
        self._frontends: dict[Connection, FrontendConnection] = {}
        self._started_at = utc_now()
        # Two: one very long prompt does not hold up all the others, and steps keep most of the processor.
        self._tokenize_pool = ThreadPoolExecutor(2, "tokenize")
        self._control_methods: dict[str, Callable[[Connection, ControlRequest], None]] = {
            "set_adapters": self._set_adapters,
            "status": self._get_status,
            "metrics": self._render_metrics,
            "drain": self._drain,
        }

    async def listen(self, path: Path) -> None:
        """Begin to accept connections."""
        self._server = await listen(path, lambda: Connection(self, max_frame_bytes=self._max_frame_bytes))

    def on_connected(self, connection: Connection) -> None:
        """Handler: a peer says who it is."""
        hello = connection.peer
        assert hello is not None, "a dialled connection"
        if hello.role == "frontend":
            self._frontends[connection] = FrontendConnection(connection, hello, self._metrics, self._throttle)
        elif hello.role != "supervisor":
            raise Internal(f"role {hello.role!r} has no business here")

    def on_message(self, connection: Connection, message: IpcMessage) -> None:
        """Handler: a frontend or a supervisor wants something."""
        frontend = self._frontends.get(connection)
        if frontend is not None and isinstance(message, GenerateRequest):
            self._submit(frontend, message)
        elif frontend is not None and isinstance(message, CancelRequests):
            self._request_manager.cancel(frontend, message.ids)
        elif frontend is not None and isinstance(message, RequestRejected):
            self._metrics.record_rejected(error_from_code(message.code, "").code)
        elif frontend is None and isinstance(message, ControlRequest):
            self._handle_control_request(connection, message)
        else:
            raise Internal(f"unexpected {type(message).__name__}")

    def on_oversized_frame(self, connection: Connection, head: bytes, length: int) -> None:
        """Handler: a request that was too long to be read."""
        frontend, match = self._frontends.get(connection), _GENERATE_REQUEST_HEAD.match(head)
        if frontend is None or match is None:
            raise Internal(f"message of {length} bytes: {head[:80]!r}")
        self._request_manager.reject_oversize(frontend, int(match[1]), length)

    def on_writable(self, connection: Connection) -> None:
        """Handler: a frontend that was behind has caught up."""
        if frontend := self._frontends.get(connection):
            frontend.flush()

    def on_closed(self, connection: Connection) -> None:
        """Handler: a peer is gone."""
        if (frontend := self._frontends.pop(connection, None)) is None:
            return
        num_open = self._request_manager.on_frontend_closed(frontend)
        hello = frontend.hello
        logger.info("frontend gone model=%s pid=%s num_open=%d", hello.model, hello.pid, num_open)

    def _submit(self, frontend: FrontendConnection, request: GenerateRequest) -> None:
        request_state = self._request_manager.submit(frontend, request)
        if request_state is None:
            return
        # A bad word is tokenized twice, with a space before it and without.
        num_chars = len(request.prompt or "") + 2 * sum(map(len, request_state.params.bad_words))
        if num_chars <= _MAX_INLINE_CHARS:
            self._tokenize_inline(request_state, request)
        else:
            loop = asyncio.get_running_loop()
            future = loop.run_in_executor(self._tokenize_pool, self._tokenize, request_state, request)
            future.add_done_callback(lambda tokenize_future: self._on_tokenized(request_state, tokenize_future))

    def _tokenize_inline(self, request_state: RequestState, request: GenerateRequest) -> None:
        try:
            tokenized_prompt = self._tokenize(request_state, request)
        except QuireError as error:
            self._request_manager.fail(request_state, error)
        else:
            self._request_manager.on_tokenized(request_state, *tokenized_prompt)

    def _tokenize(self, request_state: RequestState, request: GenerateRequest) -> _TokenizedPrompt:
        assert self._tokenizer is not None
        # A request may be cancelled while its prompt waits for a thread.
        if not self._request_manager.is_open(request_state):
            return [], []
        token_ids = request.prompt_token_ids
        if token_ids is None:
            assert request.prompt is not None
            token_ids = self._tokenizer.encode(request.prompt, self._request_manager.max_prompt_tokens(request_state))
        bad_words = request_state.params.bad_words
        return token_ids, self._tokenizer.bad_word_ids(bad_words) if bad_words else []

    def _on_tokenized(self, request_state: RequestState, future: asyncio.Future[_TokenizedPrompt]) -> None:
        error = future.exception()
        if isinstance(error, QuireError):
            self._request_manager.fail(request_state, error)
        else:
            self._request_manager.on_tokenized(request_state, *future.result())

    def _handle_control_request(self, connection: Connection, request: ControlRequest) -> None:
        try:
            if request.method not in self._control_methods:
                raise InvalidArgument(
                    f"method {request.method!r} is unknown; known are {', '.join(self._control_methods)}"
                )
            self._control_methods[request.method](connection, request)
        except QuireError as error:
            connection.send(ControlResponse(request.id, None, error.code, str(error)))

    def _set_adapters(self, connection: Connection, request: ControlRequest) -> None:
        adapters = request.args.get("adapters")
        if not isinstance(adapters, Mapping) or not all(isinstance(digest, str) for digest in adapters.values()):
            raise InvalidArgument(f"set_adapters: adapters must map names to digests, found {str(adapters)[:80]!r}")
        limits = request.args.get("limits", {})
        if not isinstance(limits, Mapping):
            raise InvalidArgument(f"set_adapters: limits must map names to limits, found {str(limits)[:80]!r}")
        limits_by_name = {
            name: from_json(AdapterLimits, document, f"limits.{name}") for name, document in limits.items()
        }
        self._request_manager.set_adapters(adapters, limits_by_name)
        logger.info("adapters set count=%d", len(adapters))
        connection.send(ControlResponse(request.id, {}))

    def _get_status(self, connection: Connection, request: ControlRequest) -> None:
        connection.send(ControlResponse(request.id, {"started_at": self._started_at, **self._request_manager.status()}))

    def _drain(self, connection: Connection, request: ControlRequest) -> None:
        logger.info("draining num_open=%d", self._request_manager.num_open)
        self._request_manager.drain(lambda: connection.send(ControlResponse(request.id, {})))

    def _render_metrics(self, connection: Connection, request: ControlRequest) -> None:
        self._request_manager.refresh_adapter_gauges()
        # Not in the pool: a scrape does not wait for prompts.
        future = asyncio.get_running_loop().run_in_executor(None, self._metrics.render)
        future.add_done_callback(
            lambda render_future: connection.send(ControlResponse(request.id, {"text": render_future.result()}))
        )
