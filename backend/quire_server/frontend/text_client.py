# SPDX-License-Identifier: Apache-2.0
"""Connects a stub to the text process: a RequestClient whose event loop runs in a thread.

`submit` and `cancel` can be called in any thread and never block. The client does not use the server's API. It is owned
by stub_model.py.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from quire_spec.errors import Code
from quire_spec.protocol.messages import GenerateRequest, Hello, OutputDelta
from quire_spec.protocol.request_client import RequestClient


class TextClient:
    """Sends requests to the text process and passes on the deltas of the responses."""

    def __init__(self, path: Path, model: str, on_delta: Callable[[OutputDelta], None]) -> None:
        """`on_delta` is called in the client's thread, so it must not block. The deltas of one request arrive in
        order."""
        self._client = RequestClient(path, Hello("stub", model, os.getpid()))
        self._on_delta = on_delta
        self._is_running = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="text-client", daemon=True)
        self._thread.start()
        self._is_running.wait()

    def submit(self, request: GenerateRequest) -> None:
        """Send a request. `on_delta` is called with each delta of the request. If the text process is not running,
        `on_delta` gets a delta with the error UNAVAILABLE."""
        self._call_soon(self._client.submit, request, self._on_delta)

    def cancel(self, request_id: int) -> None:
        """Cancel a request; the text process sends no more deltas for it."""
        self._call_soon(self._client.cancel, [request_id])

    def report_rejected(self, code: Code) -> None:
        """Report to the text process that a request was rejected, so that the metrics count it. If the text process is
        not running, the rejection is not counted."""
        self._call_soon(self._client.report_rejected, code)

    def close(self) -> None:
        """Close the connection and stop the thread. Open requests get a delta with the error UNAVAILABLE."""
        self._call_soon(self._closing.set)
        self._thread.join(timeout=5)

    def _call_soon(self, function: Callable[..., None], *args: object) -> None:
        # After `close`, the loop is closed, and the connection no longer exists.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    async def _run(self) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        # If the text process is running, even the first request finds a connection.
        with contextlib.suppress(OSError):
            await self._client.connect()
        self._is_running.set()
        connect_task = asyncio.create_task(self._client.run())
        await self._closing.wait()
        connect_task.cancel()
        await self._client.close()
