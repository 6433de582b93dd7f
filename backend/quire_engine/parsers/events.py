# SPDX-License-Identifier: Apache-2.0
"""What a parser finds in an output: content, reasoning and tool calls, as increments. All parsers emit these."""

from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """Part of the arguments of a tool call, as JSON text."""

    index: int
    text: str


Event = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole tool call."""

    name: str
    arguments: str
    """JSON text."""


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """A whole output."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]


def merge(events: list[Event]) -> ParsedOutput:
    """Join increments to the whole output."""
    calls: list[tuple[str, list[str]]] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            calls.append((event.name, []))
        elif isinstance(event, ToolCallArguments):
            calls[event.index][1].append(event.text)
    return ParsedOutput(
        "".join(event.text for event in events if isinstance(event, ContentDelta)),
        "".join(event.text for event in events if isinstance(event, ReasoningDelta)),
        tuple(ToolCall(name, "".join(parts)) for name, parts in calls),
    )
