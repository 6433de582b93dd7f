# SPDX-License-Identifier: Apache-2.0
"""Reads the AWQ format, version GEMM, as AutoAWQ writes it. All tensors are transposed.

The values and the zero points are packed along the output features. An int32 contains 8 of them, in the order 0, 2, 4,
6, 1, 3, 5, 7.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quire_engine.weights.quantized.quantized_tensor import QuantizedTensor
from quire_engine.weights.quantized.weight_codes import WeightCodes
from quire_spec.model.quantization import WeightScheme

_FACTOR = 8
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The 8 parts of an int32 contain the output features in this order. The part with the lowest bits is first."""


class AWQTensor(QuantizedTensor):
    """See QuantizedTensor."""

    MARKER = ".qweight"
    SCALES = (".scales",)
    REQUIRED = (".qzeros",)

    def __init__(self, module: str, slices: Mapping[str, Any], scheme: WeightScheme) -> None:
        super().__init__(module, slices, scheme)
        columns, words = self.values_shape()
        self.shape = (words * _FACTOR, columns)
        self._values = self.slice_of(self.MARKER, (columns, words), ("I32",))
        num_groups = self.num_groups(columns)
        self._scales = self.scales_slice((num_groups, words * _FACTOR))
        self._zeros = self.slice_of(".qzeros", (num_groups, words), ("I32",))
        self.row_multiple = _FACTOR
        self.column_multiple = self.group_size(columns) if num_groups > 1 else 1

    def compute_codes(self, rows: range, columns: range) -> WeightCodes:
        """See QuantizedTensor."""
        size = self.group_size(self.shape[1])
        words = slice(rows.start // _FACTOR, -(-rows.stop // _FACTOR))
        values = _unpack(self._values[columns.start : columns.stop, words])
        part = slice(columns.start // size, -(-columns.stop // size))
        zeros = _unpack(self._zeros[part, words])
        scales = self._scales[part, rows.start : rows.stop].t().float()
        return WeightCodes(values, scales, zeros, (1, size), 4)


def _unpack(packed: Tensor) -> Tensor:
    """Unpack an int32 tensor [n, m] to a contiguous uint8 tensor [8 m, n].

    The tensor is transposed before it is unpacked, because this is faster. On one shared core, it takes 0.2 s to unpack
    and pack a 4096 x 4096 weight if it is transposed first, and 0.7 s if it is transposed after it was unpacked.
    """
    words = packed.t().contiguous()
    codes = torch.empty(len(words), _FACTOR, words.shape[1], dtype=torch.uint8)
    for position, feature in enumerate(_ORDER):
        codes[:, feature] = (words >> 4 * position) & 15
    return codes.flatten(0, 1)
