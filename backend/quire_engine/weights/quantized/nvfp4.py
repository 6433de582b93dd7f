# SPDX-License-Identifier: Apache-2.0
"""Reads NVFP4, as ModelOpt and compressed-tensors write it.

A value is a 4-bit floating-point number (E2M1). A byte contains two of them, and the lower bits come first. Each group
of 16 input features has a scale in float8_e4m3fn, and the whole tensor has one in float32. ModelOpt stores the factor
by which the other scales must be multiplied, and compressed-tensors stores its reciprocal.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from quire_engine.weights.quantized.bit_packing import unpack_nibbles
from quire_engine.weights.quantized.quantized_tensor import QuantizedTensor
from quire_engine.weights.quantized.weight_codes import WeightCodes
from quire_kernels import e2m1_codebook
from quire_spec.model.quantization import WeightScheme


class NVFP4Tensor(QuantizedTensor):
    """A tensor of ModelOpt."""

    MARKER = ".weight"
    SCALES = (".weight_scale",)
    TENSOR_SCALE: ClassVar[str] = ".weight_scale_2"
    REQUIRED = (TENSOR_SCALE,)
    # Inputs are not quantized to 4 bits.
    UNUSED: ClassVar[tuple[str, ...]] = (".input_scale",)

    def __init__(self, module: str, slices: Mapping[str, Any], scheme: WeightScheme) -> None:
        super().__init__(module, slices, scheme)
        rows, num_bytes = self.values_shape()
        columns = 2 * num_bytes
        self.shape = (rows, columns)
        self._values = self.slice_of(self.MARKER, (rows, num_bytes), ("U8",))
        self._scales = self.scales_slice((rows, self.num_groups(columns)), ("F8_E4M3",))
        shape = tuple(slices[self.TENSOR_SCALE].get_shape())
        is_single = shape in ((), (1,))
        self._tensor_scale: Tensor = self.slice_of(self.TENSOR_SCALE, shape if is_single else (1,), ("F32",))[...]
        self.check_finite(self._tensor_scale)
        self.column_multiple = self.group_size(columns)

    def compute_codes(self, rows: range, columns: range) -> WeightCodes:
        """See QuantizedTensor."""
        part, size = slice(rows.start, rows.stop), self.column_multiple
        values = unpack_nibbles(self._values[part, columns.start // 2 : columns.stop // 2])
        scales = self._scales[part, columns.start // size : columns.stop // size].float()
        return WeightCodes(values, self.scale(scales), None, (1, size), 4, codebook=e2m1_codebook().float())

    def scale(self, scales: Tensor) -> Tensor:
        """Return the scales of groups multiplied by the scale of the tensor. All of them are float32."""
        return scales * self._tensor_scale


class PackedNVFP4Tensor(NVFP4Tensor):
    """A tensor of compressed-tensors."""

    MARKER = ".weight_packed"
    TENSOR_SCALE = ".weight_global_scale"
    REQUIRED = (TENSOR_SCALE,)
    UNUSED = (".input_global_scale", ".input_scale")

    def scale(self, scales: Tensor) -> Tensor:
        """See NVFP4Tensor."""
        return scales / self._tensor_scale
