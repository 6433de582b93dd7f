# SPDX-License-Identifier: Apache-2.0
"""Line: sequences in order of rank, the most urgent first."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from quire_engine.request import Sequence

_RANK = attrgetter("rank")


class Line:
    """Sequences sorted by rank. Ranks are unique and do not change while a sequence is in a line."""

    def __init__(self) -> None:
        self._members: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members)

    @property
    def last(self) -> Sequence:
        """The least urgent one; there must be one."""
        return self._members[-1]

    def members(self) -> list[Sequence]:
        """All of them, in a list that stays as it is when the line changes."""
        return self._members.copy()

    def add(self, sequence: Sequence) -> None:
        """Let a sequence in at its place."""
        insort(self._members, sequence, key=_RANK)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence, which must be in."""
        index = bisect_left(self._members, sequence.rank, key=_RANK)
        assert self._members[index] is sequence
        del self._members[index]
