# SPDX-License-Identifier: Apache-2.0
"""The connection to one frontend, and the output deltas that wait to be sent to it.

This module is used only on the event loop. The request manager decides which deltas are sent, and `OutputDeltaBuffer`
merges the deltas that wait.
"""

import asyncio
import logging

from quire_engine.text.metrics import RequestMetrics
from quire_engine.text.output_delta_buffer import OutputDeltaBuffer
from quire_engine.text.result_coalescer import OPENAI_RESPONSE_COST, ResponseThrottle
from quire_spec.protocol.connection import Connection
from quire_spec.protocol.messages import Hello, OutputDelta, OutputDeltas

logger = logging.getLogger(__name__)


class FrontendConnection:
    """The connection to one frontend, including its send buffer."""

    def __init__(
        self, connection: Connection, hello: Hello, metrics: RequestMetrics, throttle: ResponseThrottle
    ) -> None:
        """`throttle` counts each delta that is sent."""
        self.hello = hello
        self._connection = connection
        self._metrics = metrics
        self._throttle = throttle
        self._response_cost = OPENAI_RESPONSE_COST if hello.role == "openai" else 1.0
        self._delta_buffer = OutputDeltaBuffer()
        self._flush_scheduled = False

    def send(self, delta: OutputDelta) -> None:
        """Send an output delta at the end of this iteration of the event loop, together with all deltas of the
        iteration.
        """
        self._delta_buffer.append(delta)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush_turn)

    def flush(self) -> None:
        """Send all waiting deltas unless the connection's write buffer is full."""
        if not self._connection.write_paused:
            for deltas in self._delta_buffer.pop_batches():
                self._connection.send(OutputDeltas(deltas))
                self._throttle.record_sent(self._response_cost * len(deltas), asyncio.get_running_loop().time())

    def _flush_turn(self) -> None:
        self._flush_scheduled = False
        self.flush()
        if self._connection.write_paused and (overflow_reason := self._delta_buffer.overflow_reason):
            logger.warning(
                "closed the connection of a frontend that does not read model=%s pid=%s reason=%r",
                *(self.hello.model, self.hello.pid, overflow_reason),
            )
            self._metrics.record_slow_reader()
            self._connection.abort()
