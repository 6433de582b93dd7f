# SPDX-License-Identifier: Apache-2.0
"""Runs blocking calls in daemon threads, so that they do not block the event loop.

When Python exits, it waits for the threads of asyncio.to_thread. With those threads, a single read that hangs in a file
system would prevent a pod from stopping.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def run_in_daemon_thread(function: Callable[..., T], *args: Any) -> T:
    """Run `function(*args)` in a daemon thread, and return its result or raise its exception. A cancellation does not
    stop the thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def set_outcome(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]  # without an error there is a result
        else:
            future.set_exception(error)

    def run() -> None:
        result, error_raised = None, None
        try:
            result = function(*args)
        except Exception as error:
            error_raised = error
        # If the process is ending, the loop can already be closed. The call then raises RuntimeError.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(set_outcome, result, error_raised)

    threading.Thread(target=run, name=f"background {function}", daemon=True).start()
    return await future
