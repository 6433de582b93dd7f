# SPDX-License-Identifier: Apache-2.0
"""The parser of outputs that the response template of a checkpoint describes.

Reasoning and content are emitted as they arrive, and each call when its end has arrived. A pattern can match more text
when more text arrives. Therefore, from the first text with which a pattern can begin, the output is parsed when it has
ended.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire_engine.parsers.json_text import dump_json, load_json
from quire_engine.parsers.lexer import Lexeme
from quire_engine.parsers.response_template.template import (
    CALLS,
    CONTENT,
    REASONING,
    Anchor,
    Field,
    ResponseTemplate,
    sequence_of,
)
from quire_engine.parsers.response_template.values import transformed, typed_argument
from quire_spec.protocol.parsed_output import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallStart

_MAX_CHARS = 65_536
"""Maximum length of a call, and of the text that is parsed when the output has ended. A longer text is content, because
a pattern of the template can take quadratic time."""


@dataclass(frozen=True, slots=True)
class _Watch:
    """What can come next in a field."""

    opens: tuple[Field, ...]
    """Fields that can begin."""
    closing: Field | None
    """Field that can end."""

    def anchors(self) -> Iterator[tuple[Field, Anchor, bool]]:
        """Yield each field that can begin or end, where, and whether it begins."""
        for field in sorted(self.opens, key=lambda field: field.name):
            if field.open is not None:
                yield field, field.open, True
        if self.closing is not None and self.closing.close is not None:
            yield self.closing, self.closing.close, False


class _Texts:
    """Finds the texts of a watch in an output that arrives in parts."""

    def __init__(self, watch: _Watch) -> None:
        anchors = [anchor for _, anchor, _ in watch.anchors()]
        self.is_unknown = any(not anchor.literals and not anchor.prefix for anchor in anchors)
        """True if a pattern can match anywhere."""
        self.prefixes = {anchor.prefix for anchor in anchors if not anchor.literals}
        texts = {text for anchor in anchors for text in (anchor.literals or (anchor.prefix,)) if text}
        ordered = sorted(texts, key=lambda text: (-len(text), text))
        self.pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        self._beginnings = frozenset(text[:end] for text in texts for end in range(1, len(text)))
        self._longest = max(map(len, self._beginnings), default=0)

    def beginning(self, text: str) -> int:
        """Return the position from which the end of a text can be the beginning of a longer text."""
        longest = min(self._longest, len(text))
        return len(text) - next((n for n in range(longest, 0, -1) if text[-n:] in self._beginnings), 0)


class ResponseTemplateFormat:
    """The parser of one output."""

    marks: frozenset[str] = frozenset()

    def __init__(
        self,
        template: ResponseTemplate,
        tools: Sequence[Mapping[str, Any]] = (),
        prompt: str = "",
        has_calls: bool = True,
        has_reasoning: bool = True,
    ) -> None:
        """`prompt` is the text of the prompt, whose last message the output continues. If `has_calls` or
        `has_reasoning` is False, calls or reasoning are content, as they are written."""
        self._is_kept = {REASONING: not has_reasoning, CALLS: not has_calls, CONTENT: False}
        self._implicit = template.implicit
        self._fields = template.fields
        self._watches = {field.name: _Watch((), field) for field in template.fields if field is not self._implicit}
        outside = _Watch(tuple(template.fields), self._implicit)
        self._watches |= dict.fromkeys(([self._implicit.name] if self._implicit else []) + [""], outside)
        self._texts = {name: _Texts(watch) for name, watch in self._watches.items()}
        self._parameters = {str(tool["function"]["name"]): _properties(tool["function"]) for tool in tools}
        self._num_calls = 0
        self._field = self._implicit
        """The current field; None between fields if no field gets other text."""
        self._opening = ""
        """Text that began the current field."""
        self._captures: dict[str, str] = {}
        self._body: list[str] = []
        """Text of the current field, if it is a call."""
        self._space = ""
        """Whitespace that is withheld, because it is dropped at the end of the field."""
        self._has_text = False
        """True if text of the current field was emitted."""
        self._buffer = ""
        """Text that has arrived and can be the beginning of a mark."""
        self._held: list[str] = []
        """Text that is parsed at the end of the output."""
        self._num_held_chars = 0
        for _ in self._parse_rest(template.last_message(prompt)):
            pass
        self._num_calls, self._space = 0, ""

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text is reasoning."""
        return self._field is not None and self._field.name == REASONING and not self._is_kept[REASONING]

    def feed(self, lexeme: Lexeme) -> Iterator[Event]:
        """Take the next lexeme."""
        yield from self._parse_available(lexeme.text)

    def _parse_available(self, text: str) -> Iterator[Event]:
        if self._held:
            yield from self._hold(text)
            return
        self._buffer += text
        while self._buffer:
            watch, texts = self._current_watch()
            if texts.is_unknown:
                held, self._buffer = self._buffer, ""
                yield from self._hold(held)
                return
            match = texts.pattern.search(self._buffer) if texts.pattern is not None else None
            undecided = texts.beginning(self._buffer)
            if match is None or undecided <= match.start():
                ready, self._buffer = self._buffer[:undecided], self._buffer[undecided:]
                yield from self._write(ready)
                return
            before, rest = self._buffer[: match.start()], self._buffer[match.end() :]
            self._buffer = rest
            yield from self._write(before)
            if match[0] in texts.prefixes:
                self._buffer = ""
                yield from self._hold(match[0] + rest)
                return
            field, is_open = next((f, o) for f, anchor, o in watch.anchors() if match[0] in anchor.literals)
            yield from self._cross(field, is_open, match[0], {})

    def _hold(self, text: str) -> Iterator[Event]:
        """Keep text until the output has ended. If it is too long, it is content, and so is all text after it."""
        self._num_held_chars += len(text)
        self._held.append(text)
        if self._num_held_chars > _MAX_CHARS:
            yield ContentDelta("".join(self._held))
            self._held = [""]

    def _current_watch(self) -> tuple[_Watch, _Texts]:
        name = self._field.name if self._field is not None else ""
        return self._watches[name], self._texts[name]

    def _parse_rest(self, text: str) -> Iterator[Event]:
        """Parse the end of an output."""
        position, search, last_empty = 0, _Search(text), -1
        while True:
            watch, _ = self._current_watch()
            found = [
                (match.start(), match.start() - match.end(), not is_open, field.name, field, is_open, match)
                for field, anchor, is_open in watch.anchors()
                if (match := search.next(anchor.pattern, position)) is not None
            ]
            if not found:
                break
            *_, field, is_open, match = min(found, key=lambda item: item[:4])
            yield from self._write(text[position : match.start()])
            groups = {name: value for name, value in match.groupdict().items() if value is not None}
            yield from self._cross(field, is_open, match[0], groups)
            position = match.end()
            if match.start() == match.end() == last_empty:
                # Empty matches would follow each other at the same place.
                break
            last_empty = match.end() if match.start() == match.end() else last_empty
        yield from self._write(text[position:])

    def _cross(self, field: Field, is_open: bool, text: str, groups: dict[str, str]) -> Iterator[Event]:
        """Begin or end a field."""
        if is_open:
            yield from self._end_field("", {})
            self._field, self._opening, self._captures = field, text, groups
            if self._is_kept[field.name] and text:
                yield from self._emit(text)
        else:
            yield from self._end_field(text, groups)

    def _write(self, text: str) -> Iterator[Event]:
        """Take text of the current field."""
        field = self._field
        if field is None or not text:
            return
        if self._is_kept[field.name]:
            yield from self._emit(text)
        elif field.name == CALLS:
            self._body.append(text)
        elif not field.strips:
            yield from self._emit(text)
        else:
            text = text if self._has_text else text.lstrip()
            stripped = text.rstrip()
            if stripped:
                yield from self._emit(self._space + stripped)
                self._space = ""
            self._space += text[len(stripped) :]

    def _emit(self, text: str) -> Iterator[Event]:
        self._has_text = True
        yield ReasoningDelta(text) if self.in_reasoning else ContentDelta(text)

    def _end_field(self, closing: str, groups: dict[str, str]) -> Iterator[Event]:
        field, self._captures = self._field, self._captures | groups
        if field is not None and self._is_kept[field.name]:
            if closing:
                yield from self._emit(closing)
        elif field is not None and field.name == CALLS and (self._body or self._opening):
            yield from self._end_calls(field, "".join(self._body), closing)
        self._field, self._opening, self._captures, self._body = self._implicit, "", {}, []
        self._space, self._has_text = "", False

    def _end_calls(self, field: Field, body: str, closing: str) -> Iterator[Event]:
        calls = None
        if len(body) <= _MAX_CHARS:
            calls = _read_calls(field, body, self._captures)
        if calls is None:
            yield ContentDelta(self._opening + body + closing)
            return
        for name, arguments in calls:
            properties = self._parameters.get(name, {})
            typed = {
                key: typed_argument(value, properties[key]) if key in properties else value
                for key, value in arguments.items()
            }
            yield ToolCallStart(self._num_calls, name)
            yield ToolCallArguments(self._num_calls, dump_json(typed))
            self._num_calls += 1

    def finish(self) -> Iterator[Event]:
        """Parse the withheld text, and end the current field."""
        text, self._held, self._buffer = "".join(self._held) + self._buffer, [], ""
        yield from self._parse_rest(text)
        yield from self._end_field("", {})


