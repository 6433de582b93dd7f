# SPDX-License-Identifier: Apache-2.0
"""Reads one tool call character by character. The call is a JSON object that contains a name and arguments.

The formats of Hermes, Llama and Mistral use this reader.
"""

import json
from collections.abc import Iterator

from quire_engine.parsers.json_reader import JsonObjectReader
from quire_spec.protocol.parsed_output import Event, ToolCallArguments, ToolCallStart

_ARGUMENT_KEYS = ("arguments", "parameters")


class JsonCallReader:
    """The reader of one call. Once the name is known, arguments are emitted as they arrive."""

    def __init__(self, index: int) -> None:
        self.raw = ""
        """All text so far. The text becomes content if the object is not a call."""
        self.started = False
        """True if the start of the call was emitted."""
        self._index = index
        self._object = JsonObjectReader()
        self._name_text = ""
        self._arguments = ""
        """Arguments that are withheld because the name of the tool is not known yet. Some models write the arguments as
        JSON inside a string; such a string is withheld until it is complete."""
        self._has_arguments = False
        self._is_quoted = False
        """True if the arguments are a string that contains JSON."""

    @property
    def done(self) -> bool:
        """Whether the object is complete."""
        return self._object.done

    @property
    def failed(self) -> bool:
        """True if the text is not a JSON object."""
        return self._object.failed

    def feed(self, char: str) -> Iterator[Event]:
        """Take one character."""
        self.raw += char
        for key, part in self._object.feed(char):
            if key == "name" and not self.started:
                self._name_text += part
            elif key in _ARGUMENT_KEYS:
                if not self._has_arguments:
                    self._has_arguments, self._is_quoted = True, part == '"'
                self._arguments += part
        if not self.started and (name := self._name()) is not None:
            self.started = True
            yield ToolCallStart(self._index, name)
        if self.started and self._arguments and not self._is_quoted:
            yield ToolCallArguments(self._index, self._arguments)
            self._arguments = ""
        if self.done and self.started:
            yield from self._last_arguments()

    def _last_arguments(self) -> Iterator[Event]:
        if self._arguments:
            decoded = _decoded_string(self._arguments)
            yield ToolCallArguments(self._index, "{}" if decoded is None else decoded)
        elif not self._has_arguments:
            yield ToolCallArguments(self._index, "{}")

    def _name(self) -> str | None:
        if len(self._name_text) < 3 or not self._name_text.endswith('"'):
            return None
        return _decoded_string(self._name_text)


def _decoded_string(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) and value else None
