# SPDX-License-Identifier: Apache-2.0
"""The Unix socket on which the supervisor accepts calls from the OpenAI front. Its frames contain ControlRequests and
ControlResponses.

This module handles only the protocol; other modules implement the methods. app.py opens the socket.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from quire_spec.errors import Code, Internal, InvalidArgument, QuireError
from quire_spec.protocol.framing import FrameDecoder, encode_frame
from quire_spec.protocol.messages import ControlRequest, ControlResponse

logger = logging.getLogger(__name__)

Method = Callable[[Mapping[str, Any]], Awaitable[None]]
_READ_BYTES = 2**16


class ControlServer:
    """The connections of the socket, and the calls that are running. The peer is the OpenAI front, not a
    ControlClient.
    """

    def __init__(self, methods: Mapping[str, Method]) -> None:
        self._methods = methods
        self._calls: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def listen(self, path: Path) -> AsyncIterator[None]:
        """Serve on `path` while the context is open. When the context ends, calls that are still running are
        cancelled."""
        server = await asyncio.start_unix_server(self._serve, path)
        try:
            yield
        finally:
            server.close()
            for call in self._calls:
                call.cancel()
            await asyncio.gather(*self._calls, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder = FrameDecoder()
        try:
            while data := await reader.read(_READ_BYTES):
                for message in decoder.feed(data):
                    if not isinstance(message, ControlRequest):
                        raise Internal(f"unexpected {type(message).__name__}")
                    # A call runs to its end even if its caller disconnects. Otherwise, a change could remain half done.
                    task = asyncio.create_task(self._run(message, writer))
                    self._calls.add(task)
                    task.add_done_callback(self._calls.discard)
        except (OSError, Internal) as error:
            logger.warning("connection to the supervisor closed error=%s", error)
        finally:
            writer.close()

    async def _run(self, request: ControlRequest, writer: asyncio.StreamWriter) -> None:
        try:
            if (method := self._methods.get(request.method)) is None:
                raise InvalidArgument(f"method {str(request.method)[:80]!r} is unknown; use {', '.join(self._methods)}")
            await method(request.args)
            response = ControlResponse(request.id, {})
        except QuireError as error:
            response = ControlResponse(request.id, None, error.code, str(error))
        except Exception:
            logger.exception("a call from the OpenAI front failed method=%s", request.method)
            response = ControlResponse(request.id, None, Code.INTERNAL, "internal error; see the log of the pod")
        with contextlib.suppress(OSError):
            writer.write(encode_frame(response))
            await writer.drain()
