# SPDX-License-Identifier: Apache-2.0
"""The content types of response templates: each converts the text of a field to a value.

Source: docs/source/en/chat_response_parsing.md of transformers 5.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from quire_engine.parsers.formats.pythonic import read_calls
from quire_engine.parsers.json_text import load_json

ContentParser = Callable[[str], Any]
"""Converts a text; raises ValueError if the text does not have the type."""
_Args = Mapping[str, Any]
_BARE_KEY = re.compile(r'"(?:\\.|[^"\\])*"|(?<=[{,])(\s*)(\w+)(\s*):', re.DOTALL)
_PUT_ASIDE = re.compile("\x01([0-9]{1,9})\x02")
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_TRUE, _BOOLEANS = ("true", "1"), ("true", "1", "false", "0")


def _text(args: _Args) -> ContentParser:
    return str.strip if args.get("strip", True) else str


def _json(args: _Args) -> ContentParser:
    delimiters = [(str(begin), str(end)) for begin, end in args.get("string_delims", [])]
    has_bare_keys, allows_text = bool(args.get("unquoted_keys")), bool(args.get("allow_non_json"))
    to_text = _text(args)

    def parse(text: str) -> Any:
        pieces = [(text, False)]
        for begin, end in delimiters:
            pieces = [part for piece in pieces for part in ([piece] if piece[1] else _split(piece[0], begin, end))]
        # Strings are put aside as numbered JSON strings, so that their text is not changed.
        strings = [piece for piece, is_string in pieces if is_string]
        numbers = iter(range(len(strings)))
        written = "".join(f'"\\u0001{next(numbers)}\\u0002"' if is_string else piece for piece, is_string in pieces)
        if has_bare_keys:
            written = _BARE_KEY.sub(_quote_key, written)
        try:
            return _restore(load_json(written), strings)
        except (ValueError, RecursionError) as error:
            if allows_text:
                return to_text(text)
            raise ValueError(str(error)) from error

    return parse


def _split(text: str, begin: str, end: str) -> Iterator[tuple[str, bool]]:
    """Yield the strings between delimiters and the text between them; the flag is True for a string."""
    position = 0
    while (start := text.find(begin, position)) >= 0 and (stop := text.find(end, start + len(begin))) >= 0:
        yield text[position:start], False
        yield text[start + len(begin) : stop], True
        position = stop + len(end)
    yield text[position:], False


def _quote_key(match: re.Match[str]) -> str:
    return match[0] if match[2] is None else f'{match[1]}"{match[2]}"{match[3]}:'


def _restore(value: Any, strings: list[str]) -> Any:
    """Return a value with the strings that were put aside."""
    if isinstance(value, dict):
        return {_restore(key, strings): _restore(item, strings) for key, item in value.items()}
    if isinstance(value, list):
        return [_restore(item, strings) for item in value]
    if not isinstance(value, str) or (match := _PUT_ASIDE.fullmatch(value)) is None or int(match[1]) >= len(strings):
        return value
    return strings[int(match[1])]


def _nested(args: _Args) -> ContentParser:
    """Return the parser of values inside another value."""
    nested = args.get("value_parser")
    return str if nested is None else CONTENT_TYPES[nested.get("name", "text")](nested.get("args", {}))


def _xml_inline(args: _Args) -> ContentParser:
    pattern, parse_value, merges = (
        re.compile(args["tag_pattern"], re.DOTALL),
        _nested(args),
        args.get("merge_duplicates"),
    )
    if "key" not in pattern.groupindex:
        raise ValueError("tag_pattern must have a group `key`")

    def parse(text: str) -> Any:
        values: dict[str, list[Any]] = {}
        for match in pattern.finditer(text):
            groups = match.groupdict("")
            values.setdefault(groups["key"], []).append(parse_value(groups.get("value", "")))
        return {key: items if merges and len(items) > 1 else items[-1] for key, items in values.items()}

    return parse


def _kv_lines(args: _Args) -> ContentParser:
    line_separator, separator = str(args.get("line_sep", "\n")), str(args.get("kv_sep", ":"))
    to_text, parse_value = _text(args), _nested(args)

    def parse(text: str) -> Any:
        pairs = (to_text(line).partition(separator) for line in text.split(line_separator))
        return {to_text(key): parse_value(to_text(value)) for key, found, value in pairs if found}

    return parse


def _calls(args: _Args) -> ContentParser:
    def parse(text: str) -> Any:
        if (calls := read_calls(text)) is None:
            raise ValueError("not a list of calls")
        return [{"name": name, "arguments": load_json(arguments)} for name, arguments in calls]

    return parse


CONTENT_TYPES: Mapping[str, Callable[[_Args], ContentParser]] = {
    "text": _text,
    "int": lambda args: lambda text: int(text.strip()),
    "float": lambda args: lambda text: float(text.strip()),
    "bool": lambda args: lambda text: text.strip().lower() in _TRUE,
    "json": _json,
    "xml-inline": _xml_inline,
    "kv-lines": _kv_lines,
    "python-call-list": _calls,
}
"""Maps each content type to a function that returns its parser for some arguments."""


def transformed(transform: Any, scope: Mapping[str, Any]) -> Any:
    """Return a template in which each placeholder is replaced by a value of the scope.

    Raises:
        ValueError: the scope has no such value.
    """
    if isinstance(transform, dict):
        return {key: transformed(item, scope) for key, item in transform.items()}
    if isinstance(transform, list):
        return [transformed(item, scope) for item in transform]
    if not isinstance(transform, str) or (match := _PLACEHOLDER.fullmatch(transform)) is None:
        return transform
    value: Any = scope
    for key in match[1].split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"{transform} is missing")
        value = value[key]
    return value


def typed_argument(value: Any, schema: Any) -> Any:
    """Return an argument with a type that the schema of its parameter allows, if it was written as a string."""
    types = list(_types(schema))
    if isinstance(value, list) and types and "array" not in types:
        return [_typed(item, types) if isinstance(item, str) else item for item in value]
    return _typed(value, types) if isinstance(value, str) else value


def _types(schema: Any) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        return
    stated = schema.get("type")
    yield from (name for name in (stated if isinstance(stated, list) else [stated]) if isinstance(name, str))
    for keyword in ("anyOf", "oneOf"):
        branches = schema.get(keyword)
        for branch in branches if isinstance(branches, list) else ():
            yield from _types(branch)
    if schema.get("nullable"):
        yield "null"


def _typed(text: str, types: list[str]) -> Any:
    """Return the first value that the text stands for, in the order of the types; the text if it stands for none."""
    for name in types:
        try:
            value = _TYPED[name](text)
        except (KeyError, ValueError, OverflowError, RecursionError):
            continue
        return value
    return text


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise
        return int(number)


def _number(text: str) -> int | float:
    number = float(text)
    json.dumps(number, allow_nan=False)
    return int(number) if number.is_integer() and "." not in text else number


def _boolean(text: str) -> bool:
    if (word := text.strip().lower()) not in _BOOLEANS:
        raise ValueError("no boolean")
    return word in _TRUE


def _null(text: str) -> None:
    if text.strip() not in ("null", "None"):
        raise ValueError("not null")


def _container(kind: type) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        if not isinstance(value := load_json(text), kind):
            raise ValueError("another type")
        return value

    return convert


_TYPED: Mapping[str, Callable[[str], Any]] = {
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "null": _null,
    "object": _container(dict),
    "array": _container(list),
}
