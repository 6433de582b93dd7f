# SPDX-License-Identifier: Apache-2.0
"""Tool calls as JSON objects between marks, such as `<tool_call>{"name": ..., "arguments": ...}</tool_call>`.

Models differ in the marks, and in whether the objects stand in a list. The parser reads both.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from quire_engine.parsers.call_grammar import CallGrammar, Marks, json_calls
from quire_engine.parsers.format import Content
from quire_engine.parsers.json_call import JsonCallReader
from quire_engine.parsers.lexer import Lexeme
from quire_engine.parsers.tool import Tool
from quire_engine.structured_outputs.composed_constraint import quote
from quire_spec.protocol.parsed_output import Event

_LANGUAGE = "json"
"""Language that can stand after the mark of a code block."""
_MAX_SPACE = 256
"""Maximum number of characters between a mark and a call."""


@dataclass(frozen=True, slots=True)
class JsonMarks:
    """The marks of one format, and the text around its calls."""

    starts: tuple[str, ...]
    """Marks that begin calls. The grammar writes the first one. A mark that ends with `[` also begins a list."""
    end: str = ""
    """Mark that ends the calls. It is empty if the end of the JSON text ends them."""
    before: str = ""
    """Text that a model writes between a mark and the JSON text."""
    after: str = ""
    is_list: bool = False
    """True if a model writes a list of calls. False if it writes a mark before each call."""
    fence: str = ""
    """Mark of a code block. An object in it is a call only if it names a tool of the request, because it can also be an
    answer."""
    can_lead: bool = False
    """True if calls can stand without a mark at the beginning of the answer. They must name tools of the request."""
    lead: str = ""
    """Text after which an answer begins."""


class MarkedJsonFormat:
    """The parser of one output."""

    def __init__(self, syntax: JsonMarks, known_names: Collection[str] | None = None) -> None:
        """`known_names` are the names of the tools. If it is None, calls without a mark can have any name."""
        self.start_marks = syntax.starts
        self.marks = frozenset((*syntax.starts, syntax.end, syntax.fence, syntax.lead)) - {""}
        self._syntax = syntax
        self._known_names = known_names or ()
        self._content = Content()
        self._num_calls = 0
        self._mark: str | None = "" if syntax.can_lead else None
        """Mark that begins the current calls; empty if no mark is needed. None while text is content."""
        self._is_list = False
        self._raw = ""
        """Text after the mark. It becomes content if no call follows."""
        self._has_call = False
        """True if a call has begun after the mark."""
        self._call: JsonCallReader | None = None
        """Reader of the current object."""

    def cut(self) -> None:
        """Drop the line breaks before and after the current position."""
        self._content.cut()

    def feed(self, lexeme: Lexeme) -> Iterator[Event]:
        """Take the next lexeme."""
        # Inside a string of the call, a mark is text.
        if lexeme.is_mark and not (self._call is not None and self._call.in_string):
            yield from self._take_mark(lexeme.text)
            return
        for position, char in enumerate(lexeme.text):
            if self._mark is None:
                yield from self._content.write(lexeme.text[position:])
                return
            yield from self._take(char)

    def _take_mark(self, mark: str) -> Iterator[Event]:
        has_call = self._has_call
        yield from self._end_calls()
        if mark in self._syntax.starts or (mark == self._syntax.fence and not has_call):
            self._mark, self._is_list = mark, mark.endswith("[")
        elif mark == self._syntax.lead or (mark != self._syntax.end and not has_call):
            yield from self._content.write(mark)
            self._mark = "" if mark == self._syntax.lead else None

    def _take(self, char: str) -> Iterator[Event]:
        """Process a character after a mark."""
        call = self._call
        if call is None and char == "{":
            is_certain = self._mark not in ("", self._syntax.fence) or self._has_call
            call = self._call = JsonCallReader(self._num_calls, None if is_certain else self._known_names)
        if call is not None and not (call.done or call.failed):
            was_started = call.started
            yield from call.feed(char)
            if call.started and not was_started:
                self._has_call = True
                self._num_calls += 1
                self._content.cut()
            if call.done and self._has_call:
                self._call = None
            elif (call.done or call.failed) and not (self._has_call and self._syntax.end):
                yield from self._end_calls()
        elif self._has_call:
            yield from self._take_after_call(char)
        elif len(self._raw) < _MAX_SPACE and (char.isspace() or (char == "[" and not self._is_list)):
            self._is_list = self._is_list or char == "["
            self._raw += char
        elif self._mark == self._syntax.fence != "" and _LANGUAGE.startswith(self._raw + char):
            self._raw += char
        else:
            self._raw += char
            yield from self._end_calls()

    def _take_after_call(self, char: str) -> Iterator[Event]:
        """Process a character after the object of a call, or after a call that is not JSON."""
        if self._is_list and char == "]":
            self._is_list, self._call = False, None
            if not self._syntax.end and self._mark != self._syntax.fence:
                yield from self._end_calls()
        elif self._call is not None or char.isspace() or char in "},;":
            return
        else:
            # The end mark is missing.
            yield from self._end_calls()
            yield from self._content.write(char)

    def finish(self) -> Iterator[Event]:
        """Return the withheld text."""
        yield from self._end_calls()
        yield from self._content.finish()

    def _end_calls(self) -> Iterator[Event]:
        """End the calls after a mark. If there are none, emit the text as content."""
        raw, has_call, mark = self._raw, self._has_call, self._mark
        if self._call is not None:
            raw += self._call.raw
        self._raw, self._has_call, self._mark, self._call = "", False, None, None
        if not has_call and (raw.strip() or not mark or mark == self._syntax.fence):
            yield from self._content.write((mark or "") + raw)


def call_grammar(syntax: JsonMarks, tools: Sequence[Tool], marks: Marks, parallel: bool) -> CallGrammar:
    """Return the grammar of calls."""
    call, rules, parts = json_calls(tools, "arguments")
    start = "" if syntax.can_lead else syntax.starts[0]
    end = "" if syntax.can_lead else syntax.end
    after = f"{quote(syntax.after) if syntax.after else ''} {marks.terminal(end) if end else ''}"
    before = quote(syntax.before) if syntax.before else ""
    if not syntax.is_list:
        text = marks.text_without(syntax.starts)
        return CallGrammar(start, f"{before} {call} {after}", "\n" if parallel else None, rules, parts, text)
    bracket = "" if start.endswith("[") else '"["'
    expression = f'{before} {bracket} {call} {f"""(", " {call})*""" if parallel else ""} "]" {after}'
    if syntax.can_lead:
        # More precise patterns make the grammar too complex for some outputs.
        fenced = rf"{syntax.fence}(json)?\s*[\[\{{]"
        text = r"/(\s*[^\s\[\{](.|\n)*)?/ & " + marks.text_without(syntax.starts, fenced)
    else:
        text = marks.text_without(syntax.starts)
    return CallGrammar(start, expression, None, rules, parts, text)
