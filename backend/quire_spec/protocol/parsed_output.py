# SPDX-License-Identifier: Apache-2.0
"""What a parser finds in the output of a chat: content, reasoning and tool calls, as increments.

The text process parses outputs of requests that have OutputParsing, and an OutputDelta carries the events as lists.
Fronts turn them into the chunks of their API.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from quire_spec.errors import Internal


@dataclass(frozen=True, slots=True)
class OutputParsing:
    """How the output of a chat request is parsed."""

    tool_choice: str = "none"
    """none: calls stay in the text; auto: the model decides; required: at least one call; function: a call of
    `function`."""
    function: str | None = None
    parallel_tool_calls: bool = True
    """False: all calls but the first are dropped."""
    separate_reasoning: bool = True
    """False: the reasoning stays in the text."""


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call begins; its name is complete."""

    index: int
    """Counts the calls of an output from 0."""
    name: str
    id: str = field(default="", compare=False)
    """Random, in the form that the chat template of the model accepts."""


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """Part of the arguments of a tool call, as JSON text."""

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
    """A whole tool call."""

    name: str
    arguments: str
    """JSON text."""
    id: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """A whole output."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]


def merge_events(events: Iterable[Event]) -> ParsedOutput:
    """Merge increments to the whole output."""
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
    """Join neighbours of one kind, so that a delta has few events."""
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
    """Decode the result of `encode_events`, with neighbours joined; raises Internal."""
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
