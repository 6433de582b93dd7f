# SPDX-License-Identifier: Apache-2.0
"""Copies of KV blocks between the device and host memory.

The runner calls it with the swaps of a step plan. It also measures what swapping costs, once at startup."""

import time
from collections.abc import Callable, Sequence

import torch

from quire_engine.kv_cache.device_cache import KVCache
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.step.plan import SwapCopy

_MEASUREMENT_BLOCKS = 64


class HostSwap:
    """Host memory for `num_blocks` blocks of `kv_cache`. With a GPU it is pinned and copies are asynchronous."""

    def __init__(self, kv_cache: KVCache, num_blocks: int) -> None:
        self._kv_cache = kv_cache
        self._host_blocks = kv_cache.allocate_host_blocks(num_blocks)

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that it occupies."""
        return self._host_blocks.nbytes

    def copy(self, swap_outs: Sequence[SwapCopy], swap_ins: Sequence[SwapCopy]) -> None:
        """Run the copies to host memory, then the copies from host memory."""
        if swap_outs:
            self._kv_cache.store_blocks(
                [copy.block for copy in swap_outs], self._host_blocks, [copy.host_block for copy in swap_outs]
            )
        if swap_ins:
            self._kv_cache.load_blocks(
                [copy.block for copy in swap_ins], self._host_blocks, [copy.host_block for copy in swap_ins]
            )

    def measure(self, compute: Callable[[], int]) -> SwapCosts:
        """Measure the time to swap a block and to compute a token. Overwrites the contents of blocks.

        Args:
            compute: runs a step and returns its number of tokens.
        """
        num_blocks = min(_MEASUREMENT_BLOCKS, len(self._host_blocks), self._kv_cache.num_blocks)
        block_ids = list(range(num_blocks))

        def swap_blocks() -> int:
            self._kv_cache.store_blocks(block_ids, self._host_blocks, block_ids)
            self._kv_cache.load_blocks(block_ids, self._host_blocks, block_ids)
            return num_blocks

        return SwapCosts(len(self._host_blocks), _seconds_per_unit(swap_blocks), _seconds_per_unit(compute))


def _seconds_per_unit(function: Callable[[], int]) -> float:
    """Return the seconds per unit of `function`: the best of three runs, after a warm-up run."""
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
