# SPDX-License-Identifier: Apache-2.0
"""The folder of KV blocks of one simulated pod: only its keys, and the times of its transfers."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from quire_engine.kv_transfer.store import KVStore
from quire_engine.simulation.event_queue import Channel, EventQueue


class SimulatedStore(KVStore):
    """Blocks that were used least recently are removed first. FolderStore also reads with two threads, and writes with
    one."""

    def __init__(self, queue: EventQueue, block_s: float, max_blocks: int | None) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._block_s, self._max_blocks = block_s, max_blocks
        self._readers, self._writer = Channel(queue, 2), Channel(queue, 1)
        self._num_reads = 0

    @property
    def errors(self) -> Mapping[str, int]:
        """Return no errors."""
        return {}

    @property
    def seconds_per_block(self) -> float:
        """See KVStore."""
        return self._block_s if self._num_reads else 0.0

    def contains(self, keys: Sequence[bytes]) -> int:
        """See KVStore."""
        return next((number for number, key in enumerate(keys) if key not in self._keys), len(keys))

    def read(
        self,
        keys: Sequence[bytes],
        rows: Sequence[int],
        on_done: Callable[[int], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """See KVStore."""
        num_blocks = self.contains(keys)
        self._num_reads += 1
        for key in keys[:num_blocks]:
            self._keys.move_to_end(key)
        self._readers.run(num_blocks * self._block_s, lambda: on_done(num_blocks))

    def write(self, keys: Sequence[bytes], rows: Sequence[int], on_done: Callable[[int], None]) -> None:
        """See KVStore."""

        def end() -> None:
            for key in keys:
                self._keys[key] = None
                self._keys.move_to_end(key)
                if self._max_blocks is not None and len(self._keys) > self._max_blocks:
                    self._keys.popitem(last=False)
            on_done(len(keys))

        self._writer.run(len(keys) * self._block_s, end)
