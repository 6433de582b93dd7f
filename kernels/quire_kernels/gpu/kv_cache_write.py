# SPDX-License-Identifier: Apache-2.0
"""Kernels that write new keys and values to the paged KV cache.

One kernel only writes them. The other kernel also rotates the queries and keys first.
"""

import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.gpu.launch_math import cdiv, next_power_of_2

_HEADS_PER_PROGRAM = 8
"""A program processes this many heads of a token. With a head size of 128, 8 heads take 2 KiB in bfloat16."""


def write_kv(keys: Tensor, values: Tensor, cache: Tensor, addresses: Tensor) -> None:
    """See kv_cache_write.write_kv. Moves 4 * num_tokens * num_kv_heads * head_dim elements: it reads and writes keys
    and values."""
    num_tokens, num_kv_heads, head_dim = keys.shape
    assert keys.stride(1) == values.stride(1) == head_dim and keys.stride(2) == values.stride(2) == 1
    width = num_kv_heads * head_dim
    block = min(next_power_of_2(width), 1024)
    _write_kv[(num_tokens, cdiv(width, block), 2)](
        keys, values, cache, addresses, keys.stride(0), values.stride(0), cache.stride(0), width, BLOCK=block
    )


def rope_and_cache(qkv: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, addresses: Tensor, num_heads: int) -> Tensor:
    """See rope.rope_and_cache. Rotates queries in place.

    Moves 2 * num_tokens * (num_heads + 2 * num_kv_heads) * head_dim elements, because each element is read once and
    written once. It also reads the angles.
    """
    num_tokens, all_heads, head_dim = qkv.shape
    dim = cos.shape[1]
    assert qkv.stride(1) == head_dim and qkv.stride(2) == 1 and cos.is_contiguous() and sin.is_contiguous()
    _rope_and_cache[(num_tokens, cdiv(all_heads, _HEADS_PER_PROGRAM))](
        qkv,
        cos,
        sin,
        cache,
        addresses,
        qkv.stride(0),
        cache.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=(all_heads - num_heads) // 2,
        HEAD_DIM=head_dim,
        HALF=dim // 2,
        HALF_BLOCK=next_power_of_2(dim // 2),
        REST_BLOCK=0 if dim == head_dim else next_power_of_2(head_dim - dim),
        HEADS=_HEADS_PER_PROGRAM,
        num_warps=4,
    )
    return qkv[:, :num_heads]


@triton.jit
def to_cache_dtype(x, like):
    """Convert x to the element type of the cache pointer `like`. e4m3 has no infinity, so larger numbers are clamped to
    its maximum. NaN stays NaN."""
    if like.dtype.element_ty == tl.float8e4nv:
        wide = x.to(tl.float32)
        bits = tl.minimum(tl.maximum(wide, -448.0), 448.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        y = tl.where(wide == wide, bits, 0x7F).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        y = x.to(like.dtype.element_ty)
    return y


# In large caches, `kind_stride` exceeds 2^31, so it is always an int64. The engine warms up with a cache of one block.
# If small caches used an int32, the first request would compile another kernel variant.
@triton.jit
def _write_kv(
    keys, values, cache, addresses, key_stride, value_stride, kind_stride: tl.int64, width, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    address = tl.load(addresses + token)
    if tl.program_id(2) == 0:
        row = tl.load(keys + token * key_stride + columns, mask=mask)
        tl.store(cache + address * width + columns, to_cache_dtype(row, cache), mask=mask)
    else:
        row = tl.load(values + token * value_stride + columns, mask=mask)
        tl.store(cache + kind_stride + address * width + columns, to_cache_dtype(row, cache), mask=mask)


@triton.jit
def _rope_and_cache(
    qkv,
    cos,
    sin,
    cache,
    addresses,
    stride,
    kind_stride: tl.int64,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Queries, keys and values share one code path. The elements that are not rotated use the angle 0."""
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    pairs = tl.arange(0, HALF_BLOCK)[None, :]
    mask = (heads < NUM_HEADS + 2 * NUM_KV_HEADS) & (pairs < HALF)
    is_rotated = heads < NUM_HEADS + NUM_KV_HEADS
    source = qkv + token * stride + heads * HEAD_DIM
    kv_head = (heads - NUM_HEADS) % NUM_KV_HEADS
    address = tl.load(addresses + token)
    cache_ptrs = cache + tl.where(is_rotated, 0, kind_stride) + (address * NUM_KV_HEADS + kv_head) * HEAD_DIM

    first = tl.load(source + pairs, mask=mask, other=0.0)
    second = tl.load(source + HALF + pairs, mask=mask, other=0.0)
    angle = token * 2 * HALF + pairs
    cos_1 = tl.load(cos + angle, mask=pairs < HALF, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos + angle + HALF, mask=pairs < HALF, other=0.0).to(tl.float32)
    sin_1 = tl.load(sin + angle, mask=pairs < HALF, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin + angle + HALF, mask=pairs < HALF, other=0.0).to(tl.float32)
    a, b = first.to(tl.float32), second.to(tl.float32)
    rotated_1 = tl.where(is_rotated, a * cos_1 + b * sin_1, a).to(first.dtype)
    rotated_2 = tl.where(is_rotated, b * cos_2 + a * sin_2, b).to(first.dtype)

    is_query = mask & (heads < NUM_HEADS)
    tl.store(source + pairs, rotated_1, mask=is_query)
    tl.store(source + HALF + pairs, rotated_2, mask=is_query)
    is_kv = mask & (heads >= NUM_HEADS)
    tl.store(cache_ptrs + pairs, to_cache_dtype(rotated_1, cache), mask=is_kv)
    tl.store(cache_ptrs + HALF + pairs, to_cache_dtype(rotated_2, cache), mask=is_kv)
    if REST_BLOCK > 0:
        rest = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
        is_rest = (rest < HEAD_DIM) & (heads >= NUM_HEADS) & (heads < NUM_HEADS + 2 * NUM_KV_HEADS)
        tl.store(
            cache_ptrs + rest, to_cache_dtype(tl.load(source + rest, mask=is_rest, other=0.0), cache), mask=is_rest
        )
