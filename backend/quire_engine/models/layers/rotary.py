# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: computes the angles from a checkpoint's rope config. `quire_kernels.apply_rope` applies
them.

Each kind of scaling is computed as in the model release that introduced it. The module modeling_rope_utils of
transformers contains the same formulas.
"""

import math

import torch
from torch import Tensor

from quire_spec.model.rope_config import RopeConfig


class RotaryEmbedding:
    """Computes the cosines and sines by which queries and keys are rotated at each position."""

    def __init__(self, rope: RopeConfig, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(rope).to(device)
        self._long_frequencies = inverse_frequencies(rope, long_rope=True).to(device)
        self._scale = rope.attention_factor
        self._axes = torch.tensor(rope.mrope_axes, device=device)

    def __call__(self, positions: Tensor, long_rope: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of positions.

        Args:
            positions: [num_tokens], or [3, num_tokens] if the tokens have a time, a row and a column. Then the axes of
                the rope select one of the three for each frequency.
            long_rope: [num_tokens] bool, which tokens use the rope for long sequences; None if all tokens use the
                normal rope.
            dtype: dtype of the result.

        Returns:
            Cosines and sines, each [num_tokens, rope.dim]; the first half of the sines is negated, as `apply_rope`
            expects.
        """
        frequencies = self._frequencies
        if long_rope is not None:
            frequencies = torch.where(long_rope[:, None], self._long_frequencies, frequencies)
        if positions.dim() == 2:
            angles = positions[self._axes].T.to(torch.float32) * frequencies
        else:
            angles = positions.to(torch.float32)[:, None] * frequencies
        if dtype == torch.bfloat16 and angles.device.type == "cpu":
            # The last bit of torch's cosines depends on where its threads divide the angles. In float64, the rounding
            # to bfloat16 removes this bit.
            angles = angles.to(torch.float64)
        cos, sin = angles.cos(), angles.sin()
        if self._scale != 1.0:
            cos, sin = cos * self._scale, sin * self._scale
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def query_factors(rope: RopeConfig, positions: Tensor) -> Tensor:
    """Return the factors of the queries at positions [num_tokens], see RopeConfig.query_scaling_beta."""
    num_periods = torch.floor(positions / rope.original_max_position)
    return 1 + rope.query_scaling_beta * torch.log1p(num_periods)


def inverse_frequencies(rope: RopeConfig, *, long_rope: bool = False) -> Tensor:
    """Return, for each pair of features, the angle in radians by which the rotation grows from one position to the
    next.

    The result is [rope.dim / 2] float32 on the CPU. If `long_rope` is True, it contains the values for long
    sequences.
    """
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64).to(torch.float32) / rope.dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "none":
        return torch.zeros_like(frequencies)
    if rope.rope_type == "proportional":
        frequencies[rope.num_rotated_pairs :] = 0.0
        return frequencies / rope.factor
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(frequencies, rope)
    if rope.rope_type == "yarn":
        return _yarn(frequencies, rope)
    if rope.rope_type == "longrope":
        return frequencies / torch.tensor(rope.long_factor if long_rope else rope.short_factor)
    # `dynamic` changes the frequencies only for contexts that are longer than max_position_embeddings.
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Stretch long wavelengths by `factor`, keep short wavelengths, and interpolate between them."""
    wavelengths, low, high = 2 * math.pi / frequencies, rope.low_freq_factor, rope.high_freq_factor
    smooth_factor = ((rope.original_max_position / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth_factor) * frequencies / rope.factor + smooth_factor * frequencies


def _yarn(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Keep the frequencies of pairs that rotate many times within the trained length, and stretch slow pairs by
    `factor`.

    The frequencies of the pairs between these two groups are interpolated.

    Source: https://arxiv.org/abs/2309.00071
    """

    def correction_dim(num_rotations: float) -> float:
        return (
            rope.dim * math.log(rope.original_max_position / (num_rotations * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    first, last = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.dim - 1)
    ramp = (torch.arange(rope.dim // 2) - first) / (last - first or 0.001)
    interpolation_factor = ramp.clamp(0.0, 1.0)
    return interpolation_factor * frequencies / rope.factor + (1 - interpolation_factor) * frequencies
