# SPDX-License-Identifier: Apache-2.0
"""Turns of the clients whose requests are being prepared (rendered, tokenized, checked).

A client with many requests prepares only a few of them at once. So the requests of another client wait for those few,
and not for all requests that arrived before them. The request manager takes a turn for each request.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

MAX_PREPARATIONS_PER_CLIENT = 4
"""Enough to keep the two render workers and the two threads of the tokenizer busy."""


class ClientTurns:
    """The preparations that run."""

    def __init__(self) -> None:
        self._semaphores: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """For each client that prepares requests. Its tasks own the semaphore."""

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Wait until fewer than MAX_PREPARATIONS_PER_CLIENT requests of a client are being prepared."""
        semaphore = self._semaphores.get(client)
        if semaphore is None:
            semaphore = self._semaphores[client] = asyncio.Semaphore(MAX_PREPARATIONS_PER_CLIENT)
        async with semaphore:
            # Short texts are prepared without waiting. Without this pause, a client's whole queue would be prepared
            # before the event loop reads the next request of another client.
            await asyncio.sleep(0)
            yield
