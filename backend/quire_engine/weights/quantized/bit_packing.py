# SPDX-License-Identifier: Apache-2.0
"""Unpacks integers of 4 or 8 bits from int32 tensors. The lowest bits come first."""

import torch
from torch import Tensor


def unpack_int32(packed: Tensor, num_bits: int) -> Tensor:
    """Unpack the integers of a tensor along its last dimension.

    Args:
        packed: [..., n] int32.
        num_bits: 4 or 8.

    Returns:
        [..., n * 32 / num_bits] uint8.
    """
    # `view` with another dtype requires that the last dimension has a stride of 1, even if its size is 1. The copy
    # always has this stride.
    packed_bytes = packed.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return packed_bytes if num_bits == 8 else unpack_nibbles(packed_bytes)


def unpack_nibbles(packed_bytes: Tensor) -> Tensor:
    """Split each byte into two values of 4 bits. The value of the lower bits comes first.

    A uint8 tensor [..., n] becomes a uint8 tensor [..., 2 n].
    """
    return torch.stack((packed_bytes & 15, packed_bytes >> 4), -1).flatten(-2)
