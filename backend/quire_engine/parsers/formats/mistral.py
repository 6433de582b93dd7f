# SPDX-License-Identifier: Apache-2.0
"""Tool calls of Mistral, which begin with `[TOOL_CALLS]`.

After this mark comes either a JSON list of calls, or a single call, which consists of the name of a function, `[ARGS]`
and the arguments.
"""

import re
from collections.abc import Iterator, Sequence

from quire_engine.parsers.call_grammar import CallGrammar, Marks, argument_parts, either, json_calls
from quire_engine.parsers.format import Content
from quire_engine.parsers.json_call import JsonCallReader
from quire_engine.parsers.json_reader import JsonValueReader
from quire_engine.parsers.lexer import Lexeme
from quire_engine.parsers.tool import Tool
from quire_engine.structured_outputs.composed_constraint import quote
from quire_spec.protocol.parsed_output import Event, ToolCallArguments, ToolCallStart

_CALLS, _ARGUMENTS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


_MAX_NAME_CHARS = 256
_NAME = re.compile(r"\s*[\w.:/-]*\s*")


class MistralFormat:
    """The parser of one output."""

    marks = frozenset((_CALLS, _ARGUMENTS, _CALL_ID))
    start_marks = (_CALLS,)

    def __init__(self) -> None:
        self._content = Content()
        self._num_calls = 0
        self._state = "content"
        """State: content, list, object, name, id or arguments. In the state object, an object with a call is read. In
        the state name, the mark or a call has just ended."""
        self._in_list = False
        self._is_marked = False
        """True if the mark directly precedes the current name."""
        self._call = JsonCallReader(0)
        self._value = JsonValueReader()
        self._name = ""

    @property
    def _in_string(self) -> bool:
        return self._call.in_string if self._state == "object" else self._state == "arguments" and self._value.in_string

    def cut(self) -> None:
        """Drop the line breaks before and after the current position."""
        self._content.cut()

    def feed(self, lexeme: Lexeme) -> Iterator[Event]:
        """Take the next lexeme."""
        if not lexeme.is_mark or self._in_string:
            for position, char in enumerate(lexeme.text):
                if self._state == "content":
                    yield from self._content.write(lexeme.text[position:])
                    return
                yield from self._take(char)
        elif lexeme.text == _CALLS:
            yield from self._end_name()
            yield from self._end_object()
            self._content.cut()
            self._state, self._name, self._is_marked, self._in_list = "name", "", True, False
        elif self._state in ("name", "id") and self._name.strip():
            if lexeme.text == _CALL_ID:
                self._state = "id"
            else:
                yield from self._start_arguments()
        elif self._state == "content":
            yield from self._content.write(lexeme.text)

    def _take(self, char: str) -> Iterator[Event]:
        if self._state in ("name", "list") and char == "{" and not self._name.strip():
            # Some models write one object instead of a list.
            self._state, self._call = "object", JsonCallReader(self._num_calls)
            yield from self._call.feed(char)
        elif self._state == "object":
            yield from self._call.feed(char)
            if self._call.done or self._call.failed:
                yield from self._end_object()
        elif self._state == "list":
            if char == "]":
                self._leave_calls()
        elif self._state == "name" and char == "[" and self._is_marked and not self._name.strip():
            self._state, self._in_list = "list", True
        elif self._state == "name" and char == "{":
            yield from self._start_arguments()
            yield from self._take(char)
        elif self._state == "name":
            self._name += char
            if len(self._name) > _MAX_NAME_CHARS or not _NAME.fullmatch(self._name):
                yield from self._end_as_content()
        elif self._state == "arguments":
            if self._value.feed(char):
                yield ToolCallArguments(self._num_calls - 1, char)
            if self._value.done or self._value.failed:
                self._state, self._name, self._is_marked = "name", "", False
                self._content.cut()

    def _start_arguments(self) -> Iterator[Event]:
        self._state, self._value = "arguments", JsonValueReader()
        yield ToolCallStart(self._num_calls, self._name.strip())
        self._num_calls, self._name = self._num_calls + 1, ""

    def _end_object(self) -> Iterator[Event]:
        if self._state != "object":
            return
        call = self._call
        self._num_calls += call.started
        if call.done and self._in_list:
            self._state = "list"
            return
        self._leave_calls()
        if not call.started:
            yield from self._content.write(call.raw)

    def _end_name(self) -> Iterator[Event]:
        """End a name without arguments: it is a call if the mark precedes it."""
        if self._state not in ("name", "id"):
            return
        if self._name.strip() and self._is_marked:
            yield from self._start_arguments()
            yield ToolCallArguments(self._num_calls - 1, "{}")
            self._state = "content"
        else:
            yield from self._end_as_content()

    def _end_as_content(self) -> Iterator[Event]:
        name, self._name, self._state = self._name, "", "content"
        yield from self._content.write(name)

    def _leave_calls(self) -> None:
        self._state, self._name = "content", ""
        self._content.cut()

    def finish(self) -> Iterator[Event]:
        """Return the withheld text."""
        yield from self._end_name()
        yield from self._end_object()
        yield from self._content.finish()


def call_grammar(tools: Sequence[Tool], marks: Marks, parallel: bool) -> CallGrammar:
    """Return the grammar of calls.

    If the tokenizer has a token for `[ARGS]`, the calls are written with this mark. Otherwise, they are written as a
    JSON list.
    """
    text = marks.text_without([_CALLS])
    if _ARGUMENTS in marks.token_ids:
        calls = (f"{quote(tool.name)} {marks.terminal(_ARGUMENTS)} @arguments_{i}" for i, tool in enumerate(tools))
        return CallGrammar(_CALLS, either(calls), "" if parallel else None, (), argument_parts(tools), text)
    call, rules, parts = json_calls(tools, "arguments")
    repeated = f'(", " {call})*' if parallel else ""
    return CallGrammar(_CALLS, f'" "? "[" {call} {repeated} "]"', None, rules, parts, text)
