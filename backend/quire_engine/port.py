# SPDX-License-Identifier: Apache-2.0
"""Port: one frontend of the text process, and the events that wait for it.

Belongs to the event loop. What an event means is the desk's business, how waiting events are joined the outbox's.
"""

import asyncio
import logging

from quire_engine.connection import Connection
from quire_engine.metrics import Metrics
from quire_engine.outbox import Outbox
from quire_engine.pace import Pace
from quire_spec.protocol.messages import Hello, OutputDelta, OutputDeltas

_log = logging.getLogger("quire.text")


class Port:
    """One frontend: its connection, and its outbox."""

    def __init__(self, connection: Connection, hello: Hello, metrics: Metrics, pace: Pace) -> None:
        """`pace` is told of every event that goes out."""
        self.hello = hello
        self._connection = connection
        self._metrics = metrics
        self._pace = pace
        self._outbox = Outbox()
        self._scheduled = False

    def post(self, event: OutputDelta) -> None:
        """Send an event, with all others of this turn of the event loop."""
        self._outbox.add(event)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn_over)

    def flush(self) -> None:
        """Send what waits, unless the frontend is behind."""
        if not self._connection.blocked:
            for events in self._outbox.take():
                self._connection.send(OutputDeltas(events))
                self._pace.sent(len(events), asyncio.get_running_loop().time())

    def _turn_over(self) -> None:
        self._scheduled = False
        self.flush()
        if self._connection.blocked and (excess := self._outbox.excess):
            _log.warning("frontend cut: it does not read model=%s pid=%s: %s", self.hello.model, self.hello.pid, excess)
            self._metrics.reader_cut()
            self._connection.cut()
