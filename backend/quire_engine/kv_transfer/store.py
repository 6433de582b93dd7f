# SPDX-License-Identifier: Apache-2.0
"""Interface of the places outside of a core that hold KV blocks, and of the host memory that they read and write.

Torch-free. The scheduler uses a store through `StoreTraffic`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire_engine.step.plan import SwapCopy
from quire_spec.engine.kv_transfer_config import PeerAddress
from quire_spec.protocol.kv_wire import RowLayout


@dataclass(frozen=True, slots=True)
class NodeRead:
    """Result of another node that has read its parts of the blocks of another pod."""

    num_blocks: int
    """Number of first blocks whose parts were read and checked."""
    reason: str = ""
    """Why the other blocks were not read."""
    message: str = ""


class NodeReads(Protocol):
    """Reads of all other nodes that were started together. Their rows must not change before `wait` has returned
    results."""

    def wait(self, seconds: float) -> list[NodeRead] | None:
        """Return the result of each node; None if a node is not done within these seconds.

        Raises:
            RunnerLost: a rank has ended. Nothing uses the rows any longer.
        """

    def cancel(self) -> None:
        """Let all nodes end their reads soon."""


@dataclass(frozen=True, slots=True)
class FolderReply:
    """Result of another node that has read or written its parts of blocks in its own folder."""

    num_blocks: int
    """Number of first blocks whose parts were read and checked, or written."""
    absent: Sequence[int] = ()
    """Numbers of the other blocks that have no file there."""
    errors: Mapping[str, int] = field(default_factory=dict)
    """Number of all errors of that folder, by reason."""


class FolderReplies(Protocol):
    """Results of all other nodes of calls that were started together."""

    def wait(self) -> list[FolderReply]:
        """Wait for all nodes; return the result of each one, from node 1.

        Raises:
            RunnerLost: a rank has ended. Nothing uses the rows any longer.
        """


class OtherNodesRows(Protocol):
    """The parts of the rows of host memory that other nodes of the group have. A row has the same number on all
    nodes."""

    @property
    def generation(self) -> int:
        """Number of the group."""

    @property
    def addresses(self) -> list[str]:
        """IP address of each other node, from node 1."""

    def share(self, layout: RowLayout, num_rows: int) -> None:
        """Let the other nodes share their rows with other pods. Called once."""

    def start_read(self, peers: Sequence[PeerAddress], lease: bytes, rows: Sequence[tuple[int, int]]) -> NodeReads:
        """Let each node read its parts of leased rows from one of `peers`. `rows` are pairs of the address there and of
        the row here."""

    def open_folder(self, layout: str, parallel: str, num_rows: int) -> None:
        """Let each node open the folder of its own configuration for its parts of blocks; see FolderStore. Called
        once.

        Raises:
            QuireError: a node cannot use its folder, or a rank has ended.
        """

    def start_folder_read(self, keys: Sequence[bytes], rows: Sequence[int]) -> FolderReplies:
        """Let each node read its parts of blocks from its folder into rows.

        Raises:
            RunnerLost: a rank has ended.
        """

    def start_folder_write(self, keys: Sequence[bytes], rows: Sequence[int]) -> FolderReplies:
        """Let each node write its parts of rows to its folder; raises RunnerLost."""


class RowBuffers(Protocol):
    """The bytes of rows of host memory, each of which holds one block or a part of it."""

    @property
    def layout(self) -> str:
        """Everything that determines how the bytes of a row are read: device, dtypes and shapes."""

    def buffers(self, row: int) -> list[memoryview]:
        """Return the bytes of a row. Every row has buffers of the same sizes."""

    def synchronize(self) -> None:
        """Wait until the copies that were started before are complete. Any thread can call this."""


class HostRows(RowBuffers, Protocol):
    """Rows of host memory, each of which holds one block. The core copies blocks between the device and these rows."""

    @property
    def file(self) -> int | None:
        """Open memory file in which the rows follow each other; None if other processes cannot read them."""

    @property
    def start(self) -> int:
        """Where the rows begin in the file, in bytes."""

    @property
    def nodes(self) -> OtherNodesRows | None:
        """The parts of the rows on other nodes; None if there are none. The other methods are about the parts on this
        one."""

    def copy(self, swap_outs: Sequence[SwapCopy], swap_ins: Sequence[SwapCopy]) -> None:
        """Start the copies to host memory, then the copies from host memory. Only the thread of the steps calls
        this."""


@dataclass(frozen=True, slots=True)
class PrefixRead:
    """The part of a prefix that a pod has given."""

    num_blocks: int = 0
    """Number of first blocks of those that were missing that were read and checked."""
    state_end: int = 0
    """Number of blocks of the prefix after which the state is that was read and checked; 0 if there is none."""


class KVStore(Protocol):
    """Holds blocks by content key. No method waits for a disk or a network.

    Anything that is wrong with a block is a miss: it is never an error, and never a wrong block. The rows of a call
    must not change until its `on_done` is called, in any thread.
    """

    def contains(self, keys: Sequence[bytes]) -> int:
        """Return how many of the first blocks with these keys the store seems to hold."""

    def read(
        self,
        keys: Sequence[bytes],
        rows: Sequence[int],
        on_done: Callable[[int], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Start to read blocks into rows. `on_done` gets the number of first blocks that were read and checked. The
        read ends early when `is_wanted` returns false, in any thread."""

    def write(self, keys: Sequence[bytes], rows: Sequence[int], on_done: Callable[[int], None]) -> None:
        """Start to write rows as blocks. `on_done` gets the number of blocks that the store holds now."""

    @property
    def errors(self) -> Mapping[str, int]:
        """Number of blocks that were wrong or could not be read or written, by reason."""

    @property
    def seconds_per_block(self) -> float:
        """Measured seconds to read one block; 0 if nothing was measured lately."""


class PrefixStore(KVStore, Protocol):
    """The blocks and states of another pod."""

    def read_prefix(
        self,
        keys: Sequence[bytes],
        first: int,
        rows: Sequence[int],
        state_row: int,
        on_done: Callable[[PrefixRead], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Start to read the last state that the pod has after one of the blocks with these keys, and the blocks from
        number `first` up to there, into rows of states and of blocks; see `read`."""
