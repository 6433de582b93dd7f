# SPDX-License-Identifier: Apache-2.0
"""The interface that every tool call format implements. The code here that handles the text around calls is the same
for all formats."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol

from quire_engine.parsers.lexer import Lexeme
from quire_spec.protocol.parsed_output import ContentDelta, Event


class Format(Protocol):
    """The parser of one output in one format."""

    marks: frozenset[str]
    """Texts that the lexer must recognise."""

    def feed(self, lexeme: Lexeme) -> Iterator[Event]:
        """Take the next lexeme."""
        ...

    def finish(self) -> Iterator[Event]:
        """Emit the withheld text, because the output has ended."""
        ...


class ContentFormat(Format, Protocol):
    """A format in which reasoning can come before the answer."""

    @property
    def start_marks(self) -> tuple[str, ...]:
        """Marks that begin a call and end open reasoning."""
        ...

    def cut(self) -> None:
        """Drop the line breaks before and after the current position."""
        ...


class Content:
    """Handles the text of the answer around calls. Line breaks next to a call or to reasoning are dropped."""

    def __init__(self) -> None:
        self._line_breaks = ""
        """Line breaks that are withheld, because they are dropped if a call follows."""
        self._at_start = False
        """True directly after a call or reasoning, where line breaks are dropped."""

    def write(self, text: str) -> Iterator[Event]:
        """Emit text, but withhold the line breaks at its end."""
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
        """Drop the line breaks that are withheld, and the line breaks at the start of the next text."""
        self._line_breaks, self._at_start = "", True

    def finish(self) -> Iterator[Event]:
        """Emit the line breaks at the end of the output."""
        if self._line_breaks:
            yield ContentDelta(self._line_breaks)
            self._line_breaks = ""


class LeadingCalls(ABC):
    """Base of formats whose calls stand at the beginning of an output or after a mark."""

    def __init__(self, *marks: str) -> None:
        """A call can follow the first of the marks."""
        self.marks = frozenset(marks)
        self.start_marks = marks[:1]
        self._content = Content()
        self._num_calls = 0
        self._is_content = False
        """True while all text is content, because the next call can begin only after another start mark."""
        self._is_marked = False
        """True if the start mark precedes the current text. A call after the mark can have any name."""

    @property
    @abstractmethod
    def _in_string(self) -> bool:
        """True inside a string of a possible call, where a mark is text."""

    def cut(self) -> None:
        """Drop the line breaks before and after the current position."""
        self._content.cut()

    def feed(self, lexeme: Lexeme) -> Iterator[Event]:
        """Take the next lexeme."""
        if lexeme.is_mark and not self._in_string:
            # Some checkpoints write content before the mark.
            if lexeme.text in self.start_marks:
                yield from self._give_up()
                self._is_content, self._is_marked = False, True
                self._content.cut()
                self._open()
            else:
                yield from self._close()
            return
        for position, char in enumerate(lexeme.text):
            if self._is_content:
                yield from self._content.write(lexeme.text[position:])
                return
            yield from self._take(char)

    def _open(self) -> None:
        """Process the start mark."""
        return

    def _close(self) -> Iterator[Event]:
        """Process another mark."""
        return iter(())

    @abstractmethod
    def _take(self, char: str) -> Iterator[Event]:
        """Process a character of a possible call."""

    @abstractmethod
    def _give_up(self) -> Iterator[Event]:
        """Emit an incomplete call as content."""


class PlainText:
    """The format of models without tool calls: all text is content."""

    marks: frozenset[str] = frozenset()
    start_marks: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._content = Content()

    def cut(self) -> None:
        """Drop the line breaks before and after the current position."""
        self._content.cut()

    def feed(self, lexeme: Lexeme) -> Iterator[Event]:
        """Emit the text."""
        yield from self._content.write(lexeme.text)

    def finish(self) -> Iterator[Event]:
        """Emit the line breaks at the end of the output."""
        yield from self._content.finish()


class CallsOrAnswer:
    """The format of an output that consists either of calls or of a constrained answer. Marks inside the answer are
    text. The calls must begin with a mark.
    """

    def __init__(self, calls: ContentFormat) -> None:
        self.marks, self.start_marks = calls.marks, calls.start_marks
        self._format: ContentFormat = calls
        self._is_decided = False
        self._space = ""
        """Whitespace at the beginning of the output."""
        self._is_cut = False

    def cut(self) -> None:
        """Drop the line breaks before and after the current position."""
        self._is_cut = True
        self._format.cut()

    def feed(self, lexeme: Lexeme) -> Iterator[Event]:
        """Take the next lexeme. The first one decides what the output consists of."""
        if not self._is_decided:
            if not lexeme.is_mark and not lexeme.text.strip():
                self._space += lexeme.text
                return
            self._is_decided = True
            if not lexeme.is_mark:
                self._format = PlainText()
                if self._is_cut:
                    self._format.cut()
            yield from self._format.feed(Lexeme(self._space))
            self._space = ""
        is_text = isinstance(self._format, PlainText)
        yield from self._format.feed(Lexeme(lexeme.text) if is_text else lexeme)

    def finish(self) -> Iterator[Event]:
        """Return the withheld text."""
        if self._space:
            yield from self._format.feed(Lexeme(self._space))
        yield from self._format.finish()
