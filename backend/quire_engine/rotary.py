# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: the angles of a checkpoint's `rope_parameters`. Applied by quire_kernels.apply_rope."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quire_spec.errors import ConfigError
from quire_spec.shape import ModelShape

SCALINGS = ("default", "linear", "llama3")


class Rotary:
    """Cosines and sines of positions.

    Raises:
        ConfigError: the checkpoint scales its positions in a way that is not supported, or a number is missing.
    """

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(shape).to(device)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Of each position [num_tokens]: cosines and sines, each [num_tokens, head_dim] of `dtype`; the first half of
        the sines is negated, as `apply_rope` takes them."""
        angles = positions.to(torch.float32)[:, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def inverse_frequencies(shape: ModelShape) -> Tensor:
    """Radians per position of each pair, [head_dim / 2] float32 on the CPU; raises ConfigError as Rotary does."""
    scaling = shape.rope_scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).to(torch.float32) / shape.head_dim
    frequencies = 1.0 / (shape.rope_theta**exponents)
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / _number(scaling, "factor")
    if kind == "llama3":
        return _llama3(frequencies, scaling)
    raise ConfigError(f"config.json: rope scaling {kind!r} is not supported; supported are {', '.join(SCALINGS)}")


def _llama3(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended.

    Source: the rope scaling that Llama 3.1 was released with, as in transformers' modeling_rope_utils.
    """
    factor, trained = _number(scaling, "factor"), _number(scaling, "original_max_position_embeddings")
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    waves = 2 * math.pi / frequencies
    kept = ((trained / waves - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / factor + kept * frequencies


def _number(scaling: Mapping[str, Any], name: str) -> float:
    value = scaling.get(name)
    if not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"config.json: rope scaling needs {name}, a positive number; found {value!r}")
    return float(value)
