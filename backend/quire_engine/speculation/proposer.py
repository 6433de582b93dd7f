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
        """Return tokens that are likely to follow the last token of a sequence: at most `max_tokens`, or an empty
        list."""
        ...


class NgramProposer(DraftProposer):
    """Searches a sequence for an earlier copy of its last tokens, and proposes the tokens that followed this copy.

    The proposer uses the copy of as many last tokens as possible. If there are several such copies, the first one is
    used. The search compares bytes in C, so a context of 4,096 tokens takes only microseconds. It never reads other
    sequences, so it reveals nothing about other tenants.

    Source: prompt lookup decoding, and vLLM's v1/spec_decode/ngram_proposer.py.
    """

    def __init__(self, lengths: Iterable[int]) -> None:
        """For each n in `lengths`, the proposer can search for a copy of the last n tokens."""
        self._lengths = sorted(lengths, reverse=True)
        self._contexts: WeakKeyDictionary[Sequence, bytearray] = WeakKeyDictionary()
        """For each sequence: its tokens so far, as native unsigned integers."""

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        """See DraftProposer."""
        return self.find(sequence, max_tokens)[1]

    def find(self, sequence: Sequence, max_tokens: int) -> tuple[int, list[int]]:
        """Return how many of the last tokens have an earlier copy, and return the draft that follows this copy. If
        there is no copy, the number is 0 and the draft is empty."""
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
    """Search the context for an earlier copy of its last `size` bytes.

    The copy must start at the beginning of a token. Return the offset at which the first such copy ends.
    """
    if size >= len(context):
        return None
    suffix, start = context[-size:], 0
    # The copy must end before the end of the context, so that at least one token follows it.
    while (start := context.find(suffix, start, len(context) - 1)) >= 0:
        if start % _TOKEN_BYTES == 0:
            return start + size
        start += 1
    return None
