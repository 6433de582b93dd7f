# SPDX-License-Identifier: Apache-2.0
"""Tool calls of Mistral, which begin with `[TOOL_CALLS]`.

After this mark comes either a JSON list of calls, or a single call, which consists of the name of a function, `[ARGS]`
and the arguments.
"""

from collections.abc import Iterator, Sequence

from quire_engine.parsers.call_grammar import CallGrammar, Marks, Tool, argument_parts, either, json_calls
from quire_engine.parsers.format import Content
from quire_engine.parsers.json_call import JsonCallReader
from quire_engine.parsers.json_reader import JsonValueReader
from quire_engine.parsers.lexer import Lexeme
from quire_engine.structured_outputs.composed_constraint import quote
from quire_spec.protocol.parsed_output import Event, ToolCallArguments, ToolCallStart

_CALLS, _ARGUMENTS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralFormat:
    """The parser of one output."""

    marks = frozenset((_CALLS, _ARGUMENTS, _CALL_ID))

    def __init__(self) -> None:
        self._content = Content()
        self._num_calls = 0
        self._state = "content"
        """State: content, begin, list, call, name, id, arguments or end. In the state begin, the mark has just ended.
        In the state call, an object in the list is read."""
        self._call = JsonCallReader(0)
        self._value = JsonValueReader()
        self._name = ""

    def cut(self) -> None:
        """Drop the line breaks before and after the current position."""
        self._content.cut()

    def feed(self, lexeme: Lexeme) -> Iterator[Event]:
        """Take the next lexeme."""
        if lexeme.is_mark and lexeme.text == _CALLS:
            self._content.cut()
            self._state, self._name = "begin", ""
        elif lexeme.is_mark and self._state in ("name", "id"):
            if lexeme.text == _CALL_ID:
                self._state = "id"
            else:
                yield from self._start_arguments()
        elif self._state == "content":
            yield from self._content.write(lexeme.text)
        else:
            for char in lexeme.text:
                yield from self._take(char)

    def _take(self, char: str) -> Iterator[Event]:
        if self._state == "begin" and not char.isspace():
            self._state = "list" if char == "[" else "name"
            self._name = "" if char == "[" else char
        elif self._state == "list" and char == "{":
            self._state, self._call = "call", JsonCallReader(self._num_calls)
            yield from self._call.feed(char)
        elif self._state == "list" and char == "]":
            self._state = "end"
        elif self._state == "call":
            yield from self._call.feed(char)
            if self._call.done or self._call.failed:
                self._num_calls += self._call.started
                self._state = "list" if self._call.done else "end"
        elif self._state == "name":
            if char != "{":
                self._name += char
                return
            yield from self._start_arguments()
            yield from self._take(char)
        elif self._state == "arguments":
            if self._value.feed(char):
                yield ToolCallArguments(self._num_calls - 1, char)
            if self._value.done or self._value.failed:
                self._state, self._name = "begin", ""

    def _start_arguments(self) -> Iterator[Event]:
        self._state, self._value = "arguments", JsonValueReader()
        yield ToolCallStart(self._num_calls, self._name.strip())
        self._num_calls += 1

    def finish(self) -> Iterator[Event]:
        """Return the withheld text."""
        if self._state in ("begin", "name", "id") and self._name:
            yield from self._content.write(self._name)
        elif self._state == "call" and not self._call.started:
            yield from self._content.write(self._call.raw)
        yield from self._content.finish()


def call_grammar(tools: Sequence[Tool], marks: Marks, parallel: bool) -> CallGrammar:
    """Return the grammar of calls.

    If the tokenizer has a token for `[ARGS]`, the calls are written with this mark. Otherwise, they are written as a
    JSON list.
    """
    if _ARGUMENTS in marks.token_ids:
        calls = (f"{quote(tool.name)} {marks.terminal(_ARGUMENTS)} @arguments_{i}" for i, tool in enumerate(tools))
        return CallGrammar(_CALLS, either(calls), "" if parallel else None, (), argument_parts(tools))
    call, rules, parts = json_calls(tools, "arguments")
    repeated = f'(", " {call})*' if parallel else ""
    return CallGrammar(_CALLS, f'" "? "[" {call} {repeated} "]"', None, rules, parts)
