# SPDX-License-Identifier: Apache-2.0
"""Ragged batches for attention tests: queries, a cache with each span's context in scattered blocks, and the
metadata."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire_kernels import AttentionMetadata, build_attention_metadata

RAGGED_SPANS = {
    "one token": [(0, 1)],
    "one decode": [(16, 1)],
    "decodes around a block": [(14, 1), (15, 1), (16, 1), (17, 1), (0, 1)],
    "decodes far apart": [(3, 1), (700, 1), (1500, 1), (31, 1)],
    "prompts": [(0, 5), (0, 16), (0, 33)],
    "equal prompts": [(0, 17), (0, 17), (0, 17)],
    "chunks": [(16, 16), (7, 30), (64, 2)],
    "equal chunks": [(32, 9), (32, 9)],
    "mixed": [(40, 1), (0, 33), (41, 1), (16, 20), (5, 1), (0, 33), (300, 1)],
}
"""Spans, each (tokens before it, its tokens)."""


def make_batch(
    spans: Sequence[tuple[int, int]],
    *,
    block_size: int = 16,
    heads: tuple[int, int] = (9, 3),
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, AttentionMetadata]:
    """Queries [num_tokens, heads, head_dim], the cache, and the batch that describes `spans`, on the CPU.

    Memory of the cache that no span uses is NaN: reading it, even under a mask, shows.
    """
    num_blocks_per_span = [-(-(start + length) // block_size) for start, length in spans]
    order = torch.randperm(sum(num_blocks_per_span) + 3)
    cache = torch.full((2, len(order), block_size, heads[1], head_dim), float("nan"), dtype=dtype)
    block_tables = torch.empty(len(spans), max(num_blocks_per_span), dtype=torch.int64)
    offset = 0
    for i, (count, (start, length)) in enumerate(zip(num_blocks_per_span, spans, strict=True)):
        blocks = order[offset : offset + count]
        offset += count
        block_tables[i] = blocks[0]
        block_tables[i, :count] = blocks
        content = torch.randn(2, count * block_size, heads[1], head_dim, dtype=dtype)
        # Past the context: finite, as the engine clears a block before its first use, but loud.
        content[:, start + length :] = 100.0
        cache[:, blocks] = content.view(2, count, block_size, heads[1], head_dim)
    queries = torch.randn(sum(length for _, length in spans), heads[0], head_dim, dtype=dtype)
    starts, lengths = [s for s, _ in spans], [n for _, n in spans]
    cache = cache if cache_dtype is None else cache.to(cache_dtype)
    return queries, cache, build_attention_metadata(starts, lengths, block_tables, cache, torch.device("cpu"))
