# SPDX-License-Identifier: Apache-2.0
"""Tool calls in the manner of XML, such as `<function=f><parameter=k>v</parameter></function>` in `<tool_call>`.

Qwen3-Coder, Seed-OSS, MiniMax M2 and GLM 4.5 write such calls with different marks. Texts have no quotes, so the JSON
type of a value is taken from the schema of the tool.
"""

import ast
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from quire_engine.parsers.call_grammar import CallGrammar, Marks, check_parameter_name, either
from quire_engine.parsers.format import Content
from quire_engine.parsers.json_reader import JsonValueReader
from quire_engine.parsers.json_text import dump_json, load_json, repair_surrogates
from quire_engine.parsers.lexer import Lexeme
from quire_engine.parsers.tool import ALL_TYPES, Tool, json_types
from quire_engine.structured_outputs.composed_constraint import quote
from quire_spec.errors import InvalidArgument
from quire_spec.protocol.parsed_output import Event, ToolCallArguments, ToolCallStart

_NAME = re.compile(r"[^\s<>]([^<>\n]*[^\s<>])?")
_TEXT_KEYWORDS = frozenset(
    {"enum", "const", "pattern", "format", "minLength", "maxLength", "$ref", "allOf", "anyOf", "oneOf", "not", "if"}
)
"""Keywords that can restrict a string."""


@dataclass(frozen=True, slots=True)
class XmlMarks:
    """The marks of one format, and how a model writes a call with them."""

    start: str
    end: str
    function: str
    """Mark before the name of a function. If it is empty, the name follows the start mark and ends at the next mark."""
    end_function: str
    """Mark that ends a function; empty if the end mark of the call does."""
    parameter: str
    """Mark before the name of a parameter."""
    value: str
    """What ends the name of a parameter: `>`, or a mark."""
    end_parameter: str
    written_function: str
    """What a model writes between the start mark and the first parameter; contains `{}` for the name."""
    written_parameter: str
    """What a model writes before a value; contains `{}` for the name."""
    written_end_parameter: str
    """What a model writes after a value; contains `end_parameter`."""
    written_end: str
    """What a model writes between the last parameter and the end mark."""
    other: str = ""
    """Mark without a meaning of its own."""

    @property
    def has_quoted_names(self) -> bool:
        """Whether a model writes names between quotation marks."""
        return '"{}"' in self.written_parameter

    @property
    def all(self) -> tuple[str, ...]:
        """All marks."""
        marks = (
            *(self.start, self.end, self.function, self.end_function, self.parameter, self.end_parameter, self.other),
            "" if self.value == ">" else self.value,
        )
        return tuple(filter(None, marks))


@dataclass(frozen=True, slots=True)
class _Notation:
    """How the values of a parameter are written. The grammar writes this notation, and the parser expects it."""

    is_text: bool
    """True if a value is any text. Otherwise, it is JSON; a text that is not JSON of a type in `types` is a string."""
    types: frozenset[str]

    @classmethod
    def of(cls, syntax: XmlMarks, tool: Tool, schema: Any) -> "_Notation":
        """Return the notation of a parameter of a tool with this schema."""
        types = tool.types_of(schema)
        is_free = isinstance(schema, Mapping) and _TEXT_KEYWORDS.isdisjoint(schema)
        return cls((is_free and types in ({"string"}, ALL_TYPES)) or _texts(syntax, schema) != [], types)


_ANY_TEXT = _Notation(True, ALL_TYPES)


