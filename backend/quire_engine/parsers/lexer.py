# SPDX-License-Identifier: Apache-2.0
"""Splits an output into text and marks such as `<tool_call>`. The output arrives in increments of token ids and text.

A mark that is one token of the vocabulary is recognised only by its token id; the same characters in ordinary tokens
are text. A mark without a token of its own is recognised by its characters. The parser of each output owns a lexer.
"""

import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from quire_engine.tokenization.detokenizer import IncrementalDetokenizer
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Lexeme:
    """A mark, or text between marks."""

    text: str
    is_mark: bool = False
    num_tokens: int = 0
    """Number of tokens that end within this text; 0 without a tokenizer."""


class Lexer:
    """The lexer of one output. The time that it takes is proportional to the length of the output."""

    def __init__(
        self,
        marks: Collection[str],
        tokenizer: Tokenizer | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        skip_special_tokens: bool = True,
    ) -> None:
        """If `tokenizer` is None, all marks are recognised by their characters, and token ids are ignored.

        If `skip_special_tokens` is True, special tokens that are not marks are left out.
        """
        added_tokens = {} if tokenizer is None else tokenizer.added_tokens
        self._marks_by_id: Mapping[int, str] = {i: text for i, text in added_tokens.items() if text in marks}
        self._skipped_token_ids: Collection[int] = frozenset()
        if tokenizer is not None and skip_special_tokens:
            self._skipped_token_ids = set(tokenizer.special_token_ids) - self._marks_by_id.keys()
        written_marks = sorted(set(marks) - set(self._marks_by_id.values()), key=len, reverse=True)
        self._written_marks = re.compile("|".join(map(re.escape, written_marks))) if written_marks else None
        self._mark_beginnings = frozenset(mark[:end] for mark in written_marks for end in range(1, len(mark)))
        self._longest_beginning = max(map(len, self._mark_beginnings), default=0)
        self._detokenizer = (
            None
            if tokenizer is None
            else IncrementalDetokenizer(tokenizer, SamplingParams(skip_special_tokens=False), prompt_token_ids)
        )
        self._num_decoded_chars = 0
        self._mark_spans: deque[tuple[int, int, bool]] = deque()
        """Marks and skipped tokens whose text has not arrived yet. An entry contains the start and the end offset in
        the output, and a flag that is True for a mark and False for a skipped token."""
        self._token_ends: deque[int] = deque()
        """For each token whose text was not returned yet: the offset in the output at which this text ends."""
        self._offset = 0
        """Number of characters of the output before `_text`."""
        self._text = ""
        """Text that has arrived but was not returned yet."""

    def feed(self, token_ids: Sequence[int], text: str, finished: bool = False) -> Iterator[Lexeme]:
        """Yield the lexemes that are completed by the next tokens.

        `text` is the next part of the output, and includes the text of special tokens. `text` can be shorter than the
        text of the tokens in `token_ids`, because text that may be part of a stop string is withheld. `text` never
        contains text of later tokens.
        """
        if self._detokenizer is not None:
            for token_id in token_ids:
                start = self._num_decoded_chars
                self._num_decoded_chars += len(self._detokenizer.update([token_id], False).text)
                self._token_ends.append(self._num_decoded_chars)
                if (mark := self._marks_by_id.get(token_id)) is not None:
                    self._mark_spans.append((self._num_decoded_chars - len(mark), self._num_decoded_chars, True))
                elif token_id in self._skipped_token_ids and self._num_decoded_chars > start:
                    self._mark_spans.append((start, self._num_decoded_chars, False))
        self._text += text
        while self._mark_spans and self._mark_spans[0][1] <= self._offset + len(self._text):
            start, end, is_mark = self._mark_spans.popleft()
            yield from self._plain_text(start, True)
            lexeme = self._take(end, is_mark)
            if is_mark:
                yield lexeme
        # If only the beginning of a mark has arrived, it is not returned as text yet.
        arrived = self._offset + len(self._text)
        next_mark = self._mark_spans[0][0] if self._mark_spans else arrived + 1
        yield from self._plain_text(min(next_mark, arrived), finished or next_mark <= arrived)
        if finished and self._text:
            yield self._take(self._offset + len(self._text))

    def _plain_text(self, end: int, complete: bool) -> Iterator[Lexeme]:
        """Yield the text before `end`, and split it at the marks that are written as ordinary characters. If `complete`
        is False, text at the end that may be the beginning of a mark is kept for later.
        """
        if self._written_marks is not None:
            while (match := self._written_marks.search(self._text, 0, max(0, end - self._offset))) is not None:
                start, stop = self._offset + match.start(), self._offset + match.end()
                if start > self._offset:
                    yield self._take(start)
                yield self._take(stop, is_mark=True)
            if not complete:
                end -= self._length_of_mark_beginning(self._text[: end - self._offset])
        if end > self._offset:
            yield self._take(end)

    def _length_of_mark_beginning(self, text: str) -> int:
        longest = min(self._longest_beginning, len(text))
        return next((n for n in range(longest, 0, -1) if text[-n:] in self._mark_beginnings), 0)

    def _take(self, end: int, is_mark: bool = False) -> Lexeme:
        length = end - self._offset
        taken, self._text = self._text[:length], self._text[length:]
        self._offset = end
        num_tokens = 0
        while self._token_ends and self._token_ends[0] <= end:
            self._token_ends.popleft()
            num_tokens += 1
        return Lexeme(taken, is_mark, num_tokens)
