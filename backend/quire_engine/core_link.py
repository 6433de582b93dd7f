# SPDX-License-Identifier: Apache-2.0
"""CoreLink: the text process's connection to the engine core, made again whenever it ends."""

import asyncio
import logging
import os
from pathlib import Path
from typing import Protocol

from quire_engine.connection import Connection
from quire_spec.errors import Internal
from quire_spec.protocol.messages import Hello, IpcMessage, StepResult

RETRY_S = 0.05
"""Between two attempts to reach the engine core: a restart of seconds is not lengthened by it."""

_log = logging.getLogger("quire.text")


class CoreClient(Protocol):
    """Who is told about the core; the desk."""

    def core_came(self) -> None:
        """The core is there."""

    def core_left(self) -> None:
        """The core is gone."""

    def take(self, step: StepResult) -> None:
        """The core made a step."""


class CoreLink:
    """Handler of the connection to the core. Messages sent while there is none are dropped: the client was told."""

    def __init__(self, path: Path, served_name: str) -> None:
        self._path = path
        self._hello = Hello("text", served_name, os.getpid())
        self._connection: Connection | None = None
        self._client: CoreClient | None = None
        self._over = asyncio.Event()

    def send(self, message: IpcMessage) -> None:
        """Send a message to the core."""
        if self._connection is not None:
            self._connection.send(message)

    async def run(self, client: CoreClient) -> None:
        """Stay connected, for ever."""
        self._client = client
        loop = asyncio.get_running_loop()
        while True:
            try:
                await loop.create_unix_connection(lambda: Connection(self, self._hello), str(self._path))
            except OSError:
                await asyncio.sleep(RETRY_S)
                continue
            await self._over.wait()
            self._over.clear()

    def on_ready(self, connection: Connection) -> None:
        """Handler: connected."""
        _log.info("engine core connected")
        self._connection = connection
        assert self._client is not None
        self._client.core_came()

    def on_message(self, connection: Connection, message: IpcMessage) -> None:
        """Handler: the core says something."""
        if not isinstance(message, StepResult):
            raise Internal(f"unexpected {type(message).__name__} from the engine core")
        assert self._client is not None
        self._client.take(message)

    def on_oversize(self, connection: Connection, head: bytes, length: int) -> None:
        """Handler: never, as frames of the core may have any length that frames can have."""
        raise Internal(f"message of {length} bytes from the engine core")

    def on_resumed(self, connection: Connection) -> None:
        """Handler: nothing waits here for that; what is sent to the core is bounded by admission."""

    def on_lost(self, connection: Connection) -> None:
        """Handler: the core is gone."""
        _log.warning("engine core gone")
        self._connection = None
        self._over.set()
        assert self._client is not None
        self._client.core_left()
