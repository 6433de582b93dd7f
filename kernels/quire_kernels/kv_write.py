# SPDX-License-Identifier: Apache-2.0
"""Scatter of new keys and values into the paged cache."""

from torch import Tensor

from quire_kernels.dispatch import Op


@Op
def write_kv(keys: Tensor, values: Tensor, cache: Tensor, addresses: Tensor) -> None:
    """Store each token's key and value at its address.

    Args:
        keys: [num_tokens, num_kv_heads, head_dim], dtype of the cache.
        values: like keys.
        cache: [2, num_blocks, block_size, num_kv_heads, head_dim], keys at 0, values at 1; written in place.
        addresses: [num_tokens] int64, block * block_size + offset, all different.
    """
    num_tokens = keys.shape[0]
    rows = cache.view(2, -1, keys.shape[1] * keys.shape[2])
    rows[0].index_copy_(0, addresses, keys.reshape(num_tokens, -1))
    rows[1].index_copy_(0, addresses, values.reshape(num_tokens, -1))
