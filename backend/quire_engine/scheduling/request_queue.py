# SPDX-License-Identifier: Apache-2.0
"""Line: sequences in order of rank, the most urgent first."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from quire_engine.sequence import Sequence

_SORT_KEY = attrgetter("sort_key")


class RequestQueue:
    """Sequences sorted by rank. Ranks are unique and do not change while a sequence is in a line."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def least_urgent(self) -> Sequence:
        """The least urgent one; there must be one."""
        return self._sequences[-1]

    def snapshot(self) -> list[Sequence]:
        """All of them, in a list that stays as it is when the line changes."""
        return self._sequences.copy()

    def add(self, sequence: Sequence) -> None:
        """Let a sequence in at its place."""
        insort(self._sequences, sequence, key=_SORT_KEY)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence, which must be in."""
        index = bisect_left(self._sequences, sequence.sort_key, key=_SORT_KEY)
        assert self._sequences[index] is sequence
        del self._sequences[index]
