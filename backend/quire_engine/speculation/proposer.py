# SPDX-License-Identifier: Apache-2.0
"""Proposers of draft tokens: they guess the next tokens of a sequence without running the model. Torch-free."""

from array import array
from collections.abc import Iterable
from typing import Protocol
from weakref import WeakKeyDictionary

from quire_engine.sequence import Sequence

_TOKEN_BYTES = array("I").itemsize


class DraftProposer(Protocol):
    """Guesses tokens. The sampler verifies them, so a wrong guess costs time and never changes the output."""

    def observe(self, sequence: Sequence) -> None:
        """Called before each step that decodes a sequence; does nothing by default."""
        return

    def finish(self, sequence: Sequence) -> None:
        """Called when a sequence is finished; does nothing by default."""
        return

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        """Return at most `max_tokens` tokens that may follow the last token of a sequence, or an empty list."""
        ...


class NgramProposer(DraftProposer):
    """Finds the longest run at the end of a sequence that occurred earlier in it, and proposes the tokens that followed
    there.

    Source: prompt lookup decoding, and vLLM's v1/spec_decode/ngram_proposer.py. Of several occurrences, the first one
    is used. The search compares bytes in C: a context of 4,096 tokens takes microseconds. The search reads no other
    sequence, so it reveals nothing about another tenant.
    """

    def __init__(self, lengths: Iterable[int]) -> None:
        """`lengths`: the lengths of runs to search for."""
        self._lengths = sorted(lengths, reverse=True)
        self._contexts: WeakKeyDictionary[Sequence, bytearray] = WeakKeyDictionary()
        """The tokens of each sequence so far, as native unsigned integers."""

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        """See DraftProposer."""
        return self.find(sequence, max_tokens)[1]

    def find(self, sequence: Sequence, max_tokens: int) -> tuple[int, list[int]]:
        """Return how many of the last tokens occurred before (0 if none did), and the draft."""
        context = self._contexts.setdefault(sequence, bytearray())
        new_tokens = sequence.tokens(len(context) // _TOKEN_BYTES, sequence.num_tokens)
        context += array("I", new_tokens).tobytes()
        for length in self._lengths:
            if (start := _find_tokens(context, length * _TOKEN_BYTES)) is not None:
                followers = array("I")
                followers.frombytes(context[start : start + max_tokens * _TOKEN_BYTES])
                return length, followers.tolist()
        return 0, []


def _find_tokens(context: bytearray, size: int) -> int | None:
    """Find the first earlier occurrence of the last `size` bytes that starts at the beginning of a token; return the
    offset of its end."""
    if size >= len(context):
        return None
    suffix, start = context[-size:], 0
    # The occurrence must end before the last token of the context, so that a token follows it.
    while (start := context.find(suffix, start, len(context) - 1)) >= 0:
        if start % _TOKEN_BYTES == 0:
            return start + size
        start += 1
    return None
