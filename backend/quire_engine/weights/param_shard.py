# SPDX-License-Identifier: Apache-2.0
"""Mapping from a checkpoint tensor to a parameter that contains only some of its rows or columns."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ParamShard:
    """A parameter or some of its rows, and the part of a checkpoint tensor that fills them."""

    tensor: Tensor
    """The tensor to which the ranges in `rows` of the checkpoint tensor are copied, one after the other. If both
    tensors are [experts, rows, columns], each expert is filled in this way.
    """
    checkpoint_shape: tuple[int, ...]
    """Shape of the whole checkpoint tensor."""
    rows: tuple[range, ...]
    """Ranges of rows of the checkpoint tensor; a range can have a step."""
    columns: range | None = None
    """Columns of the checkpoint tensor; None for all columns, or if the tensor has one dimension."""

    @property
    def nbytes(self) -> int:
        """Bytes of the destination."""
        return self.tensor.nbytes

    def chunks(self, max_bytes: int) -> Iterator[tuple[int, Tensor, range]]:
        """Yield parts of the destination, each with the index of the expert and the rows of the checkpoint tensor that
        fill it. A part has at most `max_bytes`, or is a single row.
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
"""Destination of a checkpoint tensor: a tensor of the same shape, or a shard."""


def unsharded(target: LoadTarget) -> ParamShard:
    """Return the target as a shard. If the target is a tensor, the result is a shard that covers the whole checkpoint
    tensor."""
    if isinstance(target, ParamShard):
        return target
    return ParamShard(target, tuple(target.shape), (range(target.shape[0 if target.dim() < 3 else 1]),))


class TensorSource(Protocol):
    """A tensor in the files of a checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor, or, if the tensor is quantized, shape of the matrix that it represents."""

    def read(self, expert: int, rows: range, columns: range, dtype: torch.dtype) -> Tensor:
        """Return these rows and columns of a matrix (of matrix `expert` if there are several), or elements `rows` of a
        vector. A quantized tensor is dequantized to `dtype`."""


def read_rows(source: TensorSource, target: ParamShard, expert: int, rows: range) -> Tensor:
    """Return the given rows of the tensor, reduced to the columns of the shard. `ParamShard.chunks` yields the rows,
    whose range can have a step."""
    columns = range(target.checkpoint_shape[-1]) if target.columns is None else target.columns
    return source.read(expert, range(rows[0], rows[-1] + 1), columns, target.tensor.dtype)[:: rows.step]
