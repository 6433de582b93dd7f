# SPDX-License-Identifier: Apache-2.0
"""Renders conversations to prompts, in worker processes that may die.

Keeps NUM_WORKERS processes (render_worker.py). A worker that takes too long is killed and replaced; its conversation is
rejected, and the other worker serves in the meantime. Only the request manager and the frontend calls use it.
"""

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quire_engine.tokenization.chat_template_files import ChatTemplateFiles
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.errors import InvalidArgument, QuireError, Unavailable, error_from_code

RENDER_TIMEOUT_S = 5.0
"""Time limit of one render. A conversation of 100,000 tokens takes about 0.1 s."""
QUEUE_TIMEOUT_S = 10.0
NUM_WORKERS = 2
_START_TIMEOUT_S = 60.0
_MAX_LINE_BYTES = 256 * 2**20

logger = logging.getLogger(__name__)


class ChatRenderer:
    """The worker processes of one checkpoint."""

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, max_chars: int, render_timeout_s: float = RENDER_TIMEOUT_S
    ) -> None:
        """`max_chars` bounds the text of a conversation."""
        special = [tokenizer.added_tokens[i] for i in tokenizer.special_token_ids]
        others = [text for i, text in tokenizer.added_tokens.items() if i not in tokenizer.special_token_ids]
        config = {"folder": str(folder), "special_tokens": special, "other_tokens": others, "max_chars": max_chars}
        self._config_line = json.dumps(config).encode() + b"\n"
        self._render_timeout_s = render_timeout_s
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._num_workers = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    def from_folder(cls, folder: Path, tokenizer: Tokenizer | None, max_chars: int) -> "ChatRenderer | None":
        """Return the renderer of a checkpoint; None if it has no chat template or no tokenizer."""
        if tokenizer is None or ChatTemplateFiles.from_folder(folder).default is None:
            return None
        return cls(folder, tokenizer, max_chars)

    def start(self) -> None:
        """Start the workers in the background, unless they run."""
        while self._num_workers < NUM_WORKERS:
            self._start_worker()

    def submit(self, chat: Mapping[str, Any], on_done: Callable[[str | QuireError], None]) -> None:
        """Render a conversation and pass the result to `on_done` on the event loop."""

        async def run() -> None:
            try:
                result: str | QuireError = await self.render(chat)
            except QuireError as error:
                result = error
            on_done(result)

        self._spawn(run())

    async def render(self, chat: Mapping[str, Any]) -> str:
        """Return the text of a conversation, with marked control tokens.

        Raises:
            InvalidArgument: the template rejects the conversation, or takes too long.
            Unavailable: no worker is free.
        """
        self.start()
        line = json.dumps(chat).encode() + b"\n"
        try:
            async with asyncio.timeout(QUEUE_TIMEOUT_S):
                worker = await self._idle.get()
        except TimeoutError:
            raise Unavailable("messages: the chat template is busy with other conversations; try again") from None
        try:
            async with asyncio.timeout(self._render_timeout_s):
                answer = await worker.ask(line)
        except TimeoutError:
            logger.warning("chat template took too long, replacing its process limit_s=%g", self._render_timeout_s)
            self._replace(worker)
            raise InvalidArgument(
                f"messages: the chat template takes longer than {self._render_timeout_s:g} s; shorten the conversation"
            ) from None
        except (OSError, ValueError, asyncio.IncompleteReadError):
            logger.warning("process of the chat template died, replacing it")
            self._replace(worker)
            raise InvalidArgument("messages: the chat template failed; shorten the conversation") from None
        except asyncio.CancelledError:
            self._replace(worker)
            raise
        self._idle.put_nowait(worker)
        if "text" not in answer:
            raise error_from_code(answer["error_code"], answer["error"])
        return str(answer["text"])

    def _replace(self, worker: "_Worker") -> None:
        worker.kill()
        self._num_workers -= 1
        self.start()

    def _start_worker(self) -> None:
        self._num_workers += 1
        self._spawn(self._add_worker())

    async def _add_worker(self) -> None:
        worker = None
        try:
            worker = await _Worker.start()
            async with asyncio.timeout(_START_TIMEOUT_S):
                await worker.ask(self._config_line)
            self._idle.put_nowait(worker)
        except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError) as error:
            logger.warning("process of the chat template did not start error=%s", error)
            if worker is not None:
                worker.kill()
            # The next request tries again.
            self._num_workers -= 1

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Worker:
    """One process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        self._process = process
        self._stdin, self._stdout = process.stdin, process.stdout

    @classmethod
    async def start(cls) -> "_Worker":
        """Start a process; raises OSError."""
        return cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "quire_engine.text.render_worker"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_MAX_LINE_BYTES,
            )
        )

    async def ask(self, line: bytes) -> dict[str, Any]:
        """Send a line and return the answer; raises an error if the process ends."""
        self._stdin.write(line)
        await self._stdin.drain()
        answer: dict[str, Any] = json.loads(await self._stdout.readuntil(b"\n"))
        return answer

    def kill(self) -> None:
        """Kill the process."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._stdin.close()
