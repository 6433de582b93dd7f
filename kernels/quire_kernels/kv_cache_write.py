# SPDX-License-Identifier: Apache-2.0
"""Operation that writes new keys and values to the paged KV cache."""

import torch
from torch import Tensor

from quire_kernels.dispatch import Op
from quire_kernels.kv_cache_layout import quantize_rows


@Op
def write_kv(keys: Tensor, values: Tensor, cache: Tensor, addresses: Tensor) -> None:
    """Store each token's key and value at its address.

    Args:
        keys: [num_tokens, num_kv_heads, head_dim], any float dtype.
        values: like keys.
        cache: [2, num_blocks, block_size, num_kv_heads, head_dim], keys at 0, values at 1; written in place. It has the
            dtype of the keys, or float8_e4m3fn; in the latter case numbers are clamped to the maximum 448, and NaN
            stays NaN. On a CPU, it can also be int8, with rows as in `kv_cache_layout`.
        addresses: [num_tokens] int64, block * block_size + offset, all different (vLLM's `slot_mapping`).
    """
    num_tokens = keys.shape[0]
    rows = as_indexable(cache).view(2, -1, cache.shape[3] * cache.shape[4])
    for row, content in zip(rows, (keys, values), strict=True):
        row.index_copy_(0, addresses, as_indexable(to_cache_dtype(content, cache.dtype)).reshape(num_tokens, -1))


write_kv.register_lazy("cuda", "own", "quire_kernels.gpu.kv_cache_write")


def to_cache_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert keys or values to rows of the cache.

    e4m3 has no infinity, so numbers above its maximum would become NaN.
    """
    if dtype == torch.int8:
        return quantize_rows(x)
    if dtype == torch.float8_e4m3fn:
        x = x.float().clamp(-448.0, 448.0)
    return x.to(dtype)


def as_indexable(x: Tensor) -> Tensor:
    """Return a view of x in a dtype that torch can index.

    On some devices, torch cannot gather or scatter 8-bit floats.
    """
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
