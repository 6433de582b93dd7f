# SPDX-License-Identifier: Apache-2.0
"""Attention in which all tokens of a sequence attend to each other, without a cache."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_kernels.attention import AttentionMetadata
from quire_kernels.host_device_copy import to_device_async

_WINDOW_CHUNK = 256
"""With a window, this number of queries is computed at a time, so that most keys outside their windows are not read."""


def build_encoder_metadata(lengths: Sequence[int], device: torch.device) -> AttentionMetadata:
    """Return the metadata of whole sequences that have no blocks of a cache. `lengths` are their numbers of tokens."""
    ends = torch.tensor([0, *lengths], dtype=torch.int32)
    return AttentionMetadata(
        to_device_async(ends.cumsum(0, dtype=torch.int32), device),
        to_device_async(ends[1:], device),
        torch.empty(len(lengths), 0, dtype=torch.int64, device=device),
        tuple,
        lengths,
    )


def encoder_attention(
    qkv: Tensor,
    num_heads: int,
    batch: AttentionMetadata,
    scale: float,
    window: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute attention within each sequence.

    Runs on any device by operations of PyTorch: adjacent sequences of the same length are one call.

    Args:
        qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], any float dtype: queries, keys and values.
        num_heads: number of query heads.
        batch: contains the lengths of the sequences.
        scale: factor of the scores.
        window: number of keys on each side to which a token attends, including its own key. None: all keys.
        bias: [num_heads, longest, longest], dtype of qkv: is added to the scores of a query and a key at these
            positions of a sequence. Not possible with a window. None: nothing is added.

    Returns:
        [num_tokens, num_heads, head_dim], contiguous, dtype of qkv.
    """
    num_kv_heads, head_dim = (qkv.shape[1] - num_heads) // 2, qkv.shape[2]
    out = qkv.new_empty(qkv.shape[0], num_heads, head_dim)
    for start, count, length in _runs(batch.lengths):
        rows = slice(start, start + count * length)
        heads = qkv[rows].view(count, length, -1, head_dim).transpose(1, 2)
        queries, keys, values = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        attended = out[rows].view(count, length, num_heads, head_dim)
        if window is None or length <= window:
            mask = None if bias is None else bias[None, :, :length, :length]
            found = F.scaled_dot_product_attention(queries, keys, values, mask, scale=scale, enable_gqa=True)
            attended.copy_(found.transpose(1, 2))
            continue
        for first in range(0, length, _WINDOW_CHUNK):
            last = min(first + _WINDOW_CHUNK, length)
            key_range = range(max(first - window + 1, 0), min(last + window - 1, length))
            positions = torch.arange(first, last, device=qkv.device)[:, None]
            key_positions = torch.arange(key_range.start, key_range.stop, device=qkv.device)
            found = F.scaled_dot_product_attention(
                queries[:, :, first:last],
                keys[:, :, key_range.start : key_range.stop],
                values[:, :, key_range.start : key_range.stop],
                (positions - key_positions).abs() < window,
                scale=scale,
                enable_gqa=True,
            )
            attended[:, first:last].copy_(found.transpose(1, 2))
    return out


def _runs(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the first token, the number and the length of adjacent sequences that have the same length."""
    start = index = 0
    while index < len(lengths):
        length, first = lengths[index], index
        while index < len(lengths) and lengths[index] == length:
            index += 1
        yield start, index - first, length
        start += (index - first) * length
