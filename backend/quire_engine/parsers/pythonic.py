# SPDX-License-Identifier: Apache-2.0
"""Tool calls of Llama 3.2 and Llama 4 as a Python list: `[f(a=1), g(b="x")]`.

A list must be parsed as a whole, so its text is withheld until the last bracket is closed.
"""

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire_engine.parsers.call_grammar import CallGrammar, Marks, Tool
from quire_engine.parsers.format import LeadingCalls
from quire_engine.structured_outputs.composed_constraint import quote
from quire_spec.protocol.parsed_output import Event, ToolCallArguments, ToolCallStart

_START, _END = "<|python_start|>", "<|python_end|>"
_MAX_CHARS = 65_536
_MAX_DEPTH = 64
"""Maximum nesting depth of brackets. The depth is limited because Python's parser is recursive."""
_CONSTANTS = {"true": True, "false": False, "null": None}


class PythonicFormat(LeadingCalls):
    """The parser of one output."""

    marks = frozenset((_START, _END))
    start_mark = _START

    def __init__(self) -> None:
        super().__init__()
        self._list = ""
        """Text of the list so far, including whitespace before the list."""
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

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
    json.dumps(arguments)  # raises an error for bytes, sets and complex numbers
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


def call_grammar(tools: Sequence[Tool], marks: Marks, parallel: bool) -> CallGrammar:
    """Return the grammar of calls. Values are written as JSON, which `_literal` accepts too."""
    rules: list[str] = []
    parts: dict[str, Mapping[str, Any]] = {}
    for i, tool in enumerate(tools):
        properties = tool.properties()
        rules.append(f'call_{i}: {quote(tool.name + "(")} keywords_{i}_0 ")"')
        for j, (name, schema, is_required) in enumerate(properties):
            # The rule "more" applies after a keyword, so it begins with a comma.
            value, rest = f"{quote(name + '=')} @value_{i}_{j}", f"more_{i}_{j + 1}"
            skipped = "" if is_required else f" | keywords_{i}_{j + 1}"
            rules.append(f"keywords_{i}_{j}: {value} {rest}{skipped}")
            skipped = "" if is_required else f" | more_{i}_{j + 1}"
            rules.append(f'more_{i}_{j}: ", " {value} {rest}{skipped}')
            parts[f"value_{i}_{j}"] = schema
        rules += [f'keywords_{i}_{len(properties)}: ""', f'more_{i}_{len(properties)}: ""']
    call = "(" + " | ".join(f"call_{i}" for i in range(len(tools))) + ")"
    repeated = f'(", " {call})*' if parallel else ""
    return CallGrammar("", f'"[" {call} {repeated} "]"', None, tuple(rules), parts)
