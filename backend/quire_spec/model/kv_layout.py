# SPDX-License-Identifier: Apache-2.0
"""Layout of the KV cache. It defines which layers share a block, and which blocks a sequence does not need any more.

The engine and the planner use this module. Pure arithmetic, like memory_sizing.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeVar

from quire_spec.model.model_config import ModelConfig

Block = TypeVar("Block")

UNSUPPORTED_LAYOUT = "only some layers of this model have a sliding window, so its blocks cannot be kept in host memory"
"""Why KV offloading refuses a model whose layout has several groups."""

UNSUPPORTED_KEY_SIZES = "this model has layers with keys of different sizes, which have no int8 rows; use auto"
"""Why kv_cache_dtype int8_per_token_head is refused for such a model."""

_MAX_GROUPS = 16
"""Maximum number of groups. It is limited because each group costs time in every step. There can be one group more than
this, because the layers of a group are all of one kind."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Groups of layers. A KV block contains the keys and values of `block_size` tokens for the layers of one group.

    If all layers of a model are of the same kind, there is one group. Otherwise, layers with a window and layers
    without a window are in different groups. Each group has `num_layers` layers. Therefore, all blocks have the same
    size and come from one pool. A block table then has `num_groups` entries for every `block_size` tokens. The entries
    of the groups without a window come first.

    If the keys of some layers are n times as large as those of the others (Gemma 4), their groups have n blocks for
    every `block_size` tokens. Each of these blocks contains `block_size` / n tokens. They count as n groups, so that
    only the device needs to know that they belong together.
    """

    num_layers: int = 1
    """Number of layers that a block has room for. The last group of each kind may have fewer layers. Its blocks then
    have places that are not used. 0 for an encoder, whose blocks contain nothing and only count sequences."""
    groups: tuple[int, ...] = (0,)
    """For each layer of the model, the index of its group; the first one if the layer has several. A layer that reads
    the keys and values of another layer has the place of that layer."""
    rows: tuple[int, ...] = (0,)
    """For each layer of the model, its place in the blocks of its group. A layer with a state instead of keys and
    values has the place of another layer, and does not use it."""
    num_groups: int = 1
    num_full_groups: int = 0
    """Number of groups whose layers have no window, so that tokens attend to all keys. If there is only one group, the
    value is 0, and `window` applies to that group."""
    window: int | None = None
    """Number of keys to which a token attends in the other groups, including its own key. None: it attends to all
    keys."""
    splits: tuple[int, ...] = ()
    """For each layer of the model, the number of its blocks for every `block_size` tokens. Empty: it is 1."""

    @classmethod
    def uniform(cls, num_layers: int, window: int | None = None) -> Self:
        """Return a layout that has only one group. `window`: see ModelConfig.max_sliding_window."""
        return cls(num_layers, (0,) * num_layers, tuple(range(num_layers)), window=window)

    @classmethod
    def from_model(
        cls, shape: ModelConfig, max_model_len: int, has_drafter: bool = False, is_staged: bool = False
    ) -> Self:
        """Return the layout for a model. Its sequences have at most `max_model_len` tokens.

        A layer whose window has `max_model_len` tokens or more is treated as a layer without a window. If the model
        `is_staged`, adjacent layers of a kind are in different groups, so that each pipeline stage has about the same
        part of every group.
        """
        if shape.encoder is not None:
            return cls(0, (), ())
        # The cache of a draft model uses the same block tables, and the layers of the draft model may have no window.
        windows = (None,) * shape.num_layers if has_drafter else shape.sliding_windows
        kinds: dict[tuple[bool, int], list[int]] = {}
        for layer, window in enumerate(windows):
            if shape.kv_source(layer) == layer:
                is_windowed = window is not None and window < max_model_len
                kinds.setdefault((is_windowed, shape.kv_elements(layer)), []).append(layer)
        num_layers = sum(map(len, kinds.values()))
        size = num_layers if len(kinds) == 1 else max(min(map(len, kinds.values())), -(-num_layers // _MAX_GROUPS))
        smallest = min(elements for _, elements in kinds)
        places: dict[int, tuple[int, int, int]] = {}
        num_groups = num_full_groups = 0
        for (is_windowed, elements), layers in sorted(kinds.items()):
            split, num_of_kind = elements // smallest, -(-len(layers) // size)
            for i, layer in enumerate(layers):
                row, index = divmod(i, num_of_kind) if is_staged else divmod(i, size)[::-1]
                places[layer] = num_groups + index * split, row, split
            num_groups += num_of_kind * split
            num_full_groups = num_full_groups if is_windowed else num_groups
        groups, rows, splits = zip(*(places[shape.kv_source(layer)] for layer in range(shape.num_layers)), strict=True)
        if num_groups == 1:
            return cls(size, groups, rows, window=None if has_drafter else shape.max_sliding_window)
        has_splits = any(split > 1 for split in splits)
        window = max((window for window in windows if window is not None and window < max_model_len), default=None)
        return cls(size, groups, rows, num_groups, num_full_groups, window, splits if has_splits else ())

    def for_stage(self, layers: range) -> Self:
        """Return the layout of a pipeline stage with these layers of the model. Its block tables have the entries of
        the whole model. Its blocks have no room for the layers of other stages."""
        rows, used = [], Counter[int]()
        for group in self.groups[layers.start : layers.stop]:
            rows.append(used[group])
            used[group] += 1
        groups, splits = self.groups[layers.start : layers.stop], self.splits[layers.start : layers.stop]
        return replace(self, num_layers=max(used.values()), groups=groups, rows=tuple(rows), splits=splits)

    @property
    def blocks_per_layer(self) -> int:
        """Largest number of blocks that a layer has for every `block_size` tokens, which must be a multiple of it."""
        return max(self.splits, default=1)

    @property
    def total_layers(self) -> int:
        """If each group has one block, these `num_groups` blocks together have room for this number of layers. Places
        that are not used are counted, too."""
        return self.num_layers * self.num_groups

    def num_tokens(self, pool_tokens: int, max_model_len: int, block_size: int) -> int:
        """Return how many tokens fit into the pool if every sequence has `max_model_len` tokens.

        `pool_tokens` is the number of tokens that would fit if every layer kept all tokens. One sequence is counted
        with all its blocks, because a prompt needs all of them when it starts. The other sequences are counted without
        the blocks outside their windows, because these blocks are freed.
        """
        if self.window is None or self.num_groups == 1 or pool_tokens <= max_model_len:
            return pool_tokens
        num_windowed = self.num_groups - self.num_full_groups
        window = min(self.window + 2 * block_size, max_model_len)
        per_sequence = self.num_full_groups * max_model_len + num_windowed * window
        return max_model_len + (pool_tokens - max_model_len) * self.num_groups * max_model_len // per_sequence

    def max_length(self, pool_tokens: int, num_seqs: int, block_size: int) -> int:
        """Return the maximum length that `num_seqs` sequences can have if they must fit into the pool together.

        `pool_tokens` has the same meaning as in num_tokens.
        """
        length = pool_tokens // num_seqs
        if self.window is None or self.num_groups == 1 or length <= self.window + 2 * block_size:
            return length
        windowed = (num_seqs - 1) * (self.num_groups - self.num_full_groups) * (self.window + 2 * block_size)
        return (pool_tokens * self.num_groups - windowed) // (self.num_groups + (num_seqs - 1) * self.num_full_groups)

    def num_outside_window(self, num_tokens: int, block_size: int) -> int:
        """Return how many blocks at the start of a sequence are not needed by its later tokens.

        The first `num_tokens` tokens are already computed. A block is counted if it is outside the windows of all later
        tokens.

        Layers with a window do not read these blocks any more. The result is 0 if the group also contains layers
        without a window.
        """
        return 0 if self.window is None else max(num_tokens - self.window + 1, 0) // block_size

    def split_entries(self, entries: Sequence[Block]) -> tuple[list[Block], list[Block]]:
        """Split the entries of a block table into two lists: the blocks of groups without a window, and the blocks of
        groups with a window. `entries` must start with an entry of group 0."""
        size = self.num_groups
        full = [block for i, block in enumerate(entries) if i % size < self.num_full_groups]
        return full, [block for i, block in enumerate(entries) if i % size >= self.num_full_groups]

    def without_freed(self, entries: Sequence[Block]) -> list[Block]:
        """Return the entries without freed blocks.

        Each freed block is replaced with another block of the sequence if there is one.

        Attention ignores what these blocks contain, but it may read them. If another sequence wrote NaN values there,
        they would spread.
        """
        size = self.num_groups
        return [entries[i - i % size] if i % size >= self.num_full_groups else entries[i] for i in range(len(entries))]
