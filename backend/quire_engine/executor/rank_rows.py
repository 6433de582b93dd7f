# SPDX-License-Identifier: Apache-2.0
"""The rows of host memory of a core with several ranks. Each rank copies its part of a row (kv_cache/row_file.py)."""

import threading
from collections.abc import Sequence

from quire_engine.distributed.worker_group import WorkerGroup
from quire_engine.kv_cache.host_swap import HostSwap
from quire_engine.kv_transfer.store import HostRows
from quire_engine.step.plan import SwapCopy

_COPIES_OF_A_CALL = 1024
"""A call is one packet."""


class RankRows(HostRows):
    """The rows of all ranks, for rank 0.

    Copies that are part of steps need nothing of this class. A step is complete when all ranks have computed it, and
    each rank has made its copies before that.
    """

    def __init__(self, local: HostSwap, worker_group: WorkerGroup) -> None:
        """`local` are the rows of rank 0, which the parts of the other ranks follow."""
        self._local = local
        self._worker_group = worker_group
        self._lock = threading.Lock()
        self._is_copying = False

    @property
    def layout(self) -> str:
        """See HostRows."""
        return self._local.layout

    @property
    def file(self) -> int | None:
        """See HostRows."""
        return self._local.file

    def buffers(self, row: int) -> list[memoryview]:
        """See HostRows."""
        return self._local.buffers(row)

    def copy(self, swap_outs: Sequence[SwapCopy], swap_ins: Sequence[SwapCopy]) -> None:
        """See HostRows. Waits until every rank has started its copies, because a later step may change the blocks.

        The copies do not wait for steps in flight, which change neither blocks that are cached nor rows that are free.

        Raises:
            RunnerLost: a rank has ended.
        """
        for start in range(0, max(len(swap_outs), len(swap_ins)), _COPIES_OF_A_CALL):
            outs, ins = (copies[start : start + _COPIES_OF_A_CALL] for copies in (swap_outs, swap_ins))
            pairs = [[(copy.block, copy.host_block) for copy in copies] for copies in (outs, ins)]
            call_id = self._worker_group.start_call("copy_rows", copies=pairs)
            self._local.copy(outs, ins)
            self._worker_group.wait_call(call_id)
            self._is_copying = True

    def synchronize(self) -> None:
        """See HostRows.

        Raises:
            RunnerLost: a rank has ended.
        """
        self._local.synchronize()
        with self._lock:
            if self._is_copying:
                self._is_copying = False
                self._worker_group.call("synchronize_rows")
