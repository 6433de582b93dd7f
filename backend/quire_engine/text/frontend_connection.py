# SPDX-License-Identifier: Apache-2.0
"""Port: one frontend of the text process, and the events that wait for it.

Belongs to the event loop. What an event means is the desk's business, how waiting events are joined the outbox's.
"""

import asyncio
import logging

from quire_engine.ipc.connection import Connection
from quire_engine.text.metrics import RequestMetrics
from quire_engine.text.output_delta_buffer import OutputDeltaBuffer
from quire_engine.text.result_coalescer import ResponseThrottle
from quire_spec.protocol.messages import Hello, OutputDelta, OutputDeltas

logger = logging.getLogger(__name__)


class FrontendConnection:
    """One frontend: its connection, and its outbox."""

    def __init__(
        self, connection: Connection, hello: Hello, metrics: RequestMetrics, throttle: ResponseThrottle
    ) -> None:
        """`pace` is told of every event that goes out."""
        self.hello = hello
        self._connection = connection
        self._metrics = metrics
        self._throttle = throttle
        self._delta_buffer = OutputDeltaBuffer()
        self._flush_scheduled = False

    def send(self, delta: OutputDelta) -> None:
        """Send an event, with all others of this turn of the event loop."""
        self._delta_buffer.append(delta)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush_turn)

    def flush(self) -> None:
        """Send what waits, unless the frontend is behind."""
        if not self._connection.write_paused:
            for deltas in self._delta_buffer.drain():
                self._connection.send(OutputDeltas(deltas))
                self._throttle.record_sent(len(deltas), asyncio.get_running_loop().time())

    def _flush_turn(self) -> None:
        self._flush_scheduled = False
        self.flush()
        if self._connection.write_paused and (overflow_reason := self._delta_buffer.overflow_reason):
            logger.warning(
                "frontend cut: it does not read model=%s pid=%s: %s", self.hello.model, self.hello.pid, overflow_reason
            )
            self._metrics.record_slow_reader()
            self._connection.abort()
