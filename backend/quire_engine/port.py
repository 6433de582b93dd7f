# SPDX-License-Identifier: Apache-2.0
"""Port: one frontend of the text process, and the events that wait for it. Dispatch: when they go out, for all ports.

Both belong to the event loop. What an event means is the desk's business, how waiting events are joined the outbox's.
"""

import asyncio
import logging

from quire_engine.connection import Connection
from quire_engine.metrics import Metrics
from quire_engine.outbox import Outbox
from quire_engine.pace import Pace
from quire_spec.messages import Event, Events, Hello

_log = logging.getLogger("quire.text")


class Port:
    """One frontend: its connection, and its outbox."""

    def __init__(self, connection: Connection, hello: Hello, metrics: Metrics, dispatch: "Dispatch") -> None:
        self.hello = hello
        self._connection = connection
        self._metrics = metrics
        self._dispatch = dispatch
        self._outbox = Outbox()

    @property
    def waiting(self) -> bool:
        """There are events that could be sent."""
        return bool(self._outbox) and not self._connection.blocked

    def post(self, event: Event) -> None:
        """Send an event, with others of this turn of the event loop or of later ones."""
        self._outbox.add(event)
        self._dispatch.wake(self)

    def flush(self, only_urgent: bool = False) -> int:
        """Send what waits, unless the frontend is behind; how many events that were."""
        if self._connection.blocked:
            return 0
        num_sent = 0
        for events in self._outbox.take(only_urgent):
            self._connection.send(Events(events))
            num_sent += len(events)
        return num_sent

    def check(self) -> None:
        """Give the frontend up if it has not read for too long."""
        if self._connection.blocked and (excess := self._outbox.excess):
            _log.warning("frontend cut: it does not read model=%s pid=%s: %s", self.hello.model, self.hello.pid, excess)
            self._metrics.reader_cut()
            self._connection.cut()


class Dispatch:
    """Sends the events of all ports, each turn's together: the urgent ones at once, the others at a pace."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._loop = asyncio.get_running_loop()
        self._ports: set[Port] = set()
        """Those that were posted to since their last full flush."""
        self._turn: asyncio.Handle | None = None
        self._tick: asyncio.TimerHandle | None = None

    def wake(self, port: Port) -> None:
        """A port has something to send."""
        self._ports.add(port)
        if self._turn is None:
            self._turn = self._loop.call_soon(self._send)

    def forget(self, port: Port) -> None:
        """A port's frontend is gone."""
        self._ports.discard(port)

    def _send(self) -> None:
        self._turn = None
        now = self._loop.time()
        only_urgent = self._pace.wait_s(now) > 0
        num_sent = 0
        for port in self._ports:
            num_sent += port.flush(only_urgent)
            port.check()
        self._pace.sent(num_sent, now)
        self._ports = {port for port in self._ports if port.waiting}
        if self._ports and self._tick is None:
            self._tick = self._loop.call_later(self._pace.wait_s(now), self._ticked)

    def _ticked(self) -> None:
        self._tick = None
        self._send()
