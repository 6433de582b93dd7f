# SPDX-License-Identifier: Apache-2.0
"""Rotary position settings of a checkpoint. Both formats of transformers are supported. The engine computes the angles.

transformers 5 writes a single object, `rope_parameters`. Earlier versions write two keys, `rope_theta` and
`rope_scaling`. In Phi-3, some of these values are at the top level of config.json.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Self

from quire_spec.errors import ConfigError
from quire_spec.model.hf_config import MAX_INTEGER, HFConfigReader

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
_NTK_ALPHA = "ntk_alpha"
"""What Hunyuan means by `dynamic`: the base grows by a constant factor that depends on `alpha`."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The type of a model's rotary embedding, and its parameters."""

    rope_type: str
    """One of ROPE_TYPES, or "none" if positions are not rotated."""
    theta: float
    dim: int
    """Number of elements that are rotated, counted from the start of each head. The other elements are not changed."""
    factor: float = 1.0
    """Context extension factor. The type `dynamic` applies it only to sequences longer than max_position_embeddings.
    The engine rejects such sequences, so the factor has no effect."""
    original_max_position: int = 0
    """original_max_position_embeddings: the context length that the model had before it was extended."""
    attention_factor: float = 1.0
    """Cosines and sines are multiplied by this factor."""
    low_freq_factor: float = 1.0
    """For llama3: wavelengths between two bounds are scaled by an interpolated factor. The bounds are
    original_max_position / low_freq_factor and original_max_position / high_freq_factor."""
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    """For yarn: frequencies between two bounds are scaled by an interpolated factor. One bound is the frequency that
    makes beta_fast rotations within original_max_position tokens. The other bound is the frequency that makes beta_slow
    rotations within the same number of tokens."""
    beta_slow: float = 1.0
    truncate: bool = True
    """For yarn: whether the bounds of the interpolation are rounded to whole pairs of elements."""
    short_factor: tuple[float, ...] = ()
    """For longrope: if a sequence has at most original_max_position tokens, its rotary frequencies are divided by these
    numbers, one number for each frequency."""
    long_factor: tuple[float, ...] = ()
    """For longrope: if a sequence has more than original_max_position tokens, its rotary frequencies are divided by
    these numbers, one number for each frequency."""
    num_rotated_pairs: int = 0
    """For proportional: number of pairs of elements that are rotated, counted from the first one. The frequencies
    depend on `dim`, and not on this number."""
    query_scaling_beta: float = 0.0
    """llama_4_scaling_beta: the query at position p is multiplied by
    1 + beta * ln(1 + floor(p / original_max_position)). Only Ministral 3 sets this parameter."""
    mrope_axes: tuple[int, ...] = ()
    """For each pair of rotated elements, which of the three positions of a token rotates it; see
    `image_config.mrope_axes`. Empty: a token has one position."""

    @property
    def long_threshold(self) -> int | None:
        """If a sequence is longer than this, all of its tokens use `long_factor`. None: the rope type is not
        longrope."""
        return self.original_max_position if self.rope_type == "longrope" else None

    def max_length(self, max_positions: int) -> int:
        """Return the largest number of tokens of a sequence, given max_position_embeddings.

        As in vLLM, yarn and linear extend the context. Other files contain the extended length already. The type
        `dynamic` does not extend it here: each token would change the frequencies of the keys before it.
        """
        if self.rope_type == "linear":
            return max(max_positions, int(min(max_positions * self.factor, MAX_INTEGER)))
        if self.rope_type == "yarn":
            return max(max_positions, int(min(self.original_max_position * self.factor, MAX_INTEGER)))
        return max_positions

    @classmethod
    def from_hf_config(
        cls,
        config: HFConfigReader,
        scaling: HFConfigReader,
        head_dim: int,
        max_positions: int,
        *,
        supports_partial: bool = False,
        aliases: Mapping[str, str] = MappingProxyType({}),
    ) -> Self:
        """Read config.json.

        Args:
            config: reader of config.json.
            scaling: reader of the object `rope_parameters` or `rope_scaling` of config.json.
            head_dim: number of elements of a head.
            max_positions: max_position_embeddings of config.json.
            supports_partial: whether the architecture uses `partial_rotary_factor`.
            aliases: see Architecture.rope_aliases.

        Raises:
            ConfigError: the scaling is not supported, or a number is missing or wrong.
        """
        rope_type = _read_rope_type(scaling, aliases)
        theta = scaling.get_float("rope_theta", config.get_float("rope_theta", 10000.0))
        if theta <= 1:
            raise config.error("rope_theta", theta, "more than 1")
        rotary_fraction = scaling.get_float("partial_rotary_factor", config.get_float("partial_rotary_factor", 1.0))
        if "rotary_dim" in config and "partial_rotary_factor" not in scaling:
            rotary_fraction = config.get_int("rotary_dim") / head_dim
        if rope_type == "proportional":
            factor = scaling.get_float("factor", 1.0)
            return cls(rope_type, theta, head_dim, factor, num_rotated_pairs=int(rotary_fraction * head_dim // 2))
        if not supports_partial and rope_type != "default" and rotary_fraction != 1:
            raise config.error(
                "partial_rotary_factor", rotary_fraction, f"1 with rope scaling {rope_type!r} in this architecture"
            )
        dim = int(head_dim * rotary_fraction) if supports_partial else head_dim
        if dim % 2 or not 0 < dim <= head_dim:
            raise ConfigError(
                "config.json: head_dim x partial_rotary_factor must be an even number from 2 to head_dim "
                f"{head_dim}, got {dim}"
            )
        if rope_type == _NTK_ALPHA:
            rope_type = "dynamic"
            if "alpha" in scaling:
                # The factor is constant, so that no frequency depends on the length of the sequence.
                theta, rope_type = theta * scaling.get_float("alpha") ** (dim / (dim - 2)), "default"
        rope = cls._read_scaling(config, scaling, cls(rope_type, theta, dim), max_positions)
        if "llama_4_scaling_beta" not in scaling:
            return rope
        return replace(
            rope,
            query_scaling_beta=scaling.get_float("llama_4_scaling_beta"),
            original_max_position=scaling.get_int("original_max_position_embeddings"),
        )

    @classmethod
    def _read_scaling(cls, config: HFConfigReader, scaling: HFConfigReader, rope: Self, max_positions: int) -> Self:
        """Return a copy of `rope` that also has the parameters of its type. `rope` has only the type, the base and the
        dimension."""
        rope_type, theta, dim = rope.rope_type, rope.theta, rope.dim
        if rope_type == "default":
            return rope
        if rope_type in ("linear", "dynamic"):
            return replace(rope, factor=scaling.get_float("factor"))
        # In Phi-3, this key is at the top level of config.json. The top level takes precedence.
        original_max_position = config.get_int(
            "original_max_position_embeddings",
            scaling.get_int("original_max_position_embeddings", max_positions),
        )
        factor = scaling.get_float("factor", None if rope_type == "llama3" else max_positions / original_max_position)
        reader = {"llama3": cls._llama3, "yarn": cls._yarn, "longrope": cls._longrope}[rope_type]
        return reader(scaling, theta, dim, factor, original_max_position)

    @classmethod
    def _llama3(
        cls, scaling: HFConfigReader, theta: float, dim: int, factor: float, original_max_position: int
    ) -> Self:
        low, high = scaling.get_float("low_freq_factor"), scaling.get_float("high_freq_factor")
        if high <= low:
            raise scaling.error("high_freq_factor", high, f"more than low_freq_factor {low}")
        return cls("llama3", theta, dim, factor, original_max_position, low_freq_factor=low, high_freq_factor=high)

    @classmethod
    def _yarn(cls, scaling: HFConfigReader, theta: float, dim: int, factor: float, original_max_position: int) -> Self:
        ratio = yarn_mscale(factor)
        if "mscale" in scaling and "mscale_all_dim" in scaling:
            mscale, mscale_all_dim = scaling.get_float("mscale"), scaling.get_float("mscale_all_dim")
            ratio = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
        return cls(
            "yarn",
            theta,
            dim,
            factor,
            original_max_position,
            attention_factor=scaling.get_float("attention_factor", ratio),
            beta_fast=scaling.get_float("beta_fast", 32.0),
            beta_slow=scaling.get_float("beta_slow", 1.0),
            truncate=scaling.get_bool("truncate", True),
        )

    @classmethod
    def _longrope(
        cls, scaling: HFConfigReader, theta: float, dim: int, factor: float, original_max_position: int
    ) -> Self:
        if original_max_position == 1:
            raise scaling.error("original_max_position_embeddings", original_max_position, "more than 1")
        short, long = scaling.get_float_list("short_factor"), scaling.get_float_list("long_factor")
        for key, values in (("short_factor", short), ("long_factor", long)):
            if len(values) != dim // 2:
                raise scaling.error(key, list(values), f"{dim // 2} numbers, one for each rotated pair")
        ratio = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_max_position))
        attention_factor = scaling.get_float("attention_factor", ratio)
        return cls(
            "longrope",
            theta,
            dim,
            factor,
            original_max_position,
            attention_factor,
            short_factor=short,
            long_factor=long,
        )


def _read_rope_type(scaling: HFConfigReader, aliases: Mapping[str, str]) -> str:
    rope_type = scaling.get_str("rope_type", scaling.get_str("type", "default"))
    # The original name of longrope was su.
    rope_type = {"su": "longrope", **aliases}.get(rope_type, rope_type)
    if rope_type not in (*ROPE_TYPES, *aliases.values()):
        raise ConfigError(
            f"config.json: rope scaling {rope_type!r} is not supported; supported types are {', '.join(ROPE_TYPES)}"
        )
    return rope_type


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """Return the factor by which YaRN multiplies queries and keys, for a context that is `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
