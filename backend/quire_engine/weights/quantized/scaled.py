# SPDX-License-Identifier: Apache-2.0
"""Reads weights that are stored as float8_e4m3fn or int8, without packing.

It reads `fp8`, `fbgemm_fp8`, the FP8 formats of ModelOpt, and three formats of compressed-tensors: float-quantized,
int-quantized and naive-quantized. The name of the scale is `weight_scale`, or `weight_scale_inv` in the format of
DeepSeek. In both cases, the values must be multiplied by the scale.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from quire_engine.weights.quantized.quantized_tensor import QuantizedTensor
from quire_engine.weights.quantized.weight_codes import WeightCodes
from quire_spec.model.quantization import WeightScheme

_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")


class ScaledTensor(QuantizedTensor):
    """See QuantizedTensor."""

    MARKER = ".weight"
    SCALES: ClassVar[tuple[str, ...]] = (".weight_scale", ".weight_scale_inv")
    # The scales of activations are not read, because the engine computes a scale for each token or does not quantize
    # activations.
    UNUSED: ClassVar[tuple[str, ...]] = (
        ".input_scale",
        ".activation_scale",
        ".input_zero_point",
        ".output_scale",
        ".weight_shape",
    )
    DTYPE: ClassVar[str]

    def __init__(self, module: str, slices: Mapping[str, Any], scheme: WeightScheme) -> None:
        super().__init__(module, slices, scheme)
        rows, columns = self.shape = self.values_shape()
        self._values = self.slice_of(self.MARKER, self.shape, (self.DTYPE,))
        found = tuple(slices[self._scales_name].get_shape())
        if scheme.block is None:
            # There is one scale for the whole tensor, or one for each output feature. The program that wrote the
            # checkpoint decided how many dimensions the scales have.
            is_single = found in ((), (1,), (1, 1))
            self._block = (rows if is_single else 1, columns)
            grid = found if is_single or found == (rows,) else (rows, 1)
        else:
            self._block = scheme.block
            grid = (-(-rows // self._block[0]), -(-columns // self._block[1]))
            if found == (grid[0], 1, grid[1], 1):
                grid = found  # as ModelOpt writes it
        scales = self.scales_slice(grid, _SCALE_DTYPES)
        self._scales = scales[...].float().reshape(-(-rows // self._block[0]), -(-columns // self._block[1]))
        if scheme.block is not None or self._scales.shape[0] > 1:
            self.row_multiple = self._block[0]
        self.column_multiple = self._block[1] if scheme.block is not None else 1

    def compute_codes(self, rows: range, columns: range) -> WeightCodes:
        """See QuantizedTensor."""
        values = self._values[rows.start : rows.stop, columns.start : columns.stop]
        scales = self._scales
        if scales.shape[0] > 1:
            scales = scales[rows.start // self._block[0] : -(-rows.stop // self._block[0])]
        if scales.shape[1] > 1:
            scales = scales[:, columns.start // self._block[1] : -(-columns.stop // self._block[1])]
        return WeightCodes(values, scales, None, self._block, 8)


class FP8Tensor(ScaledTensor):
    """A ScaledTensor whose values are float8_e4m3fn."""

    DTYPE = "F8_E4M3"


class Int8Tensor(ScaledTensor):
    """A ScaledTensor whose values are int8."""

    DTYPE = "I8"
