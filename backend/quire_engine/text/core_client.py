# SPDX-License-Identifier: Apache-2.0
"""Client of the engine core: the text process's connection to the core. Reconnects whenever the connection closes.

This module handles only messages. The `CoreListener` handles the results that they contain, and the loss of the core.
"""

import asyncio
import itertools
import logging
import os
from pathlib import Path
from typing import Any, Protocol

from quire_engine.ipc.connection import Connection, ConnectionHandler
from quire_spec.errors import Internal, Unavailable, error_from_code
from quire_spec.protocol.messages import ControlRequest, ControlResponse, Hello, IpcMessage, StepResult

RECONNECT_INTERVAL_S = 0.05
"""Seconds between two attempts to connect. This is short compared with the time that a core takes to restart."""

logger = logging.getLogger(__name__)


class CoreListener(Protocol):
    """Receives the events of the connection to the core. The result coalescer is the listener, and passes the events
    on to the request manager.
    """

    def on_core_connected(self) -> None:
        """Called when the core is connected."""

    def on_core_lost(self) -> None:
        """Called when the connection to the core has closed."""

    def on_step(self, step: StepResult) -> None:
        """Called for the results of each step."""


class CoreClient(ConnectionHandler):
    """Handler of the connection to the core. While it is not connected, messages are dropped.

    This never loses a request, because `on_core_lost` has already ended the requests to which the dropped messages
    belong.
    """

    def __init__(self, path: Path, served_name: str) -> None:
        self._path = path
        self._hello = Hello("text", served_name, os.getpid())
        self._connection: Connection | None = None
        self._listener: CoreListener | None = None
        self._disconnected = asyncio.Event()
        self._call_ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}

    def send(self, message: IpcMessage) -> None:
        """Send a message to the core."""
        if self._connection is not None:
            self._connection.send(message)

    async def call(self, method: str, timeout_s: float) -> Any:
        """Call a method of the core and return its result.

        Raises:
            Unavailable: the core is not connected, ended, or did not answer.
            QuireError: the error that the core returned.
        """
        if self._connection is None:
            raise Unavailable("engine core is restarting; try again")
        call_id, future = next(self._call_ids), asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._connection.send(ControlRequest(call_id, method))
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise Unavailable(f"engine core did not answer {method!r} within {timeout_s:g} s; try again") from None
        finally:
            del self._calls[call_id]

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
        if isinstance(message, ControlResponse):
            self._on_response(message)
            return
        if not isinstance(message, StepResult):
            raise Internal(f"unexpected {type(message).__name__} from the engine core")
        assert self._listener is not None
        self._listener.on_step(message)

    def on_closed(self, connection: Connection) -> None:
        """Called when the connection closes."""
        logger.warning("engine core disconnected")
        self._connection = None
        for future in self._calls.values():
            if not future.done():
                future.set_exception(Unavailable("engine core is restarting; try again"))
        self._disconnected.set()
        assert self._listener is not None
        self._listener.on_core_lost()

    def _on_response(self, response: ControlResponse) -> None:
        future = self._calls.get(response.id)
        if future is None or future.done():
            return
        if response.error_code is None:
            future.set_result(response.result)
        else:
            future.set_exception(error_from_code(response.error_code, response.error))
