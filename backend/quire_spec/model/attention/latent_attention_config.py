# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (MLA) of DeepSeek and models with its layers.

The KV cache contains one latent vector for each token, from which a projection computes the keys and values of all
heads. A part of each key is rotated, and is the same for all heads.

Source: DeepSeek-AI, DeepSeek-V2, 2024.
"""

from dataclasses import dataclass
from typing import Self

from quire_spec.model.hf_config import HFConfigReader
from quire_spec.model.rope_config import yarn_mscale


@dataclass(frozen=True, slots=True)
class LatentAttentionConfig:
    """Sizes of latent attention."""

    query_rank: int
    """Number of elements of the latent vector of the queries; 0 if queries have none."""
    kv_rank: int
    """Number of elements of the latent vector of keys and values."""
    plain_dim: int
    """Number of elements of a key of a head that are not rotated."""
    rotary_dim: int
    """Number of elements of a key that are rotated."""
    value_dim: int
    """Number of elements of a value of a head."""
    is_interleaved: bool
    """Whether element 2 * i is rotated with element 2 * i + 1. Otherwise, it is rotated as in Llama."""
    score_factor: float
    """Attention scores are also multiplied by this factor, which extends the context (YaRN)."""

    @property
    def row_size(self) -> int:
        """Number of elements that the KV cache has for a token: the latent vector and the rotated part of the keys."""
        return self.kv_rank + self.rotary_dim

    @property
    def key_dim(self) -> int:
        """Number of elements of a key of a head."""
        return self.plain_dim + self.rotary_dim

    @classmethod
    def from_hf_config(cls, config: HFConfigReader) -> Self:
        """Read config.json. Raises ConfigError if a value is missing or wrong."""
        rotary_dim = config.get_int("qk_rope_head_dim")
        if rotary_dim % 2:
            raise config.error("qk_rope_head_dim", rotary_dim, "an even number")
        scaling, factor = config.get_section("rope_scaling", "rope_parameters"), 1.0
        if (
            scaling.get_str("rope_type", scaling.get_str("type", "default")) != "default"
            and "mscale_all_dim" in scaling
        ):
            factor = yarn_mscale(scaling.get_float("factor"), scaling.get_float("mscale_all_dim")) ** 2
        return cls(
            query_rank=config.get_int("q_lora_rank") if "q_lora_rank" in config else 0,
            kv_rank=config.get_int("kv_lora_rank"),
            plain_dim=config.get_int("qk_nope_head_dim"),
            rotary_dim=rotary_dim,
            value_dim=config.get_int("v_head_dim"),
            is_interleaved=config.get_bool("rope_interleave", True),
            score_factor=factor,
        )
