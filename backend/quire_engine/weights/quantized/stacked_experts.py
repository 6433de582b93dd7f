# SPDX-License-Identifier: Apache-2.0
"""Experts whose quantized weights are one tensor for all experts, and their scales another one.

transformers 5 saves FP8 checkpoints in this form: `experts.gate_up_proj` [num_experts, 2 * inner, hidden] with
`experts.gate_up_proj_scale_inv` [num_experts, rows of blocks, columns of blocks]. Each expert is then a ScaledTensor.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire_engine.weights.quantized.scaled import ScaledTensor
from quire_spec.errors import ConfigError
from quire_spec.model.quantization import WeightScheme

EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<expert>\d+)\.(?P<projection>gate_proj|up_proj|down_proj)\.weight")
"""Matches the name of a projection of one expert."""


def stacked_name(match: re.Match[str]) -> str:
    """Return the name of the tensor of all experts for a match of EXPERT. The features of gate come before those of
    up."""
    return f"{match['experts']}.{'down_proj' if match['projection'] == 'down_proj' else 'gate_up_proj'}"


@dataclass(frozen=True, slots=True)
class StackedTensor:
    """The matrices of all experts."""

    matrices: tuple[ScaledTensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """[num_experts, out_features, in_features]."""
        return len(self.matrices), *self.matrices[0].shape

    def read(self, expert: int, rows: range, columns: range, dtype: torch.dtype) -> Tensor:
        """Return a part of one expert's weight, with the shape [len(rows), len(columns)]."""
        return self.matrices[expert].read(0, rows, columns, dtype)


@dataclass(frozen=True, slots=True)
class _ExpertSlice:
    """The part of one expert in a slice of a safetensors file. It has the methods of such a slice."""

    slice: Any
    expert: int
    half: int | None
    """0: the first half of the rows, 1: the second half, None: all rows."""

    def get_dtype(self) -> str:
        """Return the name of the dtype in the format safetensors."""
        dtype: str = self.slice.get_dtype()
        return dtype

    def get_shape(self) -> list[int]:
        """Return the shape."""
        _, *shape = self.slice.get_shape()
        return [shape[0] // 2, *shape[1:]] if self._is_divided(shape) else shape

    def __getitem__(self, index: Any) -> Tensor:
        _, *shape = self.slice.get_shape()
        rows, *others = index if isinstance(index, tuple) else (slice(None), *[slice(None)] * (len(shape) - 1))
        if not shape:
            scale: Tensor = self.slice[self.expert]
            return scale
        num_rows = self.get_shape()[0]
        first = num_rows if self.half and self._is_divided(shape) else 0
        start, stop, _ = rows.indices(num_rows)
        values: Tensor = self.slice[(self.expert, slice(first + start, first + stop), *others)]
        return values

    def _is_divided(self, shape: list[int]) -> bool:
        # A scale of the whole expert, or of a block that contains both halves, belongs to both.
        return self.half is not None and bool(shape) and shape[0] > 1


def expert_matrix(
    tensor_class: type[ScaledTensor], name: str, slices: Mapping[str, Any], scheme: WeightScheme, match: re.Match[str]
) -> ScaledTensor:
    """Return the projection of one expert.

    Args:
        tensor_class: class of the matrix.
        name: name of the tensor of all experts.
        slices: maps name suffixes of `tensor_class` to the slices of all experts.
        scheme: scheme of the tensor.
        match: match of EXPERT with the projection.

    Raises:
        ConfigError: a tensor has another shape or dtype than the scheme requires, or there is no such expert.
    """
    half = {"gate_proj": 0, "up_proj": 1, "down_proj": None}[match["projection"]]
    return _matrix(tensor_class, name, slices, scheme, int(match["expert"]), half)


def stacked_tensor(
    tensor_class: type[ScaledTensor], name: str, slices: Mapping[str, Any], scheme: WeightScheme
) -> StackedTensor:
    """Return the matrices of all experts; see `expert_matrix`."""
    num_experts = slices[tensor_class.MARKER].get_shape()[0]
    return StackedTensor(tuple(_matrix(tensor_class, name, slices, scheme, i, None) for i in range(num_experts)))


def _matrix(
    tensor_class: type[ScaledTensor],
    name: str,
    slices: Mapping[str, Any],
    scheme: WeightScheme,
    expert: int,
    half: int | None,
) -> ScaledTensor:
    shapes = [tuple(each.get_shape()) for each in slices.values()]
    num_experts, *shape = shapes[0]
    if len(shape) != 2 or any(not each or each[0] != num_experts for each in shapes):
        raise ConfigError(
            f"{name} has shape {shapes[0]} and its scales {shapes[1:]}; quantization_config of config.json implies "
            "[experts, out, in], and scales for each expert"
        )
    if expert >= num_experts:
        raise ConfigError(f"{name} has {num_experts} experts; config.json implies more")
    block_rows = 1 if scheme.block is None else scheme.block[0]
    if half is not None and (shape[0] // 2) % block_rows and shape[0] > block_rows:
        raise ConfigError(
            f"{name}: a block of {block_rows} features contains features of gate and of up, of which each expert has "
            f"{shape[0] // 2}; store the projections of each expert as tensors of their own"
        )
    return tensor_class(name, {suffix: _ExpertSlice(each, expert, half) for suffix, each in slices.items()}, scheme)
