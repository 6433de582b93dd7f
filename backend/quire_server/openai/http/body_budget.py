# SPDX-License-Identifier: Apache-2.0
"""Limits the bytes of request bodies that a front holds, in total and for each client.

A request reserves its body before it reads it, and releases it when the text process has its prompts. If there is no
room, it waits. In the meantime, its body stays in the client's socket. Small bodies are not counted, so that they never
wait.
"""

import asyncio
import ctypes
from collections import Counter

MAX_HELD_BYTES = 256 * 2**20
MAX_HELD_BYTES_PER_CLIENT = 128 * 2**20
UNCOUNTED_BYTES = 64 * 2**10
"""A body that has at most this size is not counted."""


_TRIM_AFTER_S = 2.0
"""If no body was held and released for this many seconds, the memory of earlier bodies is returned to the system."""
_libc = ctypes.CDLL(None)


class BodyBudget:
    """The bytes that the requests of a front hold. It is used on one event loop."""

    def __init__(self, max_bytes: int = MAX_HELD_BYTES, max_bytes_per_client: int = MAX_HELD_BYTES_PER_CLIENT) -> None:
        self._max_bytes = max_bytes
        self._max_bytes_per_client = max_bytes_per_client
        self._held: Counter[str] = Counter()
        self._waiters: list[tuple[str, int, asyncio.Future[None]]] = []
        self._trim_timer: asyncio.TimerHandle | None = None

    @property
    def num_held_bytes(self) -> int:
        """Number of bytes that all requests hold."""
        return self._held.total()

    async def reserve(self, client: str, num_bytes: int) -> int:
        """Wait until a body of `num_bytes` fits. Return the number of bytes that the caller must release."""
        if num_bytes <= UNCOUNTED_BYTES:
            return 0
        if not self._has_room(client, num_bytes):
            waiter = (client, num_bytes, asyncio.get_running_loop().create_future())
            self._waiters.append(waiter)
            try:
                await waiter[2]
            except BaseException:
                if waiter[2].done() and not waiter[2].cancelled():
                    self.release(client, num_bytes)
                else:
                    self._waiters.remove(waiter)
                raise
            return num_bytes
        self._held[client] += num_bytes
        return num_bytes

    def release(self, client: str, num_bytes: int) -> None:
        """Return the bytes of a request that has ended."""
        self._held[client] -= num_bytes
        if not self._held[client]:
            del self._held[client]
        if not self._held:
            if self._trim_timer is not None:
                self._trim_timer.cancel()
            self._trim_timer = asyncio.get_running_loop().call_later(_TRIM_AFTER_S, self._return_memory)
        for waiter in self._waiters.copy():
            waiting_client, waiting_bytes, future = waiter
            if not future.done() and self._has_room(waiting_client, waiting_bytes):
                self._waiters.remove(waiter)
                self._held[waiting_client] += waiting_bytes
                future.set_result(None)

    def _return_memory(self) -> None:
        """Return free memory to the system. Parts of bodies are too small for glibc to do this by itself."""
        if not self._held and hasattr(_libc, "malloc_trim"):
            _libc.malloc_trim(0)

    def _has_room(self, client: str, num_bytes: int) -> bool:
        """Return whether a body fits. A body that is larger than a limit fits if no other body is held."""
        held, total = self._held[client], self.num_held_bytes
        return (not held or held + num_bytes <= self._max_bytes_per_client) and (
            not total or total + num_bytes <= self._max_bytes
        )
