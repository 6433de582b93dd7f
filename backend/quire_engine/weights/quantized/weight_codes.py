# SPDX-License-Identifier: Apache-2.0
"""The weight of a linear layer as codes and scales: one form for all formats of checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class WeightCodes:
    """A weight, (values - zeros) * scales, in which each block of output and input features has one scale and zero
    point.
    """

    values: Tensor
    """[out_features, in_features]: int8, uint8 or float8_e4m3fn."""
    scales: Tensor
    """[out_features / block[0], in_features / block[1]] float32; both dimensions are rounded up."""
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

    def by_row(self) -> Self:
        """Return the same weight with a scale for each row; if a row has several blocks, with a scale for each
        block.
        """
        rows, columns = self.values.shape
        height = rows if self.scales.shape[0] == 1 else self.block[0]
        width = self.block[1] if self.scales.shape[1] > 1 else columns
        scales = self.scales.repeat_interleave(height, 0)[:rows]
        zeros = None if self.zeros is None else self.zeros.repeat_interleave(height, 0)[:rows]
        return replace(self, scales=scales, zeros=zeros, block=(1, width))

    def in_group_order(self) -> tuple[Self, Tensor | None]:
        """Return the weight with its columns sorted by group, and the input feature of each column; None: column i is
        feature i. Columns are not sorted if the groups have unequal sizes.
        """
        if self.groups is None:
            return self, None
        counts = torch.bincount(self.groups, minlength=self.scales.shape[1])
        if not bool((counts == self.block[1]).all()):
            return self, None
        order = torch.argsort(self.groups, stable=True)
        return replace(self, values=self.values[:, order], groups=None), order

    def _expand(self, grid: Tensor) -> Tensor:
        """Return, for each value, the entry of its block in `grid`; a dimension of size 1 is not expanded but
        broadcast.
        """
        rows, columns = self.values.shape
        if grid.shape[0] > 1:
            grid = grid.repeat_interleave(self.block[0], 0)[:rows]
        if self.groups is not None:
            return grid[:, self.groups]
        return grid if grid.shape[1] == 1 else grid.repeat_interleave(self.block[1], 1)[:, :columns]


def concatenate(parts: Sequence[WeightCodes]) -> WeightCodes | None:
    """Concatenate weights along their rows, with scales by row; None if they differ in more than their rows."""
    parts = [part.by_row() for part in parts]
    first = parts[0]
    for part in parts[1:]:
        is_alike = (part.values.dtype, part.num_bits, part.block) == (first.values.dtype, first.num_bits, first.block)
        has_same_groups = part.groups is first.groups or (
            part.groups is not None and first.groups is not None and torch.equal(part.groups, first.groups)
        )
        if not is_alike or not has_same_groups or (part.zeros is None) != (first.zeros is None):
            return None
    return replace(
        first,
        values=_cat([part.values for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        zeros=None if first.zeros is None else torch.cat([part.zeros for part in parts if part.zeros is not None]),
    )


def _cat(values: list[Tensor]) -> Tensor:
    # torch.cat has no kernel for every 8-bit type.
    return torch.cat([part.view(torch.uint8) for part in values]).view(values[0].dtype)
