# SPDX-License-Identifier: Apache-2.0
"""MXFP4, the format in which gpt-oss stores its experts.

A value is a 4-bit floating-point number. Each block of 32 values has a scale, which is a power of 2. In the OCP
Microscaling Formats specification, the format of the values is called E2M1, and the format of the scales is called
E8M0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire_engine.weights.quantized.bit_packing import unpack_nibbles
from quire_engine.weights.quantized.weight_codes import WeightCodes
from quire_kernels import e2m1_codebook
from quire_spec.errors import ConfigError
from quire_spec.model.quantization import WeightScheme

BLOCK_SIZE = 32
_E8M0_BIAS = 127
_E8M0_NAN = 255


def decode_mxfp4(blocks: Tensor) -> Tensor:
    """Unpack blocks of weights into 4-bit codes.

    Args:
        blocks: [..., in_features / 32, 16] uint8; the lower half of a byte contains the first of two features.

    Returns:
        [..., in_features] uint8 in 0..15, indices into `mxfp4_values`.
    """
    return unpack_nibbles(blocks).flatten(-2)


def mxfp4_values(dtype: torch.dtype) -> Tensor:
    """Return the value that each of the 16 codes stands for. The highest bit of a code is the sign."""
    return e2m1_codebook().to(dtype)


def dequantize_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert weights to a floating-point type.

    The result is exact, unless it overflows or underflows in `dtype`.

    Args:
        blocks: [..., in_features / 32, 16] uint8.
        scales: [..., in_features / 32] uint8, exponents of 2 with a bias of 127.
        dtype: dtype of the result.

    Returns:
        [..., in_features].
    """
    values = mxfp4_values(torch.float32)[decode_mxfp4(blocks).int()]
    exponents = scales.int() - _E8M0_BIAS
    return torch.ldexp(values.view(*scales.shape, BLOCK_SIZE), exponents[..., None]).flatten(-2).to(dtype)


class MXFP4Tensor:
    """A tensor of [num_experts, out_features, in_features]. The files contain it as `..._blocks` and `..._scales`."""

    MARKER = "_blocks"
    SCALES = "_scales"

    def __init__(self, name: str, slices: Mapping[str, Any], scheme: WeightScheme) -> None:
        """`slices` maps name suffixes to slices of safetensors files.

        Raises:
            ConfigError: the scales are missing, or a tensor has another shape or dtype than the format requires.
        """
        if self.SCALES not in slices:
            raise ConfigError(f"{name}{self.SCALES} is missing; the checkpoint is incomplete")
        self.scheme = scheme
        self._name = name
        self._blocks, self._scales = slices[self.MARKER], slices[self.SCALES]
        shape, scales_shape = self._blocks.get_shape(), self._scales.get_shape()
        if len(shape) != 4 or list(scales_shape) != list(shape[:3]) or shape[3] * 2 != BLOCK_SIZE:
            raise ConfigError(
                f"{name}{self.MARKER} has shape {shape} and {name}{self.SCALES} {scales_shape}; mxfp4 requires "
                "[experts, out, in / 32, 16] and [experts, out, in / 32]"
            )
        for suffix in (self.MARKER, self.SCALES):
            if slices[suffix].get_dtype() != "U8":
                raise ConfigError(f"{name}{suffix} is {slices[suffix].get_dtype()}; mxfp4 requires U8")
        self.shape: tuple[int, ...] = (shape[0], shape[1], shape[2] * BLOCK_SIZE)

    @property
    def matrices(self) -> "tuple[MXFP4Expert, ...]":
        """The matrices of all experts."""
        return tuple(MXFP4Expert(self, expert) for expert in range(self.shape[0]))

    def read(self, expert: int, rows: range, columns: range, dtype: torch.dtype) -> Tensor:
        """Return a part of one expert's weight, with the shape [len(rows), len(columns)]."""
        blocks = range(columns.start // BLOCK_SIZE, -(-columns.stop // BLOCK_SIZE))
        index = (expert, slice(rows.start, rows.stop), slice(blocks.start, blocks.stop))
        start = columns.start - blocks.start * BLOCK_SIZE
        return dequantize_mxfp4(self._blocks[index], self._read_scales(index), dtype)[:, start : start + len(columns)]

    def read_codes(self, expert: int, rows: range, columns: range) -> WeightCodes:
        """Return the codes of a part of one expert's weight. `columns` must begin and end at block boundaries."""
        blocks = slice(columns.start // BLOCK_SIZE, -(-columns.stop // BLOCK_SIZE))
        index = (expert, slice(rows.start, rows.stop), blocks)
        scales = self._read_scales(index).contiguous().view(torch.float8_e8m0fnu)
        return WeightCodes(
            decode_mxfp4(self._blocks[index]), scales, None, (1, BLOCK_SIZE), 4, codebook=mxfp4_values(torch.float32)
        )

    def _read_scales(self, index: tuple[int, slice, slice]) -> Tensor:
        scales: Tensor = self._scales[index]
        if (scales == _E8M0_NAN).any():
            raise ConfigError(f"{self._name}{self.SCALES}: contains NaN; download the checkpoint again")
        return scales


@dataclass(frozen=True, slots=True)
class MXFP4Expert:
    """One matrix of an MXFP4Tensor. It has the methods of QuantizedTensor."""

    tensor: MXFP4Tensor
    expert: int

    @property
    def scheme(self) -> WeightScheme:
        """See QuantizedTensor."""
        return self.tensor.scheme

    @property
    def shape(self) -> tuple[int, ...]:
        """See QuantizedTensor."""
        return self.tensor.shape[1:]

    def align(self, rows: range, columns: range) -> tuple[range, range]:
        """See QuantizedTensor."""
        return rows, range(columns.start // BLOCK_SIZE * BLOCK_SIZE, -(-columns.stop // BLOCK_SIZE) * BLOCK_SIZE)

    def read_codes(self, rows: range, columns: range) -> WeightCodes:
        """See QuantizedTensor."""
        return self.tensor.read_codes(self.expert, rows, columns)

    def read(self, expert: int, rows: range, columns: range, dtype: torch.dtype) -> Tensor:
        """See QuantizedTensor."""
        return self.tensor.read(self.expert, rows, columns, dtype)
