# SPDX-License-Identifier: Apache-2.0
"""Incremental detokenizer: converts the output tokens of one sequence to text as they arrive.

The detokenizer handles stop strings and incomplete UTF-8 characters, and does not depend on requests, sockets or torch.
`CompletionState` creates one per output.
"""

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.engine.sampling_params import SamplingParams

_SURROGATES_TO_REPLACEMENT = {0xDC00 + byte: "�" for byte in range(0x80, 0x100)}
"""Maps surrogates to U+FFFD. The error handler "surrogateescape" decodes each invalid byte to one of these
surrogates."""

_MAX_INCOMPLETE_CHARACTER_TOKENS = 8
"""If a prompt ends with an incomplete character, the character begins in the last tokens of the prompt. This is the
maximum number of these tokens, special tokens included."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that one update added to an output."""

    text: str
    """Text that no later token can change."""
    num_tokens: int
    """How many of the tokens passed to `update` belong to the output. Tokens after the end of a stop string do not
    belong to it."""
    stopped: bool
    """True if a stop string was found. The output then ends with the finish reason "stop"."""
    stop_string: str | None = None
    """The stop string that was found."""


class IncrementalDetokenizer:
    """Converts the output tokens of one sequence into text.

    The texts of all deltas, joined together, are the text of the output. The output continues the text of its prompt,
    so the space before its first word is kept. Each invalid byte sequence becomes U+FFFD. If a character is incomplete
    and later tokens can still complete it, it is not emitted yet. The conversion takes time that is linear in the
    length of the output.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, params: SamplingParams, prompt_token_ids: Sequence[int] | None = None
    ) -> None:
        """Create a detokenizer for one output.

        If `tokenizer` is None, the text is always empty. If `prompt_token_ids` is None, the detokenizer assumes that
        the prompt contains text.
        """
        tokenizer = tokenizer if params.detokenize else None
        self._token_bytes = tokenizer.token_bytes if tokenizer else None
        self._skipped_token_ids = (
            tokenizer.special_token_ids if tokenizer and params.skip_special_tokens else frozenset()
        )
        adds_spaces = tokenizer is None or params.skip_special_tokens or params.spaces_between_special_tokens
        self._unspaced_tokens: Mapping[int, str] = {} if adds_spaces or tokenizer is None else tokenizer.added_tokens
        """Text of added tokens by id. If two of these tokens follow each other, no space is written between them."""
        self._last_was_unspaced = False
        self._at_text_start = prompt_token_ids is not None and not self._has_text(prompt_token_ids)
        self._utf8_decoder = codecs.getincrementaldecoder("utf-8")(
            self._token_bytes.decode_errors if self._token_bytes else "replace"
        )
        self._stop_strings = params.stop
        self._min_tokens = params.min_tokens
        self._include_stop_string = params.include_stop_str_in_output
        self._stop_buffer_length = max((len(stop) for stop in params.stop), default=1) - 1
        """Maximum length of an unfinished stop string at the end of the text, in characters."""
        self._text_window = ""
        """The last part of the text. It contains all characters that are not emitted yet, and it is never shorter than
        `_stop_buffer_length` characters."""
        self._num_emitted_chars = 0
        """Number of characters at the start of `_text_window` that were emitted."""
        self._num_tokens = 0
        if not self._at_text_start and prompt_token_ids is not None:
            # The output can complete a character that begins in the last prompt tokens (up to 3 bytes, one per token).
            self._decode_tokens(prompt_token_ids[-_MAX_INCOMPLETE_CHARACTER_TOKENS:], final=False)

    def update(self, token_ids: Sequence[int], finished: bool, stop_terminated: bool = False) -> TextDelta:
        """Convert the next tokens.

        If `finished` is true, these are the last tokens of the output, and the rest of its text is emitted.

        `stop_terminated` means that the last token is a stop token that ended the output (finish reason "stop"). The
        text contains the stop token only if include_stop_str_in_output is set.
        """
        end = len(token_ids) - (1 if stop_terminated and not self._include_stop_string else 0)
        if not self._stop_strings:
            self._text_window += self._decode_tokens(token_ids[:end], finished)
            return TextDelta(self._emit_text(finished), len(token_ids), stopped=False)
        for i, token_id in enumerate(token_ids):
            start = len(self._text_window)
            self._text_window += self._decode_tokens(
                [token_id] if i < end else [], finished and i == len(token_ids) - 1
            )
            self._num_tokens += 1
            if self._num_tokens > self._min_tokens and (stop_match := self._match_stop_string(start)) is not None:
                end_offset, stop_string = stop_match
                self._text_window = self._text_window[:end_offset]
                return TextDelta(self._emit_text(True), i + 1, stopped=True, stop_string=stop_string)
        return TextDelta(self._emit_text(finished), len(token_ids), stopped=False)

    def _decode_tokens(self, token_ids: Sequence[int], final: bool) -> str:
        if self._token_bytes is None:
            return ""
        chunks = []
        for token_id in token_ids:
            if token_id not in self._skipped_token_ids and (chunk := self._token_bytes.bytes_of(token_id)):
                if self._at_text_start:
                    self._at_text_start, chunk = False, self._token_bytes.first_bytes_of(token_id)
                if self._unspaced_tokens:
                    is_unspaced = token_id in self._unspaced_tokens
                    chunk = (
                        self._unspaced_tokens[token_id].encode() if is_unspaced and self._last_was_unspaced else chunk
                    )
                    self._last_was_unspaced = is_unspaced
                chunks.append(chunk)
        text = self._utf8_decoder.decode(b"".join(chunks), final)
        return (
            text
            if self._token_bytes.decode_errors == "replace" or text.isascii()
            else text.translate(_SURROGATES_TO_REPLACEMENT)
        )

    def _match_stop_string(self, new_text_start: int) -> tuple[int, str] | None:
        """Return the offset at which to truncate the window, and the stop string that was found.

        The new text begins at `new_text_start`. The stop string that ends first in the new text is used. If several end
        at the same place, the first one in the request's list is used.
        """
        matches = []
        for stop_string in self._stop_strings:
            if (
                start_offset := self._text_window.find(stop_string, max(0, new_text_start - len(stop_string) + 1))
            ) >= 0:
                matches.append((start_offset + len(stop_string), start_offset, stop_string))
        if not matches:
            return None
        end_offset, start_offset, stop_string = min(matches, key=lambda entry: entry[0])
        return end_offset if self._include_stop_string else start_offset, stop_string

    def _emit_text(self, flush: bool) -> str:
        window_length = len(self._text_window)
        num_withheld = 0 if flush or self._include_stop_string else self._stop_buffer_length
        end = max(self._num_emitted_chars, window_length - num_withheld)
        text = self._text_window[self._num_emitted_chars : end]
        window_start = max(0, window_length - self._stop_buffer_length)
        self._text_window, self._num_emitted_chars = self._text_window[window_start:], end - window_start
        return text

    def _has_text(self, token_ids: Sequence[int]) -> bool:
        token_bytes = self._token_bytes
        return token_bytes is not None and any(
            i not in self._skipped_token_ids and token_bytes.bytes_of(i) for i in token_ids
        )
