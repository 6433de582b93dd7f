# SPDX-License-Identifier: Apache-2.0
"""What becomes of calls to a server that is given up; what a real server answers is in test_launch.py."""

import asyncio
import contextlib

import pytest

from quire_server.model_server.client import ModelServerClient
from quire_spec.errors import Unavailable


@contextlib.asynccontextmanager
async def silent():
    """The port of a server that takes connections and says nothing."""
    writers = []
    listener = await asyncio.start_server(lambda reader, writer: writers.append(writer), "127.0.0.1", 0)
    yield listener.sockets[0].getsockname()[1]
    for writer in writers:
        writer.close()
    listener.close()
    await listener.wait_closed()


async def test_calls_end_when_the_client_is_closed_and_their_tasks_go_on():
    async with silent() as port:
        async with ModelServerClient("127.0.0.1", port, port, "key") as client:
            calls = [asyncio.create_task(call) for call in (client.load_model("a", {}, {}), client.unload_model("b"))]
            await asyncio.sleep(0.1)
        for call in calls:
            with pytest.raises(Unavailable, match="gone"):
                await call
            assert not call.cancelled()


async def test_a_call_after_the_end_is_refused():
    async with silent() as port:
        async with ModelServerClient("127.0.0.1", port, port, "key") as client:
            pass
        for call in (client.load_model("a", {}, {}), client.unload_model("a"), client.load_from_disk("tales")):
            with pytest.raises(Unavailable, match="gone"):
                await call


async def test_who_is_cancelled_is_cancelled():
    async with silent() as port, ModelServerClient("127.0.0.1", port, port, "key") as client:
        call = asyncio.create_task(client.unload_model("a"))
        await asyncio.sleep(0.1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
