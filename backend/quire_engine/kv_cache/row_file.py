# SPDX-License-Identifier: Apache-2.0
"""The memory file with the rows of host memory of a core, and the part of a rank in each row.

Every rank of the core on this machine maps the file, and so does the process that sends rows to other pods. A row is a
KV block of the whole model, or of the stages of this node: the parts of all ranks of the node, one after the other. If
layers have states, rows of states follow those of the blocks, with the parts of all ranks, too."""

import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


class RowFile:
    """An open memory file, which is closed with this object."""

    def __init__(self, file: int) -> None:
        self.file = file
        """Descriptor of the file in this process."""
        weakref.finalize(self, os.close, file).atexit = False

    @classmethod
    def create(cls) -> Self:
        """Create an empty file."""
        return cls(os.memfd_create("kv-rows"))

    @classmethod
    def open(cls, path: str) -> Self:
        """Open the file of another process by its `path`."""
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    @property
    def path(self) -> str:
        """Path by which the processes of this user open the file while this object exists."""
        return f"/proc/{os.getpid()}/fd/{self.file}"

    def map(self, num_bytes: int) -> mmap.mmap:
        """Give the file this size, and map it."""
        os.ftruncate(self.file, num_bytes)
        return mmap.mmap(self.file, num_bytes)


_PAGE_BYTES = 4096
"""The rows of states begin on a page, because pages are pinned."""


@dataclass(frozen=True, slots=True)
class RowPart:
    """The part of one rank in each row of a file."""

    file: RowFile
    sizes: Sequence[int]
    """Bytes of the part of each rank of the core, in their order."""
    rank: int = 0
    num_nodes: int = 1
    """Number of nodes, each of which has a file with the parts of an equal number of ranks."""
    state_bytes: int = 0
    """Bytes of the part of each rank in a row of states; 0 if layers have no states. Layers with states are never
    divided between nodes."""

    def map(self, num_blocks: int, num_states: int) -> tuple[memoryview, memoryview]:
        """Return the memory of `num_blocks` rows of blocks, and of `num_states` rows of states. All ranks must give
        the same numbers."""
        end = num_blocks * self.row_bytes
        start = self.states_start(num_blocks) if num_states else end
        if not (size := start + num_states * self.state_row_bytes):
            return memoryview(b""), memoryview(b"")
        memory = memoryview(self.file.map(size))
        return memory[:end], memory[start:]

    def states_start(self, num_blocks: int) -> int:
        """Where the rows of states begin in the file, in bytes."""
        return -(-num_blocks * self.row_bytes // _PAGE_BYTES) * _PAGE_BYTES

    @property
    def state_row_bytes(self) -> int:
        """Bytes of a row of states."""
        return self.state_bytes * len(self.sizes)

    @property
    def offset(self) -> int:
        """Where the part of this rank begins in a row, in bytes."""
        return sum(self.sizes[self.rank - self.rank % self._ranks_per_node : self.rank])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.node_bytes[self.rank // self._ranks_per_node]

    @property
    def node_bytes(self) -> list[int]:
        """Bytes of a row on each node."""
        size = self._ranks_per_node
        return [sum(self.sizes[first : first + size]) for first in range(0, len(self.sizes), size)]

    @property
    def _ranks_per_node(self) -> int:
        return len(self.sizes) // self.num_nodes
