# SPDX-License-Identifier: Apache-2.0
"""Reasoning between marks such as `<think>` and `</think>` before the answer, in the output of any format."""

from collections.abc import Iterator

from quire_engine.parsers.format import ContentFormat
from quire_engine.parsers.lexer import Lexeme
from quire_engine.parsers.parser_names import ReasoningMarks
from quire_spec.protocol.parsed_output import Event, ReasoningDelta


class ReasoningFormat:
    """Passes the text after the reasoning to the parser of the answer.

    Reasoning is recognised only at the beginning of the output: `<think>` inside an answer is text. The mark of a call
    ends the reasoning, because some models do not write the end mark before a call.
    """

    def __init__(self, answer: ContentFormat, marks: ReasoningMarks, is_open: bool = False) -> None:
        """Set `is_open` if the prompt ends inside the reasoning. In that case, the output contains the end of the
        reasoning, but not its beginning."""
        self.marks = answer.marks | {*marks.starts, *marks.ends, *(marks.answer or ())}
        self._answer = answer
        self._marks = marks
        self._calls = answer.start_marks if marks.ends_at_call else ()
        """Marks of calls that end the reasoning."""
        self._state = "reasoning" if is_open else "begin"
        """State: begin, reasoning or answer."""
        self._line_breaks = ""
        """Line breaks that are withheld until it is known whether the reasoning begins or ends directly after them; if
        it does, they are dropped."""
        self._label = "" if is_open else marks.label
        """Part of the label that can still come before the reasoning."""
        self._has_text = False
        self._at_end = False
        """True directly after the end mark, where line breaks are dropped."""
        self._is_marked_answer = False
        """True if the answer began with a mark of its own."""
        self._answer_end = ""
        """The mark after the answer, and the whitespace that has arrived after it. It is text if other text follows."""

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text is reasoning."""
        return self._state == "reasoning"

    def feed(self, lexeme: Lexeme) -> Iterator[Event]:
        """Take the next lexeme."""
        if self._state == "begin":
            if lexeme.is_mark and lexeme.text in self._marks.starts:
                self._state, self._line_breaks = "reasoning", ""
                return
            if not lexeme.is_mark and not lexeme.text.strip():
                self._line_breaks += lexeme.text
                return
            self._state = "answer"
            if self._line_breaks and not self._begins_answer(lexeme):
                yield from self._answer.feed(Lexeme(self._line_breaks))
            self._line_breaks = ""
            if self._begins_answer(lexeme):
                self._at_end = True
        if self._state == "reasoning":
            yield from self._feed_reasoning(lexeme)
        else:
            yield from self._feed_answer(lexeme)

    def _feed_reasoning(self, lexeme: Lexeme) -> Iterator[Event]:
        if lexeme.is_mark and lexeme.text in (*self._marks.ends, *self._calls):
            yield from self._end_label()
            self._state, self._at_end = "answer", lexeme.text in self._marks.ends
            self._answer.cut()
            if not self._at_end:
                yield from self._answer.feed(lexeme)
        # The model can repeat the start mark when the block is already open. The repeated mark is not text.
        elif not (lexeme.is_mark and lexeme.text in self._marks.starts and not self._has_text):
            yield from self._write(lexeme.text)

    def _feed_answer(self, lexeme: Lexeme) -> Iterator[Event]:
        is_end = lexeme.is_mark and lexeme.text in self._marks.ends
        if self._at_end and (is_end or (not lexeme.is_mark and not lexeme.text.strip("\n"))):
            # Some models repeat the end mark. The repeated mark is not text.
            return
        if self._at_end and self._begins_answer(lexeme):
            self._is_marked_answer = True
            self._answer.cut()
            return
        self._at_end = False
        if self._answer_end:
            if not lexeme.is_mark and not lexeme.text.strip():
                self._answer_end += lexeme.text
                return
            yield from self._answer.feed(Lexeme(self._answer_end))
            self._answer_end = ""
        if self._is_marked_answer and lexeme.is_mark and self._marks.answer and lexeme.text == self._marks.answer[1]:
            self._answer_end = lexeme.text
            return
        is_stray = lexeme.is_mark and lexeme.text not in self._answer.marks
        yield from self._answer.feed(Lexeme(lexeme.text) if is_stray else lexeme)

    def _begins_answer(self, lexeme: Lexeme) -> bool:
        return lexeme.is_mark and self._marks.answer is not None and lexeme.text == self._marks.answer[0]

    def _end_label(self) -> Iterator[Event]:
        """Emit the text that could have been the beginning of the label."""
        # A label without text is dropped.
        written = self._marks.label[: len(self._marks.label) - len(self._label)] if self._label else ""
        self._label = ""
        if written and written != self._marks.label.strip():
            yield from self._write(written)

    def _write(self, text: str) -> Iterator[Event]:
        while self._label and text:
            if text[0] != self._label[0]:
                yield from self._end_label()
                break
            self._label, text = self._label[1:], text[1:]
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
        elif self._state == "reasoning":
            yield from self._end_label()
        yield from self._answer.finish()
