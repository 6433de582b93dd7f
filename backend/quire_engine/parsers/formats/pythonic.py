# SPDX-License-Identifier: Apache-2.0
"""Tool calls in Python notation: `[f(a=1), g(b="x")]`.

Llama 3.2, Llama 4 and LFM2 write a list. OLMo 3 writes each call in a line of its own. The calls must be parsed as a
whole, so their text is withheld until the last bracket is closed. Names of tools and parameters can have characters
that Python's names do not have, and values can be JSON.
"""

import ast
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from quire_engine.parsers.call_grammar import CallGrammar, Marks, either
from quire_engine.parsers.format import LeadingCalls
from quire_engine.parsers.formats.keyword_grammar import KeywordNotation, keyword_calls
from quire_engine.parsers.json_text import dump_json, load_json
from quire_engine.parsers.tool import Tool
from quire_spec.protocol.parsed_output import Event, ToolCallArguments, ToolCallStart

_MAX_CHARS = 65_536
_MAX_DEPTH = 64
"""Maximum nesting depth of brackets. The depth is limited because the parser is recursive."""
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[\w.:/-]+")
_KEYWORD = re.compile(r"""[^\s=(){}\[\],'"]+""")
_NOTATION = KeywordNotation("{}(", "=", ", ", ")", _KEYWORD)
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?(?![\w.])")
_STRING = re.compile(r"""(?s)"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'""")
_SCALAR = re.compile(r"[^\s,\])}]+")
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}


@dataclass(frozen=True, slots=True)
class PythonicMarks:
    """The marks of one format, and the text between its calls."""

    start: str
    end: str
    can_lead: bool = False
    """True if a list can stand without a mark at the beginning of the answer."""
    has_lines: bool = False
    """True if the calls stand in lines. False if they stand in a list."""


class PythonicFormat(LeadingCalls):
    """The parser of one output."""

    def __init__(self, syntax: PythonicMarks, known_names: Collection[str] | None = None) -> None:
        """A list without the mark contains calls only if one of its names is in `known_names`. If that is None, the
        calls can have any names."""
        super().__init__(syntax.start, syntax.end)
        self._has_lines = syntax.has_lines
        self._is_content = not syntax.can_lead
        self._known_names = known_names
        self._list = ""
        """Text of the list so far, including whitespace before the list."""
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    @property
    def _in_string(self) -> bool:
        return self._quote != ""

    def _open(self) -> None:
        if self._has_lines:
            self._list, self._depth = "[", 1

    def _close(self) -> Iterator[Event]:
        if self._has_lines and self._list:
            self._list += "]"
            yield from self._end_list()

    def _take(self, char: str) -> Iterator[Event]:
        self._list += char
        if not self._depth:
            self._depth = int(char == "[")
            if not self._depth and not char.isspace():
                yield from self._give_up()
            return
        if self._quote:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == self._quote:
                self._quote = ""
        elif char in "\"'":
            self._quote = char
        elif char in "([{":
            self._depth += 1
        elif char in ")]}":
            self._depth -= 1
        if len(self._list) > _MAX_CHARS or self._depth > _MAX_DEPTH:
            yield from self._give_up()
        elif not self._depth:
            yield from self._end_list()

    def _end_list(self) -> Iterator[Event]:
        """Emit the calls of the list. Emit the list as content if it has no complete call."""
        calls = _Reader(self._list).calls("" if self._has_lines else ",")
        is_known = self._is_marked or self._known_names is None or any(name in self._known_names for name, _ in calls)
        if not calls or not is_known:
            yield from self._give_up()
            return
        self._list, self._quote, self._depth, self._is_content = "", "", 0, True
        self._content.cut()
        for name, arguments in calls:
            yield ToolCallStart(self._num_calls, name)
            yield ToolCallArguments(self._num_calls, arguments)
            self._num_calls += 1

    def _give_up(self) -> Iterator[Event]:
        text, self._list, self._quote, self._depth, self._is_content = self._list, "", "", 0, True
        if self._has_lines and text:
            text = self.start_marks[0] + text[1:].removesuffix("]")
        yield from self._content.write(text)

    def finish(self) -> Iterator[Event]:
        """Return the withheld text. If a list was cut off, return its complete calls."""
        if self._list:
            yield from self._end_list()
        yield from self._content.finish()


def read_calls(text: str) -> list[tuple[str, str]] | None:
    """Return the name and the JSON text of the arguments of each call in a complete list; None if the text is not a
    list of calls."""
    if len(text) > _MAX_CHARS or not text.rstrip().endswith("]"):
        return None
    return _Reader(text).calls(",") or None


