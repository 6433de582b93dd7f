# SPDX-License-Identifier: Apache-2.0
"""Reads the format `pack-quantized` of compressed-tensors.

Values are packed along the input features, and zero points are packed along the output features. Before values and zero
points are stored, half of their range is added to them, so that the stored integers are unsigned. If features are
ordered by activation, `weight_g_idx` contains the group of each input feature.
"""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quire_engine.weights.quantized.bit_packing import unpack_int32
from quire_engine.weights.quantized.quantized_tensor import QuantizedTensor
from quire_engine.weights.quantized.weight_codes import WeightCodes
from quire_spec.errors import ConfigError
from quire_spec.model.quantization import WeightScheme


class PackQuantizedTensor(QuantizedTensor):
    """See QuantizedTensor."""

    MARKER = ".weight_packed"
    SCALES = (".weight_scale",)
    OPTIONAL = (".weight_zero_point", ".weight_g_idx", ".weight_shape")
    UNUSED = (".input_scale", ".input_zero_point")

    def __init__(self, module: str, slices: Mapping[str, Any], scheme: WeightScheme) -> None:
        super().__init__(module, slices, scheme)
        self._factor = 32 // scheme.num_bits
        rows, words = self.values_shape()
        columns = words * self._factor
        if ".weight_shape" in slices:
            columns = int(self.slice_of(".weight_shape", (2,), ("I64", "I32"))[...][1])
            if not words * self._factor - self._factor < columns <= words * self._factor:
                raise ConfigError(
                    f"{module}.weight_shape contains {columns} columns, but {module}.weight_packed has {words} int32 "
                    "values in each row"
                )
        self.shape = (rows, columns)
        self._values = self.slice_of(self.MARKER, (rows, words), ("I32",))
        num_groups = self.num_groups(columns)
        self._scales = self.scales_slice((rows, num_groups) if scheme.strategy != "tensor" else (1,))
        self._zeros = None
        if scheme.has_zeros:
            self.require(".weight_zero_point")
        if ".weight_zero_point" in slices:
            shape = (-(-rows // self._factor), num_groups)
            self._zeros = self.slice_of(".weight_zero_point", shape, ("I32",))
        self._groups: Tensor | None = None
        if ".weight_g_idx" in slices:
            groups = self.slice_of(".weight_g_idx", (columns,), ("I32", "I64"))[...].long()
            if int(groups.max()) >= num_groups:
                raise ConfigError(
                    f"{module}.weight_g_idx must contain only the numbers of groups, which are 0 to {num_groups - 1}, "
                    f"got {int(groups.max())}; download the checkpoint again"
                )
            self._groups = None if int(groups.min()) < 0 else groups
        self.row_multiple = 1 if self._zeros is None else self._factor
        self.column_multiple = self._factor
        if self._groups is None and num_groups > 1:
            self.column_multiple = math.lcm(self._factor, self.group_size(columns))

    def compute_codes(self, rows: range, columns: range) -> WeightCodes:
        """See QuantizedTensor."""
        words = slice(columns.start // self._factor, -(-columns.stop // self._factor))
        values = unpack_int32(self._values[rows.start : rows.stop, words], self.scheme.num_bits)[:, : len(columns)]
        size = self.group_size(self.shape[1])
        part = slice(None) if self._groups is not None else slice(columns.start // size, -(-columns.stop // size))
        if self.scheme.strategy == "tensor":
            scales = self._scales[...].float().expand(len(rows))[:, None]
        else:
            scales = self._scales[rows.start : rows.stop, part].float()
        zeros = None
        if self._zeros is not None:
            packed = self._zeros[rows.start // self._factor : -(-rows.stop // self._factor), part]
            zeros = unpack_int32(packed.t(), self.scheme.num_bits).t()[: len(rows)]
        groups = None if self._groups is None else self._groups[columns.start : columns.stop]
        return WeightCodes(values, scales, zeros, (1, size), self.scheme.num_bits, groups)
