# SPDX-License-Identifier: Apache-2.0
"""POST /v1/responses: OpenAI's Responses API.

The module uses chat completions to generate the output.

A response is returned either as one document or as server-sent events. Responses are not stored.
"""

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from quire_server.openai.chat import ChatCompletions, ChatFields
from quire_server.openai.errors import ApiError
from quire_server.openai.formatter import encode
from quire_server.openai.generation import KEEP_ALIVE, Generation
from quire_server.openai.http.message import EventStream, HttpRequest, Reply, Response
from quire_server.openai.logprobs import chat_logprobs
from quire_server.openai.responses.output_items import OutputItems, StreamEvent
from quire_server.openai.responses.response_request import NOT_STORED, ResponseFields, parse_response_request
from quire_server.openai.text_client import TextClient
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.protocol.messages import OutputDelta
from quire_spec.protocol.parsed_output import ContentDelta, ReasoningDelta, join_neighbours

_FIRST_EVENTS = ("response.created", "response.in_progress")


class Responses:
    """The routes of the Responses API."""

    def __init__(self, client: TextClient, chat: ChatCompletions) -> None:
        self._client = client
        self._chat = chat

    async def create(self, request: HttpRequest) -> Reply:
        """POST /v1/responses: answer an input, in the Responses API."""
        fields, chat_document = parse_response_request(await request.json_object(), request.ignored_fields)
        generation, chat_fields, params = await self._chat.prepare(request, chat_document, "resp_")
        formatter = ResponseFormatter(generation, fields, chat_fields, params)
        if fields.stream:
            return EventStream(formatter.events(self._client))
        return Response(encode(await formatter.document(self._client)))

    async def get(self, request: HttpRequest) -> Reply:
        """Answer GET, POST and DELETE below /v1/responses/ with an error, because responses are not stored."""
        raise ApiError(404, f"response: {request.path_arg[:100]!r} does not exist, because {NOT_STORED}")


class ResponseFormatter:
    """Formats the deltas of one request."""

    def __init__(
        self, generation: Generation, fields: ResponseFields, chat_fields: ChatFields, params: SamplingParams
    ) -> None:
        self._generation = generation
        self._fields = fields
        self._chat_fields = chat_fields
        self._params = params
        self._items = OutputItems()
        self._num_events = 0
        self._is_incomplete = False

    async def document(self, client: TextClient) -> dict[str, Any]:
        """Return the complete response."""
        async with aclosing(self._generation.deltas(client)) as deltas:
            async for batch in deltas:
                for _, delta in batch:
                    list(self._add(delta))
        return self._response(self._end_status())

    async def events(self, client: TextClient) -> AsyncGenerator[bytes, None]:
        """Yield the server-sent events. A chunk contains all events that are ready when it is sent. If an error occurs
        before the first event, this error is raised."""
        is_started = False
        try:
            async with aclosing(self._generation.deltas(client)) as deltas:
                async for batch in deltas:
                    events: list[StreamEvent] = []
                    if not is_started:
                        # The responses in these events do not contain items, because no items have been added yet.
                        events += [(name, {"response": self._response("in_progress")}) for name in _FIRST_EVENTS]
                        is_started = True
                    for _, delta in batch:
                        events += self._add(delta)
                    yield b"".join(map(self._encode, events)) if events else KEEP_ALIVE
        except ApiError as error:
            if not is_started:
                raise
            code = "server_error" if error.status >= 500 else "invalid_prompt"
            failed = self._response("failed") | {"error": {"code": code, "message": error.message}}
            yield self._encode(("response.failed", {"response": failed}))
            return
        status = self._end_status()
        yield self._encode((f"response.{status}", {"response": self._response(status)}))

    def _add(self, delta: OutputDelta) -> Iterator[StreamEvent]:
        """Yield the stream events that result from a delta."""
        events = join_neighbours(delta.parsed) if delta.parsed is not None else [ContentDelta(delta.text)]
        logprobs = self._logprobs(delta)
        for event in events:
            if isinstance(event, ReasoningDelta) and not self._chat_fields.include_reasoning:
                continue
            if not isinstance(event, ContentDelta):
                yield from self._items.add(event)
            elif event.text:
                yield from self._items.add(event, logprobs)
                # If a delta contains several texts, the first one is sent with the log probabilities of all of them.
                logprobs = []
        if delta.finish_reason is not None:
            self._is_incomplete = delta.finish_reason == "length"
            if not self._items.items:
                # Clients expect a message, even an empty one.
                yield from self._items.add(ContentDelta(""))
            yield from self._items.close("incomplete" if self._is_incomplete else "completed")

    def _logprobs(self, delta: OutputDelta) -> list[dict[str, Any]]:
        if delta.logprobs is None or not self._fields.has_logprobs:
            return []
        return list(chat_logprobs(delta.logprobs, self._fields.top_logprobs, False)["content"])

    def _encode(self, event: StreamEvent) -> bytes:
        name, fields = event
        document = {"type": name, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), encode(document))

    def _end_status(self) -> str:
        return "incomplete" if self._is_incomplete else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        fields, generation = self._fields, self._generation
        is_ended = status in ("completed", "incomplete")
        return {
            "id": generation.id,
            "object": "response",
            "created_at": generation.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "max_tool_calls": fields.max_tool_calls,
            "metadata": fields.metadata,
            "model": generation.model,
            "output": self._items.items if is_ended or status == "failed" else [],
            "parallel_tool_calls": fields.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": fields.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": self._params.temperature,
            "text": {"format": fields.text.format or {"type": "text"}},
            "tool_choice": fields.tool_choice,
            "tools": fields.tools,
            "top_logprobs": fields.top_logprobs,
            "top_p": self._params.top_p,
            "truncation": fields.truncation,
            "usage": self._usage() if is_ended else None,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage()
        num_reasoning = sum(choice.num_reasoning_tokens for choice in self._generation.choices)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": usage["total_tokens"],
        }
