# SPDX-License-Identifier: Apache-2.0
"""Reads JSON text while it arrives: finds the end of a value, and yields the text of each value in an object.

The text is passed on unchanged. Therefore, the reader checks only the structure and the strings, and does not check
numbers and other literals. The formats of tool calls use this reader.
"""

import json
from collections.abc import Iterator

_WHITESPACE = " \t\r\n"


class JsonValueReader:
    """Reads one value character by character."""

    def __init__(self) -> None:
        self.done = False
        """True if the value is complete."""
        self.failed = False
        """True if the text is not a JSON value."""
        self.in_string = False
        """True between the quotation marks of a string."""
        self._closers: list[str] = []
        self._is_escaped = False
        self._in_literal = False

    def feed(self, char: str) -> bool:
        """Take one character; return whether it belongs to the value. Whitespace before the value does not belong to
        it.
        """
        if self.in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self.in_string, self.done = False, not self._closers
            return True
        if char in _WHITESPACE:
            self.done = self._in_literal and not self._closers
            return bool(self._closers)
        if self._in_literal and not self._closers:
            self.done = char in ",]}"
            return not self.done
        if char == '"':
            self.in_string = True
        elif char in "{[":
            self._closers.append("}" if char == "{" else "]")
        elif char in "}]":
            if not self._closers or self._closers.pop() != char:
                self.failed = True
                return False
            self.done = not self._closers
        elif not self._closers:
            # This can be the start of a number, true, false or null. Such a value ends before the next delimiter.
            self.failed = char not in "-0123456789tfn"
            self._in_literal = not self.failed
            return not self.failed
        return True


class JsonObjectReader:
    """Reads one object; yields the text of each value in parts, and the key of the value with each part. A key that is
    written with escapes is returned as it is written."""

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._expects = "{"
        """The element that must come next: "{", "key", ":", "value" or ","."""
        self._key_parts: list[str] = []
        self._is_escaped = False
        self._key = ""
        self._value = JsonValueReader()

    @property
    def in_string(self) -> bool:
        """True between the quotation marks of a key or of a string."""
        return self._value.in_string if self._expects == "value" else self._expects == "key" and bool(self._key_parts)

    @property
    def key(self) -> str | None:
        """The key of the current value; None if no key is complete."""
        return self._key if self._expects in (":", "value") else None

    def feed(self, char: str) -> Iterator[tuple[str, str]]:
        """Yield (key, character) if the character belongs to a value."""
        if self._expects == "value":
            if self._value.feed(char):
                yield self._key, char
                if self._value.done:
                    self._expects = ","
                return
            if self._value.failed:
                self.failed = True
                return
            if not self._value.done:
                return
            self._expects = ","
        if self._expects == "key" and self._key_parts:
            self._take_in_key(char)
            return
        if char in _WHITESPACE:
            return
        if self._expects == "{" and char == "{":
            self._expects = "key"
        elif self._expects == "key" and char == '"':
            self._key_parts = [char]
        elif self._expects == ":" and char == ":":
            self._expects, self._value = "value", JsonValueReader()
        elif self._expects == "," and char == ",":
            self._expects, self._key_parts = "key", []
        elif char == "}" and self._expects in (",", "key"):
            self.done = True
        else:
            self.failed = True

    def _take_in_key(self, char: str) -> None:
        self._key_parts.append(char)
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            text = "".join(self._key_parts)
            self._key, self._expects = text[1:-1], ":"
            try:
                json.loads(text)
            except ValueError:
                self.failed = True
