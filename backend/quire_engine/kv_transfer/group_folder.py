# SPDX-License-Identifier: Apache-2.0
"""The folders of all nodes of a group, each of which holds the parts of its own stages. Torch-free.

A block counts only if every node has read its part: of the first blocks that each node has, the smallest number counts.
The first node decides which blocks are read and written. The other nodes answer over the connection of the group
(executor/node_rows.py), and each answer names what that node lacks, so that these blocks are written again.
"""

import logging
import queue
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from quire_engine.kv_transfer.daemon_threads import DaemonThreads
from quire_engine.kv_transfer.folder_store import FolderStore
from quire_engine.kv_transfer.read_time import ReadTime
from quire_engine.kv_transfer.store import FolderReplies, KVStore, OtherNodesRows, RowBuffers
from quire_engine.step.plan import RunnerLost

_NUM_READERS = 2
_RETRY_S = 30.0
"""If a node could not write a block, nothing is written for this number of seconds. Blocks that the other nodes write
meanwhile would be of no use."""

T = TypeVar("T")
logger = logging.getLogger(__name__)


class GroupFolder(KVStore):
    """See the module. It waits for slow nodes in threads of its own. While a read is late, sequences compute."""

    def __init__(self, own: FolderStore, rows: RowBuffers, nodes: OtherNodesRows) -> None:
        """`own` is the folder of the first node, and `nodes` are the other ones, which have opened theirs. `rows` are
        the rows of all ranks."""
        self._own, self._rows, self._nodes = own, rows, nodes
        self._read_time = ReadTime()
        self._no_writes_before = 0.0
        self._errors: dict[int, Mapping[str, int]] = {}
        """The errors of the folders of the other nodes, by their number, and at 0 those of this object."""
        self._readers = DaemonThreads(_NUM_READERS, "kv-group-read")
        # The first thread starts writes, the second one waits for them.
        self._writer, self._written = DaemonThreads(1, "kv-group-write"), DaemonThreads(1, "kv-group-written")

    @property
    def errors(self) -> dict[str, int]:
        """See KVStore; the errors of all nodes."""
        return dict(sum(map(Counter, self._errors.copy().values()), Counter(self._own.errors)))

    @property
    def seconds_per_block(self) -> float:
        """See KVStore."""
        return self._read_time.seconds_per_block

    def contains(self, keys: Sequence[bytes]) -> int:
        """See KVStore. The other nodes seem to have what this one has, until they have answered."""
        return self._own.contains(keys)

    def read(
        self,
        keys: Sequence[bytes],
        rows: Sequence[int],
        on_done: Callable[[int], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """See KVStore. A read continues even if it is no longer wanted, for later sequences."""
        self._readers.submit(partial(self._read, keys, rows, on_done))

    def write(self, keys: Sequence[bytes], rows: Sequence[int], on_done: Callable[[int], None]) -> None:
        """See KVStore."""
        self._writer.submit(partial(self._start_write, keys, rows, on_done))

    def _read(self, keys: Sequence[bytes], rows: Sequence[int], on_done: Callable[[int], None]) -> None:
        start = time.perf_counter()
        num_blocks = self._attempt(lambda: self._start(self._nodes.start_folder_read, self._own.read, keys, rows)())
        if num_blocks:
            self._read_time.add((time.perf_counter() - start) / num_blocks)
        on_done(num_blocks or 0)

    def _start_write(self, keys: Sequence[bytes], rows: Sequence[int], on_done: Callable[[int], None]) -> None:
        if time.monotonic() < self._no_writes_before:
            on_done(0)
            return
        wait = self._attempt(lambda: self._start(self._nodes.start_folder_write, self._own.write, keys, rows))
        if wait is None:
            on_done(0)
        else:
            self._written.submit(partial(self._end_write, wait, len(keys), on_done))

    def _end_write(self, wait: Callable[[], int], num_keys: int, on_done: Callable[[int], None]) -> None:
        num_blocks = self._attempt(wait) or 0
        if num_blocks < num_keys:
            self._no_writes_before = time.monotonic() + _RETRY_S
        on_done(num_blocks)

    def _start(
        self,
        start_others: Callable[[Sequence[bytes], Sequence[int]], FolderReplies],
        start_own: Callable[[Sequence[bytes], Sequence[int], Callable[[int], None]], None],
        keys: Sequence[bytes],
        rows: Sequence[int],
    ) -> Callable[[], int]:
        """Start a transfer on all nodes. Return a function that waits for it, and returns the number of first blocks
        whose parts all nodes have."""
        self._rows.synchronize()
        others, own = start_others(keys, rows), queue.SimpleQueue[int]()
        start_own(keys, rows, own.put)

        def wait() -> int:
            num_blocks = own.get()
            for node_rank, reply in enumerate(others.wait(), 1):
                self._errors[node_rank] = reply.errors
                num_blocks = min(num_blocks, reply.num_blocks)
                for number in reply.absent:
                    self._own.forget(keys[number])
            return num_blocks

        return wait

    def _attempt(self, function: Callable[[], T]) -> T | None:
        """Return the result of a function; None after an error, which is a miss."""
        try:
            return function()
        except RunnerLost:
            # The engine ends too, and reports it.
            pass
        except Exception:
            self._errors[0] = {"internal": self._errors.get(0, {}).get("internal", 0) + 1}
            logger.exception("kv folder: a transfer of several nodes failed")
        return None
