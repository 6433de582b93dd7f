# SPDX-License-Identifier: Apache-2.0
"""Copies of KV blocks between the device and host memory.

The runner calls it with the swaps of a step plan. This module also measures the costs of swapping, once at startup."""

import time
from collections.abc import Callable, Sequence

import torch

from quire_engine.kv_cache.device_cache import KVCache, block_bytes
from quire_engine.kv_cache.layout_choice import choose_layout
from quire_engine.kv_cache.row_file import RowFile, RowPart
from quire_engine.kv_cache.state_cache import host_part_bytes
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.sequence import BlockId
from quire_engine.step.plan import SwapCopy
from quire_kernels import pin
from quire_spec.engine.config import EngineConfig
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.parallel.pipeline_parallel import split_stages
from quire_spec.model.parallel.tensor_parallel import TensorParallelShard

_MEASUREMENT_BLOCKS = 64


class HostSwap:
    """Host memory for `num_blocks` blocks of each KV cache.

    The model has a KV cache. A draft model, if any, has another one, which uses the same block ids. If the device is a
    GPU, this memory is pinned and copies are asynchronous.
    """

    def __init__(
        self,
        kv_caches: Sequence[KVCache],
        num_blocks: int,
        part: RowPart | None = None,
        rows: memoryview | None = None,
    ) -> None:
        """Allocate the memory. With `part`, there is one KV cache, and its memory is this part of `rows`, which are in
        a file that other processes can read."""
        self._part, self._rows, own = part, None, None
        if part is not None:
            assert len(kv_caches) == 1 and rows is not None
            memory = torch.frombuffer(rows, dtype=torch.uint8)
            self._rows = pin(memory) if kv_caches[0].device_type == "cuda" else memory
            own = self._rows.view(num_blocks, -1)[:, part.offset : part.offset + part.sizes[part.rank]]
        self._host_blocks = [(kv_cache, kv_cache.allocate_host_blocks(num_blocks, own)) for kv_cache in kv_caches]
        self._num_blocks = num_blocks
        # On a GPU: the end of the latest copies.
        self._copied: torch.cuda.Event | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that these blocks of this rank occupy."""
        return sum(host_blocks.nbytes for _, host_blocks in self._host_blocks)

    @property
    def layout(self) -> str:
        """See HostRows."""
        parts = [(str(rows.dtype), *rows.shape[1:]) for _, rows in self._host_blocks]
        # One rank decides about the shapes of all parts, except for the number of layers in each stage.
        sizes = [] if self._part is None or len(self._part.sizes) == 1 else [list(self._part.sizes)]
        return " ".join(map(str, (self._host_blocks[0][0].device_type, parts, *sizes)))

    def buffers(self, row: int) -> list[memoryview]:
        """See HostRows."""
        if self._rows is not None:
            return [self._rows.view(self._num_blocks, -1)[row].numpy().data]
        return [rows[row].flatten().view(torch.uint8).numpy().data for _, rows in self._host_blocks]

    @property
    def start(self) -> int:
        """See HostRows."""
        return 0

    @property
    def node_bytes(self) -> list[int]:
        """Bytes of a row on each node; the rows must be in a file."""
        assert self._part is not None
        return self._part.node_bytes

    @property
    def nodes(self) -> None:
        """See HostRows. RankRows has them."""
        return None

    @property
    def file(self) -> int | None:
        """See HostRows."""
        return None if self._part is None else self._part.file.file

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


def row_part(
    config: EngineConfig,
    shape: ModelConfig,
    dtype: torch.dtype,
    file: RowFile,
    rank: int,
    activation_dtype: torch.dtype,
) -> RowPart:
    """Return the part of a rank in each row of a file. `shape` is that of the whole model, and `dtype` that of the KV
    cache."""
    layout, sizes, state = choose_layout(config, shape), list[int](), 0
    for stage in split_stages(shape, config.pipeline_parallel_size, config.quantization):
        first = None if stage.stage is None else stage.stage.first_layer
        local = TensorParallelShard(stage, 0, config.tensor_parallel_size).local_config
        own = layout if first is None else layout.for_stage(range(first, first + stage.num_layers))
        sizes += [block_bytes(local, config.block_size, dtype, own)] * config.tensor_parallel_size
        if local.states is not None:
            state = sum(host_part_bytes(local.states, activation_dtype, getattr(torch, config.state_dtype)))
    return RowPart(file, sizes, rank, config.nnodes, state)


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
