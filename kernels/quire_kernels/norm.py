# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation of hidden states, and of each head of queries and keys.

It can be fused with the residual addition.
"""

import torch.nn.functional as F
from torch import Tensor

from quire_kernels import cpu_native
from quire_kernels.dispatch import Op


@Op
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight. The mean is computed in float32.

    Args:
        x: [num_tokens, hidden_size], any float dtype.
        weight: [hidden_size], dtype of x.
        eps: added to the mean of squares.

    Returns:
        [num_tokens, hidden_size], dtype of x.
    """
    wide = x.float()
    return (wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight


@rms_norm.register("cpu")
def _rms_norm_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dim() != 2 or not cpu_native.supports(x, weight):
        return _rms_norm_torch(x, weight, eps)
    rows, size = x.shape
    out = x.new_empty(rows, size)
    cpu_native.get_library().quire_rms_norm(
        x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr(), rows, size, eps
    )
    return out


rms_norm.register_lazy("cuda", "own", "quire_kernels.gpu.norm")


@rms_norm.register("cuda")
def _rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


@Op
def qk_norm(qkv: Tensor, query_weight: Tensor, key_weight: Tensor, num_heads: int, eps: float) -> None:
    """Normalise each head of queries and keys, in place.

    Args:
        qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], any float dtype.
        query_weight, key_weight: [head_dim], dtype of qkv.
        num_heads: number of query heads.
        eps: see `rms_norm`.
    """
    rotated_heads = (qkv.shape[1] + num_heads) // 2
    for heads, weight in ((slice(num_heads), query_weight), (slice(num_heads, rotated_heads), key_weight)):
        qkv[:, heads] = rms_norm(qkv[:, heads], weight, eps)


@qk_norm.register("cpu")
def _qk_norm_cpu(qkv: Tensor, query_weight: Tensor, key_weight: Tensor, num_heads: int, eps: float) -> None:
    num_tokens, all_heads, head_dim = qkv.shape
    if qkv.stride(1) != head_dim or not cpu_native.supports(qkv, query_weight, key_weight):
        qk_norm.reference(qkv, query_weight, key_weight, num_heads, eps)
        return
    cpu_native.get_library().quire_norm_heads(
        qkv.data_ptr(),
        qkv.stride(0),
        query_weight.data_ptr(),
        key_weight.data_ptr(),
        num_tokens,
        num_heads,
        (all_heads - num_heads) // 2,
        head_dim,
        eps,
    )


@Op
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to the residual stream and return the normalised sum.

    Args:
        x: [num_tokens, hidden_size], any float dtype.
        residual: like x, contiguous; updated in place.
        weight, eps: see `rms_norm`.

    Returns:
        [num_tokens, hidden_size], dtype of x.
    """
    return rms_norm(residual.add_(x), weight, eps)


add_rms_norm.register_lazy("cuda", "own", "quire_kernels.gpu.norm")
