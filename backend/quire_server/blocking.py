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


async def run_in_daemon_thread(function: Callable[..., T], *args: Any) -> T:
    """The result of `work(*args)`, run in a daemon thread; raises what it raises. Cancelling leaves the thread be."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def set_outcome(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def run() -> None:
        result, error_raised = None, None
        try:
            result = function(*args)
        except Exception as error:
            error_raised = error
        # A closed loop: the process is ending and nobody wants the result.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(set_outcome, result, error_raised)

    threading.Thread(target=run, name=f"background {function}", daemon=True).start()
    return await future
