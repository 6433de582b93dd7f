# SPDX-License-Identifier: Apache-2.0
"""Attention of a mixed batch whose long prompts are left to PyTorch's fused attention: on Hopper to cuDNN's, with the
copy engine and warps for it alone, which our kernel does without. All else is that kernel's.

QUIRE_FORMS=paged_attention=fused asks for it, until a card has shown where it is faster: tests/bench/gpu.py measures
both. Others' figures for an H100, 16 heads of 128 and 8,192 tokens: 582 TFLOP/s for cuDNN's, 469 for the attention of
Triton's tutorial, which is near ours (https://github.com/meta-pytorch/tritonbench/issues/141).
"""

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from quire_kernels.attention import AttentionBatch, Opening
from quire_kernels.gpu.attention import paged_attention as attend
from quire_kernels.kv_write import movable

MIN_TOKENS = 1024
"""Of a prompt that is worth three launches more and the copies of its keys, values and output."""
BACKENDS = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
"""The first one that takes the types and shapes computes."""


def paged_attention(
    queries: Tensor,
    cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """See attention.paged_attention.

    Beside what the products need, a long prompt's keys, values and output are read and written once more: 200 MB for
    8,192 tokens of 32 heads on 8 of 128 in bfloat16, 0.05 ms at 4.3 TB/s beside 0.95 ms at 580 TFLOP/s.
    """
    apart = [opening for opening in batch.openings if opening.length >= MIN_TOKENS]
    beyond = softcap is not None or (window is not None and window < batch.longest)
    if not apart or beyond:
        return attend(queries, cache, batch, scale, window, softcap)
    if len(apart) < len(batch.context_lengths):
        out = attend(queries, cache, replace(batch, apart_from=MIN_TOKENS), scale, window, softcap)
    else:
        out = queries.new_empty(queries.shape)
    for opening in apart:
        out[opening.first : opening.first + opening.length] = _attend_itself(queries, cache, batch, opening, scale)
    return out


def _attend_itself(queries: Tensor, cache: Tensor, batch: AttentionBatch, opening: Opening, scale: float) -> Tensor:
    """[length, num_heads, head_dim]: causal attention of an opening over its own keys."""
    block_size, num_kv_heads, head_dim = cache.shape[2:]
    rows, blocks = movable(cache.flatten(2)), batch.block_tables[opening.span, : -(-opening.length // block_size)]

    def gather(kind: int) -> Tensor:
        flat = rows[kind].index_select(0, blocks).view(cache.dtype).to(queries.dtype)
        return flat.view(-1, num_kv_heads, head_dim)[: opening.length]

    q, keys, values = (
        _rounded_up(x)[None].transpose(1, 2)
        for x in (queries[opening.first : opening.first + opening.length], gather(0), gather(1))
    )
    with sdpa_kernel(list(BACKENDS), set_priority=True):
        attended = F.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=scale, enable_gqa=True)
    return attended[0, :, : opening.length].transpose(0, 1)


def _rounded_up(x: Tensor) -> Tensor:
    """Of as many tokens as are planned for, with zeros that no token sees. x: [num_tokens, heads, head_dim]."""
    missing = planned_tokens(len(x)) - len(x)
    return F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x


def planned_tokens(length: int) -> int:
    """`length`, rounded up to one of eight lengths between two powers of two: cuDNN plans for some tens of milliseconds
    when it meets a length for the first time."""
    step = max(1 << (length - 1).bit_length() - 4, 1)
    return -(-length // step) * step
