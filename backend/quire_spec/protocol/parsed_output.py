# SPDX-License-Identifier: Apache-2.0
"""Events that a parser finds in the output of a chat: increments of content, reasoning and tool calls.

The text process parses the outputs of requests that have OutputParsing. An OutputDelta contains the events as lists.
The OpenAI front converts the events to chunks of its API.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from quire_spec.errors import Internal


@dataclass(frozen=True, slots=True)
class OutputParsing:
    """Settings for parsing the output of a chat request."""

    tool_choice: str = "none"
    """none: tool calls stay in the text; auto: the model decides; required: at least one tool call; function: a call of
    the function in the field `function`."""
    function: str | None = None
    parallel_tool_calls: bool = True
    """False: all tool calls except the first are dropped."""
    separate_reasoning: bool = True
    """False: the reasoning stays in the text."""


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Increment of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Increment of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Start of a tool call, with its complete name."""

    index: int
    """Index of the tool call within its output, from 0."""
    name: str
    id: str = field(default="", compare=False)
    """Random id of the tool call, in a form that the chat template of the model accepts."""


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """Increment of a tool call's arguments, as a part of their JSON text."""

    index: int
    text: str


Event = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments
_KINDS: Mapping[str, type[Any]] = {
    "content": ContentDelta,
    "reasoning": ReasoningDelta,
    "call": ToolCallStart,
    "arguments": ToolCallArguments,
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete tool call."""

    name: str
    arguments: str
    """Arguments of the tool call as JSON text."""
    id: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """Content, reasoning and tool calls of a complete output."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]


def merge_events(events: Iterable[Event]) -> ParsedOutput:
    """Merge the events of an output into the complete output."""
    content, reasoning = [], []
    calls: list[tuple[ToolCallStart, list[str]]] = []
    for event in events:
        match event:
            case ContentDelta(text):
                content.append(text)
            case ReasoningDelta(text):
                reasoning.append(text)
            case ToolCallStart():
                calls.append((event, []))
            case ToolCallArguments(index, text):
                calls[index][1].append(text)
    tool_calls = tuple(ToolCall(start.name, "".join(parts), start.id) for start, parts in calls)
    return ParsedOutput("".join(content), "".join(reasoning), tool_calls)


def join_neighbours(events: Iterable[Event]) -> list[Event]:
    """Join adjacent events of the same kind, so that a delta has few events."""
    joined: list[Event] = []
    for _, group in groupby(events, lambda event: (type(event), getattr(event, "index", None))):
        run: list[Any] = list(group)
        # Two starts have different indices, so the events of a longer run have texts.
        joined.append(run[0] if len(run) == 1 else replace(run[0], text="".join(event.text for event in run)))
    return joined


def encode_events(events: Iterable[Event]) -> list[list[Any]]:
    """Return the events as lists, for a message."""
    return [_encode_event(event) for event in events]


def decode_events(lists: Sequence[Sequence[Any]]) -> list[Event]:
    """Decode the result of `encode_events`, and join adjacent events of the same kind; raises Internal."""
    try:
        return join_neighbours(_KINDS[kind](*values) for kind, *values in lists)
    except (KeyError, TypeError, ValueError) as error:
        raise Internal(f"not events of an output: {str(lists)[:80]!r}") from error


def _encode_event(event: Event) -> list[Any]:
    match event:
        case ContentDelta(text):
            return ["content", text]
        case ReasoningDelta(text):
            return ["reasoning", text]
        case ToolCallStart(index, name, call_id):
            return ["call", index, name, call_id]
        case ToolCallArguments(index, text):
            return ["arguments", index, text]
