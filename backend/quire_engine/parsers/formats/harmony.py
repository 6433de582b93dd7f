# SPDX-License-Identifier: Apache-2.0
"""The output format of gpt-oss (Harmony). An output consists of messages, and each message belongs to a channel.

A message `<|channel|>analysis<|message|>...<|end|>` contains reasoning. A message in the channel `final` contains the
answer. A message in the channel `commentary` that has the recipient `functions.NAME` is a tool call; it ends with
`<|call|>`. Some models omit `functions.`, or write text without any mark.
"""

import re
from collections.abc import Collection, Iterator, Sequence

from quire_engine.parsers.call_grammar import CallGrammar, Marks, argument_parts, either
from quire_engine.parsers.lexer import Lexeme
from quire_engine.parsers.tool import Tool
from quire_engine.structured_outputs.composed_constraint import quote
from quire_spec.protocol.parsed_output import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallStart

_MESSAGE, _CHANNEL, _NAMESPACE = "<|message|>", "<|channel|>", "functions."
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"\s*\w*")
_TYPE = re.compile(r"<\|constrain\|>\s*\w*")
_OTHER_RECIPIENTS = frozenset({"assistant", "user", "system", "developer", "browser", "python", "container"})
"""Recipients of messages that are not for the client, up to the first dot. They are dropped, as in vLLM."""


class HarmonyFormat:
    """The parser of one output. The prompt ends with `<|start|>assistant`."""

    marks = frozenset((_MESSAGE, _CHANNEL, "<|constrain|>", *_ENDS))

    def __init__(self, known_names: Collection[str] | None = None) -> None:
        """`known_names` are the names of the tools, or None if they are not known."""
        self._known_names = known_names or ()
        self._header: str | None = ""
        """The part of the current message's header that has arrived. None while the body of a message is read."""
        self._is_first = True
        """True while the first message is read. Only its header can be text: the model did not write a header."""
        self._body = "content"
        """Kind of the message that is being read: content, reasoning, call or other."""
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
                self._header, self._is_first = "", False
            elif lexeme.text == _MESSAGE:
                yield from self._begin_message()
            elif self._header is not None:
                self._header += lexeme.text
            return
        if self._header is not None:
            self._header += lexeme.text
        else:
            yield from self._write(lexeme.text)

    def _write(self, text: str) -> Iterator[Event]:
        """Emit text of a message."""
        if self._body == "call":
            self._has_arguments = True
            yield ToolCallArguments(self._num_calls - 1, text)
        elif self._body != "other":
            yield ReasoningDelta(text) if self._body == "reasoning" else ContentDelta(text)

    def _begin_message(self) -> Iterator[Event]:
        header, self._header = self._header or "", None
        recipient = _RECIPIENT.search(header)
        name = "" if recipient is None else recipient[1]
        channel = header.rpartition(_CHANNEL)[2].split()
        if name and (name in self._known_names or name.partition(".")[0] not in _OTHER_RECIPIENTS):
            self._body, self._has_arguments = "call", False
            yield ToolCallStart(self._num_calls, name if name in self._known_names else name.removeprefix(_NAMESPACE))
            self._num_calls += 1
        else:
            self._body = "other" if name else "reasoning" if channel[:1] == ["analysis"] else "content"

    def finish(self) -> Iterator[Event]:
        """Add empty arguments to a tool call that ended without arguments. Emit the text of a message that has no
        body, because some models omit the marks before it."""
        if self._header is not None:
            _, channel, text = _TYPE.sub("", self._header).rpartition(_CHANNEL)
            if channel and (name := _CHANNEL_NAME.match(text)) is not None:
                channel, text = channel + name[0], text[name.end() :].lstrip()
            if text.strip() and (channel or self._is_first) and not _RECIPIENT.search(text):
                self._header = channel
                yield from self._begin_message()
                yield from self._write(text)
        elif self._body == "call" and not self._has_arguments:
            yield ToolCallArguments(self._num_calls - 1, "{}")


def call_grammar(tools: Sequence[Tool], marks: Marks, parallel: bool) -> CallGrammar:
    """Return the grammar of a call. A call ends the output, so no other call can follow."""
    constrain, message = f'{marks.terminal("<|constrain|>")} "json"', marks.terminal(_MESSAGE)
    calls = (
        f"{quote(f'commentary to=functions.{tool.name} ')} {constrain} {message} @arguments_{i}"
        for i, tool in enumerate(tools)
    )
    text = marks.text_without(sorted(HarmonyFormat.marks))
    return CallGrammar(_CHANNEL, either(calls), None, (), argument_parts(tools), text)


def messages_before_answer(marks: Marks, can_have_text: bool) -> str:
    """Return the grammar expression for the messages that can come before an answer or a call: reasoning and, if
    `can_have_text` is True, text for the user."""
    channel, message = marks.terminal(_CHANNEL), marks.terminal(_MESSAGE)
    end = f'{marks.terminal("<|end|>")} {marks.terminal("<|start|>")} "assistant"'
    kinds = '("analysis" | "commentary")' if can_have_text else '"analysis"'
    return f"({channel} {kinds} {message} TEXT {end})*"


def answer_message(marks: Marks, text: str) -> str:
    """Return the grammar expression for a message that contains an answer. `text` is the expression for the answer."""
    return f'{marks.terminal(_CHANNEL)} "final" {marks.terminal(_MESSAGE)} {text}'
