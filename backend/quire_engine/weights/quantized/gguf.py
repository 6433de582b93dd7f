# SPDX-License-Identifier: Apache-2.0
"""Reads the quantized types of GGUF, in the files that the converter writes.

The blocks of a row are adjacent, and contain codes and scales. The name suffix of a tensor is its type. Each scale is
the product of a float16 number and a small integer, and is computed in float32, as ggml computes it.

Source of the layouts: ggml-common.h and ggml-quants.c of ggml.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from quire_engine.weights.quantized.quantized_tensor import QuantizedTensor
from quire_engine.weights.quantized.weight_codes import WeightCodes
from quire_spec.model.gguf.header import TYPES, GGMLType
from quire_spec.model.quantization import WeightScheme

_TYPE_BY_NAME = {kind.name: kind for kind in TYPES.values()}


def gguf_suffix(kind: GGMLType) -> str:
    """Return the name suffix of a tensor of this type in the files that the converter writes."""
    return f".weight_{kind.name.lower()}"


class GGUFTensor(QuantizedTensor):
    """See QuantizedTensor. A subclass unpacks one type."""

    TYPE: ClassVar[GGMLType]
    GROUP: ClassVar[int] = 32
    """Number of input features that share a scale."""

    def __init_subclass__(cls, name: str) -> None:
        cls.TYPE = _TYPE_BY_NAME[name]
        cls.MARKER = gguf_suffix(cls.TYPE)
        # The scales are in the same tensor.
        cls.SCALES = (cls.MARKER,)

    def __init__(self, module: str, slices: Mapping[str, Any], scheme: WeightScheme) -> None:
        super().__init__(module, slices, scheme)
        rows, row_bytes = self.values_shape()
        num_blocks = row_bytes // self.TYPE.block_bytes
        self.shape = (rows, num_blocks * self.TYPE.block_size)
        self._blocks = self.slice_of(self.MARKER, (rows, num_blocks * self.TYPE.block_bytes), ("U8",))
        self.column_multiple = self.TYPE.block_size

    def compute_codes(self, rows: range, columns: range) -> WeightCodes:
        """See QuantizedTensor."""
        size, num_bytes = self.TYPE.block_size, self.TYPE.block_bytes
        part = slice(columns.start // size * num_bytes, columns.stop // size * num_bytes)
        # A copy is aligned.
        blocks = self._blocks[rows.start : rows.stop, part].reshape(len(rows), -1, num_bytes).contiguous()
        values, scales, mins = self.unpack(blocks)
        values, scales, block = values.flatten(1), scales.flatten(1), (1, self.GROUP)
        num_bits = 4 if values.dtype == torch.uint8 else 8
        if mins is None:
            return WeightCodes(values, scales, None, block, num_bits)
        codebook = torch.arange(16.0) if num_bits == 4 else None
        return WeightCodes(values, scales, None, block, num_bits, codebook=codebook, mins=mins.flatten(1))

    @staticmethod
    def unpack(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Unpack [rows, blocks, bytes of a block].

        The result contains values [rows, blocks, numbers of a block], int8 or uint8 (4 bits); scales [rows, blocks,
        groups of a block] float32; and None, or numbers of the same shape as the scales, which are subtracted after the
        multiplication.
        """
        raise NotImplementedError


class Q40Tensor(GGUFTensor, name="Q4_0"):
    """4 bits, and a scale for each 32 numbers. The zero point is 8."""

    @staticmethod
    def unpack(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """See GGUFTensor."""
        codes = blocks[..., 2:]
        return torch.cat((codes & 15, codes >> 4), -1), _halves(blocks, 0), None


class Q80Tensor(GGUFTensor, name="Q8_0"):
    """8 bits, and a scale for each 32 numbers."""

    @staticmethod
    def unpack(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """See GGUFTensor."""
        return blocks[..., 2:].contiguous().view(torch.int8), _halves(blocks, 0), None


class Q4KTensor(GGUFTensor, name="Q4_K"):
    """4 bits, and a scale and a minimum for each 32 numbers."""

    @staticmethod
    def unpack(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """See GGUFTensor."""
        codes = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)
        return torch.stack((codes & 15, codes >> 4), -2).flatten(-3), *_scales_and_mins(blocks)


class Q5KTensor(GGUFTensor, name="Q5_K"):
    """5 bits, and a scale and a minimum for each 32 numbers. The highest bits of all numbers are stored separately."""

    @staticmethod
    def unpack(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """See GGUFTensor."""
        codes = blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32)
        low = torch.stack((codes & 15, codes >> 4), -2).flatten(-3, -2)
        high = blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
        return (low | high << 4).flatten(-2).view(torch.int8), *_scales_and_mins(blocks)


class Q6KTensor(GGUFTensor, name="Q6_K"):
    """6 bits, and a scale for each 16 numbers. The zero point is 32. The 2 highest bits of all numbers are stored
    separately."""

    GROUP = 16

    @staticmethod
    def unpack(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """See GGUFTensor."""
        shape = blocks.shape[:2]
        low = blocks[..., :128].reshape(*shape, 2, 1, 64)
        low = torch.cat((low & 15, low >> 4), -2).reshape(*shape, 2, 4, 32)
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
        high = blocks[..., 128:192].reshape(*shape, 2, 1, 32) >> shifts & 3
        values = (low | high << 4).flatten(-3).view(torch.int8) - 32
        return values, _halves(blocks, 208) * blocks[..., 192:208].contiguous().view(torch.int8), None


GGUF_TENSORS = {tensor_class.MARKER: tensor_class for tensor_class in GGUFTensor.__subclasses__()}
"""Maps the name suffix of a tensor to its class."""


def _halves(blocks: Tensor, offset: int) -> Tensor:
    """Return the float16 number at an offset of each block, as [rows, blocks, 1] float32."""
    return blocks[..., offset : offset + 2].contiguous().view(torch.float16).float()


def _scales_and_mins(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and the minima of Q4_K or Q5_K, [rows, blocks, 8] float32. Both have 6 bits, in 12 bytes."""
    packed = blocks[..., 4:16]
    a, b, c = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((a & 63, (c & 15) | (a >> 6) << 4), -1)
    mins = torch.cat((b & 63, (c >> 4) | (b >> 6) << 4), -1)
    return _halves(blocks, 0) * scales, _halves(blocks, 2) * mins
