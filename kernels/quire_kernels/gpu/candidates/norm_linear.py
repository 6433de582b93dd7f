# SPDX-License-Identifier: Apache-2.0
"""Operation that combines a norm and the linear layer after it, for small numbers of tokens on a GPU."""

from torch import Tensor

from quire_kernels.activation import silu_mul
from quire_kernels.dispatch import Op
from quire_kernels.linear import linear
from quire_kernels.norm import rms_norm


@Op
def rms_norm_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None, gated: bool = False
) -> Tensor:
    """Return linear(rms_norm(x)). If `gated` is true, return silu_mul(linear(rms_norm(x))).

    Args:
        x: [num_tokens, in_features].
        norm_weight: [in_features], dtype of x.
        eps: see `rms_norm`.
        weight: [out_features, in_features], dtype of x; if `gated`, it contains the gate rows and then the up rows.
        bias: [out_features] or None.
        gated: whether the layer is the first one of a gated MLP.

    Returns:
        [num_tokens, out_features], or half as many if `gated`; dtype of x.
    """
    out = linear.reference(rms_norm.reference(x, norm_weight, eps), weight, bias)
    return silu_mul.reference(out) if gated else out


@rms_norm_linear.register("cuda")
def _rms_norm_linear_torch(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None, gated: bool = False
) -> Tensor:
    """Run the norm, the linear layer and the activation one after the other."""
    out = linear(rms_norm(x, norm_weight, eps), weight, bias)
    return silu_mul(out) if gated else out


# These implementations are not the default, because their effect has not been measured.
# `QUIRE_KERNELS=rms_norm_linear=small,linear=small` selects them.
rms_norm_linear.register_lazy("cuda", "small", "quire_kernels.gpu.candidates.small_batch_linear")
linear.register_lazy("cuda", "small", "quire_kernels.gpu.candidates.small_batch_linear")
