# SPDX-License-Identifier: Apache-2.0
"""Tool calls of Llama 3: an output that begins with `{` is one or several objects `{"name": ..., "parameters": ...}`.

Several calls are separated by semicolons. An optional `<|python_tag|>` stands before them.
"""

from collections.abc import Iterator

from quire_engine.parsers.events import Event
from quire_engine.parsers.format import Content
from quire_engine.parsers.json_call import JsonCallReader
from quire_engine.parsers.lexer import Lexeme

_TAG = "<|python_tag|>"


class LlamaJsonFormat:
    """The parser of one output."""

    marks = frozenset((_TAG,))

    def __init__(self) -> None:
        self._content = Content()
        self._num_calls = 0
        self._call: JsonCallReader | None = None
        self._is_content = False
        """The output is not a call, or content follows a call."""
        self._between = ""
        """Text before the next call."""

    def cut(self) -> None:
        """Drop line breaks around this place."""
        self._content.cut()

    def feed(self, lexeme: Lexeme) -> Iterator[Event]:
        """Take the next lexeme."""
        if lexeme.is_mark:
            # Some checkpoints write content before the tag.
            self._is_content, self._between = False, ""
            self._content.cut()
            return
        for position, char in enumerate(lexeme.text):
            if self._is_content:
                yield from self._content.write(lexeme.text[position:])
                return
            yield from self._take(char)

    def _take(self, char: str) -> Iterator[Event]:
        if self._call is None:
            if char == "{":
                self._call = JsonCallReader(self._num_calls)
                yield from self._call.feed(char)
            elif char.isspace() or (char in ";," and self._num_calls):
                self._between += char
            else:
                self._is_content = True
                yield from self._content.write(self._between + char)
                self._between = ""
            return
        call = self._call
        yield from call.feed(char)
        self._num_calls += call.started and call.done
        if call.failed or (call.done and not call.started):
            yield from self._end_as_content()
        elif call.done:
            self._call, self._between = None, ""
            self._content.cut()

    def finish(self) -> Iterator[Event]:
        """Return what was withheld."""
        if self._call is not None:
            yield from self._end_as_content()
        yield from self._content.finish()

    def _end_as_content(self) -> Iterator[Event]:
        call, self._call = self._call, None
        self._is_content = True
        if call is not None and not call.started:
            yield from self._content.write(self._between + call.raw)
        self._between = ""
