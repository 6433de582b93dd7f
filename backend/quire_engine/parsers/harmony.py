# SPDX-License-Identifier: Apache-2.0
"""The output format of gpt-oss (Harmony). An output consists of messages, and each message belongs to a channel.

A message `<|channel|>analysis<|message|>...<|end|>` contains reasoning. A message in the channel `final` contains the
answer. A message in the channel `commentary` that has the recipient `functions.NAME` is a tool call; it ends with
`<|call|>`.
"""

import re
from collections.abc import Iterator, Sequence

from quire_engine.parsers.call_grammar import CallGrammar, Marks, Tool, argument_parts, either
from quire_engine.parsers.lexer import Lexeme
from quire_engine.structured_outputs.composed_constraint import quote
from quire_spec.protocol.parsed_output import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallStart

_MESSAGE, _CHANNEL = "<|message|>", "<|channel|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


class HarmonyFormat:
    """The parser of one output. The prompt ends with `<|start|>assistant`."""

    marks = frozenset((_MESSAGE, _CHANNEL, "<|constrain|>", *_ENDS))

    def __init__(self) -> None:
        self._header: str | None = ""
        """The part of the current message's header that has arrived. None while the body of a message is read."""
        self._body = "content"
        """Kind of the message that is being read: content, reasoning or call."""
        self._num_calls = 0
        self._has_arguments = False

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text is reasoning."""
        return self._header is None and self._body == "reasoning"

    def cut(self) -> None:
        """Do nothing. In this format, marks show where each message begins and ends, so line breaks are never
        dropped."""

    def feed(self, lexeme: Lexeme) -> Iterator[Event]:
        """Take the next lexeme."""
        if lexeme.is_mark:
            if lexeme.text in _ENDS:
                yield from self.finish()
                self._header = ""
            elif lexeme.text == _MESSAGE:
                yield from self._begin_message()
            elif self._header is not None:
                self._header += lexeme.text
            return
        if self._header is not None:
            self._header += lexeme.text
        elif self._body == "call":
            self._has_arguments = True
            yield ToolCallArguments(self._num_calls - 1, lexeme.text)
        else:
            yield ReasoningDelta(lexeme.text) if self._body == "reasoning" else ContentDelta(lexeme.text)

    def _begin_message(self) -> Iterator[Event]:
        header, self._header = self._header or "", None
        recipient = _RECIPIENT.search(header)
        channel = header.rpartition(_CHANNEL)[2].split()
        if recipient is not None:
            self._body, self._has_arguments = "call", False
            yield ToolCallStart(self._num_calls, recipient[1])
            self._num_calls += 1
        else:
            self._body = "reasoning" if channel[:1] == ["analysis"] else "content"

    def finish(self) -> Iterator[Event]:
        """Add empty arguments to a tool call that ended without arguments."""
        if self._header is None and self._body == "call" and not self._has_arguments:
            yield ToolCallArguments(self._num_calls - 1, "{}")


def call_grammar(tools: Sequence[Tool], marks: Marks, parallel: bool) -> CallGrammar:
    """Return the grammar of a call. A call ends the output, so no other call can follow."""
    constrain, message = f'{marks.terminal("<|constrain|>")} "json"', marks.terminal(_MESSAGE)
    calls = (
        f"{quote(f'commentary to=functions.{tool.name} ')} {constrain} {message} @arguments_{i}"
        for i, tool in enumerate(tools)
    )
    return CallGrammar(_CHANNEL, either(calls), None, (), argument_parts(tools))


def messages_before_answer(marks: Marks) -> str:
    """Return the grammar expression for the messages that can come before an answer or a call, such as reasoning."""
    channel, message = marks.terminal(_CHANNEL), marks.terminal(_MESSAGE)
    end = f'{marks.terminal("<|end|>")} {marks.terminal("<|start|>")} "assistant"'
    return f'({channel} ("analysis" | "commentary") {message} TEXT {end})*'


def answer_message(marks: Marks, text: str) -> str:
    """Return the grammar expression for a message that contains an answer. `text` is the expression for the answer."""
    return f'{marks.terminal(_CHANNEL)} "final" {marks.terminal(_MESSAGE)} {text}'
