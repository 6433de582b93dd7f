# SPDX-License-Identifier: Apache-2.0
"""The interface of a format of tool calls, and the content around calls that formats share."""

from collections.abc import Iterator
from typing import Protocol

from quire_engine.parsers.events import ContentDelta, Event
from quire_engine.parsers.lexer import Lexeme


class Format(Protocol):
    """The parser of one output in one format."""

    marks: frozenset[str]
    """Texts that the lexer must recognise."""

    def feed(self, lexeme: Lexeme) -> Iterator[Event]:
        """Take the next lexeme."""
        ...

    def finish(self) -> Iterator[Event]:
        """Return the withheld text, because the output has ended."""
        ...


class Content:
    """Text of the answer around calls. Line breaks next to a call or to reasoning are not part of it."""

    def __init__(self) -> None:
        self._line_breaks = ""
        """Withheld, because a call can follow."""
        self._at_start = False
        """The next line breaks follow a call or reasoning."""

    def write(self, text: str) -> Iterator[Event]:
        """Emit text except line breaks at its end."""
        if self._at_start:
            text = text.lstrip("\n")
            self._at_start = not text
        stripped = text.rstrip("\n")
        if not stripped:
            self._line_breaks += text
            return
        emitted, self._line_breaks = self._line_breaks + stripped, text[len(stripped) :]
        yield ContentDelta(emitted)

    def cut(self) -> None:
        """Drop line breaks before and after this place."""
        self._line_breaks, self._at_start = "", True

    def finish(self) -> Iterator[Event]:
        """Emit line breaks at the end."""
        if self._line_breaks:
            yield ContentDelta(self._line_breaks)
            self._line_breaks = ""


class PlainText:
    """The format of a model without tool calls: all text is content."""

    marks: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self._content = Content()

    def cut(self) -> None:
        """Drop line breaks around this place."""
        self._content.cut()

    def feed(self, lexeme: Lexeme) -> Iterator[Event]:
        """Emit the text."""
        yield from self._content.write(lexeme.text)

    def finish(self) -> Iterator[Event]:
        """Emit the line breaks at the end."""
        yield from self._content.finish()
