# SPDX-License-Identifier: Apache-2.0
"""Swapper: carries KV blocks between the device and host memory, as plans say, and measures what that costs."""

import time
from collections.abc import Callable, Sequence

import torch

from quire_engine.kv import KVCache
from quire_engine.step import HostCopy
from quire_engine.swap import SwapSpace

_MEASURED_BLOCKS = 64


class Swapper:
    """Host memory for `num_blocks` blocks of `kv`; on a GPU it is pinned, and copies run beside the host."""

    def __init__(self, kv: KVCache, num_blocks: int) -> None:
        self._kv = kv
        self._host = kv.host_blocks(num_blocks)

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory."""
        return self._host.nbytes

    def carry(self, outs: Sequence[HostCopy], ins: Sequence[HostCopy]) -> None:
        """Copy blocks out, then blocks in."""
        if outs:
            self._kv.export([copy.block for copy in outs], self._host, [copy.host for copy in outs])
        if ins:
            self._kv.take([copy.block for copy in ins], self._host, [copy.host for copy in ins])

    def measure(self, compute: Callable[[], int]) -> SwapSpace:
        """What the scheduler weighs. `compute` runs a step and returns its tokens; blocks lose their contents."""
        num = min(_MEASURED_BLOCKS, len(self._host), self._kv.num_blocks)
        ids = list(range(num))

        def move() -> int:
            self._kv.export(ids, self._host, ids)
            self._kv.take(ids, self._host, ids)
            return num

        return SwapSpace(len(self._host), _seconds(move), _seconds(compute))


def _seconds(work: Callable[[], int]) -> float:
    """Seconds for each unit of `work`, the best of three runs after one to warm up."""
    best = float("inf")
    for run in range(4):
        _synchronize()
        start = time.perf_counter()
        num = work()
        _synchronize()
        if run:
            best = min(best, (time.perf_counter() - start) / num)
    return best


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
