# SPDX-License-Identifier: Apache-2.0
"""Time that passes at once: an event loop that jumps to what is due next. For code that waits for clocks alone."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any


def at_once(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` in an event loop whose time jumps to the next thing that is due. It has no files and no sockets."""
    loop: Any = asyncio.SelectorEventLoop()
    now = 0.0

    def select(timeout: float | None) -> list[Any]:
        nonlocal now
        assert timeout is not None, "nothing will ever happen"
        now += max(0.0, timeout)
        return []

    loop._selector.select, loop.time = select, lambda: now
    try:
        loop.run_until_complete(work)
    finally:
        loop.close()


def timeless(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine, run by `at_once`."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        at_once(test(**fixtures))

    return run
