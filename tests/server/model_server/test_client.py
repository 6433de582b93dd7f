# SPDX-License-Identifier: Apache-2.0
"""ModelServerClient: calls of a closed client. test_launch.py uses a real server."""

import asyncio
import contextlib

import pytest

from quire_server.model_server.client import ModelServerClient
from quire_spec.errors import Unavailable


@contextlib.asynccontextmanager
async def silent_server():
    """Yield the port of a server that accepts connections and never responds."""
    writers = []
    listener = await asyncio.start_server(lambda reader, writer: writers.append(writer), "127.0.0.1", 0)
    yield listener.sockets[0].getsockname()[1]
    for writer in writers:
        writer.close()
    listener.close()
    await listener.wait_closed()


async def test_close_fails_pending_calls_without_cancelling_their_tasks():
    async with silent_server() as port:
        async with ModelServerClient(("127.0.0.1", port), ("127.0.0.1", port), "key") as client:
            calls = [asyncio.create_task(call) for call in (client.load_model("a"), client.unload_model("b"))]
            await asyncio.sleep(0.1)
        for call in calls:
            with pytest.raises(Unavailable, match="server: ended"):
                await call
            assert not call.cancelled()


async def test_call_after_close_is_unavailable():
    async with silent_server() as port:
        async with ModelServerClient(("127.0.0.1", port), ("127.0.0.1", port), "key") as client:
            pass
        for call in (client.load_model("a"), client.unload_model("a")):
            with pytest.raises(Unavailable, match="server: ended"):
                await call


async def test_cancelled_call_raises_cancelled_error():
    async with silent_server() as port, ModelServerClient(("127.0.0.1", port), ("127.0.0.1", port), "key") as client:
        call = asyncio.create_task(client.unload_model("a"))
        await asyncio.sleep(0.1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
