# SPDX-License-Identifier: Apache-2.0
"""The rows of host memory of a core with several ranks. Each rank copies its part of a row (kv_cache/row_file.py)."""

import logging
import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from quire_engine.distributed.other_nodes import OtherNodes
from quire_engine.distributed.worker_group import WorkerGroup
from quire_engine.kv_cache.host_swap import HostSwap
from quire_engine.kv_cache.state_cache import HostStateRows
from quire_engine.kv_transfer.store import FolderReplies, FolderReply, HostRows, NodeRead, NodeReads, OtherNodesRows
from quire_engine.step.plan import RunnerLost, SwapCopy
from quire_spec.engine.kv_transfer_config import PeerAddress
from quire_spec.errors import QuireError
from quire_spec.protocol.kv_wire import RowLayout

_COPIES_OF_A_CALL = 1024
"""A call is one packet."""
_BLOCKS_OF_A_CALL = 512
"""A key takes 67 bytes of a call, and a row up to 12."""

logger = logging.getLogger(__name__)


class RankRows(HostRows):
    """The rows of all ranks, for rank 0.

    Copies that are part of steps need nothing of this class. A step is complete when all ranks have computed it, and
    each rank has made its copies before that.
    """

    def __init__(self, local: HostSwap | HostStateRows, worker_group: WorkerGroup) -> None:
        """`local` are the rows of rank 0, which the parts of the other ranks follow."""
        self._local = local
        self._worker_group = worker_group
        self._copy_call, self._nodes = "copy_states", None
        if isinstance(local, HostSwap):
            self._copy_call, nodes = "copy_rows", worker_group.nodes
            self._nodes = None if nodes is None else _OtherNodesRows(nodes, worker_group, local.node_bytes)
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

    @property
    def start(self) -> int:
        """See HostRows."""
        return self._local.start

    @property
    def nodes(self) -> OtherNodesRows | None:
        """See HostRows."""
        return self._nodes

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
            call_id = self._worker_group.start_call(self._copy_call, copies=pairs)
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


class _OtherNodesRows(OtherNodesRows):
    """The rows of the other nodes. Their processes answer the calls (executor/node_rows.py), not their ranks, so that
    steps do not wait."""

    def __init__(self, nodes: OtherNodes, worker_group: WorkerGroup, node_bytes: Sequence[int]) -> None:
        self._nodes, self._worker_group, self._node_bytes = nodes, worker_group, node_bytes

    @property
    def generation(self) -> int:
        """See OtherNodesRows."""
        return self._nodes.generation

    @property
    def addresses(self) -> list[str]:
        """See OtherNodesRows."""
        return self._nodes.addresses

    def share(self, layout: RowLayout, num_rows: int) -> None:
        """See OtherNodesRows.

        Raises:
            RunnerLost: a rank has ended.
        """
        self._call_nodes("share_rows", layout=msgspec.to_builtins(layout), num_rows=num_rows)

    def start_read(self, peers: Sequence[PeerAddress], lease: bytes, rows: Sequence[tuple[int, int]]) -> NodeReads:
        """See OtherNodesRows.

        Raises:
            RunnerLost: a rank has ended.
        """
        calls = [
            self._worker_group.start_node_call(
                node_rank, "read_rows", peer=str(peer), lease=lease.hex(), rows=[list(pair) for pair in rows]
            )
            for node_rank, peer in enumerate(peers, 1)
        ]
        return _NodeReads(self._worker_group, lease, calls)

    def open_folder(self, layout: str, parallel: str, num_rows: int) -> None:
        """See OtherNodesRows."""
        self._call_nodes("open_folder", layout=layout, parallel=parallel, num_rows=num_rows)

    def start_folder_read(self, keys: Sequence[bytes], rows: Sequence[int]) -> FolderReplies:
        """See OtherNodesRows."""
        return self._start_folder_calls("read_folder", keys, rows)

    def start_folder_write(self, keys: Sequence[bytes], rows: Sequence[int]) -> FolderReplies:
        """See OtherNodesRows."""
        return self._start_folder_calls("write_folder", keys, rows)

    def _start_folder_calls(self, name: str, keys: Sequence[bytes], rows: Sequence[int]) -> FolderReplies:
        starts, names = range(0, len(keys), _BLOCKS_OF_A_CALL), [key.hex() for key in keys]
        parts = [slice(start, min(start + _BLOCKS_OF_A_CALL, len(keys))) for start in starts]
        calls = [
            [
                (self._worker_group.start_node_call(node_rank, name, keys=names[part], rows=list(rows[part])), part)
                for part in parts
            ]
            for node_rank in range(1, len(self._node_bytes))
        ]
        return _FolderReplies(self._worker_group, calls)

    def _call_nodes(self, name: str, **args: Any) -> None:
        """Call each node with the bytes of its rows, and wait for its reply."""
        for node_rank, row_bytes in list(enumerate(self._node_bytes))[1:]:
            call = self._worker_group.start_node_call(node_rank, name, row_bytes=row_bytes, **args)
            self._worker_group.wait_call(call)


class _FolderReplies(FolderReplies):
    """The calls of each node about its folder, from node 1, with the blocks of each call."""

    def __init__(self, worker_group: WorkerGroup, calls: Sequence[Sequence[tuple[int, slice]]]) -> None:
        self._worker_group, self._calls = worker_group, calls

    def wait(self) -> list[FolderReply]:
        """See FolderReplies."""
        return [self._wait_node(node_rank, calls) for node_rank, calls in enumerate(self._calls, 1)]

    def _wait_node(self, node_rank: int, calls: Sequence[tuple[int, slice]]) -> FolderReply:
        num_blocks, absent, errors = 0, list[int](), dict[str, int]()
        for call, part in calls:
            try:
                ((num_done, missing, errors),) = self._worker_group.wait_call(call)
            except RunnerLost:
                raise
            except QuireError as error:
                logger.warning("kv folder: node %d failed error=%s", node_rank, error)
                num_done, missing = 0, []
            if num_blocks == part.start:
                num_blocks += num_done
            absent += [part.start + number for number in missing]
        return FolderReply(num_blocks, absent, errors)


class _NodeReads(NodeReads):
    """The calls `read_rows` of all nodes, from node 1."""

    def __init__(self, worker_group: WorkerGroup, lease: bytes, calls: Sequence[int]) -> None:
        self._worker_group, self._lease, self._calls = worker_group, lease, calls

    def wait(self, seconds: float) -> list[NodeRead] | None:
        """See NodeReads."""
        for call in self._calls:
            if not self._worker_group.is_replied(call, seconds):
                return None
        return [NodeRead(*self._worker_group.wait_call(call)[0]) for call in self._calls]

    def cancel(self) -> None:
        """See NodeReads."""
        for node_rank, _ in enumerate(self._calls, 1):
            self._worker_group.notify_node(node_rank, "end_read", lease=self._lease.hex())
