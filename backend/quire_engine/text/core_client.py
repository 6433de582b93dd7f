# SPDX-License-Identifier: Apache-2.0
"""CoreLink: the text process's connection to the engine core, made again whenever it ends."""

import asyncio
import logging
import os
from pathlib import Path
from typing import Protocol

from quire_engine.ipc.connection import Connection
from quire_spec.errors import Internal
from quire_spec.protocol.messages import Hello, IpcMessage, StepResult

RECONNECT_INTERVAL_S = 0.05
"""Between two attempts to reach the engine core: a restart of seconds is not lengthened by it."""

logger = logging.getLogger(__name__)


class CoreListener(Protocol):
    """Who is told about the core; the desk."""

    def on_core_connected(self) -> None:
        """The core is there."""

    def on_core_lost(self) -> None:
        """The core is gone."""

    def on_step(self, step: StepResult) -> None:
        """The core made a step."""


class CoreClient:
    """Handler of the connection to the core. Messages sent while there is none are dropped: the client was told."""

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
        """Stay connected, for ever."""
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
        """Handler: connected."""
        logger.info("engine core connected")
        self._connection = connection
        assert self._listener is not None
        self._listener.on_core_connected()

    def on_message(self, connection: Connection, message: IpcMessage) -> None:
        """Handler: the core says something."""
        if not isinstance(message, StepResult):
            raise Internal(f"unexpected {type(message).__name__} from the engine core")
        assert self._listener is not None
        self._listener.on_step(message)

    def on_oversized_frame(self, connection: Connection, head: bytes, length: int) -> None:
        """Handler: never, as frames of the core may have any length that frames can have."""
        raise Internal(f"message of {length} bytes from the engine core")

    def on_writable(self, connection: Connection) -> None:
        """Handler: nothing waits here for that; what is sent to the core is bounded by admission."""

    def on_closed(self, connection: Connection) -> None:
        """Handler: the core is gone."""
        logger.warning("engine core gone")
        self._connection = None
        self._disconnected.set()
        assert self._listener is not None
        self._listener.on_core_lost()
