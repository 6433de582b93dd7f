# SPDX-License-Identifier: Apache-2.0
"""Tool calls of Hermes, Qwen2.5, Qwen3 and the tiny model: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`."""

from collections.abc import Iterator, Sequence

from quire_engine.parsers.call_grammar import CallGrammar, Marks, json_calls
from quire_engine.parsers.format import Content
from quire_engine.parsers.json_call import JsonCallReader
from quire_engine.parsers.lexer import Lexeme
from quire_engine.parsers.tool import Tool
from quire_spec.protocol.parsed_output import Event

_START, _END = "<tool_call>", "</tool_call>"


class HermesFormat:
    """The parser of one output."""

    marks = frozenset((_START, _END))
    start_mark = _START

    def __init__(self) -> None:
        self._content = Content()
        self._num_calls = 0
        self._call: JsonCallReader | None = None
        """Reader of the current call."""

    def cut(self) -> None:
        """Drop the line breaks before and after the current position."""
        self._content.cut()

    def feed(self, lexeme: Lexeme) -> Iterator[Event]:
        """Take the next lexeme."""
        # Inside a string of the call, a mark is text.
        if lexeme.is_mark and not (self._call is not None and self._call.in_string):
            yield from self._end_call()
            if lexeme.text == _START:
                self._call = JsonCallReader(self._num_calls)
            return
        for position, char in enumerate(lexeme.text):
            if self._call is None:
                yield from self._content.write(lexeme.text[position:])
                return
            yield from self._take(self._call, char)

    def _take(self, call: JsonCallReader, char: str) -> Iterator[Event]:
        """Process a character of a call."""
        if call.failed or (call.done and (not call.started or char.isspace() or char == "}")):
            # Text between a complete or broken object and the end mark is kept as raw text.
            call.raw += char
        elif call.done:
            # The end mark is missing.
            self._call = None
            yield from self._content.write(char)
        else:
            was_started = call.started
            yield from call.feed(char)
            if call.started and not was_started:
                self._num_calls += 1
                self._content.cut()

    def finish(self) -> Iterator[Event]:
        """Return the withheld text."""
        yield from self._end_call()
        yield from self._content.finish()

    def _end_call(self) -> Iterator[Event]:
        call, self._call = self._call, None
        if call is not None and not call.started and call.raw.strip():
            yield from self._content.write(_START + call.raw)


def call_grammar(tools: Sequence[Tool], marks: Marks, parallel: bool) -> CallGrammar:
    """Return the grammar of calls."""
    call, rules, parts = json_calls(tools, "arguments")
    expression = f'"\\n" {call} "\\n" {marks.terminal(_END)}'
    return CallGrammar(_START, expression, "\n" if parallel else None, rules, parts, marks.text_without([_START]))
