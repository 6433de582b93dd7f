# SPDX-License-Identifier: Apache-2.0
"""The weight of a linear layer as codes and scales: one form for all formats of checkpoints."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Weights (values - zeros) * scales, where each block of output and input features has one scale and zero point."""

    values: Tensor
    """[out_features, in_features]: int8, uint8 or float8_e4m3fn."""
    scales: Tensor
    """[out_features / block[0], in_features / block[1]] float32, both rounded up."""
    zeros: Tensor | None
    """Zero points, shape of `scales`, dtype uint8; None: 0, or `1 << (num_bits - 1)` if `values` are uint8."""
    block: tuple[int, int]
    """Output and input features that share a scale."""
    num_bits: int
    """Bits of a value; 4 or 8."""
    groups: Tensor | None = None
    """[in_features] int64: the column of `scales` that each input feature uses, if features of a group are not adjacent
    (act order); None: feature i uses column i // block[1]."""

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out_features, in_features]. The product is computed in float32 and rounded once."""
        weight = self.values.float()
        if self.values.dtype == torch.uint8:
            weight -= 1 << (self.num_bits - 1) if self.zeros is None else self._expand(self.zeros).float()
        return (weight * self._expand(self.scales)).to(dtype)

    def _expand(self, grid: Tensor) -> Tensor:
        """Return the entry of a grid of blocks for each weight; a dimension of 1 is left to be broadcast."""
        rows, columns = self.values.shape
        if grid.shape[0] > 1:
            grid = grid.repeat_interleave(self.block[0], 0)[:rows]
        if self.groups is not None:
            return grid[:, self.groups]
        return grid if grid.shape[1] == 1 else grid.repeat_interleave(self.block[1], 1)[:, :columns]
