# SPDX-License-Identifier: Apache-2.0
"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API.

The module uses chat completions to generate the output. A message is returned either as one document or as server-sent
events.
"""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from quire_server.openai.chat import ChatCompletions, ChatFields
from quire_server.openai.errors import ApiError
from quire_server.openai.formatter import encode
from quire_server.openai.generation import Generation
from quire_server.openai.http.message import EventStream, HttpRequest, Reply, Response
from quire_server.openai.messages.content_blocks import ContentBlocks, event_bytes
from quire_server.openai.messages.message_request import parse_message_request
from quire_server.openai.text_client import TextClient
from quire_spec.protocol.messages import OutputDelta
from quire_spec.protocol.parsed_output import ContentDelta, ReasoningDelta, join_neighbours
from quire_spec.protocol.results import Tokenized

_PING = event_bytes("ping", {})


class Messages:
    """The routes of the Messages API."""

    def __init__(self, client: TextClient, chat: ChatCompletions) -> None:
        self._client = client
        self._chat = chat

    async def create(self, request: HttpRequest) -> Reply:
        """POST /v1/messages: answer a conversation, in Anthropic's Messages API."""
        document = await request.json_object()
        if document.get("max_tokens") is None:
            raise ApiError(400, "max_tokens: missing; give the maximum number of output tokens")
        generation, fields = await self._prepare(request, document)
        formatter = MessageFormatter(generation, fields)
        if fields.stream:
            return EventStream(formatter.events(self._client))
        return Response(encode(await formatter.document(self._client)))

    async def count_tokens(self, request: HttpRequest) -> Reply:
        """POST /v1/messages/count_tokens: return the number of tokens of the prompt, which can be too long."""
        generation, _ = await self._prepare(request, await request.json_object())
        if generation.prompts[0].images:
            [document] = await generation.render(self._client)
            return Response(encode({"input_tokens": len(document["token_ids"])}))
        args = {"chat": generation.prompts[0].chat, "model": generation.engine_model}
        tokenized = await self._client.call("tokenize", Tokenized, args | {"api_key_name": request.api_key_name})
        return Response(encode({"input_tokens": len(tokenized.tokens)}))

    async def _prepare(self, request: HttpRequest, document: dict[str, Any]) -> tuple[Generation, ChatFields]:
        has_budget = await self._client.has_thinking_budget() if "thinking" in document else False
        _, chat_document = parse_message_request(document, request.ignored_fields, has_budget)
        generation, fields, _ = await self._chat.prepare(request, chat_document, "msg_")
        return generation, fields


class MessageFormatter:
    """Formats the deltas of one request."""

    def __init__(self, generation: Generation, fields: ChatFields) -> None:
        self._generation = generation
        self._fields = fields
        self._content = ContentBlocks()
        self._end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    async def document(self, client: TextClient) -> dict[str, Any]:
        """Return the complete message."""
        async with aclosing(self._generation.deltas(client)) as deltas:
            async for batch in deltas:
                for _, delta in batch:
                    list(self._add(delta))
        return self._message()

    async def events(self, client: TextClient) -> AsyncGenerator[bytes, None]:
        """Yield the server-sent events. A chunk contains all events that are ready when it is sent."""
        is_started = False
        async with aclosing(self._generation.deltas(client)) as deltas:
            async for batch in deltas:
                events = [event for _, delta in batch for event in self._add(delta)] if batch else [_PING]
                if not is_started:
                    is_started = True
                    start = self._message() | {"content": [], "stop_reason": None, "stop_sequence": None}
                    start["usage"] |= {"output_tokens": 0}
                    events.insert(0, event_bytes("message_start", {"message": start}))
                if events:
                    yield b"".join(events)
        yield event_bytes("message_delta", {"delta": self._end, "usage": self._usage()}) + event_bytes(
            "message_stop", {}
        )

    def _add(self, delta: OutputDelta) -> Iterator[bytes]:
        """Yield the stream events that result from a delta."""
        events = join_neighbours(delta.parsed) if delta.parsed is not None else [ContentDelta(delta.text)]
        for event in events:
            if isinstance(event, ContentDelta) and not event.text:
                continue
            if not isinstance(event, ReasoningDelta) or self._fields.include_reasoning:
                yield from self._content.add(event)
        if delta.finish_reason is not None:
            if not self._content.blocks:
                # Clients expect a text, even an empty one.
                yield from self._content.add(ContentDelta(""))
            yield from self._content.close()
            self._end = self._end_of(delta)

    def _end_of(self, delta: OutputDelta) -> dict[str, Any]:
        sequence = delta.stop_reason if isinstance(delta.stop_reason, str) else None
        if delta.finish_reason == "length":
            limit = self._generation.params.max_tokens
            is_full = limit is None or delta.num_output_tokens < limit
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif self._content.has_tool_use:
            reason = "tool_use"
        else:
            reason = "end_turn" if sequence is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._generation.id,
            "type": "message",
            "role": "assistant",
            "model": self._generation.model,
            "content": self._content.blocks,
            **self._end,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        """Return the usage so far. As in Anthropic's API, input_tokens excludes the tokens that were cached."""
        usage = self._generation.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }
