# SPDX-License-Identifier: Apache-2.0
"""Base class for all formats of quantized tensors. The values of a tensor are read from the files on demand."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from quire_engine.weights.quantized.weight_codes import WeightCodes
from quire_spec.errors import ConfigError
from quire_spec.model.quantization import WeightScheme

_FLOAT_DTYPES = ("F32", "BF16", "F16")


class QuantizedTensor(ABC):
    """A quantized weight of one linear layer.

    In the files, such a weight consists of several tensors. `read` and `read_codes` read only the requested part.
    """

    MARKER: ClassVar[str]
    """Name suffix of the tensor that contains the values."""
    SCALES: ClassVar[tuple[str, ...]]
    """Possible name suffixes of the tensor that contains the scales."""
    REQUIRED: ClassVar[tuple[str, ...]] = ()
    """Name suffixes of other tensors that must exist."""
    OPTIONAL: ClassVar[tuple[str, ...]] = ()
    """Name suffixes of other tensors that are read if they exist."""
    UNUSED: ClassVar[tuple[str, ...]] = ()
    """Name suffixes of tensors that are not read, such as scales of activations."""
    shape: tuple[int, int]
    """Output and input features."""
    row_multiple = 1
    """`read_codes` accepts only ranges of rows that start at a multiple of this number."""
    column_multiple = 1

    def __init__(self, module: str, slices: Mapping[str, Any], scheme: WeightScheme) -> None:
        """`slices` maps name suffixes to slices of safetensors files.

        Raises:
            ConfigError: the scales are missing, or a tensor has another shape or dtype than the scheme requires.
        """
        self.module = module
        self.scheme = scheme
        self._slices = slices
        self._scales_name = next((suffix for suffix in self.SCALES if suffix in slices), self.SCALES[0])
        for suffix in (self._scales_name, *self.REQUIRED):
            self.require(suffix)

    def read_codes(self, rows: range, columns: range) -> WeightCodes:
        """Return the codes of the output features `rows` and the input features `columns`.

        The ranges must start at multiples of `row_multiple` and `column_multiple`.

        Raises:
            ConfigError: a scale is NaN or infinite.
        """
        codes = self.compute_codes(rows, columns)
        for numbers in (codes.scales, codes.mins, codes.codebook):
            if numbers is not None:
                self.check_finite(numbers)
        return codes

    @abstractmethod
    def compute_codes(self, rows: range, columns: range) -> WeightCodes:
        """Return the codes for `read_codes`, of which the scales are not checked."""

    def read(self, expert: int, rows: range, columns: range, dtype: torch.dtype) -> Tensor:
        """Return a part of the weight, with the shape [len(rows), len(columns)].

        `expert` is always 0.
        """
        all_rows, all_columns = self.align(rows, columns)
        weight = self.read_codes(all_rows, all_columns).dequantize(dtype)
        row, column = rows.start - all_rows.start, columns.start - all_columns.start
        return weight[row : row + len(rows), column : column + len(columns)]

    def align(self, rows: range, columns: range) -> tuple[range, range]:
        """Return `rows` and `columns`, extended to the smallest ranges that `read_codes` accepts."""
        return (
            _align(rows, self.row_multiple, self.shape[0]),
            _align(columns, self.column_multiple, self.shape[1]),
        )

    def require(self, suffix: str) -> None:
        """Raise ConfigError if the tensor with this suffix is missing."""
        if suffix not in self._slices:
            raise ConfigError(
                f"{self.module}{suffix} is missing, but quantization_config of config.json requires it for "
                f"{self.module}{self.MARKER}; the checkpoint is incomplete"
            )

    def check_finite(self, scales: Tensor) -> None:
        """Raise ConfigError if a scale is NaN or infinite."""
        if not scales.float().isfinite().all():
            raise ConfigError(
                f"{self.module}{self.MARKER}: its scales contain NaN or infinity; download the checkpoint again, or "
                "quantize the model again"
            )

    def values_shape(self) -> tuple[int, int]:
        """Return the shape of the tensor that contains the values; raise ConfigError if it is not a matrix."""
        shape = tuple(self._slices[self.MARKER].get_shape())
        if len(shape) != 2:
            raise ConfigError(
                f"{self.module}{self.MARKER} has shape {shape}, but quantization_config in config.json requires "
                "a matrix"
            )
        return shape[0], shape[1]

    def slice_of(self, suffix: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> Any:
        """Check the shape and dtype of the tensor with this suffix, and return its slice.

        Raises:
            ConfigError: the slice has another shape or dtype.
        """
        tensor_slice = self._slices[suffix]
        found, dtype = tuple(tensor_slice.get_shape()), tensor_slice.get_dtype()
        if found != shape or dtype not in dtypes:
            raise ConfigError(
                f"{self.module}{suffix} is {dtype} of shape {found}; quantization_config of config.json implies "
                f"{' or '.join(dtypes)} of shape {shape}"
            )
        return tensor_slice

    def scales_slice(self, shape: tuple[int, ...], dtypes: tuple[str, ...] = _FLOAT_DTYPES) -> Any:
        """Return the slice of the scales. `slice_of` checks its shape and dtype."""
        return self.slice_of(self._scales_name, shape, dtypes)

    def num_groups(self, in_features: int) -> int:
        """Return the number of groups of input features.

        Raises:
            ConfigError: the group size does not divide the number of input features.
        """
        size = self.group_size(in_features)
        if in_features % size:
            raise ConfigError(
                f"config.json: quantization_config: group_size: {size} does not divide the {in_features} input "
                f"features of {self.module}"
            )
        return in_features // size

    def group_size(self, in_features: int) -> int:
        """Return the number of input features that share a scale."""
        return in_features if self.scheme.block is None else self.scheme.block[1]


def _align(part: range, multiple: int, size: int) -> range:
    return range(part.start // multiple * multiple, min(-(-part.stop // multiple) * multiple, size))
