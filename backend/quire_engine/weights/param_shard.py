# SPDX-License-Identifier: Apache-2.0
"""Part: what a parameter takes from a checkpoint's tensor when a rank holds only some of its rows or columns."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ParamShard:
    """A parameter, or some rows of one, and where they are in the checkpoint's tensor."""

    tensor: Tensor
    """To be filled: `rows` of the checkpoint's, one range below the other."""
    checkpoint_shape: tuple[int, ...]
    """Of the checkpoint's tensor."""
    rows: tuple[range, ...]
    columns: range | None = None
    """None: all, or the tensor has none."""

    @property
    def nbytes(self) -> int:
        """Bytes that are filled."""
        return self.tensor.nbytes

    def row_slices(self) -> Iterator[tuple[Tensor, range]]:
        """Each range of rows, with what it fills."""
        start = 0
        for rows in self.rows:
            yield self.tensor[start : start + len(rows)], rows
            start += len(rows)


LoadTarget: TypeAlias = Tensor | ParamShard
"""What a tensor of the checkpoint fills: all of it a tensor of the same shape, or a part of it."""


def unsharded(target: LoadTarget) -> ParamShard:
    """The same as a part."""
    return (
        target if isinstance(target, ParamShard) else ParamShard(target, tuple(target.shape), (range(target.shape[0]),))
    )
