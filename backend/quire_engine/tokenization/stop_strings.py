# SPDX-License-Identifier: Apache-2.0
"""Detects whether a token completes a stop string and therefore ends the output.

The stop strings are compared, as bytes, with the end of the output. Therefore, the text of the whole output is not
needed. The beam search of the scheduler uses this module, because it must know at once which beams end. For all other
outputs, the detokenizer of the text process searches for stop strings.
"""

from collections.abc import Sequence

from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.engine.sampling_params import SamplingParams


class StopStrings:
    """Finds stop strings at the end of an output. The object has no state, so several beams can share it."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        """`params.stop` contains the strings."""
        self._bytes_of = tokenizer.token_bytes.bytes_of
        self._skipped_token_ids = tokenizer.special_token_ids if params.skip_special_tokens else frozenset[int]()
        self._stop_strings = [stop.encode() for stop in params.stop]
        self._min_tokens = params.min_tokens
        self._tail_length = max(map(len, self._stop_strings), default=1) - 1

    def tail(self, output_token_ids: Sequence[int]) -> bytes:
        """Return the end of an output in bytes.

        It is long enough for the longest stop string that can still be unfinished.
        """
        chunks: list[bytes] = []
        num_missing = self._tail_length
        for token_id in reversed(output_token_ids):
            if num_missing <= 0:
                break
            chunks.append(self._text_bytes(token_id))
            num_missing -= len(chunks[-1])
        return b"".join(reversed(chunks))

    def is_completed_by(self, token_id: int, tail: bytes, num_tokens: int) -> bool:
        """Return whether the text of a token contains the end of a stop string.

        Args:
            token_id: the next token.
            tail: result of `tail` for the output before this token.
            num_tokens: number of output tokens including this one; an output does not end at its first `min_tokens`
                tokens.
        """
        if num_tokens <= self._min_tokens or not (new_bytes := self._text_bytes(token_id)):
            return False
        return any(stop in tail[max(0, len(tail) - len(stop) + 1) :] + new_bytes for stop in self._stop_strings)

    def _text_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._skipped_token_ids else self._bytes_of(token_id)
