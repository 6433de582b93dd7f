# SPDX-License-Identifier: Apache-2.0
"""Tool calls that consist of a name and of a JSON object with the arguments, with marks before, between and after them.

DeepSeek V3 and Kimi K2 write such calls.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quire_engine.parsers.call_grammar import CallGrammar, Marks, argument_parts, either
from quire_engine.parsers.format import Content
from quire_engine.parsers.json_reader import JsonValueReader
from quire_engine.parsers.lexer import Lexeme
from quire_engine.parsers.tool import Tool
from quire_engine.structured_outputs.composed_constraint import quote
from quire_spec.protocol.parsed_output import Event, ToolCallArguments, ToolCallStart

_KIMI_ID = re.compile(r"functions\.(.+):\d+")
_INDEX = "{index}"
_MAX_HEAD_CHARS = 512


@dataclass(frozen=True, slots=True)
class NamedJsonMarks:
    """The marks of one format, and the text between them."""

    section: str
    """Mark that begins all calls."""
    start: str
    """Mark that begins a call."""
    separator: str
    """Mark before the arguments. In some formats, the name follows it."""
    end: str
    end_section: str
    head: str
    """What a model writes between the start of a call and the arguments; contains `{name}`. Where it contains
    `{index}`, a number stands."""
    tail: str = ""
    """What a model writes between the arguments and the end of the call."""
    between: str = ""
    """What a model writes between two calls."""

    @property
    def all(self) -> tuple[str, ...]:
        """All marks."""
        return (self.section, self.start, self.separator, self.end, self.end_section)

    @property
    def is_name_first(self) -> bool:
        """Whether the name precedes the separator."""
        return self.head.endswith(self.separator)


class NamedJsonFormat:
    """The parser of one output."""

    def __init__(self, syntax: NamedJsonMarks) -> None:
        self.marks = frozenset(syntax.all)
        self.start_marks = (syntax.section, syntax.start)
        self._syntax = syntax
        self._content = Content()
        self._num_calls = 0
        self._state = "content"
        """State: content, section, head, arguments or tail. In the state section, a call can begin. In the state tail,
        the arguments have ended, but not the call."""
        self._first, self._second = "", ""
        """Text of the call before and after the separator."""
        self._has_separator = False
        self._arguments = JsonValueReader()

    def cut(self) -> None:
        """Drop the line breaks before and after the current position."""
        self._content.cut()

    def feed(self, lexeme: Lexeme) -> Iterator[Event]:
        """Take the next lexeme."""
        if lexeme.is_mark and not (self._state == "arguments" and self._arguments.in_string):
            yield from self._take_mark(lexeme.text)
            return
        for position, char in enumerate(lexeme.text):
            if self._state == "content":
                yield from self._content.write(lexeme.text[position:])
                return
            yield from self._take(char)

    def _take_mark(self, mark: str) -> Iterator[Event]:
        if mark == self._syntax.separator:
            if self._state == "head":
                self._has_separator = True
            return
        yield from self._end_call()
        self._content.cut()
        if mark == self._syntax.start:
            self._state = "head"
        elif mark != self._syntax.end_section:
            self._state = "section"

    def _take(self, char: str) -> Iterator[Event]:
        if self._state == "arguments":
            if self._arguments.feed(char):
                yield ToolCallArguments(self._num_calls - 1, char)
            if self._arguments.done or self._arguments.failed:
                self._state = "tail"
        elif self._state == "head" and len(self._first) + len(self._second) > _MAX_HEAD_CHARS:
            self._second += char
            self._has_separator = False
            yield from self._end_call()
        elif self._state == "head" and not (self._has_separator and char == "{"):
            if self._has_separator:
                self._second += char
            else:
                self._first += char
        elif self._state == "head":
            yield from self._start_call()
            yield from self._take(char)
        elif not char.isspace() and not (self._state == "tail" and char == "`"):
            # The end mark is missing.
            self._state = "content"
            yield from self._content.write(char)

    def _start_call(self) -> Iterator[Event]:
        text = (self._first if self._syntax.is_name_first else self._second.lstrip().partition("\n")[0]).strip()
        # The chat template of Kimi K2 needs the ids that the model wrote.
        written_id = _KIMI_ID.fullmatch(text) if _INDEX in self._syntax.head else None
        name, call_id = (text, "") if written_id is None else (written_id[1], text)
        self._state, self._first, self._second, self._has_separator = "arguments", "", "", False
        self._arguments = JsonValueReader()
        yield ToolCallStart(self._num_calls, name, call_id)
        self._num_calls += 1

    def _end_call(self) -> Iterator[Event]:
        if self._state == "head":
            text = self._first + self._second
            if self._has_separator and text.strip():
                yield from self._start_call()
                yield ToolCallArguments(self._num_calls - 1, "{}")
            elif text.strip():
                yield from self._content.write(self._syntax.start + text)
        self._state, self._first, self._second, self._has_separator = "content", "", "", False

    def finish(self) -> Iterator[Event]:
        """Return the withheld text."""
        yield from self._end_call()
        yield from self._content.finish()


def call_grammar(syntax: NamedJsonMarks, tools: Sequence[Tool], marks: Marks, parallel: bool) -> CallGrammar:
    """Return the grammar of calls."""
    rules = ["INDEX: /[0-9]{1,3}/"] if _INDEX in syntax.head else []
    start, end = marks.terminal(syntax.start), marks.written(syntax.tail + syntax.end, syntax.all)
    for i, tool in enumerate(tools):
        pieces = syntax.head.replace("{name}", tool.name).split(_INDEX)
        head = " INDEX ".join(marks.written(piece, syntax.all) for piece in pieces)
        rules.append(f"call_{i}: {start} {head} @arguments_{i} {end}")
    call = either(f"call_{i}" for i in range(len(tools)))
    repeated = f"({quote(syntax.between) if syntax.between else ''} {call})*" if parallel else ""
    expression = f"{call} {repeated} {marks.terminal(syntax.end_section)}"
    text = marks.text_without(syntax.all)
    return CallGrammar(syntax.section, expression, None, tuple(rules), argument_parts(tools), text)
