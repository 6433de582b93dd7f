# SPDX-License-Identifier: Apache-2.0
"""The content blocks of a message (thinking, text, tool use), and the events from which a client builds these blocks in
a stream.

A block stays open until an event of another kind arrives. A complete message contains the same blocks as a stream.
Therefore both use this module.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from quire_server.openai.formatter import encode
from quire_spec.protocol.parsed_output import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallStart

Document = dict[str, Any]

_DELTAS = {"text": b"text_delta", "thinking": b"thinking_delta", "tool_use": b"input_json_delta"}
_DELTA_FIELDS = {"text": b"text", "thinking": b"thinking", "tool_use": b"partial_json"}


class ContentBlocks:
    """The blocks that a message contains so far. The last block can still be open."""

    def __init__(self) -> None:
        self.blocks: list[Document] = []
        self._text: list[str] = []
        self._kind = ""
        """Type of the open block; empty if no block is open."""
        self._prefix = b""
        """The part of an event of the open block that does not change."""

    @property
    def has_tool_use(self) -> bool:
        """True if the model has called a tool."""
        return any(block["type"] == "tool_use" for block in self.blocks)

    def add(self, event: Event) -> Iterator[bytes]:
        """Yield the encoded stream events for an event of the output parser."""
        match event:
            case ContentDelta(text):
                if self._kind != "text":
                    yield from self._open({"type": "text", "text": ""})
                yield self._delta(text)
            case ReasoningDelta(text):
                if self._kind != "thinking":
                    yield from self._open({"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta(text)
            case ToolCallStart(_, name, call_id):
                yield from self._open({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case ToolCallArguments(_, text):
                yield self._delta(text)

    def close(self) -> Iterator[bytes]:
        """Yield the event that ends the open block, if there is one."""
        if not self._kind:
            return
        text, block = "".join(self._text), self.blocks[-1]
        if self._kind == "tool_use":
            block["input"] = _input(text)
        else:
            block[self._kind] = text
        self._kind, self._text = "", []
        yield event_bytes("content_block_stop", {"index": len(self.blocks) - 1})

    def _open(self, block: Document) -> Iterator[bytes]:
        yield from self.close()
        index = len(self.blocks)
        self.blocks.append(block)
        kind = self._kind = str(block["type"])
        yield event_bytes("content_block_start", {"index": index, "content_block": block})
        self._prefix = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
            % (index, _DELTAS[kind], _DELTA_FIELDS[kind])
        )

    def _delta(self, text: str) -> bytes:
        self._text.append(text)
        return b"%b%b}}\n\n" % (self._prefix, encode(text))


def event_bytes(name: str, fields: Document) -> bytes:
    """Return an encoded event."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode({"type": name, **fields}))


def _input(text: str) -> Document:
    """Return the input of a tool. If the output ended inside of it, or if the model did not write an object, it is
    empty."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {}
