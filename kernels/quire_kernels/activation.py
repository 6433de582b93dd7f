# SPDX-License-Identifier: Apache-2.0
"""The gated activation of an MLP."""

import torch.nn.functional as F
from torch import Tensor

from quire_kernels.dispatch import Op


@Op
def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of a merged projection.

    Args:
        gate_up: [num_tokens, 2 * intermediate_size], gate first, any float dtype.

    Returns:
        [num_tokens, intermediate_size], dtype of gate_up.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
