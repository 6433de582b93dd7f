# SPDX-License-Identifier: Apache-2.0
"""The connection to one frontend. This module is used only on the event loop. The request manager decides which deltas
are sent."""

import asyncio
import logging

from quire_engine.text.metrics import RequestMetrics
from quire_engine.text.result_coalescer import OPENAI_RESPONSE_COST, ResponseThrottle
from quire_spec.protocol.connection import Connection
from quire_spec.protocol.messages import Hello, OutputDelta, OutputDeltas

MAX_UNSENT_BYTES = 64 * 2**20
"""Maximum number of bytes that are written while the frontend does not read. These are errors and outputs that are not
streamed; the results of streams wait in the result coalescer. The message that filled the socket does not count,
because a single output can be as long as the model's context.
"""

logger = logging.getLogger(__name__)


class FrontendConnection:
    """The connection to one frontend."""

    def __init__(
        self, connection: Connection, hello: Hello, metrics: RequestMetrics, throttle: ResponseThrottle
    ) -> None:
        """`throttle` counts each delta that is sent."""
        self.hello = hello
        self._connection = connection
        self._metrics = metrics
        self._throttle = throttle
        self._response_cost = OPENAI_RESPONSE_COST if hello.role == "openai" else 1.0
        self._deltas: list[OutputDelta] = []
        """The deltas of this iteration of the event loop."""
        self._num_blocking_bytes = 0
        """Number of unsent bytes when the connection became blocked."""

    @property
    def is_blocked(self) -> bool:
        """True while the frontend does not read, and the socket is full."""
        return self._connection.write_paused

    def send(self, delta: OutputDelta) -> None:
        """Send an output delta at the end of this iteration of the event loop, together with all deltas of the
        iteration.
        """
        if not self._deltas:
            asyncio.get_running_loop().call_soon(self._flush)
        self._deltas.append(delta)

    def close_slow_reader(self, reason: str) -> None:
        """Close the connection, because the frontend does not read."""
        logger.warning(
            "closed the connection of a frontend that does not read model=%s pid=%s reason=%r",
            self.hello.model,
            self.hello.pid,
            reason,
        )
        self._metrics.record_slow_reader()
        self._connection.abort()

    def _flush(self) -> None:
        deltas, self._deltas = self._deltas, []
        was_blocked = self.is_blocked
        self._connection.send(OutputDeltas(deltas))
        self._throttle.record_sent(self._response_cost * len(deltas), asyncio.get_running_loop().time())
        if not was_blocked:
            self._num_blocking_bytes = self._connection.unsent_bytes
        elif (num_bytes := self._connection.unsent_bytes - self._num_blocking_bytes) > MAX_UNSENT_BYTES:
            self.close_slow_reader(f"{num_bytes} unsent bytes exceed the limit of {MAX_UNSENT_BYTES}")
