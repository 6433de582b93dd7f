# SPDX-License-Identifier: Apache-2.0
"""Tool calls of Gemma: `<|tool_call>call:f{n:1,s:<|"|>text<|"|>}<tool_call|>`.

The arguments are JSON without quotation marks around keys, and with a mark of its own around strings. The parser
converts them to JSON while they arrive, and also reads JSON.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire_engine.parsers.call_grammar import CallGrammar, Marks, either
from quire_engine.parsers.format import Content
from quire_engine.parsers.formats.keyword_grammar import KeywordNotation, keyword_calls
from quire_engine.parsers.json_text import dump_json, load_json
from quire_engine.parsers.lexer import Lexeme
from quire_engine.parsers.tool import Tool, json_types
from quire_engine.structured_outputs.composed_constraint import quote
from quire_spec.protocol.parsed_output import Event, ToolCallArguments, ToolCallStart

_HEAD = re.compile(r"\s*call:\s*([^\s{}]+)\s*")
_NOTATION = KeywordNotation("call:{}{", ":", ",", "}", re.compile(r"""[^\s:{}\[\],"<>]+"""))
_CLOSERS = {"{": "}", "[": "]"}
_NOTES = frozenset({"description", "title", "default"})
"""Keywords that do not restrict a value."""
_MAX_HEAD_CHARS = 256
_STRING = frozenset({"string"})


@dataclass(frozen=True, slots=True)
class GemmaMarks:
    """The marks of one format."""

    start: str
    end: str
    quote: str
    """Mark before and after a string."""


class _ArgumentsReader:
    """Converts the arguments of one call to JSON text."""

    def __init__(self, tool: Tool, properties: Mapping[str, Any]) -> None:
        self.done = False
        """True if the object is complete."""
        self.in_string = False
        """True inside a string, where marks other than the end of the string are text."""
        self._tool = tool
        self._properties = properties
        self._closers: list[str] = []
        self._is_key = False
        """True if a key comes next, or is read."""
        self.is_json_string = False
        """True between quotation marks, where all marks are text."""
        self._is_escaped = False
        self._parts: list[str] | None = []
        """Text of the current key or literal. None in a string that is emitted as it arrives."""
        self._has_text = False
        """True if `_parts` contain more than whitespace."""
        self._key = ""
        """Key of the current argument."""
        self._has_value = False
        """True if the current value is complete."""
        self._separator = ""
        """Text to emit before the next key or item."""

    def feed(self, char: str) -> str:
        """Take one character; return the JSON text that results from it."""
        if self.in_string:
            return self._take_in_string(char)
        if char == '"' and not self._has_text:
            self.is_json_string = True
            return self._open_string()
        if char == ":" and self._is_key:
            return self._end_key()
        if char in ",}]":
            return self._end_item(char)
        if char in "{[":
            return self._begin_values(char)
        if not char.isspace():
            self._begin_next()
            self._has_text = True
        if self._parts is not None:
            self._parts.append(char)
        return ""

    def toggle_string(self) -> str:
        """Take the mark before or after a string; return the JSON text that results from it."""
        return self._close_string() if self.in_string else self._open_string()

    def close(self) -> str:
        """Return the JSON text that ends the object if its end is missing."""
        texts = [self._close_string()] if self.in_string else []
        while self._closers:
            texts.append(self._end_item(self._closers[-1]))
        return "".join(texts)

    def _take_in_string(self, char: str) -> str:
        if not self.is_json_string:
            char = json.dumps(char, ensure_ascii=False)[1:-1]
        elif self._is_escaped:
            self._is_escaped = False
        elif char == '"':
            return self._close_string()
        else:
            self._is_escaped = char == "\\"
            char = char if char >= " " else json.dumps(char)[1:-1]
        if self._parts is None:
            return char
        self._parts.append(char)
        return ""

    def _begin_next(self) -> None:
        """Begin the next key or item if the comma before it is missing."""
        if self._has_value:
            self._end_item(",")

    def _begin_values(self, char: str) -> str:
        self._begin_next()
        if self._closers and self._is_key:
            return ""
        text, self._separator = self._separator + char, ""
        self._closers.append(_CLOSERS[char])
        self._is_key, self._parts, self._has_text = char == "{", [], False
        return text

    def _open_string(self) -> str:
        self._begin_next()
        self.in_string, self._parts, self._has_text = True, [], True
        is_argument = not self._is_key and len(self._closers) == 1 and self._key in self._properties
        if self._is_key or (is_argument and "string" not in self._types()):
            # The text is a key, or stands for a value of another type.
            return ""
        text, self._separator, self._parts = self._separator + '"', "", None
        return text

    def _close_string(self) -> str:
        self.in_string = self.is_json_string = self._is_escaped = False
        if self._is_key:
            return ""
        parts, self._parts, self._has_text, self._has_value = self._parts, [], False, True
        if parts is None:
            return '"'
        text = _decoded("".join(parts))
        return text.strip() if _literal_types(text) & self._types() else dump_json(text)

    def _end_key(self) -> str:
        key = _decoded("".join(self._parts or ()).strip())
        self._is_key, self._parts, self._has_text = False, [], False
        if len(self._closers) == 1:
            self._key = key
        separator, self._separator = self._separator, ""
        return f"{separator}{dump_json(key)}: "

    def _end_item(self, char: str) -> str:
        """End a value at a comma or at the end of an object or array."""
        closer, text = self._closers[-1], "".join(self._parts or ()).strip()
        if char not in (",", closer):
            return ""
        written = ""
        if not self._has_value and not self._is_key and (text or closer == "}"):
            written, self._separator, self._has_value = self._separator + self._literal(text), "", True
        if char == ",":
            # An item or a key without a value is left out.
            self._separator = ", " if self._has_value else self._separator
            self._is_key, self._has_value = closer == "}", False
        else:
            self._closers.pop()
            self._separator, self._is_key, self._has_value = "", False, True
            self.done = not self._closers
            written += char
        self._parts, self._has_text = [], False
        return written

    def _literal(self, text: str) -> str:
        """Return the JSON text of a value without quotation marks."""
        types = _literal_types(text)
        is_argument = len(self._closers) == 1 and self._key in self._properties
        is_string = is_argument and "string" in self._types() and not types & self._types()
        return dump_json(text) if is_string or types == _STRING else text

    def _types(self) -> frozenset[str]:
        """Return the JSON types of the current argument."""
        return self._tool.types_of(self._properties[self._key])


