# SPDX-License-Identifier: Apache-2.0
"""An event loop with virtual time: it jumps to the next timer, so that code that only waits for timers runs at once.

`looptime` does the same, but its pytest plugin patches the loops of all tests, and leaves one unclosed where a fixture
has called `asyncio.run` (looptime 0.9, pytest-asyncio 1.5): a ResourceWarning, which is an error here.
"""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any


def run_in_virtual_time(main: Coroutine[Any, Any, None]) -> None:
    """Run `main` in an event loop whose time jumps to the next timer. Files, sockets and threads do not work there."""
    loop: Any = asyncio.SelectorEventLoop()
    now = 0.0

    def select(timeout: float | None) -> list[Any]:
        nonlocal now
        assert timeout is not None, "deadlock: no timer is pending"
        now += max(0.0, timeout)
        return []

    loop._selector.select, loop.time = select, lambda: now
    try:
        loop.run_until_complete(main)
    finally:
        loop.close()


def virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Decorate a coroutine test so that it runs in virtual time."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        run_in_virtual_time(test(**fixtures))

    return run