class _Search:
    """Finds the next matches of several patterns in a text. Each pattern searches the text once."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._matches: dict[re.Pattern[str], re.Match[str] | None] = {}

    def next(self, pattern: re.Pattern[str], position: int) -> re.Match[str] | None:
        """Return the first match at or after a position, which never decreases."""
        match = self._matches.get(pattern)
        if pattern not in self._matches or (match is not None and match.start() < position):
            match = self._matches[pattern] = pattern.search(self._text, position)
        return match


def _read_calls(field: Field, body: str, captures: Mapping[str, str]) -> list[tuple[str, dict[str, Any]]] | None:
    """Return the names and the arguments of the calls in a text; None if it does not contain calls."""
    try:
        value = field.parser(body)
        if field.is_each_transformed:
            if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
                return None
            value = [transformed(field.transform, {**captures, **item}) for item in value]
        elif field.transform is not None:
            value = transformed(field.transform, {**captures, "content": value})
        calls = [_function_of(call) for call in sequence_of(value)]
        for _, arguments in calls:
            dump_json(arguments)
    except (ValueError, TypeError, RecursionError):
        return None
    return calls


def _function_of(call: Any) -> tuple[str, dict[str, Any]]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ValueError("not a call")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise ValueError("the name is missing")
    arguments = load_json(arguments) if isinstance(arguments, str) and arguments else arguments
    return name, arguments if isinstance(arguments, dict) else {}


def _properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}
