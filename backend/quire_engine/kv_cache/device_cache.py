# SPDX-License-Identifier: Apache-2.0
"""The KV cache: device memory for keys and values. Only this module depends on the dtype, layout and addresses of keys
and values.

The scheduler assigns block ids. The runner converts block ids to addresses (vLLM: `slot_mapping`), and each layer
passes its own tensor to the kernels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_engine.kv_cache.state_cache import StateCache
from quire_kernels import HugePageArena, as_indexable, pinned_empty, reads_whole_blocks, row_size, to_device_async
from quire_spec.errors import ConfigError
from quire_spec.model.kv_layout import UNSUPPORTED_KEY_SIZES, KVLayout
from quire_spec.model.memory_sizing import kv_block_bytes
from quire_spec.model.model_config import ModelConfig

_MAX_COPY_BYTES = 32 * 2**20
"""When blocks are copied, the temporary buffer has at most this many bytes. It is small, because the KV cache fills
most of a GPU's memory."""


def block_bytes(shape: ModelConfig, block_size: int, dtype: torch.dtype, layout: KVLayout | None = None) -> int:
    """Return the bytes of one block in this layout; by default, the block contains all layers."""
    num_layers = None if layout is None else layout.num_layers
    return kv_block_bytes(shape, block_size, dtype.itemsize, row_size(0, dtype), num_layers)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share blocks; see KVLayout."""

    first_entry: int
    """Index of the group's first entry among the entries of a block table for `block_size` tokens."""
    num_entries: int
    """Number of adjacent entries that belong to the group."""
    layer: Tensor
    """Cache of one of the layers."""

    @property
    def block_size(self) -> int:
        """Number of tokens of a block of this group."""
        return self.layer.shape[2]


