# SPDX-License-Identifier: Apache-2.0
"""Priority queue of sequences, most urgent first. The scheduler has two queues. One contains the waiting sequences, and
the other contains the running sequences."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from operator import attrgetter

from quire_engine.sequence import Sequence

_SORT_KEY = attrgetter("sort_key")


class RequestQueue:
    """Sequences in order of their sort keys, which are unique and constant while a sequence is in a queue."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self.num_by_client: Counter[str] = Counter()
        """Number of sequences of each client that has any."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def least_urgent(self) -> Sequence:
        """The least urgent sequence. The queue must not be empty."""
        return self._sequences[-1]

    @property
    def most_urgent(self) -> Sequence:
        """The most urgent sequence. The queue must not be empty."""
        return self._sequences[0]

    def snapshot(self) -> list[Sequence]:
        """Return a list of all sequences. Later changes of the queue do not change this list."""
        return self._sequences.copy()

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence at the position of its sort key."""
        insort(self._sequences, sequence, key=_SORT_KEY)
        self.num_by_client[sequence.client] += 1

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, which must be in the queue."""
        index = bisect_left(self._sequences, sequence.sort_key, key=_SORT_KEY)
        assert self._sequences[index] is sequence
        del self._sequences[index]
        self.num_by_client[sequence.client] -= 1
        if not self.num_by_client[sequence.client]:
            del self.num_by_client[sequence.client]
