# SPDX-License-Identifier: Apache-2.0
"""Rope: the numbers of a checkpoint's rotary positions, in either dialect of transformers. Angles come from rotary.py.

transformers 5 writes one object, `rope_parameters`; earlier ones `rope_theta` beside `rope_scaling`, and Phi-3 some of
its numbers beside that.
"""

import math
from dataclasses import dataclass
from typing import Self

from quire_spec.config_json import ConfigJson
from quire_spec.errors import ConfigError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class Rope:
    """Which part of each head is rotated, by which angles."""

    kind: str
    """One of KINDS."""
    theta: float
    dim: int
    """Leading elements of each head that are rotated; the rest passes."""
    factor: float = 1.0
    """How far contexts are stretched. `dynamic` does so past max_position_embeddings only, where nothing is served."""
    trained_length: int = 0
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
    def switch(self) -> int | None:
        """Tokens up to which a sequence has one set of angles, and beyond which it has another, for all its tokens."""
        return self.trained_length if self.kind == "longrope" else None

    @classmethod
    def read(cls, config: ConfigJson, head_dim: int, max_positions: int, *, partial: bool) -> Self:
        """Read config.json.

        Args:
            head_dim: elements of a head.
            max_positions: max_position_embeddings.
            partial: whether this family knows `partial_rotary_factor`.

        Raises:
            ConfigError: the scaling is not supported, or a number is missing or wrong.
        """
        scaling = config.section("rope_scaling", "rope_parameters")
        if "full_attention" in scaling or "sliding_attention" in scaling:
            raise ConfigError("config.json: rope_parameters: one rope for each layer type is not supported")
        kind = _kind(scaling, phi=partial)
        theta = scaling.number("rope_theta", config.number("rope_theta", 10000.0))
        if theta <= 1:
            raise config.error("rope_theta", theta, "more than 1")
        share = scaling.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
        if not partial and kind != "default" and share != 1:
            raise config.error("partial_rotary_factor", share, f"supported beside rope scaling {kind!r} in this family")
        dim = int(head_dim * share) if partial else head_dim
        if dim % 2 or not 0 < dim <= head_dim:
            raise ConfigError(f"config.json: {dim} of head_dim {head_dim} elements rotate; that is not an even part")
        if kind == "default":
            return cls(kind, theta, dim)
        if kind in ("linear", "dynamic"):
            return cls(kind, theta, dim, factor=scaling.number("factor"))
        # Phi-3 has it beside the scaling, where it goes first.
        trained = config.integer(
            "original_max_position_embeddings",
            scaling.integer("original_max_position_embeddings", max_positions),
        )
        factor = scaling.number("factor", None if kind == "llama3" else max_positions / trained)
        reader = {"llama3": cls._llama3, "yarn": cls._yarn, "longrope": cls._longrope}[kind]
        return reader(scaling, theta, dim, factor, trained)

    @classmethod
    def _llama3(cls, scaling: ConfigJson, theta: float, dim: int, factor: float, trained: int) -> Self:
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if high <= low:
            raise scaling.error("high_freq_factor", high, f"more than low_freq_factor {low}")
        return cls("llama3", theta, dim, factor, trained, low_freq_factor=low, high_freq_factor=high)

    @classmethod
    def _yarn(cls, scaling: ConfigJson, theta: float, dim: int, factor: float, trained: int) -> Self:
        ratio = _attention_scale(factor)
        if "mscale" in scaling and "mscale_all_dim" in scaling:
            wide, narrow = scaling.number("mscale"), scaling.number("mscale_all_dim")
            ratio = _attention_scale(factor, wide) / _attention_scale(factor, narrow)
        return cls(
            "yarn",
            theta,
            dim,
            factor,
            trained,
            attention_factor=scaling.number("attention_factor", ratio),
            beta_fast=scaling.number("beta_fast", 32.0),
            beta_slow=scaling.number("beta_slow", 1.0),
            truncate=scaling.flag("truncate", True),
        )

    @classmethod
    def _longrope(cls, scaling: ConfigJson, theta: float, dim: int, factor: float, trained: int) -> Self:
        if trained == 1:
            raise scaling.error("original_max_position_embeddings", trained, "more than 1")
        short, long = scaling.numbers("short_factor"), scaling.numbers("long_factor")
        for key, values in (("short_factor", short), ("long_factor", long)):
            if len(values) != dim // 2:
                raise scaling.error(key, list(values), f"{dim // 2} numbers, one for each rotated pair")
        ratio = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
        attention = scaling.number("attention_factor", ratio)
        return cls("longrope", theta, dim, factor, trained, attention, short_factor=short, long_factor=long)


def _kind(scaling: ConfigJson, phi: bool) -> str:
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    # Early Phi-3 checkpoints call it so; elsewhere yarn is yarn, whatever stands beside it.
    if kind == "su" or (kind == "yarn" and phi):
        kind = "longrope"
    if kind not in KINDS:
        raise ConfigError(f"config.json: rope scaling {kind!r} is not supported; supported are {', '.join(KINDS)}")
    return kind


def _attention_scale(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
