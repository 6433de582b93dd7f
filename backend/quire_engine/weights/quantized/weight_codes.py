# SPDX-License-Identifier: Apache-2.0
"""The weight of a linear layer as codes and scales. All formats of checkpoints are converted to this form."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

_MIN_GROUP = 8
"""The smallest group size that the kernels support, as a number of input features."""


@dataclass(frozen=True, slots=True)
class WeightCodes:
    """A weight, equal to (values - zeros) * scales - mins.

    Each block of output and input features has one scale and one zero point.
    """

    values: Tensor
    """The codes. Their shape is [out_features, in_features], and their dtype is int8, uint8 or float8_e4m3fn."""
    scales: Tensor
    """The scales. Their shape is [out_features / block[0], in_features / block[1]], and both quotients are rounded up.
    The dtype is float32, or float8_e8m0fnu for MXFP4.
    """
    zeros: Tensor | None
    """The zero points, as uint8 in the shape of `scales`. None means that all zero points are 0. If `values` are uint8,
    None means that all zero points are `1 << (num_bits - 1)`."""
    block: tuple[int, int]
    """Number of output features and number of input features of a block. The values of a block share one scale."""
    num_bits: int
    """Bits of a value; 4 or 8."""
    groups: Tensor | None = None
    """The group of each input feature, as [in_features] int64. The number of a group is the index of its column in
    `scales`. This tensor is needed only if the features of a group are not adjacent (act order). If `groups` is None,
    feature i belongs to group i // block[1]."""
    codebook: Tensor | None = None
    """The numbers that codes of 4 bits stand for, as [16] float32. In this case, there are no zero points. None: the
    values are the numbers."""
    mins: Tensor | None = None
    """Numbers that are subtracted after the multiplication, as float32 in the shape of `scales`. None means that they
    are 0."""

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out_features, in_features]. The product is computed in float32 and rounded once."""
        if self.codebook is not None:
            weight = self.codebook[self.values.int()]
        else:
            weight = self.values.float()
            if self.values.dtype == torch.uint8:
                weight -= 1 << (self.num_bits - 1) if self.zeros is None else self._expand(self.zeros).float()
        weight *= self._expand(self.scales.float())
        return (weight if self.mins is None else weight - self._expand(self.mins)).to(dtype)

    def by_row(self) -> Self:
        """Return the same weight, but with separate scales for each row.

        A row that has several blocks has one scale for each block. Any other row has one scale.
        """
        rows, columns = self.values.shape
        height = rows if self.scales.shape[0] == 1 else self.block[0]
        width = self.block[1] if self.scales.shape[1] > 1 else columns
        scales = self.scales.repeat_interleave(height, 0)[:rows]
        zeros = None if self.zeros is None else self.zeros.repeat_interleave(height, 0)[:rows]
        mins = None if self.mins is None else self.mins.repeat_interleave(height, 0)[:rows]
        return replace(self, scales=scales, zeros=zeros, mins=mins, block=(1, width))

    def cut(self, first_row: int, num_rows: int, first_column: int, num_columns: int) -> Self | None:
        """Return a part of the weight.

        If the part begins or ends inside a group, the groups of the result are smaller. Return None if these groups
        would be too small for the kernels, or if the features of a group are not adjacent.
        """
        weight, (rows, columns) = self.by_row(), (slice(first_row, first_row + num_rows), self.values.shape[1])
        size = math.gcd(weight.block[1], first_column, num_columns) if weight.scales.shape[1] > 1 else num_columns
        if num_columns != columns and (weight.groups is not None or size < _MIN_GROUP):
            return None
        first, last = first_column // size, -(-(first_column + num_columns) // size)

        def cut_groups(grid: Tensor) -> Tensor:
            if num_columns == columns or grid.shape[1] == 1:
                return grid[rows]
            return grid[rows].repeat_interleave(weight.block[1] // size, 1)[:, first:last]

        return replace(
            weight,
            values=self.values[rows, first_column : first_column + num_columns],
            scales=cut_groups(weight.scales),
            zeros=None if weight.zeros is None else cut_groups(weight.zeros),
            mins=None if weight.mins is None else cut_groups(weight.mins),
            block=(1, weight.block[1] if num_columns == columns else size),
        )

    def in_group_order(self) -> tuple[Self, Tensor | None]:
        """Return the weight with its columns sorted by group, and the order of the columns.

        The order contains the input feature of each column. The order is None if column i is feature i. If the groups
        have different sizes, the columns are not sorted.
        """
        if self.groups is None:
            return self, None
        counts = torch.bincount(self.groups, minlength=self.scales.shape[1])
        if not bool((counts == self.block[1]).all()):
            return self, None
        order = torch.argsort(self.groups, stable=True)
        return replace(self, values=self.values[:, order], groups=None), order

    def _kind(self) -> tuple[object, ...]:
        codebook = None if self.codebook is None else tuple(self.codebook.tolist())
        kind = self.values.dtype, self.scales.dtype, self.num_bits, self.block
        return *kind, codebook, self.zeros is None, self.mins is None

    def _expand(self, grid: Tensor) -> Tensor:
        """For each value of the weight, look up its entry in `grid`, and return these entries as a tensor.

        `grid` has one entry for each block of values.

        If a dimension of `grid` has the size 1, it keeps this size and is broadcast.
        """
        rows, columns = self.values.shape
        if grid.shape[0] > 1:
            grid = grid.repeat_interleave(self.block[0], 0)[:rows]
        if self.groups is not None:
            return grid[:, self.groups]
        return grid if grid.shape[1] == 1 else grid.repeat_interleave(self.block[1], 1)[:, :columns]


def concatenate(parts: Sequence[WeightCodes]) -> WeightCodes | None:
    """Concatenate weights along their rows.

    The result has scales for each row. Return None if the weights differ in anything except the number of rows.
    """
    parts = [part.by_row() for part in parts]
    first = parts[0]
    for part in parts[1:]:
        is_alike = part._kind() == first._kind()
        has_same_groups = part.groups is first.groups or (
            part.groups is not None and first.groups is not None and torch.equal(part.groups, first.groups)
        )
        if not is_alike or not has_same_groups:
            return None
    return replace(
        first,
        values=_cat([part.values for part in parts]),
        scales=_cat([part.scales for part in parts]),
        zeros=None if first.zeros is None else torch.cat([part.zeros for part in parts if part.zeros is not None]),
        mins=None if first.mins is None else torch.cat([part.mins for part in parts if part.mins is not None]),
    )


def _cat(values: list[Tensor]) -> Tensor:
    if values[0].itemsize > 1:
        return torch.cat(values)
    # torch.cat has no kernel for every 8-bit type.
    return torch.cat([part.view(torch.uint8) for part in values]).view(values[0].dtype)
