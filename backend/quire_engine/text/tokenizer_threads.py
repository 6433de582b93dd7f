# SPDX-License-Identifier: Apache-2.0
"""Runs the tokenizer without blocking the event loop: long texts are processed in a thread."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_MAX_INLINE_CHARS = 2048
"""A text that has at most this number of characters is processed on the event loop, which takes about 0.5 ms. A longer
text is processed in a thread, which costs 0.1 ms.
"""

_NUM_THREADS = 2
"""With two threads, one very long prompt does not delay all others. More threads would take cores away from an engine
on the same CPU."""

_T = TypeVar("_T")


class TokenizerThreads:
    """The threads for long texts."""

    def __init__(self) -> None:
        self._thread_pool = ThreadPoolExecutor(_NUM_THREADS, "tokenize")

    async def run(self, function: Callable[[], _T], num_chars: int) -> _T:
        """Call a function of the tokenizer for a text of `num_chars` characters. Long texts are processed in a thread.

        If the caller is cancelled while the text waits for a thread, the function is not called.
        """
        if num_chars <= _MAX_INLINE_CHARS:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._thread_pool, function)
