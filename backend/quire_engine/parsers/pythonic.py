# SPDX-License-Identifier: Apache-2.0
"""Tool calls of Llama 3.2 and Llama 4 as a Python list: `[f(a=1), g(b="x")]`.

Python text has no end that can be found without parsing, so a list is withheld until its brackets are balanced.
"""

import ast
import json
from collections.abc import Iterator

from quire_engine.parsers.events import Event, ToolCallArguments, ToolCallStart
from quire_engine.parsers.format import Content
from quire_engine.parsers.lexer import Lexeme

_START, _END = "<|python_start|>", "<|python_end|>"
_MAX_CHARS = 65_536
_MAX_DEPTH = 64
"""Python's parser recurses."""
_CONSTANTS = {"true": True, "false": False, "null": None}


class PythonicFormat:
    """The parser of one output."""

    marks = frozenset((_START, _END))

    def __init__(self) -> None:
        self._content = Content()
        self._num_calls = 0
        self._list = ""
        """Text of the list so far, with whitespace before it."""
        self._depth = 0
        self._quote = ""
        self._is_escaped = False
        self._is_content = False

    def cut(self) -> None:
        """Drop line breaks around this place."""
        self._content.cut()

    def feed(self, lexeme: Lexeme) -> Iterator[Event]:
        """Take the next lexeme."""
        if lexeme.is_mark:
            if lexeme.text == _START:
                self._is_content = False
                self._content.cut()
            return
        for position, char in enumerate(lexeme.text):
            if self._is_content:
                yield from self._content.write(lexeme.text[position:])
                return
            yield from self._take(char)

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
            yield from self._calls()

    def _calls(self) -> Iterator[Event]:
        try:
            calls = _parse_calls(self._list.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            yield from self._give_up()
            return
        self._list, self._is_content = "", True
        self._content.cut()
        for name, arguments in calls:
            yield ToolCallStart(self._num_calls, name)
            yield ToolCallArguments(self._num_calls, json.dumps(arguments, ensure_ascii=False))
            self._num_calls += 1

    def _give_up(self) -> Iterator[Event]:
        text, self._list, self._depth, self._is_content = self._list, "", 0, True
        yield from self._content.write(text)

    def finish(self) -> Iterator[Event]:
        """Return the withheld text."""
        if self._list:
            yield from self._give_up()
        yield from self._content.finish()


def _parse_calls(text: str) -> list[tuple[str, dict[str, object]]]:
    body = ast.parse(text, mode="eval").body
    if not isinstance(body, ast.List) or not body.elts:
        raise ValueError("no list of calls")
    return [_parse_call(node) for node in body.elts]


def _parse_call(node: ast.expr) -> tuple[str, dict[str, object]]:
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        raise ValueError("no call with keywords")
    arguments: dict[str, object] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("no keyword")
        arguments[keyword.arg] = _literal(keyword.value)
    json.dumps(arguments)  # bytes, sets and complex numbers are no JSON
    return ast.unparse(node.func), arguments


def _literal(node: ast.expr) -> object:
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List):
        return [_literal(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True)}
    return ast.literal_eval(node)


def _key(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise ValueError("keys must be texts")
    return node.value
