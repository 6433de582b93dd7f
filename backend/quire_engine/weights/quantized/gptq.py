# SPDX-License-Identifier: Apache-2.0
"""Reads the GPTQ format, as AutoGPTQ and GPTQModel write it. All tensors are transposed.

Values are packed along the input features, and zero points are packed along the output features. `g_idx` contains the
group of each input feature. If the checkpoint orders features by activation (desc_act), the group numbers in `g_idx`
are not in ascending order.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from quire_engine.weights.quantized.bit_packing import unpack_int32
from quire_engine.weights.quantized.quantized_tensor import QuantizedTensor
from quire_engine.weights.quantized.weight_codes import WeightCodes
from quire_spec.errors import ConfigError
from quire_spec.model.quantization import WeightScheme

_ONES = {4: 0x11111111, 8: 0x01010101}
"""Maps the number of bits of a packed integer to an int32 in which every packed integer is 1."""


class GPTQTensor(QuantizedTensor):
    """See QuantizedTensor."""

    MARKER = ".qweight"
    SCALES = (".scales",)
    REQUIRED = (".qzeros",)
    OPTIONAL = (".g_idx",)

    def __init__(self, module: str, slices: Mapping[str, Any], scheme: WeightScheme) -> None:
        super().__init__(module, slices, scheme)
        self._factor = 32 // scheme.num_bits
        words, rows = self.values_shape()
        columns = words * self._factor
        self.shape = (rows, columns)
        self._values = self.slice_of(self.MARKER, (words, rows), ("I32",))
        num_groups = self.num_groups(columns)
        self._scales = self.scales_slice((num_groups, rows))
        self._zeros = self.slice_of(".qzeros", (num_groups, -(-rows // self._factor)), ("I32",))
        self._groups = None
        if ".g_idx" in slices:
            groups = self.slice_of(".g_idx", (columns,), ("I32", "I64"))[...].long()
            if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
                raise ConfigError(
                    f"{module}.g_idx must contain only the numbers of groups, which are 0 to {num_groups - 1}"
                )
            if not torch.equal(groups, torch.arange(columns) // self.group_size(columns)):
                self._groups = groups
        self.row_multiple = self.column_multiple = self._factor
        if self._groups is None and num_groups > 1:
            self.column_multiple = math.lcm(self._factor, self.group_size(columns))

    def compute_codes(self, rows: range, columns: range) -> WeightCodes:
        """See QuantizedTensor."""
        num_bits, size = self.scheme.num_bits, self.group_size(self.shape[1])
        words = slice(columns.start // self._factor, -(-columns.stop // self._factor))
        values = unpack_int32(self._values[words, rows.start : rows.stop].t(), num_bits)
        part = slice(None) if self._groups is not None else slice(columns.start // size, -(-columns.stop // size))
        packed = self._zeros[part, rows.start // self._factor : -(-rows.stop // self._factor)]
        if self.scheme.zeros_minus_one:
            # An int32 contains several zero points. Some writers subtracted 1 from all of them at once, so that some
            # zero points borrowed from the next one. This addition also treats them as one number, so its carries undo
            # the borrows.
            packed = packed + _ONES[num_bits]
        zeros = unpack_int32(packed, num_bits)[:, : len(rows)].t()
        scales = self._scales[part, rows.start : rows.stop].t().float()
        groups = None if self._groups is None else self._groups[columns.start : columns.stop]
        return WeightCodes(values, scales, zeros, (1, size), num_bits, groups)
