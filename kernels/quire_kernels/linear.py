# SPDX-License-Identifier: Apache-2.0
"""Linear layers, with the weight laid out once for the processor's matrix product."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_kernels.dispatch import Op

# Elements of the smallest float32 weight that is worth it: torch takes oneDNN for bf16 only; oneDNN takes 11 us and not
# 2 us for 64 x 192 and 1 token, and compiles a product anew for every number of tokens (0.2 ms and up, once).
MIN_PACKED = 1 << 16


@Op
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b.

    Args:
        x: [num_tokens, in_features].
        weight: [out_features, in_features], dtype of x, or what `pack_weight` made of it.
        bias: [out_features] or None.

    Returns:
        [num_tokens, out_features], dtype of x.
    """
    return F.linear(x, weight, bias)


@linear.form("cpu")
def _packed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def pack_weight(weight: Tensor) -> Tensor:
    """The weight in oneDNN's layout, opaque and fit for `linear` only; itself where there is none for it.

    Without it oneDNN lays the weight out anew in every call. 576 x 3072 on one Zen 5 core, bf16: 0.05 ms instead of
    0.11 ms for 1 token, 0.45 instead of 0.52 for 64; float32: 0.89 instead of 2.2 for 64. The operators are the ones
    that torch.compile freezes weights with; they have no public name.
    """
    if weight.dtype == torch.float32 and weight.numel() < MIN_PACKED:
        return weight
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return weight
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return weight
    if weight.dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed
