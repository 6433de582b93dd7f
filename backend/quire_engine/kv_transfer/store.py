# SPDX-License-Identifier: Apache-2.0
"""Interface of the places outside of a core that hold KV blocks, and of the host memory that they read and write.

Torch-free. The scheduler uses a store through `StoreTraffic`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from quire_engine.step.plan import SwapCopy


class HostRows(Protocol):
    """Rows of host memory, each of which holds one block. The core copies blocks between the device and these rows."""

    @property
    def layout(self) -> str:
        """Everything that determines how the bytes of a row are read: device, dtypes and shapes."""

    def buffers(self, row: int) -> list[memoryview]:
        """Return the bytes of a row. Every row has buffers of the same sizes."""

    @property
    def file(self) -> int | None:
        """Open memory file in which the rows follow each other; None if other processes cannot read them."""

    def copy(self, swap_outs: Sequence[SwapCopy], swap_ins: Sequence[SwapCopy]) -> None:
        """Start the copies to host memory, then the copies from host memory. Only the thread of the steps calls
        this."""

    def synchronize(self) -> None:
        """Wait until the copies that were started before are complete. Any thread can call this."""


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
