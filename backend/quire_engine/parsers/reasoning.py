# SPDX-License-Identifier: Apache-2.0
"""Reasoning between `<think>` and `</think>` before the answer, in the output of any format."""

from collections.abc import Iterator

from quire_engine.parsers.format import ContentFormat
from quire_engine.parsers.lexer import Lexeme
from quire_spec.protocol.parsed_output import Event, ReasoningDelta


class ReasoningFormat:
    """Passes the text after the reasoning to the parser of the answer.

    Reasoning is recognised only at the beginning of the output: `<think>` inside an answer is text. The mark of a call
    ends the reasoning, because some models do not write the end mark before a call.
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
        self._at_end = False
        """True directly after the end mark, where line breaks are dropped."""

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
            if lexeme.is_mark and lexeme.text in (self._end, self._answer.start_mark):
                self._state, self._at_end = "answer", lexeme.text == self._end
                self._answer.cut()
                if not self._at_end:
                    yield from self._answer.feed(lexeme)
            # The model can repeat the start mark when the block is already open. The repeated mark is not text.
            elif not (lexeme.is_mark and lexeme.text == self._start and not self._has_text):
                yield from self._write(lexeme.text)
            return
        is_end = lexeme.is_mark and lexeme.text == self._end
        if self._at_end and (is_end or (not lexeme.is_mark and not lexeme.text.strip("\n"))):
            # Some models repeat the end mark. The repeated mark is not text.
            return
        self._at_end = False
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
