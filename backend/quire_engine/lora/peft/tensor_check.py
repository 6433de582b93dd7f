# SPDX-License-Identifier: Apache-2.0
"""Checks of a tensor in an adapter's file: before it is read, and of its numbers."""

import math

import torch
from torch import Tensor

from quire_engine.weights.safetensors_reader import DTYPES, SafetensorsReader
from quire_spec.errors import InvalidArgument


def check_tensor(file: SafetensorsReader, name: str, expected_shape: tuple[int, ...]) -> None:
    """Raise InvalidArgument if a tensor of a file has another shape, or a dtype that cannot be read."""
    tensor = file.get_slice(name)
    shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
    if dtype not in DTYPES:
        raise InvalidArgument(f"tensor {name!r} is {dtype}; supported are {', '.join(DTYPES)}")
    if shape != expected_shape:
        raise InvalidArgument(f"tensor {name!r} has shape {shape}; config and model require {expected_shape}")


def check_finite(subject: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Reject a tensor that is not finite in `dtype`."""
    # aminmax takes one pass, and both results are NaN if any element is NaN. torch.isfinite takes sixty times as long.
    if not all(map(math.isfinite, torch.aminmax(tensor))):
        raise InvalidArgument(f"{subject} NaN or infinity, or overflows {dtype} after scaling")