class _Reader:
    """Reads a list of calls."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0

    def calls(self, separator: str) -> list[tuple[str, str]]:
        """Return the name and the JSON text of the arguments of each call. A list that is cut off has the calls before
        its end. The result is empty if the text is not a list of calls."""
        calls: list[tuple[str, str]] = []
        try:
            self._expect("[")
            while not calls or (self._skip(separator) and not self._skip("]")):
                calls.append(self._call())
            if self._text[self._position - 1] != "]":
                self._expect("]")
            return [] if self._text[self._position :].strip() else calls
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return calls if self._is_at_end() else []

    def _call(self) -> tuple[str, str]:
        name = self._match(_NAME)
        self._expect("(")
        members: dict[str, str] = {}
        while not self._skip(")"):
            if members:
                self._expect(",")
                if self._skip(")"):
                    break
            key = self._match(_KEYWORD)
            self._expect("=")
            members[key] = self._value()
        return name, _object(members)

    def _value(self) -> str:
        """Return the JSON text of a value, which is written in Python's notation or as JSON."""
        if self._skip("["):
            return "[" + ", ".join(self._items()) + "]"
        if self._skip("{"):
            return _object(dict(self._entries()))
        self._skip("")
        if self._text[self._position : self._position + 1] in ("'", '"'):
            return dump_json(_decode(self._match(_STRING)))
        if (number := _NUMBER.match(self._text, self._position)) is not None:
            # The number is not converted, because Python has no number such as 1e400.
            self._position = number.end()
            return number[0]
        scalar = self._match(_SCALAR)
        if scalar in _CONSTANTS:
            return _CONSTANTS[scalar]
        value = ast.literal_eval(scalar)
        if not isinstance(value, int | float):
            raise ValueError("no value")
        return dump_json(value)

    def _items(self) -> Iterator[str]:
        is_first = True
        while not self._skip("]"):
            if not is_first:
                self._expect(",")
                if self._skip("]"):
                    return
            is_first = False
            yield self._value()

    def _entries(self) -> Iterator[tuple[str, str]]:
        is_first = True
        while not self._skip("}"):
            if not is_first:
                self._expect(",")
                if self._skip("}"):
                    return
            is_first = False
            self._skip("")
            key = _decode(self._match(_STRING))
            self._expect(":")
            yield key, self._value()

    def _skip(self, text: str) -> bool:
        """Skip whitespace, and then a text if it comes next."""
        space = _SPACE.match(self._text, self._position)
        self._position = self._position if space is None else space.end()
        if not self._text.startswith(text, self._position):
            return False
        self._position += len(text)
        return True

    def _expect(self, text: str) -> None:
        if not self._skip(text):
            raise ValueError(f"{text} is missing")

    def _match(self, pattern: re.Pattern[str]) -> str:
        self._skip("")
        match = pattern.match(self._text, self._position)
        if match is None:
            raise ValueError("unexpected character")
        self._position = match.end()
        return match[0]

    def _is_at_end(self) -> bool:
        """Return whether reading failed because the text ends."""
        rest = self._text[self._position :]
        return not rest.strip() or rest[:1] in ("'", '"')


def _decode(literal: str) -> str:
    """Return the text of a string literal of JSON or Python."""
    try:
        return str(load_json(literal))
    except ValueError:
        with warnings.catch_warnings(action="ignore"):  # about unknown escapes
            return str(ast.literal_eval(literal.replace("\n", "\\n").replace("\r", "\\r")))


def _object(members: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{dump_json(key)}: {value}" for key, value in members.items()) + "}"


def call_grammar(syntax: PythonicMarks, tools: Sequence[Tool], marks: Marks, parallel: bool) -> CallGrammar:
    """Return the grammar of calls. Values are written as JSON."""
    rules, parts = keyword_calls(_NOTATION, tools)
    call = either(f"call_{i}" for i in range(len(tools)))
    separator, text = r'"\n"' if syntax.has_lines else '", "', marks.text_without([syntax.start])
    calls = f"{call} ({separator} {call})*" if parallel else call
    if syntax.can_lead:
        text = r"/(\s*[^\s\[](.|\n)*)?/ & " + text
        return CallGrammar("", f'"[" {calls} "]"', None, rules, parts, text)
    body = rf'"\n" {calls} "\n"' if syntax.has_lines else f'"[" {calls} "]"'
    return CallGrammar(syntax.start, f"{body} {marks.terminal(syntax.end)}", None, rules, parts, text)
