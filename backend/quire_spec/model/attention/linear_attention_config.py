# SPDX-License-Identifier: Apache-2.0
"""Settings of layers with linear attention (Gated DeltaNet)."""

from dataclasses import dataclass, replace
from typing import Self

from quire_spec.model.attention.state_config import MAX_HEAD_DIM, MAX_KERNEL_SIZE, StateConfig, shard_range
from quire_spec.model.hf_config import HFConfigReader


@dataclass(frozen=True, slots=True)
class LinearAttentionConfig(StateConfig):
    """Gated DeltaNet: a short convolution over the projected queries, keys and values, followed by a recurrence with a
    matrix [key_head_dim, value_head_dim] for each value head."""

    num_key_heads: int
    num_value_heads: int
    """A multiple of num_key_heads. Each key head serves several adjacent value heads."""
    key_head_dim: int
    value_head_dim: int

    @property
    def key_size(self) -> int:
        """Number of features of all key heads."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Number of features of all value heads."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_size(self) -> int:
        """Queries, keys and values; see StateConfig.conv_size."""
        return 2 * self.key_size + self.value_size

    @property
    def recurrence_shape(self) -> tuple[int, ...]:
        """See StateConfig.recurrence_shape."""
        return self.num_value_heads, self.key_head_dim, self.value_head_dim

    @property
    def input_size(self) -> int:
        """The input of the convolution, the learning rates and the decays; see StateConfig.input_size."""
        return self.conv_size + 2 * self.num_value_heads

    @property
    def feature_sizes(self) -> dict[str, int]:
        """See StateConfig.feature_sizes."""
        return {
            "state_qkv": self.conv_size,
            "state_qkvz": self.conv_size + self.value_size,
            "state_values": self.value_size,
            "state_heads": self.num_value_heads,
            "state_head_pairs": 2 * self.num_value_heads,
        }

    def feature_ranges(self, kind: str, rank: int, size: int) -> tuple[range, ...]:
        """See StateConfig.feature_ranges."""
        if kind == "state_qkv":
            keys, values = self.key_size, self.value_size
            offsets = ((keys, 0), (keys, keys), (values, 2 * keys))
            return tuple(shard_range(features, rank, size, offset) for features, offset in offsets)
        # The features of each key head are adjacent in all other kinds.
        return (shard_range(self.feature_sizes[kind], rank, size),)

    def shard(self, size: int) -> Self:
        """See StateConfig.shard."""
        heads, values = self.num_key_heads // size, self.num_value_heads // size
        return replace(self, num_key_heads=heads, num_value_heads=values)

    def unsupported_reason(self, size: int) -> str:
        """See StateConfig.unsupported_reason."""
        if self.num_key_heads % size:
            return f"the number of key heads of linear attention, {self.num_key_heads}, is not a multiple of {size}"
        return ""

    @classmethod
    def from_hf_config(cls, config: HFConfigReader, layers: tuple[bool, ...], attention: tuple[bool, ...]) -> Self:
        """See StateConfig.from_hf_config."""
        if (activation := config.get_str("hidden_act", "silu")) not in ("silu", "swish"):
            raise config.error("hidden_act", activation, "silu in a model with linear attention")
        key_heads, value_heads = config.get_int("linear_num_key_heads"), config.get_int("linear_num_value_heads")
        if value_heads % key_heads:
            raise config.error(
                "linear_num_value_heads", value_heads, f"a multiple of linear_num_key_heads, which is {key_heads}"
            )
        return cls(
            layers=layers,
            attention_layers=attention,
            kernel_size=config.get_int("linear_conv_kernel_dim", maximum=MAX_KERNEL_SIZE, minimum=2),
            num_key_heads=key_heads,
            num_value_heads=value_heads,
            key_head_dim=config.get_int("linear_key_head_dim", maximum=MAX_HEAD_DIM),
            value_head_dim=config.get_int("linear_value_head_dim", maximum=MAX_HEAD_DIM),
        )
