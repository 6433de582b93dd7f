# SPDX-License-Identifier: Apache-2.0
"""TextServer: where frontends and supervisors come to the text process.

asyncio on one thread: thousands of small messages, none of which may wait for another. What takes longer than a
millisecond (tokenizing a long prompt, rendering metrics) runs in a thread and comes back as a callback. Requests are
the desk's business; here is only who is connected, who reads, and what a message is passed to.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire_engine.connection import Connection, listen
from quire_engine.desk import Desk
from quire_engine.generation import Generation
from quire_engine.metrics import Metrics
from quire_engine.pace import Pace
from quire_engine.port import Port
from quire_engine.text import Tokenizer
from quire_spec.dataclass_json import from_json
from quire_spec.documents.adapter_catalog import AdapterLimits
from quire_spec.documents.pod_status import utc_now
from quire_spec.errors import Internal, InvalidArgument, QuireError, error_from_code
from quire_spec.protocol.messages import (
    CancelRequests,
    ControlRequest,
    ControlResponse,
    GenerateRequest,
    IpcMessage,
    RequestRejected,
)

_INLINE_CHARS = 2048
"""Prompts up to this are tokenized at once: about half a millisecond, and a thread costs a tenth of one."""

_Tokens = tuple[list[int], list[list[int]]]
"""Of a prompt, and of the words that its output must not have."""

_SUBMIT_HEAD = re.compile(rb'\["GenerateRequest",(\d{1,18}),')

_log = logging.getLogger("quire.text")


class TextServer:
    """Serves frontends and supervisors; the handler of their connections."""

    def __init__(
        self, desk: Desk, tokenizer: Tokenizer | None, metrics: Metrics, max_frame_bytes: int, pace: Pace
    ) -> None:
        self._desk = desk
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._max_frame_bytes = max_frame_bytes
        self._pace = pace
        self._ports: dict[Connection, Port] = {}
        self._started_at = utc_now()
        # Two: one very long prompt does not hold up all the others, and steps keep most of the processor.
        self._pool = ThreadPoolExecutor(2, "tokenize")
        self._calls: dict[str, Callable[[Connection, ControlRequest], None]] = {
            "set_adapters": self._set_adapters,
            "status": self._status,
            "metrics": self._render_metrics,
            "drain": self._drain,
        }

    async def listen(self, path: Path) -> None:
        """Begin to accept connections."""
        self._server = await listen(path, lambda: Connection(self, max_frame_bytes=self._max_frame_bytes))

    def on_ready(self, connection: Connection) -> None:
        """Handler: a peer says who it is."""
        hello = connection.peer
        assert hello is not None, "a dialled connection"
        if hello.role == "frontend":
            self._ports[connection] = Port(connection, hello, self._metrics, self._pace)
        elif hello.role != "supervisor":
            raise Internal(f"role {hello.role!r} has no business here")

    def on_message(self, connection: Connection, message: IpcMessage) -> None:
        """Handler: a frontend or a supervisor wants something."""
        port = self._ports.get(connection)
        if port is not None and isinstance(message, GenerateRequest):
            self._submit(port, message)
        elif port is not None and isinstance(message, CancelRequests):
            self._desk.cancel(port, message.ids)
        elif port is not None and isinstance(message, RequestRejected):
            self._metrics.refused(error_from_code(message.code, "").code)
        elif port is None and isinstance(message, ControlRequest):
            self._answer(connection, message)
        else:
            raise Internal(f"unexpected {type(message).__name__}")

    def on_oversize(self, connection: Connection, head: bytes, length: int) -> None:
        """Handler: a request that was too long to be read."""
        port, match = self._ports.get(connection), _SUBMIT_HEAD.match(head)
        if port is None or match is None:
            raise Internal(f"message of {length} bytes: {head[:80]!r}")
        self._desk.refuse_oversize(port, int(match[1]), length)

    def on_resumed(self, connection: Connection) -> None:
        """Handler: a frontend that was behind has caught up."""
        if port := self._ports.get(connection):
            port.flush()

    def on_lost(self, connection: Connection) -> None:
        """Handler: a peer is gone."""
        if (port := self._ports.pop(connection, None)) is None:
            return
        num_open = self._desk.leave(port)
        hello = port.hello
        _log.info("frontend gone model=%s pid=%s num_open=%d", hello.model, hello.pid, num_open)

    def _submit(self, port: Port, submit: GenerateRequest) -> None:
        generation = self._desk.submit(port, submit)
        if generation is None:
            return
        # A bad word is tokenized twice, with a space before it and without.
        num_chars = len(submit.prompt or "") + 2 * sum(map(len, generation.params.bad_words))
        if num_chars <= _INLINE_CHARS:
            self._tokenize_now(generation, submit)
        else:
            loop = asyncio.get_running_loop()
            future = loop.run_in_executor(self._pool, self._tokenize, generation, submit)
            future.add_done_callback(lambda done: self._tokenized(generation, done))

    def _tokenize_now(self, generation: Generation, submit: GenerateRequest) -> None:
        try:
            tokens = self._tokenize(generation, submit)
        except QuireError as error:
            self._desk.fail(generation, error)
        else:
            self._desk.tokenized(generation, *tokens)

    def _tokenize(self, generation: Generation, submit: GenerateRequest) -> _Tokens:
        assert self._tokenizer is not None
        # A request may be cancelled while its prompt waits for a thread.
        if not self._desk.is_open(generation):
            return [], []
        token_ids = submit.prompt_token_ids
        if token_ids is None:
            assert submit.prompt is not None
            token_ids = self._tokenizer.encode(submit.prompt, self._desk.max_prompt_tokens(generation))
        bad_words = generation.params.bad_words
        return token_ids, self._tokenizer.bad_word_ids(bad_words) if bad_words else []

    def _tokenized(self, generation: Generation, done: asyncio.Future[_Tokens]) -> None:
        error = done.exception()
        if isinstance(error, QuireError):
            self._desk.fail(generation, error)
        else:
            self._desk.tokenized(generation, *done.result())

    def _answer(self, connection: Connection, call: ControlRequest) -> None:
        try:
            if call.method not in self._calls:
                raise InvalidArgument(f"method {call.method!r} is unknown; known are {', '.join(self._calls)}")
            self._calls[call.method](connection, call)
        except QuireError as error:
            connection.send(ControlResponse(call.id, None, error.code, str(error)))

    def _set_adapters(self, connection: Connection, call: ControlRequest) -> None:
        adapters = call.args.get("adapters")
        if not isinstance(adapters, Mapping) or not all(isinstance(digest, str) for digest in adapters.values()):
            raise InvalidArgument(f"set_adapters: adapters must map names to digests, found {str(adapters)[:80]!r}")
        limits = call.args.get("limits", {})
        if not isinstance(limits, Mapping):
            raise InvalidArgument(f"set_adapters: limits must map names to limits, found {str(limits)[:80]!r}")
        parsed = {name: from_json(AdapterLimits, each, f"limits.{name}") for name, each in limits.items()}
        self._desk.set_adapters(adapters, parsed)
        _log.info("adapters set count=%d", len(adapters))
        connection.send(ControlResponse(call.id, {}))

    def _status(self, connection: Connection, call: ControlRequest) -> None:
        connection.send(ControlResponse(call.id, {"started_at": self._started_at, **self._desk.status()}))

    def _drain(self, connection: Connection, call: ControlRequest) -> None:
        _log.info("draining num_open=%d", self._desk.num_open)
        self._desk.drain(lambda: connection.send(ControlResponse(call.id, {})))

    def _render_metrics(self, connection: Connection, call: ControlRequest) -> None:
        self._desk.note_adapters()
        # Not in the pool: a scrape does not wait for prompts.
        future = asyncio.get_running_loop().run_in_executor(None, self._metrics.exposition)
        future.add_done_callback(lambda done: connection.send(ControlResponse(call.id, {"text": done.result()})))
