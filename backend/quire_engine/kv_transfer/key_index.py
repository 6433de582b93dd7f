# SPDX-License-Identifier: Apache-2.0
"""Index of the keys that a store seems to hold, with 8 bytes for each key: the first 8 bytes of it.

Keys are hashes, so two of them have the same first bytes by accident only, and then one of them is a miss.
"""

import threading
from array import array
from bisect import bisect_left
from collections.abc import Iterable

_PREFIX_BYTES, _KEY_BYTES = 8, 32


class KeyIndex:
    """A sorted array for each value of the first byte of a key. Any thread can call the methods."""

    def __init__(self) -> None:
        self._arrays = [array("Q") for _ in range(256)]
        self._lock = threading.Lock()

    def __contains__(self, key: bytes) -> bool:
        # Without the lock, another thread can move the entry between the two lines: then the answer may be False.
        prefixes, prefix = self._arrays[key[0]], _prefix(key)
        return _has_at(prefixes, bisect_left(prefixes, prefix), prefix)

    def __len__(self) -> int:
        return sum(map(len, self._arrays))

    def add(self, key: bytes) -> None:
        """Add a key."""
        prefix = _prefix(key)
        with self._lock:
            prefixes = self._arrays[key[0]]
            position = bisect_left(prefixes, prefix)
            if not _has_at(prefixes, position, prefix):
                prefixes.insert(position, prefix)

    def discard(self, key: bytes) -> None:
        """Remove a key, if the index has it."""
        prefix = _prefix(key)
        with self._lock:
            prefixes = self._arrays[key[0]]
            position = bisect_left(prefixes, prefix)
            if _has_at(prefixes, position, prefix):
                prefixes.pop(position)

    def replace(self, first_byte: int, names: Iterable[str]) -> None:
        """Replace the keys with this first byte by the keys in `names`, in hexadecimal. Other names are ignored."""
        prefixes = []
        for name in names:
            if len(name) == 2 * _KEY_BYTES:
                try:
                    prefixes.append(int(name[: 2 * _PREFIX_BYTES], 16))
                except ValueError:
                    continue
        prefixes.sort()
        with self._lock:
            self._arrays[first_byte] = array("Q", prefixes)


def _has_at(prefixes: "array[int]", position: int, prefix: int) -> bool:
    try:
        return prefixes[position] == prefix
    except IndexError:
        return False


def _prefix(key: bytes) -> int:
    return int.from_bytes(key[:_PREFIX_BYTES], "big")
