# SPDX-License-Identifier: Apache-2.0
"""A set that stores many ids in little memory.

It stores their 64-bit hashes in an open-addressing table. A million ids need 12 to 24 MB. In a set of strings, they
would need 120 MB. Among n million ids, two different ids have the same hash with a probability of 3e-8 * n**2. The
second of them is then reported as a duplicate. It is never lost silently.
"""

from array import array
from hashlib import blake2b

_FIRST_SIZE = 2**10
_MAX_LOAD = 2 / 3


class IdSet:
    """Set of the ids in a file."""

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 * _FIRST_SIZE))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, item: str) -> bool:
        return self._slots[self._find(_hash(item))] != 0

    def add(self, item: str) -> bool:
        """Add an id; return False if the set already contained it."""
        value = _hash(item)
        slot = self._find(value)
        if self._slots[slot]:
            return False
        self._slots[slot] = value
        self._count += 1
        if self._count > _MAX_LOAD * len(self._slots):
            self._grow()
        return True

    def _find(self, value: int) -> int:
        """Return the slot that contains `value`. If no slot contains it, return the empty slot in which it must be
        stored."""
        slots, mask = self._slots, len(self._slots) - 1
        slot = value & mask
        while slots[slot] and slots[slot] != value:
            slot = (slot + 1) & mask
        return slot

    def _grow(self) -> None:
        old_slots, self._slots = self._slots, array("Q", bytes(16 * len(self._slots)))
        for value in old_slots:
            if value:
                self._slots[self._find(value)] = value


def _hash(item: str) -> int:
    # 0 marks an empty slot.
    return int.from_bytes(blake2b(item.encode(errors="surrogatepass"), digest_size=8).digest(), "little") or 1
