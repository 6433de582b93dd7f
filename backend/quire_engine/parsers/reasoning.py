# SPDX-License-Identifier: Apache-2.0
"""Reasoning between `<think>` and `</think>` before the answer, in the output of any format."""

from collections.abc import Iterator
from typing import Protocol

from quire_engine.parsers.format import Format
from quire_engine.parsers.lexer import Lexeme
from quire_spec.protocol.parsed_output import Event, ReasoningDelta


class ContentFormat(Format, Protocol):
    """A format in which reasoning can come before the answer."""

    def cut(self) -> None:
        """Drop the line breaks before and after the current position."""
        ...


class ReasoningFormat:
    """Passes the text after the reasoning to the parser of the answer.

    Reasoning is recognised only at the beginning of the output: `<think>` inside an answer is text.
    """

    def __init__(
        self, answer: ContentFormat, start: str = "<think>", end: str = "</think>", is_open: bool = False
    ) -> None:
        """Set `is_open` if the prompt ends inside the reasoning. In that case, the output contains the end of the
        reasoning, but not its beginning."""
        self.marks = answer.marks | {start, end}
        self._answer = answer
        self._start, self._end = start, end
        self._state = "reasoning" if is_open else "begin"
        """State: begin, reasoning or answer."""
        self._line_breaks = ""
        """Line breaks that are withheld until it is known whether the reasoning begins or ends directly after them; if
        it does, they are dropped."""
        self._has_text = False

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text is reasoning."""
        return self._state == "reasoning"

    def feed(self, lexeme: Lexeme) -> Iterator[Event]:
        """Take the next lexeme."""
        if self._state == "begin":
            if lexeme.is_mark and lexeme.text == self._start:
                self._state, self._line_breaks = "reasoning", ""
                return
            if not lexeme.is_mark and not lexeme.text.strip():
                self._line_breaks += lexeme.text
                return
            self._state = "answer"
            if self._line_breaks:
                yield from self._answer.feed(Lexeme(self._line_breaks))
                self._line_breaks = ""
        if self._state == "reasoning":
            if lexeme.is_mark and lexeme.text == self._end:
                self._state = "answer"
                self._answer.cut()
            # The model can repeat the start mark when the block is already open. The repeated mark is not text.
            elif not (lexeme.is_mark and lexeme.text == self._start and not self._has_text):
                yield from self._write(lexeme.text)
            return
        is_stray = lexeme.is_mark and lexeme.text in (self._start, self._end) and lexeme.text not in self._answer.marks
        yield from self._answer.feed(Lexeme(lexeme.text) if is_stray else lexeme)

    def _write(self, text: str) -> Iterator[Event]:
        if not self._has_text:
            text = text.lstrip("\n")
        stripped = text.rstrip("\n")
        if stripped:
            self._has_text = True
            yield ReasoningDelta(self._line_breaks + stripped)
            self._line_breaks = ""
        self._line_breaks += text[len(stripped) :]

    def finish(self) -> Iterator[Event]:
        """Return the withheld text."""
        if self._state == "begin" and self._line_breaks:
            yield from self._answer.feed(Lexeme(self._line_breaks))
        yield from self._answer.finish()
