# SPDX-License-Identifier: Apache-2.0
"""Pool of states: which row of the state cache belongs to which sequence or snapshot.

The pool contains row numbers and keys, but no tensors or sequences. `state_manager` calls it.
"""

from collections import OrderedDict
from collections.abc import Iterable

from quire_spec.errors import Internal


class StatePool:
    """A fixed number of rows. Each row is free, owned by a sequence, or a snapshot.

    A snapshot is the state after the tokens of a full KV block and all blocks before it. Its key is the content hash of
    this block, so that sequences with another adapter or salt do not find it. If no row is free, the snapshot that was
    used least recently is evicted.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = list(reversed(range(num_rows)))
        # The snapshot that is evicted next is at the beginning.
        self._row_by_key: OrderedDict[bytes, int] = OrderedDict()
        self._key_by_row: dict[int, bytes] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._row_by_key

    @property
    def num_available(self) -> int:
        """Number of rows that sequences can get: free rows and snapshots."""
        return len(self._free) + len(self._row_by_key)

    @property
    def num_snapshots(self) -> int:
        """Number of snapshots."""
        return len(self._row_by_key)

    def allocate(self) -> int:
        """Return a row for a sequence; evict a snapshot if no row is free."""
        if self._free:
            return self._free.pop()
        _, row = self._row_by_key.popitem(last=False)
        del self._key_by_row[row]
        return row

    def allocate_from(self, key: bytes) -> tuple[int, int]:
        """Return a row for a sequence that continues after a snapshot, and the row of the snapshot. They are equal if
        the snapshot itself had to be evicted."""
        source = self._row_by_key[key]
        self._row_by_key.move_to_end(key)
        return self.allocate(), source

    def free(self, row: int) -> None:
        """Release the row of a sequence."""
        assert row not in self._key_by_row and row not in self._free, f"state {row} was freed more often than allocated"
        self._free.append(row)

    def row_of(self, key: bytes) -> int | None:
        """Return the row of a snapshot; None if there is none."""
        return self._row_by_key.get(key)

    def add_snapshot(self, key: bytes) -> int | None:
        """Return the row for a new snapshot; None if there is one with this key, or if sequences own all rows."""
        if key in self._row_by_key:
            self._row_by_key.move_to_end(key)
            return None
        if not self.num_available:
            return None
        row = self.allocate()
        self._row_by_key[key], self._key_by_row[row] = row, key
        return row

    def drop_snapshot(self, key: bytes) -> None:
        """Remove a snapshot, if it exists."""
        if (row := self._row_by_key.pop(key, None)) is not None:
            del self._key_by_row[row]
            self._free.append(row)

    def key_of(self, row: int) -> bytes | None:
        """Return the key of the snapshot in a row; None if the row contains no snapshot."""
        return self._key_by_row.get(row)

    def check_integrity(self, owned_rows: Iterable[int]) -> None:
        """Raise Internal unless every row is free, a snapshot, or exactly once among `owned_rows`."""
        rows = [*self._free, *self._row_by_key.values(), *owned_rows]
        has_all_keys = {key: row for row, key in self._key_by_row.items()} == dict(self._row_by_key)
        if sorted(rows) != list(range(self.num_rows)) or not has_all_keys:
            raise Internal(
                f"state pool: {self.num_rows} rows, {len(self._free)} free, {len(self._row_by_key)} snapshots, "
                f"{len(rows) - self.num_available} owned; keys and rows match: {has_all_keys}"
            )
