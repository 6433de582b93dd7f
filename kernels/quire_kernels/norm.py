# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalisation, alone and after the residual stream's addition."""

import torch.nn.functional as F
from torch import Tensor

from quire_kernels import native
from quire_kernels.dispatch import Op


@Op
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, the mean in float32.

    Args:
        x: [num_tokens, hidden_size], any float dtype.
        weight: [hidden_size], dtype of x.
        eps: added to the mean of squares.

    Returns:
        [num_tokens, hidden_size], dtype of x.
    """
    wide = x.float()
    return (wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight


@rms_norm.form("cpu")
def _one_pass(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dim() != 2 or not native.suits(x, weight):
        return _fused(x, weight, eps)
    rows, size = x.shape
    out = x.new_empty(rows, size)
    native.library().quire_rms_norm(x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr(), rows, size, eps)
    return out


rms_norm.form_in("cuda", "own", "quire_kernels.gpu.norm")


@rms_norm.form("cuda")
def _fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


@Op
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to the residual stream, and normalise that.

    Args:
        x: [num_tokens, hidden_size], any float dtype.
        residual: like x, contiguous; added to in place.
        weight, eps: as `rms_norm` takes them.

    Returns:
        [num_tokens, hidden_size], dtype of x.
    """
    return rms_norm(residual.add_(x), weight, eps)


add_rms_norm.form_in("cuda", "own", "quire_kernels.gpu.norm")
