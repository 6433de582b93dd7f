# SPDX-License-Identifier: Apache-2.0
"""Renders conversations to prompts, in worker processes that may die (render_worker.py).

A conversation that takes too long is rejected. Only the request manager and the frontend calls use this module.
"""

import asyncio
from collections.abc import Callable

import msgspec

from quire_engine.ipc.worker_pool import WorkerDied, WorkerPool, WorkersBusy, WorkerTimeout
from quire_engine.tokenization.chat_template_files import ChatTemplateFiles
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.dataclass_json import to_json
from quire_spec.errors import InvalidArgument, QuireError, Unavailable, error_from_code
from quire_spec.protocol.messages import Conversation

RENDER_TIMEOUT_S = 5.0
"""Rendering a conversation may take this number of seconds. A conversation of 100,000 tokens takes about 0.1 s."""
QUEUE_TIMEOUT_S = 10.0


class ChatRenderer:
    """The renderer of one checkpoint."""

    def __init__(
        self, files: ChatTemplateFiles, tokenizer: Tokenizer, max_chars: int, render_timeout_s: float = RENDER_TIMEOUT_S
    ) -> None:
        """`max_chars` limits the number of characters of a rendered conversation."""
        special = [tokenizer.added_tokens[i] for i in tokenizer.special_token_ids]
        others = [text for i, text in tokenizer.added_tokens.items() if i not in tokenizer.special_token_ids]
        config = {"files": to_json(files), "special_tokens": special, "other_tokens": others, "max_chars": max_chars}
        self.has_template = files.default is not None
        """Whether the checkpoint has a template; an adapter can have its own."""
        self._render_timeout_s = render_timeout_s
        self._workers = WorkerPool("quire_engine.text.render_worker", config, render_timeout_s, QUEUE_TIMEOUT_S)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start the workers in the background; do nothing if they already run or if the checkpoint has no template."""
        if self.has_template:
            self._workers.start()

    def submit(
        self, chat: Conversation, template_file: str | None, on_done: Callable[[str | QuireError], None]
    ) -> None:
        """Render a conversation and pass the result to `on_done` on the event loop."""

        async def run() -> None:
            try:
                result: str | QuireError = await self.render(chat, template_file)
            except QuireError as error:
                result = error
            on_done(result)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def render(self, chat: Conversation, template_file: str | None = None) -> str:
        """Return the text of a conversation, in which control tokens are marked.

        If `template_file` is given, the template in this file is used instead of the checkpoint's template.

        Raises:
            InvalidArgument: the template rejects the conversation, or takes too long.
            Unavailable: no worker is free.
        """
        fields = {name: _decode(getattr(chat, name)) for name in chat.__struct_fields__}
        try:
            answer = await self._workers.ask({**fields, "template_file": template_file})
        except WorkersBusy:
            raise Unavailable("messages: the chat template is busy with other conversations; try again") from None
        except WorkerTimeout:
            raise InvalidArgument(
                f"messages: the chat template takes longer than {self._render_timeout_s:g} s; shorten the conversation"
            ) from None
        except WorkerDied:
            raise InvalidArgument("messages: the chat template failed; shorten the conversation") from None
        if "text" not in answer:
            raise error_from_code(answer["error_code"], answer["error"])
        return str(answer["text"])


def _decode(value: object) -> object:
    return msgspec.msgpack.decode(value) if isinstance(value, msgspec.Raw) else value
