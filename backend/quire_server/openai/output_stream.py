# SPDX-License-Identifier: Apache-2.0
"""The output deltas of one HTTP request. The HTTP request runs one or several requests in the text process.

The stream buffers deltas that the client has not read. The size of the buffer is limited. If the client reads too
slowly, its request fails. If the client wants several tokens per event, the stream merges deltas. This module does not
use HTTP, and does not know the format of a response.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from quire_server.openai.errors import ApiError, error_from_delta
from quire_server.openai.text_client import TextClient
from quire_spec.protocol.messages import GenerateRequest, OutputDelta, merge_deltas

MAX_PENDING_TOKENS = 16384
"""Maximum number of output tokens that are buffered for a streamed HTTP request. Stubs have the same limit."""


class OutputStream:
    """The requests in the text process that belong to one HTTP request. It is used as a context manager. When the
    context ends, all requests that are not finished are cancelled."""

    def __init__(self, client: TextClient, requests: Sequence[GenerateRequest], stream_interval: int = 1) -> None:
        """In a stream, a delta contains `stream_interval` tokens. The first token and the end of an output are returned
        without waiting for more tokens."""
        self._client = client
        self._requests: Sequence[GenerateRequest] = requests
        self._index_by_id = {request.id: i for i, request in enumerate(requests)}
        self._pending: list[tuple[int, OutputDelta]] = []
        self._num_pending_tokens = 0
        self._stream_interval = stream_interval
        self._collected: dict[tuple[int, int], _CollectedDeltas] = {}
        """Deltas of each output, by the ids of the request and of the output, that are too short to be returned."""
        self._num_open = len(requests)
        self._is_streamed = any(request.stream for request in requests)
        self._error: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __enter__(self) -> Self:
        for request in self._requests:
            self._client.submit(request, self.push)
        # Prompts can be large, and a stream can take minutes.
        self._requests = ()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.cancel(list(self._index_by_id))

    def push(self, delta: OutputDelta) -> None:
        """Accept a delta from the text process."""
        if delta.error_code is not None:
            self._fail(error_from_delta(delta))
            return
        self._num_open -= delta.final
        if self._is_streamed:
            if self._stream_interval > 1:
                outputs = self._collected.setdefault((delta.id, delta.index), _CollectedDeltas())
                if (merged := outputs.add(delta, self._stream_interval)) is None:
                    return
                delta = merged
            self._num_pending_tokens += len(delta.token_ids)
            if self._num_pending_tokens > MAX_PENDING_TOKENS:
                self._pending.clear()
                self._fail(
                    ApiError(503, f"response: the client reads too slowly, {MAX_PENDING_TOKENS} tokens are unsent")
                )
                return
        self._pending.append((self._index_by_id[delta.id], delta))
        self._wake()

    async def next(self, timeout_s: float) -> list[tuple[int, OutputDelta]]:
        """Return the new deltas, each with the index of its request. If no delta arrives within `timeout_s` seconds,
        return an empty list.

        Raises:
            ApiError: one of the requests failed.
        """
        if not self._pending and self._error is None:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(timeout_s, self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        deltas, self._pending = self._pending, []
        self._num_pending_tokens = 0
        if not deltas and self._error is not None:
            raise self._error
        return deltas

    @property
    def is_complete(self) -> bool:
        """True if all requests have ended and every delta was returned."""
        return not self._num_open and not self._pending and self._error is None

    def _fail(self, error: ApiError) -> None:
        if self._error is None:
            self._error = error
            self._client.cancel(list(self._index_by_id))
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(slots=True)
class _CollectedDeltas:
    """Successive deltas of one output."""

    deltas: list[OutputDelta] = field(default_factory=list)
    num_tokens: int = 0
    is_first: bool = True
    """True until the first delta was returned."""

    def add(self, delta: OutputDelta, num_wanted_tokens: int) -> OutputDelta | None:
        """Add a delta. Return the merged deltas if they have enough tokens, or if they are the start or the end of the
        output."""
        self.deltas.append(delta)
        self.num_tokens += len(delta.token_ids)
        if not self.is_first and delta.finish_reason is None and self.num_tokens < num_wanted_tokens:
            return None
        merged = merge_deltas(self.deltas)
        self.deltas, self.num_tokens, self.is_first = [], 0, False
        return merged
