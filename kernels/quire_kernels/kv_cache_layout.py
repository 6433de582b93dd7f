# SPDX-License-Identifier: Apache-2.0
"""Layout of the rows in the KV cache. A row stores the key or the value of one token for one KV head.

With a float dtype, a row contains `head_dim` numbers. With int8, it contains `head_dim` codes, followed by the float32
scale of the row. Because the scale is part of the row, every copy of a block also copies its scales. vLLM calls the
int8 layout `int8_per_token_head`.
"""

import torch
from torch import Tensor

SCALE_BYTES = 4
_MAX_CODE = 127.0


def is_quantized(cache: Tensor) -> bool:
    """Return whether the cache contains int8 codes with scales."""
    return cache.dtype == torch.int8


def row_size(head_dim: int, dtype: torch.dtype) -> int:
    """Return the number of elements in a row.

    This is the last dimension of a cache of this dtype.
    """
    return head_dim + SCALE_BYTES if dtype == torch.int8 else head_dim


def quantize_rows(x: Tensor) -> Tensor:
    """Convert keys or values [..., head_dim] to int8 rows [..., head_dim + 4].

    The largest number of a row has the code 127 or -127. If a row contains NaN or infinity, all its numbers become NaN.
    """
    x = x.float()
    largest = x.abs().amax(dim=-1, keepdim=True)
    # torch would compute `127 / largest` as 127 times the rounded reciprocal of `largest`.
    factor = torch.where(largest == 0, 0.0, torch.full_like(largest, _MAX_CODE) / largest)
    codes = (x * factor).round().nan_to_num(0.0).to(torch.int8)
    return torch.cat((codes, (largest * (1 / _MAX_CODE)).view(torch.int8)), dim=-1)


def dequantize_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert int8 rows to keys or values [..., head_dim] in `dtype`.

    This is the inverse of `quantize_rows`.
    """
    scales = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (rows[..., :-SCALE_BYTES].float() * scales).to(dtype)
