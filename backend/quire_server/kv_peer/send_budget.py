# SPDX-License-Identifier: Apache-2.0
"""Limit of the bytes that a process sends in a second."""

import asyncio


class SendBudget:
    """Lets senders pass in order, each after the bytes of the earlier ones. Nothing is saved up while no one sends."""

    def __init__(self, bytes_per_second: int | None) -> None:
        """None: no limit."""
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0

    async def take(self, num_bytes: int) -> None:
        """Wait until `num_bytes` can be sent."""
        if self._bytes_per_second is None:
            return
        now = asyncio.get_running_loop().time()
        start = max(now, self._free_at)
        self._free_at = start + num_bytes / self._bytes_per_second
        await asyncio.sleep(start - now)
