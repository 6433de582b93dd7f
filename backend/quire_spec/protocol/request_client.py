# SPDX-License-Identifier: Apache-2.0
"""Client of the text process that runs requests. The stubs and the OpenAI front use it.

The deltas of each request are passed to a sink. A sink gets exactly one final delta, unless its request is cancelled:
if the connection ends, or if the request cannot be sent, the final delta is an error.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from quire_spec.errors import Code, QuireError, Unavailable
from quire_spec.protocol.client import Client
from quire_spec.protocol.connection import Connection
from quire_spec.protocol.messages import (
    CancelRequests,
    FieldsIgnored,
    GenerateRequest,
    Hello,
    Message,
    OutputDelta,
    OutputDeltas,
    PrefillReported,
    PrefillResult,
    RequestRejected,
)

DeltaSink = Callable[[OutputDelta], object]
"""Function that receives the deltas of a request, in order. It is called on the event loop and must not block."""

logger = logging.getLogger(__name__)


class RequestClient(Client):
    """The connection to the text process, with all requests that are open."""

    def __init__(self, path: Path, hello: Hello) -> None:
        super().__init__(path, hello, "the text process", (OutputDeltas,))
        self._sinks: dict[int, DeltaSink] = {}

    @property
    def num_open(self) -> int:
        """Number of open requests."""
        return len(self._sinks)

    def submit(self, request: GenerateRequest, sink: DeltaSink) -> None:
        """Send a request. Its deltas are passed to `sink`. If the request cannot be sent, `sink` gets a delta with the
        error."""
        try:
            if not self.is_connected:
                raise Unavailable(f"{self.peer_name} is starting or restarting; retry later")
            self.send(request)
        except QuireError as error:
            sink(OutputDelta.from_error(request.id, error))
        else:
            self._sinks[request.id] = sink

    def cancel(self, request_ids: Sequence[int]) -> None:
        """Cancel requests. Their sinks get no further deltas."""
        open_ids = [request_id for request_id in request_ids if self._sinks.pop(request_id, None) is not None]
        if open_ids:
            self.send(CancelRequests(open_ids))

    def report_rejected(self, code: Code) -> None:
        """Report to the text process that a request was rejected, so that the metrics count it. If the text process is
        not running, the rejection is not counted."""
        self.send(RequestRejected(code))

    def report_ignored_fields(self) -> None:
        """Report to the text process that a request had fields that are not known, so that the metrics count it."""
        self.send(FieldsIgnored())

    def report_prefill(self, result: PrefillResult) -> None:
        """Report to the text process what became of a request whose header names a pod for its prompt, so that the
        metrics count it."""
        self.send(PrefillReported(result))

    def on_message(self, connection: Connection, message: Message) -> None:
        """Called for each message of the text process."""
        if not isinstance(message, OutputDeltas):
            super().on_message(connection, message)
            return
        sinks = self._sinks
        for delta in message.deltas:
            sink = sinks.pop(delta.id, None) if delta.final else sinks.get(delta.id)
            if sink is None:
                continue
            try:
                sink(delta)
            except Exception:
                logger.exception("the deltas of a request cannot be used, ending it id=%d", delta.id)
                self.cancel([delta.id])

    def on_request_failed(self, request_id: int, error: QuireError) -> None:
        """Called when the text process did not accept a request, or when its deltas cannot be decoded."""
        if (sink := self._sinks.pop(request_id, None)) is not None:
            # If the deltas cannot be decoded, the text process still runs the request.
            self.send(CancelRequests([request_id]))
            sink(OutputDelta.from_error(request_id, error))

    def on_closed(self, connection: Connection) -> None:
        """Called when the connection closes."""
        if not self.is_closing:
            logger.warning("text process disconnected num_open=%d", len(self._sinks))
        sinks, self._sinks = self._sinks, {}
        super().on_closed(connection)
        for request_id, sink in sinks.items():
            sink(OutputDelta.from_error(request_id, self.lost_error()))
