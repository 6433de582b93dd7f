# SPDX-License-Identifier: Apache-2.0
"""Describes a parameter that contains only some of the rows or columns of a checkpoint tensor."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ParamShard:
    """Describes which part of a checkpoint tensor is copied to a parameter, or to some of the parameter's rows."""

    tensor: Tensor
    """The destination. The ranges of `rows` are copied to the destination one after the other. If the destination and
    the checkpoint tensor both have the dimensions [experts, rows, columns], each expert is filled in this way.
    """
    checkpoint_shape: tuple[int, ...]
    """Shape of the whole checkpoint tensor."""
    rows: tuple[range, ...]
    """Which rows of the checkpoint tensor are copied. Each item is a range of rows. A range can have a step."""
    columns: range | None = None
    """Which columns of the checkpoint tensor are copied. None stands for all columns, and is also used for a tensor
    with one dimension."""
    is_stacked_transposed: bool = False
    """Whether the matrices are transposed in a checkpoint that stores all experts in one tensor."""

    @property
    def nbytes(self) -> int:
        """Bytes of the destination."""
        return self.tensor.nbytes

    def chunks(self, max_bytes: int) -> Iterator[tuple[int, Tensor, range]]:
        """Split the destination into chunks, and yield them.

        Each chunk comes with the index of its expert, and with the range of checkpoint rows that must be copied to the
        chunk. A chunk has at most `max_bytes`, unless a single row is larger.
        """
        size = max(1, max_bytes // (self.tensor.element_size() * max(1, self.tensor.shape[-1])))
        for expert, matrix in enumerate(self.tensor if self.tensor.dim() == 3 else self.tensor[None]):
            first = 0
            for rows in self.rows:
                for start in range(0, len(rows), size):
                    chunk = rows[start : start + size]
                    yield expert, matrix[first : first + len(chunk)], chunk
                    first += len(chunk)


LoadTarget: TypeAlias = Tensor | ParamShard
"""The destination of a checkpoint tensor. It is a tensor with the shape of the checkpoint tensor, or a shard."""


def unsharded(target: LoadTarget) -> ParamShard:
    """Return the target as a shard.

    If the target is a tensor, the shard covers the whole checkpoint tensor.
    """
    if isinstance(target, ParamShard):
        return target
    if target.dim() == 0:
        return ParamShard(target.view(1), (), (range(1),))
    return ParamShard(target, tuple(target.shape), (range(target.shape[0 if target.dim() < 3 else 1]),))


class TensorSource(Protocol):
    """A tensor in the files of a checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor. For a quantized tensor, this is the shape of the matrix that it represents."""

    def read(self, expert: int, rows: range, columns: range, dtype: torch.dtype) -> Tensor:
        """Return `rows` and `columns` of a matrix, or the elements `rows` of a vector.

        If the tensor contains several matrices, `expert` is the index of the matrix. A quantized tensor is dequantized
        to `dtype`.
        """


def read_rows(source: TensorSource, target: ParamShard, expert: int, rows: range) -> Tensor:
    """Return the given rows of the tensor, but only the columns of the shard.

    `rows` is a range that `ParamShard.chunks` yielded. It can have a step.
    """
    columns = range((1, *target.checkpoint_shape)[-1]) if target.columns is None else target.columns
    return source.read(expert, range(rows[0], rows[-1] + 1), columns, target.tensor.dtype)[:: rows.step]
