# SPDX-License-Identifier: Apache-2.0
"""The memory file with the rows of host memory of a core, and the part of a rank in each row.

Every rank of the core maps the file, and so does the process that sends rows to other pods. A row is a KV block of the
whole model: the parts of all ranks, one after the other."""

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


@dataclass(frozen=True, slots=True)
class RowPart:
    """The part of one rank in each row of a file."""

    file: RowFile
    sizes: Sequence[int]
    """Bytes of the part of each rank of the core, in their order."""
    rank: int = 0

    @property
    def offset(self) -> int:
        """Where the part of this rank begins in a row, in bytes."""
        return sum(self.sizes[: self.rank])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return sum(self.sizes)
