# SPDX-License-Identifier: Apache-2.0
"""Base of the formatters of completions and of chat completions. It defines the order of events, and adds the usage and
the fields that all responses share."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from quire_server.openai.generation import DONE, KEEP_ALIVE, Choice, Deltas, Generation
from quire_server.version import VERSION
from quire_spec.protocol.messages import OutputDelta

encode = msgspec.json.Encoder().encode
SYSTEM_FINGERPRINT = f"quire-{VERSION}"
"""Value of the field system_fingerprint. As in vLLM, the field is part of complete responses, and of the last event of
each choice."""


class Formatter(ABC):
    """Formats the deltas of one request."""

    def __init__(self, generation: Generation, document_type: str) -> None:
        """`document_type` is the value of the field `object` in the response."""
        self.generation = generation
        options = generation.fields.stream_options
        self._include_usage = options is not None and options.include_usage
        self.continuous_usage = options is not None and options.include_usage and options.continuous_usage_stats
        self.envelope = {
            "id": generation.id,
            "object": document_type,
            "created": generation.created,
            "model": generation.model,
        }

    async def document(self, deltas: Deltas) -> bytes:
        """Return the complete response."""
        final_deltas: dict[int, OutputDelta] = {}
        async with aclosing(deltas):
            async for batch in deltas:
                final_deltas |= {choice.index: delta for choice, delta in batch}
        choices = [self.complete_choice(choice, final_deltas[choice.index]) for choice in self.generation.choices]
        document: dict[str, Any] = {**self.envelope, "system_fingerprint": SYSTEM_FINGERPRINT, "choices": choices}
        if (kv_transfer_params := self.generation.kv_transfer_response) is not None:
            document["kv_transfer_params"] = kv_transfer_params
        return encode({**document, "usage": self.usage(), **self.prompt_fields()})

    async def events(self, deltas: Deltas) -> AsyncGenerator[bytes, None]:
        """Yield the server-sent events. A chunk contains all events that are ready when it is sent."""
        async with aclosing(deltas):
            async for batch in deltas:
                chunk = b"".join([self.event(choice, delta) for choice, delta in batch]) if batch else KEEP_ALIVE
                if chunk:
                    yield chunk
        if self._include_usage:
            yield b"data: %b\n\n" % encode({**self.envelope, "choices": [], "usage": self.usage()})
        yield DONE

    def encode_event(
        self, choice_document: dict[str, Any], other_fields: Mapping[str, Any] | None = None, has_tokens: bool = True
    ) -> bytes:
        """Return an event that contains one choice. An event that comes before all tokens has no tokens in its
        usage."""
        document: dict[str, Any] = {**self.envelope, **(other_fields or {}), "choices": [choice_document]}
        if choice_document["finish_reason"] is not None:
            document["system_fingerprint"] = SYSTEM_FINGERPRINT
        if self.continuous_usage:
            document["usage"] = usage = self.usage()
            if not has_tokens:
                usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return b"data: %b\n\n" % encode(document)

    def usage(self) -> dict[str, Any]:
        """Return the usage so far."""
        return self.generation.usage()

    def prompt_fields(self) -> dict[str, Any]:
        """Return fields of the prompt for the top level of a complete response."""
        return {}

    @abstractmethod
    def complete_choice(self, choice: Choice, delta: OutputDelta) -> dict[str, Any]:
        """Return a choice of a complete response."""

    @abstractmethod
    def event(self, choice: Choice, delta: OutputDelta) -> bytes:
        """Return the events for a delta; return b"" if the delta has no content."""