class XmlCallsFormat:
    """The parser of one output."""

    def __init__(self, syntax: XmlMarks, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """`tools` are the tools of the request, in the form of the OpenAI API."""
        self.marks = frozenset(syntax.all)
        self.start_marks = (syntax.start,)
        self._syntax = syntax
        self._value_ends = (syntax.end_parameter, syntax.parameter, syntax.end_function, syntax.end)
        self._tools = {str(tool["function"]["name"]): tool["function"] for tool in tools}
        self._content = Content()
        self._num_calls = 0
        self._state = "content"
        """State: content, call, name, function, key, value, end_of_value or end. In the state end_of_value, the end
        mark of a value has arrived, and it is text unless another mark follows. In the state end, the function has
        ended, but not the call."""
        self._text = ""
        """Text of the current name, key or value so far."""
        self._held = ""
        """In the state end_of_value: the mark and the whitespace after it."""
        self._json = JsonValueReader()
        """Reader of the current value if it is JSON. Inside its strings, marks are text."""
        self._notations: Mapping[str, _Notation] = {}
        """Notations of the parameters of the current function."""
        self._notation = _ANY_TEXT
        self._key = ""
        self._num_arguments = 0

    def cut(self) -> None:
        """Drop the line breaks before and after the current position."""
        self._content.cut()

    def feed(self, lexeme: Lexeme) -> Iterator[Event]:
        """Take the next lexeme."""
        text, is_mark = lexeme.text, lexeme.is_mark
        if self._state == "value":
            is_end = is_mark and text in self._value_ends and not self._json.in_string
            if is_end and text == self._syntax.end_parameter:
                self._state, self._held = "end_of_value", text
                return
            if not is_end:
                self._add_to_value(text)
                return
            # The end mark of the value is missing.
            yield from self._end_value()
        elif self._state == "end_of_value":
            if not (is_mark and text != self._syntax.end_parameter):
                self._held += text
                if is_mark or text.strip():
                    self._continue_value()
                return
            yield from self._end_value()
        if is_mark:
            yield from self._take_mark(text)
        elif self._state == "content":
            yield from self._content.write(text)
        elif self._state in ("name", "key"):
            # A name is short, but a model can write any text.
            name, end, rest = text.partition(">") if self._syntax.value == ">" else (text, "", "")
            self._text += name
            if end:
                yield from self._end_name()
                if self._state == "value":
                    self._add_to_value(rest)
        elif self._state == "end" and (text := text.lstrip()):
            # The end mark of the call is missing.
            self._state = "content"
            yield from self._content.write(text)

    def _continue_value(self) -> None:
        """Continue a value, because its end mark was text. If a second end mark has arrived, it can be the real one."""
        held, self._held, self._state = self._held, "", "value"
        end = self._syntax.end_parameter
        is_second_mark = held.endswith(end)
        self._add_to_value(held.removesuffix(end) if is_second_mark else held)
        if is_second_mark:
            self._state, self._held = "end_of_value", end

    def _add_to_value(self, text: str) -> None:
        self._text += text
        for char in text if not self._notation.is_text else "":
            if not (self._json.done or self._json.failed):
                self._json.feed(char)

    def _take_mark(self, mark: str) -> Iterator[Event]:
        syntax = self._syntax
        if self._state == "name" and not syntax.function:
            yield from self._end_name()
        if mark in (syntax.start, syntax.function) and self._state == "function":
            # The end marks of the function and of the call are missing.
            yield from self._end_call(syntax.end)
        if mark == syntax.start:
            self._state, self._text = "call" if syntax.function else "name", ""
            self._content.cut()
        elif mark == syntax.function and self._state in ("content", "call", "end"):
            self._content.cut()
            self._state, self._text = "name", ""
        elif mark == syntax.parameter and self._state == "function":
            self._state, self._text = "key", ""
        elif mark == syntax.value and self._state == "key":
            yield from self._end_name()
        elif mark == syntax.end or (mark == syntax.end_function and self._state != "content"):
            yield from self._end_call(mark)
        elif self._state == "content" and mark != syntax.other:
            yield from self._content.write(mark)

    def _end_name(self) -> Iterator[Event]:
        name, self._text = self._text.strip(), ""
        if self._syntax.has_quoted_names:
            name = name.removeprefix('"').removesuffix('"')
        if self._state == "key":
            self._state, self._key, self._json = "value", name, JsonValueReader()
            self._notation = self._notations.get(name, _ANY_TEXT)
            return
        if not self._syntax.function and not _NAME.fullmatch(name):
            self._state = "content"
            yield from self._content.write(self._syntax.start + name)
            return
        self._state, self._notations = "function", _notations(self._syntax, name, self._parameters(name))
        self._num_arguments = 0
        yield ToolCallStart(self._num_calls, name)
        self._num_calls += 1

    def _parameters(self, name: str) -> Any:
        """Return the JSON schema of the arguments of a function."""
        return self._tools.get(name, {}).get("parameters")

    def _end_value(self) -> Iterator[Event]:
        text = self._text
        if self._syntax.written_parameter.endswith("\n"):
            text = text.removeprefix("\n").removesuffix("\n")
        value = _to_json(text, self._notation)
        separator = ", " if self._num_arguments else "{"
        self._state, self._num_arguments = "function", self._num_arguments + 1
        yield ToolCallArguments(self._num_calls - 1, f"{separator}{dump_json(self._key)}: {value}")

    def _end_call(self, mark: str) -> Iterator[Event]:
        if self._state == "function":
            yield ToolCallArguments(self._num_calls - 1, "}" if self._num_arguments else "{}")
        self._state = "content" if mark == self._syntax.end else "end"
        self._content.cut()

    def finish(self) -> Iterator[Event]:
        """Return the withheld text. End a call whose end marks are missing."""
        if self._state == "end_of_value":
            yield from self._end_value()
        if self._state == "function":
            yield from self._end_call(self._syntax.end)
        elif self._state == "name":
            yield from self._content.write((self._syntax.function or self._syntax.start) + self._text)
        yield from self._content.finish()


def _notations(syntax: XmlMarks, name: str, schema: Any) -> dict[str, _Notation]:
    """Return the notations of the parameters of a tool."""
    tool = Tool(name, schema if isinstance(schema, Mapping) else {})
    try:
        parameters = {parameter.name: parameter.schema for parameter in tool.parameters()}
    except InvalidArgument:
        properties = tool.schema.get("properties")
        parameters = dict(properties) if isinstance(properties, Mapping) else {}
    return {name: _Notation.of(syntax, tool, parameter) for name, parameter in parameters.items()}


def _texts(syntax: XmlMarks, schema: Any) -> list[str]:
    """Return the texts of an enum or a const that can be written without quotes; an empty list if there are none."""
    keywords = set(schema) & _TEXT_KEYWORDS if isinstance(schema, Mapping) else set()
    if keywords not in ({"enum"}, {"const"}) or schema.get("type", "string") != "string":
        return []
    values = [schema["const"]] if keywords == {"const"} else schema["enum"]
    is_plain = isinstance(values, list) and all(
        isinstance(value, str) and not any(mark in value for mark in syntax.all) for value in values
    )
    return list(values) if is_plain else []


def _to_json(text: str, notation: _Notation) -> str:
    """Return the JSON text of a value that a model wrote without quotes, as JSON or as a Python literal."""
    if not notation.is_text:
        stripped = text.strip()
        with suppress(ValueError, RecursionError):
            # The text of the model is kept, because Python has no number such as 1e400.
            if json_types(load_json(stripped)) & notation.types:
                return repair_surrogates(stripped)
        with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unknown escapes
            value = ast.literal_eval(stripped)
            if json_types(value) & notation.types:
                return dump_json(value)
    return dump_json(text)


def call_grammar(syntax: XmlMarks, tools: Sequence[Tool], marks: Marks, parallel: bool) -> CallGrammar:
    """Return the grammar of calls."""
    end = marks.written(syntax.written_end_parameter, syntax.all)
    text_value, rules = marks.until(
        syntax.written_end_parameter, syntax.all, "text_value", marks.text_without(syntax.all)
    )
    other = " NAME ".join(marks.written(piece, syntax.all) for piece in syntax.written_parameter.split("{}"))
    rules += [f"other: {other} {text_value}", r"NAME: /[\w.-]+/"]
    parts: dict[str, Any] = {}
    for i, tool in enumerate(tools):
        parameters = [] if tool.is_enforced else ["other*"]
        for j, parameter in enumerate(tool.parameters() if tool.is_enforced else ()):
            check_parameter_name(tool, parameter.name, _NAME)
            head = marks.written(syntax.written_parameter.replace("{}", parameter.name), syntax.all)
            texts = _texts(syntax, parameter.schema)
            if not _Notation.of(syntax, tool, parameter.schema).is_text:
                value = f"@value_{i}_{j} {end}"
                parts[f"value_{i}_{j}"] = parameter.schema
            elif texts:
                value = f"{either(quote(text) for text in texts)} {end}"
            else:
                value = text_value
            parameters.append(f"({head} {value})" + ("" if parameter.is_required else "?"))
        head = marks.written(syntax.written_function.replace("{}", tool.name), syntax.all)
        rules.append(f"call_{i}: {head} {' '.join(parameters)}")
    call = either(f"call_{i}" for i in range(len(tools)))
    expression = f"{call} {marks.written(syntax.written_end + syntax.end, syntax.all)}"
    starts = [syntax.start, syntax.function] if syntax.function else [syntax.start]
    return CallGrammar(
        syntax.start, expression, "\n" if parallel else None, tuple(rules), parts, marks.text_without(starts)
    )
