# SPDX-License-Identifier: Apache-2.0
"""Reads one tool call character by character. The call is a JSON object that contains a name and arguments.

The formats of Hermes, Llama and Mistral use this reader.
"""

from collections.abc import Collection, Iterator

from quire_engine.parsers.json_reader import JsonObjectReader
from quire_engine.parsers.json_text import load_json, repair_surrogates
from quire_spec.protocol.parsed_output import Event, ToolCallArguments, ToolCallStart

_ARGUMENT_KEYS = ("arguments", "parameters")
CALL_KEYS = ("name", *_ARGUMENT_KEYS, "type", "id")
"""Keys that an object with a call can have."""


class JsonCallReader:
    """The reader of one call. Once the name is known, arguments are emitted as they arrive."""

    def __init__(self, index: int, known_names: Collection[str] | None = None) -> None:
        """If `known_names` is given, the text can also be another object. It is a call only if its name is one of these
        names and if it has arguments; its keys must be those of a call.
        """
        self._raw: list[str] = []
        self.started = False
        """True if the start of the call was emitted."""
        self._index = index
        self._known_names = known_names
        self._object = JsonObjectReader()
        self._name_parts: list[str] = []
        self._name: str | None = None
        self._arguments_key = ""
        """Key of the arguments; empty if they have not begun."""
        self._has_all_arguments = False
        self._arguments: list[str] = []
        """Arguments that are withheld, because the name of the tool is not known yet or because they are not an object.
        Some models write the arguments as JSON inside a string; other values are replaced with an empty object."""
        self._is_object = False
        self._is_other = False

    @property
    def raw(self) -> str:
        """All text before the call is started. The text becomes content if the object is not a call."""
        return "".join(self._raw)

    @property
    def done(self) -> bool:
        """Whether the object is complete."""
        return self._object.done

    @property
    def failed(self) -> bool:
        """True if the text is not a JSON object, or not a call."""
        return self._object.failed or self._is_other

    @property
    def in_string(self) -> bool:
        """True between the quotation marks of a string, where a mark is text."""
        return self._object.in_string

    def feed(self, char: str) -> Iterator[Event]:
        """Take one character."""
        if not self.started:
            self._raw.append(char)
        for key, part in self._object.feed(char):
            if key == "name" and self._name is None:
                self._name_parts.append(part)
            elif key in _ARGUMENT_KEYS and not self._has_all_arguments and self._arguments_key in ("", key):
                if not self._arguments_key:
                    self._arguments_key, self._is_object = key, part == "{"
                self._arguments.append(part)
        if self._name_parts and self._object.key is None:
            self._name, self._name_parts = _decoded_string("".join(self._name_parts)), []
        self._has_all_arguments = self._arguments_key != "" and (self._has_all_arguments or self._object.key is None)
        if self._known_names is not None and not self.started:
            current = self._object.key
            has_wrong_name = self._name is not None and self._name not in self._known_names
            self._is_other = has_wrong_name or (current is not None and current not in CALL_KEYS)
        is_call = self._name is not None and (self._known_names is None or self._arguments_key != "")
        if not self.started and is_call and not self._is_other:
            self.started = True
            yield ToolCallStart(self._index, self._name or "")
        if self.started and self._is_object and self._arguments:
            yield ToolCallArguments(self._index, "".join(self._arguments))
            self._arguments = []
        if self.done and self.started and not self._is_object:
            decoded = _decoded_string("".join(self._arguments)) or ""
            yield ToolCallArguments(self._index, decoded if _is_object(decoded) else "{}")


def _is_object(text: str) -> bool:
    try:
        return isinstance(load_json(text), dict)
    except (ValueError, RecursionError):
        return False


def _decoded_string(text: str) -> str | None:
    try:
        value = load_json(text)
    except (ValueError, RecursionError):
        return None
    return repair_surrogates(value) if isinstance(value, str) and value else None
