# SPDX-License-Identifier: Apache-2.0
"""Rope: the numbers of a checkpoint's rotary positions, in either dialect of transformers. Angles come from rotary.py.

transformers 5 writes one object, `rope_parameters`; earlier ones `rope_theta` beside `rope_scaling`, and Phi-3 some of
its numbers beside that.
"""

import math
from dataclasses import dataclass
from typing import Self

from quire_spec.errors import ConfigError
from quire_spec.model.hf_config import HFConfigReader

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Which part of each head is rotated, by which angles."""

    rope_type: str
    """One of KINDS."""
    theta: float
    dim: int
    """Leading elements of each head that are rotated; the rest passes."""
    factor: float = 1.0
    """How far contexts are stretched. `dynamic` does so past max_position_embeddings only, where nothing is served."""
    original_max_position: int = 0
    """original_max_position_embeddings: tokens of a context before it was stretched."""
    attention_factor: float = 1.0
    """What cosines and sines are multiplied by."""
    low_freq_factor: float = 1.0
    """With high_freq_factor, of llama3: between trained_length / these wave lengths, scaling fades in."""
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    """With beta_slow, of yarn: turns within trained_length between which scaling fades in."""
    beta_slow: float = 1.0
    truncate: bool = True
    """Of yarn: whether these bounds fall on whole pairs."""
    short_factor: tuple[float, ...] = ()
    """Of longrope, dim / 2 divisors of the frequencies, for sequences of up to trained_length tokens."""
    long_factor: tuple[float, ...] = ()
    """The same for longer sequences."""

    @property
    def long_threshold(self) -> int | None:
        """Tokens up to which a sequence has one set of angles, and beyond which it has another, for all its tokens."""
        return self.original_max_position if self.rope_type == "longrope" else None

    @classmethod
    def from_hf_config(
        cls, config: HFConfigReader, head_dim: int, max_positions: int, *, supports_partial: bool
    ) -> Self:
        """Read config.json.

        Args:
            head_dim: elements of a head.
            max_positions: max_position_embeddings.
            partial: whether this family knows `partial_rotary_factor`.

        Raises:
            ConfigError: the scaling is not supported, or a number is missing or wrong.
        """
        scaling = config.get_section("rope_scaling", "rope_parameters")
        if "full_attention" in scaling or "sliding_attention" in scaling:
            raise ConfigError("config.json: rope_parameters: one rope for each layer type is not supported")
        rope_type = _read_rope_type(scaling, is_phi3=supports_partial)
        theta = scaling.get_float("rope_theta", config.get_float("rope_theta", 10000.0))
        if theta <= 1:
            raise config.error("rope_theta", theta, "more than 1")
        rotary_fraction = scaling.get_float("partial_rotary_factor", config.get_float("partial_rotary_factor", 1.0))
        if not supports_partial and rope_type != "default" and rotary_fraction != 1:
            raise config.error(
                "partial_rotary_factor", rotary_fraction, f"supported beside rope scaling {rope_type!r} in this family"
            )
        dim = int(head_dim * rotary_fraction) if supports_partial else head_dim
        if dim % 2 or not 0 < dim <= head_dim:
            raise ConfigError(f"config.json: {dim} of head_dim {head_dim} elements rotate; that is not an even part")
        if rope_type == "default":
            return cls(rope_type, theta, dim)
        if rope_type in ("linear", "dynamic"):
            return cls(rope_type, theta, dim, factor=scaling.get_float("factor"))
        # Phi-3 has it beside the scaling, where it goes first.
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
        ratio = _yarn_mscale(factor)
        if "mscale" in scaling and "mscale_all_dim" in scaling:
            mscale, mscale_all_dim = scaling.get_float("mscale"), scaling.get_float("mscale_all_dim")
            ratio = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
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


def _read_rope_type(scaling: HFConfigReader, is_phi3: bool) -> str:
    rope_type = scaling.get_str("rope_type", scaling.get_str("type", "default"))
    # Early Phi-3 checkpoints call it so; elsewhere yarn is yarn, whatever stands beside it.
    if rope_type == "su" or (rope_type == "yarn" and is_phi3):
        rope_type = "longrope"
    if rope_type not in ROPE_TYPES:
        raise ConfigError(
            f"config.json: rope scaling {rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}"
        )
    return rope_type


def _yarn_mscale(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
