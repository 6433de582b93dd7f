# SPDX-License-Identifier: Apache-2.0
"""Layout of the KV cache: which layers share a block, and which blocks a sequence no longer needs.

The engine and the planner use this module. Pure arithmetic, like memory_sizing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from quire_spec.model.model_config import ModelConfig

Block = TypeVar("Block")

_MAX_GROUPS = 16
"""Maximum number of groups, because each group costs time in every step. One more group is possible, because a group
contains layers of only one kind."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Groups of layers. A block contains `block_size` tokens of the layers of one group.

    A model with layers of one kind has one group. Otherwise layers with a window and layers without a window are in
    separate groups. Each group has `num_layers` layers, so that all blocks have the same size and come from one pool. A
    block table then has `num_groups` entries for each `block_size` tokens; entries of groups without a window come
    first.
    """

    num_layers: int = 1
    """Number of layers in a block. Blocks of the last group of each kind can have unused places."""
    groups: tuple[int, ...] = (0,)
    """Group of each layer of the model."""
    rows: tuple[int, ...] = (0,)
    """Place of each layer of the model in the blocks of its group."""
    num_groups: int = 1
    num_full_groups: int = 0
    """Number of groups whose layers attend to all keys. If there is only one group, the value is 0, and `window`
    applies to that group."""
    window: int | None = None
    """Number of keys, including its own, to which a token attends in the other groups; None: all keys."""

    @classmethod
    def uniform(cls, num_layers: int, window: int | None = None) -> Self:
        """Return the layout with one group. `window`: see ModelConfig.max_sliding_window."""
        return cls(num_layers, (0,) * num_layers, tuple(range(num_layers)), window=window)

    @classmethod
    def from_model(cls, shape: ModelConfig, max_model_len: int, has_drafter: bool = False) -> Self:
        """Return the layout of a model whose sequences have at most `max_model_len` tokens.

        A layer with a window of at least `max_model_len` tokens counts as a layer without a window.
        """
        if has_drafter:
            # The cache of the draft model has the same block tables, and its layers may have no window.
            return cls.uniform(shape.num_layers)
        windows = [window for window in shape.sliding_windows if window is not None and window < max_model_len]
        num_windowed, num_full = len(windows), shape.num_layers - len(windows)
        if not (num_windowed and num_full):
            return cls.uniform(shape.num_layers, shape.max_sliding_window)
        size = max(min(num_windowed, num_full), -(-shape.num_layers // _MAX_GROUPS))
        num_full_groups, num_windowed_groups = -(-num_full // size), -(-num_windowed // size)
        groups, rows, counts = [], [], {True: 0, False: 0}
        for window in shape.sliding_windows:
            is_full = window is None or window >= max_model_len
            index, row = divmod(counts[is_full], size)
            groups.append(index if is_full else num_full_groups + index)
            rows.append(row)
            counts[is_full] += 1
        num_groups = num_full_groups + num_windowed_groups
        return cls(size, tuple(groups), tuple(rows), num_groups, num_full_groups, max(windows))

    @property
    def total_layers(self) -> int:
        """Total number of layers in one block of each group, including unused places."""
        return self.num_layers * self.num_groups

    def num_tokens(self, pool_tokens: int, max_model_len: int, block_size: int) -> int:
        """Return how many tokens fit into the pool if all sequences have `max_model_len` tokens.

        `pool_tokens` is the number of tokens that fit if all layers keep all tokens. One sequence is counted with all
        its blocks, because a prompt needs all of them at its start. The other sequences have freed the blocks outside
        their windows.
        """
        if self.window is None or self.num_groups == 1 or pool_tokens <= max_model_len:
            return pool_tokens
        num_windowed = self.num_groups - self.num_full_groups
        window = min(self.window + 2 * block_size, max_model_len)
        per_sequence = self.num_full_groups * max_model_len + num_windowed * window
        return max_model_len + (pool_tokens - max_model_len) * self.num_groups * max_model_len // per_sequence

    def max_length(self, pool_tokens: int, num_seqs: int, block_size: int) -> int:
        """Return the maximum length at which `num_seqs` sequences fit into the pool; `pool_tokens` has the same meaning
        as in num_tokens."""
        length = pool_tokens // num_seqs
        if self.window is None or self.num_groups == 1 or length <= self.window + 2 * block_size:
            return length
        windowed = (num_seqs - 1) * (self.num_groups - self.num_full_groups) * (self.window + 2 * block_size)
        return (pool_tokens * self.num_groups - windowed) // (self.num_groups + (num_seqs - 1) * self.num_full_groups)

    def num_outside_window(self, num_tokens: int, block_size: int) -> int:
        """Return how many blocks at a sequence's start are outside the windows of all later tokens, after the first
        `num_tokens` tokens.

        Layers with a window no longer read these blocks. The result is 0 if layers without a window are in the same
        group.
        """
        return 0 if self.window is None else max(num_tokens - self.window + 1, 0) // block_size

    def split_entries(self, entries: Sequence[Block]) -> tuple[list[Block], list[Block]]:
        """Split entries of a block table into blocks of groups without a window and blocks of groups with a window. The
        first entry must belong to group 0."""
        size = self.num_groups
        full = [block for i, block in enumerate(entries) if i % size < self.num_full_groups]
        return full, [block for i, block in enumerate(entries) if i % size >= self.num_full_groups]

    def without_freed(self, entries: Sequence[Block]) -> list[Block]:
        """Return the entries with each freed block replaced by another block of the sequence, if the sequence has one.

        Attention ignores the contents of these blocks but may read them, so that NaN values of another sequence would
        spread.
        """
        size = self.num_groups
        return [entries[i - i % size] if i % size >= self.num_full_groups else entries[i] for i in range(len(entries))]