class KVCache:
    """Keys and values of `num_blocks` blocks.

    Isolation: a sequence never reads old values of another sequence. A mask in attention is not sufficient for this,
    because NaN times 0 is NaN. If the attention kernels read whole blocks, a block is zeroed when its first token is
    written. Block tables are padded with a block of the same sequence.
    """

    def __init__(
        self,
        shape: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_spare_blocks: int = 0,
        layout: KVLayout | None = None,
        states: StateCache | None = None,
    ) -> None:
        """Allocate `num_blocks` blocks, followed by `num_spare_blocks` blocks that sequences do not use.

        If `layout` is None, all layers keep all tokens. `states` are the states of sequences.
        """
        self.layout = layout = layout or KVLayout.from_model(shape, 1)
        if block_size % layout.blocks_per_layer:
            raise ConfigError(
                f"block_size: {block_size} is not a multiple of {layout.blocks_per_layer}, the number of blocks into "
                "which the larger keys of this model are divided; use 16"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        # The memory is not zeroed here, because a page on a CPU takes memory only after the first write.
        num_kv_heads, head_dim = shape.smallest_heads
        all_blocks = num_blocks + num_spare_blocks
        num_tensors = shape.num_kv_tensors
        size = (layout.num_layers, num_tensors, all_blocks, block_size, num_kv_heads, row_size(head_dim, dtype))
        uses_arena = device.type == "cpu" and layout.num_layers > 0
        typed_data = HugePageArena().empty(size, dtype) if uses_arena else torch.empty(size, dtype=dtype, device=device)
        # This is a view of the same memory with a dtype that torch can index. torch cannot index 8-bit floats on any
        # device.
        self._data = as_indexable(typed_data)
        splits = layout.splits or (1,) * len(layout.groups)
        heads = [shape.kv_heads(layer) for layer in range(len(layout.groups))]
        if len(set(heads)) > 1 and dtype == torch.int8:
            raise ConfigError(f"kv_cache_dtype: int8_per_token_head: {UNSUPPORTED_KEY_SIZES}")
        self.layers: tuple[Tensor, ...] = tuple(
            typed_data[row]
            .view(num_tensors, all_blocks, block_size // split, kv_heads, row_size(dim, dtype))
            .expand(2, -1, -1, -1, -1)
            for row, split, (kv_heads, dim) in zip(layout.rows, splits, heads, strict=True)
        )
        """One tensor [2, num_blocks, block_size, num_kv_heads, row_size] per layer: keys at index 0, values at 1; see
        `write_kv`. With latent attention, both are the same rows. Layers of different groups can share memory, but they
        use different blocks of it."""
        self.states = states
        places = sorted(set(zip(layout.groups, splits, strict=True)))
        self.groups = [LayerGroup(*place, self.layers[layout.groups.index(place[0])]) for place in places]
        """The groups, in the order of their entries in a block table."""
        self.layer_groups = tuple(places.index(place) for place in zip(layout.groups, splits, strict=True))
        """For each layer, the index of its group in `groups`."""
        # With an int8 cache, only the kernel for bfloat16 queries never reads unwritten tokens. The dtype of the
        # queries is not known here, so new blocks of an int8 cache are always zeroed.
        reads_all = any(reads_whole_blocks(layer, shape.num_heads) for layer in self.layers)
        self._zeroes_new_blocks = reads_all or dtype == torch.int8

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache."""
        return self._data.nbytes

    def zero(self) -> None:
        """Write to all blocks. On a CPU, the first write to a page takes as long as several steps."""
        self._data.zero_()

    @property
    def device_type(self) -> str:
        """cpu or cuda."""
        return self._data.device.type

    @property
    def max_blocks_per_copy(self) -> int:
        """Maximum number of blocks in the temporary buffer of a copy."""
        return max(1, _MAX_COPY_BYTES // max(self.num_bytes // self._data.shape[2], 1))

    def pad_tables(self, blocks: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Return a block table [num_spans, max_blocks] for each group, int64 on the CPU; short rows are padded with one
        of their blocks.

        Args:
            blocks: the concatenated tables of all sequences, [num_blocks] int64 on the CPU; see Sequence.block_table.
            lengths: number of tokens in the blocks of each sequence.
        """
        block_counts = [-(-length // self.block_size) for length in lengths]
        num_blocks = torch.tensor(block_counts)
        columns = torch.arange(max(block_counts))
        column_indices = torch.where(columns < num_blocks[:, None], columns, 0)
        rows = (num_blocks.cumsum(0) - num_blocks)[:, None] + column_indices
        if self.layout.num_groups == 1:
            return [blocks[rows]]
        entries = blocks.view(-1, self.layout.num_groups)[rows]
        return [
            entries[..., g.first_entry : g.first_entry + g.num_entries].reshape(len(rows), -1).contiguous()
            for g in self.groups
        ]

    def addresses(self, tables: Sequence[Tensor], rows: Tensor, positions: Tensor) -> Tensor:
        """Return the addresses of tokens for `write_kv`, [num_groups, num_tokens] int64. An address is
        block * block_size + offset.

        Args:
            tables: the block tables of all groups, from `pad_tables`.
            rows: [num_tokens], the row of each token in `tables`.
            positions: [num_tokens], the position of each token in its sequence.
        """
        sizes = [group.block_size for group in self.groups]
        return torch.stack(
            [t[rows, positions // size] * size + positions % size for t, size in zip(tables, sizes, strict=True)]
        )

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy the contents of blocks: the keys and values of all their layers. A block cannot be both a source and a
        destination."""
        for source_ids, batch_destinations in self._batches(sources, destinations):
            destination_ids = to_device_async(batch_destinations, self._data.device)
            self._data.index_copy_(2, destination_ids, self._data.index_select(2, source_ids))

    def allocate_host_blocks(self, num_blocks: int, memory: Tensor | None = None) -> Tensor:
        """Allocate host memory for blocks, a tensor [num_blocks, num_layers, 2, block_size, num_kv_heads, row_size].
        With latent attention, the third size is 1.

        The contents of a block, with all its layers, are contiguous, so that single blocks can be sent or kept. The
        memory is pinned if the cache is on a GPU. With `memory`, nothing is allocated, and the blocks are in these rows
        of bytes, a tensor [num_blocks, bytes of a block].
        """
        layers, num_kv, _, *block = self._data.shape
        shape, dtype = (num_blocks, layers, num_kv, *block), self._data.dtype
        if memory is not None:
            return memory.view(dtype).view(shape)
        return pinned_empty(shape, dtype) if self._data.device.type == "cuda" else torch.empty(shape, dtype=dtype)

    def store_blocks(self, blocks: Sequence[int], host: Tensor, rows: Sequence[int]) -> None:
        """Copy the contents of `blocks` into `rows` of `host`, which `allocate_host_blocks` has returned.

        On a GPU the copy is asynchronous: synchronize, or read the result in the same stream.
        """
        for block_ids, host_rows in self._batches(blocks, rows):
            contents = self._data.movedim(2, 0).index_select(0, block_ids)
            if host.is_pinned():
                for content, host_row in zip(contents, host_rows, strict=True):
                    host[host_row].copy_(content, non_blocking=True)
            else:
                host[host_rows] = contents.to("cpu")
            # Without `del`, the buffers of two batches would exist at the same time.
            del contents

    def load_blocks(self, blocks: Sequence[int], host: Tensor, rows: Sequence[int]) -> None:
        """Copy `rows` of `host` into `blocks`. The rows must not change until a GPU has read them."""
        for block_ids, host_rows in self._batches(blocks, rows):
            if host.is_pinned():
                contents = torch.empty((len(host_rows), *host.shape[1:]), dtype=host.dtype, device=self._data.device)
                for content, host_row in zip(contents, host_rows, strict=True):
                    content.copy_(host[host_row], non_blocking=True)
            else:
                contents = host[host_rows].to(self._data.device)
            self._data.index_copy_(2, block_ids, contents.movedim(0, 2))
            del contents

    def _batches(self, blocks: Sequence[int], rows: Sequence[int]) -> Iterator[tuple[Tensor, Sequence[int]]]:
        """Yield batches of blocks. Each batch fits in the temporary buffer and is a pair: a device tensor of block ids,
        and the rows of these blocks."""
        assert len(blocks) == len(rows)
        for start in range(0, len(blocks), self.max_blocks_per_copy):
            end = start + self.max_blocks_per_copy
            yield to_device_async(blocks[start:end], self._data.device), rows[start:end]

    def zero_new_blocks(self, addresses: Tensor) -> None:
        """Zero the blocks whose first token is among `addresses` (on the CPU, see `addresses`). Call this before a step
        writes to them.

        Does nothing if the attention kernels read only tokens that were written.
        """
        if not self._zeroes_new_blocks:
            return
        sizes = torch.tensor([group.block_size for group in self.groups])[:, None]
        new_blocks = (addresses // sizes)[addresses % sizes == 0]
        if len(new_blocks):
            self._data.index_fill_(2, to_device_async(new_blocks, self._data.device), 0)
