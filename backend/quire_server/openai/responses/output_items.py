# SPDX-License-Identifier: Apache-2.0
"""The items of a response (reasoning, message, function calls), and the events from which a client builds these items
in a stream.

An item stays open until an event of another kind arrives. A complete response contains the same items as a stream.
Therefore both use this module.
"""

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from quire_spec.protocol.parsed_output import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)

Document = dict[str, Any]
StreamEvent = tuple[str, Document]
"""A server-sent event: its type, and its other fields without the sequence number."""


class OutputItems:
    """The items that a response contains so far. The last item can still be open."""

    def __init__(self) -> None:
        self.items: list[Document] = []
        self._is_open = False
        self._text: list[str] = []
        self._logprobs: list[Document] = []

    def add(self, event: Event, logprobs: Sequence[Document] = ()) -> Iterator[StreamEvent]:
        """Yield the stream events for an event of the output parser. `logprobs` are the log probabilities of the
        event's text."""
        match event:
            case ContentDelta(text):
                yield from self._open("message", new_message)
                self._text.append(text)
                self._logprobs += logprobs
                yield "response.output_text.delta", {**self._part(), "delta": text, "logprobs": list(logprobs)}
            case ReasoningDelta(text):
                yield from self._open("reasoning", new_reasoning)
                self._text.append(text)
                yield "response.reasoning_text.delta", {**self._part(), "delta": text}
            case ToolCallStart(_, name, call_id):
                yield from self.close()
                yield from self._open("function_call", lambda: new_function_call(name, call_id))
            case ToolCallArguments(_, text):
                self._text.append(text)
                yield "response.function_call_arguments.delta", {**self._place(), "delta": text}

    def close(self, status: str = "completed") -> Iterator[StreamEvent]:
        """Yield the events that end the open item, if there is one."""
        if not self._is_open:
            return
        item, text = self.items[-1], "".join(self._text)
        match item["type"]:
            case "message":
                part = {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}
                fields = {**self._part(), "text": text, "logprobs": self._logprobs}
                yield "response.output_text.done", fields
                yield "response.content_part.done", {**self._part(), "part": part}
                item["content"] = [part]
            case "reasoning":
                part = {"type": "reasoning_text", "text": text}
                yield "response.reasoning_text.done", {**self._part(), "text": text}
                yield "response.content_part.done", {**self._part(), "part": part}
                item["content"] = [part]
            case "function_call":
                fields = {**self._place(), "name": item["name"], "arguments": text}
                yield "response.function_call_arguments.done", fields
                item["arguments"] = text
        item["status"] = status
        self._is_open, self._text, self._logprobs = False, [], []
        yield "response.output_item.done", {"output_index": len(self.items) - 1, "item": item}

    def _open(self, kind: str, new_item: Any) -> Iterator[StreamEvent]:
        """Open a new item, unless the open item is already of this kind."""
        if self._is_open and self.items[-1]["type"] == kind:
            return
        yield from self.close()
        self.items.append(new_item())
        self._is_open = True
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": dict(self.items[-1])}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield "response.content_part.added", {**self._part(), "part": part}
        elif kind == "reasoning":
            yield "response.content_part.added", {**self._part(), "part": {"type": "reasoning_text", "text": ""}}

    def _place(self) -> Document:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _part(self) -> Document:
        return {**self._place(), "content_index": 0}


def new_message() -> Document:
    """Return a message without a text."""
    return {"id": _new_id("msg"), "type": "message", "role": "assistant", "status": "in_progress", "content": []}


def new_reasoning() -> Document:
    """Return a reasoning item without a text."""
    return {"id": _new_id("rs"), "type": "reasoning", "status": "in_progress", "summary": [], "content": []}


def new_function_call(name: str, call_id: str) -> Document:
    """Return a function call without arguments."""
    fields = {"type": "function_call", "status": "in_progress", "call_id": call_id, "name": name, "arguments": ""}
    return {"id": _new_id("fc"), **fields}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
