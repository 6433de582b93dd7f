# SPDX-License-Identifier: Apache-2.0
"""Mapping from a checkpoint tensor to a parameter that contains only some of its rows or columns."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ParamShard:
    """A parameter, or some rows of one, and the part of the checkpoint tensor that fills it."""

    tensor: Tensor
    """Destination of `rows` of the checkpoint tensor, one range after the other; of each expert if the tensors have
    three dimensions [experts, rows, columns]."""
    checkpoint_shape: tuple[int, ...]
    """Shape of the whole checkpoint tensor."""
    rows: tuple[range, ...]
    """Ranges can have a step."""
    columns: range | None = None
    """None: all columns, or the tensor has one dimension."""

    @property
    def nbytes(self) -> int:
        """Bytes of the destination."""
        return self.tensor.nbytes

    def row_slices(self) -> Iterator[tuple[int, Tensor, range]]:
        """Yield each range of rows with the part of the destination that it fills, and the index of the expert."""
        for expert, matrix in enumerate(self.tensor if self.tensor.dim() == 3 else self.tensor[None]):
            start = 0
            for rows in self.rows:
                yield expert, matrix[start : start + len(rows)], rows
                start += len(rows)


LoadTarget: TypeAlias = Tensor | ParamShard
"""Destination of a checkpoint tensor: a tensor of the same shape, or a shard."""


def unsharded(target: LoadTarget) -> ParamShard:
    """Return the target as a shard, which covers the whole checkpoint tensor if the target is a tensor."""
    if isinstance(target, ParamShard):
        return target
    return ParamShard(target, tuple(target.shape), (range(target.shape[0 if target.dim() < 3 else 1]),))
