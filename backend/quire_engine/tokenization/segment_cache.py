# SPDX-License-Identifier: Apache-2.0
"""Cache of the token ids of conversation segments.

It saves time because each turn of a conversation repeats all earlier turns. The cache is thread-safe. Its size in bytes
is limited: when it is full, the least recently used segments are evicted.
"""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

MAX_BYTES = 64 * 2**20
"""Maximum size of the cache in bytes. It is enough for about 8 million tokens and the text of their segments."""
_ENTRY_BYTES = 300


class SegmentCache:
    """Token ids by segment."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[str, bool, str], array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def encode(
        self,
        salt: str,
        segments: Sequence[tuple[bool, str]],
        encode: Callable[[Sequence[tuple[bool, str]]], list[list[int]]],
    ) -> list[int]:
        """Return the token ids of all segments in one list.

        `encode` is called for the segments that are not cached. A segment consists of a flag and a text. The flag is
        True if other text precedes the segment. Requests with different salts never share a cached segment.
        """
        keys = [(salt, *segment) for segment in segments]
        with self._lock:
            found = {key: self._entries[key] for key in keys if key in self._entries}
            for key in found:
                self._entries.move_to_end(key)
        missing = [key for key in dict.fromkeys(keys) if key not in found]
        if missing:
            encoded = encode([(is_continued, text) for _, is_continued, text in missing])
            new = {key: array("I", ids) for key, ids in zip(missing, encoded, strict=True)}
            found |= new
            with self._lock:
                self._add(new)
        token_ids: list[int] = []
        for key in keys:
            token_ids += found[key]
        return token_ids

    def _add(self, entries: dict[tuple[str, bool, str], "array[int]"]) -> None:
        for key, ids in entries.items():
            if key not in self._entries:
                self._entries[key] = ids
                self.num_bytes += _num_bytes(key, ids)
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= _num_bytes(*self._entries.popitem(last=False))


def _num_bytes(key: tuple[str, bool, str], ids: "array[int]") -> int:
    salt, _, text = key
    # A text with characters outside of Latin-1 takes 2 or 4 bytes per character.
    return _ENTRY_BYTES + len(salt) + len(text) * (1 if text.isascii() else 4) + 4 * len(ids)
