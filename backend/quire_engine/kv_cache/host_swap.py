# SPDX-License-Identifier: Apache-2.0
"""Copies of KV blocks between the device and host memory.

The runner calls it with the swaps of a step plan. This module also measures the costs of swapping, once at startup."""

import os
import time
import weakref
from collections.abc import Callable, Sequence

import torch

from quire_engine.kv_cache.device_cache import KVCache
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.sequence import BlockId
from quire_engine.step.plan import SwapCopy

_MEASUREMENT_BLOCKS = 64


class HostSwap:
    """Host memory for `num_blocks` blocks of each KV cache.

    The model has a KV cache. A draft model, if any, has another one, which uses the same block ids. If the device is a
    GPU, this memory is pinned and copies are asynchronous.
    """

    def __init__(self, kv_caches: Sequence[KVCache], num_blocks: int, is_shared: bool = False) -> None:
        """Allocate the memory. If `is_shared` is true, there is one KV cache, and other processes can read its rows."""
        self._file = os.memfd_create("kv-rows") if is_shared else None
        if self._file is not None:
            assert len(kv_caches) == 1
            weakref.finalize(self, os.close, self._file).atexit = False
        self._host_blocks = [
            (kv_cache, kv_cache.allocate_host_blocks(num_blocks, self._file)) for kv_cache in kv_caches
        ]
        self._num_blocks = num_blocks
        # On a GPU: the end of the latest copies.
        self._copied: torch.cuda.Event | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that these blocks occupy."""
        return sum(host_blocks.nbytes for _, host_blocks in self._host_blocks)

    @property
    def layout(self) -> str:
        """See HostRows."""
        parts = [(str(rows.dtype), *rows.shape[1:]) for _, rows in self._host_blocks]
        return f"{self._host_blocks[0][0].device_type} {parts}"

    def buffers(self, row: int) -> list[memoryview]:
        """See HostRows."""
        return [rows[row].flatten().view(torch.uint8).numpy().data for _, rows in self._host_blocks]

    @property
    def file(self) -> int | None:
        """See HostRows."""
        return self._file

    def synchronize(self) -> None:
        """See HostRows."""
        if self._copied is not None:
            self._copied.synchronize()

    def copy(self, swap_outs: Sequence[SwapCopy], swap_ins: Sequence[SwapCopy]) -> None:
        """See HostRows."""
        for kv_cache, host_blocks in self._host_blocks:
            if swap_outs:
                kv_cache.store_blocks(
                    [copy.block for copy in swap_outs], host_blocks, [copy.host_block for copy in swap_outs]
                )
            if swap_ins:
                kv_cache.load_blocks(
                    [copy.block for copy in swap_ins], host_blocks, [copy.host_block for copy in swap_ins]
                )
        if (swap_outs or swap_ins) and self._host_blocks[0][1].is_pinned():
            self._copied = torch.cuda.current_stream().record_event()

    def measure(self, compute: Callable[[], int]) -> SwapCosts:
        """Measure how many seconds it takes to swap a block and to compute a token. The measurement overwrites the
        contents of blocks.

        Args:
            compute: runs a step and returns its number of tokens.
        """
        num_blocks = min(_MEASUREMENT_BLOCKS, self._num_blocks, self._host_blocks[0][0].num_blocks)
        copies = [SwapCopy(BlockId(i), BlockId(i)) for i in range(num_blocks)]

        def swap_blocks() -> int:
            self.copy(copies, copies)
            return num_blocks

        return SwapCosts(self._num_blocks, _seconds_per_unit(swap_blocks), _seconds_per_unit(compute))


def _seconds_per_unit(function: Callable[[], int]) -> float:
    """Return the seconds that `function` takes per unit of work.

    The function runs once for warm-up, and then three times. The shortest of these three runs counts.
    """
    best_s = float("inf")
    for attempt in range(4):
        _synchronize()
        start = time.perf_counter()
        num_units = function()
        _synchronize()
        if attempt:
            best_s = min(best_s, (time.perf_counter() - start) / num_units)
    return best_s


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