def _literal_types(text: str) -> frozenset[str]:
    """Return the JSON types of a literal; a text that is not JSON is a string."""
    try:
        return json_types(load_json(text))
    except (ValueError, RecursionError):
        return _STRING


def _decoded(written: str) -> str:
    """Return the text of a string that is written as in JSON, without quotation marks."""
    try:
        return str(load_json(f'"{written}"'))
    except ValueError:
        return written


class GemmaFormat:
    """The parser of one output."""

    def __init__(self, syntax: GemmaMarks, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """`tools` are the tools of the request, in the form of the OpenAI API."""
        self.marks = frozenset((syntax.start, syntax.end, syntax.quote))
        self.start_marks = (syntax.start,)
        self._syntax = syntax
        self._tools = {str(tool["function"]["name"]): tool["function"].get("parameters") for tool in tools}
        self._content = Content()
        self._num_calls = 0
        self._state = "content"
        """State: content, head, arguments or end. In the state end, the arguments have ended, but not the call."""
        self._head = ""
        self._arguments = _ArgumentsReader(Tool("", {}), {})

    def cut(self) -> None:
        """Drop the line breaks before and after the current position."""
        self._content.cut()

    def feed(self, lexeme: Lexeme) -> Iterator[Event]:
        """Take the next lexeme."""
        in_arguments = self._state == "arguments"
        if lexeme.text == self._syntax.quote and in_arguments and lexeme.is_mark and not self._arguments.is_json_string:
            yield from self._write(self._arguments.toggle_string())
        elif lexeme.is_mark and not (in_arguments and self._arguments.in_string):
            yield from self._take_mark(lexeme.text)
        else:
            for position, char in enumerate(lexeme.text):
                if self._state == "content":
                    yield from self._content.write(lexeme.text[position:])
                    return
                yield from self._take(char)

    def _take_mark(self, mark: str) -> Iterator[Event]:
        if mark == self._syntax.quote:
            if self._state == "head":
                self._head += mark
            elif self._state == "content":
                yield from self._content.write(mark)
            return
        yield from self._end_call()
        if mark == self._syntax.start:
            self._state, self._head = "head", ""

    def _take(self, char: str) -> Iterator[Event]:
        if self._state == "head" and char != "{" and len(self._head) < _MAX_HEAD_CHARS:
            self._head += char
        elif self._state == "head":
            if (head := _HEAD.fullmatch(self._head)) is None:
                self._head += char
                yield from self._end_call()
                return
            tool = Tool(head[1], parameters if isinstance(parameters := self._tools.get(head[1]), Mapping) else {})
            properties = tool.schema.get("properties")
            self._arguments = _ArgumentsReader(tool, properties if isinstance(properties, Mapping) else {})
            self._state = "arguments"
            self._content.cut()
            yield ToolCallStart(self._num_calls, head[1])
            self._num_calls += 1
            yield from self._write(self._arguments.feed(char))
        elif self._state == "arguments":
            yield from self._write(self._arguments.feed(char))
            if self._arguments.done:
                self._state = "end"
                self._content.cut()
        elif not char.isspace():
            # The end mark is missing.
            self._state = "content"
            yield from self._content.write(char)

    def _write(self, text: str) -> Iterator[Event]:
        if text:
            yield ToolCallArguments(self._num_calls - 1, text)

    def _end_call(self) -> Iterator[Event]:
        state, self._state = self._state, "content"
        if state == "head" and self._head.strip():
            yield from self._content.write(self._syntax.start + self._head)
        elif state == "arguments":
            yield from self._write(self._arguments.close())
            self._content.cut()

    def finish(self) -> Iterator[Event]:
        """Return the withheld text. Arguments that were cut off stay incomplete."""
        if self._state == "head":
            yield from self._end_call()
        yield from self._content.finish()


def call_grammar(syntax: GemmaMarks, tools: Sequence[Tool], marks: Marks, parallel: bool) -> CallGrammar:
    """Return the grammar of calls. Strings that a schema does not restrict are written between marks, and other values
    as JSON."""
    mark = marks.terminal(syntax.quote)
    string, string_rules = marks.until(syntax.quote, [syntax.quote], "string", marks.text_without([syntax.quote]))

    def native(tool: Tool, schema: Any) -> str | None:
        if not isinstance(schema, Mapping):
            return None
        values = schema.get("enum")
        if schema.keys() - _NOTES == {"enum"} and isinstance(values, list) and values:
            texts = [text for text in values if isinstance(text, str) and syntax.quote not in text]
            return f"{mark} {either(map(quote, texts))} {mark}" if len(texts) == len(values) else None
        return f"{mark} {string}" if schema.keys() - _NOTES == {"type"} and schema["type"] == "string" else None

    rules, parts = keyword_calls(_NOTATION, tools, native)
    call = either(f"call_{i}" for i in range(len(tools)))
    separator = "" if parallel else None
    text = marks.text_without([syntax.start])
    return CallGrammar(
        syntax.start, f"{call} {marks.terminal(syntax.end)}", separator, (*rules, *string_rules), parts, text
    )
