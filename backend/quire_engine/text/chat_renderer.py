# SPDX-License-Identifier: Apache-2.0
"""Renders conversations to prompts, in worker processes that may die (render_worker.py).

A conversation that takes too much CPU time is rejected. The request processor uses this module.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from weakref import WeakValueDictionary

from quire_engine.ipc.worker_pool import NUM_WORKERS, WorkerDied, WorkerPool, WorkersBusy, WorkerTimeout
from quire_engine.requests.processor import decode_conversation
from quire_engine.tokenization.chat_template_files import ChatTemplateFiles
from quire_engine.tokenization.conversation_renderer import split_added_tokens
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.dataclass_json import to_json
from quire_spec.errors import InvalidArgument, Unavailable, error_from_code
from quire_spec.protocol.messages import Conversation

CPU_LIMIT_S = 5.0
"""Rendering a conversation may take this number of seconds of CPU time. A conversation of 100,000 tokens takes about
0.1 s."""
QUEUE_TIMEOUT_S = 10.0


class ChatRenderer:
    """The renderer of one checkpoint."""

    def __init__(
        self, files: ChatTemplateFiles, tokenizer: Tokenizer, max_chars: int, cpu_limit_s: float = CPU_LIMIT_S
    ) -> None:
        """`max_chars` limits the number of characters of a rendered conversation."""
        special, others = split_added_tokens(tokenizer)
        config = {"files": to_json(files), "special_tokens": special, "other_tokens": others, "max_chars": max_chars}
        self.has_template = files.default is not None
        """Whether the checkpoint has a template; an adapter can have its own."""
        self._cpu_limit_s = cpu_limit_s
        self._shares: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """One semaphore for each template of an adapter that is in use. The conversations own it."""
        self._workers = WorkerPool("quire_engine.text.render_worker", config, cpu_limit_s, QUEUE_TIMEOUT_S)

    def start(self) -> None:
        """Start the workers in the background; do nothing if they already run or if the checkpoint has no template."""
        if self.has_template:
            self._workers.start()

    async def aclose(self) -> None:
        """End the workers."""
        await self._workers.aclose()

    async def render(self, chat: Conversation, template: str | None) -> str:
        """Return the text of a conversation, in which control tokens are marked.

        If `template` is given, it is the path of a file whose template is used instead of the checkpoint's template.

        Raises:
            InvalidArgument: the template rejects the conversation, or takes too much CPU time.
            Unavailable: no worker is free, or the machine is busy.
        """
        message = {**decode_conversation(chat), "template_file": template}
        try:
            async with self._share(template):
                try:
                    answer = await self._workers.ask(message)
                except WorkerDied:
                    # The kernel can kill a worker because of another conversation, so the conversation gets one more
                    # attempt.
                    answer = await self._workers.ask(message)
        except (WorkersBusy, TimeoutError):
            raise Unavailable("messages: the server is too busy to render the conversation; try again") from None
        except WorkerTimeout:
            raise InvalidArgument(
                f"messages: the chat template takes more than {self._cpu_limit_s:g} s of CPU time; shorten the "
                "conversation"
            ) from None
        except WorkerDied:
            raise Unavailable("messages: the process that renders the chat template ended twice; try again") from None
        if "text" not in answer:
            raise error_from_code(answer["error_code"], answer["error"])
        return str(answer["text"])

    @contextlib.asynccontextmanager
    async def _share(self, template: str | None) -> AsyncIterator[None]:
        """Limit how many workers the template of one adapter uses at a time, so that a slow template leaves a worker to
        all others. Raises TimeoutError if the adapter has no free share in time."""
        if template is None:
            yield
            return
        share = self._shares.get(template)
        if share is None:
            share = self._shares[template] = asyncio.Semaphore(NUM_WORKERS - 1)
        async with asyncio.timeout(QUEUE_TIMEOUT_S):
            await share.acquire()
        try:
            yield
        finally:
            share.release()
