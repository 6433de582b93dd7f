# SPDX-License-Identifier: Apache-2.0
"""Client of the engine core: the text process's connection to the core. Reconnects whenever the connection closes.

Knows messages but no requests: the `CoreListener` handles results and the loss of the core.
"""

import asyncio
import logging
import os
from pathlib import Path
from typing import Protocol

from quire_engine.ipc.connection import Connection, ConnectionHandler
from quire_spec.errors import Internal
from quire_spec.protocol.messages import Hello, IpcMessage, StepResult

RECONNECT_INTERVAL_S = 0.05
"""Seconds between two connection attempts; short compared with the restart of a core."""

logger = logging.getLogger(__name__)


class CoreListener(Protocol):
    """Receives the events of the connection to the core: the result coalescer, and behind it the request manager."""

    def on_core_connected(self) -> None:
        """Called when the core is connected."""

    def on_core_lost(self) -> None:
        """Called when the connection to the core has closed."""

    def on_step(self, step: StepResult) -> None:
        """Called for the results of each step."""


class CoreClient(ConnectionHandler):
    """Handler of the connection to the core. Messages sent while it is not connected are dropped.

    This loses nothing: `on_core_lost` has ended the requests that they belong to.
    """

    def __init__(self, path: Path, served_name: str) -> None:
        self._path = path
        self._hello = Hello("text", served_name, os.getpid())
        self._connection: Connection | None = None
        self._listener: CoreListener | None = None
        self._disconnected = asyncio.Event()

    def send(self, message: IpcMessage) -> None:
        """Send a message to the core."""
        if self._connection is not None:
            self._connection.send(message)

    async def run(self, listener: CoreListener) -> None:
        """Connect, and reconnect whenever the connection closes. Does not return."""
        self._listener = listener
        loop = asyncio.get_running_loop()
        while True:
            try:
                await loop.create_unix_connection(lambda: Connection(self, self._hello), str(self._path))
            except OSError:
                await asyncio.sleep(RECONNECT_INTERVAL_S)
                continue
            await self._disconnected.wait()
            self._disconnected.clear()

    def on_connected(self, connection: Connection) -> None:
        """Called when the connection is open."""
        logger.info("engine core connected")
        self._connection = connection
        assert self._listener is not None
        self._listener.on_core_connected()

    def on_message(self, connection: Connection, message: IpcMessage) -> None:
        """Called for each message of the core."""
        if not isinstance(message, StepResult):
            raise Internal(f"unexpected {type(message).__name__} from the engine core")
        assert self._listener is not None
        self._listener.on_step(message)

    def on_closed(self, connection: Connection) -> None:
        """Called when the connection closes."""
        logger.warning("engine core disconnected")
        self._connection = None
        self._disconnected.set()
        assert self._listener is not None
        self._listener.on_core_lost()
