# SPDX-License-Identifier: Apache-2.0
"""Blocking work off the event loop, in threads that nobody waits for when the process ends.

asyncio.to_thread joins its threads at exit: one read from a hung file system would then keep a pod from stopping.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[..., T], *args: Any) -> T:
    """The result of `work(*args)`, run in a daemon thread; raises what it raises. Cancelling leaves the thread be."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is None:
            answer.set_result(result)  # type: ignore[arg-type]
        else:
            answer.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = work(*args)
        except Exception as error:
            failure = error
        # A closed loop: the process is ending and nobody wants the result.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name=f"background {work}", daemon=True).start()
    return await answer
