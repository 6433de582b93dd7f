# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding, in the halves layout of Hugging Face checkpoints."""

import torch
from torch import Tensor

from quire_kernels.dispatch import Op


@Op
def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head's pair (i, i + dim / 2) by its position's angle i; elements from `dim` on pass as they are.

    Args:
        x: [num_tokens, num_heads, head_dim], any float dtype; keys and queries may be rotated as one tensor.
        cos: [num_tokens, dim], cosines of the angles, twice side by side.
        sin: [num_tokens, dim], sines of the angles, the first half negated.

    Returns:
        [num_tokens, num_heads, head_dim], contiguous, dtype of x.
    """
    dim = cos.shape[-1]
    first, second = x[..., :dim].float().chunk(2, dim=-1)
    c, s = cos.float().unsqueeze(1).chunk(2, dim=-1), sin.float().unsqueeze(1).chunk(2, dim=-1)
    rotated = torch.cat((first * c[0] + second * s[0], second * c[1] + first * s[1]), dim=-1)
    return torch.cat((rotated.to(x.dtype), x[..., dim:]), dim=-1)


@apply_rope.form("cpu", "cuda")
def _rolled(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # Three launches instead of the reference's nine.
    dim = cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat((_rolled(x[..., :dim], cos, sin), x[..., dim:]), dim=-1)
    cos, sin = cos.to(x.dtype).unsqueeze(1), sin.to(x.dtype).unsqueeze(1)
    return torch.addcmul(x * cos, x.roll(dim // 2, dims=-1), sin)
