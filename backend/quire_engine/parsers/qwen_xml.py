# SPDX-License-Identifier: Apache-2.0
"""Tool calls of Qwen3-Coder and Qwen3.5: `<function=f><parameter=k>v</parameter></function>` in `<tool_call>`.

Values have no quotes, so the JSON type of a value is taken from the schema of the tool.
"""

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire_engine.parsers.call_grammar import CallGrammar, Marks, Tool, either
from quire_engine.parsers.format import Content
from quire_engine.parsers.lexer import Lexeme
from quire_engine.structured_outputs.composed_constraint import quote
from quire_spec.protocol.parsed_output import Event, ToolCallArguments, ToolCallStart

_START, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _END_FUNCTION, _PARAMETER, _END_PARAMETER = "<function=", "</function>", "<parameter=", "</parameter>"
_VALUE_END = f"\n{_END_PARAMETER}\n"

_Types = Mapping[str, frozenset[str]]
"""Maps the names of a function's parameters to their JSON types."""


class QwenXmlFormat:
    """The parser of one output."""

    marks = frozenset((_START, _END, _FUNCTION, _END_FUNCTION, _PARAMETER, _END_PARAMETER))

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """`tools` are the tools of the request, in the form of the OpenAI API."""
        self._types_by_function = dict(_parameter_types(tool) for tool in tools)
        self._content = Content()
        self._num_calls = 0
        self._state = "content"
        """State: content, call, name, function, key or value."""
        self._text = ""
        """Text of the current name, key or value so far."""
        self._types: _Types = {}
        self._key = ""
        self._num_arguments = 0

    def cut(self) -> None:
        """Drop the line breaks before and after the current position."""
        self._content.cut()

    def feed(self, lexeme: Lexeme) -> Iterator[Event]:
        """Take the next lexeme."""
        if lexeme.is_mark and not (self._state == "value" and lexeme.text != _END_PARAMETER):
            yield from self._take_mark(lexeme.text)
        elif self._state == "content":
            yield from self._content.write(lexeme.text)
        elif self._state in ("name", "key"):
            text, end, rest = (self._text + lexeme.text).partition(">")
            self._text = text
            if end:
                yield from self._end_name()
                self._text = rest if self._state == "value" else ""
        elif self._state == "value":
            self._text += lexeme.text

    def _take_mark(self, mark: str) -> Iterator[Event]:
        if mark == _START:
            self._state = "call"
            self._content.cut()
        elif mark == _FUNCTION and self._state in ("content", "call"):
            self._content.cut()
            self._state, self._text = "name", ""
        elif mark == _PARAMETER and self._state == "function":
            self._state, self._text = "key", ""
        elif mark == _END_PARAMETER and self._state == "value":
            yield from self._end_value()
        elif mark in (_END_FUNCTION, _END):
            yield from self._end_call(mark)
        elif self._state == "content":
            yield from self._content.write(mark)

    def _end_name(self) -> Iterator[Event]:
        name = self._text.strip()
        if self._state == "key":
            self._state, self._key = "value", name
            return
        self._state, self._types = "function", self._types_by_function.get(name, {})
        self._num_arguments = 0
        yield ToolCallStart(self._num_calls, name)
        self._num_calls += 1

    def _end_value(self) -> Iterator[Event]:
        value = _typed(self._text.removeprefix("\n").removesuffix("\n"), self._types.get(self._key, frozenset()))
        separator = ", " if self._num_arguments else "{"
        entry = f"{json.dumps(self._key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
        self._state, self._num_arguments = "function", self._num_arguments + 1
        yield ToolCallArguments(self._num_calls - 1, separator + entry)

    def _end_call(self, mark: str) -> Iterator[Event]:
        if self._state == "function":
            yield ToolCallArguments(self._num_calls - 1, "}" if self._num_arguments else "{}")
        # Text between the end of the function and the end of the call is not content.
        self._state = "content" if mark == _END else "call"
        self._content.cut()

    def finish(self) -> Iterator[Event]:
        """Return the withheld text."""
        if self._state == "name":
            yield from self._content.write(_FUNCTION + self._text)
        yield from self._content.finish()


def _is_plain_text(schema: Mapping[str, Any]) -> bool:
    """Return whether the schema accepts every text."""
    others = ("enum", "const", "$ref", "pattern", "format", "minLength", "maxLength", "allOf")
    return _types_of(schema) in (frozenset(), {"string"}) and not any(name in schema for name in others)


def _parameter_types(tool: Mapping[str, Any]) -> tuple[str, _Types]:
    function = tool.get("function") or tool
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    schemas = properties.items() if isinstance(properties, Mapping) else ()
    return str(function.get("name")), {str(key): _types_of(schema) for key, schema in schemas}


def _types_of(schema: object) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return frozenset()
    stated = schema.get("type")
    types = {name for name in (stated if isinstance(stated, list) else [stated]) if isinstance(name, str)}
    for keyword in ("anyOf", "oneOf"):
        branches = schema.get(keyword)
        for branch in branches if isinstance(branches, list) else ():
            types |= _types_of(branch)
    return frozenset(types)


def _typed(text: str, types: frozenset[str]) -> object:
    if not types or types == {"string"}:
        return text
    for parse in (json.loads, ast.literal_eval):
        try:
            value = parse(text.strip())
            json.dumps(value)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        if _json_types(value) & types:
            return value
    return text


def _json_types(value: object) -> set[str]:
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number"} | ({"integer"} if value.is_integer() else set())
    if isinstance(value, str):
        return {"string"}
    return {"object"} if isinstance(value, dict) else {"array"}


def call_grammar(tools: Sequence[Tool], marks: Marks, parallel: bool) -> CallGrammar:
    """Return the grammar of calls. A value of type string is any text up to the end mark of its parameter. All other
    values are JSON.
    """
    rules = ["TEXT_VALUE: /(.|\\n)*/", f"text_value[lazy]: TEXT_VALUE {quote(_VALUE_END)}"]
    parts: dict[str, Mapping[str, Any]] = {}
    for i, tool in enumerate(tools):
        parameters = []
        for j, (name, schema, is_required) in enumerate(tool.properties()):
            head = quote(f"{_PARAMETER}{name}>\n")
            enum = schema.get("enum")
            if _is_plain_text(schema):
                parameter = f"({head} text_value)"
            elif isinstance(enum, list) and enum and all(isinstance(value, str) for value in enum):
                parameter = f"({head} {either(map(quote, enum))} {quote(_VALUE_END)})"
            else:
                parameter = f"({head} @value_{i}_{j} {quote(_VALUE_END)})"
                parts[f"value_{i}_{j}"] = schema
            parameters.append(parameter if is_required else f"{parameter}?")
        rules.append(f"call_{i}: {quote(f'{_FUNCTION}{tool.name}>' + chr(10))} {' '.join(parameters)}")
    call = either(f"call_{i}" for i in range(len(tools)))
    expression = f'"\\n" {call} {quote(_END_FUNCTION + chr(10))} {marks.terminal(_END)}'
    return CallGrammar(_START, expression, "\n" if parallel else None, tuple(rules), parts)
