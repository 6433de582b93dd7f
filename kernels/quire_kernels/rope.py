# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding, in the half-split layout of Hugging Face checkpoints. It can be fused with the cache
write.
"""

import torch
from torch import Tensor

from quire_kernels import cpu_native
from quire_kernels.dispatch import Op
from quire_kernels.kv_cache_layout import is_quantized
from quire_kernels.kv_cache_write import write_kv


@Op
def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """In each head, rotate each pair of elements i and i + dim / 2.

    The angle of the rotation depends on i and on the position of the token.

    The elements from index `dim` on are not changed.

    Args:
        x: [num_tokens, num_heads, head_dim], any float dtype; keys and queries may be rotated as one tensor.
        cos: [num_tokens, dim], cosines of the angles, repeated in both halves.
        sin: [num_tokens, dim], sines of the angles, the first half negated.

    Returns:
        [num_tokens, num_heads, head_dim], contiguous, dtype of x.
    """
    dim = cos.shape[-1]
    first, second = x[..., :dim].float().chunk(2, dim=-1)
    c, s = cos.float().unsqueeze(1).chunk(2, dim=-1), sin.float().unsqueeze(1).chunk(2, dim=-1)
    rotated = torch.cat((first * c[0] + second * s[0], second * c[1] + first * s[1]), dim=-1)
    return torch.cat((rotated.to(x.dtype), x[..., dim:]), dim=-1)


@apply_rope.register("cpu", "cuda")
def _apply_rope_rolled(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # This takes three launches; the reference takes nine.
    dim = cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat((_apply_rope_rolled(x[..., :dim], cos, sin), x[..., dim:]), dim=-1)
    cos, sin = cos.to(x.dtype).unsqueeze(1), sin.to(x.dtype).unsqueeze(1)
    return torch.addcmul(x * cos, x.roll(dim // 2, dims=-1), sin)


@Op
def rope_and_cache(qkv: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, addresses: Tensor, num_heads: int) -> Tensor:
    """Rotate queries and keys, and store keys and values at their addresses.

    Args:
        qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], any float dtype; may be overwritten.
        cos, sin: see `apply_rope`.
        cache, addresses: see `write_kv`.
        num_heads: number of query heads.

    Returns:
        The rotated queries, [num_tokens, num_heads, head_dim]; may be a view of `qkv`.
    """
    rotated_heads = (qkv.shape[1] + num_heads) // 2
    rotated = apply_rope(qkv[:, :rotated_heads], cos, sin)
    write_kv(rotated[:, num_heads:], qkv[:, rotated_heads:], cache, addresses)
    return rotated[:, :num_heads]


rope_and_cache.register_lazy("cuda", "own", "quire_kernels.gpu.kv_cache_write")


@rope_and_cache.register("cpu")
def _rope_and_cache_cpu(
    qkv: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, addresses: Tensor, num_heads: int
) -> Tensor:
    is_packed = qkv.stride(1) == qkv.shape[2] and cos.is_contiguous() and sin.is_contiguous()
    is_supported = cpu_native.supports(qkv, cos, sin) and cpu_native.supports_cache(cache)
    if not is_packed or not is_supported:
        return rope_and_cache.reference(qkv, cos, sin, cache, addresses, num_heads)
    num_tokens, all_heads, head_dim = qkv.shape
    cpu_native.get_library().quire_rotate_write(
        qkv.data_ptr(),
        qkv.stride(0),
        cos.data_ptr(),
        sin.data_ptr(),
        cache[0].data_ptr(),
        cache[1].data_ptr(),
        addresses.data_ptr(),
        num_tokens,
        num_heads,
        (all_heads - num_heads) // 2,
        head_dim,
        cos.shape[1],
        is_quantized(cache),
    )
    return qkv[:, :num_heads]
