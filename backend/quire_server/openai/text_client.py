# SPDX-License-Identifier: Apache-2.0
"""The asyncio client with which the front connects to the text process. It sends requests and calls, and receives
deltas and responses.

Whenever the connection ends, the client connects again. All requests and calls that are open at that time fail with
UNAVAILABLE, so that their HTTP clients get an error at once. The client does not depend on HTTP or on the OpenAI API.
"""

import asyncio
import itertools
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from quire_server.openai.errors import error_from_code
from quire_spec.constants import OPENAI_FRONTEND
from quire_spec.errors import Code, Internal
from quire_spec.protocol.framing import FrameDecoder, encode_frame
from quire_spec.protocol.messages import (
    CancelRequests,
    ControlRequest,
    ControlResponse,
    GenerateRequest,
    Hello,
    IpcMessage,
    OutputDelta,
    OutputDeltas,
    RequestRejected,
)

RECONNECT_INTERVAL_S = 0.05
CALL_TIMEOUT_S = 30.0
_LOST = "the text process ended and is restarting; retry later"
_ABSENT = "the text process is starting; retry later"

logger = logging.getLogger(__name__)


class DeltaSink(Protocol):
    """An object that receives the deltas of a request."""

    def push(self, delta: OutputDelta) -> None:
        """Receive a delta; the method must not block."""


class TextClient:
    """The connection to the text process, with all requests and calls that are open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ids = itertools.count(1)
        self._transport: asyncio.Transport | None = None
        self._sinks: dict[int, DeltaSink] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._disconnected = asyncio.Event()
        self._sampling_defaults: dict[str, Any] | None = None

    @property
    def is_connected(self) -> bool:
        """True while there is a connection to the text process."""
        return self._transport is not None

    def new_id(self) -> int:
        """Return an id for a GenerateRequest."""
        return next(self._ids)

    async def run(self) -> None:
        """Connect to the text process, and connect again whenever the connection ends. This runs until the task is
        cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._disconnected.clear()
            try:
                await loop.create_unix_connection(lambda: _TextConnection(self), str(self._path))
            except OSError:
                await asyncio.sleep(RECONNECT_INTERVAL_S)
                continue
            await self._disconnected.wait()

    def submit(self, request: GenerateRequest, sink: DeltaSink) -> None:
        """Send a request. The deltas of this request are passed to `sink`. If there is no connection, `sink` gets a
        delta with the error UNAVAILABLE."""
        if self._transport is None:
            sink.push(OutputDelta(request.id, error_code=Code.UNAVAILABLE, error=_ABSENT))
            return
        self._sinks[request.id] = sink
        self._send(request)

    def cancel(self, request_ids: Sequence[int]) -> None:
        """Cancel requests. Their sinks get no further deltas."""
        open_ids = [request_id for request_id in request_ids if self._sinks.pop(request_id, None) is not None]
        if open_ids:
            self._send(CancelRequests(open_ids))

    def report_rejected(self, code: Code) -> None:
        """Report to the text process that a request was rejected, so that the metrics count it."""
        self._send(RequestRejected(code))

    async def call(self, method: str, args: dict[str, Any] | None = None) -> Any:
        """Call a method of the text process and return its result; raises ApiError if the call fails."""
        if self._transport is None:
            raise error_from_code(Code.UNAVAILABLE, _ABSENT)
        call_id = next(self._ids)
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(ControlRequest(call_id, method, args or {}))
            async with asyncio.timeout(CALL_TIMEOUT_S):
                response: ControlResponse = await future
        except TimeoutError:
            raise error_from_code(
                Code.UNAVAILABLE, f"the text process did not answer within {CALL_TIMEOUT_S:g} s; retry later"
            ) from None
        finally:
            self._calls.pop(call_id, None)
        if response.error_code is not None:
            raise error_from_code(response.error_code, response.error)
        return response.result

    async def sampling_defaults(self) -> dict[str, Any]:
        """Return the sampling parameters in the checkpoint's generation_config.json; raises ApiError if they cannot be
        read."""
        if self._sampling_defaults is None:
            self._sampling_defaults = dict((await self.call("models"))["sampling_defaults"])
        return self._sampling_defaults

    def _send(self, message: IpcMessage) -> None:
        if self._transport is not None:
            self._transport.write(encode_frame(message))

    def _on_connected(self, transport: asyncio.Transport) -> None:
        logger.info("text process connected")
        self._transport = transport
        self._send(Hello("frontend", OPENAI_FRONTEND, os.getpid()))

    def _on_message(self, message: IpcMessage) -> None:
        if isinstance(message, OutputDeltas):
            sinks = self._sinks
            for delta in message.deltas:
                sink = sinks.pop(delta.id, None) if delta.final else sinks.get(delta.id)
                if sink is not None:
                    sink.push(delta)
        elif isinstance(message, ControlResponse):
            if (future := self._calls.get(message.id)) is not None and not future.done():
                future.set_result(message)
        else:
            raise Internal(f"the text process sent {type(message).__name__}")

    def _on_closed(self) -> None:
        logger.warning("text process disconnected num_open=%d", len(self._sinks))
        self._transport = self._sampling_defaults = None
        sinks, self._sinks = self._sinks, {}
        for request_id, sink in sinks.items():
            sink.push(OutputDelta(request_id, error_code=Code.UNAVAILABLE, error=_LOST))
        for call_id, future in self._calls.items():
            if not future.done():
                future.set_result(ControlResponse(call_id, None, Code.UNAVAILABLE, _LOST))
        self._disconnected.set()


class _TextConnection(asyncio.Protocol):
    """One connection to the text process. It decodes the frames that it receives into messages."""

    def __init__(self, client: TextClient) -> None:
        self._client = client
        self._decoder = FrameDecoder()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._client._on_connected(self._transport)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._decoder.feed(data):
                self._client._on_message(message)
        except Internal as error:
            logger.error("invalid message from the text process, closing the connection error=%s", error)
            assert self._transport is not None
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._client._on_closed()
