# SPDX-License-Identifier: Apache-2.0
"""Events that a parser finds in the output of a chat.

An event is a new part of the content, of the reasoning or of a tool call.

If a request has an OutputParsing, the text process parses its outputs. An OutputDelta contains the events. The OpenAI
front converts them to chunks of its API.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import msgspec


class OutputParsing(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Settings for how the output of a chat request is parsed."""

    tool_choice: Literal["none", "auto", "required", "function"] = "none"
    """Decides how tool calls are treated.

    With none, tool calls are left in the text. With auto, the model decides whether it calls tools. With required, the
    output contains at least one tool call. With function, the output contains a call of the function that the field
    `function` names.
    """
    function: str | None = None
    parallel_tool_calls: bool = True
    """If false, only the first tool call is kept."""
    separate_reasoning: bool = True
    """If false, the reasoning is left in the text."""


class ContentDelta(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=1):
    """New part of the text of the answer."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=2):
    """New part of the reasoning before the answer."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=3):
    """Start of a tool call. It contains the complete name of the function."""

    index: int
    """Index of the tool call within its output, counted from 0."""
    name: str
    id: str = ""
    """Random id of the tool call. It has a form that the chat template of the model accepts."""


class ToolCallArguments(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=4):
    """New part of the JSON text with the arguments of a tool call."""

    index: int
    text: str


Event = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete tool call."""

    name: str
    arguments: str
    """Arguments of the tool call as JSON text."""
    id: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """The content, the reasoning and the tool calls of a complete output."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]


def merge_events(events: Iterable[Event]) -> ParsedOutput:
    """Combine all events of an output into the complete output."""
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
    """Combine adjacent events of the same kind, so that a delta contains fewer events."""
    joined: list[Event] = []
    for _, group in groupby(events, lambda event: (type(event), getattr(event, "index", None))):
        run: list[Any] = list(group)
        # Two starts of tool calls have different indices, so a run of several events contains no start. All its events
        # have texts.
        joined.append(
            run[0] if len(run) == 1 else msgspec.structs.replace(run[0], text="".join(event.text for event in run))
        )
    return joined
